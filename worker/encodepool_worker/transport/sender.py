"""The sender: writes to many peers over few threads, so that no peer can hold up another.

A *lane* is a thread that carries out one write at a time. Each peer has a queue of its own and
occupies at most one lane; whose turn it is to have one is decided in ``turns``. There are at most
``max_lanes`` (Mooncake spins a core while it waits, so lanes are few).

A peer is probed, in a thread of the probe's own, before its first write on an engine, after
every failure, and after ``idle_s`` without a write. The answer decides:

    answered        READY    queued writes run; what timed out before the probe began is settled
    refused         BROKEN   its session is gone: queued writes fail, what timed out is settled
    silent for 2 s  BROKEN   queued writes fail; probed again while something is unsettled

BROKEN is an open breaker: writes fail at once, until a probe is answered. A peer that answers
probes but fails ``max_failures`` writes in a row is BROKEN for ``breaker_s``.
"""

import threading
import time
from collections.abc import Callable, Sequence

from ..errors import TransportError, WriteRefused
from ..types import Slice
from .answers import Answers
from .base import Done, Engine, Failed, SenderEvent
from .deadlines import Deadlines
from .engine_pool import EnginePool
from .lanes import Lanes, join_all
from .peer_book import PeerBook
from .probes import Probes
from .regions import Region, Regions
from .sender_types import (
    Peer,
    PeerState,
    Probe,
    QueuedWrite,
    SenderLimits,
    SenderSnapshot,
    Unsettled,
    outcome_of,
)
from .turns import Turns


class Sender:
    """Writes slices of its regions to peers; see the module's text. Thread-safe.

    ``post`` is called from the sender's threads with, for each submitted write, exactly one Done
    or Failed, and one Settled after a Failed that may land late. Nothing is posted once ``close``
    has returned. Making a Sender makes the first engine and registers the regions with it: raises
    TransportError.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        regions: Sequence[Region],
        post: Callable[[SenderEvent], None],
        limits: SenderLimits | None = None,
    ) -> None:
        self._limits = limits = limits or SenderLimits()
        self._regions = Regions(regions)
        self._post = post
        self._pool = EnginePool(
            make_engine,
            self._regions.all,
            engines=limits.engines,
            max_engines=limits.max_engines,
            open_timeout_s=limits.open_timeout_s,
            wait_s=limits.engine_wait_s,
        )
        self._lock = threading.Lock()
        self._timer = threading.Condition(self._lock)  # the watcher waits here
        self._peers = PeerBook(limits.max_peers, self._pool.forget)
        self._turns = Turns(limits)
        self._answers = Answers(self._timer.notify_all)
        self._queued = 0
        self._lanes = Lanes(self._lane, limits, self._lock)
        self._watching_turns = False
        self._probes = Probes(self._run_probe, limits)
        self._closing = False
        self._mute = False
        with self._lock:
            for _ in range(limits.lanes):
                self._lanes.start()
        self._watcher = threading.Thread(target=self._watch, name="encodepool-sender", daemon=True)
        self._watcher.start()

    @property
    def session(self) -> str:
        """Session of the first engine: what peers' logs call this sender."""
        return self._pool.session

    def submit(self, write_id: int, session: str, slices: Sequence[Slice]) -> None:
        """Write slices of the regions to a peer. Never blocks; raises for bytes outside of them."""
        address = self._regions.address
        raw = [(address(one.source, one.nbytes), one.target, one.nbytes) for one in slices if one.nbytes]
        write = QueuedWrite(write_id, raw, sum(nbytes for _, _, nbytes in raw))
        now_s = time.monotonic()
        with self._lock:
            if self._closing:
                self._answers.fail([write], "closed", "the sender is closed")
                return
            if not raw:
                self._answers.nothing_to_write(write_id)
                return
            peer, limits = self._peers.used(session, now_s), self._limits
            if self._queued >= limits.max_queued or len(peer.queue) >= limits.max_queued_per_peer:
                why = f"too many writes wait, {len(peer.queue)} for {session}"
                self._answers.fail([write], "queue full", why)
            elif peer.state is PeerState.BROKEN and (peer.probe or now_s < peer.blocked_until_s):
                self._answers.fail([write], "breaker open", peer.why_broken)
            else:
                peer.queue.append(write)
                self._queued += 1
                if peer.state is PeerState.READY:
                    self._line_up(peer)
                elif peer not in self._probes and not peer.busy:
                    self._start_probe(peer)

    def retire(self, write_id: int) -> None:
        """Close the engine that carries this late write, as soon as nothing else uses it. Never blocks.

        Every late write of that engine is then settled, as ever; a write that is not late (any
        more) is ignored.
        """
        with self._lock:
            for peer in self._peers:
                if peer.failing == write_id:
                    peer.retire_asked = True  # its failure is told, but not yet recorded
                    return
                for one in peer.unsettled:
                    if one.write_id == write_id:
                        return self._retire(peer, one)

    def registered(self, session: str) -> None:
        """A peer introduced itself: it may have restarted under a session used before. Never blocks."""
        self._pool.renew(session)

    def snapshot(self) -> SenderSnapshot:
        engines, stuck = self._pool.counts()
        with self._lock:
            unsettled = list(self._answers.late())
            return SenderSnapshot(
                queued=self._queued,
                lanes=len(self._lanes),
                lanes_busy=self._turns.writing,
                engines=engines,
                engines_stuck=stuck,
                peers=self._peers.states(),
                probes=len(self._probes),
                unsettled=len(unsettled),
                unsettled_bytes=sum(one.nbytes for one in unsettled),
                written_bytes=self._answers.written_bytes,
                write_seconds=self._answers.write_seconds,
                outcomes=dict(self._answers.outcomes),
            )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Fail what is queued, wait for running writes, close the engines, settle the rest.

        False when threads were still held up after ``timeout_s`` (Mooncake cannot be interrupted:
        a probe of a frozen peer takes 61 s); they end by themselves and post nothing. Idempotent.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            for peer in self._peers:
                self._fail_queue(peer, "closed", "the sender is closed")
            self._lanes.wake_all()
            self._timer.notify_all()
            lanes = self._lanes.threads
        # Half of the time for writes to end by themselves. Closing the engines ends the others, and
        # the probes, where an engine can be interrupted.
        join_all(lanes, deadline_s - timeout_s / 2)
        self._pool.close()
        with self._lock:
            threads = lanes + [probe.thread for probe in self._probes if probe.thread]
        join_all(threads, deadline_s)
        with self._lock:
            held_up = any(thread.is_alive() for thread in threads)
            if not held_up:
                for peer in self._answers.troubled:
                    self._answers.settle(peer, peer.unsettled, by_probe=False)
            self._mute = True
            self._timer.notify_all()
        self._watcher.join()
        return not held_up

    # --- threads

    def _lane(self) -> None:
        while True:
            with self._lock:
                turn = self._take_turn()
                if turn is None:
                    self._lanes.leave()
                    return
            self._carry_out(*turn)

    def _carry_out(self, peer: Peer, write: QueuedWrite) -> None:
        started_s = time.monotonic()
        try:
            try:
                self._pool.write(peer.session, write.slices)
            except WriteRefused:
                # Nothing is under way, so it may be tried again: an idle connection may have been cut
                # on its way, or the peer restarted under its old session; then on another engine.
                self._pool.write(peer.session, write.slices)
        except Exception as exc:  # noqa: BLE001 - becomes the write's answer; a lane outlives it
            self._write_failed(peer, write, exc)
            return
        now_s = time.monotonic()
        with self._lock:
            self._turns.ended(peer, now_s)
            self._answers.done(write.nbytes, now_s - started_s)
        self._tell(Done(write.write_id))  # before the next write begins, so answers keep the order
        with self._lock:
            peer.failures = 0
            peer.busy = False
            peer.answered_s = now_s
            self._line_up(peer)

    def _write_failed(self, peer: Peer, write: QueuedWrite, error: Exception) -> None:
        # An error we do not know says nothing about what is under way: assume the worst.
        may_land_late = error.may_land_late if isinstance(error, TransportError) else True
        with self._lock:
            self._turns.ended(peer, time.monotonic())
            peer.failing = write.write_id if may_land_late else None
        self._tell(Failed(write.write_id, str(error) or repr(error), may_land_late))
        engine = self._pool.engine_of(peer.session)
        released = getattr(error, "released", False)
        with self._lock:
            self._answers.outcomes[outcome_of(error)] += 1
            peer.busy = False
            peer.failures += 1
            if may_land_late:
                now_s = time.monotonic()
                late = Unsettled(write.write_id, write.nbytes, engine, released, now_s)
                self._answers.is_late(peer, late)
                if peer.retire_asked:
                    self._retire(peer, late)
            peer.failing, peer.retire_asked = None, False
            # What is queued waits for the answer, at most ``probe_timeout_s``.
            self._start_probe(peer)

    def _run_probe(self, probe: Probe) -> None:
        peer = probe.peer
        answered, broken = False, ""
        try:
            answered = self._pool.probe(peer.session)
        except Exception as exc:  # noqa: BLE001 - a probe without an end would block its peer for good
            broken = str(exc) or repr(exc)
        now_s = time.monotonic()
        with self._lock:
            self._probes.end(probe)
            self._timer.notify_all()
            if self._closing:
                return
            if not broken:
                peer.silent = not answered and now_s - probe.started_s >= self._limits.probe_timeout_s
            if answered:
                peer.answered_s = now_s
                settled = [one for one in peer.unsettled if one.since_s <= probe.started_s]
                self._answers.settle(peer, settled, by_probe=True)
                if peer.failures >= self._limits.max_failures:
                    peer.failures = self._limits.max_failures - 1  # after the pause one write may try
                    why = f"{peer.session} answers probes, but writes to it fail"
                    self._break(peer, why, now_s + self._limits.breaker_s)
                elif peer.state is not PeerState.BROKEN or now_s >= peer.blocked_until_s:
                    peer.state = PeerState.READY
                    self._line_up(peer)
            elif not broken and not peer.silent:
                self._answers.settle(peer, peer.unsettled, by_probe=False)
                why = f"{peer.session} is gone: nothing answers there"
                self._break(peer, why, now_s + self._limits.breaker_s)
            else:  # where we are in trouble ourselves, that says nothing of the peer either
                why = f"cannot be probed: {broken}" if broken else "does not answer"
                self._break(peer, f"{peer.session} {why}", 0.0)
                peer.probe_again_s = now_s + self._limits.probe_pause_s

    def _watch(self) -> None:
        """Posts what other threads decided, and acts on everything that becomes due."""
        while True:
            closed = self._pool.close_retired()
            with self._lock:
                for peer in self._answers.troubled if closed is not None else ():
                    done = [one for one in peer.unsettled if one.engine == closed]
                    self._answers.settle(peer, done, by_probe=False)
                wait_s = self._act_on_deadlines(time.monotonic())
                events = self._answers.take()
                if not events:
                    if self._mute:
                        return
                    self._timer.wait(wait_s)
            for event in events:
                self._post(event)

    def _tell(self, event: SenderEvent) -> None:
        if not self._mute:
            self._post(event)

    # --- called with the lock held

    def _act_on_deadlines(self, now_s: float) -> float | None:
        """Do what is due; the seconds until something else will be."""
        if self._closing:
            return None
        due = Deadlines(now_s, self._limits)
        self._probes.begin_waiting(now_s)
        for probe in due.unanswered(self._probes):
            probe.peer.silent = True
            if probe.peer.state is PeerState.PROBING:
                self._break(probe.peer, f"{probe.peer.session} does not answer", 0.0)
        for peer, one in due.given_up(self._answers.troubled):
            self._retire(peer, one)
        for peer in due.kept_waiting(self._probes.kept_waiting()):
            self._break(peer, f"{len(self._probes)} other peers are being probed", 0.0)
        for peer in due.to_probe(self._answers.troubled, self._probes.room_for_silent):
            self._probes.begin(peer, now_s)
        due.look_at(self._pool.close_due_s())
        self._watching_turns = self._turns.waiting > 0
        if self._watching_turns:  # as writes grow old, others have their turns
            self._next_turn(now_s)
            due.look_at(now_s + self._limits.slow_s / 4)
        return due.wait_s

    def _retire(self, peer: Peer, one: Unsettled) -> None:
        if one.released or one.engine is None:
            self._answers.settle(peer, [one], by_probe=False)
        else:
            self._pool.retire(one.engine)
            self._timer.notify_all()

    def _take_turn(self) -> tuple[Peer, QueuedWrite] | None:
        """Wait for the next write; None when the lane should end."""
        while not self._closing:
            now_s = time.monotonic()
            peer = self._turns.next(now_s, self._probes.room)
            if peer is None:
                if not self._lanes.wait():
                    return None
            elif self._wants_probe(peer, now_s):
                self._turns.asked(peer, now_s)
                self._start_probe(peer)
            else:
                write = peer.queue.popleft()
                self._queued -= 1
                peer.busy = True
                self._turns.began(peer, now_s)
                self._next_turn(now_s)
                return peer, write
        return None

    def _line_up(self, peer: Peer) -> None:
        """Put a ready peer with something to write in line, once."""
        if peer.queue and not peer.busy and peer.state is PeerState.READY:
            self._turns.add(peer)
            self._next_turn(time.monotonic())

    def _next_turn(self, now_s: float) -> None:
        """Somebody may have a turn: a lane is to see to it, else the watcher, in a while."""
        if self._turns.is_anyones(now_s, self._probes.room):
            self._lanes.wake()
        elif self._turns.waiting and not self._watching_turns:
            self._timer.notify_all()

    def _wants_probe(self, peer: Peer, now_s: float) -> bool:
        if self._turns.must_ask(peer, now_s, self._probes.room):
            return True
        is_fresh = now_s - peer.answered_s < self._limits.probe_fresh_s
        return not is_fresh and self._pool.needs_open(peer.session)

    def _start_probe(self, peer: Peer) -> None:
        """Hold the peer's writes until it has answered a probe."""
        peer.state = PeerState.PROBING
        if peer in self._probes:
            return
        if self._probes.room_for(peer) > 0:
            self._probes.begin(peer, time.monotonic())
        elif peer.queue and not peer.silent:
            self._probes.wait(peer, time.monotonic())
        else:
            self._break(peer, f"{len(self._probes)} other peers are being probed", 0.0)
        self._timer.notify_all()

    def _break(self, peer: Peer, why: str, until_s: float) -> None:
        peer.state = PeerState.BROKEN
        peer.why_broken = why
        peer.blocked_until_s = until_s
        self._fail_queue(peer, "peer silent or gone", why)

    def _fail_queue(self, peer: Peer, outcome: str, reason: str) -> None:
        writes = list(peer.queue)
        peer.queue.clear()
        self._turns.remove(peer)
        self._probes.give_up(peer)
        self._queued -= len(writes)
        self._answers.fail(writes, outcome, reason)
