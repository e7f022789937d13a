"""Which addresses are registered: the check that decides what an engine may read and write."""

import threading
from bisect import bisect_right, insort
from collections.abc import Iterable

from ..errors import RegistrationFailed


class Ranges:
    """Disjoint ranges of addresses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []  # (start, stop), sorted

    def add(self, ptr: int, nbytes: int) -> None:
        """Raises RegistrationFailed for an empty range and for one that overlaps another."""
        if ptr <= 0 or nbytes <= 0 or ptr + nbytes > 2**64:
            raise RegistrationFailed(f"cannot register {nbytes} bytes at {ptr:#x}")
        with self._lock:
            index = bisect_right(self._ranges, (ptr, ptr + nbytes))
            neighbours = self._ranges[max(0, index - 1) : index + 1]
            if any(start < ptr + nbytes and ptr < stop for start, stop in neighbours):
                raise RegistrationFailed(f"{nbytes} bytes at {ptr:#x} overlap a registered range")
            insort(self._ranges, (ptr, ptr + nbytes))

    def remove(self, ptr: int) -> bool:
        """Whether a range began there."""
        with self._lock:
            kept = [one for one in self._ranges if one[0] != ptr]
            found = len(kept) < len(self._ranges)
            self._ranges = kept
            return found

    def missing(self, wanted: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """The first (ptr, nbytes) that no single range holds whole, or None."""
        with self._lock:
            for ptr, nbytes in wanted:
                index = bisect_right(self._ranges, (ptr, 2**64)) - 1
                if index < 0 or ptr + nbytes > self._ranges[index][1]:
                    return ptr, nbytes
        return None
