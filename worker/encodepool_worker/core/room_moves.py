"""The moves of the room machine: each takes a room and an event, returns a state and effects.

Which move answers which event in which state, and the theory, are in ``room``.
"""

from ..types import Receiver, RowLayout, Status
from .events import Aborted, Refused, Submitted
from .geometry import block_of, contract_problem, coverage_problem
from .instructions import Outcome
from .room_events import (
    Accept,
    Acquire,
    Claim,
    Count,
    Decline,
    Effect,
    End,
    Expired,
    Filled,
    Landed,
    Missed,
    NotFilled,
    Reacquire,
    Release,
    Settled,
    Ship,
    Spoke,
    Taken,
    Tell,
)
from .room_state import Party, Phase, Room, RoomState

Outcomes = tuple[RoomState, list[Effect]]

# --- pieces of moves


def stay(room: Room, *effects: Effect) -> Outcomes:
    return room.state, list(effects)


def fail(room: Room, reason: str) -> Outcomes:
    """The room's verdict is Failed: tell whom it is safe to tell."""
    effects: list[Effect] = []
    for party in room.parties.values():
        if party.phase is Phase.WAITING:
            party.phase = Phase.TOLD
            effects.append(Tell(party.receiver, Status.FAILED))
    effects.append(End(Outcome.FAILED, reason))
    return rest_failed(room, effects)


def rest_failed(room: Room, effects: list[Effect]) -> Outcomes:
    """Where a failed room waits until everyone is told."""
    if room.n_writing:
        return RoomState.SETTLING, effects
    if room.holds:  # a late write's entry stays pinned without us
        room.holds = False
        effects.append(Release())
    if room.n_late:
        return RoomState.QUARANTINED, effects
    room.forget()
    return RoomState.FAILED, effects


def rest_shipped(room: Room, effects: list[Effect]) -> Outcomes:
    if room.owed or room.n_writing or room.n_late:
        return RoomState.SHIPPING, effects
    room.holds = False
    room.forget()
    return RoomState.DONE, [*effects, Release()]


def problem_with(room: Room, receivers: list[Receiver]) -> str | None:
    """Why the item and these receivers do not fit; coverage is judged once all have spoken."""
    if room.layout is None:
        return None
    for receiver in receivers:
        problem = contract_problem(receiver, room.layout)
        if problem:
            return problem
    if room.claimed:
        n_tokens = room.layout.n_tokens
        for rank in range(room.n_ranks):
            block = block_of(n_tokens, room.n_ranks, room.fanout, rank)
            problem = coverage_problem(room.at(rank), n_tokens, block)
            if problem:
                return problem if room.n_ranks == 1 else f"encode rank {rank}: {problem}"
    return None


def ship_alone(room: Room, receiver: Receiver, layout: RowLayout) -> list[Effect]:
    """A new shipment to a receiver that has had its verdict, or came after the room's."""
    if receiver.fanout != room.fanout or contract_problem(receiver, layout):
        return [Tell(receiver, Status.FAILED), Count("bad_reshipments")]
    if receiver.n_rows == 0:
        return [Tell(receiver, Status.SUCCESS)]
    room.parties[receiver.session] = Party(receiver, Phase.WRITING, alone=True)
    room.n_writing += 1
    return [Ship(receiver), Count("reshipments")]


def tell(room: Room, party: Party, status: Status) -> Tell:
    """The verdict of a party whose write has ended. Told parties matter until all were told."""
    party.phase = Phase.TOLD
    if room.shipped:
        del room.parties[party.receiver.session]
    return Tell(party.receiver, status)


# --- the request


def leave_tombstone(room: Room, event: Refused | Aborted) -> Outcomes:
    """Its receivers are yet to come; the room never lived, so it has no End."""
    return RoomState.FAILED, []


def request_first(room: Room, event: Submitted) -> Outcomes:
    room.item, room.layout, room.key = event.item, event.item.layout, event.item.key
    problem = problem_with(room, [party.receiver for party in room.parties.values()])
    if problem:
        state, effects = fail(room, problem)
        return state, [Accept(event.seq), *effects]
    room.holds = True
    return RoomState.QUEUED, [Accept(event.seq), Acquire(event.item, room.claimed)]


def request_again(room: Room, event: Submitted) -> Outcomes:
    if room.item is None:
        return request_late(room, event)
    if room.item.identity == event.item.identity:
        return stay(room, Accept(event.seq, repeated=True), Count("repeated_requests"))
    decline = Decline(event.seq, "bootstrap_room", f"room {room.id} belongs to another item")
    return stay(room, decline, Count("identity_clashes"))


def request_late(room: Room, event: Submitted) -> Outcomes:
    reason = f"room {room.id} has ended; rooms are used once"
    return stay(room, Decline(event.seq, "bootstrap_room", reason))


def refused(room: Room, event: Refused) -> Outcomes:
    return fail(room, f"request refused: {event.reason}")


# --- the receivers


def frame_while_gathering(room: Room, event: Spoke) -> Outcomes:
    receiver = event.receiver
    party = room.parties.get(receiver.session)
    if party and party.receiver == receiver:
        return stay(room, Count("repeated_frames"))
    if party:
        # SMG repeats a request with the same room: the
        # prefill has given the older address up, and nothing is being written there.
        spoke_to, party.receiver = party.receiver.rank, receiver
        if spoke_to != receiver.rank:
            return fail(room, f"receiver {receiver.session} speaks to ranks {spoke_to} and {receiver.rank}")
    elif room.fanout and len(room.at(receiver.rank)) >= room.fanout:
        return stay(room, Tell(receiver, Status.FAILED), Count("surplus_receivers"))
    else:
        room.parties[receiver.session] = Party(receiver)
    room.fanout = room.fanout or receiver.fanout
    if receiver.fanout != room.fanout:
        return fail(room, f"receivers disagree: fan-out {room.fanout} and {receiver.fanout}")
    problem = problem_with(room, [receiver])
    if problem:
        return fail(room, problem)
    if party:
        return stay(room, Count("replaced_frames"))
    return stay(room, Claim()) if room.claimed and room.holds else stay(room)


def frame_first(room: Room, event: Spoke) -> Outcomes:
    _, effects = frame_while_gathering(room, event)
    return RoomState.ANNOUNCED, effects


def frame_while_shipping(room: Room, event: Spoke) -> Outcomes:
    receiver = event.receiver
    party = room.parties.get(receiver.session)
    if party and party.phase in (Phase.WRITING, Phase.LATE):
        if party.receiver == receiver:
            return stay(room, Count("repeated_frames"))
        party.receiver = receiver
        if not party.alone:
            return fail(room, f"receiver {receiver.session} contradicts itself")
        party.doomed = True
        return stay(room, Count("bad_reshipments"))
    surplus = not room.shipped or room.n_writing + room.n_late >= room.fanout * room.n_ranks
    if party is None and surplus:
        return stay(room, Tell(receiver, Status.FAILED), Count("surplus_receivers"))
    assert room.layout is not None  # it holds rows
    return stay(room, *ship_alone(room, receiver, room.layout))


def frame_while_failing(room: Room, event: Spoke) -> Outcomes:
    party = room.parties.get(event.receiver.session)
    if party and party.phase in (Phase.WRITING, Phase.LATE):
        party.receiver = event.receiver  # told when it is safe, where it was last heard of
        return stay(room, Count("repeated_frames"))
    return stay(room, Tell(event.receiver, Status.FAILED))


def frame_when_done(room: Room, event: Spoke) -> Outcomes:
    if event.stored is None or room.key is None:
        return stay(room, Tell(event.receiver, Status.FAILED), Count("bad_reshipments"))
    effects = ship_alone(room, event.receiver, event.stored)
    if not room.n_writing:
        return stay(room, *effects)
    room.layout = event.stored
    room.holds = True
    return RoomState.SHIPPING, [Reacquire(room.key), *effects]


def frame_when_failed(room: Room, event: Spoke) -> Outcomes:
    return stay(room, Tell(event.receiver, Status.FAILED))


# --- giving up


def aborted(room: Room, event: Aborted) -> Outcomes:
    if room.shipped:
        return stay(room, Count("ignored"))
    return fail(room, f"aborted: {event.reason}")


EXPIRED = {
    RoomState.ANNOUNCED: "no request came for its receivers",
    RoomState.QUEUED: "its deadline passed before the tower could take it",
    RoomState.ENCODING: "its deadline passed in the tower",
    RoomState.PARKED: "not all receivers spoke in time",
}


def expired(room: Room, event: Expired) -> Outcomes:
    return fail(room, EXPIRED[room.state])


def removed(room: Room, event: Expired) -> Outcomes:
    return RoomState.GONE, []


# --- rows and writes


def taken(room: Room, event: Taken) -> Outcomes:
    return RoomState.ENCODING, []


def filled(room: Room, event: Filled) -> Outcomes:
    return RoomState.PARKED, []


def not_filled(room: Room, event: NotFilled) -> Outcomes:
    return fail(room, event.reason)


def landed(room: Room, event: Landed) -> Outcomes:
    party = room.parties[event.session]
    room.n_writing -= 1
    if party.alone:
        told = tell(room, party, Status.FAILED if party.doomed else Status.SUCCESS)
        return rest_shipped(room, [told])
    effects: list[Effect] = [tell(room, party, Status.SUCCESS)]
    room.owed -= 1
    if not room.owed:
        room.shipped = True
        room.item = None
        running = {s: p for s, p in room.parties.items() if p.phase is not Phase.TOLD}
        room.parties = running
        effects.append(End(Outcome.SUCCESS))
    return rest_shipped(room, effects)


def missed(room: Room, event: Missed) -> Outcomes:
    party = room.parties[event.session]
    effects = note_missed(room, party, event)
    if party.alone:
        return rest_shipped(room, effects)
    state, more = fail(room, f"write to {event.session} failed: {event.reason}")
    return state, effects + more


def note_missed(room: Room, party: Party, event: Missed) -> list[Effect]:
    room.n_writing -= 1
    if event.may_land_late:
        party.phase = Phase.LATE
        room.n_late += 1
        return []
    return [tell(room, party, Status.FAILED)]


def landed_while_settling(room: Room, event: Landed) -> Outcomes:
    room.n_writing -= 1
    return rest_failed(room, [tell(room, room.parties[event.session], Status.FAILED)])


def missed_while_settling(room: Room, event: Missed) -> Outcomes:
    return rest_failed(room, note_missed(room, room.parties[event.session], event))


def settled(room: Room, event: Settled) -> Outcomes:
    room.n_late -= 1
    effects: list[Effect] = [tell(room, room.parties[event.session], Status.FAILED)]
    if room.state is RoomState.SHIPPING:
        return rest_shipped(room, effects)
    return rest_failed(room, effects)


def ship_if_complete(room: Room) -> list[Effect]:
    """The joint rule. Receivers and item fit: that was checked when the last of them came."""
    if room.state is not RoomState.PARKED or not room.claimed:
        return []
    room.state = RoomState.SHIPPING
    effects: list[Effect] = []
    for party in room.parties.values():
        if party.receiver.n_rows == 0:
            party.phase = Phase.TOLD
            effects.append(Tell(party.receiver, Status.SUCCESS))
        else:
            party.phase = Phase.WRITING
            effects.append(Ship(party.receiver))
            room.n_writing += 1
    room.owed = room.n_writing
    return effects
