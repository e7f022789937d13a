"""A program's first process as process 1 of a container, for which the kernel drops unhandled signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]

AFTER_IMPORT = "import {module}; print('imported', flush=True); import sys; sys.stdin.read()"


@pytest.fixture
def as_process_1():
    """``as_process_1(module)``: a Python that is process 1 and has imported so much; its outer number."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no PID namespaces")
    started = []

    def start(module):
        argv = [*NAMESPACES, "--kill-child", sys.executable, "-c", AFTER_IMPORT.format(module=module)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"imported\n"
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return process, int(first)

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("module", ["encodepool_worker.cli", "encodepool_operator.cli"])
def test_sigterm_counts_before_the_command_line_is_even_read(as_process_1, module):
    process, first = as_process_1(module)
    os.kill(first, signal.SIGTERM)
    assert process.wait(20) == 143


def test_without_a_handler_it_is_lost(as_process_1):
    """What the first test would be without the rule: this is the kernel's behaviour, not Python's."""
    process, first = as_process_1("signal")
    os.kill(first, signal.SIGTERM)
    process.stdin.close()  # the program's end, had it not been told to stop
    assert process.wait(20) == 0
