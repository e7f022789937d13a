"""Every room we know: its deadline, how many are in which state, and bounded tombstones."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from .limits import PipelineLimits
from .room import Room, RoomState, step
from .room_events import Effect, Expired, RoomEvent
from .room_state import TOMBSTONES
from .story import Story

UP_TO_THE_SEND = frozenset({RoomState.QUEUED, RoomState.ENCODING, RoomState.PARKED})
"""States in which the item's own deadline holds."""


class RoomTable:
    """Rooms by id. A room that is not here is NEW.

    Each waiting state has one deadline. Tombstones leave in the order in which they ended,
    after ``tombstone_s`` or when there are more than ``max_tombstones``.
    """

    def __init__(self, limits: PipelineLimits, story: Story) -> None:
        self._limits = limits
        self._story = story
        self._rooms: dict[int, Room] = {}
        self._deadlines_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # superset of _deadlines_s, stale ones skipped
        self._tombstones: OrderedDict[int, float] = OrderedDict()  # room -> when it goes, in order
        self._counts: dict[RoomState, int] = dict.fromkeys(RoomState, 0)
        self._waits_s = {
            RoomState.ANNOUNCED: limits.announce_s,
            RoomState.QUEUED: limits.queue_s,
            RoomState.PARKED: limits.park_s,
        }
        self.n_evicted_tombstones = 0

    @property
    def n_live(self) -> int:
        """Rooms that are no tombstones."""
        return len(self._rooms) - len(self._tombstones)

    @property
    def counts(self) -> Mapping[RoomState, int]:
        """Rooms by state; NEW and GONE rooms are not here, so theirs stay 0."""
        return self._counts

    def get(self, room: int) -> Room | None:
        return self._rooms.get(room)

    def state(self, room: int) -> RoomState:
        known = self._rooms.get(room)
        return known.state if known else RoomState.NEW

    def is_live(self, room: int) -> bool:
        """Known, and no tombstone."""
        return room in self._rooms and room not in self._tombstones

    def live(self) -> list[int]:
        """Ids of all rooms that are no tombstones. Walks the table: for draining only."""
        return [room for room in self._rooms if room not in self._tombstones]

    def step(self, room_id: int, event: RoomEvent, now_s: float) -> list[Effect]:
        """Feed one event to one room and keep its deadline. Raises RoomBug."""
        room = self._rooms.get(room_id) or Room(room_id, self._limits.n_ranks)
        before = room.state
        effects = step(room, event, now_s, self._story)
        if room.state is not before:
            self._moved(room, before, now_s)
        return effects

    def due(self, now_s: float) -> Iterator[int]:
        """Rooms whose deadline has passed, earliest first. Each must be fed Expired at once."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, room = heapq.heappop(self._heap)
            if self._deadlines_s.get(room) == deadline_s:
                del self._deadlines_s[room]
                yield room
        while self._tombstones:
            room, goes_s = next(iter(self._tombstones.items()))
            if goes_s > now_s:
                break
            yield room

    def is_due(self, room: int, now_s: float) -> bool:
        """Whether this room should have ended by now; False for a tombstone."""
        return self._deadlines_s.get(room, now_s + 1.0) <= now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether a room that is no tombstone should have ended by now."""
        self._skip_stale()
        return bool(self._heap) and self._heap[0][0] <= now_s

    def next_deadline_s(self) -> float | None:
        self._skip_stale()
        times = [self._heap[0][0]] if self._heap else []
        if self._tombstones:
            times.append(next(iter(self._tombstones.values())))
        return min(times, default=None)

    def _skip_stale(self) -> None:
        while self._heap and self._deadlines_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _moved(self, room: Room, before: RoomState, now_s: float) -> None:
        state = room.state
        if before is RoomState.NEW:
            self._rooms[room.id] = room
        else:
            self._counts[before] -= 1
        self._deadlines_s.pop(room.id, None)
        self._tombstones.pop(room.id, None)
        if state is RoomState.GONE:
            del self._rooms[room.id]
            return
        self._counts[state] += 1
        if state in TOMBSTONES:
            self._tombstones[room.id] = now_s + self._limits.tombstone_s
            if len(self._tombstones) > self._limits.max_tombstones:
                self.n_evicted_tombstones += 1
                self.step(next(iter(self._tombstones)), Expired(), now_s)
            return
        deadline_s = self._deadline_s(room, now_s)
        if deadline_s is not None:
            self._deadlines_s[room.id] = deadline_s
            heapq.heappush(self._heap, (deadline_s, room.id))
            if len(self._heap) > 2 * len(self._deadlines_s) + 1024:
                self._heap = [(at_s, room_id) for room_id, at_s in self._deadlines_s.items()]
                heapq.heapify(self._heap)

    def _deadline_s(self, room: Room, now_s: float) -> float | None:
        """When the state just entered ends by itself; the item's deadline holds up to the send."""
        wait_s = self._waits_s.get(room.state)
        asked_s = room.item.deadline_s if room.item and room.state in UP_TO_THE_SEND else None
        if wait_s is None:
            return asked_s
        return now_s + wait_s if asked_s is None else min(now_s + wait_s, asked_s)
