"""The nouns that every part of the worker shares. Frozen, and valid once built.

Lengths are bytes unless the name says otherwise, times are seconds on the monotonic clock
(``_s``), ranges are half-open.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum

from .errors import WireError

ROOM_LIMIT = 2**63
"""Rooms are in [0, 2**63 - 1): SMG draws them there (one per image, never reused)."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Longest Encode request. An image of 4096 x 4096 arrives in 192 MiB (12 bytes a pixel); the
reference has this limit too."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint32": 4}
"""Dtypes of SMG's TensorData and their element size in bytes."""

ROW_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which a tower may produce rows."""


def wire_dtype(dtype: str) -> str:
    """TokenSpeed names dtypes as torch prints them: ``torch.bfloat16``."""
    return f"torch.{dtype}"


class Modality(Enum):
    IMAGE = "image"
    VIDEO = "video"


class RefusalKind(Enum):
    """What a refused caller can do: nothing, come back later or go elsewhere, go elsewhere."""

    INVALID = "invalid"
    FULL = "full"
    DRAINING = "draining"


class Status(IntEnum):
    """Status numbers of TokenSpeed's embedding transfer; the embedding path sends these two."""

    FAILED = 0
    SUCCESS = 5


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of one image or video before merging: frames, rows, columns."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Rows of one item: main ``[tokens, hidden]`` and deepstack ``[tokens, levels * hidden]``.

    Both halves are row-major without padding in ``dtype``. Raises WireError.
    """

    n_tokens: int
    hidden: int
    levels: int
    dtype: str

    def __post_init__(self) -> None:
        if not 0 < self.n_tokens < 2**31:
            raise WireError("n_tokens", self.n_tokens, "in [1, 2**31)")
        if not 0 < self.hidden < 2**31:
            raise WireError("hidden", self.hidden, "in [1, 2**31)")
        if not 0 <= self.levels < 256:
            raise WireError("levels", self.levels, "in [0, 256)")
        if self.dtype not in ROW_DTYPES:
            raise WireError("dtype", self.dtype, f"one of {', '.join(ROW_DTYPES)}")

    @property
    def main_row_bytes(self) -> int:
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def deepstack_row_bytes(self) -> int:
        return self.main_row_bytes * self.levels

    @property
    def main_bytes(self) -> int:
        return self.n_tokens * self.main_row_bytes

    @property
    def deepstack_bytes(self) -> int:
        return self.n_tokens * self.deepstack_row_bytes

    @property
    def nbytes(self) -> int:
        """Main and deepstack together: what an entry of the store holds."""
        return self.main_bytes + self.deepstack_bytes


@dataclass(frozen=True, slots=True)
class Item:
    """One image or video to encode for one room.

    ``key`` names the content (keyed BLAKE3, 16 bytes): equal keys have equal rows. ``cost`` is
    in tokens. ``deadline_s`` is monotonic; None waits as long as the room may.
    """

    request_id: str
    index: int
    room: int
    key: bytes
    modality: Modality
    layout: RowLayout
    cost: int
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.room < ROOM_LIMIT:
            raise WireError("bootstrap_room", self.room, "in [0, 2**63)")
        if len(self.key) != 16:
            raise WireError("key", self.key.hex(), "16 bytes")
        if self.cost <= 0:
            raise WireError("cost", self.cost, "> 0")

    @property
    def identity(self) -> tuple[str, int, bytes]:
        """What a second request for the same room must repeat exactly."""
        return (self.request_id, self.index, self.key)


@dataclass(frozen=True, slots=True)
class Receiver:
    """One prefill rank that wants rows of a room: what its 13-part frame says.

    ``session`` names its transfer engine, and with the room identifies the receiver. It wants
    rows [row_start, row_start + n_rows) of an item with ``span`` rows, written to ``main_ptr``
    and ``deepstack_ptr`` in its memory. It spoke to encode rank ``rank``, as ``fanout`` receivers
    do for each room. ``dtype`` is the frame's own word, ``torch.bfloat16``: compare it with
    ``wire_dtype(...)``.
    """

    session: str
    host: str
    status_port: int
    main_ptr: int
    deepstack_ptr: int
    n_rows: int
    hidden: int
    dtype: str
    has_deepstack: bool
    fanout: int
    row_start: int
    span: int
    rank: int = 0

    def __post_init__(self) -> None:
        if not self.session:
            raise WireError("session", self.session, "a transfer session")
        if not self.host:
            raise WireError("host", self.host, "an address")
        if not 0 < self.status_port < 65536:
            raise WireError("status_port", self.status_port, "in [1, 65536)")
        for name in ("main_ptr", "deepstack_ptr"):
            if not 0 <= getattr(self, name) < 2**64:
                raise WireError(name, getattr(self, name), "in [0, 2**64)")
        for name in ("n_rows", "hidden", "row_start", "span"):
            if not 0 <= getattr(self, name) < 2**31:
                raise WireError(name, getattr(self, name), "in [0, 2**31)")
        if not 0 < self.fanout <= 1024:
            raise WireError("required_dst_info_num", self.fanout, "in [1, 1024]")

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where its status frames go."""
        return (self.host, self.status_port)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of the store: offsets in its tiers, which count as lying end to end."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slice:
    """``nbytes`` from offset ``source`` of the store to address ``target`` of a peer.

    Never across tiers: each is memory of its own.
    """

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """What a checkpoint's ``config.json`` says of its tower; known without loading weights.

    A pixel row holds ``patch_width`` values: channels * temporal patch * patch * patch.
    """

    family: str
    hidden: int
    levels: int
    dtype: str
    patch_width: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_token_id: int | None
    video_token_id: int | None

    def token_count(self, grid: Grid) -> int:
        """Rows the tower returns for one grid; its h and w are multiples of ``merge_size``."""
        return grid.patches // self.merge_size**2

    def layout(self, n_tokens: int) -> RowLayout:
        return RowLayout(n_tokens, self.hidden, self.levels, self.dtype)
