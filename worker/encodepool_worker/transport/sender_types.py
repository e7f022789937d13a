"""What the sender keeps about peers and writes, its bounds, and its view for metrics."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..errors import WriteRefused, WriteTimedOut, WriteTorn
from .base import RawSlice


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of the sender; the defaults suit a machine with a handful of cores."""

    lanes: int = 2
    max_lanes: int = 8
    # A write that lasts longer makes its peer a slow one, which no quick one waits for.
    slow_s: float = 0.1
    lane_patience_s: float = 0.5
    engines: int = 2
    max_engines: int = 4
    # An ordinary open takes a millisecond or two, so half a second is late on any machine.
    open_timeout_s: float = 0.5
    # How long a write waits for an engine when all of them are stuck.
    engine_wait_s: float = 5.0
    probe_timeout_s: float = 2.0
    # An answer is good for this long: a peer that moves to another engine is not asked again.
    probe_fresh_s: float = 1.0
    probe_pause_s: float = 1.0
    max_probes: int = 256
    # A peer without a write for this long is probed before the next one.
    idle_s: float = 30.0
    breaker_s: float = 2.0
    max_failures: int = 3
    max_queued: int = 16_384
    max_queued_per_peer: int = 1_024
    max_peers: int = 4_096
    # A write that timed out is settled by closing its engine when its peer stays silent this long,
    # or when all such writes together hold this many bytes of the region.
    max_unsettled_s: float = 60.0
    max_unsettled_bytes: int = 1 << 30

    @classmethod
    def for_rdma(cls) -> "SenderLimits":
        """One engine: that several may register one region has been seen over TCP only."""
        return cls(engines=1, max_engines=1)


@dataclass(frozen=True, slots=True)
class SenderSnapshot:
    """What the sender is doing. ``outcomes`` counts writes by how they ended, ``peers`` by state."""

    queued: int
    lanes: int
    lanes_busy: int
    engines: int
    engines_stuck: int
    peers: dict[str, int]
    probes: int
    unsettled: int
    unsettled_bytes: int
    written_bytes: int
    write_seconds: float
    outcomes: dict[str, int]


def outcome_of(error: Exception) -> str:
    """The name under which a failed write is counted."""
    match error:
        case WriteRefused():
            return "refused"
        case WriteTimedOut():
            return "timed out"
        case WriteTorn():
            return "torn"
    return "error"


class Pace(Enum):
    """How long a peer's last write took, see ``turns``."""

    QUICK = "quick"
    NEW = "new"
    SLOW = "slow"


class PeerState(Enum):
    """Also the state of the peer's breaker: closed, half open, open."""

    READY = "ready"
    PROBING = "probing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    write_id: int
    slices: Sequence[RawSlice]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A failed write that may still land. ``released``: the engine reads its source no more."""

    write_id: int
    nbytes: int
    engine: int | None
    released: bool
    since_s: float


@dataclass(slots=True, eq=False)
class Peer:
    """One session. ``listed`` says that it stands in the line of peers with something to write."""

    session: str
    state: PeerState = PeerState.PROBING
    queue: deque[QueuedWrite] = field(default_factory=deque)
    unsettled: list[Unsettled] = field(default_factory=list)
    probe: "Probe | None" = None
    silent: bool = False  # has not answered the last probe
    pace: Pace = Pace.NEW
    # The late write whose failure is being told, and whether its engine is wanted back already.
    failing: int | None = None
    retire_asked: bool = False
    busy: bool = False
    listed: bool = False
    failures: int = 0
    why_broken: str = ""
    blocked_until_s: float = 0.0
    probe_again_s: float = 0.0
    answered_s: float = float("-inf")
    used_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self.unsettled or self.probe or self.busy)


@dataclass(slots=True, eq=False)
class Probe:
    """A probe under way, in its own thread."""

    peer: Peer
    started_s: float
    thread: threading.Thread | None = None
