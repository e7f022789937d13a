"""Messages between the frontend and rank 0: a typed msgpack header, then raw tensor frames.

``intake`` carries Submit, Refuse, Abort and Drain to rank 0; ``back`` carries Admitted, Refused,
Credit, State and Drained to the frontend. A Submit is followed by the pixels and then by each
side tensor, one frame each, never copied here; every other message is its header alone.

All times are monotonic seconds of this host. Decoding raises WireError and nothing else; sizes
follow from the header and are compared with the frames before anything looks at a payload.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import WireError
from ..types import DTYPE_BYTES, ROOM_LIMIT, Grid, Item, Modality, RefusalKind, TowerSpec

SCHEMA_VERSION = 3
"""Raised with every change of a header: frontend and rank 0 come from one image, or not at all."""

INTAKE_SOCKET = "intake.ipc"
BACK_SOCKET = "back.ipc"
"""In the pod's run folder; rank 0 binds both."""


def back_socket(rank: int) -> str:
    """A follower has the way back alone, for its State."""
    return f"back-{rank}.ipc" if rank else BACK_SOCKET


MAX_HEADER_BYTES = 1 << 20
MAX_AT_ONCE = 512
"""Messages to the frontend in one frame."""

MAX_SIDE_TENSORS = 16
MAX_DIMENSIONS = 8

Payload = bytes | bytearray | memoryview


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One raw frame: row-major, little-endian, no padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    v: int = SCHEMA_VERSION


class Submit(_Message, frozen=True, kw_only=True):
    """Encode one item. Frames: ``pixel_dtype[pixel_shape]``, then one for each of ``tensors``.

    ``seq`` numbers submissions of one frontend; ``cost`` is in tokens; ``grids`` are (t, h, w).
    """

    seq: int
    request_id: str
    index: int
    room: int
    modality: Modality
    key: bytes
    grids: tuple[tuple[int, int, int], ...]
    n_tokens: int
    cost: int
    deadline_s: float | None
    pixel_dtype: str
    pixel_shape: tuple[int, ...]
    tensors: tuple[TensorHeader, ...] = ()

    @property
    def pixel_bytes(self) -> int:
        return math.prod(self.pixel_shape) * DTYPE_BYTES[self.pixel_dtype]

    def payload_bytes(self) -> list[int]:
        """Bytes of every frame after the header, in order."""
        return [self.pixel_bytes, *(tensor.nbytes for tensor in self.tensors)]

    def item(self, spec: TowerSpec) -> Item:
        """The pipeline's view of this submission. Raises WireError."""
        return Item(
            request_id=self.request_id,
            index=self.index,
            room=self.room,
            key=self.key,
            modality=self.modality,
            layout=spec.layout(self.n_tokens),
            cost=self.cost,
            deadline_s=self.deadline_s,
        )

    def grid_types(self) -> tuple[Grid, ...]:
        return tuple(Grid(*grid) for grid in self.grids)


class Refuse(_Message, frozen=True, kw_only=True):
    """A request was refused although its room could be read: tell its receivers."""

    room: int
    reason: str


class Abort(_Message, frozen=True, kw_only=True):
    """Whoever submitted this room has given up before it was told that the item was taken."""

    room: int
    reason: str


class Drain(_Message, frozen=True, kw_only=True):
    """Finish what was accepted until ``deadline_s``; answered by Drained."""

    deadline_s: float


class Admitted(_Message, frozen=True, kw_only=True):
    """Submission ``seq`` was taken; ``repeated``: an earlier one had brought the same item to its room."""

    seq: int
    repeated: bool = False


class Refused(_Message, frozen=True, kw_only=True):
    """Submission ``seq`` was not taken, and which field is why."""

    seq: int
    kind: RefusalKind
    field: str
    reason: str


class Credit(_Message, frozen=True, kw_only=True):
    """The item of ``seq`` no longer waits for the tower: its cost and pixels are free again.

    How much that is the frontend knows, which charged the submission.
    """

    seq: int


class State(_Message, frozen=True, kw_only=True):
    """The loop's own report after a turn, at least once a second: it is the proof of progress.

    ``turn_s`` is the monotonic time of that turn; ``batch_age_s`` is None without a batch.
    ``tokens_per_s`` is what the tower does in full batches, ``predicted_wait_s`` how long an item that
    comes now would wait for it; None before its first batch.
    ``counters`` are the loop's metrics, as ``encodepool_name`` or ``encodepool_name{label="x"}``.
    """

    turn_s: float
    routed: bool
    queue_items: int
    queue_cost: int
    batch_age_s: float | None = None
    batch_expected_s: float | None = None
    tokens_per_s: float | None = None
    predicted_wait_s: float | None = None
    counters: dict[str, float] = {}


class Drained(_Message, frozen=True, kw_only=True):
    """Nothing accepted is left."""


Message = Submit | Refuse | Abort | Drain | Admitted | Refused | Credit | State | Drained

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_back_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])


def encode(message: Message, *payloads: Payload) -> list[Payload]:
    """Frames of one message. Payloads are handed on as they are. Raises WireError on a misfit."""
    _check_message(message)
    _check_payloads(message, payloads)
    return [_encoder.encode(message), *payloads]


def decode(frames: Sequence[Any]) -> tuple[Message, list[memoryview]]:
    """A message and views of its payload frames (anything with a buffer, such as a zmq.Frame)."""
    if not frames:
        raise WireError("frames", 0, "a header")
    header = memoryview(frames[0]).cast("B")
    if len(header) > MAX_HEADER_BYTES:
        raise WireError("header", len(header), f"at most {MAX_HEADER_BYTES} bytes")
    try:
        message = _decoder.decode(header)
    except msgspec.DecodeError as exc:
        raise WireError("header", str(exc), "a message of this schema") from None
    _check_message(message)
    payloads = [memoryview(frame).cast("B") for frame in frames[1:]]
    _check_payloads(message, payloads)
    return message, payloads


def encode_back(messages: Sequence[Message]) -> bytes:
    """One frame for the frontend with at most ``MAX_AT_ONCE`` messages: a frame each costs far more."""
    for message in messages:
        _check_message(message)
    return _encoder.encode(messages)


def decode_back(frames: Sequence[bytes]) -> list[Message]:
    """The messages of one frame of ``encode_back``. Raises WireError."""
    if len(frames) != 1:
        raise WireError("frames", len(frames), "one")
    try:
        messages = _back_decoder.decode(frames[0])
    except msgspec.DecodeError as exc:
        raise WireError("frame", str(exc), "a list of messages of this schema") from None
    for message in messages:
        _check_message(message)
    return messages


def _check_message(message: Message) -> None:
    if message.v != SCHEMA_VERSION:
        raise WireError("v", message.v, f"schema version {SCHEMA_VERSION}")
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, float) and not math.isfinite(value):
            raise WireError(field, value, "finite")
        if isinstance(value, int) and not 0 <= value < ROOM_LIMIT:
            raise WireError(field, value, "in [0, 2**63)")
    if isinstance(message, Submit):
        _check_submit(message)


def _check_submit(message: Submit) -> None:
    if len(message.key) != 16:
        raise WireError("key", message.key.hex(), "16 bytes")
    if not 0 < message.n_tokens < 2**31:
        raise WireError("n_tokens", message.n_tokens, "in [1, 2**31)")
    if message.cost == 0:
        raise WireError("cost", message.cost, "> 0")
    if not message.grids:
        raise WireError("grids", message.grids, "at least one grid")
    for grid in message.grids:
        if not all(0 < side < 2**31 for side in grid):
            raise WireError("grids", grid, "three numbers in [1, 2**31)")
    if len(message.tensors) > MAX_SIDE_TENSORS:
        raise WireError("tensors", len(message.tensors), f"at most {MAX_SIDE_TENSORS}")
    _check_tensor("pixel", message.pixel_dtype, message.pixel_shape)
    for tensor in message.tensors:
        _check_tensor(f"tensors[{tensor.name}]", tensor.dtype, tensor.shape)


def _check_tensor(field: str, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype not in DTYPE_BYTES:
        raise WireError(f"{field}.dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= side < 2**32 for side in shape):
        raise WireError(f"{field}.shape", shape[: MAX_DIMENSIONS + 1], "dimensions in [0, 2**32)")


def _check_payloads(message: Message, payloads: Sequence[Payload]) -> None:
    expected = message.payload_bytes() if isinstance(message, Submit) else []
    if len(payloads) != len(expected):
        raise WireError("frames", len(payloads), f"{len(expected)} payloads, as the header says")
    for index, (payload, nbytes) in enumerate(zip(payloads, expected, strict=True)):
        have = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if have != nbytes:
            raise WireError(f"payload[{index}]", have, f"{nbytes} bytes, as the header says")
