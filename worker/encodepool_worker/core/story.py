"""A bounded ring of what happened to rooms, for the log line of a failure and for RoomBug."""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple


class Record(NamedTuple):
    """One event of one room: the state before and after, and what the room asked for."""

    now_s: float
    room: int
    event: object
    before: Enum
    after: Enum
    effects: Sequence[object]

    def __str__(self) -> str:
        same = self.before is self.after
        move = self.before.name if same else f"{self.before.name} -> {self.after.name}"
        asked = ", ".join(str(effect) for effect in self.effects)
        return f"room {self.room}  {self.now_s:.3f}  {self.event}  {move}  {asked}".rstrip()


class Story:
    """The last ``max_records`` records over all rooms; the oldest go first."""

    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        self._records: deque[Record] = deque()
        self._by_room: dict[int, deque[Record]] = {}

    def add(self, record: Record) -> None:
        self._records.append(record)
        self._by_room.setdefault(record.room, deque()).append(record)
        if len(self._records) > self._max_records:
            oldest = self._records.popleft().room
            self._by_room[oldest].popleft()
            if not self._by_room[oldest]:
                del self._by_room[oldest]

    def tail(self, room: int, max_records: int = 50) -> list[str]:
        """The last records of one room, oldest first."""
        records = self._by_room.get(room, ())
        return [str(record) for record in islice(records, max(0, len(records) - max_records), None)]
