"""Rank 0 put together: tower, store, sender, sockets and the loop that owns them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from ..core.events import WriteFailed, WriteSettled, Written
from ..core.pipeline import Pipeline, PipelineLimits
from ..errors import ConfigError
from ..logs import get_logger
from ..settings import Settings
from ..towers.base import VisionTower
from ..transport.base import Done, Engine, Failed, SenderEvent, Settled
from ..transport.choose import make_engine
from ..transport.sender import Sender
from ..transport.sender_types import SenderLimits
from ..wire.bootstrap import RankRegistration
from .control_socket import ControlSocket
from .inbox import Inbox
from .intake_socket import BackChannel, IntakeSocket
from .loop import Loop
from .metrics import Metrics, sender_samples
from .pixels import PixelTable
from .registration import Registrar
from .status_sender import StatusSender
from .store_memory import StoreMemory
from .threads import Crash
from .tower_runner import TowerRunner


class Rank:
    """One rank, ready to run. Raises ConfigError or TransportError where something cannot be had.

    ``on_routed`` is called once the bootstrap server lists this rank, from another thread;
    ``crash`` when a thread cannot go on. ``close`` ends every thread.
    """

    def __init__(
        self,
        settings: Settings,
        tower: VisionTower,
        make_engine: Callable[[], Engine],
        *,
        pinned: bool,
        crash: Crash,
        on_routed: Callable[[], None] = lambda: None,
    ) -> None:
        run_dir = Path(settings.run_dir)
        self._on_routed = on_routed
        self.metrics = Metrics()
        self.inbox = Inbox()
        self.pixels = PixelTable()
        self.memory = StoreMemory.of(settings.store_device_bytes, settings.store_host_bytes, pinned=pinned)
        self.pipeline = Pipeline(limits_of(settings, self.memory.nbytes))
        limits = SenderLimits.for_rdma() if settings.transfer_protocol == "rdma" else SenderLimits()
        self._sender = Sender(make_engine, self.memory.ptr, self.memory.nbytes, self._answer, limits)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._tower = TowerRunner(tower, self.pixels, self.memory, self.inbox.answer, self.metrics, crash)
        self._statuses = StatusSender(settings.rank, self.metrics, crash)
        self._back = BackChannel(self._context, run_dir)
        self.loop = Loop(
            self.pipeline,
            self.inbox,
            back=self._back,
            tower=self._tower,
            sender=self._sender,
            statuses=self._statuses,
            pixels=self.pixels,
            metrics=self.metrics,
            drain_s=settings.drain_seconds,
            more_samples=self._sender_samples,
        )
        try:
            self._control = ControlSocket(
                self._context, settings.host, inbox=self.inbox, metrics=self.metrics, crash=crash
            )
        except zmq.ZMQError as error:
            raise ConfigError(
                [f"host {settings.host} cannot be bound ({error}): give an address of this machine"]
            ) from error
        self._intake = IntakeSocket(
            self._context,
            run_dir,
            spec=tower.spec,
            inbox=self.inbox,
            pixels=self.pixels,
            metrics=self.metrics,
            crash=crash,
        )
        get_logger().info("listening for receivers", host=settings.host, port=self._control.port)
        self._registrar = Registrar(
            settings.host,
            settings.bootstrap_port,
            RankRegistration(
                rank=settings.rank,
                host=settings.host,
                port=self._control.port,
                world_size=settings.tensor_parallel_size,
                incarnation=settings.incarnation,
            ),
            self._routed,
            crash,
        )

    @property
    def control_port(self) -> int:
        return self._control.port

    def close(self) -> bool:
        """In the order of the flow: nothing comes in, nothing runs, what was decided goes out.

        False when a batch or a write could not be stopped: then the store's memory is still in use.
        """
        self._registrar.close()
        self.inbox.close()
        self._intake.close()
        self._control.close()
        stopped = self._tower.close()
        stopped = self._sender.close() and stopped
        self._statuses.close()
        self._back.close()
        self._context.term()
        if stopped:
            self.memory.close()
        return stopped

    def _routed(self) -> None:
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
        return sender_samples(self._sender.snapshot())


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


def limits_of(settings: Settings, store_bytes: int) -> PipelineLimits:
    """The pipeline's bounds. An item without space waits as long as a filled one without receivers."""
    return PipelineLimits(
        store_bytes=store_bytes,
        max_tokens_per_batch=settings.max_tokens_per_batch,
        max_items_per_batch=settings.max_items_per_batch,
        announce_s=settings.announce_seconds,
        queue_s=settings.park_seconds,
        park_s=settings.park_seconds,
        quarantine_s=settings.quarantine_seconds,
        tombstone_s=settings.tombstone_seconds,
        max_tombstones=settings.max_tombstones,
    )
