"""The two sockets to the frontend: submissions in, answers and the loop's state back."""

import math
from collections import deque
from itertools import islice
from pathlib import Path

import zmq

from ..core import events
from ..errors import WireError, WorkerError
from ..logs import LimitedLog
from ..types import TowerSpec
from ..wire import intake
from .metrics import Metrics
from .pixels import Pixels, PixelTable
from .threads import MESSAGES_PER_POLL

RECEIVE_BACKLOG = 64
"""Messages that wait in the socket; the bytes behind them are bounded by the frontend's budget."""

SEND_BACKLOG = 65536
MAX_UNSENT = 2**20
"""Answers kept for a frontend that does not read: more than it can have submitted."""

CLOSE_LINGER_MS = 1000


class IntakeSocket:
    """Turns the frontend's messages into events. One that cannot be read is counted and dropped.

    A source of the inbox; while it is not read, messages wait in the socket and then at the frontend.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: Path,
        *,
        spec: TowerSpec,
        pixels: PixelTable,
        metrics: Metrics,
    ) -> None:
        self._spec = spec
        self._pixels = pixels
        self._metrics = metrics
        self._log = LimitedLog(per_s=1, burst=10)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_BACKLOG)
        self._socket.bind(f"ipc://{run_dir / intake.INTAKE_SOCKET}")
        self._has_more = True  # its descriptor says only that something has happened since it was empty

    def fileno(self) -> int:
        return int(self._socket.FD)

    def due_s(self) -> float:
        return -math.inf if self._has_more else math.inf

    def read(self) -> list[events.Event]:
        found: list[events.Event] = []
        for _ in range(MESSAGES_PER_POLL):
            try:
                # Not copied: pixels stay where ZMQ put them until the tower reads them.
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._has_more = False
                return found
            try:
                found.append(self._event(*intake.decode(frames)))
            except WireError as error:
                self._metrics.add("encodepool_frames_malformed_total")
                self._log.warning("malformed intake message dropped", problem=str(error)[:200])
        self._has_more = True
        return found

    def close(self) -> None:
        """What waits in the socket is given up."""
        self._socket.close(linger=0)

    def _event(self, message: intake.Message, payloads: list[memoryview]) -> events.Event:
        if isinstance(message, intake.Submit):
            item = message.item(self._spec)
            # Side tensors are part of the item's key; the towers need nothing beyond the grids.
            pixels = Pixels(payloads[0], message.pixel_dtype, message.pixel_shape, message.grid_types())
            return events.Submitted(message.seq, item, self._pixels.add(pixels), message.pixel_bytes)
        if isinstance(message, intake.Refuse):
            return events.Refused(message.room, message.reason)
        if isinstance(message, intake.Abort):
            return events.Aborted(message.room, message.reason)
        if isinstance(message, intake.Drain):
            return events.DrainStarted(message.deadline_s)
        raise WireError("message", type(message).__name__, "one for rank 0")


class BackChannel:
    """Messages to the frontend, sent by the owner thread alone, which never waits for it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, rank: int = 0) -> None:
        self._unsent: deque[intake.Message] = deque()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, SEND_BACKLOG)
        self._socket.bind(f"ipc://{run_dir / intake.back_socket(rank)}")

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: intake.Message) -> None:
        """In its order, with the next ``flush``.

        Raises WorkerError when the frontend has not read for so long that nothing else makes sense.
        """
        if len(self._unsent) >= MAX_UNSENT:
            raise WorkerError(f"the frontend has left {MAX_UNSENT} answers unread")
        self._unsent.append(message)

    def flush(self, state: intake.State | None = None) -> None:
        """All that waits, as far as the frontend takes it; then ``state``, which is never kept."""
        while self._unsent:
            some = list(islice(self._unsent, intake.MAX_AT_ONCE))
            if not self._sent(some):
                return
            for _ in some:
                self._unsent.popleft()
        if state is not None:
            self._sent([state])

    def close(self) -> None:
        self._socket.close(linger=CLOSE_LINGER_MS)

    def _sent(self, messages: list[intake.Message]) -> bool:
        try:
            self._socket.send(intake.encode_back(messages), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
