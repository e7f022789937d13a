"""The index of the store: which bytes hold which rows, and who needs them.

The store is cache and send buffer in one. Rows lie in an *entry*, a list of extents, so only
the number of free bytes counts, never their place. Rooms refer to entries; an entry without
references is a cache entry and leaves, least recently used first, when bytes are needed.
A *pin* keeps the bytes as they are while a late write may still read them; a pinned entry
still serves hits. The index owns no memory.

The tower's rows are put into the first tier. With a second tier an entry that leaves the first is
copied there, and the second tier's oldest entries are dropped for it; without one, or where it
does not fit, it is dropped. An entry lies in exactly one tier: until the copy is done in the
first, from where it still serves hits (then it stays), afterwards in the second, from where it is
sent as it lies. Bytes being copied are free only once the copy has answered.
"""

from ..errors import WorkerError
from ..types import RowLayout
from .entries import Entry, EntryState, Place, Tier
from .limits import StoreSnapshot

__all__ = ["Entry", "EntryState", "Store"]


class Store:
    """Entries by key. Every change costs O(log n) and what it evicts.

    ``free_ahead_bytes`` of the first tier are kept free or on their way out (``keep_ahead``), with
    ``max_moves`` copies under way at most. ``started`` collects entries whose copy is to begin.
    """

    def __init__(
        self,
        capacity_bytes: int,
        alignment: int,
        second_tier_bytes: int = 0,
        *,
        free_ahead_bytes: int = 0,
        max_moves: int = 256,
    ) -> None:
        self.alignment = alignment
        self._first = Tier.of(0, 0, capacity_bytes, alignment)
        self._second = Tier.of(1, capacity_bytes, second_tier_bytes, alignment)
        self._tiers = (self._first, self._second)
        self._free_ahead_bytes = free_ahead_bytes if second_tier_bytes else 0
        self._max_moves = max_moves
        self._entries: dict[bytes, Entry] = {}
        self._moving: dict[int, Entry] = {}
        self._coming_bytes = 0  # of the first tier, free once copies under way have answered
        self._n_ids = 0
        self.started: list[Entry] = []
        self.pinned_bytes = 0
        self.unclaimed_bytes = 0

    # --- space

    @property
    def capacity_bytes(self) -> int:
        """Of the first tier: an entry is at most as large."""
        return self._first.capacity_bytes

    @property
    def half_bytes(self) -> int:
        return self.capacity_bytes // 2

    def bytes_for(self, layout: RowLayout) -> int:
        """What an entry with these rows takes."""
        return -(-layout.nbytes // self.alignment) * self.alignment

    def lookup(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def may_wait_for(self, nbytes: int) -> bool:
        """Whether one more entry of unclaimed rooms keeps these at half the first tier at most."""
        return self.unclaimed_bytes + nbytes <= self.half_bytes

    def make_room(self, nbytes: int) -> bool:
        """Whether an entry that takes ``nbytes`` can be reserved now; entries leave for it.

        False, and nothing leaves, where what is in use does not allow it. False too while the
        bytes are on their way: then copies have begun, and the last to be done makes it True.
        """
        first = self._first
        if nbytes > first.free.nbytes + self._coming_bytes + first.idle_bytes:
            return False
        self._evict_until(nbytes)
        return nbytes <= first.free.nbytes

    def keep_ahead(self) -> None:
        """Let entries leave before their bytes are needed."""
        self._evict_until(self._free_ahead_bytes)

    def reserve(self, key: bytes, layout: RowLayout) -> Entry:
        """Take bytes for new rows; the caller knows that there is room."""
        if key in self._entries:
            raise WorkerError(f"the store has an entry for {key.hex()} already")
        nbytes = self.bytes_for(layout)
        if not self.make_room(nbytes):
            raise WorkerError(f"no room for {nbytes} bytes")
        self._n_ids += 1
        place = self._first.take(nbytes, layout, EntryState.RESERVED)
        entry = self._entries[key] = Entry(self._n_ids, key, layout, place, nbytes)
        return entry

    def _evict_until(self, nbytes: int) -> None:
        """Entries leave the first tier until so many bytes are free or coming, as far as may be."""
        first = self._first
        while first.free.nbytes + self._coming_bytes < nbytes and first.idle:
            if len(self._moving) >= self._max_moves:
                return
            victim = first.oldest()
            if self._make_room_in_second(victim.nbytes):
                self._start_move(victim)
            else:
                self._evict(victim)

    def _make_room_in_second(self, nbytes: int) -> bool:
        second = self._second
        if nbytes > second.free.nbytes + second.idle_bytes:
            return False
        while second.free.nbytes < nbytes:
            self._evict(second.oldest())
        return True

    # --- between the tiers

    def _start_move(self, entry: Entry) -> None:
        target = self._second.take(entry.nbytes, entry.layout, EntryState.RESERVED)
        self._unlist(entry)
        entry.target = target
        self._moving[entry.id] = entry
        self._list(entry)
        self.started.append(entry)

    def moved(self, entry_id: int) -> bool:
        """The copy is done. True: the entry lies in the second tier now; False: it is in use and stays."""
        entry, target = self._answered(entry_id)
        if not entry.is_idle:
            self._second.give(target, EntryState.RESERVED)
            entry.target = None
            return False
        self._unlist(entry)
        self._first.give(entry.place, EntryState.CACHED)
        self._first.count_eviction(entry.nbytes)
        self._second.state_bytes[EntryState.RESERVED] -= entry.nbytes
        self._second.state_bytes[EntryState.CACHED] += entry.nbytes
        entry.place, entry.target = target, None
        self._list(entry)
        return True

    def not_moved(self, entry_id: int) -> None:
        """The copy failed: the entry is dropped, or stays as long as it is in use."""
        entry, target = self._answered(entry_id)
        self._unlist(entry)
        self._second.give(target, EntryState.RESERVED)
        entry.target = None
        self._list(entry)
        if entry.is_idle:
            self._evict(entry)

    def _answered(self, entry_id: int) -> tuple[Entry, Place]:
        entry = self._moving.pop(entry_id, None)
        if entry is None or entry.target is None:
            raise WorkerError(f"answer for a copy of entry {entry_id}, which is not under way")
        return entry, entry.target

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
                self._count_unclaimed(entry, entry.nbytes)
        if entry.state is EntryState.CACHED:
            self._move(entry, EntryState.HELD, EntryState.CACHED)

    def claim(self, entry: Entry) -> None:
        """One of the unclaimed rooms that refer to it has been claimed."""
        if not entry.n_unclaimed:
            raise WorkerError(f"entry {entry.id} has no unclaimed room")
        entry.n_unclaimed -= 1
        if not entry.n_unclaimed:
            self._count_unclaimed(entry, -entry.nbytes)

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
        tiers = self._tiers if self._second.capacity_bytes else self._tiers[:1]
        return StoreSnapshot(
            tiers=tuple(tier.snapshot() for tier in tiers),
            entries=len(self._entries),
            moving=len(self._moving),
            pinned_bytes=self.pinned_bytes,
            unclaimed_bytes=self.unclaimed_bytes,
        )

    # --- books

    def _count_unclaimed(self, entry: Entry, nbytes: int) -> None:
        """The second tier is nobody's way: what is held there keeps no batch waiting."""
        if entry.tier == 0:
            self.unclaimed_bytes += nbytes

    def _move(self, entry: Entry, state: EntryState, expected: EntryState) -> None:
        if entry.state is not expected:
            raise WorkerError(f"entry {entry.id} is {entry.state.value}, not {expected.value}")
        self._unlist(entry)
        state_bytes = self._tiers[entry.tier].state_bytes
        state_bytes[entry.state] -= entry.nbytes
        entry.state = state
        state_bytes[state] += entry.nbytes
        self._list(entry)

    def _list(self, entry: Entry) -> None:
        """After a change: an idle entry may leave, or is about to."""
        if entry.is_idle and entry.target:
            self._coming_bytes += entry.nbytes
        elif entry.is_idle:
            self._tiers[entry.tier].list(entry)

    def _unlist(self, entry: Entry) -> None:
        """Before a change."""
        if entry.is_idle and entry.target:
            self._coming_bytes -= entry.nbytes
        else:
            self._tiers[entry.tier].unlist(entry)

    def _evict(self, entry: Entry) -> None:
        self._tiers[entry.tier].count_eviction(entry.nbytes)
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._unlist(entry)
        del self._entries[entry.key]
        self._tiers[entry.tier].give(entry.place, entry.state)
