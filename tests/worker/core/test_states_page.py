"""docs/states.md shows the rules as they are."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def draw_states():
    spec = importlib.util.spec_from_file_location("draw_states", DOCS / "draw_states.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(draw_states):
    text = draw_states.PAGE.read_text(encoding="utf-8")
    assert text == draw_states.drawn(text), "run python docs/draw_states.py"


def test_every_block_is_drawn(draw_states):
    text = draw_states.PAGE.read_text(encoding="utf-8")
    assert {m[2] for m in draw_states.BLOCK.finditer(text)} == set(draw_states.DRAWN)


def test_a_page_that_is_behind_is_noticed_and_mended(draw_states, tmp_path, monkeypatch, capsys):
    page = tmp_path / "states.md"
    page.write_text("<!-- drawn: table -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(draw_states, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["draw_states.py", "--check"])
    assert draw_states.main() == 1
    assert "not up to date" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["draw_states.py"])
    assert draw_states.main() == 0
    assert "| QUEUED | stay |" in page.read_text()
