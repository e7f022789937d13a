"""The two sockets to rank 0: ``intake`` carries submissions there, ``back`` its answers here.

Neither ever blocks the event loop. Sending fails where the loop takes nothing any more; reading
follows the socket's file descriptor, and is done once more before health is judged, so that a
busy frontend does not take its own delay for the loop's.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from ..errors import WireError
from ..logs import get_logger
from ..wire import intake
from .admission import NotServing

SEND_BACKLOG = 4096
"""Messages; the bytes behind them are bounded by the credit."""

RECEIVE_BACKLOG = 65536
CLOSE_LINGER_MS = 500
READ_AT_ONCE = 1000

Answer = intake.Admitted | intake.Refused


class LoopLink:
    """One per frontend, on its event loop. ``on_message`` gets every Credit, State and Drained."""

    def __init__(
        self, run_dir: Path, on_message: Callable[[intake.Credit | intake.State | intake.Drained], None]
    ) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._intake = self._socket(zmq.PUSH, run_dir / intake.INTAKE_SOCKET)
        self._back = self._socket(zmq.PULL, run_dir / intake.BACK_SOCKET)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        # Starts at a number of its own, so that a loop which outlived a frontend cannot mix up two.
        self._numbers = itertools.count(time.monotonic_ns())
        self._unsent: deque[intake.Refuse | intake.Abort] = deque(maxlen=SEND_BACKLOG)
        self.dropped = 0
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._back.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.read)
        self._closed = False

    def next_seq(self) -> int:
        return next(self._numbers)

    def submit(self, submit: intake.Submit, *payloads: intake.Payload) -> "asyncio.Future[Answer]":
        """Hands the item over; the future is the loop's answer. Raises NotServing, then nothing was sent.

        Payloads must not be touched afterwards: they are sent from where they lie.
        """
        if not self._send(submit, *payloads):
            raise NotServing("the encode loop takes no more messages")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[submit.seq] = answer
        answer.add_done_callback(lambda _: self._answers.pop(submit.seq, None))
        return answer

    def refuse(self, room: int, reason: str) -> None:
        """Receivers of ``room`` are to hear Failed. Kept and sent later where the loop is behind."""
        self._tell(intake.Refuse(room=room, reason=reason))

    def abort(self, room: int, reason: str) -> None:
        """Nobody waits for the rows of ``room``. Kept like a refusal."""
        self._tell(intake.Abort(room=room, reason=reason))

    def drain(self, deadline_s: float) -> bool:
        """The last message: after everything submitted so far."""
        return self._send(intake.Drain(deadline_s=deadline_s))

    def read(self) -> None:
        """Takes what has arrived; never blocks."""
        if self._closed:
            return
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        n_read = 0
        while n_read < READ_AT_ONCE:
            try:
                frames = self._back.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            n_read += self._take_all(frames)
        # The descriptor signals changes only, so what is left has to be fetched without a signal.
        self._loop.call_soon(self.read)

    def wait(self, seconds: float) -> None:
        """Until something has arrived. Holds up the event loop, so for moments only."""
        if not self._closed:
            self._back.poll(max(1, int(seconds * 1000)))

    def close(self) -> None:
        """What was sent is given a moment to leave."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._back.close(linger=0)
        self._intake.close(linger=CLOSE_LINGER_MS)
        self._context.term()

    def _take_all(self, frames: list[bytes]) -> int:
        """How many there were."""
        try:
            messages = intake.decode_back(frames)
        except WireError as error:
            get_logger().error("a message of the loop cannot be read", problem=str(error))
            return 1
        for message in messages:
            self._take(message)
        return max(1, len(messages))

    def _take(self, message: intake.Message) -> None:
        if isinstance(message, intake.Admitted | intake.Refused):
            answer = self._answers.get(message.seq)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, intake.Credit | intake.State | intake.Drained):
            self._on_message(message)
        else:
            get_logger().error("the loop sent a message of the other direction", kind=type(message).__name__)

    def _tell(self, message: intake.Refuse | intake.Abort) -> None:
        if self._unsent or not self._send(message):
            if len(self._unsent) == SEND_BACKLOG:
                self.dropped += 1
            self._unsent.append(message)

    def _send(self, message: intake.Message, *payloads: intake.Payload) -> bool:
        try:
            self._intake.send_multipart(intake.encode(message, *payloads), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _socket(self, kind: int, path: Path) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, SEND_BACKLOG)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_BACKLOG)
        socket.setsockopt(zmq.LINGER, 0)
        # Connecting before the other side has bound is fine: it is tried again.
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.connect(f"ipc://{path}")
        return socket


def monotonic_deadline(remaining_s: float | None, now_s: float) -> float | None:
    """gRPC's remaining time as a point in time; None where the call has no deadline."""
    if remaining_s is None or not math.isfinite(remaining_s) or remaining_s > 10 * 365 * 86400:
        return None
    return now_s + max(0.0, remaining_s)
