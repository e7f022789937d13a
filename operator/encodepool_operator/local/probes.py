"""The kubelet's part: HTTP probes, their periods, and what a number of failures means.

Startup every 2 s until it passes or ``startupDeadlineSeconds`` are over; then readiness and
liveness every 2 s, timeout 1 s, three failures (contract, "Times"). A probe that fails does not
change readiness at once; three in a row do, one success brings it back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

PERIOD_S = 2.0
TIMEOUT_S = 1.0
FAILURES = 3
"""Failures in a row that count. With the period and timeout above: a frozen worker is found in at
most 2 + 2 + 2 + 1 = 7 s."""


async def http_ok(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> bool:
    """One probe: GET answers with a status in [200, 400) in time. Never raises but CancelledError.

    Only the status line is read, as a probe's body has no meaning.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=4096)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            parts = (await reader.readline()).split(None, 2)
    except (OSError, TimeoutError, ValueError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return (
        len(parts) >= 2
        and parts[0].startswith(b"HTTP/")
        and parts[1].isdigit()
        and 200 <= int(parts[1]) < 400
    )


@dataclass(slots=True)
class ProbeState:
    """What the probes of one process say. ``dead`` is final and says which probe gave it up."""

    started: bool = False
    ready: bool = False
    dead: str = ""


class Prober:
    """Probes one process until it is cancelled or found dead.

    ``state`` is changed in place and ``changed`` is called after each change. ``frozen`` fails every
    probe: the first process of a group answers none itself, and the others need it. A process that
    was started and ready before (adopted from a controller that died) begins as such: it is judged
    by its next failures, not withdrawn for a restart of its controller.
    """

    def __init__(
        self,
        host: str,
        port: int,
        state: ProbeState,
        changed: Callable[[], None],
        *,
        frozen: Callable[[], bool] = lambda: False,
        startup_left_s: float,
        period_s: float = PERIOD_S,
    ) -> None:
        self._host = host
        self._port = port
        self._state = state
        self._changed = changed
        self._frozen = frozen
        self._startup_left_s = startup_left_s
        self._period_s = period_s

    async def run(self) -> None:
        if not self._state.started and not await self._startup():
            return
        # Readiness is asked at once: a worker is listed as soon as it can be.
        async with asyncio.TaskGroup() as both:
            readiness = both.create_task(self._readiness())
            both.create_task(self._liveness(readiness))

    async def _startup(self) -> bool:
        """Wait for the first success of /livez; False (and ``dead``) after the deadline."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._startup_left_s
        while True:
            began_s = loop.time()
            if await self._ask("/livez"):
                self._set(started=True)
                return True
            if loop.time() >= deadline_s:
                self._set(dead="startup probe failed until startupDeadlineSeconds")
                return False
            await self._rest(began_s)

    async def _readiness(self) -> None:
        failures = 0
        while True:
            began_s = asyncio.get_running_loop().time()
            if await self._ask("/readyz"):
                failures = 0
                self._set(ready=True)
            else:
                failures += 1
                if failures >= FAILURES:
                    self._set(ready=False)
            await self._rest(began_s)

    async def _liveness(self, readiness: asyncio.Task[None]) -> None:
        failures = 0
        while True:
            began_s = asyncio.get_running_loop().time()
            failures = 0 if await self._ask("/livez") else failures + 1
            if failures >= FAILURES:
                break
            await self._rest(began_s)
        readiness.cancel()
        self._set(ready=False, dead=f"liveness probe failed {FAILURES} times")

    async def _ask(self, path: str) -> bool:
        return not self._frozen() and await http_ok(self._host, self._port, path)

    async def _rest(self, began_s: float) -> None:
        """Wait out the period that began at ``began_s``, however long the probe took."""
        left_s = began_s + self._period_s - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, left_s))

    def _set(self, *, started: bool | None = None, ready: bool | None = None, dead: str = "") -> None:
        state = self._state
        before = (state.started, state.ready, state.dead)
        if started is not None:
            state.started = started
        if ready is not None:
            state.ready = ready
        if dead:
            state.dead = dead
        if before != (state.started, state.ready, state.dead):
            self._changed()
