"""Who is taken in: what can never be served, what is too much, and what would be too late.

The decision is here and not in the frontend, since only here is known what a request costs: one whose
rows lie in the store, or are being made for another, needs no turn of the tower, and is taken however
long the queue is. (What the frontend bounds is the memory that pixels take on their way.)
"""

from dataclasses import dataclass

from ..types import Item, RefusalKind
from .drain import DRAINING
from .limits import PipelineLimits
from .room_state import RoomState
from .rooms import RoomTable
from .rows import Rows

HEADROOM = 1.2
"""So much longer than predicted an item may take and still be in time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot be taken; ``field`` is the one at fault."""

    kind: RefusalKind
    field: str
    reason: str


class Admission:
    def __init__(self, limits: PipelineLimits, rooms: RoomTable, rows: Rows) -> None:
        self._limits = limits
        self._rooms = rooms
        self._rows = rows

    @property
    def is_full(self) -> bool:
        return self._rooms.n_live >= self._limits.max_rooms

    @property
    def is_full_of_announcements(self) -> bool:
        """Anyone can send frames: rooms without a request must not keep out those with one."""
        return 2 * self._rooms.counts[RoomState.ANNOUNCED] >= self._limits.max_rooms

    def refusal(self, item: Item, twin: int | None, *, draining: bool, now_s: float) -> Refusal | None:
        """Why a request that would start a room cannot; ``twin``: the room of the same request and item."""
        room = self._rooms.get(item.room)
        state = room.state if room else RoomState.NEW
        if state not in (RoomState.NEW, RoomState.ANNOUNCED):
            return None
        if draining:
            return Refusal(RefusalKind.DRAINING, "worker", DRAINING)
        if state is RoomState.NEW and self.is_full:
            return Refusal(RefusalKind.FULL, "worker", f"{self._rooms.n_live} rooms are open")
        if item.deadline_s is not None and item.deadline_s <= now_s:
            return Refusal(RefusalKind.FULL, "deadline", "has passed")
        if twin is not None:
            reason = f"item {item.index} of {item.request_id} is in room {twin}"
            return Refusal(RefusalKind.INVALID, "request_id", reason)
        never = self._rows.refusal(item)
        if never:
            return Refusal(RefusalKind.INVALID, *never)
        return self._too_much(item, claimed=room is not None and room.claimed, now_s=now_s)

    def predicted_wait_s(self, now_s: float) -> float | None:
        """Until the tower would begin with an item that came now; None while nothing is known."""
        place = self._place(1, claimed=False, now_s=now_s)
        return place and place[0]

    def _too_much(self, item: Item, *, claimed: bool, now_s: float) -> Refusal | None:
        rows, limits = self._rows, self._limits
        if rows.store.lookup(item.key) or rows.queue.get(item.key):
            return None  # costs the tower nothing, and may be in time: its own deadline decides
        queued, _ = rows.queue.line(claimed)
        if queued and queued + item.cost > limits.max_queue_cost:
            return Refusal(
                RefusalKind.FULL,
                "worker",
                f"{queued} of {limits.max_queue_cost} tokens are waiting for the tower, no room for "
                f"{item.cost} more; add replicas or raise max_queue_tokens",
            )
        if rows.is_idle:
            return None  # it owes nobody anything, and what it has learnt may be old
        place = self._place(item.cost, claimed=claimed, now_s=now_s)
        if place is None:
            return None
        begins_s, done_s = place
        if begins_s > limits.max_wait_s:
            return Refusal(
                RefusalKind.FULL,
                "worker",
                f"the predicted wait is {begins_s:.1f} s, above max_queue_seconds {limits.max_wait_s:g}; "
                "add replicas",
            )
        if item.deadline_s is None or now_s + HEADROOM * done_s <= item.deadline_s:
            return None
        return Refusal(
            RefusalKind.FULL,
            "deadline",
            f"its rows would be ready in {done_s:.1f} s, too late for the call's deadline in "
            f"{item.deadline_s - now_s:.1f} s; add replicas",
        )

    def _place(self, cost: int, *, claimed: bool, now_s: float) -> tuple[float, float] | None:
        """Seconds until the tower begins with an item that came now, and until its rows are there."""
        outlook = self._rows.outlook
        place = outlook.place(*self._rows.queue.line(claimed), cost)
        before = [outlook.rest_s(now_s), *(outlook.batch_s(tokens) for tokens in self._rows.again())]
        before_s = sum(seconds for seconds in before if seconds is not None)
        if place is None or None in before:
            return None
        return before_s + place[0], before_s + place[1]
