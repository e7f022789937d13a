"""Free bytes of one tier, as ranges: only their number counts, never their place."""

import heapq

from ..errors import WorkerError
from ..types import ByteRange


class FreeSpace:
    """Free byte ranges of [first, first + capacity): neighbours are joined, the largest is used first."""

    def __init__(self, capacity_bytes: int, first: int = 0) -> None:
        self.nbytes = 0
        self._stops: dict[int, int] = {}  # start -> stop
        self._starts: dict[int, int] = {}  # stop -> start
        self._largest: list[tuple[int, int]] = []  # heap of (-nbytes, start); stale ones are skipped
        if capacity_bytes:
            self.give(ByteRange(first, first + capacity_bytes))

    def __len__(self) -> int:
        return len(self._stops)

    def give(self, extent: ByteRange) -> None:
        start, stop = extent.start, extent.stop
        self.nbytes += stop - start
        if stop in self._stops:
            stop = self._remove(stop)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._add(start, stop)

    def take(self, nbytes: int) -> tuple[ByteRange, ...]:
        """``nbytes`` in as few extents as the largest ranges allow; the caller knows they fit."""
        if nbytes > self.nbytes:
            raise WorkerError(f"{nbytes} bytes wanted, {self.nbytes} are free")
        self.nbytes -= nbytes
        extents = []
        while nbytes:
            size, start = heapq.heappop(self._largest)
            if self._stops.get(start) != start - size:
                continue
            stop = self._remove(start)
            cut = min(stop, start + nbytes)
            if cut < stop:
                self._add(cut, stop)
            extents.append(ByteRange(start, cut))
            nbytes -= cut - start
        return tuple(extents)

    def _add(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        self._starts[stop] = start
        heapq.heappush(self._largest, (start - stop, start))
        if len(self._largest) > 2 * len(self._stops) + 1024:
            self._largest = [(low - high, low) for low, high in self._stops.items()]
            heapq.heapify(self._largest)

    def _remove(self, start: int) -> int:
        stop = self._stops.pop(start)
        del self._starts[stop]
        return stop


def trimmed(extents: tuple[ByteRange, ...], nbytes: int) -> tuple[ByteRange, ...]:
    """The first ``nbytes`` of what the extents hold; each holds more than the rest to be cut."""
    over = sum(extent.nbytes for extent in extents) - nbytes
    last = extents[-1]
    return (*extents[:-1], ByteRange(last.start, last.stop - over))
