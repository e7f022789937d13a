"""``encodepool-worker serve``: help that teaches, all problems at once, and its exit codes."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from encodepool_worker.cli.main import main
from encodepool_worker.cli.serve import serve
from encodepool_worker.settings import GROUPS, TABLE


@pytest.fixture
def invoke():
    return lambda *argv, **environ: CliRunner().invoke(serve, argv, env=environ, terminal_width=200)


def test_help_shows_every_setting_with_variable_and_default_and_an_example(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    for row in TABLE:
        if row.group == "internal":
            assert f"{row.flag} " not in text
            continue
        assert f"{row.flag} " in text
        assert f"[{row.variable}" in text
        if row.default != "":
            shown = f"{row.default:g}" if isinstance(row.default, float) else row.default
            assert f"{row.variable}; default {shown}]" in text
    for group, title in GROUPS.items():
        assert (f"{title}:" in text) == (group != "internal")
    assert "Example" in text
    assert "encodepool-worker serve --model" in text


def test_wrong_usage_names_all_problems_a_line_each_and_exits_with_2(invoke):
    result = invoke("--grpc-port", "x", "--data-parallel-size", "2", ENCODEPOOL_DEVICE="tpu")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("encodepool-worker: ") for line in lines)
    assert "raise replicas" in result.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "No such option '--no-such-flag'. (see `encodepool-worker --help`)"),
        (["serv"], "No such command 'serv'. (see `encodepool-worker --help`)"),
        (["serve", "--bad"], "No such option '--bad'. (see `encodepool-worker serve --help`)"),
        (["rows"], "Missing argument 'IMAGE...'. (see `encodepool-worker rows --help`)"),
        (
            ["rows", "x.png", "--model", "m", "--out", "/none/x.npz"],
            "/none is not a folder (see `encodepool-worker rows --help`)",
        ),
    ],
)
def test_wrong_usage_of_any_command_is_one_line_with_a_hint(argv, says):
    result = CliRunner().invoke(main, argv, prog_name="encodepool-worker")
    assert (result.exit_code, result.output) == (2, f"encodepool-worker: {says}\n")


def test_help_and_wrong_usage_do_not_load_what_serving_needs():
    """Typing a flag wrong should not cost the seconds that torch takes to import."""
    code = (
        "import sys\n"
        "from encodepool_worker.cli.serve import serve\n"
        "try:\n    serve(['--seed', 'x'])\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "heavy = {'torch', 'grpc', 'zmq', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
