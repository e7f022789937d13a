"""What a room is told, and what it asks for: its only input and output.

Outside events are ``Submitted``, ``Refused``, ``Aborted`` of ``events`` and ``Spoke``; the timer's
is ``Expired``; the rest are answers, each to one effect. A receiver is known by its session.
"""

from dataclasses import dataclass

from ..types import Item, Receiver, RefusalKind, RowLayout, Status
from .events import Aborted, Refused, Submitted
from .instructions import Outcome

# --- events


@dataclass(frozen=True, slots=True)
class Spoke:
    """A receiver's frame. ``stored``: layout of the room's rows if they lie in the store.

    ``stored`` matters in DONE only, where nothing else says whether the rows are still there.
    """

    receiver: Receiver
    stored: RowLayout | None = None

    def __str__(self) -> str:
        r = self.receiver
        to = f" to rank {r.rank}" if r.rank else ""
        return f"Spoke({r.session}{to} rows {r.row_start}+{r.n_rows} of {r.span}, fan-out {r.fanout})"


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline of the room's state has passed."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Answer to Acquire: the rows are being made, in a batch."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Answer to Acquire: the rows lie in their entry."""


@dataclass(frozen=True, slots=True)
class NotFilled:
    """Answer to Acquire, after Taken: there will be no rows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """Answer to Ship: the bytes are in the receiver's memory."""

    session: str


@dataclass(frozen=True, slots=True)
class Missed:
    """Answer to Ship: the write failed. With ``may_land_late`` a Settled follows."""

    session: str
    reason: str
    may_land_late: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A late write's quarantine is over: nothing of it can land any more."""

    session: str


RoomEvent = (
    Submitted | Refused | Spoke | Aborted | Expired | Taken | Filled | NotFilled | Landed | Missed | Settled
)

OUTSIDE: tuple[type[RoomEvent], ...] = (Submitted, Refused, Spoke, Aborted)
TIMER: tuple[type[RoomEvent], ...] = (Expired,)
ANSWERS: tuple[type[RoomEvent], ...] = (Taken, Filled, NotFilled, Landed, Missed, Settled)


# --- effects


@dataclass(frozen=True, slots=True)
class Accept:
    """Take the submission; ``repeated``: the room had this item already. No answer."""

    seq: int
    repeated: bool = False

    def __str__(self) -> str:
        return f"Accept(seq={self.seq}{', repeated' if self.repeated else ''})"


@dataclass(frozen=True, slots=True)
class Decline:
    """Do not take the submission. No answer."""

    seq: int
    field: str
    reason: str
    kind: RefusalKind = RefusalKind.INVALID


@dataclass(frozen=True, slots=True)
class Acquire:
    """Refer to the rows of the item. Answer: Filled; or Taken, then Filled or NotFilled.

    ``claimed``: all receivers have spoken already.
    """

    item: Item
    claimed: bool

    def __str__(self) -> str:
        return f"Acquire({'claimed' if self.claimed else 'unclaimed'})"


@dataclass(frozen=True, slots=True)
class Claim:
    """All receivers have spoken: this room goes before those that wait for theirs. No answer."""


@dataclass(frozen=True, slots=True)
class Reacquire:
    """Refer again to rows that lie in the store. No answer: ``Spoke.stored`` was it."""

    key: bytes

    def __str__(self) -> str:
        return "Reacquire()"


@dataclass(frozen=True, slots=True)
class Release:
    """The room no longer needs its rows. No answer."""


@dataclass(frozen=True, slots=True)
class Ship:
    """Write the receiver's rows. Answer: Landed or Missed."""

    receiver: Receiver

    def __str__(self) -> str:
        return f"Ship({self.receiver.session})"


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the receiver its verdict. No answer."""

    receiver: Receiver
    status: Status

    def __str__(self) -> str:
        return f"Tell({self.receiver.session}, {self.status.name})"


@dataclass(frozen=True, slots=True)
class End:
    """The room's verdict, given once in its life. No answer."""

    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        return f"End({self.outcome.name}{', ' + self.reason if self.reason else ''})"


@dataclass(frozen=True, slots=True)
class Count:
    """Something worth a metric. No answer."""

    counter: str


Effect = Accept | Decline | Acquire | Claim | Reacquire | Release | Ship | Tell | End | Count
