"""Who may come in, by the bytes of its pixels. Arithmetic, no I/O.

How long the tower would take is for the loop to judge, which knows what lies in its store.

Every byte of a request is held in one of two places, and both are charged to one budget:

reading   from before the message is read until the item is handed to the loop. How long a
          message is shows only when it has been read, so a reader is charged the longest message
          until its size is known.
queued    handed over; the loop gives it back with one Credit once the tower has taken the pixels.

The queue may hold the budget less two longest messages. So two readers always find room again, one
of each kind that ``gate`` tells apart: a full queue does not stop us from reading a request's room,
refusing it and telling its receivers.
"""

import itertools
from dataclasses import dataclass

from ..errors import WorkerError
from ..types import MAX_MESSAGE_BYTES

MIB = 1024 * 1024

MIN_CHARGE_BYTES = 64 * 1024
"""What a request costs besides its pixels: its stream, its objects. Bounds the count of small ones."""


class NoCredit(WorkerError):
    """The worker is full. Answered RESOURCE_EXHAUSTED."""


class NotServing(WorkerError):
    """The worker takes nothing now. Answered UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be held: bytes of pixels in all and in one message."""

    pixel_bytes: int
    message_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.message_bytes <= self.pixel_bytes // 3:
            raise ValueError(f"message_bytes {self.message_bytes} is not in (0, {self.pixel_bytes} / 3]")

    @classmethod
    def within(cls, pixel_bytes: int) -> "Limits":
        """Limits for a budget; below 768 MiB the longest message is a third of it."""
        return cls(pixel_bytes, min(MAX_MESSAGE_BYTES, pixel_bytes // 3))

    @property
    def queued_bytes(self) -> int:
        return self.pixel_bytes - 2 * self.message_bytes


@dataclass(frozen=True, slots=True)
class _Queued:
    nbytes: int
    cost: int


class Account:
    """What is held now. ``hold`` numbers name a reader's share, ``seq`` numbers a queued one.

    A share is given back exactly once; giving back what is not held raises KeyError.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reading_bytes = 0
        self.queued_bytes = 0
        self.queued_tokens = 0
        self._reading: dict[int, int] = {}
        self._queued: dict[int, _Queued] = {}
        self._numbers = itertools.count(1)

    @property
    def held_bytes(self) -> int:
        return self.reading_bytes + self.queued_bytes

    @property
    def queued_items(self) -> int:
        return len(self._queued)

    @property
    def readers(self) -> int:
        return len(self._reading)

    def may_read(self, places: int = 1) -> bool:
        """Is there room for this many longest messages?"""
        return self.held_bytes + places * self.limits.message_bytes <= self.limits.pixel_bytes

    def start_reading(self) -> int:
        """A new hold, charged one longest message; only where ``may_read``."""
        if not self.may_read():
            raise ValueError("no room to read: may_read() is to be asked first")
        hold = next(self._numbers)
        self._reading[hold] = self.limits.message_bytes
        self.reading_bytes += self.limits.message_bytes
        return hold

    def measured(self, hold: int, nbytes: int) -> None:
        """The request of ``hold`` turned out to hold ``nbytes``, at most the longest message."""
        charge = self._charge(nbytes)
        if charge > self._reading[hold]:
            raise ValueError(f"hold {hold} grows from {self._reading[hold]} to {charge} bytes")
        self.reading_bytes -= self._reading[hold] - charge
        self._reading[hold] = charge

    def drop(self, hold: int) -> None:
        """The request of ``hold`` goes no further."""
        self.reading_bytes -= self._reading.pop(hold)

    def check(self, hold: int) -> None:
        """Is there credit for the bytes of ``hold`` in the queue? Raises NoCredit."""
        limits = self.limits
        nbytes = self._reading[hold]
        if self.queued_bytes + nbytes > limits.queued_bytes:
            raise NoCredit(
                f"{self.queued_bytes} of {limits.queued_bytes} bytes of pixels are waiting for the tower, "
                f"no room for {nbytes} more; add replicas or raise max_pixel_mib"
            )

    def hand_over(self, hold: int, seq: int, cost: int) -> None:
        """The request of ``hold`` is the loop's now, as submission ``seq``."""
        if seq in self._queued:
            raise ValueError(f"submission {seq} is queued already")
        nbytes = self._reading.pop(hold)
        self.reading_bytes -= nbytes
        self.queued_bytes += nbytes
        self.queued_tokens += cost
        self._queued[seq] = _Queued(nbytes, cost)

    def credit(self, seq: int) -> None:
        """The loop gave submission ``seq`` back."""
        share = self._queued.pop(seq)
        self.queued_bytes -= share.nbytes
        self.queued_tokens -= share.cost

    def _charge(self, nbytes: int) -> int:
        return max(nbytes, min(MIN_CHARGE_BYTES, self.limits.message_bytes))

    def __repr__(self) -> str:
        limits = self.limits
        return (
            f"<Account reading {self.reading_bytes} in {self.readers}, queued {self.queued_bytes} in "
            f"{self.queued_items} of {limits.pixel_bytes} bytes>"
        )
