"""The caller's side of ``benchmarks.reference``."""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from benchmarks.programs import Program
from tests.peers.tokenspeed.remote import missing_packages


class Reference:
    """One of its processes. Raises RuntimeError when the reference is not installed.

    Starting takes seconds of imports, which the first question waits for: so several start at once.
    """

    def __init__(self, stack: ExitStack, kind: str, **parameters: Any) -> None:
        if missing := missing_packages():
            raise RuntimeError(f"not installed (requirements/peers.txt): {', '.join(missing)}")
        self.program = Program("benchmarks.reference", kind, json.dumps(parameters))
        stack.callback(self.program.close)

    @cached_property
    def facts(self) -> Any:
        """What it says when it is up."""
        return self.program.answer()

    def start(self, method: str, **parameters: Any) -> None:
        assert self.facts is not None
        self.program.tell([method, parameters])

    def finish(self) -> Any:
        return self.program.answer()

    def ask(self, method: str, **parameters: Any) -> Any:
        self.start(method, **parameters)
        return self.finish()


class ReferenceChannel:
    """Its channel between frontend and loop, with nothing behind it."""

    def __init__(self, stack: ExitStack) -> None:
        endpoint = _endpoint(stack)
        self._gateway = Reference(stack, "gateway", endpoint=endpoint, hidden=1)
        self._sink = Reference(stack, "sink", endpoint=endpoint)

    def figures(self, shape: Sequence[int], count: int) -> tuple[float, float]:
        """Messages a second with bfloat16 pixels of that shape, and the CPU seconds of both processes."""
        began_s = time.perf_counter()
        self._sink.start("take", count=count)
        here_s = self._gateway.ask("send", shape=shape, count=count)
        there_s = self._sink.finish()
        return count / (time.perf_counter() - began_s), here_s + there_s


class ReferenceLoop:
    """Its encode loop, and what hands items over to it.

    Without work it looks for some 2000 times a second: so it is stopped while ours is measured.
    """

    def __init__(self, stack: ExitStack, *, transport: str, hidden: int, max_rows: int) -> None:
        endpoint = _endpoint(stack)
        self._gateway = Reference(stack, "gateway", endpoint=endpoint, hidden=hidden)
        self._loop = Reference(
            stack, "loop", endpoint=endpoint, transport=transport, hidden=hidden, max_rows=max_rows
        )
        self._gateway.ask("connect", port=self._loop.facts["port"])
        self._loop.program.freeze()

    def ask(self, method: str, **parameters: Any) -> Any:
        self._loop.program.thaw()
        answer = self._gateway.ask(method, **parameters)
        self._loop.program.freeze()
        return answer


def _endpoint(stack: ExitStack) -> str:
    folder = tempfile.mkdtemp(prefix="encodepool-bench-")
    stack.callback(shutil.rmtree, folder)
    return f"ipc://{folder}/in"
