"""The life of one room: one item, one transfer, told truthfully. A closed, total table.

Theory:

1. Two things arrive independently: the *item* (a request, later its rows) and the *receivers*
   (frames, which may come before the request). The state follows the item; the receivers are
   data in the room, called parties here because each has a verdict coming.
2. One joint rule couples them, applied after every event: *PARKED and all ``fanout`` receivers
   known -> SHIPPING*. It is the only move that a state triggers.
3. A room's verdict is final at once, telling it is not. Failed lets a receiver reuse its memory,
   so a receiver is told when nothing can write there any more: at once if it has no write under
   way, else when its write has answered, after a late write when the quarantine is over.
4. Success is sent for a receiver's own write only (a shard without rows has nothing to write).
5. Once a receiver has its verdict, another frame from it is a *new shipment*: prefill repeats
   a request with the same room. So is any frame in DONE. Such a shipment stands alone: whatever
   becomes of it changes nothing for the room or for others.
6. Outside events never raise; an answer in a state that rules it out is our own bug.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from ..errors import RoomBug
from . import room_moves as moves
from .events import Aborted, Refused, Submitted
from .room_events import (
    ANSWERS,
    OUTSIDE,
    TIMER,
    Count,
    Effect,
    Expired,
    Filled,
    Landed,
    Missed,
    NotFilled,
    RoomEvent,
    Settled,
    Spoke,
    Taken,
)
from .room_state import Room, RoomState
from .story import Record, Story

__all__ = ["EVENTS", "RULES", "Go", "Room", "RoomState", "Rules", "Verdict", "step"]


class Verdict(Enum):
    IGNORE = auto()
    BUG = auto()


class Go(NamedTuple):
    """A move: who decides, and the states it may end in (before the joint rule)."""

    handler: Callable[[Room, Any], tuple[RoomState, list[Effect]]]
    to: frozenset[RoomState]


Rule = Go | Verdict
Rules = dict[tuple[RoomState, type[RoomEvent]], Rule]


NEW = RoomState.NEW
ANNOUNCED = RoomState.ANNOUNCED
QUEUED = RoomState.QUEUED
ENCODING = RoomState.ENCODING
PARKED = RoomState.PARKED
SHIPPING = RoomState.SHIPPING
SETTLING = RoomState.SETTLING
QUARANTINED = RoomState.QUARANTINED
DONE = RoomState.DONE
FAILED = RoomState.FAILED
GONE = RoomState.GONE

EVENTS: tuple[type[RoomEvent], ...] = OUTSIDE + TIMER + ANSWERS


def _go(handler: object, *to: RoomState) -> Go:
    return Go(handler, frozenset(to))  # type: ignore[arg-type]  # each handler knows its event


_MOVES: dict[RoomState, dict[type[RoomEvent], Rule]] = {
    NEW: {
        Submitted: _go(moves.request_first, QUEUED),
        Refused: _go(moves.leave_tombstone, FAILED),
        Spoke: _go(moves.frame_first, ANNOUNCED),
        Aborted: _go(moves.leave_tombstone, FAILED),
    },
    ANNOUNCED: {
        Submitted: _go(moves.request_first, QUEUED, FAILED),
        Refused: _go(moves.refused, FAILED),
        Spoke: _go(moves.frame_while_gathering, ANNOUNCED, FAILED),
        Aborted: _go(moves.aborted, FAILED),
        Expired: _go(moves.expired, FAILED),
    },
    QUEUED: {
        Submitted: _go(moves.request_again, QUEUED),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_gathering, QUEUED, FAILED),
        Aborted: _go(moves.aborted, FAILED),
        Expired: _go(moves.expired, FAILED),
        Taken: _go(moves.taken, ENCODING),
        Filled: _go(moves.filled, PARKED),
    },
    ENCODING: {
        Submitted: _go(moves.request_again, ENCODING),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_gathering, ENCODING, FAILED),
        Aborted: _go(moves.aborted, FAILED),
        Expired: _go(moves.expired, FAILED),
        Filled: _go(moves.filled, PARKED),
        NotFilled: _go(moves.not_filled, FAILED),
    },
    PARKED: {
        Submitted: _go(moves.request_again, PARKED),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_gathering, PARKED, FAILED),
        Aborted: _go(moves.aborted, FAILED),
        Expired: _go(moves.expired, FAILED),
    },
    SHIPPING: {
        Submitted: _go(moves.request_again, SHIPPING),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_shipping, SHIPPING, SETTLING),
        Aborted: _go(moves.aborted, SHIPPING, SETTLING),
        Landed: _go(moves.landed, SHIPPING, DONE),
        Missed: _go(moves.missed, SHIPPING, SETTLING, QUARANTINED, FAILED, DONE),
        Settled: _go(moves.settled, SHIPPING, DONE),
    },
    SETTLING: {
        Submitted: _go(moves.request_late, SETTLING),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_failing, SETTLING),
        Aborted: Verdict.IGNORE,
        Landed: _go(moves.landed_while_settling, SETTLING, QUARANTINED, FAILED),
        Missed: _go(moves.missed_while_settling, SETTLING, QUARANTINED, FAILED),
        Settled: _go(moves.settled, SETTLING),
    },
    QUARANTINED: {
        Submitted: _go(moves.request_late, QUARANTINED),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_while_failing, QUARANTINED),
        Aborted: Verdict.IGNORE,
        Settled: _go(moves.settled, QUARANTINED, FAILED),
    },
    DONE: {
        Submitted: _go(moves.request_late, DONE),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_when_done, DONE, SHIPPING),
        Aborted: Verdict.IGNORE,
        Expired: _go(moves.removed, GONE),
    },
    FAILED: {
        Submitted: _go(moves.request_late, FAILED),
        Refused: Verdict.IGNORE,
        Spoke: _go(moves.frame_when_failed, FAILED),
        Aborted: Verdict.IGNORE,
        Expired: _go(moves.removed, GONE),
    },
    GONE: dict.fromkeys(OUTSIDE, Verdict.IGNORE),  # not in the table any more: the next is NEW
}

RULES: Rules = {
    (state, event): moves.get(event, Verdict.BUG) for state, moves in _MOVES.items() for event in EVENTS
}
"""Total: what the moves leave out can only be our own bug."""


def step(room: Room, event: RoomEvent, now_s: float, story: Story, rules: Rules = RULES) -> list[Effect]:
    """Apply one event. Raises RoomBug for an answer that the room's state rules out."""
    before = room.state
    rule = rules[before, type(event)]
    if rule is Verdict.IGNORE:
        story.add(Record(now_s, room.id, event, before, before, ()))
        return [Count("ignored")]
    if isinstance(rule, Verdict):
        raise RoomBug(room.id, before.name, str(event), story.tail(room.id))
    state, effects = rule.handler(room, event)
    if state not in rule.to:
        raise RoomBug(room.id, before.name, f"{event} to {state.name}", story.tail(room.id))
    room.state = state
    effects += moves.ship_if_complete(room)
    story.add(Record(now_s, room.id, event, before, room.state, effects))
    return effects
