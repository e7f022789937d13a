"""A pipeline with a shell that is not there: the test says when tower and writes answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..core import instructions as do
from ..core.events import (
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
from ..core.instructions import Instruction
from ..core.limits import COUNTERS, PipelineLimits
from ..core.pipeline import Pipeline
from ..core.room import RoomState
from ..types import Item, Receiver, Status
from .builders import FakeClock, make_item, make_layout, make_limits, make_receiver
from .witness import Witness


class Driver:
    """A pipeline, a clock and a witness; the test decides when the tower and the writes answer."""

    def __init__(self, limits: PipelineLimits | None = None) -> None:
        self.limits = limits or make_limits()
        self.pipeline = Pipeline(self.limits)
        self.clock = FakeClock()
        self.witness = Witness(self.limits)
        self.n_submitted = 0
        self.batch: do.RunBatch | None = None
        self.demotes: dict[int, do.Demote] = {}  # copies under way, by entry
        self.writes: dict[int, do.Write] = {}  # under way
        self.late: dict[int, do.Write] = {}  # timed out, engine not known to have let go

    # outside

    def feed(self, event: Event) -> list[Instruction]:
        """Let what is due pass first, so that what comes back is the event's doing."""
        if not isinstance(event, Tick):
            self.feed(Tick())
        now_s = self.clock.now_s
        for room in rooms_of(event):
            if self.state(room) is RoomState.NEW:
                self.witness.expect_new_life(room)
        self.witness.expect(event, now_s)
        out = self.pipeline.handle(event, now_s)
        for instruction in out:
            if isinstance(instruction, do.RunBatch):
                self.batch = instruction
            elif isinstance(instruction, do.Demote):
                self.demotes[instruction.entry] = instruction
            elif isinstance(instruction, do.Write):
                self.writes[instruction.write] = instruction
        self.witness.observe(event, out, now_s)
        self.check()
        return out

    def submit(self, item: Item) -> list[Instruction]:
        self.n_submitted += 1
        seq = self.n_submitted
        return self.feed(Submitted(seq, item, pixels=1000 + seq, pixel_bytes=10 * item.cost))

    def request(
        self,
        room: int,
        n_tokens: int = 4,
        content: str | None = None,
        *,
        claimed: bool = False,
        **item: Any,
    ) -> list[Instruction]:
        """Submit rows of 16 bytes a token; ``claimed``: its one receiver, p, has spoken before."""
        layout = make_layout(n_tokens)
        if claimed:
            self.announce(room, make_receiver(layout=layout))
        return self.submit(make_item(room, content, layout=layout, **item))

    def announce(self, room: int, *receivers: Receiver) -> list[Instruction]:
        return [i for receiver in receivers for i in self.feed(Announced(room, receiver))]

    def refuse(self, room: int, reason: str = "bad grid") -> list[Instruction]:
        return self.feed(Refused(room, reason))

    def abort(self, room: int, reason: str = "cancelled") -> list[Instruction]:
        return self.feed(Aborted(room, reason))

    def drain(self, seconds: float = 60.0) -> list[Instruction]:
        return self.feed(DrainStarted(self.clock.now_s + seconds))

    def wait(self, seconds: float) -> list[Instruction]:
        """Time passes, with a Tick at each deadline, as the shell does."""
        until_s = self.clock.now_s + seconds
        out = []
        while True:
            due_s = self.pipeline.next_deadline_s()
            self.clock.now_s = until_s if due_s is None else max(self.clock.now_s, min(due_s, until_s))
            out += self.feed(Tick())
            if self.clock.now_s >= until_s and not self.is_behind:
                return out

    @property
    def is_behind(self) -> bool:
        """The pipeline wants another turn at once."""
        due_s = self.pipeline.next_deadline_s()
        return due_s is not None and due_s <= self.clock.now_s

    # answers

    def encoded(self, failures: Mapping[int, str] | None = None) -> list[Instruction]:
        """The tower is done with the batch; ``failures`` is by room of the job's item."""
        assert self.batch is not None, "no batch is under way"
        batch, self.batch = self.batch, None
        reasons = failures or {}
        failed = {j.entry: reasons[j.item.room] for j in batch.jobs if j.item.room in reasons}
        return self.feed(BatchEncoded(batch.batch, failed))

    def batch_failed(self, reason: str = "out of memory") -> list[Instruction]:
        assert self.batch is not None, "no batch is under way"
        batch, self.batch = self.batch, None
        return self.feed(BatchFailed(batch.batch, reason))

    def demoted(self, entry: int | None = None, *, failed: bool = False) -> list[Instruction]:
        """A copy into the second tier is done: the oldest, unless ``entry`` says which."""
        order = self.demotes.pop(next(iter(self.demotes)) if entry is None else entry)
        event = DemoteFailed(order.entry, "no such address") if failed else Demoted(order.entry)
        return self.feed(event)

    def find_write(self, room: int, session: str) -> int:
        matches = [
            n for n, w in (self.writes | self.late).items() if (w.room, w.receiver.session) == (room, session)
        ]
        assert len(matches) == 1, f"{len(matches)} writes of room {room} to {session}"
        return matches[0]

    def land(self, room: int, session: str = "p") -> list[Instruction]:
        write = self.find_write(room, session)
        del self.writes[write]
        return self.feed(Written(write))

    def miss(
        self, room: int, session: str = "p", *, late: bool = False, reason: str = "peer is gone"
    ) -> list[Instruction]:
        write = self.find_write(room, session)
        order = self.writes.pop(write)
        if late:
            self.late[write] = order
        return self.feed(WriteFailed(write, reason, late))

    def settle(self, room: int, session: str = "p", *, by_probe: bool = True) -> list[Instruction]:
        write = self.find_write(room, session)
        del self.late[write]
        return self.feed(WriteSettled(write, by_probe))

    # reading

    def state(self, room: int) -> RoomState:
        return self.pipeline.state(room)

    @property
    def batch_rooms(self) -> list[int]:
        """Whose items the tower works on."""
        return [job.item.room for job in self.batch.jobs] if self.batch else []

    def told(self, room: int) -> list[tuple[str, Status]]:
        """Every verdict sent for a room so far."""
        return [(session, status) for at, session, status in self.witness.told if at == room]

    def finish(self) -> None:
        """Answer all that is open, let all time pass, and check that nothing is left."""
        while self.batch or self.demotes or self.writes or self.late or self.pipeline.snapshot().queue_items:
            if self.batch:
                self.encoded()
            for entry in list(self.demotes):
                self.demoted(entry)
            for write in list(self.writes.values()):
                self.land(write.room, write.receiver.session)
            for write in list(self.late.values()):
                self.settle(write.room, write.receiver.session)
            if not self.batch and not self.writes and not self.demotes:
                self.wait(self.limits.park_s)
        limits = self.limits
        self.wait(limits.announce_s + limits.queue_s + limits.park_s + 2 * limits.quarantine_s)
        self.witness.check_rest()
        snapshot = self.pipeline.snapshot()
        store = snapshot.store
        assert {n for s, n in snapshot.rooms_by_state.items() if s not in ("done", "failed")} == {0}
        assert (snapshot.queue_items, snapshot.queue_cost, snapshot.batch_items) == (0, 0, 0)
        assert (snapshot.writes_in_flight, snapshot.writes_quarantined) == (0, 0)
        assert (store.pinned_bytes, store.unclaimed_bytes, store.moving) == (0, 0, 0)
        assert store.free_bytes + store.bytes_by_state["cached"] == store.capacity_bytes
        self.wait(limits.tombstone_s)
        assert set(self.pipeline.snapshot().rooms_by_state.values()) == {0}
        assert self.pipeline.next_deadline_s() is None

    def check(self) -> None:
        """What must hold between any two events."""
        snapshot = self.pipeline.snapshot()
        store = snapshot.store
        for tier in store.tiers:
            assert sum(tier.bytes_by_state.values()) + tier.free_bytes == tier.capacity_bytes
            assert all(n >= 0 for n in tier.bytes_by_state.values())
        assert store.tiers[0].capacity_bytes <= self.limits.store_bytes
        assert sum(tier.capacity_bytes for tier in store.tiers[1:]) <= self.limits.second_tier_bytes
        assert 0 <= store.unclaimed_bytes <= store.tiers[0].capacity_bytes // 2
        assert store.moving == len(self.witness.copies) <= self.limits.max_demotions
        assert (
            snapshot.rooms_by_state["done"] + snapshot.rooms_by_state["failed"] <= self.limits.max_tombstones
        )
        assert all(n >= 0 for n in snapshot.rooms_by_state.values())
        assert snapshot.counters.keys() == COUNTERS.keys()


def rooms_of(event: Event) -> tuple[int, ...]:
    """The rooms that an outside event speaks of."""
    match event:
        case Submitted(item=item):
            return (item.room,)
        case Announced(room) | Refused(room) | Aborted(room):
            return (room,)
    return ()


def kinds(out: Sequence[Instruction]) -> list[str]:
    """The instructions by name, for tests that care about nothing else."""
    return [type(instruction).__name__ for instruction in out]


def refusal(out: Sequence[Instruction]) -> tuple[str, str] | None:
    """Field and reason, if a submission was refused."""
    return next(((i.field, i.reason) for i in out if isinstance(i, do.Refuse)), None)
