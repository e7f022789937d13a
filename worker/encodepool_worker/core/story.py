"""A bounded ring of what happened to rooms, for the log line of a failure and for RoomBug."""

from collections import deque
from collections.abc import Sequence
from enum import Enum
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
        self._records: deque[Record] = deque(maxlen=max_records)

    def add(self, record: Record) -> None:
        self._records.append(record)

    def tail(self, room: int, max_records: int = 50) -> list[str]:
        """The last records of one room, oldest first. Walks the ring: for failures only."""
        lines = [str(record) for record in self._records if record.room == room]
        return lines[-max_records:]
