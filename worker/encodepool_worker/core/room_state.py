"""What a room is: its states, its receivers, what it remembers. The rules are in ``room``."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ..types import Item, Receiver, RowLayout


class RoomState(Enum):
    NEW = "not yet recorded"
    ANNOUNCED = "receivers spoke first, the request is missing"
    QUEUED = "waits for a batch, or for room in the store"
    ENCODING = "in a tower batch, which cannot be interrupted"
    PARKED = "rows lie in the store, receivers are missing"
    SHIPPING = "writes run"
    SETTLING = "failed; writes still run"
    QUARANTINED = "failed; no write runs, but one may land late"
    DONE = "tombstone of a success; a frame starts a new shipment"
    FAILED = "tombstone of a failure; a frame is answered with Failed"
    GONE = "removed"

    __hash__ = object.__hash__  # members are singletons; Enum's own is Python code, on every event


TOMBSTONES = frozenset({RoomState.DONE, RoomState.FAILED})
GATHERING = frozenset({RoomState.ANNOUNCED, RoomState.QUEUED, RoomState.ENCODING, RoomState.PARKED})
"""States in which receivers are still taken in."""


class Phase(Enum):
    WAITING = auto()  # spoke; nothing was written
    WRITING = auto()  # its write runs
    LATE = auto()  # its write timed out and may still land
    TOLD = auto()  # has its verdict


@dataclass(slots=True)
class Party:
    """A receiver and how far its shipment is.

    ``alone``: not the room's first shipment to it. ``doomed``: its write may land, yet it
    will be told Failed.
    """

    receiver: Receiver
    phase: Phase = Phase.WAITING
    alone: bool = False
    doomed: bool = False


@dataclass(slots=True)
class Room:
    """One room. ``parties`` is keyed by session; ``owed`` counts first shipments without verdict.

    ``fanout`` of them speak to each of the ``n_ranks`` ranks.
    ``key`` and ``fanout`` survive in a tombstone; item, layout and parties do not.
    """

    id: int
    n_ranks: int = 1
    state: RoomState = RoomState.NEW
    item: Item | None = None
    layout: RowLayout | None = None
    key: bytes | None = None
    fanout: int = 0
    parties: dict[str, Party] = field(default_factory=dict)
    n_writing: int = 0
    n_late: int = 0
    owed: int = 0
    holds: bool = False
    shipped: bool = False

    @property
    def claimed(self) -> bool:
        """All its receivers have spoken, to their ranks."""
        return 0 < self.fanout * self.n_ranks == len(self.parties)

    def at(self, rank: int) -> list[Receiver]:
        """The receivers that spoke to one rank."""
        return [party.receiver for party in self.parties.values() if party.receiver.rank == rank]

    def forget(self) -> None:
        self.item = self.layout = None
        self.parties.clear()
