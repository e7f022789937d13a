"""The tower's thread: one answer for each batch, and a bad item fails alone where it can be told."""

import queue
import threading

import pytest
import torch

from encodepool_worker.core.events import BatchEncoded, BatchFailed
from encodepool_worker.core.instructions import Job, RunBatch
from encodepool_worker.errors import GroupLost
from encodepool_worker.shell.metrics import Metrics
from encodepool_worker.shell.pixels import Pixels, PixelTable
from encodepool_worker.shell.store_memory import StoreMemory
from encodepool_worker.shell.tiers import TierPlan
from encodepool_worker.shell.tower_runner import TowerRunner
from encodepool_worker.types import ByteRange, Grid, Item, Modality, RowLayout

POISON, NOT_FINITE, DISASTER = 1000.0, 2000.0, 3000.0
GRID = Grid(1, 4, 4)
N_TOKENS = 4


class Bench:
    def __init__(self, tower, make_pixels, **options):
        self.tower = tower
        self.make_pixels = make_pixels
        self.answers = queue.Queue()
        self.crashes = []
        self.table = PixelTable()
        self.memory = StoreMemory([TierPlan("host", 64 * 1024, torch.device("cpu"))])
        self.metrics = Metrics()
        self.runner = TowerRunner(
            tower, self.table, self.memory, self.answers.put, self.metrics, self.crashes.append, **options
        )
        self.next_entry = 1

    def job(self, first=None, layout=None, grid=GRID):
        entry, self.next_entry = self.next_entry, self.next_entry + 1
        pixels = self.make_pixels(entry, grid, first)
        handle = self.table.add(
            Pixels(memoryview(bytearray(pixels.numpy().tobytes())), "float32", tuple(pixels.shape), (grid,))
        )
        layout = layout or self.tower.spec.layout(N_TOKENS)
        item = Item(f"r{entry}", 0, entry, bytes([entry]) * 16, Modality.IMAGE, layout, N_TOKENS)
        start = entry * 1024
        extents = (ByteRange(start, start + 256), ByteRange(start + 512, start + 512 + layout.nbytes - 256))
        return Job(entry, item, handle, extents)

    def run(self, *jobs, batch=1):
        self.runner.submit(RunBatch(batch, jobs))
        return self.answers.get(timeout=10)

    def stored(self, job):
        return b"".join(self.memory.read(extent) for extent in job.extents)

    def expected(self, job):
        return b"".join(self.tower.halves(self.table.get(job.pixels).tensor()))


@pytest.fixture
def bench(tower, make_pixels):
    bench = Bench(tower, make_pixels)
    yield bench
    bench.runner.close()
    assert bench.crashes == []


def test_ranks_that_lost_each_other_end_but_not_while_they_part(bench, monkeypatch):
    def lose(items, *, batch=0):
        raise GroupLost("made by the test")

    monkeypatch.setattr(bench.tower, "encode", lose)
    assert bench.run(bench.job()) == BatchFailed(1, "made by the test")
    assert bench.crashes == ["made by the test"]
    bench.crashes.clear()
    gate = threading.Event()

    def leave(items, *, batch=0):
        gate.wait(10)
        lose(items)

    monkeypatch.setattr(bench.tower, "encode", leave)
    bench.runner.submit(RunBatch(2, (bench.job(),)))
    assert not bench.runner.close(0.1)
    gate.set()
    assert bench.answers.get(timeout=10) == BatchFailed(2, "made by the test")


def test_rows_lie_in_their_entries_main_half_first(bench):
    jobs = [bench.job() for _ in range(3)]
    assert bench.run(*jobs) == BatchEncoded(1, {})
    assert bench.tower.batches == [3]
    for job in jobs:
        assert bench.stored(job) == bench.expected(job)


def test_an_item_with_rows_that_are_not_finite_fails_alone(bench):
    good, bad, other = bench.job(), bench.job(NOT_FINITE), bench.job()
    assert bench.run(good, bad, other) == BatchEncoded(1, {bad.entry: "the tower's rows are not finite"})
    assert bench.stored(good) == bench.expected(good)
    assert bench.stored(other) == bench.expected(other)


@pytest.mark.parametrize(("first", "reason"), [(POISON, "a poisoned pixel"), (DISASTER, "ZeroDivisionError")])
def test_whatever_the_tower_raises_fails_the_batch_and_the_next_one_runs(bench, first, reason):
    answer = bench.run(bench.job(), bench.job(first))
    assert isinstance(answer, BatchFailed)
    assert reason in answer.reason
    assert bench.run(bench.job(), batch=2) == BatchEncoded(2, {})


def test_pixels_unlike_the_promise_fail_their_own_item_before_the_tower_runs(bench):
    good = bench.job()
    wrong_grid = bench.job(grid=Grid(1, 4, 6))
    wrong_layout = bench.job(layout=RowLayout(N_TOKENS, 8, 1, "float32"))
    gone = bench.job()
    bench.table.drop(gone.pixels)
    answer = bench.run(good, wrong_grid, wrong_layout, gone)
    assert set(answer.failures) == {wrong_grid.entry, wrong_layout.entry, gone.entry}
    assert bench.tower.batches == [1]
    assert bench.stored(good) == bench.expected(good)


def test_a_batch_with_no_item_left_does_not_run_the_tower(bench):
    job = bench.job(grid=Grid(1, 4, 6))
    assert set(bench.run(job).failures) == {job.entry}
    assert bench.tower.batches == []


def test_batches_are_counted(bench):
    bench.run(bench.job())
    bench.run(bench.job(), bench.job(), batch=2)
    samples = bench.metrics.snapshot()
    assert samples["encodepool_batches_total"] == 2
    assert samples["encodepool_batch_items_total"] == 3
    assert samples["encodepool_batch_tokens_total"] == 12
