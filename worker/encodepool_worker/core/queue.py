"""What waits for the tower: one job per content key, whatever the number of rooms that want it.

Order: jobs that a claimed room wants first, then admission. A job larger than half the store's
first tier waits outside that order until it is claimed, so that it does not hold up the others.
"""

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from ..types import Item


@dataclass(slots=True)
class Pixels:
    """The pixels and the credit of one submission, given back when nobody uses them any more."""

    seq: int
    handle: int
    cost: int
    pixel_bytes: int
    users: int = 1


@dataclass(slots=True)
class QueuedJob:
    """Rows to be made: the item they are made from, and the rooms that wait for them.

    ``item`` and ``pixels`` are those of the first room that asked, which may have left since.
    The entry will take ``nbytes``; ``oversize``: more than half the first tier. After ``deadline_s``
    none of its rooms wants it; those that left are not taken out of it. ``aside``: it has no turn, since
    it would be late for all of them, and they end at their own deadlines.
    """

    order: int
    item: Item
    pixels: Pixels
    admitted_s: float
    nbytes: int
    oversize: bool
    deadline_s: float = -math.inf
    aside: bool = False
    claimed: dict[int, None] = field(default_factory=dict)
    unclaimed: dict[int, None] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        return self.item.key


class BatchQueue:
    """Jobs by key, in order. Every change costs O(log n)."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, QueuedJob] = OrderedDict()  # in admission order
        self._claimed: list[tuple[int, bytes]] = []  # heaps; entries that hold no more are skipped
        self._unclaimed: list[tuple[int, bytes]] = []
        self._n_orders = 0
        self._n_oversize_claimed = 0
        self._n_claimed = 0
        self._claimed_cost = 0
        self.cost = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest job was admitted."""
        return next(iter(self._jobs.values())).admitted_s if self._jobs else None

    @property
    def oversize_claimed(self) -> bool:
        """A job larger than half the first tier waits, and a claimed room wants it."""
        return self._n_oversize_claimed > 0

    def line(self, claimed: bool) -> tuple[int, int]:
        """Tokens and items that come before a new item, claimed or not, as things are."""
        return (self._claimed_cost, self._n_claimed) if claimed else (self.cost, len(self._jobs))

    def get(self, key: bytes) -> QueuedJob | None:
        return self._jobs.get(key)

    def add(self, item: Item, pixels: Pixels, nbytes: int, *, oversize: bool, now_s: float) -> QueuedJob:
        """A job without rooms yet: join some at once."""
        if item.key in self._jobs:
            raise ValueError(f"a job for {item.key.hex()} is queued already")
        self._n_orders += 1
        job = QueuedJob(self._n_orders, item, pixels, now_s, nbytes, oversize)
        self._jobs[item.key] = job
        self.cost += item.cost
        self._file(job)
        return job

    def join(self, job: QueuedJob, room: int, claimed: bool, deadline_s: float = math.inf) -> None:
        if deadline_s > job.deadline_s:
            job.deadline_s = deadline_s
            if job.aside:
                job.aside = False
                self._file(job)
        if claimed:
            self._claim(job, room)
        else:
            job.unclaimed[room] = None

    def claim(self, job: QueuedJob, room: int) -> None:
        """One of the job's rooms has been claimed."""
        del job.unclaimed[room]
        self._claim(job, room)

    def leave(self, job: QueuedJob, room: int) -> bool:
        """A room gives up. True: it was the last one, and the job is gone."""
        if room in job.claimed:
            del job.claimed[room]
            if not job.claimed:
                self._count_claimed(job, -1)
                self._file(job)
        else:
            del job.unclaimed[room]
        if job.claimed or job.unclaimed:
            return False
        self.remove(job)
        return True

    def head(self) -> QueuedJob | None:
        """The job whose turn it is."""
        for heap, claimed in ((self._claimed, True), (self._unclaimed, False)):
            while heap:
                job = self._jobs.get(heap[0][1])
                if job and job.order == heap[0][0] and bool(job.claimed) is claimed and not job.aside:
                    return job
                heapq.heappop(heap)
        return None

    def set_aside(self, job: QueuedJob) -> None:
        """No turn for it, unless a room joins that can wait for longer."""
        job.aside = True

    def remove(self, job: QueuedJob) -> None:
        """The job leaves the queue with all its rooms."""
        del self._jobs[job.key]
        self.cost -= job.item.cost
        if job.claimed:
            self._count_claimed(job, -1)

    def split(self, job: QueuedJob) -> dict[int, None]:
        """Take the job's claimed rooms out of it; the others keep its place."""
        rooms, job.claimed = job.claimed, {}
        self._count_claimed(job, -1)
        self._file(job)
        return rooms

    def _claim(self, job: QueuedJob, room: int) -> None:
        first = not job.claimed
        job.claimed[room] = None
        if first:
            self._count_claimed(job, 1)
            self._file(job)

    def _count_claimed(self, job: QueuedJob, by: int) -> None:
        self._n_claimed += by
        self._claimed_cost += by * job.item.cost
        self._n_oversize_claimed += by * job.oversize

    def _file(self, job: QueuedJob) -> None:
        """Put the job where ``head`` finds it."""
        if job.aside:
            return
        if job.claimed:
            heap = self._claimed
        elif not job.oversize:
            heap = self._unclaimed
        else:
            return
        heapq.heappush(heap, (job.order, job.key))
        if len(heap) > 2 * len(self._jobs) + 1024:
            wanted = heap is self._claimed
            heap[:] = [
                (j.order, j.key)
                for j in self._jobs.values()
                if bool(j.claimed) is wanted and (wanted or not j.oversize) and not j.aside
            ]
            heapq.heapify(heap)
