"""The paragraphs of docs/states.md as stories: events in, verdicts out.

The ``driver`` fixture lets everything come to rest at the end and checks that nobody is left
untold and nothing is left held.
"""

from dataclasses import replace

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.instructions import Outcome, Write
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


def test_request_first(driver):
    assert kinds(driver.submit(make_item(7))) == ["Admit", "RunBatch"]
    assert driver.state(7) is S.ENCODING
    assert kinds(driver.encoded()) == ["ReturnCredit", "DropPixels"]
    assert driver.state(7) is S.PARKED
    assert kinds(driver.announce(7, make_receiver())) == ["Write"]
    out = driver.land(7)
    assert kinds(out) == ["SendStatus", "Conclude"]
    assert concluded(out) == [(7, Outcome.SUCCESS, "")]
    assert driver.state(7) is S.DONE
    assert driver.told(7) == [("p", OK)]


def test_receivers_first(driver):
    assert driver.announce(7, *make_shards("pq")) == []
    assert driver.state(7) is S.ANNOUNCED
    driver.submit(make_item(7))
    assert kinds(driver.encoded()) == ["ReturnCredit", "DropPixels", "Write", "Write"]
    driver.land(7, "q")
    assert driver.told(7) == [("q", OK)]
    driver.land(7, "p")
    assert driver.told(7) == [("q", OK), ("p", OK)]


def test_rows_and_deepstack_rows_are_written_together(driver):
    layout = make_layout(n_tokens=5, levels=3)
    ship(driver, sessions="pqr", layout=layout)
    assert [len(w.slices) for w in driver.writes.values()] == [2, 2, 2]
    for session in "rpq":
        driver.land(7, session)
    assert driver.state(7) is S.DONE


def test_a_shard_without_rows_gets_success_and_no_write(driver):
    layout = make_layout(n_tokens=2)
    ship(driver, sessions="pqr", layout=layout)
    assert driver.told(7) == [("r", OK)]
    assert {w.receiver.session for w in driver.writes.values()} == {"p", "q"}


def test_no_receivers_within_the_announce_time(driver):
    driver.announce(7, make_shards("pq")[0])
    out = driver.wait(driver.limits.announce_s)
    assert driver.told(7) == [("p", NO)]
    assert concluded(out) == [(7, Outcome.FAILED, "no request came for its receivers")]
    assert kinds(driver.submit(make_item(7))) == ["Refuse", "ReturnCredit", "DropPixels"]


def test_a_reaped_room_tells_every_receiver_that_spoke(driver):
    """TokenSpeed tells nobody: the rank that had registered waits for 300 s."""
    driver.submit(make_item(7))
    driver.encoded()
    driver.announce(7, make_shards("pq")[0])
    driver.wait(driver.limits.park_s - 1)
    assert driver.told(7) == []
    out = driver.wait(1)
    assert driver.told(7) == [("p", NO)]
    assert concluded(out) == [(7, Outcome.FAILED, "not all receivers spoke in time")]
    driver.announce(7, make_shards("pq")[1])
    assert driver.told(7)[1:] == [("q", NO)]


@pytest.mark.parametrize("state", [S.QUEUED, S.ENCODING, S.PARKED])
def test_the_items_deadline_holds_up_to_the_send(driver, state):
    if state is S.QUEUED:
        driver.submit(make_item(6))  # keeps the tower busy
    driver.submit(make_item(7, deadline_s=driver.clock.now_s + 5))
    if state is S.PARKED:
        driver.encoded()
    driver.announce(7, make_shards("pq")[0])
    assert driver.state(7) is state
    driver.wait(5)
    assert driver.state(7) is S.FAILED
    assert driver.told(7) == [("p", NO)]


def test_rows_made_for_a_room_that_gave_up_serve_the_next(driver):
    driver.submit(make_item(7, "cat"))
    driver.abort(7)
    driver.encoded()
    assert kinds(driver.submit(make_item(8, "cat"))) == ["Admit", "ReturnCredit", "DropPixels"]
    driver.announce(8, make_receiver())
    assert concluded(driver.land(8)) == [(8, Outcome.SUCCESS, "")]


def test_a_failed_item_fails_its_room_and_tells_who_spoke(driver):
    driver.submit(make_item(7))
    driver.announce(7, make_receiver())
    out = driver.encoded({7: "rows are not finite"})
    assert driver.told(7) == [("p", NO)]
    assert concluded(out) == [(7, Outcome.FAILED, "rows are not finite")]


def test_a_frame_for_a_failed_room_is_answered_at_once(driver):
    """Otherwise prefill waits for 300 s."""
    driver.submit(make_item(7))
    driver.encoded({7: "rows are not finite"})
    assert driver.told(7) == []  # never to a receiver that has not spoken
    for n in range(1, 4):
        driver.announce(7, make_receiver())
        assert driver.told(7) == [("p", NO)] * n


def test_a_refused_request_answers_its_receivers(driver):
    """The gateway ignores what Encode answers, so the receivers must hear it from us."""
    assert driver.refuse(7) == []
    assert driver.told(7) == []
    driver.announce(7, make_receiver())
    assert driver.told(7) == [("p", NO)]

    driver.announce(8, make_receiver())
    out = driver.refuse(8, "items: odd grid")
    assert driver.told(8) == [("p", NO)]
    assert concluded(out) == [(8, Outcome.FAILED, "request refused: items: odd grid")]


@pytest.mark.parametrize("state", [S.ENCODING, S.PARKED, S.SHIPPING, S.DONE])
def test_a_bad_request_never_touches_a_live_room(driver, state):
    driver.submit(make_item(7, "cat"))
    if state is not S.ENCODING:
        driver.encoded()
    if state in (S.SHIPPING, S.DONE):
        driver.announce(7, make_receiver())
    if state is S.DONE:
        driver.land(7)
    driver.refuse(7)
    out = driver.submit(make_item(7, "dog"))
    assert kinds(out) == ["Refuse", "ReturnCredit", "DropPixels"]
    assert out[0].field == "bootstrap_room"
    assert driver.state(7) is state


def test_the_same_request_again_is_accepted_and_encoded_once(driver):
    driver.submit(make_item(7))
    assert kinds(driver.submit(make_item(7))) == ["Admit", "ReturnCredit", "DropPixels"]
    driver.encoded()
    assert driver.batch is None
    driver.announce(7, make_receiver())
    assert kinds(driver.submit(make_item(7))) == ["Admit", "ReturnCredit", "DropPixels"]


def test_an_abort_before_the_request_refuses_it(driver):
    driver.abort(7)
    assert kinds(driver.submit(make_item(7))) == ["Refuse", "ReturnCredit", "DropPixels"]
    driver.announce(7, make_receiver())
    assert driver.told(7) == [("p", NO)]


def test_abort_while_writing_tells_when_the_write_has_answered(driver):
    ship(driver, sessions="pq")
    out = driver.abort(7)
    assert concluded(out) == [(7, Outcome.FAILED, "aborted: cancelled")]
    assert driver.state(7) is S.SETTLING
    assert driver.told(7) == []
    driver.land(7, "q")
    assert driver.told(7) == [("q", NO)]
    driver.miss(7, "p")
    assert driver.told(7) == [("q", NO), ("p", NO)]
    assert driver.state(7) is S.FAILED


def test_a_failed_write_fails_the_room_and_not_who_was_served(driver):
    ship(driver, sessions="pqr")
    driver.land(7, "p")
    out = driver.miss(7, "q", reason="connection reset")
    assert concluded(out) == [(7, Outcome.FAILED, "write to q failed: connection reset")]
    assert driver.told(7) == [("p", OK), ("q", NO)]
    driver.land(7, "r")
    assert driver.told(7) == [("p", OK), ("q", NO), ("r", NO)]


def test_after_a_late_write_the_receiver_hears_when_its_quarantine_is_over(driver):
    """Failed would let it reuse memory that the write may still reach."""
    ship(driver)
    driver.miss(7, late=True)
    assert driver.state(7) is S.QUARANTINED
    driver.wait(300)
    assert driver.told(7) == []  # the engine has not let go
    driver.settle(7, by_probe=True)
    driver.wait(9.9)
    assert driver.told(7) == []
    driver.announce(7, make_receiver())  # a repeat does not hurry it
    assert driver.told(7) == []
    driver.wait(0.1)
    assert driver.told(7) == [("p", NO)]
    assert driver.state(7) is S.FAILED


def test_with_its_engine_closed_a_quarantine_ends_ten_seconds_after_the_failure(driver):
    ship(driver)
    driver.miss(7, late=True)
    driver.wait(4)
    driver.settle(7, by_probe=False)
    driver.wait(5.9)
    assert driver.told(7) == []
    driver.wait(0.1)
    assert driver.told(7) == [("p", NO)]


def test_an_engine_closed_after_ten_seconds_ends_the_quarantine_at_once(driver):
    ship(driver)
    driver.miss(7, late=True)
    driver.wait(25)
    assert [s for i in driver.settle(7, by_probe=False) if (s := type(i).__name__)] == ["SendStatus"]


def test_a_late_write_waits_in_settling_for_the_others(driver):
    ship(driver, sessions="pq")
    driver.miss(7, "p", late=True)
    driver.settle(7, "p", by_probe=False)
    driver.wait(11)
    assert driver.state(7) is S.SETTLING
    assert driver.told(7) == [("p", NO)]
    driver.miss(7, "q", late=True)
    assert driver.state(7) is S.QUARANTINED


@pytest.mark.parametrize("early", [True, False], ids=["before the rows", "parked"])
def test_the_latest_address_of_a_waiting_receiver_counts(driver, early):
    driver.submit(make_item(7))
    if not early:
        driver.encoded()
    p, q = make_shards("pq")
    driver.announce(7, p)
    moved = replace(p, main_ptr=0x66_0000)
    assert driver.announce(7, moved) == []
    out = driver.announce(7, q)
    if early:
        out = driver.encoded()
    written = {write.receiver.session: write.receiver for write in out if isinstance(write, Write)}
    assert written == {"p": moved, "q": q}


def test_a_receiver_that_changes_its_address_under_the_write_gets_no_success(driver):
    ship(driver)
    driver.announce(7, make_receiver(main_ptr=0x66_0000))
    assert driver.state(7) is S.SETTLING
    driver.land(7)
    assert driver.told(7) == [("p", NO)]


def test_receivers_that_disagree_about_the_fan_out_fail_the_room(driver):
    driver.submit(make_item(7))
    driver.announce(7, make_receiver("p", rows=(0, 2), fanout=2))
    out = driver.announce(7, make_receiver("q", rows=(2, 4), fanout=3))
    assert concluded(out) == [(7, Outcome.FAILED, "receivers disagree: fan-out 2 and 3")]
    assert driver.told(7) == [("p", NO), ("q", NO)]


@pytest.mark.parametrize("parked", [True, False])
def test_a_surplus_receiver_is_told_failed_and_the_room_goes_on(driver, parked):
    driver.submit(make_item(7))
    driver.announce(7, make_receiver("p"))
    if parked:
        driver.encoded()
    driver.announce(7, make_receiver("q"))
    assert driver.told(7) == [("q", NO)]
    if not parked:
        driver.encoded()
    driver.land(7, "p")
    assert driver.told(7) == [("q", NO), ("p", OK)]


@pytest.mark.parametrize("item_first", [True, False])
def test_a_wrong_contract_fails_the_room_before_the_tower_runs(driver, item_first):
    driver.submit(make_item(6))  # keeps the tower busy
    wrong = make_receiver(layout=make_layout(n_tokens=5))
    if item_first:
        driver.submit(make_item(7))
        driver.announce(7, wrong)
    else:
        driver.announce(7, wrong)
        assert kinds(driver.submit(make_item(7))) == [
            "Admit",
            "SendStatus",
            "Conclude",
            "ReturnCredit",
            "DropPixels",
        ]
    assert driver.told(7) == [("p", NO)]
    driver.encoded()
    assert driver.batch is None


def test_shards_that_stop_short_of_the_item_fail_the_room(driver):
    driver.submit(make_item(7))
    driver.encoded()
    driver.announce(7, make_receiver("p", rows=(0, 2), fanout=2))
    out = driver.announce(7, make_receiver("q", rows=(2, 3), fanout=2))
    assert concluded(out) == [(7, Outcome.FAILED, "shards end at row 3, not at 4")]
    assert driver.told(7) == [("p", NO), ("q", NO)]


# --- what is left behind


def test_a_failed_room_prints_its_story(driver):
    driver.submit(make_item(7))
    driver.encoded({7: "rows are not finite"})
    assert driver.pipeline.story(7) == [
        "room 7  1000.000  Submitted(request-7#0 cost=4)  NEW -> QUEUED  Accept(seq=1), Acquire(unclaimed)",
        "room 7  1000.000  Taken()  QUEUED -> ENCODING",
        "room 7  1000.000  NotFilled(reason='rows are not finite')  ENCODING -> FAILED  "
        "End(FAILED, rows are not finite), Release()",
    ]


def test_a_story_shows_receivers_by_their_session(driver):
    ship(driver)
    driver.land(7)
    driver.announce(7, make_receiver())
    text = "\n".join(driver.pipeline.story(7))
    assert "Spoke(p rows 0+4 of 4, fan-out 1)  PARKED -> SHIPPING  Claim(), Ship(p)" in text
    assert "DONE -> SHIPPING  Reacquire(), Ship(p)" in text
    assert "Tell(p, SUCCESS), End(SUCCESS), Release()" in text


def test_the_ring_of_stories_is_bounded(open_driver):
    driver = open_driver(story_records=3)
    for room in range(5):
        driver.abort(room)
    assert driver.pipeline.story(0) == []
    assert len(driver.pipeline.story(4)) == 1
