"""Rooms that want the same rows share one run of the tower and one entry."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.instructions import Outcome
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import (
    kinds,
    make_receiver,
    refusal,
)

S = RoomState


@pytest.mark.parametrize("when", ["queued", "encoding", "held"])
def test_equal_content_is_encoded_once(driver, when):
    if when == "queued":
        driver.request(0)
    driver.request(1, content="cat")
    if when == "held":
        driver.encoded()
    assert kinds(driver.request(2, content="cat")) == ["Admit", "ReturnCredit", "DropPixels"]
    if when == "queued":
        driver.encoded()
    if when != "held":
        assert len(driver.batch.jobs) == 1
        driver.encoded()
    assert driver.batch is None
    for room in (1, 2):
        driver.announce(room, make_receiver())
        end = next(i for i in driver.land(room) if isinstance(i, do.Conclude))
        assert (end.outcome, end.nbytes) == (Outcome.SUCCESS, 64)
        assert end.hit_tier == (0 if room == 2 and when == "held" else None)
    counters = driver.pipeline.snapshot().counters
    assert counters["misses"] == 1 + (when == "queued")


def test_a_shared_job_stays_for_whoever_is_left(driver):
    driver.request(0)
    driver.request(1, content="cat")
    driver.request(2, content="cat")
    assert kinds(driver.abort(1)) == ["Conclude"]  # the pixels of room 1 are still wanted
    driver.encoded()
    assert driver.batch_rooms == [1]  # whose pixels they were
    driver.encoded()
    assert driver.state(2) is S.PARKED


def test_a_shared_job_goes_with_its_last_room(driver):
    driver.request(0)
    driver.request(1, content="cat")
    driver.request(2, content="cat")
    driver.abort(1)
    assert kinds(driver.abort(2)) == ["Conclude", "ReturnCredit", "DropPixels"]
    assert driver.pipeline.snapshot().queue_items == 0


def test_a_failed_item_fails_every_room_that_shares_it(driver):
    driver.request(1, content="cat")
    driver.request(2, content="cat")
    driver.encoded({1: "not finite"})
    assert driver.state(1) is driver.state(2) is S.FAILED
    driver.request(3, content="cat")  # a failure is not cached
    assert driver.batch_rooms == [3]


@pytest.mark.parametrize("known", ["queued", "stored"])
def test_content_that_is_known_with_other_rows_is_refused(driver, known):
    driver.request(0)
    driver.request(1, n_tokens=4, content="cat")
    if known == "stored":
        driver.encoded()
    field, reason = refusal(driver.request(2, n_tokens=5, content="cat"))
    assert field == "items"
    assert "known with rows" in reason
    assert driver.state(1) is (S.QUEUED if known == "queued" else S.ENCODING)


def test_an_item_of_a_request_has_one_room_at_a_time(driver):
    driver.request(1, request_id="r", index=0)
    assert refusal(driver.request(2, request_id="r", index=0)) == ("request_id", "item 0 of r is in room 1")
    assert refusal(driver.request(3, request_id="r", index=1)) is None
    driver.abort(1)
    assert refusal(driver.request(4, request_id="r", index=0)) is None
