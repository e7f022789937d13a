"""Who is refused when a worker has more to do than it can do in time, and who is taken all the same."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.outlook import Outlook
from encodepool_worker.core.pace import Pace
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import Driver, make_limits
from encodepool_worker.types import RefusalKind


def refusals(out):
    return [(one.kind, one.field, one.reason) for one in out if isinstance(one, do.Refuse)]


@pytest.fixture
def driver():
    """A tower that takes 1 s for 10 tokens, with a batch of 10 under way; 1000 bytes of 16 a token."""
    driver = Driver(make_limits(1024, max_tokens_per_batch=20, max_queue_cost=40, max_wait_s=3.0))
    for room in (1, 2):
        driver.request(room, 10, f"content {room}", claimed=True)
        if room == 1:
            driver.wait(1.0)
            driver.encoded()
            driver.land(1)
    yield driver
    driver.finish()


def test_what_would_be_too_late_is_refused_and_its_receivers_are_told(driver):
    deadline_s = driver.clock.now_s + 2.3
    [refusal] = refusals(driver.request(3, 10, claimed=True, deadline_s=deadline_s))
    assert refusal[:2] == (RefusalKind.FULL, "deadline")
    assert "ready in 2.0 s, too late for the call's deadline in 2.3 s" in refusal[2]
    assert driver.told(3)[0][1].name == "FAILED"
    assert not refusals(driver.request(4, 10, claimed=True, deadline_s=deadline_s + 0.2))


def test_an_item_behind_a_full_batch_waits_for_all_of_its_own(driver):
    driver.request(3, 15, claimed=True)
    deadline_s = driver.clock.now_s + 1.0 + 2 * 2.0
    [refusal] = refusals(driver.request(4, 6, claimed=True, deadline_s=deadline_s))
    assert "ready in 5.0 s" in refusal[2]


def test_rows_that_are_there_or_on_their_way_are_never_too_much(driver):
    driver.request(3, 20, "content 3", claimed=True)
    soon_s = driver.clock.now_s + 0.5
    for room, content in ((11, "content 1"), (12, "content 2"), (13, "content 3")):
        n_tokens = 20 if room == 13 else 10
        assert not refusals(driver.request(room, n_tokens, content, claimed=True, deadline_s=soon_s))
    driver.land(11)  # at once: it was in the store


def test_too_many_tokens_and_too_long_a_wait_are_refused_by_the_setting_at_fault(driver):
    driver.request(3, 20, claimed=True)
    [(kind, _, reason)] = refusals(driver.request(4, 21, claimed=True))
    assert (kind, "20 of 40 tokens" in reason, "max_queue_tokens" in reason) == (RefusalKind.FULL, True, True)
    driver.request(5, 10, claimed=True)
    assert not refusals(driver.request(6, 10, claimed=True)), "begins in 3 s, with the other"


def test_too_long_a_wait_is_refused():
    driver = Driver(make_limits(1024, max_tokens_per_batch=20, max_wait_s=2.5))
    driver.request(1, 20, claimed=True)
    driver.wait(2.0)
    driver.encoded()
    driver.land(1)
    driver.request(2, 20, claimed=True)
    driver.request(3, 20, claimed=True)
    assert driver.pipeline.snapshot().predicted_wait_s == pytest.approx(4.0)
    [(kind, _, reason)] = refusals(driver.request(4, 5, claimed=True))
    assert kind is RefusalKind.FULL
    assert "predicted wait is 4.0 s, above max_queue_seconds 2.5" in reason
    driver.finish()


def test_a_batch_that_is_late_is_not_thought_to_end_at_once(driver):
    driver.wait(4.0)  # 1 s was expected
    [(_, _, reason)] = refusals(driver.request(3, 10, claimed=True, deadline_s=driver.clock.now_s + 2.0))
    assert "ready in 4.0 s" in reason


def test_a_batch_does_not_grow_past_the_deadline_of_its_first_item(driver):
    driver.request(3, 10, claimed=True, deadline_s=driver.clock.now_s + 2.5)
    driver.request(4, 10, claimed=True)
    driver.wait(1.0)
    driver.encoded()
    assert driver.batch_rooms == [3]
    driver.wait(1.0)
    driver.encoded()
    assert driver.told(3) == []
    driver.land(3)
    assert driver.batch_rooms == [4]


def test_an_item_that_has_become_hopeless_gets_no_turn_while_others_wait(driver):
    driver.request(3, 10, claimed=True, deadline_s=driver.clock.now_s + 2.5)
    driver.request(4, 10, claimed=True)
    driver.wait(2.0)
    driver.encoded()  # after twice the time, so that 0.5 s is left for what takes longer
    assert driver.batch_rooms == [4]
    driver.wait(0.5)
    assert driver.told(3)[0][1].name == "FAILED", "at its deadline"


def test_a_hopeless_item_gets_its_turn_for_somebody_who_can_wait(driver):
    driver.request(3, 10, "content 3", claimed=True, deadline_s=driver.clock.now_s + 2.5)
    driver.request(4, 10, claimed=True)
    driver.wait(2.0)
    driver.encoded()
    driver.request(5, 10, "content 3", claimed=True)
    driver.wait(1.0)
    driver.encoded()
    assert driver.batch_rooms == [3], "the item, whose own room is over"
    driver.encoded()
    driver.land(5)


def test_work_that_cannot_be_done_yet_keeps_nobody_out():
    """It waits for its receivers, up to two minutes; the tower is idle, and what it learnt was wrong."""
    driver = Driver(make_limits(1024, max_queue_cost=64))
    driver.request(1, 10, claimed=True)
    driver.wait(40.0)
    driver.encoded()
    driver.land(1)
    driver.request(2, 40)  # more than half the store, and unclaimed
    for room in range(3, 6):
        out = driver.request(room, 30, claimed=True, deadline_s=driver.clock.now_s + 10.0)
        assert not refusals(out)
        driver.wait(1.0)
        driver.encoded()
        driver.land(room)
    assert driver.state(2) is RoomState.QUEUED
    driver.finish()


def test_a_line_that_waits_for_space_is_bounded_too():
    """The tower is idle then, since a write that drags on has all of the store."""
    driver = Driver(make_limits(160, max_queue_cost=16))
    driver.request(1, 10, claimed=True)
    driver.wait(1.0)
    driver.encoded()
    for room in (2, 3):
        assert not refusals(driver.request(room, 8, claimed=True))
    assert driver.batch_rooms == []
    [(kind, _, reason)] = refusals(driver.request(4, 8, claimed=True))
    assert (kind, "16 of 16 tokens" in reason) == (RefusalKind.FULL, True)
    driver.land(1)
    driver.finish()


def test_items_that_are_tried_again_are_waited_for_one_by_one(driver):
    driver.request(3, 5, claimed=True)
    driver.request(4, 5, claimed=True)
    driver.wait(1.0)
    driver.encoded()
    assert driver.batch_rooms == [3, 4]
    driver.batch_failed()
    assert driver.batch_rooms == [3]
    assert driver.pipeline.snapshot().predicted_wait_s == pytest.approx(1.0)


def test_an_item_larger_than_a_batch_is_waited_for_once(driver):
    deadline_s = driver.clock.now_s + 1.2 * (1.0 + 2.1) + 0.1
    assert not refusals(driver.request(3, 21, claimed=True, deadline_s=deadline_s))


@pytest.mark.parametrize(
    ("seen", "tokens", "seconds"),
    [
        ([(10, 1.0)], 20, 2.0),  # of one size: in proportion
        ([(10, 0.2), (100, 1.1)] * 20, 50, 0.6),  # 0.1 s and 0.01 s a token
        ([(10, 1.0), (20, 0.5)] * 20, 15, 0.75),  # larger and quicker: the mean
    ],
)
def test_the_pace_of_the_tower_is_learnt_from_its_batches(seen, tokens, seconds):
    pace = Pace()
    assert pace.batch_s(tokens) is None
    for n_tokens, took_s in seen:
        pace.learn(n_tokens, took_s)
    assert pace.batch_s(tokens) == pytest.approx(seconds, rel=0.05)


def test_nothing_is_said_of_batches_far_larger_than_those_seen():
    pace = Pace()
    pace.learn(10, 1.0)
    assert pace.batch_s(21) is None
    assert pace.tokens_per_s(8192) == pytest.approx(10.0)
    pace.learn(100, 1.0)
    assert pace.batch_s(21) == pytest.approx(1.0, rel=0.1)


def test_the_place_in_a_line_of_batches():
    outlook = Outlook(max_tokens=1000, max_items=10)
    for tokens, seconds in ((100, 1.0), (1000, 10.0)):
        outlook.begin(tokens, 0.0)
        outlook.end(seconds, learn=True)
    assert outlook.place(0, 0, 100) == pytest.approx((0.0, 1.0), rel=0.05)
    assert outlook.place(300, 2, 100) == pytest.approx((0.0, 4.0), rel=0.05)
    assert outlook.place(2300, 3, 100) == pytest.approx((20.0, 30.0), rel=0.05), "its batch will be full"
    assert outlook.place(190, 19, 10) == pytest.approx((1.0, 2.0), rel=0.05), "ten items each"
    assert outlook.place(300, 2, 1500) == pytest.approx((3.0, 18.0), rel=0.05), "alone, after the others"


def test_a_batch_without_rows_says_nothing_about_the_pace():
    driver = Driver()
    driver.request(1, claimed=True)
    driver.wait(1.0)
    driver.encoded({1: "not finite"})
    driver.request(2, claimed=True)
    driver.wait(1.0)
    driver.batch_failed()
    assert driver.pipeline.snapshot().tokens_per_s is None
    driver.finish()
