"""TokenSpeed's control frames: exact bytes, round trips, and nothing but WireError for the rest."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.errors import WireError
from encodepool_worker.types import ROOM_LIMIT, Receiver, Status
from encodepool_worker.wire.control import (
    Registration,
    decode_control,
    decode_status,
    encode_registration,
    encode_status,
    encode_transfer_info,
)

REGISTRATION = Registration("10.0.0.7:15001", "10.0.0.7", 41234)
REGISTRATION_BYTES = [b"None", b"10.0.0.7", b"41234", b"10.0.0.7:15001", bytes(8), bytes(8)]

RECEIVER = Receiver(
    session="10.0.0.7:15001",
    host="10.0.0.7",
    status_port=41234,
    main_ptr=0x7F0102030405,
    deepstack_ptr=0xFFFFFFFFFFFFFFFE,
    n_rows=64,
    hidden=2048,
    dtype="torch.bfloat16",
    has_deepstack=True,
    fanout=4,
    row_start=128,
    span=256,
)
RECEIVER_BYTES = [
    b"9223372036854775806",
    b"10.0.0.7",
    b"41234",
    b"10.0.0.7:15001",
    b"\x05\x04\x03\x02\x01\x7f\x00\x00",
    b"\xfe\xff\xff\xff\xff\xff\xff\xff",
    b"64",
    b"2048",
    b"torch.bfloat16",
    b"1",
    b"4",
    b"128",
    b"256",
]

hosts = st.from_regex(r"[0-9A-Za-z._:-]{1,40}", fullmatch=True)
sessions = st.from_regex(r"[!-~]{1,60}", fullmatch=True)
ports = st.integers(1, 65535)
pointers = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**31 - 1)
rooms = st.integers(0, ROOM_LIMIT - 1)
receivers = st.builds(
    Receiver,
    session=sessions,
    host=hosts,
    status_port=ports,
    main_ptr=pointers,
    deepstack_ptr=pointers,
    n_rows=counts,
    hidden=counts,
    dtype=sessions,
    has_deepstack=st.booleans(),
    fanout=st.integers(1, 1024),
    row_start=counts,
    span=counts,
)


def replaced(frames, index, part):
    return [*frames[:index], part, *frames[index + 1 :]]


# --- exact bytes


def test_a_registration_is_these_bytes():
    assert encode_registration(REGISTRATION) == REGISTRATION_BYTES
    assert decode_control(REGISTRATION_BYTES) == REGISTRATION


def test_a_transfer_info_is_these_bytes():
    assert encode_transfer_info(2**63 - 2, RECEIVER) == RECEIVER_BYTES
    assert decode_control(RECEIVER_BYTES) == (2**63 - 2, RECEIVER)


def test_a_status_is_these_bytes():
    assert encode_status(7, Status.SUCCESS, 3) == [b"7", b"5", b"3"]
    assert encode_status(7, Status.FAILED, 0) == [b"7", b"0", b"0"]
    assert decode_status([b"7", b"5", b"3"]) == (7, Status.SUCCESS, 3)


def test_a_zero_row_shard_and_a_missing_span_are_understood():
    """The pipeline answers both; dropping the frame here would leave the receiver waiting."""
    _, receiver = decode_control(replaced(replaced(RECEIVER_BYTES, 6, b"0"), 12, b"0"))
    assert (receiver.n_rows, receiver.span) == (0, 0)


def test_extra_parts_are_ignored():
    assert decode_control([*RECEIVER_BYTES, b"extra", b""]) == decode_control(RECEIVER_BYTES)
    assert decode_control([*REGISTRATION_BYTES, *RECEIVER_BYTES]) == REGISTRATION
    assert decode_status([b"5", b"5", b"0", b"extra", b"parts"]) == (5, Status.SUCCESS, 0)


def test_parts_may_be_any_bytes_like():
    assert decode_control([memoryview(part) for part in RECEIVER_BYTES]) == (2**63 - 2, RECEIVER)
    assert decode_control([bytearray(part) for part in REGISTRATION_BYTES]) == REGISTRATION


# --- round trips


@given(rooms, receivers)
def test_every_receiver_survives_the_wire(room, receiver):
    assert decode_control(encode_transfer_info(room, receiver)) == (room, receiver)


@given(st.builds(Registration, sessions, hosts, ports, pointers, pointers))
def test_every_registration_survives_the_wire(registration):
    assert decode_control(encode_registration(registration)) == registration


@given(rooms, st.sampled_from(Status), st.integers(0, 2**31 - 1))
def test_every_status_survives_the_wire(room, status, rank):
    assert decode_status(encode_status(room, status, rank)) == (room, status, rank)


# --- nonsense


@pytest.mark.parametrize(
    ("index", "part", "field"),
    [
        (0, b"", "room"),
        (0, b"-1", "room"),
        (0, b"+1", "room"),
        (0, b" 1", "room"),
        (0, b"1_0", "room"),
        (0, b"none", "room"),
        (0, b"9223372036854775808", "room"),
        (0, b"9" * 5000, "room"),
        (0, "١".encode(), "room"),
        (1, b"", "host"),
        (1, b"a b", "host"),
        (1, b"a/b", "host"),
        (1, b"\xff", "host"),
        (1, b"a" * 256, "host"),
        (2, b"0", "status_port"),
        (2, b"65536", "status_port"),
        (3, b"", "session"),
        (3, b"a\nb", "session"),
        (4, b"short", "main_ptr"),
        (4, bytes(9), "main_ptr"),
        (5, b"", "deepstack_ptr"),
        (6, b"2147483648", "n_rows"),
        (7, b"x", "hidden"),
        (8, b"", "dtype"),
        (9, b"2", "has_deepstack"),
        (9, b"", "has_deepstack"),
        (10, b"0", "required_dst_info_num"),
        (10, b"1025", "required_dst_info_num"),
        (11, b"-5", "row_start"),
        (12, b"1.0", "span"),
    ],
)
def test_a_wrong_part_is_named(index, part, field):
    with pytest.raises(WireError) as error:
        decode_control(replaced(RECEIVER_BYTES, index, part))
    assert error.value.field == field
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_short_registration_is_refused(count):
    with pytest.raises(WireError) as error:
        decode_control(REGISTRATION_BYTES[:count])
    assert error.value.field == "frame"


@pytest.mark.parametrize("count", range(13))
def test_a_short_transfer_info_is_refused(count):
    with pytest.raises(WireError) as error:
        decode_control(RECEIVER_BYTES[:count])
    assert error.value.field == "frame"


@pytest.mark.parametrize("frames", [[], [b"6"], [b"6", b"5"]])
def test_a_short_status_is_refused(frames):
    with pytest.raises(WireError):
        decode_status(frames)


@pytest.mark.parametrize("number", [b"1", b"2", b"3", b"4", b"6", b"x", b"-1"])
def test_other_status_numbers_are_refused(number):
    with pytest.raises(WireError) as error:
        decode_status([b"4", number, b"0"])
    assert error.value.field == "status"


def test_a_host_that_is_not_ascii_cannot_be_sent():
    with pytest.raises(WireError):
        encode_registration(Registration("s:1", "hôte", 1))


def decodes_or_wire_error(decode, frames):
    try:
        decode(frames)
    except WireError:
        pass


mutations = st.sampled_from(["cut", "pad", "flip", "swap", "drop", "repeat"])


@given(
    st.sampled_from([REGISTRATION_BYTES, RECEIVER_BYTES, [b"7", b"5", b"3"]]),
    st.lists(st.tuples(mutations, st.integers(0, 65535), st.integers(0, 65535)), min_size=1, max_size=4),
)
def test_a_damaged_frame_decodes_or_is_a_wire_error(frames, damage):
    frames = list(frames)
    for kind, one, other in damage:
        if not frames:
            break
        index = one % len(frames)
        part = frames[index]
        if kind == "cut":
            frames[index] = part[: other % (len(part) + 1)]
        elif kind == "pad":
            frames[index] = part + struct.pack("<H", other)
        elif kind == "flip" and part:
            bit = other % (8 * len(part))
            damaged = bytearray(part)
            damaged[bit // 8] ^= 1 << (bit % 8)
            frames[index] = bytes(damaged)
        elif kind == "swap":
            frames[index], frames[0] = frames[0], frames[index]
        elif kind == "drop":
            del frames[index]
        else:
            frames.insert(index, part)
    decodes_or_wire_error(decode_control, frames)
    decodes_or_wire_error(decode_status, frames)


@given(st.lists(st.binary(max_size=40), max_size=15))
def test_any_bytes_decode_or_are_a_wire_error(frames):
    decodes_or_wire_error(decode_control, frames)
    decodes_or_wire_error(decode_status, frames)
    decodes_or_wire_error(decode_control, [b"None", *frames])
    decodes_or_wire_error(decode_control, [b"17", *frames])


def test_every_single_bit_of_every_part_may_flip():
    for golden in (REGISTRATION_BYTES, RECEIVER_BYTES):
        for index, part in enumerate(golden):
            for bit in range(8 * len(part)):
                damaged = bytearray(part)
                damaged[bit // 8] ^= 1 << (bit % 8)
                decodes_or_wire_error(decode_control, replaced(golden, index, bytes(damaged)))
