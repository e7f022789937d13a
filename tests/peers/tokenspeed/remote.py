"""The caller's side of `serve`: a TokenSpeed endpoint in a process of its own."""

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.warm.client import WarmPython

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("tokenspeed", "mooncake", "compressed_tensors", "loguru", "pybase64", "starlette", "smg")


def missing_packages() -> list[str]:
    """What requirements/peers.txt and the worker extra would install; empty when all is there."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which HTTP goes straight to its address: everything here is on loopback."""
    return {name: value for name, value in environ.items() if not name.lower().endswith("_proxy")}


class PeerError(RuntimeError):
    """The endpoint answered with an error, or died."""


class Remote:
    """``Remote(warm_python, "prefill", log).call("ask", address=..., room=7, ...)``.

    `start` and `finish` split a call in two; answers come in the order of the calls. Starting
    takes some seconds of imports: `ready` waits for them.
    """

    def __init__(self, warm: WarmPython, kind: str, log: Path, **params: object) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self.process = warm.popen(
                [sys.executable, "-m", "tests.peers.tokenspeed.serve", kind, json.dumps(params)],
                environ=without_proxies(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _answer(self, timeout_s: float) -> Any:
        try:
            message = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"no answer within {timeout_s} s\n{self.log_tail()}") from None
        if message is None:
            raise PeerError(f"the endpoint ended\n{self.log_tail()}")
        if "error" in message:
            raise PeerError(message["error"])
        return message["ok"]

    def ready(self, timeout_s: float = 90.0) -> Self:
        if not self._is_ready:
            self._answer(timeout_s)
            self._is_ready = True
        return self

    def start(self, method: str, **params: object) -> None:
        self.ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"method": method, "params": params}) + "\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float = 120.0) -> Any:
        return self._answer(timeout_s)

    def call(self, method: str, **params: object) -> Any:
        self.start(method, **params)
        return self.finish()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self.process.wait(10)

    def log_tail(self, n_bytes: int = 4000) -> str:
        return self._log.read_bytes()[-n_bytes:].decode("utf-8", "replace")

    def close(self) -> None:
        self.kill()
        self._reader.join(10)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
