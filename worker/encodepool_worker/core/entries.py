"""What the store keeps: entries, each in exactly one tier, and the books of a tier."""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from ..errors import WorkerError
from ..types import ByteRange, RowLayout
from .limits import TierSnapshot
from .space import FreeSpace, trimmed


class EntryState(Enum):
    RESERVED = "reserved"  # has its bytes, waits for its turn in the tower
    FILLING = "filling"  # the tower's thread writes it
    HELD = "held"  # filled, rooms refer to it
    CACHED = "cached"  # filled, nobody refers to it

    __hash__ = object.__hash__  # as RoomState


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of one tier. ``extents`` hold an entry's rows; ``taken`` are given back in the end."""

    tier: int
    taken: tuple[ByteRange, ...]
    extents: tuple[ByteRange, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """Rows of one content key. Their ``place`` holds ``layout.nbytes``; ``nbytes`` are taken for it.

    ``n_refs`` rooms refer to it, ``n_unclaimed`` of them still wait for their receivers. While it
    is copied into the second tier, ``target`` is its place there.
    """

    id: int
    key: bytes
    layout: RowLayout
    place: Place
    nbytes: int
    state: EntryState = EntryState.RESERVED
    n_refs: int = 0
    n_unclaimed: int = 0
    n_pins: int = 0
    target: Place | None = None

    @property
    def tier(self) -> int:
        """0 or 1. It changes only while nobody refers to the entry."""
        return self.place.tier

    @property
    def extents(self) -> tuple[ByteRange, ...]:
        return self.place.extents

    @property
    def is_filled(self) -> bool:
        return self.state in (EntryState.HELD, EntryState.CACHED)

    @property
    def is_idle(self) -> bool:
        """Filled, and nobody reads it or may read it later."""
        return self.state is EntryState.CACHED and not self.n_pins


@dataclass(slots=True)
class Tier:
    """Bytes of one tier: free, by state of their entry, and which entries may leave.

    ``idle`` are the entries that may, least recently used first.
    """

    number: int
    capacity_bytes: int
    free: FreeSpace
    idle: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    idle_bytes: int = 0
    state_bytes: dict[EntryState, int] = field(default_factory=lambda: dict.fromkeys(EntryState, 0))
    n_evictions: int = 0
    evicted_bytes: int = 0

    @classmethod
    def of(cls, number: int, first: int, nbytes: int, alignment: int) -> "Tier":
        """The tier at offsets [first, first + nbytes), as far as whole entries fit."""
        capacity_bytes = nbytes // alignment * alignment
        return cls(number, capacity_bytes, FreeSpace(capacity_bytes, first))

    def list(self, entry: Entry) -> None:
        self.idle[entry.id] = entry
        self.idle_bytes += entry.nbytes

    def unlist(self, entry: Entry) -> None:
        if self.idle.pop(entry.id, None):
            self.idle_bytes -= entry.nbytes

    def oldest(self) -> Entry:
        """The idle entry that was used least recently."""
        if not self.idle:
            raise WorkerError(f"tier {self.number} has nothing to evict")
        return next(iter(self.idle.values()))

    def take(self, nbytes: int, layout: RowLayout, state: EntryState) -> Place:
        """Bytes for an entry; the caller knows they are free."""
        taken = self.free.take(nbytes)
        self.state_bytes[state] += nbytes
        return Place(self.number, taken, trimmed(taken, layout.nbytes))

    def give(self, place: Place, state: EntryState) -> None:
        for extent in place.taken:
            self.free.give(extent)
            self.state_bytes[state] -= extent.nbytes

    def count_eviction(self, nbytes: int) -> None:
        self.n_evictions += 1
        self.evicted_bytes += nbytes

    def snapshot(self) -> TierSnapshot:
        return TierSnapshot(
            capacity_bytes=self.capacity_bytes,
            free_bytes=self.free.nbytes,
            bytes_by_state={state.value: n for state, n in self.state_bytes.items()},
            evictions=self.n_evictions,
            evicted_bytes=self.evicted_bytes,
        )
