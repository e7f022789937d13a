"""The Encode request: what SMG sends is accepted, everything else is refused by field and room."""

import struct

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import tokenspeed_encoder_pb2

from encodepool_worker.errors import RequestRefused
from encodepool_worker.types import Grid, Modality, TowerSpec
from encodepool_worker.wire.encode import (
    EncodeLimits,
    EncodeTensor,
    ShmSource,
    build_encode,
    parse_encode,
)

SPEC = TowerSpec("qwen3_vl", 256, 3, "float32", 1536, 16, 2, 2, 151655, 151656)
LIMITS = EncodeLimits(max_patches=1024, max_pixel_bytes=2 << 20)
ROOM = 2**63 - 2
ITEM = "mm_inputs.items[0]"
PIXELS = f"{ITEM}.encoder_input"
GRID = f"{ITEM}.model_specific_tensors[image_grid_thw]"


def grid_bytes(*grids):
    return b"".join(struct.pack("<3q", *grid) for grid in grids)


def smg_request():
    """A 64x64 image as SMG 1.13 sends it."""
    request = tokenspeed_encoder_pb2.EncodeRequest(request_id="encode-018f")
    request.items.add(bootstrap_room=ROOM)
    item = request.mm_inputs.items.add(modality=1, content_hash=bytes(32), placeholder_token_id=151655)
    item.encoder_input.dtype = "bfloat16"
    item.encoder_input.shape.extend([16, 1536])
    item.encoder_input.inline = bytes(16 * 1536 * 2)
    side = item.model_specific_tensors
    side["image_grid_thw"].dtype = "int64"
    side["image_grid_thw"].shape.extend([1, 3])
    side["image_grid_thw"].inline = grid_bytes((1, 4, 4))
    side["patches_per_image"].dtype = "int64"
    side["patches_per_image"].shape.extend([1])
    side["patches_per_image"].inline = struct.pack("<q", 16)
    item.placeholders.add(offset=7, length=4)
    return request


def as_message(request):
    return request


def as_bytes(request):
    return request.SerializeToString()


both_ways = pytest.mark.parametrize("form", [as_message, as_bytes])


@both_ways
def test_what_smg_sends_is_accepted(form):
    item = parse_encode(form(smg_request()), SPEC, LIMITS)
    assert (item.request_id, item.index, item.room) == ("encode-018f", 0, ROOM)
    assert item.modality is Modality.IMAGE
    assert (item.grids, item.n_tokens) == ((Grid(1, 4, 4),), 4)
    assert (item.pixels.dtype, item.pixels.shape, item.pixels.nbytes) == ("bfloat16", (16, 1536), 49152)
    assert bytes(item.pixels.payload) == bytes(49152)
    assert [tensor.name for tensor in item.side] == ["image_grid_thw", "patches_per_image"]
    assert item.side[1] == EncodeTensor("patches_per_image", "int64", (1,), 8, struct.pack("<q", 16))


def test_pixels_of_a_serialised_request_are_a_view_of_it():
    raw = bytearray(smg_request().SerializeToString())
    item = parse_encode(raw, SPEC, LIMITS)
    raw[raw.index(bytes(1000)) + 10] = 99
    assert 99 in item.pixels.payload


@both_ways
def test_several_grids_and_several_placeholders_are_one_item(form):
    request = smg_request()
    item = request.mm_inputs.items[0]
    grid = item.model_specific_tensors["image_grid_thw"]
    grid.shape[:] = [2, 3]
    grid.inline = grid_bytes((1, 2, 4), (1, 4, 2))
    item.placeholders[0].length = 1
    item.placeholders.add(offset=30, length=3)
    parsed = parse_encode(form(request), SPEC, LIMITS)
    assert parsed.grids == (Grid(1, 2, 4), Grid(1, 4, 2))
    assert parsed.n_tokens == 4


@both_ways
def test_a_video_has_its_own_grid_tensor(form):
    request = smg_request()
    item = request.mm_inputs.items[0]
    item.modality = 3
    grid = item.model_specific_tensors["video_grid_thw"]
    grid.CopyFrom(item.model_specific_tensors["image_grid_thw"])
    grid.inline = grid_bytes((4, 2, 2))
    del item.model_specific_tensors["image_grid_thw"]
    parsed = parse_encode(form(request), SPEC, LIMITS)
    assert parsed.modality is Modality.VIDEO
    assert parsed.grids == (Grid(4, 2, 2),)


def test_an_unspecified_modality_is_an_image_and_an_empty_id_gets_a_name():
    request = smg_request()
    request.mm_inputs.items[0].modality = 0
    request.request_id = ""
    item = parse_encode(request, SPEC, LIMITS)
    assert item.modality is Modality.IMAGE
    assert item.request_id == f"room-{ROOM}"


@both_ways
def test_a_segment_is_described_not_opened(form):
    request = smg_request()
    tensor = request.mm_inputs.items[0].encoder_input
    tensor.shm.name = "smg-tokenspeed-12-1699-3"
    tensor.shm.nbytes = 49152
    tensor.shm.owner_id = "smg:12"
    item = parse_encode(form(request), SPEC, LIMITS)
    assert item.pixels.payload == ShmSource("smg-tokenspeed-12-1699-3", 0, 49152, "smg:12")


# --- refusals


def change(path, value):
    """Set a field of the one item, by attribute path; a list replaces a repeated field."""

    def apply(request):
        target = request.mm_inputs.items[0]
        *steps, last = path.split(".")
        for step in steps:
            target = (
                target.model_specific_tensors["image_grid_thw"] if step == "grid" else getattr(target, step)
            )
        if isinstance(value, list):
            getattr(target, last)[:] = value
        else:
            setattr(target, last, value)

    return apply


def grids(*rows):
    def apply(request):
        tensor = request.mm_inputs.items[0].model_specific_tensors["image_grid_thw"]
        tensor.shape[:] = [len(rows), 3]
        tensor.inline = grid_bytes(*rows)

    return apply


def placeholders(*lengths):
    def apply(request):
        item = request.mm_inputs.items[0]
        del item.placeholders[:]
        for length in lengths:
            item.placeholders.add(offset=1, length=length)

    return apply


def side(name, dtype, shape, payload=b"", **more):
    def apply(request):
        tensor = request.mm_inputs.items[0].model_specific_tensors[name]
        tensor.dtype = dtype
        tensor.shape.extend(shape)
        if more:
            tensor.shm.name = more["shm"]
        else:
            tensor.inline = payload

    return apply


def many_sides(request):
    for index in range(20):
        side(f"t{index}", "int64", [1], bytes(8))(request)


def shm(name="seg", nbytes=49152, offset=0):
    def apply(request):
        handle = request.mm_inputs.items[0].encoder_input.shm
        handle.name, handle.nbytes, handle.offset = name, nbytes, offset

    return apply


REFUSALS = [
    ("request id", lambda r: setattr(r, "request_id", "x" * 257), "request_id"),
    ("no inputs", lambda r: r.ClearField("mm_inputs"), "mm_inputs"),
    ("no item", lambda r: r.mm_inputs.ClearField("items"), "mm_inputs.items"),
    ("two items", lambda r: r.mm_inputs.items.add(), "mm_inputs.items"),
    ("audio", change("modality", 2), f"{ITEM}.modality"),
    ("unknown modality", change("modality", 9), f"{ITEM}.modality"),
    ("no pixels", lambda r: r.mm_inputs.items[0].ClearField("encoder_input"), PIXELS),
    ("float64", change("encoder_input.dtype", "float64"), f"{PIXELS}.dtype"),
    ("int64", change("encoder_input.dtype", "int64"), f"{PIXELS}.dtype"),
    ("no dtype", change("encoder_input.dtype", ""), f"{PIXELS}.dtype"),
    ("flat", change("encoder_input.shape", [24576]), f"{PIXELS}.shape"),
    ("no shape", change("encoder_input.shape", []), f"{PIXELS}.shape"),
    ("other patches", change("encoder_input.shape", [16, 1176]), f"{PIXELS}.shape"),
    ("no rows", change("encoder_input.shape", [0, 1536]), f"{PIXELS}.shape"),
    ("too many rows", change("encoder_input.shape", [2**32 - 1, 1536]), f"{PIXELS}.shape"),
    ("too many bytes", change("encoder_input.shape", [1024, 1536]), f"{PIXELS}.shape"),
    ("other rows", change("encoder_input.shape", [20, 1536]), f"{PIXELS}.shape"),
    ("short", change("encoder_input.inline", bytes(49151)), f"{PIXELS}.inline"),
    ("long", change("encoder_input.inline", bytes(49153)), f"{PIXELS}.inline"),
    ("other dtype", change("encoder_input.dtype", "float32"), f"{PIXELS}.inline"),
    ("no payload", lambda r: r.mm_inputs.items[0].encoder_input.ClearField("inline"), PIXELS),
    ("remote", change("encoder_input.remote.transport", "nixl"), f"{PIXELS}.remote"),
    ("path", shm(name="../etc/passwd"), f"{PIXELS}.shm.name"),
    ("slash", shm(name="/seg"), f"{PIXELS}.shm.name"),
    ("dots", shm(name=".."), f"{PIXELS}.shm.name"),
    ("no name", shm(name=""), f"{PIXELS}.shm.name"),
    ("nul", shm(name="a\0b"), f"{PIXELS}.shm.name"),
    ("segment size", shm(nbytes=49151), f"{PIXELS}.shm.nbytes"),
    ("segment offset", shm(offset=2**64 - 1), f"{PIXELS}.shm.offset"),
    ("grid missing", lambda r: r.mm_inputs.items[0].ClearField("model_specific_tensors"), GRID),
    ("video grid missing", change("modality", 3), f"{ITEM}.model_specific_tensors[video_grid_thw]"),
    ("grid dtype", change("grid.dtype", "uint32"), f"{GRID}.inline"),
    ("grid float", lambda r: [change("grid.dtype", "float32")(r), change("grid.inline", bytes(12))(r)],
     f"{GRID}.dtype"),
    ("grid flat", change("grid.shape", [3]), f"{GRID}.shape"),
    ("grid empty", grids(), f"{GRID}.shape"),
    ("grid short", change("grid.inline", bytes(16)), f"{GRID}.inline"),
    ("grid zero", grids((1, 0, 4)), GRID),
    ("grid negative", grids((1, -4, -4)), GRID),
    ("grid odd", grids((1, 1, 16)), GRID),
    ("grid overflow", grids((2**62, 4, 4)), GRID),
    ("grid product overflow", grids((2**30, 2**30, 2**30)), GRID),
    ("grid too large", grids((1, 64, 64)), GRID),
    ("grid of other rows", grids((1, 4, 8)), f"{PIXELS}.shape"),
    ("side dtype", side("x", "float64", [1], bytes(8)), f"{ITEM}.model_specific_tensors[x].dtype"),
    ("side size", side("x", "int64", [2], bytes(8)), f"{ITEM}.model_specific_tensors[x].inline"),
    ("side dimensions", side("x", "int64", [1] * 9, bytes(8)), f"{ITEM}.model_specific_tensors[x].shape"),
    ("side huge", side("x", "int64", [2**32 - 1] * 8), f"{ITEM}.model_specific_tensors[x].shape"),
    ("side name", side("a/b", "int64", [1], bytes(8)), f"{ITEM}.model_specific_tensors"),
    ("side segment", side("x", "int64", [1], shm="seg"), f"{ITEM}.model_specific_tensors[x]"),
    ("many sides", many_sides, f"{ITEM}.model_specific_tensors"),
    ("no placeholder", placeholders(), f"{ITEM}.placeholders"),
    ("empty placeholder", placeholders(4, 0), f"{ITEM}.placeholders[1].length"),
    ("too few tokens", placeholders(3), f"{ITEM}.placeholders"),
    ("too many tokens", placeholders(4, 2**32 - 1), f"{ITEM}.placeholders"),
]  # fmt: skip


@both_ways
@pytest.mark.parametrize(("apply", "field"), [one[1:] for one in REFUSALS], ids=[one[0] for one in REFUSALS])
def test_a_bad_request_is_refused_by_field_and_room(form, apply, field):
    request = smg_request()
    apply(request)
    with pytest.raises(RequestRefused) as refusal:
        parse_encode(form(request), SPEC, LIMITS)
    assert refusal.value.field == field
    assert refusal.value.room == ROOM
    assert len(str(refusal.value)) < 400


@both_ways
@pytest.mark.parametrize("rooms", [[], [1, 2]])
def test_one_room_exactly(form, rooms):
    request = smg_request()
    del request.items[:]
    for room in rooms:
        request.items.add(bootstrap_room=room)
    with pytest.raises(RequestRefused) as refusal:
        parse_encode(form(request), SPEC, LIMITS)
    assert (refusal.value.field, refusal.value.room) == ("items", None)


def test_a_negative_room_is_refused():
    request = smg_request()
    request.items[0].bootstrap_room = -1
    with pytest.raises(RequestRefused) as refusal:
        parse_encode(request, SPEC, LIMITS)
    assert (refusal.value.field, refusal.value.room) == ("items[0].bootstrap_room", None)


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"\x12\xff\xff\xff\xff\x7f", b"\x0b", b"\x80" * 20])
def test_bytes_that_are_no_message_are_refused(raw):
    with pytest.raises(RequestRefused) as refusal:
        parse_encode(raw, SPEC, LIMITS)
    assert refusal.value.field == "message"


# --- both forms agree, whatever arrives


def outcome(request):
    """(the item with its pixels as bytes) or (field, reason, room)."""
    try:
        item = parse_encode(request, SPEC, LIMITS)
    except RequestRefused as refusal:
        return refusal.field, refusal.reason, refusal.room
    payload = item.pixels.payload
    return item.side, item.grids, item.room, payload if isinstance(payload, ShmSource) else bytes(payload)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), st.integers(0, 500))
def test_damaged_bytes_mean_the_same_to_us_and_to_protobuf(changes, cut):
    """The pixels are cut out before protobuf sees the message; that must never show."""
    small = smg_request()
    raw = bytearray(small.SerializeToString())
    head = raw.index(bytes(1000))
    for where, value in changes:  # the payload is zeros; only the fields around it matter
        index = where if where < head else len(raw) - 1 - (where - head) % 150
        raw[index] = value
    raw = bytes(raw[: len(raw) - cut] if cut < 250 else raw)
    try:
        message = tokenspeed_encoder_pb2.EncodeRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(RequestRefused) as refusal:
            parse_encode(raw, SPEC, LIMITS)
        assert refusal.value.field == "message"
        return
    assert outcome(raw) == outcome(message)


@given(st.binary(max_size=100))
def test_any_bytes_are_an_item_or_refused(raw):
    with pytest.raises(RequestRefused):
        parse_encode(raw, SPEC, LIMITS)


def test_merged_and_repeated_fields_mean_what_protobuf_says():
    request = smg_request()
    raw = request.SerializeToString()
    twice = raw + tokenspeed_encoder_pb2.EncodeRequest(mm_inputs=request.mm_inputs).SerializeToString()
    with pytest.raises(RequestRefused) as refusal:
        parse_encode(twice, SPEC, LIMITS)
    assert refusal.value.field == "mm_inputs.items"  # merged: two items

    renamed = raw + tokenspeed_encoder_pb2.EncodeRequest(request_id="later").SerializeToString()
    assert parse_encode(renamed, SPEC, LIMITS).request_id == "later"


def test_a_message_of_ten_thousand_fields_is_left_to_protobuf():
    raw = smg_request().SerializeToString()
    padded = raw + b"\x78\x01" * 20_000  # an unknown field, over and over
    assert outcome(padded) == outcome(raw)


def test_unknown_fields_of_every_kind_are_ignored():
    raw = smg_request().SerializeToString()
    unknown = b"\x78\x01" + b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x7a\x03abc"
    assert outcome(unknown + raw + unknown) == outcome(raw)
    group = b"\x7b\x7c"
    assert outcome(raw + group) == outcome(tokenspeed_encoder_pb2.EncodeRequest.FromString(raw + group))


# --- the client's direction


@both_ways
@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_what_the_client_builds_is_accepted(form, modality):
    pixels = bytes(range(256)) * 192
    extra = EncodeTensor("second_per_grid_ts", "float32", (1,), 4, struct.pack("<f", 0.5))
    request = build_encode(
        request_id="encode-1",
        room=5,
        modality=modality,
        pixel_dtype="bfloat16",
        pixel_shape=(16, 1536),
        pixels=memoryview(pixels),
        grids=[Grid(1, 4, 4)],
        n_tokens=4,
        placeholder_offset=3,
        placeholder_token_id=151655,
        content_hash=b"h" * 32,
        side=[extra],
    )
    item = parse_encode(form(request), SPEC, LIMITS)
    assert (item.room, item.modality, item.grids) == (5, modality, (Grid(1, 4, 4),))
    assert bytes(item.pixels.payload) == pixels
    assert extra in item.side
    again = build_encode(
        request_id="encode-1", room=5, modality=modality, pixel_dtype="bfloat16", pixel_shape=(16, 1536),
        pixels=pixels, grids=item.grids, n_tokens=4, side=item.side,
    )  # fmt: skip
    assert parse_encode(again, SPEC, LIMITS).side == item.side


def test_the_client_can_send_a_segment():
    source = ShmSource("seg-1", 0, 49152, "me")
    request = build_encode(
        request_id="encode-1", room=5, modality=Modality.IMAGE, pixel_dtype="bfloat16",
        pixel_shape=(16, 1536), pixels=source, grids=[Grid(1, 4, 4)], n_tokens=4,
    )  # fmt: skip
    assert parse_encode(request, SPEC, LIMITS).pixels.payload == source
