"""The check for GPUs can be run nowhere in these tests, but its steps can: on a CPU, with tiny towers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_so_in_one_line(gpu_check, capsys):
    assert gpu_check.main([]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "finds no CUDA device here" in said.err


def test_its_steps_run_and_find_nothing_on_a_cpu(gpu_check, capsys):
    assert gpu_check.main(["--rehearse", "--only", "copies,towers"]) == 0

    said = capsys.readouterr().out
    assert "0 say NO" in said
    for part in ("staged pixels are the pixels", "with graphs: mean difference", "tokens/s"):
        assert part in said


def test_a_section_that_fails_is_a_line_and_the_others_go_on(gpu_check, capsys, monkeypatch):
    def broken(check, folder):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(gpu_check.SECTIONS, "rows", broken)

    assert gpu_check.main(["--rehearse", "--only", "rows,copies"]) == 1

    said = capsys.readouterr().out
    assert "out of luck" in said
    assert "1 say NO" in said
    assert "rows into pinned memory" in said
