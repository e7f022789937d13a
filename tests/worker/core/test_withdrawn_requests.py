"""A request that is given up: what the frontend is told so that it can withdraw the right ones."""

from encodepool_worker.core import instructions as do
from encodepool_worker.core.instructions import Outcome
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import kinds, make_item, make_receiver
from encodepool_worker.types import Status


def admitted(out):
    return [instruction.repeated for instruction in out if isinstance(instruction, do.Admit)]


def test_only_the_first_request_of_a_room_makes_it(driver):
    assert admitted(driver.submit(make_item(7))) == [False]
    assert admitted(driver.submit(make_item(7))) == [True]
    driver.encoded()
    driver.announce(7, make_receiver())
    assert admitted(driver.submit(make_item(7))) == [True], "also while its rows are under way"
    driver.land(7)
    assert admitted(driver.submit(make_item(7))) == [], "and a room that has ended takes none"


def test_an_item_withdrawn_before_the_tower_is_never_encoded_and_its_receivers_are_told(driver):
    driver.submit(make_item(1))  # keeps the tower busy
    driver.submit(make_item(2))
    driver.announce(2, make_receiver())
    out = driver.abort(2, "its call was given up")
    assert driver.told(2) == [("p", Status.FAILED)]
    assert {"ReturnCredit", "DropPixels"} <= set(kinds(out))
    assert driver.state(2) is RoomState.FAILED
    assert "RunBatch" not in kinds(driver.encoded())


def test_an_item_withdrawn_before_the_send_is_not_sent(driver):
    driver.submit(make_item(1))
    driver.encoded()
    out = driver.abort(1, "its call was given up")
    [end] = [instruction for instruction in out if isinstance(instruction, do.Conclude)]
    assert end.outcome is Outcome.FAILED
    assert "Write" not in kinds(driver.announce(1, make_receiver()))
    assert driver.told(1) == [("p", Status.FAILED)]
