"""The whole loop over real sockets: submissions in, rows in the receiver's memory, verdicts out."""

import itertools
import os
import time
from pathlib import Path

import zmq

from encodepool_worker.metrics import parse_sample
from encodepool_worker.types import Grid, Status
from encodepool_worker.wire import intake

POISON, NOT_FINITE = 1000.0, 2000.0
N_TOKENS = 16
HIDDEN, LEVELS = 8, 2


def prefills_as_told(prefills):
    """Each of them once its status frame lies there, in the order of arrival."""
    waiting = list(prefills)
    while waiting:
        told, _, _ = zmq.select([prefill.status for prefill in waiting], [], [], 10)
        assert told, "no status frame came"
        for prefill in [one for one in waiting if one.status in told]:
            waiting.remove(prefill)
            yield prefill


def test_rows_arrive_byte_identical_to_the_towers(rig):
    prefill = rig.prefill()
    seq, pixels = rig.submit(room=7, content=1)
    prefill.announce(7)
    assert prefill.verdict() == (7, Status.SUCCESS)
    assert prefill.received() == rig.tower.halves(pixels)
    rig.hear(lambda m: m == intake.Admitted(seq=seq))
    if intake.Credit(seq=seq) not in rig.heard:
        rig.hear(lambda m: m == intake.Credit(seq=seq))
    rig.wait_until(lambda: len(rig.rank.pixels) == 0, what="the pixels are dropped")


def test_receivers_may_speak_before_the_request_or_long_after(rig):
    early, late = rig.prefill(), rig.prefill()
    early.announce(1)
    rig.hear_state(lambda s: s.queue_items == 0)
    _, first = rig.submit(room=1, content=1)
    _, second = rig.submit(room=2, content=2)
    assert early.verdict() == (1, Status.SUCCESS)
    assert early.received() == rig.tower.halves(first)

    rig.wait_until(lambda: sum(rig.tower.batches) == 2)
    late.announce(2)
    assert late.verdict() == (2, Status.SUCCESS)
    assert late.received() == rig.tower.halves(second)


def test_the_same_content_again_is_shipped_without_the_tower(rig):
    first, second = rig.prefill(), rig.prefill()
    _, pixels = rig.submit(room=1, content=5)
    first.announce(1)
    assert first.verdict() == (1, Status.SUCCESS)
    rig.submit(room=2, content=5)
    second.announce(2)
    assert second.verdict() == (2, Status.SUCCESS)
    assert second.received() == rig.tower.halves(pixels)
    assert sum(rig.tower.batches) == 1


def test_two_ranks_of_a_room_get_their_shards(rig):
    upper, lower = rig.prefill(), rig.prefill()
    upper.announce(3, row_start=0, n_rows=10, fanout=2)
    _, pixels = rig.submit(room=3, content=1)
    lower.announce(3, row_start=10, n_rows=6, fanout=2)
    assert upper.verdict() == lower.verdict() == (3, Status.SUCCESS)
    main, deepstack = rig.tower.halves(pixels)
    row, deep = HIDDEN * 4, HIDDEN * LEVELS * 4
    assert upper.received()[0][: 10 * row] == main[: 10 * row]
    assert upper.received()[1][: 10 * deep] == deepstack[: 10 * deep]
    assert lower.received()[0][: 6 * row] == main[10 * row :]
    assert lower.received()[1][: 6 * deep] == deepstack[10 * deep :]
    assert set(lower.received()[0][6 * row :]) == {0xAA}


def test_many_items_of_many_rooms_all_arrive(rig):
    prefills = [rig.prefill() for _ in range(4)]
    pixels = {}
    for room in range(40):
        _, pixels[room] = rig.submit(room=room, content=room % 25)
    for room in range(40):
        prefill = prefills[room % 4]
        prefill.announce(room)
        assert prefill.verdict() == (room, Status.SUCCESS)
        assert prefill.received() == rig.tower.halves(pixels[room])
    assert sum(rig.tower.batches) == 25
    state = rig.hear_state(lambda s: 'encodepool_rooms_total{outcome="success"}' in s.counters)
    assert state.queue_items == 0


def test_a_failure_of_the_tower_is_told_within_a_second_and_touches_no_other_room(rig):
    rig.tower.gate.clear()
    holder = rig.prefill()
    holder.announce(1)
    rig.submit(room=1, content=1)
    rig.hear_state(lambda s: s.batch_age_s is not None)
    good, bad, odd = rig.prefill(), rig.prefill(), rig.prefill()
    for prefill, room in ((good, 2), (bad, 3), (odd, 4)):
        prefill.announce(room)
    _, pixels = rig.submit(room=2, content=2)
    rig.submit(room=3, content=3, first=POISON)
    rig.submit(room=4, content=4, first=NOT_FINITE)
    rig.hear_state(lambda s: s.queue_items == 3)
    rig.tower.gate.set()
    verdicts = {
        holder: (1, Status.SUCCESS),
        good: (2, Status.SUCCESS),
        bad: (3, Status.FAILED),
        odd: (4, Status.FAILED),
    }
    told_s = {}
    for prefill in prefills_as_told(verdicts):
        assert prefill.verdict() == verdicts[prefill]
        told_s[prefill] = time.monotonic()
    # What the machine needs for all of it, those that are served need as well.
    assert max(told_s[bad], told_s[odd]) < max(told_s[holder], told_s[good]) + 1
    assert good.received() == rig.tower.halves(pixels)
    assert set(bad.received()[0]) == {0xAA}


def test_a_refusal_of_the_frontend_reaches_the_receivers_before_and_after(rig):
    before, after = rig.prefill(), rig.prefill()
    before.announce(1)
    rig.tell(intake.Refuse(room=1, reason="pixel_shape: too large"))
    assert before.verdict() == (1, Status.FAILED)
    rig.tell(intake.Refuse(room=2, reason="pixel_shape: too large"))
    after.announce(2)
    assert after.verdict() == (2, Status.FAILED)


def test_nonsense_on_both_sockets_is_survived(rig):
    prefill = rig.prefill()
    for frames in ([b""], [b"None"], [os.urandom(50)] * 13, [b"7"] * 12):
        rig.controls[0].send_multipart(frames)
        rig.intake.send_multipart(frames)
    _, pixels = rig.submit(room=7, content=1)
    prefill.announce(7)
    assert prefill.verdict() == (7, Status.SUCCESS)
    assert prefill.received() == rig.tower.halves(pixels)
    assert rig.counter("encodepool_frames_malformed_total") == 8


def test_a_receiver_that_is_gone_fails_its_own_room_only(rig):
    gone, prefill = rig.prefill(), rig.prefill()
    gone.announce(1)
    gone.engine.close()
    rig.submit(room=1, content=1)
    assert gone.verdict() == (1, Status.FAILED)
    _, pixels = rig.submit(room=2, content=2)
    prefill.announce(2)
    assert prefill.verdict() == (2, Status.SUCCESS)
    assert prefill.received() == rig.tower.halves(pixels)
    failures = "encodepool_transfer_failures_total"
    state = rig.hear_state(lambda s: any(name.startswith(failures) for name in s.counters))
    assert sum(value for name, value in state.counters.items() if name.startswith(failures)) == 1


def test_a_frozen_receiver_is_told_after_the_quarantine_and_delays_nobody(open_rig):
    """A write that timed out may still land: its receiver must not free its memory too early."""
    rig = open_rig(transfer_timeout_seconds=0.5, quarantine_seconds=1.5)
    frozen, prefill = rig.prefill(), rig.prefill()
    for room, peer in ((1, frozen), (2, prefill)):
        rig.submit(room=room, content=room)
        assert peer.announce(room).verdict() == (room, Status.SUCCESS)

    started_s = time.monotonic()
    rig.submit(room=3, content=3)
    frozen.announce(3).freeze_with_a_write()
    _, pixels = rig.submit(room=4, content=4)
    assert prefill.announce(4).verdict() == (4, Status.SUCCESS)
    assert prefill.received() == rig.tower.halves(pixels)
    rig.hear_state(lambda s: s.counters.get("encodepool_quarantines_total") == 1)
    assert not frozen.status.poll(0)
    frozen.engine.faults.thaw()
    assert frozen.verdict() == (3, Status.FAILED)
    assert time.monotonic() - started_s > 2


def test_late_writes_that_pin_too_much_have_their_engine_closed(open_rig):
    """One frozen receiver of large items would otherwise hold the store until it wakes up."""
    rig = open_rig(transfer_timeout_seconds=0.5, quarantine_seconds=1.0)
    large = Grid(1, 128, 88)
    n_tokens = large.patches // 4
    assert n_tokens * HIDDEN * (1 + LEVELS) * 4 > rig.pipeline.limits.quarantine_bytes
    frozen = rig.prefill(n_tokens=n_tokens)
    rig.submit(room=1, content=1)
    assert frozen.announce(1).verdict() == (1, Status.SUCCESS)
    rig.submit(room=2, content=2, grid=large)
    frozen.announce(2, n_rows=n_tokens, span=n_tokens).freeze_with_a_write()
    rig.wait_until(lambda: rig.pipeline.snapshot().counters.get("engines_retired") == 1)
    # Settled without the receiver's help; the receiver is told although it never answered.
    assert frozen.verdict(10) == (2, Status.FAILED)
    assert rig.pipeline.snapshot().store.pinned_bytes == 0


def test_the_loop_reports_at_least_once_a_second_and_only_metrics_of_the_table(rig):
    rig.submit(room=1, content=1)
    rig.prefill().announce(1).verdict()
    first = rig.hear_state(lambda s: s.routed and s.tokens_per_s is not None)
    turns = [first.turn_s]
    while turns[-1] - turns[0] < 3:
        turns.append(rig.hear_state(lambda s: True).turn_s)
    assert max(b - a for a, b in itertools.pairwise(turns)) < 3, "a second, and room for a busy machine"
    state = rig.hear_state(lambda s: 'encodepool_rooms_total{outcome="success"}' in s.counters)
    assert len(state.counters) > 10
    assert [name for name in state.counters if parse_sample(name) is None] == []
    assert state.batch_age_s is None


def test_a_running_batch_has_an_age_and_an_expectation(rig):
    rig.submit(room=1, content=1)
    rig.prefill().announce(1).verdict()
    rig.tower.gate.clear()
    rig.submit(room=2, content=2)
    state = rig.hear_state(lambda s: s.batch_age_s is not None and s.batch_age_s > 0.5)
    assert state.batch_expected_s > 0
    rig.tower.gate.set()
    rig.hear_state(lambda s: s.batch_age_s is None)


def test_draining_finishes_what_was_accepted_and_fails_what_was_not(rig):
    rig.tower.gate.clear()
    prefill, orphan, late = rig.prefill(), rig.prefill(), rig.prefill()
    prefill.announce(1)
    _, pixels = rig.submit(room=1, content=1)
    orphan.announce(2)
    rig.hear(lambda m: isinstance(m, intake.Admitted))

    rig.tell(intake.Drain(deadline_s=time.monotonic() + 30))
    assert orphan.verdict() == (2, Status.FAILED)
    rig.wait_until(lambda: rig.pipeline.snapshot().draining, what="the drain")
    seq, _ = rig.submit(room=3, content=3)
    rig.hear(lambda m: isinstance(m, intake.Refused) and m.seq == seq)
    late.announce(3)
    assert late.verdict() == (3, Status.FAILED)

    rig.tower.gate.set()
    assert prefill.verdict() == (1, Status.SUCCESS)
    assert prefill.received() == rig.tower.halves(pixels)
    rig.hear(lambda m: isinstance(m, intake.Drained))
    rig.loop_thread.join(5)
    assert not rig.loop_thread.is_alive()


def test_what_is_not_done_by_the_drains_deadline_is_failed(rig):
    rig.tower.gate.clear()
    running, queued = rig.prefill(), rig.prefill()
    running.announce(1)
    rig.submit(room=1, content=1)
    rig.hear_state(lambda s: s.batch_age_s is not None)
    queued.announce(2)
    rig.submit(room=2, content=2)
    rig.tell(intake.Drain(deadline_s=time.monotonic() + 0.5))
    assert queued.verdict() == (2, Status.FAILED)
    assert running.verdict() == (1, Status.FAILED)
    # The end does not wait for the tower, so the running batch keeps its pixels.
    rig.left_behind = 1
    rig.tower.gate.set()
    rig.hear(lambda m: isinstance(m, intake.Drained))


def test_sigterm_without_a_drain_from_the_frontend_still_drains(rig):
    prefill = rig.prefill()
    rig.submit(room=1, content=1)
    rig.hear(lambda m: isinstance(m, intake.Admitted))
    rig.rank.loop.ask_to_end()
    rig.wait_until(lambda: rig.pipeline.snapshot().draining, seconds=20, what="the drain")
    prefill.announce(1)
    assert prefill.verdict() == (1, Status.SUCCESS)
    rig.hear(lambda m: isinstance(m, intake.Drained))


def test_files_and_threads_return_to_where_they_were(open_rig):
    """A rank is opened and closed twice; the second leaves no more open files than the first."""
    counts = []
    for _ in range(2):
        rig = open_rig()
        rig.submit(room=1, content=1)
        rig.prefill().announce(1).verdict()
        rig.finish()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        rig.finish = lambda: None
    assert counts[1] <= counts[0]
