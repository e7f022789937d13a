"""The index of the store: extents, references, pins, eviction, and bytes by state."""

import random

import pytest

from encodepool_worker.core.space import FreeSpace
from encodepool_worker.core.store import Entry, EntryState, Store
from encodepool_worker.errors import WorkerError
from encodepool_worker.testing import make_key, make_layout
from encodepool_worker.types import ByteRange


@pytest.fixture
def store():
    return Store(capacity_bytes=1024, alignment=64)


def rows(nbytes):
    return make_layout(n_tokens=nbytes // 4, hidden=1)


def reserve(store, content, nbytes) -> Entry:
    return store.reserve(make_key(content), rows(nbytes))


def cached(store, content, nbytes) -> Entry:
    entry = reserve(store, content, nbytes)
    store.start(entry)
    store.fill(entry)
    return entry


def by_state(store):
    return {state: n for state, n in store.snapshot().bytes_by_state.items() if n}


def test_an_entry_takes_aligned_bytes_and_shows_exactly_its_rows(store):
    entry = reserve(store, "a", 100)
    assert entry.nbytes == 128
    assert entry.extents == (ByteRange(0, 100),)
    assert store.snapshot().free_bytes == 1024 - 128
    assert reserve(store, "b", 64).extents == (ByteRange(128, 192),)


def test_capacity_is_cut_to_the_alignment():
    assert Store(capacity_bytes=1000, alignment=64).capacity_bytes == 960


def test_only_bytes_count_never_their_place(store):
    """Every other entry is freed: what is left over has no two neighbours, and is used all the same."""
    entries = [cached(store, str(i), 64) for i in range(16)]
    for entry in entries[::2]:
        store.attach(entry, claimed=True)
    big = reserve(store, "big", 512)
    assert len(big.extents) == 8
    assert store.snapshot().free_bytes == 0
    assert {e.start for e in big.extents} == {64 * i for i in range(1, 16, 2)}
    assert all(store.lookup(entry.key) for entry in entries[::2])


def test_the_life_of_an_entry_shows_in_the_bytes_by_state(store):
    entry = reserve(store, "a", 64)
    store.attach(entry, claimed=True)
    assert by_state(store) == {"reserved": 64}
    store.start(entry)
    assert by_state(store) == {"filling": 64}
    store.stop(entry)
    assert by_state(store) == {"reserved": 64}
    store.start(entry)
    store.fill(entry)
    assert by_state(store) == {"held": 64}
    store.detach(entry, claimed=True)
    assert by_state(store) == {"cached": 64}
    store.attach(entry, claimed=True)
    assert by_state(store) == {"held": 64}


def test_rows_that_nobody_waited_for_are_cached_at_once(store):
    assert cached(store, "a", 64).state is EntryState.CACHED


def test_the_least_recently_used_goes_first(store):
    a, b, c = (cached(store, name, 320) for name in "abc")
    store.attach(a, claimed=True)
    store.detach(a, claimed=True)
    reserve(store, "d", 320)
    assert [store.lookup(e.key) for e in (a, b, c)] == [a, None, c]
    (tier,) = store.snapshot().tiers
    assert (tier.evictions, tier.evicted_bytes) == (1, 320)


def test_nothing_is_evicted_that_is_held_pinned_or_being_filled(store):
    held, pinned = cached(store, "held", 256), cached(store, "pinned", 256)
    filling = reserve(store, "filling", 256)
    store.start(filling)
    store.attach(held, claimed=True)
    store.pin(pinned)
    assert store.make_room(256)
    assert not store.make_room(260)
    with pytest.raises(WorkerError, match="no room"):
        reserve(store, "x", 512)
    store.unpin(pinned)
    assert store.make_room(512)


def test_a_pinned_entry_still_serves_hits(store):
    entry = cached(store, "a", 64)
    store.pin(entry)
    store.attach(store.lookup(make_key("a")), claimed=True)
    store.detach(entry, claimed=True)
    assert store.snapshot().pinned_bytes == 64
    store.pin(entry)
    store.unpin(entry)
    assert store.snapshot().pinned_bytes == 64
    store.unpin(entry)
    assert store.snapshot().pinned_bytes == 0
    assert store.make_room(1024)


def test_a_dropped_entry_gives_its_bytes_back(store):
    entry = reserve(store, "a", 1024)
    store.start(entry)
    store.drop(entry)
    assert store.lookup(entry.key) is None
    assert store.snapshot().free_bytes == 1024
    assert by_state(store) == {}


def test_unclaimed_rooms_are_counted_once_an_entry(store):
    entry = cached(store, "a", 256)
    store.attach(entry, claimed=False)
    store.attach(entry, claimed=False)
    store.attach(entry, claimed=True)
    assert store.unclaimed_bytes == 256
    assert store.may_wait_for(256)
    assert not store.may_wait_for(260)
    store.claim(entry)
    assert store.unclaimed_bytes == 256
    store.detach(entry, claimed=False)
    assert store.unclaimed_bytes == 0
    assert entry.n_refs == 2


def test_mistakes_are_loud(store):
    entry = cached(store, "a", 64)
    with pytest.raises(WorkerError, match="already"):
        reserve(store, "a", 64)
    with pytest.raises(WorkerError, match="released twice"):
        store.detach(entry, claimed=True)
    with pytest.raises(WorkerError, match="not pinned"):
        store.unpin(entry)
    with pytest.raises(WorkerError, match="no unclaimed"):
        store.claim(entry)
    with pytest.raises(WorkerError, match="cached, not reserved"):
        store.start(entry)
    with pytest.raises(WorkerError, match="in use"):
        store.drop(entry)


def test_neighbours_are_joined_on_both_sides():
    free = FreeSpace(100)
    assert free.take(30) + free.take(30) + free.take(40) == (
        ByteRange(0, 30),
        ByteRange(30, 60),
        ByteRange(60, 100),
    )
    free.give(ByteRange(0, 30))
    free.give(ByteRange(60, 100))
    assert len(free) == 2
    free.give(ByteRange(30, 60))
    assert len(free) == 1
    assert free.take(100) == (ByteRange(0, 100),)
    with pytest.raises(WorkerError, match="1 bytes wanted, 0 are free"):
        free.take(1)


def test_free_space_is_never_handed_out_twice():
    chance = random.Random(5)
    free, mine, owner = FreeSpace(4096), [], [0] * 4096
    for turn in range(1, 6000):
        if mine and (chance.random() < 0.5 or free.nbytes < 64):
            extents = mine.pop(chance.randrange(len(mine)))
            for extent in extents:
                owner[extent.start : extent.stop] = [0] * extent.nbytes
                free.give(extent)
        else:
            extents = free.take(chance.randint(1, min(300, free.nbytes)))
            for extent in extents:
                assert not any(owner[extent.start : extent.stop])
                owner[extent.start : extent.stop] = [turn] * extent.nbytes
            mine.append(extents)
        assert free.nbytes == owner.count(0)
    for extents in mine:
        for extent in extents:
            free.give(extent)
    assert len(free) == 1
