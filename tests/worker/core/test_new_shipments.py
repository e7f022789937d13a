"""Frames that come after their receiver has its verdict: each is a shipment of its own."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.instructions import Outcome
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import kinds, make_item, make_layout, make_receiver, make_shards
from encodepool_worker.types import Status

OK, NO = Status.SUCCESS, Status.FAILED
S = RoomState


def concluded(out):
    return [(i.room, i.outcome, i.reason) for i in out if isinstance(i, do.Conclude)]


def ship(driver, room=7, sessions="p", **item):
    """A room whose writes are under way."""
    driver.submit(make_item(room, **item))
    driver.encoded()
    driver.announce(room, *make_shards(sessions, layout=item.get("layout")))
    assert driver.state(room) is S.SHIPPING


def test_a_frame_in_done_is_a_new_shipment(driver):
    """SMG repeats Generate up to five times with the same room and one Encode."""
    ship(driver)
    driver.land(7)
    for target in (0x10_0000, 0x77_0000):
        assert kinds(driver.announce(7, make_receiver(main_ptr=target))) == ["Write"]
        assert driver.state(7) is S.SHIPPING
        assert kinds(driver.land(7)) == ["SendStatus"]  # the room itself ended long ago
    assert kinds(driver.announce(7, make_receiver("another prefill"))) == ["Write"]
    driver.land(7, "another prefill")
    assert driver.told(7) == [("p", OK)] * 3 + [("another prefill", OK)]


def test_a_new_shipment_renews_the_tombstone(driver):
    ship(driver)
    driver.land(7)
    driver.wait(300)
    driver.announce(7, make_receiver())
    driver.land(7)
    driver.wait(300)
    assert driver.state(7) is S.DONE
    driver.wait(30)
    assert driver.state(7) is S.NEW


def test_a_frame_in_done_without_the_rows_is_answered_with_failed(open_driver):
    driver = open_driver(store_bytes=64)  # one entry; the others evict it
    for room, content in ((7, "cat"), (8, "dog"), (9, "cat")):
        driver.announce(room, make_receiver())
        driver.submit(make_item(room, content))
        driver.encoded()
        driver.land(room)
        driver.announce(7, make_receiver())
        if content == "cat":  # whoever had the rows made
            driver.land(7)
    assert driver.told(7) == [("p", OK), ("p", OK), ("p", NO), ("p", OK)]


@pytest.mark.parametrize(
    "receiver",
    [make_receiver(fanout=2), make_receiver(layout=make_layout(n_tokens=5))],
    ids=["fan-out", "contract"],
)
def test_a_wrong_frame_in_done_is_answered_with_failed(driver, receiver):
    ship(driver)
    driver.land(7)
    driver.announce(7, receiver)
    assert driver.state(7) is S.DONE
    assert driver.told(7) == [("p", OK), ("p", NO)]


def test_a_shard_without_rows_in_done_gets_success_at_once(driver):
    layout = make_layout(n_tokens=1)
    ship(driver, sessions="pq", layout=layout)
    driver.land(7)
    driver.announce(7, make_shards("pq", layout=layout)[1])
    assert driver.told(7) == [("q", OK), ("p", OK), ("q", OK)]
    assert driver.state(7) is S.DONE


def test_a_receiver_that_was_served_may_ask_again_while_others_are_served(driver):
    ship(driver, sessions="pq")
    driver.land(7, "p")
    assert kinds(driver.announce(7, make_shards("pq")[0])) == ["Write"]
    assert concluded(driver.land(7, "q")) == [(7, Outcome.SUCCESS, "")]
    assert driver.state(7) is S.SHIPPING
    driver.land(7, "p")
    assert driver.state(7) is S.DONE
    assert driver.told(7) == [("p", OK), ("q", OK), ("p", OK)]


def test_a_failed_new_shipment_is_its_receivers_alone(driver):
    ship(driver, sessions="pq")
    driver.land(7, "p")
    driver.land(7, "q")
    driver.announce(7, *make_shards("pq"))
    driver.miss(7, "p")
    assert driver.told(7)[2:] == [("p", NO)]
    driver.land(7, "q")
    assert driver.told(7)[3:] == [("q", OK)]
    assert driver.state(7) is S.DONE


def test_a_late_new_shipment_is_told_after_its_quarantine_and_holds_up_nobody(driver):
    ship(driver)
    driver.land(7)
    driver.announce(7, make_receiver())
    driver.miss(7, late=True)
    driver.announce(7, make_receiver("q"))  # one at a time, as the fan-out is 1
    assert driver.told(7)[1:] == [("q", NO)]
    driver.settle(7)
    driver.wait(10)
    assert driver.told(7)[2:] == [("p", NO)]
    assert driver.state(7) is S.DONE
    driver.announce(7, make_receiver("q"))
    driver.land(7, "q")
    assert driver.told(7)[3:] == [("q", OK)]


def test_a_new_shipment_whose_address_changes_under_way_is_told_failed(driver):
    ship(driver)
    driver.land(7)
    driver.announce(7, make_receiver())
    driver.announce(7, make_receiver())  # a repeat changes nothing
    driver.announce(7, make_receiver(main_ptr=0x66_0000))
    driver.abort(7)  # neither does an abort: the room has ended
    driver.land(7)
    assert driver.told(7) == [("p", OK), ("p", NO)]
    assert driver.state(7) is S.DONE


def test_a_request_for_a_room_that_ships_again_is_refused(driver):
    ship(driver)
    driver.land(7)
    driver.announce(7, make_receiver())
    assert kinds(driver.submit(make_item(7))) == ["Refuse", "ReturnCredit", "DropPixels"]
