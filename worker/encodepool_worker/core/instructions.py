"""What to do: the only output of the pipeline. The shell carries each one out without raising."""

from dataclasses import dataclass
from enum import Enum

from ..types import ByteRange, Item, Receiver, RefusalKind, Slice, Status


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the frontend that submission ``seq`` was taken. No answer.

    ``repeated``: its room had the same item already, from an earlier submission.
    """

    seq: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the frontend that submission ``seq`` was not taken, and which field is why. No answer."""

    seq: int
    kind: RefusalKind
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
    """Run the tower, on every rank. Answer: BatchEncoded or BatchFailed. One batch at a time."""

    batch: int
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Demote:
    """Copy the rows of ``entry`` from the first tier into the second, on every rank.

    Answer: Demoted or DemoteFailed.

    ``source`` and ``target`` hold the same number of bytes, cut differently. Until the answer the
    source stays as it is and may be read by writes as well; nobody else uses the target. An entry
    has one copy under way at most.
    """

    entry: int
    source: tuple[ByteRange, ...]
    target: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Write to a receiver, from the store of its rank. Answer: Written or WriteFailed."""

    write: int
    room: int
    receiver: Receiver
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class RetireEngine:
    """Late writes pin too many bytes, or the drain's time is up: close the engine of late write ``write``.

    It is one of rank ``rank``. Answer: WriteSettled(by_probe=False) for every late write of that
    engine, one each as ever.
    """

    write: int
    rank: int = 0


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
    """A room ended: count it, and log why when it failed. No answer.

    ``hit_tier`` is the tier in which its rows lay already (0, 1), None if the tower made them for
    it; ``nbytes`` were written.
    """

    room: int
    outcome: Outcome
    reason: str
    hit_tier: int | None
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
    | Demote
    | Write
    | RetireEngine
    | SendStatus
    | Conclude
    | Drained
)
