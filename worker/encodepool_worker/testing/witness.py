"""What must always hold between a pipeline and its shell, checked from outside."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core import instructions as do
from ..core.events import (
    Announced,
    BatchEncoded,
    BatchFailed,
    Demoted,
    DemoteFailed,
    Event,
    Submitted,
    WriteFailed,
    WriteSettled,
    Written,
)
from ..core.geometry import byte_slices, shard_slices
from ..core.instructions import Instruction
from ..core.limits import PipelineLimits
from ..types import ByteRange, Item, Receiver, Status
from .builders import rows_of


@dataclass
class Outstanding:
    """A write that may still read the store and touch its receiver's memory."""

    order: do.Write
    key: bytes
    failed_s: float | None = None
    safe_s: float | None = None  # when its quarantine may end, once that is known


@dataclass
class Witness:
    """Keeps its own books from events and instructions, and raises AssertionError.

    - Each submission is answered once, and its credit and pixels come back once.
    - A receiver is told one verdict for each frame that it was owed one for, and none unasked.
    - Success: its own write has landed since, with the right bytes, where its frame said.
    - Failed: no write to it is under way or may land late.
    - Neither tower nor copies get bytes that a write may still read; a write never reads others' bytes.
    - The source of a copy into the second tier stays as it is until the copy has answered.
    - A room that lived ends once.
    """

    limits: PipelineLimits
    memory: bytearray = field(init=False)
    keys: dict[int, Item] = field(default_factory=dict)  # room -> item accepted last
    answered: Counter[int] = field(default_factory=Counter)
    credits: Counter[int] = field(default_factory=Counter)
    pixels: Counter[int] = field(default_factory=Counter)
    owed: dict[tuple[int, str], Receiver] = field(default_factory=dict)
    landed: dict[tuple[int, str], do.Write] = field(default_factory=dict)
    batch: do.RunBatch | None = None
    copies: dict[int, do.Demote] = field(default_factory=dict)  # by entry
    writes: dict[int, Outstanding] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)
    lives: set[int] = field(default_factory=set)
    told: list[tuple[int, str, Status]] = field(default_factory=list)
    drained: int = 0

    def __post_init__(self) -> None:
        self.memory = bytearray(self.limits.store_bytes + self.limits.second_tier_bytes)

    def expect_new_life(self, room: int) -> None:
        """The room is not known any more; what comes next is another room with its number."""
        assert room not in self.lives or self.ends[room], f"room {room} vanished before it ended"
        self.lives.discard(room)
        self.ends.pop(room, None)

    def expect(self, event: Event, now_s: float) -> None:
        """Before the pipeline hears of an event."""
        match event:
            case Submitted():
                self.credits[event.seq] += 0
                self.pixels[event.pixels] += 0
            case Announced(room, receiver):
                self.owed[room, receiver.session] = receiver
            case BatchEncoded(failures=failures):
                assert self.batch is not None
                for job in self.batch.jobs:
                    if job.entry not in failures:
                        self._put(job.extents, rows_of(job.item.key, job.item.layout))
                self.batch = None
            case BatchFailed():
                self.batch = None
            case Demoted(entry):
                order = self.copies.pop(entry)
                self._put(order.target, self._get(order.source))  # as if it had been copied just now
            case DemoteFailed(entry):
                self._spoil(self.copies.pop(entry).target)
            case Written(write):
                landed = self.writes.pop(write).order
                self.landed[landed.room, landed.receiver.session] = landed
            case WriteFailed(write, _, may_land_late):
                if may_land_late:
                    self.writes[write].failed_s = now_s
                else:
                    del self.writes[write]
            case WriteSettled(write, by_probe):
                late = self.writes[write]
                assert late.failed_s is not None
                quarantine_s = self.limits.quarantine_s
                late.safe_s = max(late.failed_s + quarantine_s, now_s + quarantine_s if by_probe else now_s)

    def observe(self, event: Event, out: Sequence[Instruction], now_s: float) -> None:
        """What the pipeline made of the event."""
        answers = 0
        self.writes = {n: w for n, w in self.writes.items() if w.safe_s is None or w.safe_s > now_s}
        for instruction in out:
            match instruction:
                case do.Admit(seq) | do.Refuse(seq):
                    self.answered[seq] += 1
                    answers += 1
                    assert isinstance(event, Submitted)
                    assert seq == event.seq
                    if isinstance(instruction, do.Admit):
                        self.keys[event.item.room] = event.item
                        self.lives.add(event.item.room)
                case do.ReturnCredit(seq):
                    assert seq in self.credits
                    self.credits[seq] += 1
                    assert self.credits[seq] == 1, f"credit of {seq} given back again"
                case do.DropPixels(handle):
                    assert handle in self.pixels
                    self.pixels[handle] += 1
                    assert self.pixels[handle] == 1, f"pixels {handle} dropped again"
                    running = self.batch.jobs if self.batch else ()
                    assert all(job.pixels != handle for job in running), "dropped under the tower"
                case do.RunBatch():
                    self._run(instruction)
                case do.Demote():
                    self._copy(instruction)
                case do.Write():
                    self._write(instruction)
                case do.SendStatus(room, receiver, status):
                    self._tell(room, receiver, status)
                case do.Conclude(room):
                    self.ends[room] += 1
                    assert self.ends[room] == 1, f"room {room} ended again"
                case do.Drained():
                    self.drained += 1
                    assert self.drained == 1, "drained again"
        assert answers == isinstance(event, Submitted), f"{answers} answers to {event}"
        for late in self.writes.values():
            self._check_source(late)

    def check_rest(self) -> None:
        """When nothing is left to do."""
        assert not self.owed, f"never told: {sorted(self.owed)}"
        assert not self.writes
        assert not self.copies
        assert all(n == 1 for n in self.answered.values())
        assert all(n == 1 for n in self.credits.values()), f"credit missing: {self.credits}"
        assert all(n == 1 for n in self.pixels.values()), f"pixels missing: {self.pixels}"
        unended = self.lives - self.ends.keys()
        assert not unended, f"rooms never ended: {sorted(unended)}"

    def _run(self, batch: do.RunBatch) -> None:
        assert self.batch is None, "two batches at once"
        self.batch = batch
        for job in batch.jobs:
            assert not self.pixels[job.pixels], "pixels are gone"
            assert sum(e.nbytes for e in job.extents) == job.item.layout.nbytes
            self._is_in_tier(job.extents, 0)
            self._spoil(job.extents)  # half-made rows

    def _copy(self, order: do.Demote) -> None:
        assert order.entry not in self.copies, "two copies of one entry"
        assert sum(e.nbytes for e in order.source) == sum(e.nbytes for e in order.target)
        self._is_in_tier(order.source, 0)
        self._is_in_tier(order.target, 1)
        self.copies[order.entry] = order
        self._spoil(order.target)

    def _is_in_tier(self, extents: Sequence[ByteRange], tier: int) -> None:
        first = tier * self.limits.store_bytes
        nbytes = self.limits.second_tier_bytes if tier else self.limits.store_bytes
        assert all(first <= e.start < e.stop <= first + nbytes for e in extents), f"not in tier {tier}"

    def _write(self, order: do.Write) -> None:
        item = self.keys[order.room]
        self.writes[order.write] = late = Outstanding(order, item.key)
        assert self.owed.get((order.room, order.receiver.session)) == order.receiver
        self._check_source(late)

    def _check_source(self, write: Outstanding) -> None:
        """The region holds what the receiver wants, and is to be written where it wants it."""
        layout = self.keys[write.order.room].layout
        rows = rows_of(write.key, layout)
        whole = [ByteRange(0, layout.nbytes)]
        wanted = {
            piece.target: rows[piece.source : piece.source + piece.nbytes]
            for piece in shard_slices(layout, whole, write.order.receiver)
        }
        got: dict[int, bytes] = {}
        ends: dict[int, int] = {}  # where a run of slices ends -> where it started
        for piece in write.order.slices:
            start = ends.pop(piece.target, piece.target)
            got[start] = got.get(start, b"") + self.memory[piece.source : piece.source + piece.nbytes]
            ends[piece.target + piece.nbytes] = start
        assert got == wanted, f"write {write.order.write} reads other bytes than its receiver's"

    def _tell(self, room: int, receiver: Receiver, status: Status) -> None:
        who = (room, receiver.session)
        assert who in self.owed, f"{who} told unasked"
        frame = self.owed.pop(who)
        self.told.append((room, receiver.session, status))
        landed = self.landed.pop(who, None)
        under_way = [w for w in self.writes.values() if (w.order.room, w.order.receiver.session) == who]
        assert not under_way, f"{who} told {status.name} while a write may land"
        if status is Status.SUCCESS and receiver.n_rows:
            assert landed is not None, f"{who} told Success without a write"
            assert landed.receiver == frame, f"{who} told Success for a write to another place"

    def _get(self, extents: Sequence[ByteRange]) -> bytes:
        return b"".join(self.memory[e.start : e.stop] for e in extents)

    def _spoil(self, extents: Sequence[ByteRange]) -> None:
        self._put(extents, bytes([0xEE]) * sum(e.nbytes for e in extents))

    def _put(self, extents: Sequence[ByteRange], content: bytes) -> None:
        for piece in byte_slices(extents, 0, len(content), 0):
            at, n = piece.source, piece.nbytes
            assert 0 <= at <= at + n <= len(self.memory)
            self.memory[at : at + n] = content[piece.target : piece.target + n]
