"""Headers and payload frames between the frontend and rank 0."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.errors import WireError
from encodepool_worker.types import Grid, Item, Modality, RefusalKind, TowerSpec
from encodepool_worker.wire import intake
from encodepool_worker.wire.intake import Submit, TensorHeader, decode, encode

GRID_BYTES = bytes(24)


def submit(**changes):
    fields = {
        "seq": 4,
        "request_id": "encode-1",
        "index": 0,
        "room": 2**63 - 2,
        "modality": Modality.IMAGE,
        "key": bytes(range(16)),
        "grids": ((1, 4, 4),),
        "n_tokens": 4,
        "cost": 4,
        "deadline_s": 12.5,
        "pixel_dtype": "bfloat16",
        "pixel_shape": (16, 8),
        "tensors": (TensorHeader(name="image_grid_thw", dtype="int64", shape=(1, 3)),),
    }
    return Submit(**{**fields, **changes})


PIXELS = bytes(256)

MESSAGES = [
    (submit(), [PIXELS, GRID_BYTES]),
    (intake.Refuse(room=5, reason="modality: audio"), []),
    (intake.Abort(room=5, reason="gone"), []),
    (intake.Drain(deadline_s=99.0), []),
    (intake.Admitted(seq=1), []),
    (intake.Admitted(seq=2, repeated=True), []),
    (intake.Refused(seq=1, kind=RefusalKind.FULL, field="room", reason="taken"), []),
    (intake.Credit(seq=1), []),
    (
        intake.State(turn_s=1.0, routed=True, queue_items=1, queue_cost=2, batch_age_s=0.5),
        [],
    ),
    (intake.Drained(), []),
]


@pytest.mark.parametrize(("message", "payloads"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_survives_the_wire(message, payloads):
    decoded, frames = decode(encode(message, *payloads))
    assert decoded == message
    assert [bytes(frame) for frame in frames] == payloads


def test_answers_go_back_together():
    said = [intake.Admitted(seq=1), intake.Credit(seq=1), intake.Drained()]
    frame = intake.encode_back(said)
    assert intake.decode_back([frame]) == said
    for broken in ([], [frame, frame], [frame[:-1]], [b"\x91\x01"]):
        with pytest.raises(WireError):
            intake.decode_back(broken)


def test_a_header_is_these_bytes():
    assert encode(intake.Credit(seq=1)) == [b"\x83\xa4type\xa6Credit\xa1v\x03\xa3seq\x01"]


def test_payloads_are_not_copied():
    pixels = bytearray(PIXELS)
    frames = encode(submit(), pixels, GRID_BYTES)
    assert frames[1] is pixels
    _, payloads = decode(frames)
    pixels[0] = 77
    assert payloads[0][0] == 77


def test_a_submission_becomes_an_item():
    spec = TowerSpec("qwen3_vl", 8, 3, "float32", 8, 2, 2, 2, None, None)
    item = submit().item(spec)
    assert item == Item("encode-1", 0, 2**63 - 2, bytes(range(16)), Modality.IMAGE, spec.layout(4), 4, 12.5)
    assert submit().grid_types() == (Grid(1, 4, 4),)
    assert submit().payload_bytes() == [256, 24]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"v": 1}, "v"),
        ({"seq": -1}, "seq"),
        ({"room": -1}, "room"),
        ({"key": b"short"}, "key"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_tokens": 2**31}, "n_tokens"),
        ({"cost": 0}, "cost"),
        ({"grids": ()}, "grids"),
        ({"grids": ((0, 4, 4),)}, "grids"),
        ({"grids": ((1, 2**31, 4),)}, "grids"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"pixel_dtype": "float64"}, "pixel.dtype"),
        ({"pixel_shape": (16, -8)}, "pixel.shape"),
        ({"pixel_shape": (2**32, 8)}, "pixel.shape"),
        ({"pixel_shape": (1,) * 9}, "pixel.shape"),
        ({"tensors": (TensorHeader("x", "complex", (1,)),)}, "tensors[x].dtype"),
        ({"tensors": (TensorHeader("x", "int64", (1,)),) * 17}, "tensors"),
        ({"pixel_shape": (15, 8)}, "payload[0]"),
        ({"pixel_shape": (2**32 - 1,) * 8}, "payload[0]"),
        ({"tensors": ()}, "frames"),
    ],
)
def test_a_wrong_header_is_named_on_both_sides(changes, field):
    message = submit(**changes)
    with pytest.raises(WireError) as error:
        encode(message, PIXELS, GRID_BYTES)
    assert error.value.field == field
    with pytest.raises(WireError) as error:
        decode([msgspec.msgpack.encode(message), PIXELS, GRID_BYTES])
    assert error.value.field == field


def test_missing_and_surplus_payloads_are_refused():
    header = encode(submit(), PIXELS, GRID_BYTES)[0]
    for payloads in ([], [PIXELS], [PIXELS, GRID_BYTES, b""], [GRID_BYTES, PIXELS]):
        with pytest.raises(WireError):
            decode([header, *payloads])
    with pytest.raises(WireError):
        decode([*encode(intake.Drained()), b"payload"])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Submit", "v": 1}),
        msgspec.msgpack.encode({"type": "Nothing", "v": 1}),
        msgspec.msgpack.encode({"type": "Drained", "v": 1, "more": 2}),
        msgspec.msgpack.encode({"type": "Admitted", "v": "1", "seq": 1}),
        b"\x80\x04\x95",  # how a pickle begins
    ],
)
def test_a_header_of_another_schema_is_refused(header):
    with pytest.raises(WireError) as error:
        decode([header])
    assert error.value.field == "header"


def test_no_frames_and_huge_headers_are_refused():
    with pytest.raises(WireError):
        decode([])
    with pytest.raises(WireError) as error:
        decode([bytes(intake.MAX_HEADER_BYTES + 1)])
    assert error.value.field == "header"


@given(st.sampled_from(MESSAGES), st.integers(0, 2**16), st.integers(0, 2**16), st.booleans())
def test_a_damaged_header_decodes_or_is_a_wire_error(sample, where, how, cut):
    message, payloads = sample
    header = bytearray(encode(message, *payloads)[0])
    if cut:
        del header[where % len(header) :]
    else:
        header[where % len(header)] ^= 1 << how % 8
    try:
        decode([bytes(header), *payloads])
    except WireError:
        pass


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_frames_decode_or_are_a_wire_error(frames):
    try:
        decode(frames)
    except WireError:
        pass
