"""Who gets which rows, and when the tower makes them: queue, store and the batch under way.

A room asks once (``acquire``) and is answered: Filled at once on a hit, else Taken when a batch
has its rows, then Filled or NotFilled. Jobs belong to content keys, so rooms that want the same
rows share one run of the tower, and a job whose last room has left is dropped.

*Claimed* rooms, whose receivers have all spoken, leave soon; the others may wait for a long
time. So that these cannot fill the store and keep those waiting:

- entries that unclaimed rooms refer to take half the first tier at most,
- rows larger than half the first tier are made for claimed rooms only,
- while such a job waits for space, no unclaimed room gets an entry.

An unclaimed room for which there is no share waits in the queue, with its pixels, even if
somebody else's entry has its rows. None of this holds for rows in the second tier: the tower's
rows never wait for space there.

*Deadlines*: a batch does not grow so long that an item in it would be late, and an item that could not
be in time even by itself gets no turn while others of its kind wait.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import WorkerError
from ..types import Item, RowLayout
from .instructions import Demote, DropPixels, Instruction, Job, ReturnCredit, RunBatch
from .limits import PipelineLimits
from .outlook import Outlook
from .queue import BatchQueue, Pixels, QueuedJob
from .room_events import Filled, NotFilled, RoomEvent, Taken
from .store import Entry, Store


@dataclass(slots=True)
class Reference:
    """What a room has: a place in the queue, or an entry, or (rows failed) neither."""

    claimed: bool
    job: QueuedJob | None = None
    entry: Entry | None = None
    hit_tier: int | None = None
    written_bytes: int = 0


@dataclass(slots=True)
class Running:
    """An entry that the tower fills, or will fill in its next turn, and who waits for it."""

    entry: Entry
    item: Item
    pixels: Pixels
    rooms: dict[int, None] = field(default_factory=dict)


class Rows:
    """Appends instructions to ``out`` and answers for rooms to ``answers``, as (room, event)."""

    def __init__(
        self,
        limits: PipelineLimits,
        counters: Counter[str],
        out: list[Instruction],
        answers: deque[tuple[int, RoomEvent]],
    ) -> None:
        self.queue = BatchQueue()
        self.store = Store(
            limits.store_bytes,
            limits.store_alignment,
            limits.second_tier_bytes,
            free_ahead_bytes=limits.free_ahead_bytes,
            max_moves=limits.max_demotions,
        )
        self.outlook = Outlook(limits.max_tokens_per_batch, limits.max_items_per_batch)
        self._limits = limits
        self._counters = counters
        self._out = out
        self._answers = answers
        self._references: dict[int, Reference] = {}
        self._filling: dict[int, Running] = {}  # by entry
        self._n_batches = 0
        self._batch: tuple[int, list[Running]] | None = None
        self._retry: deque[Running] = deque()
        self._has_news = False  # something that may be done has come since the tower was last looked at

    @property
    def batch_items(self) -> int:
        return len(self._batch[1]) if self._batch else 0

    def batch_rooms(self) -> list[int]:
        """Rooms that wait for the batch under way."""
        return [room for running in self._batch[1] for room in running.rooms] if self._batch else []

    # --- what rooms ask for

    def refusal(self, item: Item) -> tuple[str, str] | None:
        """Why these rows can never be had, with the request's field at fault."""
        nbytes = self.store.bytes_for(item.layout)
        if nbytes > self.store.capacity_bytes:
            capacity = self.store.capacity_bytes
            return "items", f"rows take {nbytes} bytes, the store holds {capacity}: make it larger"
        entry, job = self.store.lookup(item.key), self.queue.get(item.key)
        known = entry.layout if entry else job.item.layout if job else item.layout
        if known != item.layout:
            return "items", f"content {item.key.hex()} is known with rows {known}, not {item.layout}"
        return None

    def acquire(self, room: int, item: Item, pixels: Pixels, claimed: bool, now_s: float) -> None:
        """The room wants the rows of ``item``; answered now or later."""
        reference = self._references[room] = Reference(claimed)
        entry = self.store.lookup(item.key)
        if entry and (claimed or self._has_share(entry)):
            self._counters["joined"] += not entry.is_filled
            self._attach(room, reference, entry)
            return
        job = self.queue.get(item.key)
        if job is None:
            nbytes = self.store.bytes_for(item.layout)
            oversize = nbytes > self.store.half_bytes
            job = self.queue.add(item, pixels, nbytes, oversize=oversize, now_s=now_s)
            pixels.users += 1
        else:
            self._counters["joined"] += 1
        reference.job = job
        self._has_news = True
        self.queue.join(job, room, claimed, math.inf if item.deadline_s is None else item.deadline_s)

    def claim(self, room: int) -> None:
        """The room's receivers have all spoken."""
        reference = self._references[room]
        reference.claimed = self._has_news = True
        if reference.entry:
            self.store.claim(reference.entry)
        elif reference.job:
            entry = self.store.lookup(reference.job.key)
            if entry:
                self._leave(room, reference.job)
                self._attach(room, reference, entry)
            else:
                self.queue.claim(reference.job, room)

    def reacquire(self, room: int, key: bytes) -> None:
        """A finished room ships again; its rows are there (``stored``)."""
        entry = self.store.lookup(key)
        if entry is None or not entry.is_filled:
            raise WorkerError(f"room {room} ships again, but its rows are gone")
        self._attach_only(room, Reference(claimed=True), entry)

    def release(self, room: int) -> None:
        """The room needs its rows no longer."""
        reference = self._references.pop(room)
        if reference.job:
            self._leave(room, reference.job)
        elif reference.entry:
            running = self._filling.get(reference.entry.id)
            if running:
                del running.rooms[room]
            self.store.detach(reference.entry, reference.claimed)

    def let_go(self, pixels: Pixels) -> None:
        """One user less; the last one gives back credit and pixels."""
        pixels.users -= 1
        if not pixels.users:
            self._out.append(ReturnCredit(pixels.seq, pixels.cost, pixels.pixel_bytes))
            self._out.append(DropPixels(pixels.handle))

    # --- what is to be expected

    @property
    def is_idle(self) -> bool:
        """The tower does nothing, and nothing waits that could be done: some may not be done yet."""
        return not (self._batch or self._retry or self._has_news)

    def again(self) -> list[int]:
        """Tokens of each item that gets a turn of its own before anything new."""
        return [running.item.cost for running in self._retry]

    # --- what rooms have

    def stored(self, key: bytes) -> RowLayout | None:
        """Layout of the rows of this content, if they can be sent now."""
        entry = self.store.lookup(key)
        return entry.layout if entry and entry.is_filled else None

    def entry_of(self, room: int) -> Entry:
        entry = self._references[room].entry
        if entry is None or not entry.is_filled:
            raise WorkerError(f"room {room} has no rows to send")
        return entry

    def wrote(self, room: int, nbytes: int) -> None:
        self._counters["written_bytes"] += nbytes
        self._references[room].written_bytes += nbytes

    def summary(self, room: int) -> tuple[int | None, int]:
        """The tier in which the rows lay already (None: nowhere), and how many bytes were written."""
        reference = self._references.get(room)
        return (reference.hit_tier, reference.written_bytes) if reference else (None, 0)

    # --- between the tiers

    def demote_ahead(self) -> None:
        """Make room before it is needed, and say which copies are to begin."""
        self.store.keep_ahead()
        for entry in self.store.started:
            if entry.target:
                self._out.append(Demote(entry.id, entry.extents, entry.target.extents))
        self.store.started.clear()

    def demoted(self, entry: int) -> None:
        moved = self.store.moved(entry)
        self._counters["demotions" if moved else "demotions_in_vain"] += 1

    def not_demoted(self, entry: int) -> None:
        self._counters["demotions_failed"] += 1
        self.store.not_moved(entry)

    # --- the tower

    def next_batch(self, now_s: float) -> RunBatch | None:
        """What the tower does next, if it is idle and anything can be done."""
        if self._batch:
            return None
        batch = self._next_retry() or self._form(now_s)
        self._has_news = False
        if not batch:
            return None
        self._n_batches += 1
        self._counters["batches"] += 1
        self._batch = (self._n_batches, batch)
        self.outlook.begin(sum(running.item.cost for running in batch), now_s)
        for running in batch:
            self.store.start(running.entry)
        jobs = (Job(r.entry.id, r.item, r.pixels.handle, r.entry.extents) for r in batch)
        return RunBatch(self._n_batches, tuple(jobs))

    def encoded(self, batch: int, failures: Mapping[int, str], now_s: float) -> None:
        """The batch is done; ``failures`` says which entries got no rows, and why."""
        jobs = self._answered(batch)
        self.outlook.end(now_s, learn=len(failures) < len(jobs))
        unknown = failures.keys() - {running.entry.id for running in jobs}
        if unknown:
            raise WorkerError(f"batch {batch} has no entries {sorted(unknown)}")
        for running in jobs:
            if running.entry.id in failures:
                self._give_up(running, failures[running.entry.id])
                continue
            del self._filling[running.entry.id]
            self.store.fill(running.entry)
            self._answers.extend((room, Filled()) for room in running.rooms)
            self.let_go(running.pixels)

    def failed(self, batch: int, reason: str, now_s: float) -> None:
        """The batch failed as a whole: each item gets a turn of its own, once."""
        jobs = self._answered(batch)
        self.outlook.end(now_s, learn=False)
        self._counters["batches_failed"] += 1
        if len(jobs) == 1:
            self._give_up(jobs[0], reason)
            return
        self._counters["retried_items"] += len(jobs)
        for running in jobs:
            self.store.stop(running.entry)
            self._retry.append(running)

    def _answered(self, batch: int) -> list[Running]:
        if self._batch is None or self._batch[0] != batch:
            raise WorkerError(f"answer for batch {batch}, which is not under way")
        jobs = self._batch[1]
        self._batch = None
        return jobs

    def _next_retry(self) -> list[Running]:
        while self._retry:
            running = self._retry.popleft()
            if running.rooms:
                return [running]
            self._drop(running)
        return []

    def _form(self, now_s: float) -> list[Running]:
        """Take jobs in order as long as budgets, deadlines and store allow; who does not fit, waits."""
        batch: list[Running] = []
        cost = 0
        due_s = math.inf  # of the first in the batch that would be late
        while (job := self.queue.head()) is not None:
            full = cost + job.item.cost > self._limits.max_tokens_per_batch
            if batch and (full or len(batch) >= self._limits.max_items_per_batch):
                break
            entry = self.store.lookup(job.key)
            if entry:  # only unclaimed rooms wait for rows that are there
                if not self._has_share(entry):
                    break
                self.queue.remove(job)
                self._attach_all(job.unclaimed, entry)
                self.let_go(job.pixels)
                continue
            share = self._has_share_for(job.nbytes)
            if not (job.claimed or share):
                break
            others = batch or self.queue.line(bool(job.claimed))[1] > 1
            if others and now_s + self._expected_s(job.item.cost) > job.deadline_s:
                self._counters["given_up_items"] += 1
                self.queue.set_aside(job)
                continue
            due_s = min(due_s, job.deadline_s)
            if batch and now_s + self._expected_s(cost + job.item.cost) > due_s:
                break
            if not self.store.make_room(job.nbytes):
                break
            batch.append(self._reserve(job, share))
            cost += job.item.cost
        return batch

    def _expected_s(self, cost: int) -> float:
        """0 while nothing is known."""
        return self.outlook.batch_s(cost) or 0.0

    def _reserve(self, job: QueuedJob, share: bool) -> Running:
        """Give the job an entry; without a share its unclaimed rooms stay in the queue."""
        entry = self.store.reserve(job.key, job.item.layout)
        running = self._filling[entry.id] = Running(entry, job.item, job.pixels)
        self._counters["misses"] += 1
        if job.unclaimed and not share:
            rooms: Iterable[int] = self.queue.split(job)
            job.pixels.users += 1
        else:
            rooms = (*job.claimed, *job.unclaimed)
            self.queue.remove(job)
        self._attach_all(rooms, entry)
        return running

    def _give_up(self, running: Running, reason: str) -> None:
        self._counters["items_failed"] += 1
        for room in running.rooms:
            reference = self._references[room]
            reference.entry = None
            self.store.detach(running.entry, reference.claimed)
            self._answers.append((room, NotFilled(reason)))
        self._drop(running)

    def _drop(self, running: Running) -> None:
        del self._filling[running.entry.id]
        self.store.drop(running.entry)
        self.let_go(running.pixels)

    # --- pieces

    def _has_share(self, entry: Entry) -> bool:
        """Whether an unclaimed room may refer to this entry."""
        if entry.tier:
            return True
        if self.queue.oversize_claimed:
            return False
        return entry.n_unclaimed > 0 or self.store.may_wait_for(entry.nbytes)

    def _has_share_for(self, nbytes: int) -> bool:
        """Whether unclaimed rooms may have a new entry."""
        return not self.queue.oversize_claimed and self.store.may_wait_for(nbytes)

    def _attach_all(self, rooms: Iterable[int], entry: Entry) -> None:
        for room in rooms:
            self._attach(room, self._references[room], entry)

    def _attach(self, room: int, reference: Reference, entry: Entry) -> None:
        """Refer to the entry, and answer the room."""
        self._attach_only(room, reference, entry)
        if entry.is_filled:
            self._answers.append((room, Filled()))
        else:
            self._filling[entry.id].rooms[room] = None
            self._answers.append((room, Taken()))

    def _attach_only(self, room: int, reference: Reference, entry: Entry) -> None:
        self._references[room] = reference
        reference.job, reference.entry = None, entry
        self.store.attach(entry, reference.claimed)
        if entry.is_filled:
            reference.hit_tier = entry.tier
            self._counters["hits"] += 1
            self._counters["hits_second_tier"] += entry.tier

    def _leave(self, room: int, job: QueuedJob) -> None:
        if self.queue.leave(job, room):
            self.let_go(job.pixels)
