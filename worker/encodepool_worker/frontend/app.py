"""The frontend as a whole: every server of this process around one account and one link to rank 0."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..logs import get_logger
from ..settings import Settings
from ..wire import intake
from .admission import Account, Limits
from .back import LoopLink
from .bootstrap import RouteTable, bootstrap_app
from .counts import Counts, Samples, exposition, from_loop
from .drain import MARGIN_S, drain
from .gate import Gate
from .grpc_server import GrpcServer
from .hashing import ContentKeys
from .health import Health, Phase, Report
from .http import HttpServer
from .model import ModelFacts
from .probes import probes_app
from .scheduler import SchedulerService
from .servicer import EncodeService

TICK_S = 0.25

CATCH_UP_S = 0.1
"""Before a silent loop is blamed: reports that came while this process itself was held up."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where this process listens, once it does."""

    grpc: int
    bootstrap: int
    metrics: int


class Frontend:
    """Made and used on one event loop: ``start``, then ``run`` until told to stop."""

    def __init__(self, settings: Settings, model: ModelFacts) -> None:
        self.settings = settings
        self.account = Account(Limits.within(settings.max_pixel_bytes))
        self.counts = Counts()
        self.health = Health(settings.tensor_parallel_size)
        self.routes = RouteTable(settings.tensor_parallel_size, settings.incarnation)
        self._gate = Gate(self.account)
        self._drained = asyncio.Event()
        self._link = LoopLink(Path(settings.run_dir), self._on_message)
        self._encode = EncodeService(
            gate=self._gate,
            link=self._link,
            spec=model.spec,
            keys=ContentKeys(
                model=model.name,
                revision=model.revision,
                spec=model.spec,
                preprocessing=model.preprocessing,
            ),
            counts=self.counts,
            serving=self.ready,
        )
        scheduler = SchedulerService(
            settings=settings,
            model=model,
            account=self.account,
            health=self.health,
            ready=self.ready,
            alive=self.alive,
        )
        self._grpc = GrpcServer(
            [self._encode.handler(), scheduler.handler()],
            settings.host,
            settings.grpc_port,
            self.account.limits.message_bytes,
        )
        self._bootstrap = HttpServer(
            bootstrap_app(self.routes), settings.host, settings.bootstrap_port, "bootstrap"
        )
        probes = probes_app(alive=self.alive, ready=self.ready, metrics=self.metrics)
        self._probes = HttpServer(probes, settings.host, settings.metrics_port, "probes and metrics")

    async def start(self) -> Ports:
        """Opens every port. Raises ConfigError naming the port that could not be had."""
        try:
            ports = Ports(
                metrics=await self._probes.start(),
                bootstrap=await self._bootstrap.start(),
                grpc=await self._grpc.start(),
            )
        except ConfigError:
            await self._close()
            raise
        get_logger().info(
            "listening",
            host=self.settings.host,
            grpc_port=ports.grpc,
            bootstrap_port=ports.bootstrap,
            metrics_port=ports.metrics,
        )
        return ports

    async def run(self, stop: asyncio.Event) -> bool:
        """Serves until ``stop`` is set, then drains. True if everything accepted was finished."""
        ticking = asyncio.get_running_loop().create_task(self._tick())
        try:
            await stop.wait()
            await self._grpc.set_health(False)
            finished = await drain(
                self.health,
                self._link,
                self._drained,
                drain_s=self.settings.drain_seconds,
                margin_s=self.settings.wind_down_s + MARGIN_S,
            )
            get_logger().info("drained" if finished else "the loop did not finish in time")
        finally:
            ticking.cancel()
            await self._close()
        return finished

    def ready(self) -> Report:
        """May the gateway send work? Looks at what the loop has sent until now."""
        self._catch_up()
        return self.health.ready(time.monotonic(), n_routed=self.routes.n_routed, serving=self._grpc.serving)

    def alive(self) -> Report:
        """Does the loop make progress?"""
        self._catch_up()
        return self.health.alive(time.monotonic())

    def metrics(self) -> bytes:
        """The text of /metrics."""
        ready = self.ready()
        state = self.health.state
        return exposition(
            self.counts.samples, self._gauges(ready), from_loop(state.counters if state else {})
        )

    def _catch_up(self) -> None:
        """Reads what has arrived; where readiness would be lost for good, also what is on its way.

        Only then: waiting here holds up everything else in this process.
        """
        self._link.read()
        if self.health.phase is not Phase.READY:
            return
        give_up_s = time.monotonic() + CATCH_UP_S
        while not self.health.alive(now_s := time.monotonic()).good and now_s < give_up_s:
            self._link.wait(give_up_s - now_s)
            self._link.read()

    def _gauges(self, ready: Report) -> Samples:
        now_s = time.monotonic()
        state = self.health.state
        values: dict[str, float | None] = {
            "encodepool_ready": float(ready.good),
            "encodepool_requests_waiting": self._gate.waiting,
            "encodepool_refusals_dropped_total": self._link.dropped,
            "encodepool_pixel_limit_bytes": self.account.limits.pixel_bytes,
            "encodepool_credit_tokens": self.account.queued_tokens,
            "encodepool_predicted_wait_seconds": state.predicted_wait_s if state else None,
            "encodepool_turn_age_seconds": self.health.turn_age_s(now_s),
            "encodepool_batch_age_seconds": self.health.batch_age_s(now_s),
            "encodepool_queue_items": state.queue_items if state else None,
            "encodepool_queue_tokens": state.queue_cost if state else None,
            "encodepool_tower_tokens_per_second": state.tokens_per_s if state else None,
        }
        samples: dict[str, dict[tuple[str, ...], float]] = {
            name: {(): value} for name, value in values.items() if value is not None
        }
        samples["encodepool_pixel_bytes"] = {
            ("reading",): self.account.reading_bytes,
            ("queued",): self.account.queued_bytes,
        }
        return samples

    def _on_message(self, message: intake.Credit | intake.State | intake.Drained) -> None:
        if isinstance(message, intake.State):
            self.health.heard(message)
        elif isinstance(message, intake.Credit):
            try:
                self.account.credit(message.seq)
            except KeyError:
                get_logger().error("a credit for a submission that is not queued", seq=message.seq)
            self._gate.refresh()
        else:
            self._drained.set()

    async def _tick(self) -> None:
        """Notices changes that no event announces: silence of the loop, above all."""
        told: tuple[Phase, str] | None = None
        while True:
            report = self.ready()
            now = (self.health.phase, report.reason)
            if told is None or told[0] is not now[0]:
                await self._grpc.set_health(report.good)
                get_logger().info("readiness", phase=now[0].value, reason=report.reason)
            told = now
            await asyncio.sleep(TICK_S)

    async def _close(self) -> None:
        await self._grpc.stop()
        await self._encode.close()
        await self._bootstrap.stop()
        await self._probes.stop()
        self._link.close()
