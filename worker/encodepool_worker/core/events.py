"""What happened: the only input of the pipeline.

Outside events come from other programs and can say anything; answers come from our own shell,
each to exactly one instruction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..types import Item, Receiver

# --- outside


@dataclass(frozen=True, slots=True)
class Submitted:
    """An item was sent to us. ``seq`` numbers the submission, ``pixels`` is the shell's handle."""

    seq: int
    item: Item
    pixels: int
    pixel_bytes: int

    def __str__(self) -> str:
        return f"Submitted({self.item.request_id}#{self.item.index} cost={self.item.cost})"


@dataclass(frozen=True, slots=True)
class Refused:
    """The frontend refused a request whose room could be read."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class Announced:
    """A receiver told where it wants the rows of a room."""

    room: int
    receiver: Receiver


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nobody wants this room's rows any more."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Finish what was accepted until ``deadline_s``, fail the rest, accept nothing."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; nothing else happened."""


# --- answers


@dataclass(frozen=True, slots=True)
class BatchEncoded:
    """Answer to RunBatch: rows lie in their entries, except for ``failures`` {entry: reason}."""

    batch: int
    failures: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """Answer to RunBatch: the batch as a whole failed; no entry was filled."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """Answer to Write: the bytes are in the receiver's memory."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Answer to Write. With ``may_land_late`` a WriteSettled follows for the same write."""

    write: int
    reason: str
    may_land_late: bool


@dataclass(frozen=True, slots=True)
class WriteSettled:
    """A write that timed out can no longer touch memory.

    ``by_probe``: its peer answered a probe, so what was under way may land within the
    quarantine counted from now; otherwise its session is gone or its engine is closed.
    """

    write: int
    by_probe: bool


@dataclass(frozen=True, slots=True)
class Demoted:
    """Answer to Demote: the rows of ``entry`` lie in both places, and nothing copies them any more."""

    entry: int


@dataclass(frozen=True, slots=True)
class DemoteFailed:
    """Answer to Demote: the copy is of no use, and nothing copies any more. The source is unharmed."""

    entry: int
    reason: str


Event = (
    Submitted
    | Refused
    | Announced
    | Aborted
    | DrainStarted
    | Tick
    | BatchEncoded
    | BatchFailed
    | Written
    | WriteFailed
    | WriteSettled
    | Demoted
    | DemoteFailed
)
