"""A rank whose store has two tiers, here both of host memory: what left the first is sent from the second."""

import queue
import threading

import pytest
import torch

from encodepool_worker.core.events import Demoted, DemoteFailed
from encodepool_worker.core.instructions import Demote
from encodepool_worker.errors import WriteRefused
from encodepool_worker.shell.mover import Mover
from encodepool_worker.shell.store_memory import StoreMemory
from encodepool_worker.shell.tiers import TierPlan
from encodepool_worker.types import ByteRange, Grid, Status

CPU = torch.device("cpu")
GRID = Grid(1, 64, 64)
N_TOKENS = 1024  # 96 KiB of rows: two entries fill three quarters of the first tier
KIB = 1024


def tiers(first, second):
    return [TierPlan("device", first, CPU), TierPlan("host", second, CPU)]


def test_rows_come_from_the_second_tier_byte_for_byte_and_without_the_tower(open_rig):
    rig = open_rig(tiers=tiers(256 * KIB, 1024 * KIB))
    prefill = rig.prefill(n_tokens=N_TOKENS)
    pixels = {}

    def ship(room, content):
        _, pixels[content] = rig.submit(room=room, content=content, grid=GRID)
        prefill.announce(room, n_rows=N_TOKENS, span=N_TOKENS)
        assert prefill.verdict() == (room, Status.SUCCESS)
        assert prefill.received() == rig.tower.halves(pixels[content])

    for n in range(8):  # four times the first tier
        ship(room=n + 1, content=n + 1)
    rig.wait_until(lambda: rig.pipeline.snapshot().store.moving == 0)
    for n in range(8):
        ship(room=n + 101, content=n + 1)
    assert sum(rig.tower.batches) == 8
    counters = rig.pipeline.snapshot().counters
    assert counters["hits"] == 8
    assert counters["hits_second_tier"] >= 6
    hits, nbytes = 'encodepool_hits_total{tier="host"}', 'encodepool_hit_bytes_total{tier="host"}'
    state = rig.hear_state(lambda s: s.counters.get(hits, 0) >= counters["hits_second_tier"])
    assert state.counters[nbytes] == counters["hits_second_tier"] * N_TOKENS * 96
    assert state.counters['encodepool_demotions_total{outcome="moved"}'] >= 6
    assert state.counters['encodepool_store_bytes{state="cached",tier="host"}'] >= 6 * N_TOKENS * 96
    assert state.counters['encodepool_evictions_total{tier="device"}'] >= 6


def test_nobody_can_write_into_the_store(rig):
    """An engine that received into it could be told to change the rows that others are sent."""
    stranger = rig.make_engine()
    try:
        source = torch.full((64,), 0x55, dtype=torch.uint8)
        stranger.register(source.data_ptr(), 64)
        (region,) = rig.rank.memory.regions
        before = rig.rank.memory.read(ByteRange(0, 64))
        with pytest.raises(WriteRefused, match="has not registered all of the target"):
            stranger.write(rig.rank._sender.session, [(source.data_ptr(), region.ptr, 64)])
        assert rig.rank.memory.read(ByteRange(0, 64)) == before
    finally:
        stranger.close()


class SlowMemory(StoreMemory):
    """Holds copies up, or fails them."""

    def __init__(self, tiers):
        super().__init__(tiers)
        self.gate = threading.Event()
        self.problem = None

    def copy(self, source, target):
        assert self.gate.wait(30)
        if self.problem:
            raise self.problem
        super().copy(source, target)


def test_copies_are_answered_in_order_and_ordering_one_does_not_wait(wait_until):
    memory = SlowMemory(tiers(4096, 4096))
    answers, crashes = queue.Queue(), []
    mover = Mover(memory, answers.put, crashes.append, max_orders=3)
    orders = [
        Demote(n, (ByteRange(64 * n, 64 * n + 64),), (ByteRange(4096 + 64 * n, 4160 + 64 * n),))
        for n in range(3)
    ]
    for order in orders:
        mover.submit(order)
    assert answers.empty()
    memory.problem = RuntimeError("the device is gone")
    memory.gate.set()
    assert answers.get(timeout=10) == DemoteFailed(0, "the device is gone")
    wait_until(lambda: answers.qsize() == 2)
    answers.get(), answers.get()
    memory.problem = None
    mover.submit(orders[1])
    assert answers.get(timeout=10) == Demoted(1)
    assert memory.read(orders[1].target[0]) == memory.read(orders[1].source[0])
    assert mover.close()
    assert crashes == []
