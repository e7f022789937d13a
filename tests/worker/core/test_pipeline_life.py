"""Bounds, our own bugs, and draining."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.events import (
    Announced,
    BatchEncoded,
    BatchFailed,
    DrainStarted,
    Submitted,
    Tick,
    WriteFailed,
    WriteSettled,
    Written,
)
from encodepool_worker.core.instructions import Outcome
from encodepool_worker.core.limits import PipelineLimits
from encodepool_worker.core.pipeline import Pipeline
from encodepool_worker.core.room import RoomState
from encodepool_worker.errors import ConfigError, WorkerError
from encodepool_worker.testing import (
    kinds,
    make_item,
    make_limits,
    make_receiver,
    make_shards,
    refusal,
)
from encodepool_worker.types import Status

S = RoomState


def test_tombstones_are_bounded_and_the_oldest_goes_first(open_driver):
    driver = open_driver(max_tombstones=3)
    for room in range(5):
        driver.abort(room)
    assert [driver.state(room) for room in range(5)] == [S.NEW, S.NEW, S.FAILED, S.FAILED, S.FAILED]
    assert driver.pipeline.snapshot().counters["tombstones_evicted"] == 2


def test_open_rooms_are_bounded(open_driver):
    driver = open_driver(max_rooms=2)
    driver.announce(1, make_receiver())
    driver.request(2)
    driver.announce(3, make_receiver())
    assert driver.told(3) == [("p", Status.FAILED)]
    assert refusal(driver.request(4)) == ("worker", "2 rooms are open")
    assert refusal(driver.request(1)) is None  # it is open already
    driver.encoded()


def test_frames_without_requests_never_keep_out_a_request(open_driver):
    driver = open_driver(max_rooms=8)
    for room in range(100):
        driver.announce(room, make_receiver())
    assert driver.told(99) == [("p", Status.FAILED)]
    assert driver.pipeline.snapshot().rooms_by_state["announced"] == 4
    assert refusal(driver.request(1000)) is None
    driver.encoded()


def test_deadlines_that_no_longer_matter_do_not_pile_up():
    limits = make_limits()
    pipeline = Pipeline(limits)
    now_s = 0.0
    for n in range(1, 4001):
        now_s += 0.001
        item = make_item(n, "cat")
        out = pipeline.handle_all([Submitted(n, item, n, 1), Announced(n, make_receiver())], now_s)
        for order in out:
            if isinstance(order, do.RunBatch):
                out = pipeline.handle(BatchEncoded(order.batch), now_s)
        for order in out:
            if isinstance(order, do.Write):
                pipeline.handle(Written(order.write), now_s)
    assert pipeline.snapshot().rooms_by_state["done"] == 4000
    assert len(pipeline._rooms._heap) < 1100


def test_time_never_goes_back(driver):
    driver.request(1)
    driver.encoded()
    driver.wait(50)
    now_s = driver.clock.now_s
    driver.pipeline.handle(Tick(), now_s - 49)
    driver.announce(1, make_receiver())
    driver.land(1)
    assert driver.pipeline.next_deadline_s() == now_s + driver.limits.tombstone_s


@pytest.mark.parametrize(
    "stray",
    [BatchEncoded(1), BatchFailed(1, "x"), Written(1), WriteFailed(1, "x", True), WriteSettled(1, True)],
)
def test_an_answer_that_nobody_asked_for_is_our_own_bug(driver, stray):
    with pytest.raises(WorkerError):
        driver.pipeline.handle(stray, driver.clock.now_s)


def test_a_failure_of_an_entry_that_is_not_in_the_batch_is_our_own_bug():
    pipeline = Pipeline(make_limits())
    pipeline.handle(Submitted(1, make_item(1), 1, 1), 0.0)
    with pytest.raises(WorkerError, match=r"batch 1 has no entries \[99\]"):
        pipeline.handle(BatchEncoded(1, {99: "x"}), 0.0)


def test_a_late_write_settles_once(driver):
    driver.request(1, claimed=True)
    driver.encoded()
    driver.miss(1, late=True)
    driver.settle(1)
    with pytest.raises(WorkerError, match="settled, but is not late"):
        driver.pipeline.handle(WriteSettled(1, True), driver.clock.now_s)


def test_limits_report_every_problem_at_once():
    with pytest.raises(ConfigError) as caught:
        PipelineLimits(store_bytes=0, park_s=-1.0, max_quarantined_bytes=0)
    assert caught.value.problems == (
        "store_bytes must be > 0, is 0",
        "max_quarantined_bytes must be > 0, is 0",
        "park_s must be > 0, is -1.0",
    )
    with pytest.raises(ConfigError, match=r"store_bytes \(64\) must be >= store_alignment \(256\)"):
        PipelineLimits(store_bytes=64)
    assert PipelineLimits(store_bytes=4096).quarantine_bytes == 1024


# --- very many rooms end at once


def test_a_turn_ends_no_more_rooms_than_it_may_and_the_next_goes_on_at_once(open_driver):
    """Ten thousand rooms that nobody claims would otherwise hold up everyone else for seconds."""
    driver = open_driver(max_ends_per_turn=10)
    for room in range(35):
        driver.announce(room, make_receiver())
    driver.clock.advance(driver.limits.announce_s)
    told = []
    while driver.is_behind:
        out = driver.pipeline.handle(Tick(), driver.clock.now_s)
        driver.witness.observe(Tick(), out, driver.clock.now_s)
        told.append(kinds(out).count("SendStatus"))
    assert told == [10, 10, 10, 5]


def test_a_turn_that_is_behind_gives_the_tower_nothing_that_should_have_ended(open_driver):
    driver = open_driver(max_ends_per_turn=2)
    driver.request(99)
    for room in range(5):
        driver.request(room, deadline_s=driver.clock.now_s + 1)
    driver.request(50)
    driver.clock.advance(1)
    driver.encoded()  # ends four of them: two as time passes, two with the answer
    assert driver.batch is None
    driver.feed(Tick())
    assert driver.batch_rooms == [50]
    assert driver.pipeline.snapshot().counters["expired_before_encode"] == 5


def test_a_deadline_comes_before_what_happens_after_it_also_in_a_turn_that_is_behind(open_driver):
    driver = open_driver(max_ends_per_turn=1)
    for room in range(6):
        driver.request(room, deadline_s=driver.clock.now_s + 10 + room / 100)
    driver.encoded()
    driver.encoded()
    driver.clock.advance(11)
    driver.announce(5, make_receiver())
    assert driver.told(5) == [("p", Status.FAILED)]
    assert driver.state(4) is S.PARKED  # its turn to end has not come yet


def test_rows_that_come_after_their_rooms_deadline_are_not_sent():
    pipeline = Pipeline(make_limits(max_ends_per_turn=1))
    for room in range(6):
        pipeline.handle(Announced(room, make_receiver()), 0.0)
    events = [Submitted(n, make_item(n, deadline_s=1.0), n, 1) for n in range(6)]
    (order,) = (i for i in pipeline.handle_all(events, 0.0) if isinstance(i, do.RunBatch))
    out = pipeline.handle(BatchEncoded(order.batch), 1.0)
    assert kinds(out).count("SendStatus") == 6
    assert "Write" not in kinds(out)


def test_a_drain_ends_as_many_rooms_in_a_turn_as_time_does(open_driver):
    driver = open_driver(max_ends_per_turn=10)
    for room in range(25):
        driver.announce(room, make_receiver())
    for room in range(100, 115):
        driver.request(room)
    driver.encoded()
    driver.witness.expect(DrainStarted(driver.clock.now_s - 1), driver.clock.now_s)
    out = driver.pipeline.handle(DrainStarted(driver.clock.now_s - 1), driver.clock.now_s)
    driver.witness.observe(Tick(), out, driver.clock.now_s)
    assert kinds(out).count("Conclude") == 10
    out = driver.wait(0)
    assert kinds(out).count("Conclude") == 30
    assert kinds(out)[-1] == "Drained"


# --- draining


def test_draining_finishes_what_was_accepted_and_admits_nothing(driver):
    driver.request(1, claimed=True)
    driver.request(2)
    driver.announce(3, make_receiver())
    assert driver.drain(60) == [
        do.SendStatus(3, make_receiver(), Status.FAILED),
        do.Conclude(3, Outcome.FAILED, "aborted: the worker is draining", None, 0),
    ]
    assert refusal(driver.request(4)) == ("worker", "the worker is draining")
    driver.announce(5, make_receiver())
    assert driver.told(5) == [("p", Status.FAILED)]
    assert refusal(driver.request(1)) is None  # accepted before; the answer stays the same
    driver.encoded()
    driver.encoded()
    driver.land(1)
    driver.announce(2, make_receiver())
    out = driver.land(2)
    assert kinds(out) == ["SendStatus", "Conclude", "Drained"]
    driver.announce(2, make_receiver())  # after Drained nothing is started
    assert driver.told(2) == [("p", Status.SUCCESS), ("p", Status.FAILED)]


def test_draining_with_nothing_to_do_ends_at_once(driver):
    assert driver.drain() == [do.Drained()]
    assert driver.pipeline.snapshot().drained


def test_what_is_not_done_by_the_drain_deadline_is_failed(driver):
    driver.request(1, claimed=True)
    driver.encoded()
    driver.request(2, claimed=True)
    driver.request(3)
    driver.drain(30)
    assert driver.pipeline.next_deadline_s() == driver.clock.now_s + 30
    out = driver.wait(30)
    assert driver.told(2) == [("p", Status.FAILED)]
    assert driver.told(1) == []  # its write runs
    assert "Drained" not in kinds(out)
    assert kinds(driver.land(1)) == ["SendStatus", "Drained"]  # room 2's rows are nobody's now
    assert driver.told(1) == [("p", Status.FAILED)]


def test_drained_waits_for_quarantines(driver):
    driver.request(1, claimed=True)
    driver.encoded()
    driver.drain(5)
    driver.miss(1, late=True)
    assert "Drained" not in kinds(driver.wait(20))
    assert kinds(driver.settle(1, by_probe=False)) == ["SendStatus", "Drained"]


@pytest.mark.parametrize("failed_first", [True, False], ids=["before the deadline", "after it"])
def test_past_the_drains_deadline_nobody_waits_for_a_silent_receiver(driver, failed_first):
    """It may stay silent for ever. What it might still receive is ended from our side."""
    driver.request(1, claimed=True)
    driver.encoded()
    write = driver.find_write(1, "p")
    driver.drain(5)
    if failed_first:
        out = driver.miss(1, late=True)
        assert "RetireEngine" not in kinds(out)
        out = driver.wait(5)
    else:
        driver.wait(6)
        out = driver.miss(1, late=True)
    assert do.RetireEngine(write) in out
    assert "RetireEngine" not in kinds(driver.wait(1)), "once is enough"
    driver.settle(1, by_probe=False)
    out = driver.wait(driver.limits.quarantine_s)
    assert kinds(out) == ["SendStatus", "Drained"]
    assert driver.told(1) == [("p", Status.FAILED)]


def test_a_finished_room_ships_again_while_draining_but_not_past_the_deadline(driver):
    driver.request(1, claimed=True)
    driver.encoded()
    driver.land(1)
    driver.request(2)
    driver.drain(30)
    driver.announce(1, make_receiver())
    driver.land(1)
    assert driver.told(1) == [("p", Status.SUCCESS)] * 2
    driver.wait(30)
    driver.announce(1, make_receiver())
    assert driver.told(1)[2:] == [("p", Status.FAILED)]


def test_a_deadline_in_the_past_drains_at_once(driver):
    driver.request(1)
    driver.encoded()
    driver.announce(1, make_shards("pq")[0])
    assert kinds(driver.drain(-1)) == ["SendStatus", "Conclude", "Drained"]
