"""Strategies for what nobody should send: near-misses of good messages, for every port."""

import json
import random
from typing import Any

import msgspec
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2
from tests.e2e.gateway import Picture, image_request

from encodepool_worker.wire import intake

PICTURE = Picture(4, 4, 1)

UINT32 = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NEAR = st.sampled_from([0, 1, 2, 3, 4, 8, 15, 16, 17, 1536, 2**31 - 1, 2**31, 2**32 - 1])
NUMBERS = UINT32 | NEAR
DTYPES = st.sampled_from(
    ["float32", "bfloat16", "float16", "int64", "uint32", "float64", "", "torch.float32"]
)
SHORT = st.binary(max_size=64)
NAMES = st.sampled_from(["image_grid_thw", "video_grid_thw", "patches_per_image", "x", "../x"]) | st.text(
    max_size=8
)
SEGMENTS = st.sampled_from(["", ".", "..", "../etc/passwd", "/dev/zero", "smg-tokenspeed-0-0-0"]) | st.text(
    max_size=8
)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Any TensorData, with small payloads."""
    tensor = image_request(0, PICTURE).mm_inputs.items[0].encoder_input
    tensor.dtype = draw(DTYPES)
    tensor.shape[:] = draw(st.lists(NUMBERS, max_size=4))
    kind = draw(st.sampled_from(["inline", "shm", "remote", "none", "as it was"]))
    if kind == "inline":
        tensor.inline = draw(SHORT)
    elif kind == "shm":
        uint64 = st.integers(0, 2**64 - 1) | st.just(49152)
        tensor.shm.CopyFrom(
            common_pb2.ShmHandle(name=draw(SEGMENTS), nbytes=draw(uint64), offset=draw(uint64))
        )
    elif kind == "remote":
        tensor.remote.transport = draw(st.text(max_size=8))
    elif kind == "none":
        tensor.ClearField("inline")
    return tensor


@st.composite
def encode_requests(draw: st.DrawFn) -> bytes:
    """A good request with some of its fields replaced, and perhaps with damaged bytes; or any bytes."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    request = image_request(draw(st.integers(0, 2**62)), PICTURE)
    item = request.mm_inputs.items[0]
    for change in draw(st.lists(st.integers(0, 8), max_size=3)):
        if change == 0:
            request.request_id = draw(st.text(max_size=300))
        elif change == 1:
            request.items.add(bootstrap_room=draw(INT64))
        elif change == 2:
            request.items[0].bootstrap_room = draw(INT64)
        elif change == 3:
            item.modality = draw(st.integers(-1, 5))
        elif change == 4:
            item.encoder_input.CopyFrom(draw(tensors()))
        elif change == 5:
            item.model_specific_tensors[draw(NAMES)].CopyFrom(draw(tensors()))
        elif change == 6:
            numbers = draw(st.lists(INT64 | NEAR, min_size=3, max_size=6))
            grid = item.model_specific_tensors["image_grid_thw"]
            grid.inline = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
            grid.shape[:] = [len(numbers) // 3, 3]
        elif change == 7:
            item.placeholders.add(offset=draw(NUMBERS), length=draw(NUMBERS))
        else:
            item.encoder_input.shape[:] = draw(st.lists(NUMBERS, min_size=2, max_size=2))
    raw = bytearray(request.SerializeToString())
    if draw(st.integers(0, 3)) == 0:
        for at, value in draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2)):
            near = at % len(raw)
            raw[-1 - near if draw(st.booleans()) else near] = value
    if draw(st.integers(0, 19)) == 0:
        del raw[draw(st.integers(0, len(raw))) :]
    return bytes(raw)


POINTER = bytes(8)
ANNOUNCEMENT = [b"77", b"127.0.0.1", b"9", b"127.0.0.1:9", POINTER, POINTER, b"4", b"256", b"torch.float32"]
ANNOUNCEMENT += [b"1", b"1", b"0", b"4"]
"""A receiver that does not exist, as TokenSpeed would announce it."""

PARTS = st.one_of(
    SHORT,
    st.integers(-(2**70), 2**70).map(lambda number: b"%d" % number),
    st.sampled_from([b"None", b"", b"[::1]", b"localhost", b"torch.bfloat16", b"0", b"1", b"x" * 4096]),
)


@st.composite
def control_frames(draw: st.DrawFn) -> list[bytes]:
    """A transfer info with some parts replaced, dropped or added; or any parts."""
    if draw(st.booleans()):
        return draw(st.lists(PARTS, min_size=1, max_size=20))
    frame = list(ANNOUNCEMENT)
    for at in draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=3)):
        frame[at] = draw(PARTS)
    if draw(st.integers(0, 4)) == 0:
        del frame[draw(st.integers(1, len(frame))) :]
    return frame + draw(st.lists(PARTS, max_size=2))


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(-1, 2**33), max_size=4),
)

SUBMIT = intake.Submit(
    seq=2**40,
    request_id="stranger",
    index=0,
    room=5,
    modality=intake.Modality.IMAGE,
    key=bytes(16),
    grids=((1, 2, 2),),
    n_tokens=1,
    cost=1,
    deadline_s=None,
    pixel_dtype="float32",
    pixel_shape=(4, 1536),
)


@st.composite
def intake_frames(draw: st.DrawFn) -> list[bytes]:
    """A submission with some header fields replaced and its payloads changed. Never a Drain, which
    the loop must obey."""
    header, *payloads = intake.encode(SUBMIT, bytes(4 * 1536 * 4))
    fields = msgspec.msgpack.decode(header)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        fields[name] = draw(VALUES)
    if draw(st.integers(0, 4)) == 0:
        fields = {"type": draw(st.sampled_from(["Abort", "Refuse", "Credit", "State", "?"])), "v": 3}
        fields |= {"room": draw(VALUES), "reason": draw(VALUES)}
    frames = [msgspec.msgpack.encode(fields), *(bytes(payload) for payload in payloads)]
    if draw(st.booleans()):
        frames = frames[: draw(st.integers(1, 2))] + draw(st.lists(SHORT, max_size=3))
    return frames


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def registrations(draw: st.DrawFn) -> bytes:
    """A registration of another incarnation with some fields replaced, or any bytes."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    body: dict[str, Any] = {"role": "Prefill", "world_size": 1, "dp_size": 1, "rank_ip": "127.0.0.1"}
    body |= {"rank_port": 9, "engine_rank": 0}
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=3)):
        body[name] = draw(JSON)
    body["incarnation"] = 4711
    return json.dumps(body).encode()


def mutations(frames: list[bytes], count: int, seed: int) -> Any:
    """``count`` copies of a message, each with parts cut, flipped, dropped, doubled or grown."""
    dice = random.Random(seed)
    for _ in range(count):
        parts = [bytearray(part) for part in frames]
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(parts))
            kind = dice.randrange(5)
            if kind == 0:
                del parts[at][dice.randrange(len(parts[at]) + 1) :]
            elif kind == 1 and parts[at]:
                parts[at][dice.randrange(len(parts[at]))] ^= 1 << dice.randrange(8)
            elif kind == 2 and len(parts) > 1:
                del parts[at]
            elif kind == 3:
                parts.insert(at, bytearray(parts[at]))
            else:
                parts[at] += dice.randbytes(dice.randrange(64))
        yield [bytes(part) for part in parts]
