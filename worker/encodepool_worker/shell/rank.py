"""Rank 0 put together: tower, store, sender, sockets and the loop that owns them."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zmq

from ..core.events import WriteFailed, WriteSettled, Written
from ..core.pipeline import Pipeline, PipelineLimits
from ..errors import ConfigError
from ..logs import get_logger
from ..settings import Settings
from ..towers.base import VisionTower
from ..towers.parallel import TensorParallel
from ..transport.base import Done, Engine, Failed, SenderEvent, Settled
from ..transport.choose import make_engine
from ..transport.sender import Sender
from ..transport.sender_types import SenderLimits
from ..wire.bootstrap import RankRegistration
from ..wire.ranks import Hello
from .control_socket import ControlSocket
from .inbox import Inbox
from .intake_socket import BackChannel, IntakeSocket
from .loop import Loop
from .metrics import Metrics, sender_samples
from .mover import Mover
from .pixels import PixelTable
from .rank_server import RankServer
from .ranks import Answers, Ranks
from .registration import Registrar
from .status_sender import StatusSender
from .store_memory import StoreMemory
from .threads import Crash
from .tiers import TierPlan
from .tower_runner import TowerRunner

SENDER_CLOSE_S = 5.0
"""For threads that are held up: after a drain only probes of frozen receivers are, for a minute each."""


class Rank:
    """Rank 0, ready to run. Raises ConfigError or TransportError where something cannot be had.

    ``tiers`` are the store's, one or two (``plan_tiers``). With ``parallel`` there are more ranks:
    they find ``server`` with its ``address`` and ``token``.
    ``on_routed`` is called once the bootstrap server lists every rank, from another thread;
    ``crash`` when a thread cannot go on. ``close`` ends every thread.
    """

    def __init__(
        self,
        settings: Settings,
        tower: VisionTower,
        make_engine: Callable[[], Engine],
        *,
        tiers: Sequence[TierPlan],
        crash: Crash,
        parallel: TensorParallel | None = None,
        on_routed: Callable[[], None] = lambda: None,
    ) -> None:
        run_dir = Path(settings.run_dir)
        self._settings = settings
        self._crash = crash
        self._on_routed = on_routed
        self.metrics = Metrics()
        self.inbox = Inbox(crash)
        self.pixels = PixelTable()
        self.memory = StoreMemory(tiers)
        self.pipeline = Pipeline(limits_of(settings, *self.memory.sizes))
        self._answers = Answers(settings.tensor_parallel_size, self.inbox.answer)
        answer = partial(self._answers.add, 0)
        limits = SenderLimits.for_rdma() if settings.transfer_protocol == "rdma" else SenderLimits()
        self._sender = Sender(make_engine, self.memory.regions, self._answer, limits)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._tower = TowerRunner(
            tower,
            self.pixels,
            self.memory,
            answer,
            self.metrics,
            crash,
            parallel,
        )
        self._mover = Mover(self.memory, answer, crash, max_orders=self.pipeline.limits.max_demotions)
        self._statuses = StatusSender(self.metrics)
        self._registrars: list[Registrar] = []
        self._n_routed = 0
        self._routing = threading.Lock()
        self.server = self._open_server(tower) if settings.tensor_parallel_size > 1 else None
        self._back = BackChannel(self._context, run_dir)
        self.loop = Loop(
            self.pipeline,
            self.inbox,
            back=self._back,
            ranks=Ranks(
                self._answers,
                tower=self._tower,
                mover=self._mover,
                sender=self._sender,
                pixels=self.pixels,
                server=self.server,
            ),
            statuses=self._statuses,
            pixels=self.pixels,
            metrics=self.metrics,
            tiers=self.memory.names,
            drain_s=settings.drain_seconds,
            more_samples=self._sender_samples,
        )
        self._controls = [self._open_control(rank) for rank in range(settings.tensor_parallel_size)]
        self._intake = IntakeSocket(
            self._context,
            run_dir,
            spec=tower.spec,
            pixels=self.pixels,
            metrics=self.metrics,
        )
        self.inbox.listen(self._intake)
        for control in self._controls:
            self.inbox.listen(control)
        ports = [control.port for control in self._controls]
        get_logger().info("listening for receivers", host=settings.host, ports=ports)
        self._register(0)

    def say_farewell(self) -> None:
        """Instead of ``close``, for a process that ends at once: what receivers were told goes out."""
        self._statuses.close()

    def close(self) -> bool:
        """In the order of the flow: nothing comes in, nothing runs, what was decided goes out.

        False when a batch, a copy or a write could not be stopped: then the store's memory is still in use.
        """
        for registrar in self._registrars:
            registrar.close()
        self._intake.close()
        for control in self._controls:
            control.close()
        # A batch that nobody wants any more may still run; it needs the other ranks to its end.
        stopped = self._tower.close()
        if self.server is not None:
            self.server.close()
        stopped = self._mover.close() and stopped
        stopped = self._sender.close(SENDER_CLOSE_S) and stopped
        self._statuses.close()
        self._back.close()
        self._context.term()
        if stopped:
            self.inbox.close()
            self.memory.close()
        return stopped

    def _open_server(self, tower: VisionTower) -> RankServer:
        settings = self._settings
        expected = Hello(
            rank=0,
            size=settings.tensor_parallel_size,
            incarnation=settings.incarnation,
            tiers=self.memory.sizes,
            tower=tower.spec,
        )
        try:
            return RankServer(
                settings.host,
                expected,
                answer=self._answers.add,
                joined=self._register,
                metrics=self.metrics,
                crash=self._crash,
            )
        except OSError as error:
            raise _not_ours(settings.host, error) from error

    def _open_control(self, rank: int) -> ControlSocket:
        """Receivers of every rank speak to this process, each rank's to a port of its own."""
        if rank == 0 or self.server is None:
            registered = self._sender.registered
        else:
            registered = partial(self.server.registered, rank)
        try:
            return ControlSocket(
                self._settings.host,
                rank=rank,
                metrics=self.metrics,
                on_registration=registered,
            )
        except OSError as error:
            raise _not_ours(self._settings.host, error) from error

    def _register(self, rank: int) -> None:
        """The rank can serve: tell the bootstrap server where its receivers are to speak."""
        settings = self._settings
        registration = RankRegistration(
            rank=rank,
            host=settings.host,
            port=self._controls[rank].port,
            world_size=settings.tensor_parallel_size,
            incarnation=settings.incarnation,
        )
        self._registrars.append(
            Registrar(settings.host, settings.bootstrap_port, registration, self._routed, self._crash)
        )

    def _routed(self) -> None:
        with self._routing:
            self._n_routed += 1
            complete = self._n_routed == self._settings.tensor_parallel_size
        if complete:
            self.loop.routed()
            self._on_routed()

    def _answer(self, event: SenderEvent) -> None:
        match event:
            case Done():
                self.inbox.answer(Written(event.write_id))
            case Failed():
                self.inbox.answer(WriteFailed(event.write_id, event.reason, event.may_land_late))
            case Settled():
                self.inbox.answer(WriteSettled(event.write_id, event.by_probe))

    def _sender_samples(self) -> dict[str, float]:
        """Over all ranks."""
        total = sender_samples(self._sender.snapshot())
        for name, value in (self.server.samples() if self.server is not None else {}).items():
            total[name] = total.get(name, 0.0) + value
        return total


def _not_ours(host: str, error: OSError) -> ConfigError:
    return ConfigError([f"host {host} cannot be bound ({error}): give an address of this machine"])


def engine_maker(settings: Settings) -> Callable[[], Engine]:
    """Makes engines on the rank's address; each call a new one. Calls raise ConfigError or TransportError."""
    return partial(
        make_engine,
        settings.transfer_backend,
        settings.host,
        protocol=settings.transfer_protocol,
        devices=settings.ib_devices,
        timeout_s=settings.transfer_timeout_seconds,
    )


def limits_of(settings: Settings, store_bytes: int, second_tier_bytes: int = 0) -> PipelineLimits:
    """The pipeline's bounds. An item without space waits as long as a filled one without receivers."""
    return PipelineLimits(
        store_bytes=store_bytes,
        second_tier_bytes=second_tier_bytes,
        n_ranks=settings.tensor_parallel_size,
        max_tokens_per_batch=settings.max_tokens_per_batch,
        max_items_per_batch=settings.max_items_per_batch,
        max_queue_cost=settings.max_queue_tokens,
        max_wait_s=settings.max_queue_seconds,
        announce_s=settings.announce_seconds,
        queue_s=settings.park_seconds,
        park_s=settings.park_seconds,
        quarantine_s=settings.quarantine_seconds,
        tombstone_s=settings.tombstone_seconds,
        max_tombstones=settings.max_tombstones,
    )
