"""The memory that a sender writes from: one or more regions, whose offsets count end to end."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import WorkerError


class Region(NamedTuple):
    """``nbytes`` at address ``ptr``, on the host or on a device."""

    ptr: int
    nbytes: int


class Regions:
    """Offset 0 is the start of the first region; the second begins where the first ends, and so on."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.all = tuple(regions)
        self._starts = [0, *accumulate(region.nbytes for region in regions)]

    def address(self, offset: int, nbytes: int) -> int:
        """Where these bytes lie. Raises WorkerError where they are not all of one region."""
        index = bisect_right(self._starts, offset) - 1
        if not 0 <= index < len(self.all) or offset + nbytes > self._starts[index + 1]:
            raise WorkerError(f"{nbytes} bytes at offset {offset} do not lie in one region")
        return self.all[index].ptr + offset - self._starts[index]
