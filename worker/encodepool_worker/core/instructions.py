"""What to do: the only output of the pipeline. The shell carries each one out without raising."""

from dataclasses import dataclass
from enum import Enum

from ..types import ByteRange, Item, Receiver, Slice, Status


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the frontend that submission ``seq`` was taken. No answer."""

    seq: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the frontend that submission ``seq`` was not taken, and which field is why. No answer."""

    seq: int
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReturnCredit:
    """The item of ``seq`` no longer waits for the tower: its cost and pixels are free. No answer.

    Given exactly once for every Submitted, admitted or refused.
    """

    seq: int
    cost: int
    pixel_bytes: int


@dataclass(frozen=True, slots=True)
class DropPixels:
    """Nobody will read these pixels. Given exactly once for every handle. No answer."""

    pixels: int


@dataclass(frozen=True, slots=True)
class Job:
    """One item of a batch: run the tower on ``pixels``, put the rows into ``extents``.

    The extents hold ``item.layout.nbytes``: the main rows, then the deepstack rows.
    """

    entry: int
    item: Item
    pixels: int
    extents: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Run the tower. Answer: BatchEncoded or BatchFailed. One batch at a time."""

    batch: int
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Write to a receiver. Answer: Written or WriteFailed."""

    write: int
    room: int
    receiver: Receiver
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class RetireEngine:
    """Late writes pin too many bytes: close the engine that carries late write ``write``.

    Answer: WriteSettled(by_probe=False) for every late write of that engine, one each as ever.
    """

    write: int


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Send a status frame. No answer; bounded, drops are counted."""

    room: int
    receiver: Receiver
    status: Status


class Outcome(Enum):
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Conclude:
    """A room ended: count it, and log why when it failed. No answer."""

    room: int
    outcome: Outcome
    reason: str
    hit: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Draining, and nothing accepted is left. No answer."""


Instruction = (
    Admit
    | Refuse
    | ReturnCredit
    | DropPixels
    | RunBatch
    | Write
    | RetireEngine
    | SendStatus
    | Conclude
    | Drained
)
