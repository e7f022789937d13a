"""Messages between rank 0 and the other ranks of its group: a number, a msgpack header, raw pixels.

Rank 0 sends Welcome or TurnedAway once, then orders: Batch, Demote, Write, Retire, Registered, and
End. A follower sends Hello once, then answers: Encoded, Failed, Demoted, DemoteFailed, Written,
WriteFailed, WriteSettled. Both send Beat every second. A Batch is followed by the pixels of its
jobs, cut into Pieces with one frame each; every other message is its header alone.

Pixels come in pieces because a message that is still arriving is no sign of life: on a slow network
a whole item takes longer than a rank may be silent.

The first frame counts the messages of its sender from 0. A connection that broke is made again
behind our backs, and what was under way is gone: the number that is left out says so.

Decoding raises WireError and nothing else.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import WireError
from ..types import DTYPE_BYTES, MAX_MESSAGE_BYTES, Modality, TowerSpec

SCHEMA_VERSION = 2
"""Raised with every change of a header: all ranks come from one image, or not at all."""

MAX_HEADER_BYTES = 64 << 20
"""Of an order: a Demote of a scattered entry has thousands of extents. Rank 0 takes less, see below."""

MAX_ANSWER_BYTES = 1 << 20
"""Longest frame that rank 0 takes from a follower."""

MAX_PIECE_BYTES = 1 << 20
"""Of pixels in one message: within the 5 s of a rank's patience at 2 Mbit/s for each other rank."""

Payload = bytes | bytearray | memoryview
Range = tuple[int, int]
"""[start, stop) of the store."""

_NUMBER = struct.Struct("<Q")


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


# --- from rank 0


class Welcome(_Message, frozen=True):
    """The follower is one of the group."""


class TurnedAway(_Message, frozen=True):
    """It is not, and why. It ends with that reason."""

    reason: str


class JobHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One item of a batch, its place in the store, and how its pixels are to be read."""

    entry: int
    request_id: str
    index: int
    room: int
    key: bytes
    modality: Modality
    n_tokens: int
    cost: int
    extents: tuple[Range, ...]
    grids: tuple[tuple[int, int, int], ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def pixel_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Batch(_Message, frozen=True):
    """The plan of one batch; Pieces with the pixels of its jobs follow. Answer: Encoded or Failed."""

    batch: int
    jobs: tuple[JobHeader, ...]


class Piece(_Message, frozen=True):
    """Pixels of the latest Batch: job by job, each from its first byte on. Frame: the bytes."""

    job: int
    start: int


class Demote(_Message, frozen=True):
    """Copy between the tiers. Answer: Demoted or DemoteFailed."""

    entry: int
    source: tuple[Range, ...]
    target: tuple[Range, ...]


class Write(_Message, frozen=True):
    """Write to a receiver; slices are (offset in the store, address there, bytes)."""

    write: int
    session: str
    slices: tuple[tuple[int, int, int], ...]


class Retire(_Message, frozen=True):
    """Close the engine of this late write."""

    write: int


class Registered(_Message, frozen=True):
    """A receiver of this rank introduced itself anew. No answer."""

    session: str


class End(_Message, frozen=True):
    """The group has drained."""


# --- from a follower


class Hello(_Message, frozen=True, kw_only=True):
    """Who it is, and what must be the same on all ranks; ``tiers`` are bytes of the store's tiers."""

    rank: int
    size: int
    incarnation: int
    tiers: tuple[int, ...]
    tower: TowerSpec
    v: int = SCHEMA_VERSION


class Encoded(_Message, frozen=True):
    """Answer to Batch: rows lie in their entries, but for ``failures`` {entry: reason}."""

    batch: int
    failures: dict[int, str]


class Failed(_Message, frozen=True):
    """Answer to Batch: no entry was filled."""

    batch: int
    reason: str


class Demoted(_Message, frozen=True):
    """Answer to Demote."""

    entry: int


class DemoteFailed(_Message, frozen=True):
    """Answer to Demote."""

    entry: int
    reason: str


class Written(_Message, frozen=True):
    """Answer to Write."""

    write: int


class WriteFailed(_Message, frozen=True):
    """Answer to Write; with ``may_land_late`` a WriteSettled follows."""

    write: int
    reason: str
    may_land_late: bool


class WriteSettled(_Message, frozen=True):
    """A late write can touch memory no more."""

    write: int
    by_probe: bool


# --- from both


class Beat(_Message, frozen=True):
    """Alive. A follower adds the numbers of its sender, by their names in the metrics."""

    samples: dict[str, float] = {}


FromLeader = Welcome | TurnedAway | Batch | Piece | Demote | Write | Retire | Registered | End | Beat
FromFollower = Hello | Encoded | Failed | Demoted | DemoteFailed | Written | WriteFailed | WriteSettled | Beat

_encoder = msgspec.msgpack.Encoder()
_from_leader: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
_from_follower: msgspec.msgpack.Decoder[FromFollower] = msgspec.msgpack.Decoder(FromFollower)

M = TypeVar("M")


class Outgoing:
    """Frames of one direction, numbered."""

    def __init__(self) -> None:
        self._sent = 0

    def encode(self, message: FromLeader | FromFollower, *payloads: Payload) -> list[Payload]:
        """Payloads are handed on as they are."""
        number = _NUMBER.pack(self._sent)
        self._sent += 1
        return [number, _encoder.encode(message), *payloads]


class Incoming:
    """The other end of one direction: raises WireError where a message is missing."""

    def __init__(self) -> None:
        self._next = 0

    def from_leader(self, frames: Sequence[Any]) -> tuple[FromLeader, list[memoryview]]:
        message, payloads = self._decode(_from_leader, frames)
        if len(payloads) != isinstance(message, Piece):
            raise WireError("frames", len(frames), "a number and a header, and the bytes of a piece")
        return message, payloads

    def from_follower(self, frames: Sequence[Any]) -> FromFollower:
        message, payloads = self._decode(_from_follower, frames)
        if payloads:
            raise WireError("frames", len(frames), "a number and a header")
        return message

    def _decode(
        self, decoder: "msgspec.msgpack.Decoder[M]", frames: Sequence[Any]
    ) -> tuple[M, list[memoryview]]:
        if len(frames) < 2:
            raise WireError("frames", len(frames), "a number and a header")
        number, header, *payloads = (memoryview(frame).cast("B") for frame in frames)
        if len(number) != _NUMBER.size or _NUMBER.unpack(number)[0] != self._next:
            raise WireError("number", bytes(number[:8]).hex(), f"{self._next}: messages were lost")
        self._next += 1
        if len(header) > MAX_HEADER_BYTES:
            raise WireError("header", len(header), f"at most {MAX_HEADER_BYTES} bytes")
        try:
            return decoder.decode(header), payloads
        except msgspec.DecodeError as error:
            raise WireError("header", str(error), "a message of this schema") from None


def pieces(payloads: Sequence[Payload]) -> Iterator[tuple[Piece, memoryview]]:
    """The pixels of each job of a batch, cut without a copy."""
    for job, payload in enumerate(payloads):
        pixels = memoryview(payload)
        for start in range(0, pixels.nbytes, MAX_PIECE_BYTES):
            yield Piece(job, start), pixels[start : start + MAX_PIECE_BYTES]


class Assembly:
    """A batch whose pixels are arriving. Raises WireError for what cannot be one, or is not next."""

    def __init__(self, batch: Batch) -> None:
        for job in batch.jobs:
            if job.dtype not in DTYPE_BYTES:
                raise WireError("dtype", job.dtype, f"one of {', '.join(DTYPE_BYTES)}")
            if any(side < 0 for side in job.shape) or job.pixel_bytes > MAX_MESSAGE_BYTES:
                raise WireError("shape", job.shape, f"of at most {MAX_MESSAGE_BYTES} bytes of {job.dtype}")
        self.batch = batch
        self.pixels = [memoryview(bytearray(job.pixel_bytes)) for job in batch.jobs]
        self._next = (0, 0)
        self._skip_full()

    @property
    def is_complete(self) -> bool:
        return self._next[0] == len(self.pixels)

    def add(self, piece: Piece, payload: memoryview) -> None:
        if self.is_complete or (piece.job, piece.start) != self._next:
            raise WireError("piece", (piece.job, piece.start), f"next, which is {self._next}")
        stop = piece.start + payload.nbytes
        pixels = self.pixels[piece.job]
        if not 0 < payload.nbytes <= MAX_PIECE_BYTES or stop > pixels.nbytes:
            raise WireError("piece", payload.nbytes, f"of the {pixels.nbytes} bytes that the header says")
        pixels[piece.start : stop] = payload
        self._next = (piece.job, stop)
        self._skip_full()

    def _skip_full(self) -> None:
        job, start = self._next
        while job < len(self.pixels) and start == self.pixels[job].nbytes:
            job, start = job + 1, 0
        self._next = (job, start)
