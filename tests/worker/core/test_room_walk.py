"""Every life that one room can have, walked exhaustively, with what must hold at every step.

The walk plays the outside (two item identities, up to three receivers that are right, change
their mind or disagree about the fan-out, refusals, aborts, deadlines) and the pipeline (each
effect that demands an answer gets every answer it may get). It keeps its own books, so a
rule that loses track of something is caught whatever the room itself believes.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from encodepool_worker.core import room_events as on
from encodepool_worker.core import room_moves as moves
from encodepool_worker.core.events import Aborted, Refused, Submitted
from encodepool_worker.core.instructions import Outcome
from encodepool_worker.core.room import RULES, Go, Room, RoomState, Verdict, step
from encodepool_worker.core.room_state import GATHERING, TOMBSTONES
from encodepool_worker.core.story import Story
from encodepool_worker.testing import make_item, make_layout, make_receiver
from encodepool_worker.types import Receiver, Status

ROOM = 7
LAYOUT = make_layout(n_tokens=4, levels=1)
ITEMS = [make_item(ROOM, "cat", layout=LAYOUT), make_item(ROOM, "dog", layout=LAYOUT)]
FAILING = {RoomState.SETTLING, RoomState.QUARANTINED, RoomState.FAILED}


def shard(session: str, start: int, stop: int, fanout: int, **changes: int) -> Receiver:
    return make_receiver(session, layout=LAYOUT, rows=(start, stop), fanout=fanout, **changes)


CASTS = {
    "one receiver": [
        shard("p", 0, 4, 1),
        shard("p", 0, 4, 1, main_ptr=0x20_0000),
        shard("p", 0, 4, 2),
        shard("q", 0, 4, 1),
        shard("q", 0, 4, 2),
    ],
    "two shards, a third who is surplus": [
        shard("p", 0, 2, 2),
        shard("p", 0, 2, 2, main_ptr=0x20_0000),
        shard("p", 0, 2, 3),
        shard("q", 2, 4, 2),
        shard("q", 2, 4, 2, main_ptr=0x20_0000),
        shard("q", 2, 4, 1),
        shard("r", 2, 4, 2),
        shard("r", 2, 4, 3),
    ],
    "three, one of them without rows": [
        shard("p", 0, 3, 3),
        shard("p", 0, 3, 3, main_ptr=0x20_0000),
        shard("q", 3, 4, 3),
        shard("r", 4, 4, 3),
    ],
    "two who want all rows": [shard("p", 0, 4, 2), shard("q", 0, 4, 2)],
    "a gap": [shard("p", 0, 2, 2), shard("q", 3, 4, 2)],
    "an item of another length": [shard("p", 0, 4, 1), shard("q", 0, 4, 1, span=5)],
    "two ranks, a shard at each": [
        shard("p", 0, 2, 1),
        shard("p", 0, 2, 1, rank=1),
        shard("q", 2, 4, 1, rank=1),
        shard("q", 2, 4, 1, rank=1, main_ptr=0x20_0000),
        shard("r", 2, 4, 1, rank=1),
    ],
    "two ranks, two shards at each": [
        shard("p", 0, 1, 2),
        shard("q", 1, 2, 2),
        shard("r", 2, 3, 2, rank=1),
        shard("s", 3, 4, 2, rank=1),
    ],
    "two ranks, all rows from both": [shard("p", 0, 4, 1), shard("q", 0, 4, 1, rank=1)],
    "two ranks, each asked for the other's": [shard("p", 2, 4, 1), shard("q", 0, 2, 1, rank=1)],
}


@dataclass
class Books:
    """What the walk knows without asking the room."""

    rows: str = "none"  # none, asked, taken, there
    flying: dict[str, Receiver] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    owed: dict[str, Receiver] = field(default_factory=dict)
    ended: Outcome | None = None
    lived: bool = False
    crew: frozenset[str] = frozenset()  # whom the room's own shipment goes to

    def copy(self) -> "Books":
        return replace(self, flying=dict(self.flying), owed=dict(self.owed))


def copy_room(room: Room) -> Room:
    return replace(room, parties={s: replace(p) for s, p in room.parties.items()})


def fingerprint(room: Room, books: Books) -> object:
    parties = frozenset((s, p.receiver, p.phase, p.alone, p.doomed) for s, p in room.parties.items())
    counts = (room.n_writing, room.n_late, room.owed, room.holds, room.shipped, room.fanout)
    what = (room.state, room.item, room.key, room.layout, parties, counts)
    flying, owed = frozenset(books.flying.items()), frozenset(books.owed.items())
    return what, (books.rows, flying, books.late, owed, books.ended, books.lived, books.crew)


def may_come(room: Room, books: Books, cast: list[Receiver]) -> list[on.RoomEvent]:
    """Everything that may happen now: the outside always, answers when they are due."""
    events: list[on.RoomEvent] = [Submitted(1, item, 1, 1) for item in ITEMS]
    events += [Refused(ROOM, "bad"), Aborted(ROOM, "cancelled")]
    stored = [None, LAYOUT] if room.state is RoomState.DONE else [None]
    events += [on.Spoke(receiver, layout) for receiver in cast for layout in stored]
    if room.state in GATHERING | TOMBSTONES:
        events.append(on.Expired())
    if books.rows == "asked":
        events += [on.Taken(), on.Filled()]
    if books.rows == "taken":
        events += [on.Filled(), on.NotFilled("tower failed")]
    for session in books.flying:
        events += [
            on.Landed(session),
            on.Missed(session, "gone", may_land_late=False),
            on.Missed(session, "timed out", may_land_late=True),
        ]
    events += [on.Settled(session) for session in books.late]
    return events


def note_event(books: Books, event: on.RoomEvent) -> Receiver | None:
    """Book what the event says; returns the receiver whose write landed."""
    match event:
        case on.Spoke(receiver):
            books.owed[receiver.session] = receiver
        case on.Taken():
            books.rows = "taken"
        case on.Filled():
            books.rows = "there"
        case on.NotFilled():
            books.rows = "failed"
        case on.Landed(session):
            return books.flying.pop(session)
        case on.Missed(session, _, may_land_late):
            del books.flying[session]
            if may_land_late:
                books.late |= {session}
        case on.Settled(session):
            books.late -= {session}
    return None


def check_step(before: Room, room: Room, books: Books, event: on.RoomEvent, effects: list[on.Effect]) -> None:
    """Book the effects, and hold them and the new state against the rules."""
    landed = note_event(books, event)
    answers = [e for e in effects if isinstance(e, on.Accept | on.Decline)]
    assert len(answers) == isinstance(event, Submitted), "one answer for each submission"
    live = before.state not in (RoomState.NEW, RoomState.ANNOUNCED)
    if live and isinstance(event, Submitted | Refused):
        assert replace(room, parties={}) == replace(before, parties={}), "a live room was touched"
        assert room.parties == before.parties
    if live and isinstance(event, Submitted) and before.item is not None and before.state not in FAILING:
        same = before.item.identity == event.item.identity
        assert isinstance(answers[0], on.Accept) is same, "identity"
    if before.state in GATHERING and room.state is RoomState.SHIPPING:
        books.crew = frozenset(books.owed)
        assert {r.rank for r in books.owed.values()} == set(range(room.n_ranks)), "a rank is left out"
    for effect in effects:
        match effect:
            case on.Acquire():
                assert books.rows == "none"
                books.rows = "asked"
            case on.Reacquire(key):
                assert books.rows == "none"
                assert key in {item.key for item in ITEMS}
                books.rows = "there"
            case on.Release():
                assert books.rows != "none", "released what it does not hold"
                assert not books.flying, "released under a write"
                books.rows = "none"
            case on.Claim():
                assert books.rows != "none"
            case on.Ship(receiver):
                assert books.rows == "there", "ships rows it does not have"
                assert receiver.session not in books.flying.keys() | books.late, "two writes to one"
                assert books.owed[receiver.session] == receiver, "wrote where nobody waits"
                assert books.ended or receiver.session in books.crew, "served a surplus receiver"
                books.flying[receiver.session] = receiver
            case on.Tell(receiver, status):
                session = receiver.session
                assert session in books.owed, "told unasked, or twice"
                assert session not in books.flying.keys() | books.late, "told while a write may land"
                frame = books.owed.pop(session)
                if status is Status.SUCCESS:
                    assert books.ended is not Outcome.FAILED, "Success from a failed room"
                    assert receiver.n_rows == 0 or landed == frame, "Success without its write"
            case on.End(outcome):
                assert books.ended is None, "ended twice"
                books.ended = outcome
    check_rest(before, room, books)


def check_rest(before: Room, room: Room, books: Books) -> None:
    books.lived |= before.state in GATHERING or room.state in GATHERING
    known = {s for s, p in room.parties.items() if p.phase is not moves.Phase.TOLD}
    assert books.owed.keys() == known, "somebody who spoke is forgotten, or was told already"
    assert (books.rows != "none") == room.holds
    assert len(books.flying) == room.n_writing
    assert len(books.late) == room.n_late
    if room.state in FAILING:
        waits_for_safety = books.flying.keys() | books.late
        assert books.owed.keys() <= waits_for_safety, "somebody could have been told at once"
        assert books.ended is (Outcome.FAILED if books.lived else None)
    if room.state in TOMBSTONES | {RoomState.GONE}:
        assert books.rows == "none", "keeps its rows"
        assert not books.flying
        assert not books.late
        assert not room.parties
        assert room.item is None
    if room.state in GATHERING | {RoomState.SHIPPING}:
        assert books.ended is not Outcome.FAILED
    if room.state is RoomState.DONE:
        assert books.ended is Outcome.SUCCESS
    if room.state is RoomState.GONE:
        assert before.state in TOMBSTONES
    assert room.state is not RoomState.PARKED or not room.claimed, "parked though all have spoken"


def walk(cast: list[Receiver], rules=RULES) -> tuple[int, set[tuple]]:
    """Visit every configuration. Returns how many there are, and the cells that were used."""
    start = (Room(ROOM, 1 + max(receiver.rank for receiver in cast)), Books())
    seen = {fingerprint(*start)}
    todo = deque([start])
    cells: set[tuple] = set()
    while todo:
        before, known = todo.popleft()
        for event in may_come(before, known, cast):
            room, books = copy_room(before), known.copy()
            effects = step(room, event, 0.0, Story(1), rules)
            if rules[before.state, type(event)] is Verdict.IGNORE:
                assert room == before
            check_step(before, room, books, event, effects)
            cells.add((before.state, type(event), room.state))
            if room.state is RoomState.NEW and room.parties:
                raise AssertionError("a room that remembers is not new")
            mark = fingerprint(room, books)
            if mark not in seen and room.state is not RoomState.GONE:
                seen.add(mark)
                todo.append((room, books))
    return len(seen), cells


def walk_all(rules) -> None:
    for cast in CASTS.values():
        walk(cast, rules)


@cache
def walk_of(cast: str) -> tuple[int, set[tuple]]:
    return walk(CASTS[cast])


@pytest.mark.parametrize("cast", CASTS)
def test_no_life_of_a_room_breaks_a_rule(cast):
    n_configurations, _ = walk_of(cast)
    assert n_configurations > 20


def test_every_cell_of_the_table_is_lived():
    """What the table allows but no life can reach would be a rule that nobody can check."""
    lived = set().union(*(walk_of(cast)[1] for cast in CASTS))
    allowed = {
        (state, event, to) for (state, event), rule in RULES.items() if isinstance(rule, Go) for to in rule.to
    }
    after_joint = {(s, e, RoomState.SHIPPING) for s, e, to in allowed if to is RoomState.PARKED}
    assert allowed - lived == set()
    moves_lived = {cell for cell in lived if isinstance(RULES[cell[:2]], Go)}
    assert moves_lived - allowed <= after_joint


# --- broken rules must be caught


def abort_frees_under_a_write(room, event):
    _, effects = moves.fail(room, "aborted")
    room.holds, room.n_writing = False, 0
    room.forget()
    return RoomState.FAILED, [*effects, on.Release()]


def abort_tells_at_once(room, event):
    state, effects = moves.aborted(room, event)
    return state, effects + [on.Tell(p.receiver, Status.FAILED) for p in room.parties.values()]


def failed_tower_is_not_told(room, event):
    state, effects = moves.not_filled(room, event)
    return state, [e for e in effects if not isinstance(e, on.Tell)]


def reaped_room_is_silent(room, event):
    state, effects = moves.expired(room, event)
    return state, [e for e in effects if not isinstance(e, on.Tell)]


def rows_are_kept_when_done(room, event):
    state, effects = moves.landed(room, event)
    return state, [e for e in effects if not isinstance(e, on.Release)]


def done_confirms_without_writing(room, event):
    return room.state, [on.Tell(event.receiver, Status.SUCCESS)]


def done_ignores_frames(room, event):
    return room.state, []


def failed_confirms_who_comes_late(room, event):
    return room.state, [on.Tell(event.receiver, Status.SUCCESS)]


def surplus_receiver_is_served(room, event):
    if event.receiver.session not in room.parties:
        return room.state, moves.ship_alone(room, event.receiver, room.layout)
    return moves.frame_while_shipping(room, event)


def contradiction_under_way_is_ignored(room, event):
    party = room.parties.get(event.receiver.session)
    if party and party.phase is moves.Phase.WRITING:
        return room.state, []
    return moves.frame_while_shipping(room, event)


def an_older_address_is_kept(room, event):
    if event.receiver.session in room.parties:
        return room.state, []
    return moves.frame_while_gathering(room, event)


def fanout_is_not_compared(room, event):
    receiver = replace(event.receiver, fanout=room.fanout or event.receiver.fanout)
    return moves.frame_while_gathering(room, on.Spoke(receiver))


def late_write_is_told_at_once(room, event):
    return moves.missed(room, replace(event, may_land_late=False))


def failed_room_says_success(room, event):
    state, effects = moves.landed_while_settling(room, event)
    return state, [replace(e, status=Status.SUCCESS) if isinstance(e, on.Tell) else e for e in effects]


def failing_room_tells_whom_it_still_writes_to(room, event):
    return room.state, [on.Tell(event.receiver, Status.FAILED)]


def quarantine_ends_in_silence(room, event):
    state, effects = moves.settled(room, event)
    return state, [e for e in effects if not isinstance(e, on.Tell)]


def other_item_is_accepted(room, event):
    return room.state, [on.Accept(event.seq)]


def bad_request_kills_a_live_room(room, event):
    return moves.fail(room, "refused")


def every_landing_ends_the_room(room, event):
    state, effects = moves.landed(room, event)
    return state, [*effects, on.End(Outcome.SUCCESS)]


def done_forgets_to_refer_again(room, event):
    state, effects = moves.frame_when_done(room, event)
    return state, [e for e in effects if not isinstance(e, on.Reacquire)]


def late_reshipment_is_forgotten(room, event):
    party = room.parties[event.session]
    if party.alone and event.may_land_late:
        room.n_writing -= 1
        del room.parties[event.session]
        return moves.rest_shipped(room, [])
    return moves.missed(room, event)


S = RoomState
BROKEN = [
    (S.SHIPPING, Aborted, abort_frees_under_a_write),
    (S.SHIPPING, Aborted, abort_tells_at_once),
    (S.ENCODING, on.NotFilled, failed_tower_is_not_told),
    (S.ANNOUNCED, on.Expired, reaped_room_is_silent),
    (S.PARKED, on.Expired, reaped_room_is_silent),
    (S.SHIPPING, on.Landed, rows_are_kept_when_done),
    (S.SHIPPING, on.Landed, every_landing_ends_the_room),
    (S.DONE, on.Spoke, done_confirms_without_writing),
    (S.DONE, on.Spoke, done_ignores_frames),
    (S.DONE, on.Spoke, done_forgets_to_refer_again),
    (S.FAILED, on.Spoke, failed_confirms_who_comes_late),
    (S.FAILED, on.Spoke, done_ignores_frames),
    (S.SHIPPING, on.Spoke, surplus_receiver_is_served),
    (S.SHIPPING, on.Spoke, contradiction_under_way_is_ignored),
    (S.PARKED, on.Spoke, an_older_address_is_kept),
    (S.PARKED, on.Spoke, fanout_is_not_compared),
    (S.SHIPPING, on.Missed, late_write_is_told_at_once),
    (S.SHIPPING, on.Missed, late_reshipment_is_forgotten),
    (S.SETTLING, on.Landed, failed_room_says_success),
    (S.SETTLING, on.Spoke, failing_room_tells_whom_it_still_writes_to),
    (S.QUARANTINED, on.Spoke, failing_room_tells_whom_it_still_writes_to),
    (S.QUARANTINED, on.Settled, quarantine_ends_in_silence),
    (S.QUEUED, Submitted, other_item_is_accepted),
    (S.QUEUED, Refused, bad_request_kills_a_live_room),
]


@pytest.mark.parametrize(("state", "event", "broken"), BROKEN, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_broken_rule_is_caught(state, event, broken):
    rules = RULES | {(state, event): Go(broken, frozenset(RoomState))}
    with pytest.raises((AssertionError, KeyError)):
        walk_all(rules)
