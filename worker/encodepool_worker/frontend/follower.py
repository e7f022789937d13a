"""The frontend of a pod without rank 0: probes and metrics about the pod's own ranks, nothing else.

Requests, the route table and every control socket are rank 0's. This pod is ready once all its
ranks have joined the group; afterwards each must report every second.
"""

import asyncio
import time
from pathlib import Path

import zmq

from ..errors import WireError
from ..logs import get_logger
from ..settings import Settings
from ..wire import intake
from .counts import Samples, exposition, from_loop
from .health import GOOD, Health, Phase, Report
from .http import HttpServer
from .probes import probes_app

TICK_S = 0.25

CATCH_UP_S = 0.1
"""Before a silent rank is blamed."""


class _Rank:
    """What one rank has reported."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", run_dir: Path, rank: int) -> None:
        self.rank = rank
        self.health = Health(n_ranks=1)
        self._drained = False
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{run_dir / intake.back_socket(rank)}")

    def catch_up(self) -> None:
        """Read what has arrived; where that is old, also what is still on its way: a process that was
        held up itself must not take its own delay for the rank's silence."""
        self._read()
        give_up_s = time.monotonic() + CATCH_UP_S
        while self._wanted and not self.health.alive(now_s := time.monotonic()).good and now_s < give_up_s:
            self._socket.poll(int((give_up_s - now_s) * 1000) + 1)
            self._read()

    @property
    def _wanted(self) -> bool:
        """Elsewhere nothing hangs on it, and every answer would hold up all others."""
        return self.health.phase is Phase.READY

    def _read(self) -> None:
        while True:
            try:
                messages = intake.decode_back(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                get_logger().error("a message of a rank cannot be read", rank=self.rank, problem=str(error))
                continue
            for message in messages:
                if isinstance(message, intake.State):
                    self.health.heard(message)
                elif isinstance(message, intake.Drained):
                    self._drained = True

    def has_ended(self, now_s: float) -> bool:
        """Rank 0 let it go, or it never began, or it is silent: the supervisor's business."""
        return self._drained or self.health.state is None or not self.health.alive(now_s).good

    def alive(self, now_s: float) -> Report:
        return _named(self.rank, self.health.alive(now_s))

    def ready(self, now_s: float) -> Report:
        state = self.health.state
        if state is None or not state.routed:
            return Report(False, f"rank {self.rank} has not joined the group yet")
        return _named(self.rank, self.health.ready(now_s, n_routed=1, serving=True))

    def close(self) -> None:
        self._socket.close()


class FollowerFrontend:
    """Made and used on one event loop: ``start``, then ``run`` until told to stop."""

    def __init__(self, settings: Settings) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        run_dir = Path(settings.run_dir)
        self._ranks = [_Rank(self._context, run_dir, rank) for rank in settings.own_ranks]
        app = probes_app(alive=self.alive, ready=self.ready, metrics=self.metrics)
        self._probes = HttpServer(app, settings.host, settings.metrics_port, "probes and metrics")

    async def start(self) -> int:
        """The port of the probes. Raises ConfigError."""
        port = await self._probes.start()
        get_logger().info("listening", metrics_port=port)
        return port

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set and the ranks have ended, which they do when rank 0 says so.

        Until then the probes are answered: whoever finds this pod dead ends it in the middle of the drain.
        """
        told = ""
        while not stop.is_set():
            report = self.ready()
            if report.reason != told:
                told = report.reason
                get_logger().info("readiness", good=report.good, reason=told)
            try:
                await asyncio.wait_for(stop.wait(), TICK_S)
            except TimeoutError:
                continue
        for rank in self._ranks:
            rank.health.drain("the worker is draining")
        while not self._have_ended():
            await asyncio.sleep(TICK_S)
        await self._probes.stop()
        for rank in self._ranks:
            rank.close()
        self._context.term()

    def _have_ended(self) -> bool:
        now_s = self._now_s()
        return all(rank.has_ended(now_s) for rank in self._ranks)

    def alive(self) -> Report:
        now_s = self._now_s()
        return self._first_bad([rank.alive(now_s) for rank in self._ranks])

    def ready(self) -> Report:
        now_s = self._now_s()
        return self._first_bad([rank.ready(now_s) for rank in self._ranks])

    def metrics(self) -> bytes:
        """Sums over the pod's ranks."""
        ready = self.ready().good
        total: dict[str, dict[tuple[str, ...], float]] = {"encodepool_ready": {(): float(ready)}}
        for rank in self._ranks:
            state = rank.health.state
            own: Samples = from_loop(state.counters if state else {})
            for name, values in own.items():
                sums = total.setdefault(name, {})
                for labels, value in values.items():
                    sums[labels] = sums.get(labels, 0.0) + value
        return exposition(total)

    def _now_s(self) -> float:
        for rank in self._ranks:
            rank.catch_up()
        return time.monotonic()

    @staticmethod
    def _first_bad(reports: list[Report]) -> Report:
        return next((report for report in reports if not report.good), GOOD)


def _named(rank: int, report: Report) -> Report:
    return report if report.good else Report(False, f"rank {rank}: {report.reason}")
