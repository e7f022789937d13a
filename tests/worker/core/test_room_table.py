"""The room's table is total, blames the right side, and has no dead ends."""

import inspect

import pytest

from encodepool_worker.core import room_moves
from encodepool_worker.core.events import Aborted
from encodepool_worker.core.room import EVENTS, RULES, Go, Room, RoomState, Verdict, step
from encodepool_worker.core.room_events import ANSWERS, OUTSIDE, TIMER, Landed, Taken
from encodepool_worker.core.room_state import TOMBSTONES
from encodepool_worker.core.story import Story
from encodepool_worker.errors import RoomBug


def test_every_state_answers_every_event():
    missing = [(s.name, e.__name__) for s in RoomState for e in EVENTS if (s, e) not in RULES]
    assert missing == []


def test_nothing_from_outside_can_be_a_bug():
    assert not [key for key, rule in RULES.items() if key[1] in OUTSIDE and rule is Verdict.BUG]


def test_answers_are_never_ignored():
    """An answer that nobody waits for is our own bug, not something to shrug off."""
    assert not [key for key, rule in RULES.items() if key[1] in ANSWERS and rule is Verdict.IGNORE]


def test_the_timer_rings_in_waiting_states_and_tombstones_only():
    rings = {state for (state, event), rule in RULES.items() if event in TIMER and isinstance(rule, Go)}
    waiting = {RoomState.ANNOUNCED, RoomState.QUEUED, RoomState.ENCODING, RoomState.PARKED}
    assert rings == waiting | TOMBSTONES


def test_every_state_is_reached_and_every_living_state_can_end():
    to = {state: set() for state in RoomState}
    for (state, _), rule in RULES.items():
        if isinstance(rule, Go):
            to[state] |= rule.to
    to[RoomState.PARKED].add(RoomState.SHIPPING)  # the joint rule
    reached = {RoomState.NEW}
    while more := set().union(*(to[state] for state in reached)) - reached:
        reached |= more
    assert reached == set(RoomState)
    for start in RoomState:
        ends = {start}
        while more := set().union(*(to[state] for state in ends)) - ends:
            ends |= more
        assert RoomState.GONE in ends, start


def test_every_move_is_in_the_table():
    used = {rule.handler.__name__ for rule in RULES.values() if isinstance(rule, Go)}
    takes_an_event = {
        name
        for name, function in inspect.getmembers(room_moves, inspect.isfunction)
        if function.__module__ == room_moves.__name__
        and list(inspect.signature(function).parameters) == ["room", "event"]
    }
    assert used == takes_an_event


def test_an_answer_in_the_wrong_state_raises_with_the_story():
    room, story = Room(7), Story(10)
    step(room, Aborted(7, "cancelled"), 1.0, story)
    with pytest.raises(RoomBug, match=r"room 7: Landed\(session='p'\) in FAILED") as caught:
        step(room, Landed("p"), 2.0, story)
    assert caught.value.story == ("room 7  1.000  Aborted(room=7, reason='cancelled')  NEW -> FAILED",)
    assert room.state is RoomState.FAILED


def test_a_move_to_a_state_that_the_table_does_not_name_raises():
    rules = RULES | {(RoomState.NEW, Aborted): Go(room_moves.leave_tombstone, frozenset({RoomState.QUEUED}))}
    room = Room(7)
    with pytest.raises(RoomBug, match="to FAILED"):
        step(room, Aborted(7, "x"), 0.0, Story(1), rules)
    assert room.state is RoomState.NEW


def test_a_removed_room_ignores_the_outside_and_rules_out_answers():
    room = Room(7, state=RoomState.GONE)
    step(room, Aborted(7, "x"), 0.0, Story(1))
    assert room.state is RoomState.GONE
    with pytest.raises(RoomBug):
        step(room, Taken(), 0.0, Story(1))
