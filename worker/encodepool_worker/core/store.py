"""The index of the store: which bytes of one region hold which rows, and who needs them.

The store is cache and send buffer in one. Rows lie in an *entry*, a list of extents, so only
the number of free bytes counts, never their place. Rooms refer to entries; an entry without
references is a cache entry and is evicted, least recently used first, when bytes are needed.
A *pin* keeps the bytes as they are while a late write may still read them; a pinned entry
still serves hits. The index owns no memory.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from ..errors import WorkerError
from ..types import ByteRange, RowLayout
from .limits import StoreSnapshot


class EntryState(Enum):
    RESERVED = "reserved"  # has its bytes, waits for its turn in the tower
    FILLING = "filling"  # the tower's thread writes it
    HELD = "held"  # filled, rooms refer to it
    CACHED = "cached"  # filled, nobody refers to it

    __hash__ = object.__hash__  # as RoomState


@dataclass(slots=True, eq=False)
class Entry:
    """Rows of one content key. ``extents`` hold ``layout.nbytes``; ``nbytes`` are taken for it.

    ``n_refs`` rooms refer to it, ``n_unclaimed`` of them still wait for their receivers.
    """

    id: int
    key: bytes
    layout: RowLayout
    extents: tuple[ByteRange, ...]
    taken: tuple[ByteRange, ...]
    nbytes: int
    state: EntryState = EntryState.RESERVED
    n_refs: int = 0
    n_unclaimed: int = 0
    n_pins: int = 0

    @property
    def is_filled(self) -> bool:
        return self.state in (EntryState.HELD, EntryState.CACHED)

    @property
    def is_evictable(self) -> bool:
        return self.state is EntryState.CACHED and not self.n_pins


class FreeSpace:
    """Free byte ranges of [0, capacity): neighbours are joined, the largest is used first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.nbytes = 0
        self._stops: dict[int, int] = {}  # start -> stop
        self._starts: dict[int, int] = {}  # stop -> start
        self._largest: list[tuple[int, int]] = []  # heap of (-nbytes, start); stale ones are skipped
        self.give(ByteRange(0, capacity_bytes))

    def __len__(self) -> int:
        return len(self._stops)

    def give(self, extent: ByteRange) -> None:
        start, stop = extent.start, extent.stop
        self.nbytes += stop - start
        if stop in self._stops:
            stop = self._remove(stop)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._add(start, stop)

    def take(self, nbytes: int) -> tuple[ByteRange, ...]:
        """``nbytes`` in as few extents as the largest ranges allow; the caller knows they fit."""
        if nbytes > self.nbytes:
            raise WorkerError(f"{nbytes} bytes wanted, {self.nbytes} are free")
        self.nbytes -= nbytes
        extents = []
        while nbytes:
            size, start = heapq.heappop(self._largest)
            if self._stops.get(start) != start - size:
                continue
            stop = self._remove(start)
            cut = min(stop, start + nbytes)
            if cut < stop:
                self._add(cut, stop)
            extents.append(ByteRange(start, cut))
            nbytes -= cut - start
        return tuple(extents)

    def _add(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        self._starts[stop] = start
        heapq.heappush(self._largest, (start - stop, start))
        if len(self._largest) > 2 * len(self._stops) + 1024:
            self._largest = [(low - high, low) for low, high in self._stops.items()]
            heapq.heapify(self._largest)

    def _remove(self, start: int) -> int:
        stop = self._stops.pop(start)
        del self._starts[stop]
        return stop


class Store:
    """Entries by key over one region. Every change costs O(log n) and what it evicts."""

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self._free = FreeSpace(self.capacity_bytes)
        self._entries: dict[bytes, Entry] = {}
        self._evictable: OrderedDict[int, Entry] = OrderedDict()  # least recently used first
        self._evictable_bytes = 0
        self._state_bytes = dict.fromkeys(EntryState, 0)
        self._n_ids = 0
        self.pinned_bytes = 0
        self.unclaimed_bytes = 0
        self.n_evictions = 0
        self.evicted_bytes = 0

    # --- space

    def bytes_for(self, layout: RowLayout) -> int:
        """What an entry with these rows takes."""
        return -(-layout.nbytes // self.alignment) * self.alignment

    @property
    def half_bytes(self) -> int:
        return self.capacity_bytes // 2

    def lookup(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether an entry that takes ``nbytes`` can be reserved now."""
        return nbytes <= self._free.nbytes + self._evictable_bytes

    def may_wait_for(self, nbytes: int) -> bool:
        """Whether one more entry of unclaimed rooms keeps these at half the store at most."""
        return self.unclaimed_bytes + nbytes <= self.half_bytes

    def reserve(self, key: bytes, layout: RowLayout) -> Entry:
        """Take bytes for new rows, evicting what is needed. The caller knows they fit."""
        if key in self._entries:
            raise WorkerError(f"the store has an entry for {key.hex()} already")
        nbytes = self.bytes_for(layout)
        if not self.has_room_for(nbytes):
            raise WorkerError(f"no room for {nbytes} bytes")
        while self._free.nbytes < nbytes:
            victim = next(iter(self._evictable.values()))
            self.n_evictions += 1
            self.evicted_bytes += victim.nbytes
            self._remove(victim)
        taken = self._free.take(nbytes)
        self._n_ids += 1
        entry = Entry(self._n_ids, key, layout, trimmed(taken, layout.nbytes), taken, nbytes)
        self._entries[key] = entry
        self._state_bytes[EntryState.RESERVED] += nbytes
        return entry

    # --- the tower

    def start(self, entry: Entry) -> None:
        """The tower begins to fill it."""
        self._move(entry, EntryState.FILLING, EntryState.RESERVED)

    def stop(self, entry: Entry) -> None:
        """Its batch failed; it waits for another turn."""
        self._move(entry, EntryState.RESERVED, EntryState.FILLING)

    def fill(self, entry: Entry) -> None:
        """Its rows lie in it."""
        held = EntryState.HELD if entry.n_refs else EntryState.CACHED
        self._move(entry, held, EntryState.FILLING)

    def drop(self, entry: Entry) -> None:
        """It will not be filled; nobody refers to it any more."""
        if entry.is_filled or entry.n_refs:
            raise WorkerError(f"entry {entry.id} is in use: {entry.state.value}, {entry.n_refs} rooms")
        self._remove(entry)

    # --- references and pins

    def attach(self, entry: Entry, claimed: bool) -> None:
        """One more room refers to it."""
        entry.n_refs += 1
        if not claimed:
            entry.n_unclaimed += 1
            if entry.n_unclaimed == 1:
                self.unclaimed_bytes += entry.nbytes
        if entry.state is EntryState.CACHED:
            self._move(entry, EntryState.HELD, EntryState.CACHED)

    def claim(self, entry: Entry) -> None:
        """One of the unclaimed rooms that refer to it has been claimed."""
        if not entry.n_unclaimed:
            raise WorkerError(f"entry {entry.id} has no unclaimed room")
        entry.n_unclaimed -= 1
        if not entry.n_unclaimed:
            self.unclaimed_bytes -= entry.nbytes

    def detach(self, entry: Entry, claimed: bool) -> None:
        """One room less refers to it; without any it is a cache entry."""
        if not entry.n_refs:
            raise WorkerError(f"entry {entry.id} has no reference (released twice?)")
        if not claimed:
            self.claim(entry)
        entry.n_refs -= 1
        if not entry.n_refs and entry.state is EntryState.HELD:
            self._move(entry, EntryState.CACHED, EntryState.HELD)

    def pin(self, entry: Entry) -> None:
        """A late write may still read it."""
        self._unlist(entry)
        entry.n_pins += 1
        if entry.n_pins == 1:
            self.pinned_bytes += entry.nbytes

    def unpin(self, entry: Entry) -> None:
        if not entry.n_pins:
            raise WorkerError(f"entry {entry.id} is not pinned")
        entry.n_pins -= 1
        if not entry.n_pins:
            self.pinned_bytes -= entry.nbytes
            self._list(entry)

    def snapshot(self) -> StoreSnapshot:
        return StoreSnapshot(
            capacity_bytes=self.capacity_bytes,
            free_bytes=self._free.nbytes,
            bytes_by_state={state.value: n for state, n in self._state_bytes.items()},
            entries=len(self._entries),
            pinned_bytes=self.pinned_bytes,
            unclaimed_bytes=self.unclaimed_bytes,
            evictions=self.n_evictions,
            evicted_bytes=self.evicted_bytes,
        )

    def _move(self, entry: Entry, state: EntryState, expected: EntryState) -> None:
        if entry.state is not expected:
            raise WorkerError(f"entry {entry.id} is {entry.state.value}, not {expected.value}")
        self._unlist(entry)
        self._state_bytes[entry.state] -= entry.nbytes
        entry.state = state
        self._state_bytes[state] += entry.nbytes
        self._list(entry)

    def _list(self, entry: Entry) -> None:
        if entry.is_evictable:
            self._evictable[entry.id] = entry
            self._evictable_bytes += entry.nbytes

    def _unlist(self, entry: Entry) -> None:
        if self._evictable.pop(entry.id, None):
            self._evictable_bytes -= entry.nbytes

    def _remove(self, entry: Entry) -> None:
        self._unlist(entry)
        del self._entries[entry.key]
        self._state_bytes[entry.state] -= entry.nbytes
        for extent in entry.taken:
            self._free.give(extent)


def trimmed(extents: tuple[ByteRange, ...], nbytes: int) -> tuple[ByteRange, ...]:
    """The first ``nbytes`` of what the extents hold; each holds more than the rest to be cut."""
    over = sum(extent.nbytes for extent in extents) - nbytes
    last = extents[-1]
    return (*extents[:-1], ByteRange(last.start, last.stop - over))
