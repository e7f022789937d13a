"""Programs started by a benchmark: answered line by line, and ended by handle."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_S = 90.0


class Program:
    """``python -m MODULE ARGUMENTS``, whose lines are JSON. Its standard error is shown when it fails."""

    def __init__(self, module: str, *arguments: str) -> None:
        # Not a pipe, which would have to be read; gone with the last handle of it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(),
        )
        self._module = module
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout

    def answer(self, timeout_s: float = START_S) -> Any:
        """The next line. Raises RuntimeError when none comes."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            raise RuntimeError(f"{self._module} said nothing for {timeout_s:g} s\n{self.errors()}")
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self.process.wait(10)}\n{self.errors()}")
        return json.loads(line)

    def errors(self, nbytes: int = 4000) -> str:
        """The end of what it has written to standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), nbytes, max(0, size - nbytes)).decode("utf-8", "replace")

    def tell(self, value: object) -> None:
        self._in.write(json.dumps(value).encode() + b"\n")
        self._in.flush()

    def ask(self, value: object) -> Any:
        self.tell(value)
        return self.answer()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        self._in.close()
        self._out.close()
        self._errors.close()


def environment() -> dict[str, str]:
    """One thread a library, and no proxy: everything is on this machine."""
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return plain | {"OMP_NUM_THREADS": "1"}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Raises RuntimeError when it does not come true in time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)
