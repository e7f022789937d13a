"""Writes that timed out: what they may still read stays as it is until nothing can land any more.

A late write pins its entry. Its quarantine ends ``quarantine_s`` after the failure, but not before
the engine has let go of it: the peer answered a probe (then the quarantine begins anew, for what
was under way), its session is gone, or its engine has been closed. Bytes pinned so are capped: at
the cap the engine of the oldest write that nobody has let go of is to be closed. When a drain's time
is up, all of them are, so that the worker's end waits for no receiver that is silent.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import WorkerError
from .instructions import RetireEngine
from .store import Entry, Store


@dataclass(slots=True)
class LateWrite:
    """A write that timed out at ``failed_s``; ``settled`` once the engine has let go of it."""

    room: int
    session: str
    entry: Entry
    failed_s: float
    rank: int = 0
    settled: bool = False
    retired: bool = False


class LateWrites:
    """By number of the write. ``max_bytes`` may be pinned before an engine is given up."""

    def __init__(self, store: Store, quarantine_s: float, max_bytes: int) -> None:
        self._store = store
        self._quarantine_s = quarantine_s
        self._max_bytes = max_bytes
        self._writes: dict[int, LateWrite] = {}
        self._ends: list[tuple[float, int]] = []  # heap of (when, write)

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, write: int, late: LateWrite) -> None:
        self._store.pin(late.entry)
        self._writes[write] = late

    def engines_to_retire(self, *, at_once: bool) -> list[RetireEngine]:
        """At the cap: the engine of the oldest late write that no one has let go of yet.

        ``at_once``: those of all such writes; nobody waits for a silent receiver any longer.
        """
        if not at_once and self._store.pinned_bytes <= self._max_bytes:
            return []
        held = [n for n, late in self._writes.items() if not late.settled and not late.retired]
        chosen = held if at_once else held[:1]
        for write in chosen:
            self._writes[write].retired = True
        return [RetireEngine(write, self._writes[write].rank) for write in chosen]

    def settle(self, write: int, *, by_probe: bool, now_s: float) -> None:
        late = self._writes.get(write)
        if late is None or late.settled:
            raise WorkerError(f"write {write} settled, but is not late")
        late.settled = True
        ends_s = late.failed_s + self._quarantine_s
        if by_probe:  # what was under way when the peer answered may still land
            ends_s = max(ends_s, now_s + self._quarantine_s)
        heapq.heappush(self._ends, (ends_s, write))

    def over(self, now_s: float) -> Iterator[LateWrite]:
        """Writes whose quarantine is over; their pins are gone."""
        while self._ends and self._ends[0][0] <= now_s:
            _, write = heapq.heappop(self._ends)
            late = self._writes.pop(write)
            self._store.unpin(late.entry)
            yield late

    def next_end_s(self) -> float | None:
        return self._ends[0][0] if self._ends else None
