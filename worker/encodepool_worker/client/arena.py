"""Memory that encode workers write into: one block, registered once, handed out in pieces."""

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ClientError

ALIGNMENT = 4096

QUARANTINE_S = 10.0
"""How long a piece rests whose room failed: a write that timed out may still land in it."""

UNWRITTEN = 0xFF
"""Every byte of a piece before its rows come. As a float of any dtype it is NaN, which no row is."""


class Arena:
    """Pieces of ``nbytes`` bytes of zeroed, page-aligned memory. Safe from several threads.

    Memory costs nothing until it is written. A piece that a write may still reach is never
    handed out again: ``retire`` it, and tell ``settle`` when the room's verdict has come after all.
    """

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._map = mmap.mmap(-1, self.nbytes)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.ptr = int(self._bytes.ctypes.data)
        self._clock = clock
        self._changed = threading.Condition()
        self._taken: dict[int, int] = {}  # start -> bytes
        self._resting: dict[int, float] = {}  # start -> when it may be used again

    def take(self, nbytes: int, timeout_s: float) -> int:
        """Offset of a piece, every byte UNWRITTEN; waits while others hold the room. Raises ClientError."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        if size > self.nbytes:
            raise ClientError(
                f"rows of {nbytes} bytes do not fit the receive memory of {self.nbytes}: raise --receive-mib"
            )
        deadline_s = self._clock() + timeout_s
        with self._changed:
            while True:
                now_s = self._clock()
                self._wake_rested(now_s)
                start = self._gap(size)
                if start is not None:
                    self._taken[start] = size
                    break
                if now_s >= deadline_s:
                    raise ClientError(
                        f"no receive memory became free within {timeout_s:g} s: "
                        "raise --receive-mib, or send fewer images at once"
                    )
                wake_s = min([deadline_s, *self._resting.values()])
                self._changed.wait(max(0.001, wake_s - now_s))
        self._bytes[start : start + size] = UNWRITTEN
        return start

    def view(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._bytes[start : start + nbytes]

    def give_back(self, start: int) -> None:
        """The room succeeded: nothing writes here any more."""
        with self._changed:
            del self._taken[start]
            self._changed.notify_all()

    def settle(self, start: int) -> None:
        """The room failed: the piece is free again after a rest."""
        with self._changed:
            self._resting[start] = self._clock() + QUARANTINE_S

    def _wake_rested(self, now_s: float) -> None:
        for start, until_s in list(self._resting.items()):
            if until_s <= now_s:
                del self._resting[start], self._taken[start]

    def _gap(self, size: int) -> int | None:
        end = 0
        for start in sorted(self._taken):
            if start - end >= size:
                return end
            end = start + self._taken[start]
        return end if self.nbytes - end >= size else None


def unwritten(rows: npt.NDArray[Any]) -> bool:
    """Whether any element still has the bits that a piece has before its rows come."""
    bits = rows.view(np.dtype(f"u{rows.dtype.itemsize}"))
    return bool((bits == np.iinfo(bits.dtype).max).any())
