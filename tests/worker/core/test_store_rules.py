"""Who gets space in the store, and when late writes give theirs back."""

from encodepool_worker.core import instructions as do
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import (
    kinds,
    make_layout,
    make_receiver,
    refusal,
)
from encodepool_worker.types import Status

S = RoomState


def test_rows_larger_than_the_store_are_refused_by_name(open_driver):
    driver = open_driver(store_bytes=640)
    driver.announce(1, make_receiver(layout=make_layout(41)))
    field, reason = refusal(driver.request(1, n_tokens=41))
    assert (field, reason) == ("items", "rows take 656 bytes, the store holds 640: make it larger")
    assert driver.told(1) == [("p", Status.FAILED)]


def test_unclaimed_rooms_hold_half_the_store_at_most(open_driver):
    """In TokenSpeed a ring full of rooms that nobody asks for blocks everyone for 120 s."""
    driver = open_driver(store_bytes=640)
    for room in range(1, 6):
        driver.request(room, n_tokens=10)
    driver.encoded()
    driver.encoded()
    assert driver.batch is None
    assert driver.pipeline.snapshot().store.unclaimed_bytes == 320
    driver.request(6, n_tokens=20, claimed=True)  # half the store, and at once
    assert driver.batch_rooms == [6]
    driver.encoded()
    driver.land(6)
    driver.announce(1, make_receiver(layout=make_layout(10)))  # claimed: its bytes no longer count
    assert driver.batch_rooms == [3]
    driver.encoded()


def test_a_queued_room_goes_ahead_as_soon_as_it_is_claimed(open_driver):
    driver = open_driver(store_bytes=640)
    for room in range(1, 6):
        driver.request(room, n_tokens=10)
    driver.encoded()
    driver.encoded()
    driver.announce(5, make_receiver(layout=make_layout(10)))
    assert driver.batch_rooms == [5]


def test_unclaimed_hits_count_as_well(open_driver):
    """Otherwise repeated images could hold the whole store."""
    driver = open_driver(store_bytes=640)
    for room, name in ((1, "a"), (2, "b"), (3, "c")):  # fill the cache
        driver.request(room, n_tokens=10, content=name, claimed=True)
        driver.encoded()
        driver.land(room)
    for room, name in ((11, "a"), (12, "b"), (13, "c")):
        driver.request(room, n_tokens=10, content=name)
    assert [driver.state(room) for room in (11, 12, 13)] == [S.PARKED, S.PARKED, S.QUEUED]
    assert driver.batch is None
    driver.request(14, n_tokens=10, content="c")  # waits in the same place
    driver.announce(13, make_receiver(layout=make_layout(10)))
    assert driver.state(13) is S.SHIPPING  # the hit it always was, without the tower
    driver.land(13)
    driver.abort(11)
    assert driver.state(14) is S.PARKED
    assert driver.batch is None


def test_rows_that_were_evicted_while_a_room_waited_are_made_again(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=20, content="a", claimed=True)
    driver.encoded()
    driver.land(1)
    driver.request(2, n_tokens=20, content="b")
    driver.encoded()
    driver.request(3, n_tokens=20, content="a")  # in the cache, but no share
    assert driver.state(3) is S.QUEUED
    driver.request(4, n_tokens=20, content="c", claimed=True)  # evicts it
    driver.encoded()
    driver.land(4)
    driver.announce(3, make_receiver(layout=make_layout(20)))
    assert driver.batch_rooms == [3]


def test_a_claimed_room_takes_the_job_and_leaves_the_others_without_a_share(open_driver):
    """Both want the same rows; for the room that nobody has asked for there is no share."""
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=20)
    driver.encoded()
    driver.request(2, n_tokens=10, content="cat")
    driver.request(3, n_tokens=10, content="cat", claimed=True)
    assert driver.batch_rooms == [2]
    assert (driver.state(2), driver.state(3)) == (S.QUEUED, S.ENCODING)
    driver.abort(2)  # its pixels are in the tower's hands now
    driver.encoded()
    assert driver.state(3) is S.SHIPPING


def test_a_room_that_was_left_behind_gets_the_rows_when_there_is_a_share(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=20)
    driver.encoded()
    driver.request(2, n_tokens=10, content="cat")
    driver.request(3, n_tokens=10, content="cat", claimed=True)
    driver.encoded()
    assert driver.state(2) is S.QUEUED
    driver.abort(1)
    assert driver.state(2) is S.PARKED
    assert driver.pipeline.snapshot().counters["misses"] == 2


def test_a_room_left_behind_joins_the_batch_once_claimed(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=20)
    driver.encoded()
    driver.request(2, n_tokens=10, content="cat")
    driver.request(3, n_tokens=10, content="cat", claimed=True)
    driver.announce(2, make_receiver(layout=make_layout(10)))
    assert driver.state(2) is S.ENCODING
    driver.encoded()
    assert driver.state(2) is driver.state(3) is S.SHIPPING


def test_rows_larger_than_half_the_store_wait_until_claimed_and_hold_up_nobody(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=21)
    assert driver.batch is None
    driver.request(2, n_tokens=10)
    assert driver.batch_rooms == [2]
    driver.encoded()
    driver.announce(1, make_receiver(layout=make_layout(21)))
    assert driver.batch_rooms == [1]


def test_while_a_large_claimed_item_waits_no_unclaimed_room_gets_an_entry(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=10, content="a")
    driver.encoded()
    driver.request(2, n_tokens=40, claimed=True)
    assert driver.batch is None
    driver.request(3, n_tokens=5)  # would fit
    driver.request(4, n_tokens=10, content="a")  # even where the rows are there
    assert (driver.state(3), driver.state(4)) == (S.QUEUED, S.QUEUED)
    driver.request(5, n_tokens=10, content="a", claimed=True)  # ships and goes
    driver.land(5)
    driver.wait(driver.limits.park_s - 1)
    assert driver.batch is None
    driver.wait(1)  # room 1 is given up; what is larger has waited the park time at most
    assert driver.state(1) is S.FAILED
    assert driver.told(2) == [("p", Status.FAILED)]


def test_a_large_claimed_item_gets_the_store_when_it_is_free(open_driver):
    driver = open_driver(store_bytes=640)
    driver.request(1, n_tokens=10)
    driver.encoded()
    driver.wait(60)
    driver.request(2, n_tokens=40, claimed=True)
    driver.wait(60)
    assert driver.batch_rooms == [2]


def test_items_wait_in_order_for_space(open_driver):
    driver = open_driver(store_bytes=640)
    for room, n_tokens in ((1, 20), (2, 20), (3, 10), (4, 1)):
        driver.request(room, n_tokens=n_tokens, claimed=True)
    driver.encoded()
    driver.encoded()
    assert driver.batch is None
    driver.land(1)
    assert driver.batch_rooms == [3, 4]


def test_late_writes_keep_their_bytes(open_driver):
    driver = open_driver(store_bytes=640, max_quarantined_bytes=640)
    driver.request(1, n_tokens=30, content="a", claimed=True)
    driver.encoded()
    driver.miss(1, late=True)
    assert driver.pipeline.snapshot().store.pinned_bytes == 480
    assert driver.pipeline.snapshot().writes_quarantined == 1
    driver.request(2, n_tokens=20, claimed=True)
    assert driver.batch is None
    driver.request(3, n_tokens=30, content="a", claimed=True)  # a hit all the same
    driver.land(3)
    driver.settle(1)
    driver.wait(9)
    assert driver.batch is None
    driver.wait(1)
    assert driver.batch_rooms == [2]


def test_at_the_quarantine_cap_the_engine_of_the_oldest_late_write_is_retired(open_driver):
    driver = open_driver(store_bytes=640, max_quarantined_bytes=200)
    for room in (1, 2, 3):
        driver.request(room, n_tokens=10, claimed=True)
        driver.encoded()
    assert "RetireEngine" not in kinds(driver.miss(1, late=True))
    assert driver.miss(2, late=True)[-1] == do.RetireEngine(1)
    driver.settle(1, by_probe=False)
    assert driver.miss(3, late=True)[-1] == do.RetireEngine(2)
    assert driver.pipeline.snapshot().counters["engines_retired"] == 2
    driver.request(4, n_tokens=10, claimed=True)
    driver.encoded()
    assert driver.miss(4, late=True)[-1] == do.RetireEngine(3)
    for room in (2, 3, 4):
        driver.settle(room, by_probe=False)


def test_when_every_engine_is_retired_nothing_more_is_asked(open_driver):
    driver = open_driver(store_bytes=640, max_quarantined_bytes=100)
    driver.request(1, n_tokens=10, content="a", claimed=True)
    driver.encoded()
    driver.request(2, n_tokens=10, content="a", claimed=True)
    assert driver.miss(1, late=True)[-1] == do.RetireEngine(1)
    driver.settle(1, by_probe=False)
    assert driver.miss(2, late=True)[-1] == do.RetireEngine(2)
    driver.settle(2, by_probe=True)
