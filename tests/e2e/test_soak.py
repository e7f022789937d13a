"""Twenty thousand items of mixed sizes, three of ten of which fail: nothing of the worker may grow.

The worker is real, with all its processes; so are its failures: a request that is refused, pixels that
are not numbers, a receiver that asks for other rows than there are. Items are tiny and many clients send
at once, over the `tcp` transport, so that the whole takes about a minute on two calm cores. What it does
not show: growth below half a kilobyte an item, growth with days instead of items (what is bounded by
time, tombstones, has short times here), and Mooncake's own memory.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from tests.e2e.gateway import SHM, Picture, image_request
from tests.e2e.receiving import HIDDEN, LEVELS

from encodepool_worker.client.receiver import PrefillRank, Shard
from encodepool_worker.errors import ClientError
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.types import RowLayout

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

WORKER = {
    "transfer_backend": "tcp",
    "store_device_mib": 8,
    "max_pixel_mib": 96,
    "max_tombstones": 500,
    "tombstone_seconds": 5,
}
ITEMS = 20_000
MARKS = 5
"""Measured after each fifth; the first brings every pool, cache and table to its working size."""

CLIENTS = 12
CONTENTS = 400
SIDES = (4, 4, 4, 4, 8)

MIB = 1 << 20
GROWTH_BYTES = 8 * MIB
"""Of a process in four fifths of the items: half a kilobyte for each. Seen: below one MiB in all."""

SPARE_DESCRIPTORS = 4
SPARE_THREADS = 2


@dataclass(frozen=True)
class Mark:
    """What one process holds at one moment."""

    role: str
    rss_bytes: int
    descriptors: int
    threads: int


def marks_of(worker):
    found = {}
    for process in worker.processes():
        command = " ".join(process.cmdline())
        role = next(
            (name for name in ("frontend", "shell") if f"encodepool_worker.{name}" in command), "supervisor"
        )
        with process.oneshot():
            found[process.pid] = Mark(
                role, process.memory_info().rss, process.num_fds(), process.num_threads()
            )
    return found


class Traffic:
    """Clients with one receiving rank between them; ``run`` sends items and waits for every verdict."""

    def __init__(self, worker, new_room):
        self.worker = worker
        self.new_room = new_room
        self.rank = PrefillRank(TcpEngine("127.0.0.1"), "127.0.0.1", arena_bytes=8 * MIB)
        self.pictures = [
            Picture(side, side, seed) for seed in range(CONTENTS // len(SIDES)) for side in SIDES
        ]
        self.spoilt = [Picture(4, 4, seed, has_nan=True) for seed in range(10)]
        self.ends = {"arrived": 0, "refused": 0, "failed": 0}
        self.lock = threading.Lock()

    def run(self, count, pool, seed):
        draw = random.Random(seed)
        for end in pool.map(
            self.one, [draw.random() for _ in range(count)], [draw.random() for _ in range(count)]
        ):
            self.ends[end] += 1

    def one(self, kind, which):
        """One item to its end, as ``kind`` (0 to 1) has it; raises where it ends in another way."""
        room = self.new_room()
        picture = self.pictures[int(which * len(self.pictures))]
        if kind < 0.1:
            picture = self.spoilt[int(which * len(self.spoilt))]
        request = image_request(room, picture)
        n_rows = picture.tokens
        if 0.1 <= kind < 0.2:
            request.mm_inputs.items[0].placeholders[0].length += 1
        elif 0.2 <= kind < 0.3:
            n_rows += 1
        layout = RowLayout(n_rows, HIDDEN, LEVELS, "float32")
        address = ("127.0.0.1", self.worker.bootstrap_port)
        offer = self.rank.announce(address, room, layout, Shard(0, n_rows), 60.0)
        call = self.worker.encoder.Encode.future(request, timeout=60.0)
        if kind >= 0.3:
            self.rank.wait(offer, 60.0)
            return "arrived"
        with pytest.raises(ClientError, match="failed room"):
            self.rank.wait(offer, 60.0)
        is_refused = 0.1 <= kind < 0.2
        assert call.code() is (grpc.StatusCode.INVALID_ARGUMENT if is_refused else grpc.StatusCode.OK)
        return "refused" if is_refused else "failed"

    def close(self):
        self.rank.close()


@pytest.fixture
def worker(start_worker):
    """Not the module's of the other tests: no receiver but our own takes part."""
    running = start_worker(**WORKER).ready()
    yield running
    assert running.stop(60) == 0, running.log_tail()


@pytest.fixture
def traffic(worker, new_room):
    running = Traffic(worker, new_room)
    yield running
    running.close()


def at_rest(worker):
    samples = worker.metrics()
    return not any(
        samples[name]
        for name in ("encodepool_queue_items", "encodepool_credit_tokens", "encodepool_store_pinned_bytes")
    )


def test_nothing_grows_over_twenty_thousand_items(traffic, worker, wait_for):
    shm_before = {path.name for path in SHM.iterdir()}
    marks = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        for fifth in range(MARKS):
            traffic.run(ITEMS // MARKS, pool, fifth)
            wait_for(lambda: at_rest(worker), 20, "the worker comes to rest")
            marks.append(marks_of(worker))
    print(traffic.ends)
    for fifth in marks:
        print([(m.role, m.rss_bytes // MIB, m.descriptors, m.threads) for m in fifth.values()])

    assert sum(traffic.ends.values()) == ITEMS
    assert 0.25 < (traffic.ends["refused"] + traffic.ends["failed"]) / ITEMS < 0.35
    first, last = marks[0], marks[-1]
    assert first.keys() == last.keys(), "no process was replaced"
    for pid, was in first.items():
        now = last[pid]
        assert now.rss_bytes - was.rss_bytes < GROWTH_BYTES, (was, now)
        assert now.descriptors - was.descriptors <= SPARE_DESCRIPTORS, (was, now)
        assert now.threads - was.threads <= SPARE_THREADS, (was, now)
    assert {path.name for path in SHM.iterdir()} <= shm_before
