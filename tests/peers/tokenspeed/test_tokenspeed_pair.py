"""The real TokenSpeed endpoints against each other: what the other tests take for granted of them."""

import random

import pytest
from tests.peers.tokenspeed.memory import pattern, sha256
from tests.peers.tokenspeed.remote import PeerError

pytestmark = pytest.mark.real

HIDDEN = 2048


@pytest.fixture
def address(shared_encode):
    return shared_encode.call("info")["bootstrap"]


@pytest.fixture
def room():
    return random.SystemRandom().randrange(2**62)


def test_a_room_arrives_byte_for_byte(shared_encode, address, shared_prefill, room):
    sent = shared_encode.call("submit", room=room, tokens=64, hidden=HIDDEN, levels=3)
    shared_prefill.call("ask", address=address, room=room, tokens=64, hidden=HIDDEN, levels=3)

    assert shared_prefill.call("verdict", room=room)["status"] == "Success"
    assert shared_encode.call("verdict", room=room)["status"] == "Success"
    assert shared_prefill.call("digest", room=room) == sent
    assert sent["main"] == sha256(pattern(room, 64 * HIDDEN * 2))
    shared_prefill.call("forget", room=room)


def test_sharded_ranks_hold_the_item_between_them(shared_encode, address, shared_prefill, room):
    sent = shared_encode.call("submit", room=room, tokens=3, hidden=HIDDEN, levels=1)
    shared_prefill.call(
        "ask", address=address, room=room, tokens=3, hidden=HIDDEN, levels=1, tp_size=4, shard=True
    )

    verdict = shared_prefill.call("verdict", room=room, tp_size=4)
    assert verdict["ranks"] == dict.fromkeys("0123", "Success")  # the last one has no row
    assert shared_prefill.call("digest", room=room, tp_size=4, shard=True) == sent
    shared_prefill.call("forget", room=room, tp_size=4)


def test_a_frame_before_the_work_is_kept(shared_encode, address, shared_prefill, room, wait_for):
    shared_prefill.call("ask", address=address, room=room, tokens=8, hidden=HIDDEN)
    wait_for(lambda: shared_encode.call("status", room=room) == "Bootstrapped", what="the frame's arrival")

    shared_encode.call("submit", room=room, tokens=8, hidden=HIDDEN)
    assert shared_prefill.call("verdict", room=room)["status"] == "Success"
    shared_prefill.call("forget", room=room)


@pytest.mark.parametrize(
    "announce",
    [
        {"hidden": HIDDEN + 1},
        {"dtype": "torch.float16"},
        {"span": 9},
        {"row_start": 1},
        {"has_deepstack": True},
    ],
    ids=lambda announce: next(iter(announce)),
)
def test_a_wrong_contract_fails_and_writes_nothing(shared_encode, address, shared_prefill, room, announce):
    shared_encode.call("submit", room=room, tokens=8, hidden=HIDDEN)
    shared_prefill.call("ask", address=address, room=room, tokens=8, hidden=HIDDEN, announce=announce)

    assert shared_prefill.call("verdict", room=room)["status"] == "Failed"
    assert shared_prefill.call("untouched", room=room)
    shared_prefill.call("forget", room=room)


def test_the_reference_leaves_a_late_receiver_of_a_failed_room_waiting(
    shared_encode, address, shared_prefill, room
):
    """The hole that our worker closes: without this the tests of it would prove nothing."""
    shared_encode.call("fail", room=room, reason="tower")
    shared_prefill.call("ask", address=address, room=room, tokens=8, hidden=HIDDEN)

    assert shared_prefill.call("verdict", room=room, timeout_s=2)["status"] == "Timeout"
    shared_prefill.call("forget", room=room)


def test_many_rooms_in_flight_arrive_exactly(shared_encode, address, shared_prefill):
    rooms = [(1_000_000 + i, 1 + i % 48) for i in range(100)]
    sent = {
        room: shared_encode.call("submit", room=room, tokens=tokens, hidden=HIDDEN) for room, tokens in rooms
    }
    received = shared_prefill.call("receive", address=address, rooms=rooms, hidden=HIDDEN)

    assert [entry["status"] for entry in received] == ["Success"] * len(rooms)
    assert {entry["room"]: entry["main"] for entry in received} == {
        room: digests["main"] for room, digests in sent.items()
    }


def test_two_encode_ranks_each_serve_their_half(shared_encode, shared_prefill, room):
    address = shared_encode.call("info", tp_size=2)["bootstrap"]
    sent = shared_encode.call("submit", room=room, tokens=10, hidden=HIDDEN, tp_size=2)
    four = {"room": room, "tp_size": 4}
    shared_prefill.call("ask", address=address, tokens=10, hidden=HIDDEN, shard=True, **four)

    assert shared_prefill.call("verdict", **four)["status"] == "Success"
    assert shared_prefill.call("digest", shard=True, **four) == sent
    shared_prefill.call("forget", **four)


def test_an_error_of_the_endpoint_reaches_the_caller(shared_prefill):
    with pytest.raises(PeerError, match="no rank asked for room 5"):
        shared_prefill.call("digest", room=5)
