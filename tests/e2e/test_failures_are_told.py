"""A room that fails is known to its receiver at once. Left to itself it would wait 300 s."""

import pytest
from tests.e2e.gateway import image_request

pytestmark = pytest.mark.real

TOLD_S = 3.0
"""Above the one second of the contract, for machines with two busy cores."""


def assert_failed_within(seconds, receivers, room, since_s, record_property):
    verdict = receivers.verdict(room)
    assert verdict["status"] == "Failed", verdict
    record_property("told_after_s", round(verdict["at"] - since_s, 3))
    print(f"told after {verdict['at'] - since_s:.3f} s")
    assert verdict["at"] - since_s < seconds
    assert receivers.untouched(room)


def assert_still_serves(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture)
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


def test_a_receiver_that_waits_is_told_when_the_tower_fails(
    worker, receivers, new_room, new_picture, direct, record_property, clock
):
    room, broken = new_room(), new_picture(has_nan=True)
    receivers.ask(room, broken)
    sent_at = clock()
    assert worker.encode(image_request(room, broken)).accepted  # the tower finds out, not the frontend

    assert_failed_within(TOLD_S, receivers, room, sent_at, record_property)
    receivers.forget(room)
    assert_still_serves(worker, receivers, new_room, new_picture, direct)


def test_a_receiver_that_comes_after_the_failure_is_told_too(
    worker, receivers, new_room, new_picture, record_property, wait_for
):
    room, broken = new_room(), new_picture(has_nan=True)
    worker.encode(image_request(room, broken))
    wait_for(lambda: str(room) in worker.log_tail(), what="the line of the failed room in the log")

    asked_at = receivers.ask(room, broken)
    assert_failed_within(TOLD_S, receivers, room, asked_at, record_property)
    receivers.forget(room)


def test_one_bad_image_fails_its_own_room_only(worker, receivers, new_room, new_picture, direct):
    rooms = {new_room(): new_picture(has_nan=i == 3) for i in range(8)}
    for room, picture in rooms.items():
        receivers.ask(room, picture)
    calls = [worker.encoder.Encode.future(image_request(room, p)) for room, p in rooms.items()]
    assert all(call.result(30).accepted for call in calls)

    for room, picture in rooms.items():
        expected = "Failed" if picture.has_nan else "Success"
        assert receivers.verdict(room)["status"] == expected
        if not picture.has_nan:
            assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)


CONTRACTS = {
    "hidden": {"hidden": 257},
    "dtype": {"dtype": "torch.bfloat16"},
    "span": {"span": 17},
    "range": {"row_start": 1},
    "deepstack": {"has_deepstack": False, "dst_deepstack_ptr": 0},
}


@pytest.mark.parametrize("broken", CONTRACTS)
def test_a_wrong_contract_fails_at_once_and_writes_nothing(
    broken, worker, receivers, new_room, new_picture, direct, record_property, clock
):
    room, bystander, picture = new_room(), new_room(), new_picture()
    for one in (room, bystander):
        worker.encode(image_request(one, picture))
    asked_at = receivers.ask(room, picture, announce=CONTRACTS[broken])
    receivers.ask(bystander, picture)

    assert_failed_within(TOLD_S, receivers, room, asked_at, record_property)
    assert receivers.verdict(bystander)["status"] == "Success"
    assert receivers.digest(bystander) == direct(picture).digest
    receivers.forget(room)
    receivers.forget(bystander)


@pytest.mark.parametrize(
    "second",
    [{"row_start": 9}, {"row_start": 7}, {"row_start": 8, "n_tokens": 7}],
    ids=["gap", "overlap", "short"],
)
def test_shards_that_do_not_cover_the_item_fail_every_rank(
    second, worker, receivers, new_room, new_picture, clock
):
    room, picture = new_room(), new_picture()  # 16 rows, 8 for each of two ranks
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, tp_size=2, ranks=[0], shard=True)
    asked_at = receivers.ask(
        room, picture, tp_size=2, ranks=[1], shard=True, announce={"n_tokens": 7} | second
    )

    verdict = receivers.verdict(room, tp_size=2)
    assert verdict["ranks"] == dict.fromkeys("01", "Failed"), verdict
    assert verdict["at"] - asked_at < TOLD_S
    assert receivers.untouched(room, tp_size=2)
    receivers.forget(room, tp_size=2)
