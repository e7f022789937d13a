"""Messages between the ranks of a group: numbered, of one schema, and pixels in pieces."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.errors import WireError
from encodepool_worker.types import MAX_MESSAGE_BYTES, Modality, TowerSpec
from encodepool_worker.wire import ranks as wire

SPEC = TowerSpec("qwen3_vl", 256, 3, "float32", 1536, 16, 2, 2, 151655, 151656)


def job(dtype="uint32", shape=(2, 4), **changes):
    fields = {
        "entry": 9,
        "request_id": "encode-1",
        "index": 0,
        "room": 2**63 - 2,
        "key": bytes(range(16)),
        "modality": Modality.VIDEO,
        "n_tokens": 4,
        "cost": 5,
        "extents": ((0, 64), (128, 192)),
        "grids": ((1, 4, 4), (2, 2, 2)),
        "dtype": dtype,
        "shape": shape,
    }
    return wire.JobHeader(**fields | changes)


ORDERS = (
    wire.Welcome(),
    wire.TurnedAway("another tower"),
    wire.Batch(3, (job(), job(dtype="bfloat16"))),
    wire.Demote(4, ((0, 8),), ((8, 16),)),
    wire.Write(5, "127.0.0.1:5000", ((0, 2**63, 16),)),
    wire.Retire(5),
    wire.Registered("127.0.0.1:5000"),
    wire.End(),
    wire.Beat(),
)
ANSWERS = (
    wire.Hello(rank=1, size=2, incarnation=7, tiers=(1 << 20, 0), tower=SPEC),
    wire.Encoded(3, {9: "not finite"}),
    wire.Failed(3, "out of memory"),
    wire.Demoted(4),
    wire.DemoteFailed(4, "no"),
    wire.Written(5),
    wire.WriteFailed(6, "refused", True),
    wire.WriteSettled(6, False),
    wire.Beat({"writes": 2.0}),
)


def test_every_message_arrives_as_it_was_sent_and_in_its_place():
    leader, at_follower = wire.Outgoing(), wire.Incoming()
    for order in ORDERS:
        assert at_follower.from_leader(leader.encode(order)) == (order, [])
    [message, [payload]] = at_follower.from_leader(leader.encode(wire.Piece(1, 64), b"pixels"))
    assert message == wire.Piece(1, 64)
    assert payload == b"pixels"

    follower, at_leader = wire.Outgoing(), wire.Incoming()
    for answer in ANSWERS:
        assert at_leader.from_follower(follower.encode(answer)) == answer


def test_payloads_are_handed_on_without_a_copy():
    pixels = bytearray(8)
    assert wire.Outgoing().encode(wire.Piece(0, 0), pixels)[2] is pixels


def test_a_message_that_was_lost_or_came_twice_is_noticed():
    sender = wire.Outgoing()
    first, second, third = (sender.encode(wire.Beat()) for _ in range(3))
    receiver = wire.Incoming()
    receiver.from_leader(first)
    with pytest.raises(WireError, match="1: messages were lost"):
        receiver.from_leader(first)
    with pytest.raises(WireError, match="1: messages were lost"):
        receiver.from_leader(third)
    receiver.from_leader(second)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [bytes(8)],
        [bytes(7), msgspec.msgpack.encode(wire.Beat())],
        [bytes(9), msgspec.msgpack.encode(wire.Beat())],
        [bytes(8), b""],
        [bytes(8), b"\xc1"],
        [bytes(8), msgspec.msgpack.encode({"type": "Unknown"})],
        [bytes(8), msgspec.msgpack.encode({"type": "Retire", "write": 1, "more": 1})],
        [bytes(8), msgspec.msgpack.encode({"type": "Retire", "write": "1"})],
    ],
)
def test_what_is_no_message_is_refused_on_both_sides(frames):
    with pytest.raises(WireError):
        wire.Incoming().from_leader(frames)
    with pytest.raises(WireError):
        wire.Incoming().from_follower(frames)


def test_each_side_hears_only_what_the_other_says():
    for order in ORDERS[:-1]:
        with pytest.raises(WireError):
            wire.Incoming().from_follower(wire.Outgoing().encode(order))
    for answer in ANSWERS[:-1]:
        with pytest.raises(WireError):
            wire.Incoming().from_leader(wire.Outgoing().encode(answer))


def test_a_piece_has_one_payload_and_nothing_else_has_any():
    for message, payloads in (
        (wire.Piece(0, 0), ()),
        (wire.Piece(0, 0), (b"a", b"b")),
        (wire.Beat(), (b"a",)),
    ):
        with pytest.raises(WireError, match="frames"):
            wire.Incoming().from_leader(wire.Outgoing().encode(message, *payloads))
    with pytest.raises(WireError, match="frames"):
        wire.Incoming().from_follower(wire.Outgoing().encode(wire.Beat(), b"a"))


def test_a_header_is_bounded_before_it_is_read(monkeypatch):
    longest = msgspec.msgpack.encode(wire.TurnedAway("why"))
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", len(longest))
    wire.Incoming().from_leader([bytes(8), longest])
    with pytest.raises(WireError, match="at most"):
        wire.Incoming().from_leader([bytes(8), longest + b"\0"])


@given(st.lists(st.binary(max_size=24), max_size=4))
def test_any_frames_are_a_message_or_a_wire_error(frames):
    for side in ("from_leader", "from_follower"):
        try:
            getattr(wire.Incoming(), side)(frames)
        except WireError:
            pass


# --- pixels


def assemble(batch, payloads):
    assembly = wire.Assembly(batch)
    for piece, payload in wire.pieces(payloads):
        assert not assembly.is_complete
        assembly.add(piece, payload)
    return assembly


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 8))
def test_pixels_arrive_whole_whatever_their_sizes(payloads, longest):
    jobs = tuple(job(dtype="float16", shape=(len(payload), 1)) for payload in payloads)
    payloads = [payload * 2 for payload in payloads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_PIECE_BYTES", longest)
        assembly = assemble(wire.Batch(1, jobs), payloads)
        assert all(len(payload) <= longest for _, payload in wire.pieces(payloads))
    assert assembly.is_complete
    assert [bytes(pixels) for pixels in assembly.pixels] == payloads


@pytest.mark.parametrize(
    ("piece", "n_bytes"),
    [
        (wire.Piece(0, 4), 4),  # not next: the first four are missing
        (wire.Piece(1, 0), 4),
        (wire.Piece(0, 0), 0),
        (wire.Piece(0, 0), 33),  # more than the header says
    ],
)
def test_a_piece_that_is_not_next_or_does_not_fit_is_refused(piece, n_bytes):
    assembly = wire.Assembly(wire.Batch(1, (job(), job())))
    with pytest.raises(WireError, match="piece"):
        assembly.add(piece, memoryview(bytes(n_bytes)))


def test_no_piece_is_longer_than_one_may_be(monkeypatch):
    monkeypatch.setattr(wire, "MAX_PIECE_BYTES", 16)
    assembly = wire.Assembly(wire.Batch(1, (job(),)))
    with pytest.raises(WireError, match="piece"):
        assembly.add(wire.Piece(0, 0), memoryview(bytes(17)))
    assembly.add(wire.Piece(0, 0), memoryview(bytes(16)))


def test_nothing_comes_after_the_last_piece():
    assembly = assemble(wire.Batch(1, (job(),)), [bytes(32)])
    with pytest.raises(WireError, match="piece"):
        assembly.add(wire.Piece(0, 32), memoryview(b"more"))
    with pytest.raises(WireError, match="piece"):
        assembly.add(wire.Piece(1, 0), memoryview(b"more"))


@pytest.mark.parametrize(
    ("dtype", "shape", "field"),
    [
        ("float8", (1,), "dtype"),
        ("uint32", (-1, 2), "shape"),
        ("uint32", (-1, -2), "shape"),
        ("uint32", (MAX_MESSAGE_BYTES // 4 + 1,), "shape"),
    ],
)
def test_a_batch_is_refused_before_it_costs_memory(dtype, shape, field):
    with pytest.raises(WireError) as refused:
        wire.Assembly(wire.Batch(1, (job(dtype, shape),)))
    assert refused.value.field == field


def test_the_longest_item_is_taken():
    assembly = wire.Assembly(wire.Batch(1, (job("uint32", (MAX_MESSAGE_BYTES // 4,)),)))
    assert assembly.pixels[0].nbytes == MAX_MESSAGE_BYTES
