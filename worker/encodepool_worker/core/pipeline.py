"""The pipeline: events in, instructions out. Composes rooms, queue and store; does no I/O.

Rooms decide about verdicts (``room``); ``rows`` decides who gets an entry when and what the tower
does; ``late_writes`` keeps what may still be read; here events find their room, effects become
instructions, and time passes.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..errors import WorkerError
from ..types import Receiver, RowLayout, Status
from . import room_events as on
from .admission import Admission
from .drain import DRAINING, Drain
from .events import (
    Aborted,
    Announced,
    BatchEncoded,
    BatchFailed,
    Demoted,
    DemoteFailed,
    DrainStarted,
    Event,
    Refused,
    Submitted,
    Tick,
    WriteFailed,
    WriteSettled,
    Written,
)
from .geometry import shard_slices
from .instructions import (
    Admit,
    Conclude,
    Drained,
    Instruction,
    Refuse,
    SendStatus,
    Write,
)
from .late_writes import LateWrite, LateWrites
from .limits import COUNTERS, PipelineLimits, PipelineSnapshot
from .queue import Pixels
from .room import RoomState
from .rooms import RoomTable
from .rows import Rows
from .store import Entry
from .story import Story

__all__ = ["Pipeline", "PipelineLimits", "PipelineSnapshot"]


@dataclass(slots=True)
class WriteUnderWay:
    room: int
    receiver: Receiver
    entry: Entry
    nbytes: int


class Pipeline:
    """Owns every room, the queue and the store's index. Not thread-safe: one owner thread."""

    def __init__(self, limits: PipelineLimits) -> None:
        self.limits = limits
        self._now_s = float("-inf")
        self._out: list[Instruction] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._story = Story(limits.story_records)
        self._rooms = RoomTable(limits, self._story)
        self._todo: deque[tuple[int, on.RoomEvent]] = deque()
        self._rows = Rows(limits, self._counters, self._out, self._todo)
        self._submission = Pixels(-1, -1, 0, 0)  # the latest
        self._requests: dict[tuple[str, int], int] = {}  # (request, item) -> its live room
        self._request_of: dict[int, tuple[str, int]] = {}
        self._n_writes = 0
        self._writes: dict[int, WriteUnderWay] = {}
        self._admission = Admission(limits, self._rooms, self._rows)
        self._late = LateWrites(self._rows.store, limits.quarantine_s, limits.quarantine_bytes)
        self._ends_left = 0  # rooms that may still be ended in this turn
        self._drain = Drain()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Submitted: self._submitted,
            Refused: self._refused,
            Announced: self._announced,
            Aborted: self._aborted,
            DrainStarted: self._drain_started,
            Tick: lambda event: None,
            BatchEncoded: self._batch_encoded,
            BatchFailed: self._batch_failed,
            Written: self._written,
            WriteFailed: self._write_failed,
            WriteSettled: self._write_settled,
            Demoted: self._demoted,
            DemoteFailed: self._demote_failed,
        }
        self._effects: dict[type[on.Effect], Callable[[int, Any], None]] = {
            on.Accept: self._accept,
            on.Decline: self._decline,
            on.Acquire: self._acquire,
            on.Claim: self._claim,
            on.Reacquire: self._reacquire,
            on.Release: self._release,
            on.Ship: self._ship,
            on.Tell: self._tell,
            on.End: self._end,
            on.Count: self._count,
        }

    # --- surface

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Same as ``handle_all([event], now_s)``."""
        return self.handle_all((event,), now_s)

    def handle_all(self, events: Iterable[Event], now_s: float) -> list[Instruction]:
        """Take all that has arrived, then decide once (so that batches form).

        ``now_s`` is monotonic. Raises WorkerError, and only for an answer that nobody asked for.
        When very many rooms end by themselves at once, a turn ends some of them and
        ``next_deadline_s`` asks for the next turn at once, so that no turn is long; what is given
        to the tower meanwhile is never an item that should have ended.
        """
        self._now_s = max(self._now_s, now_s)
        self._ends_left = self.limits.max_ends_per_turn
        self._pass_time()
        for event in events:
            self._handlers[type(event)](event)
        self._pass_time()
        batch = None if self._is_behind else self._rows.next_batch(self._now_s)
        self._settle()
        if batch:
            self._out.append(batch)
        self._rows.demote_ahead()
        self._finish_drain()
        out = self._out.copy()
        self._out.clear()
        return out

    def next_deadline_s(self) -> float | None:
        """When to call again with Tick at the latest, if nothing else happens."""
        times = (
            self._rooms.next_deadline_s(),
            self._late.next_end_s(),
            self._drain.next_turn_s(self._now_s),
        )
        return min((at_s for at_s in times if at_s is not None), default=None)

    def snapshot(self) -> PipelineSnapshot:
        """Copies of counters only: cheap, and safe to hand to another thread."""
        rows = self._rows
        counters = dict(self._counters)
        counters["tombstones_evicted"] = self._rooms.n_evicted_tombstones
        return PipelineSnapshot(
            rooms_by_state={state.name.lower(): n for state, n in self._rooms.counts.items()},
            queue_items=len(rows.queue),
            queue_cost=rows.queue.cost,
            queue_since_s=rows.queue.oldest_s,
            batch_items=rows.batch_items,
            batch_since_s=rows.outlook.since_s,
            batch_expected_s=rows.outlook.expected_s,
            predicted_wait_s=self._admission.predicted_wait_s(self._now_s),
            tokens_per_s=rows.outlook.tokens_per_s,
            writes_in_flight=len(self._writes),
            writes_quarantined=len(self._late),
            draining=self._drain.begun,
            drained=self._drain.drained,
            store=rows.store.snapshot(),
            counters=counters,
        )

    def story(self, room: int) -> list[str]:
        """What happened to a room lately, one line an event."""
        return self._story.tail(room)

    def state(self, room: int) -> RoomState:
        """NEW for a room that is not known (any more)."""
        return self._rooms.state(room)

    # --- time

    def _pass_time(self) -> None:
        for late in self._late.over(self._now_s):
            self._feed(late.room, on.Settled(late.session))
        for room in islice(self._rooms.due(self._now_s), self._ends_left):
            self._ends_left -= 1
            self._expire(room)
        if self._drain.must_stop(self._now_s):
            self._drain.stop(self._rooms.live())
            self._retire_engines()
        while self._drain.has_doomed and self._ends_left:
            self._ends_left -= 1
            doomed, reason = self._drain.next_doomed()
            if self._rooms.is_live(doomed):
                self._feed(doomed, Aborted(doomed, reason))

    def _expire_if_due(self, room: int) -> None:
        """In a turn that is behind, a deadline must still come before what happens after it."""
        if self._rooms.is_due(room, self._now_s):
            self._expire(room)

    def _expire(self, room: int) -> None:
        self._note_expiry(self._rooms.state(room))
        self._feed(room, on.Expired())

    @property
    def _is_behind(self) -> bool:
        """Rooms should have ended, and this turn had no time for them."""
        return self._drain.has_doomed or self._rooms.is_overdue(self._now_s)

    def _note_expiry(self, state: RoomState) -> None:
        if state in (RoomState.QUEUED, RoomState.ENCODING):
            self._counters["expired_before_encode"] += 1
        if state not in (RoomState.DONE, RoomState.FAILED):
            self._counters["expired"] += 1

    # --- outside events

    def _submitted(self, event: Submitted) -> None:
        item = event.item
        pixels = Pixels(event.seq, event.pixels, item.cost, event.pixel_bytes)
        self._submission = pixels
        twin = self._requests.get((item.request_id, item.index))
        refusal = self._admission.refusal(item, twin, draining=self._drain.begun, now_s=self._now_s)
        if refusal:
            decline = on.Decline(event.seq, refusal.field, refusal.reason, refusal.kind)
            self._decline(item.room, decline)
            self._feed(item.room, Refused(item.room, f"{refusal.field}: {refusal.reason}"))
        else:
            self._feed(item.room, event)
        self._rows.let_go(pixels)

    def _refused(self, event: Refused) -> None:
        self._counters["refused_requests"] += 1
        self._feed(event.room, event)

    def _announced(self, event: Announced) -> None:
        self._expire_if_due(event.room)
        state = self._rooms.state(event.room)
        gate = self._admission
        full = state is RoomState.NEW and (gate.is_full or gate.is_full_of_announcements)
        self._feed(event.room, on.Spoke(event.receiver, self._stored(event.room)))
        if full:
            self._feed(event.room, Aborted(event.room, "too many rooms are open"))
        elif state is RoomState.NEW and self._drain.begun:
            self._feed(event.room, Aborted(event.room, DRAINING))

    def _stored(self, room_id: int) -> RowLayout | None:
        """Layout of a finished room's rows, if they are there and may still be shipped."""
        room = self._rooms.get(room_id)
        if room is None or room.state is not RoomState.DONE or room.key is None:
            return None
        if self._drain.drained or self._drain.stopped:
            return None
        return self._rows.stored(room.key)

    def _aborted(self, event: Aborted) -> None:
        self._feed(event.room, event)

    # --- draining

    def _drain_started(self, event: DrainStarted) -> None:
        rooms = self._rooms.live()
        announced = (room for room in rooms if self._rooms.state(room) is RoomState.ANNOUNCED)
        self._drain.begin(event.deadline_s, announced)

    def _finish_drain(self) -> None:
        idle = not self._rooms.n_live and not self._writes and not self._late
        if self._drain.begun and idle and not self._drain.drained:
            self._drain.drained = True
            self._out.append(Drained())

    # --- answers

    def _batch_encoded(self, event: BatchEncoded) -> None:
        for room in self._rows.batch_rooms():
            self._expire_if_due(room)
        self._rows.encoded(event.batch, event.failures, self._now_s)
        self._settle()

    def _batch_failed(self, event: BatchFailed) -> None:
        self._rows.failed(event.batch, event.reason, self._now_s)
        self._settle()

    def _written(self, event: Written) -> None:
        write = self._answered(event.write)
        self._rows.wrote(write.room, write.nbytes)
        self._feed(write.room, on.Landed(write.receiver.session))

    def _write_failed(self, event: WriteFailed) -> None:
        write = self._answered(event.write)
        self._counters["writes_failed"] += 1
        if event.may_land_late:
            self._counters["writes_late"] += 1
            late = LateWrite(
                write.room, write.receiver.session, write.entry, self._now_s, write.receiver.rank
            )
            self._late.add(event.write, late)
        self._feed(write.room, on.Missed(write.receiver.session, event.reason, event.may_land_late))
        self._retire_engines()

    def _retire_engines(self) -> None:
        given_up = self._late.engines_to_retire(at_once=self._drain.stopped)
        self._counters["engines_retired"] += len(given_up)
        self._out.extend(given_up)

    def _answered(self, write: int) -> WriteUnderWay:
        if write not in self._writes:
            raise WorkerError(f"answer for write {write}, which is not under way")
        return self._writes.pop(write)

    def _write_settled(self, event: WriteSettled) -> None:
        self._late.settle(event.write, by_probe=event.by_probe, now_s=self._now_s)

    def _demoted(self, event: Demoted) -> None:
        self._rows.demoted(event.entry)

    def _demote_failed(self, event: DemoteFailed) -> None:
        self._rows.not_demoted(event.entry)

    # --- effects of rooms

    def _feed(self, room: int, event: on.RoomEvent) -> None:
        self._todo.append((room, event))
        self._settle()

    def _settle(self) -> None:
        """Tell rooms, carry out what they ask for, and so on until nothing is left to tell."""
        while self._todo:
            room, event = self._todo.popleft()
            for effect in self._rooms.step(room, event, self._now_s):
                self._effects[type(effect)](room, effect)

    def _accept(self, room: int, effect: on.Accept) -> None:
        self._counters["admitted"] += 1
        self._out.append(Admit(effect.seq, effect.repeated))

    def _decline(self, room: int, effect: on.Decline) -> None:
        self._counters["refused"] += 1
        self._out.append(Refuse(effect.seq, effect.kind, effect.field, effect.reason))

    def _acquire(self, room: int, effect: on.Acquire) -> None:
        item = effect.item
        request = self._request_of[room] = (item.request_id, item.index)
        self._requests[request] = room
        self._rows.acquire(room, item, self._submission, effect.claimed, self._now_s)

    def _claim(self, room: int, effect: on.Claim) -> None:
        self._rows.claim(room)

    def _reacquire(self, room: int, effect: on.Reacquire) -> None:
        self._rows.reacquire(room, effect.key)

    def _release(self, room: int, effect: on.Release) -> None:
        self._rows.release(room)

    def _ship(self, room: int, effect: on.Ship) -> None:
        receiver = effect.receiver
        entry = self._rows.entry_of(room)
        slices = shard_slices(entry.layout, entry.extents, receiver)
        self._n_writes += 1
        nbytes = sum(piece.nbytes for piece in slices)
        self._writes[self._n_writes] = WriteUnderWay(room, receiver, entry, nbytes)
        self._counters["writes"] += 1
        self._out.append(Write(self._n_writes, room, receiver, slices))

    def _tell(self, room: int, effect: on.Tell) -> None:
        success = effect.status is Status.SUCCESS
        self._counters["told_success" if success else "told_failed"] += 1
        self._out.append(SendStatus(room, effect.receiver, effect.status))

    def _end(self, room: int, effect: on.End) -> None:
        request = self._request_of.pop(room, None)
        if request is not None:
            del self._requests[request]
        hit_tier, nbytes = self._rows.summary(room)
        self._out.append(Conclude(room, effect.outcome, effect.reason, hit_tier, nbytes))

    def _count(self, room: int, effect: on.Count) -> None:
        self._counters[effect.counter] += 1
