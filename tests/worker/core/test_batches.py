"""How batches form, and what becomes of one that fails."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.events import (
    BatchEncoded,
    Submitted,
)
from encodepool_worker.core.pipeline import Pipeline
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import (
    kinds,
    make_item,
    make_limits,
    make_receiver,
    refusal,
)
from encodepool_worker.types import Status

S = RoomState


def test_what_arrived_together_forms_one_batch():
    pipeline = Pipeline(make_limits())
    events = [Submitted(n, make_item(n), n, 10) for n in range(1, 5)]
    out = pipeline.handle_all(events, 1.0)
    assert [len(i.jobs) for i in out if isinstance(i, do.RunBatch)] == [4]


@pytest.mark.parametrize(
    ("costs", "batches"),
    [
        ([10, 10, 10], [[1, 2], [3]]),
        ([20, 1], [[1], [2]]),
        ([5, 16, 5], [[1], [2], [3]]),  # nobody is overtaken
        ([30, 1, 1], [[1], [2, 3]]),  # larger than a batch: alone
        ([1, 30, 1], [[1], [2], [3]]),
        ([1, 1, 1, 1, 1], [[1, 2, 3, 4], [5]]),
    ],
)
def test_batches_are_filled_in_order_under_both_budgets(open_driver, costs, batches):
    driver = open_driver(max_tokens_per_batch=20, max_items_per_batch=4)
    driver.request(0, cost=20)
    for room, cost in enumerate(costs, start=1):
        driver.request(room, cost=cost)
    seen = []
    driver.encoded()
    while driver.batch:
        seen.append(driver.batch_rooms)
        driver.encoded()
    assert seen == batches


def test_claimed_rooms_go_first(driver):
    for room in range(5):
        driver.request(room, cost=driver.limits.max_tokens_per_batch)
    driver.announce(3, make_receiver())
    order = []
    while driver.batch:
        order += driver.batch_rooms
        driver.encoded()
    assert order == [0, 3, 1, 2, 4]


def test_one_batch_at_a_time(driver):
    driver.request(1)
    assert kinds(driver.request(2)) == ["Admit"]
    snapshot = driver.pipeline.snapshot()
    assert (snapshot.batch_items, snapshot.batch_since_s) == (1, driver.clock.now_s)
    assert (snapshot.queue_items, snapshot.queue_cost, snapshot.queue_since_s) == (
        1,
        4,
        driver.clock.now_s,
    )


def test_an_item_that_gave_up_before_its_batch_costs_no_tower(driver):
    driver.request(1)
    driver.request(2)
    driver.request(3, deadline_s=driver.clock.now_s + 1)
    assert kinds(driver.abort(2)) == ["Conclude", "ReturnCredit", "DropPixels"]
    driver.wait(1)
    driver.encoded()
    assert driver.batch is None
    assert driver.pipeline.snapshot().counters["expired_before_encode"] == 1


def test_a_deadline_that_passes_with_the_answer_still_counts(driver):
    """The tower is free at the very moment at which the next item's deadline passes."""
    driver.request(1)
    driver.request(2, deadline_s=driver.clock.now_s + 1)
    driver.clock.advance(1)
    driver.witness.expect(BatchEncoded(1), driver.clock.now_s)
    driver.batch = None
    out = driver.pipeline.handle(BatchEncoded(1), driver.clock.now_s)
    driver.witness.observe(BatchEncoded(1), out, driver.clock.now_s)
    assert driver.state(2) is S.FAILED
    assert "RunBatch" not in kinds(out)


def test_a_deadline_that_has_passed_is_refused(driver):
    out = driver.request(1, deadline_s=driver.clock.now_s)
    assert refusal(out) == ("deadline", "has passed")


def test_one_bad_item_of_a_batch_fails_one_room(driver):
    driver.request(0)
    for room in (1, 2, 3):
        driver.request(room, claimed=True)
    driver.encoded()
    driver.encoded({2: "not finite"})
    assert [driver.state(room) for room in (1, 2, 3)] == [S.SHIPPING, S.FAILED, S.SHIPPING]
    assert driver.told(2) == [("p", Status.FAILED)]


def test_a_failed_batch_is_tried_item_by_item_once(driver):
    driver.request(0)
    for room in (1, 2, 3):
        driver.request(room, claimed=True)
    driver.request(4)
    driver.encoded()
    assert driver.batch_rooms == [1, 2, 3, 4]
    driver.batch_failed()
    driver.abort(3)  # nobody needs it any more: no turn
    assert driver.batch_rooms == [1]
    driver.request(5)  # newcomers wait for the turns
    driver.encoded()
    assert driver.batch_rooms == [2]
    out = driver.batch_failed("bad item")
    assert [(i.room, i.reason) for i in out if isinstance(i, do.Conclude)] == [(2, "bad item")]
    assert driver.batch_rooms == [4]
    driver.encoded()
    assert driver.batch_rooms == [5]
    assert [driver.state(room) for room in (1, 2, 3, 4)] == [S.SHIPPING, S.FAILED, S.FAILED, S.PARKED]
    assert driver.pipeline.snapshot().store.bytes_by_state["reserved"] == 0


def test_a_failed_batch_of_one_is_not_tried_again(driver):
    driver.request(1)
    driver.batch_failed()
    assert driver.batch is None
    assert driver.state(1) is S.FAILED
