"""A rank other than 0: carries out what rank 0 orders, answers, and decides nothing.

It has its part of the tower, a copy of the store's memory (rank 0's index is true for it as well),
its own engines, and one channel to rank 0. ``run`` owns the channel. Rank 0 must be heard every
second; when it is silent, or the channel breaks, the process ends.
"""

import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from ..core import events
from ..core import instructions as do
from ..errors import GroupLost, WireError
from ..logs import get_logger
from ..settings import Settings
from ..towers.base import VisionTower
from ..towers.parallel import TensorParallel
from ..transport.base import Done, Engine, Failed, SenderEvent, Settled
from ..transport.sender import Sender
from ..transport.sender_types import SenderLimits
from ..types import Grid, Item, Slice
from ..wire import intake
from ..wire import ranks as wire
from .intake_socket import BackChannel
from .metrics import Metrics, sender_samples
from .mover import Mover
from .pixels import Pixels, PixelTable
from .rank import SENDER_CLOSE_S, limits_of
from .rank_messages import message_of, ranges_of
from .rank_server import BEAT_S, MAX_ORDERS, SILENCE_S, USER
from .store_memory import StoreMemory
from .threads import MESSAGES_PER_POLL, Crash
from .tiers import TierPlan
from .tower_runner import TowerRunner


class Follower:
    """Used once. ``address`` and ``token`` are rank 0's (``RankServer``).

    ``close`` ends every thread, for a process that goes on.
    """

    def __init__(
        self,
        settings: Settings,
        tower: VisionTower,
        make_engine: Callable[[], Engine],
        *,
        parallel: TensorParallel | None,
        tiers: Sequence[TierPlan],
        address: str,
        token: str,
        crash: Crash,
        on_welcome: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._spec = tower.spec
        self._on_welcome = on_welcome
        self.metrics = Metrics()
        self._memory = StoreMemory(tiers)
        self._pixels = PixelTable()
        self._arriving: wire.Assembly | None = None
        self._batch: do.RunBatch | None = None
        limits = SenderLimits.for_rdma() if settings.transfer_protocol == "rdma" else SenderLimits()
        self._sender = Sender(make_engine, self._memory.regions, self._sent, limits)
        self._tower = TowerRunner(
            tower, self._pixels, self._memory, self._answer, self.metrics, crash, parallel
        )
        max_copies = limits_of(settings, *self._memory.sizes).max_demotions
        self._mover = Mover(self._memory, self._answer, crash, max_orders=max_copies)
        self._answers: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outgoing, self._incoming = wire.Outgoing(), wire.Incoming()
        self._welcome = False
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._back = BackChannel(self._context, Path(settings.run_dir), settings.rank)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.IDENTITY, b"%d" % settings.rank)
        self._socket.setsockopt(zmq.PLAIN_USERNAME, USER)
        self._socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())
        self._socket.setsockopt(zmq.SNDHWM, MAX_ORDERS)
        self._socket.setsockopt(zmq.RCVHWM, MAX_ORDERS)
        self._socket.connect(address)

    def run(self) -> None:
        """Until rank 0 says that this is the end. Raises GroupLost."""
        settings = self._settings
        self._send(
            wire.Hello(
                rank=settings.rank,
                size=settings.tensor_parallel_size,
                incarnation=settings.incarnation,
                tiers=self._memory.sizes,
                tower=self._spec,
            )
        )
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        beat_s = heard_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= beat_s:
                beat_s = now_s + BEAT_S
                self._report(now_s)
            wait_s = max(0.0, beat_s - now_s)
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            late_s = time.monotonic() - (now_s + wait_s)
            if late_s > BEAT_S:  # we were frozen: what rank 0 said meanwhile may still be unread
                heard_s += late_s
            if self._socket in ready:
                heard_s = time.monotonic()
                if self._receive():
                    self._say_ended()
                    return
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._send_answers()
            silent_s = time.monotonic() - heard_s
            if silent_s > SILENCE_S:
                raise GroupLost(f"rank 0 has been silent for {silent_s:.1f} s")

    def close(self) -> bool:
        """False when a batch, a copy or a write could not be stopped: the memory is still in use."""
        stopped = self._tower.close()
        stopped = self._mover.close() and stopped
        stopped = self._sender.close(SENDER_CLOSE_S) and stopped
        self._socket.close(linger=0)
        self._back.close()
        self._context.term()
        os.close(self._wake_fd)
        if stopped:
            self._memory.close()
        return stopped

    # --- orders

    def _receive(self) -> bool:
        """Some of what has arrived, so that beats and answers have their turn; True at the end."""
        for _ in range(MESSAGES_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            try:
                message, payloads = self._incoming.from_leader(frames)
                if isinstance(message, wire.End):
                    return True
                self._obey(message, payloads)
            except WireError as error:
                raise GroupLost(f"rank 0 cannot be understood: {error}") from error
        return False

    def _obey(self, message: wire.FromLeader, payloads: list[memoryview]) -> None:
        match message:
            case wire.Batch():
                if self._arriving is not None:
                    raise WireError("batch", message.batch, "due: pixels of the one before are missing")
                self._arriving = wire.Assembly(message)
                self._run_if_complete()
            case wire.Piece():
                if self._arriving is None:
                    raise WireError("piece", message.job, "of a batch that is arriving")
                self._arriving.add(message, payloads[0])
                self._run_if_complete()
            case wire.Write():
                slices = [Slice(*piece) for piece in message.slices]
                self._sender.submit(message.write, message.session, slices)
            case wire.Demote():
                self._mover.submit(
                    do.Demote(message.entry, ranges_of(message.source), ranges_of(message.target))
                )
            case wire.Retire():
                self._sender.retire(message.write)
            case wire.Registered():
                self._sender.registered(message.session)
            case wire.Welcome():
                self._welcome = True
                get_logger().info("joined the group")
                self._on_welcome()
            case wire.TurnedAway():
                raise GroupLost(f"rank 0 turned this rank away: {message.reason}")

    def _run_if_complete(self) -> None:
        if self._arriving is None or not self._arriving.is_complete:
            return
        batch, pixels = self._arriving.batch, self._arriving.pixels
        self._arriving = None
        jobs = []
        for header, payload in zip(batch.jobs, pixels, strict=True):
            grids = tuple(Grid(*grid) for grid in header.grids)
            item = Item(
                request_id=header.request_id,
                index=header.index,
                room=header.room,
                key=header.key,
                modality=header.modality,
                layout=self._spec.layout(header.n_tokens),
                cost=header.cost,
            )
            handle = self._pixels.add(Pixels(payload, header.dtype, header.shape, grids))
            jobs.append(do.Job(header.entry, item, handle, ranges_of(header.extents)))
        self._batch = do.RunBatch(batch.batch, tuple(jobs))
        self._tower.submit(self._batch)

    def _report(self, now_s: float) -> None:
        """To rank 0, and to the probes of this pod."""
        samples = sender_samples(self._sender.snapshot())
        self._send(wire.Beat(samples))
        self._back.flush(
            intake.State(
                turn_s=now_s,
                routed=self._welcome,
                queue_items=0,
                queue_cost=0,
                counters=samples | self.metrics.snapshot(),
            )
        )

    def _say_ended(self) -> None:
        """To the frontend of this pod, and wait until it is sent: the process ends at once."""
        self._back.send(intake.Drained())
        self._back.flush()
        self._socket.close(linger=0)
        self._back.close()
        self._context.term()

    # --- answers

    def _answer(self, event: events.Event) -> None:
        """From any thread."""
        self._answers.put(event)
        os.eventfd_write(self._wake_fd, 1)

    def _sent(self, event: SenderEvent) -> None:
        match event:
            case Done():
                self._answer(events.Written(event.write_id))
            case Failed():
                self._answer(events.WriteFailed(event.write_id, event.reason, event.may_land_late))
            case Settled():
                self._answer(events.WriteSettled(event.write_id, event.by_probe))

    def _send_answers(self) -> None:
        while True:
            try:
                event = self._answers.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, events.BatchEncoded | events.BatchFailed) and self._batch is not None:
                for job in self._batch.jobs:
                    self._pixels.drop(job.pixels)
                self._batch = None
            self._send(message_of(event))

    def _send(self, message: wire.FromFollower) -> None:
        try:
            self._socket.send_multipart(self._outgoing.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise GroupLost(f"rank 0 has left {MAX_ORDERS} answers unread") from None
