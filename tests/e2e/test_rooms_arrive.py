"""What TokenSpeed's receivers hold after a transfer from our worker is what the tower returned."""

from collections import deque

import pytest
from tests.e2e.gateway import image_request

pytestmark = pytest.mark.real


def test_one_room_arrives_byte_for_byte(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture(16, 16)
    assert worker.encode(image_request(room, picture)).accepted
    receivers.ask(room, picture)

    verdict = receivers.verdict(room)
    assert verdict["status"] == "Success", verdict
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


def test_frames_that_come_before_the_request_are_kept(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture()
    receivers.ask(room, picture)
    assert receivers.verdict(room, timeout_s=0.5)["status"] == "Timeout"  # nothing to send yet

    worker.encode(image_request(room, picture))
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


def test_rows_wait_for_a_receiver_that_comes_late(worker, receivers, new_room, new_picture, direct, wait_for):
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    wait_for(
        lambda: worker.metrics()['encodepool_store_bytes{state="held",tier="host"}'] > 0,
        what="rows in the store",
    )

    asked_at = receivers.ask(room, picture)
    verdict = receivers.verdict(room)
    assert verdict["status"] == "Success"
    assert verdict["at"] - asked_at < 1, "rows that are ready leave at once"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_prefill_ranks_hold_their_shards_of_the_item(
    tp_size, worker, receivers, new_room, new_picture, direct
):
    room, picture = new_room(), new_picture(6, 10)  # 15 rows: no rank count divides them
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, tp_size=tp_size, shard=True)

    verdict = receivers.verdict(room, tp_size=tp_size)
    assert set(verdict["ranks"].values()) == {"Success"}, verdict
    assert receivers.digest(room, tp_size=tp_size, shard=True) == direct(picture).digest
    receivers.forget(room, tp_size=tp_size)


def test_every_rank_gets_the_whole_item_when_nothing_is_sharded(
    worker, receivers, new_room, new_picture, direct
):
    room, picture = new_room(), new_picture(6, 10)
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, tp_size=4)

    assert set(receivers.verdict(room, tp_size=4)["ranks"].values()) == {"Success"}
    assert receivers.digest(room, tp_size=4) == direct(picture).digest  # refuses ranks that differ
    receivers.forget(room, tp_size=4)


def test_a_rank_without_rows_is_told_success_too(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture(2, 6)  # 3 rows for 4 ranks
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, tp_size=4, shard=True)

    assert receivers.verdict(room, tp_size=4)["ranks"] == dict.fromkeys("0123", "Success")
    assert receivers.digest(room, tp_size=4, shard=True) == direct(picture).digest
    receivers.forget(room, tp_size=4)


def test_nothing_is_sent_before_every_rank_has_spoken(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, tp_size=2, ranks=[0])
    assert receivers.verdict(room, timeout_s=0.5, tp_size=2)["status"] == "Timeout"
    assert receivers.untouched(room, tp_size=2)

    receivers.ask(room, picture, tp_size=2, ranks=[1])
    assert receivers.verdict(room, tp_size=2)["ranks"] == dict.fromkeys("01", "Success")
    assert receivers.digest(room, tp_size=2) == direct(picture).digest
    receivers.forget(room, tp_size=2)


def test_a_finished_room_is_shipped_again_to_other_memory(worker, receivers, new_room, new_picture, direct):
    """The gateway repeats Generate with the same room and only one Encode."""
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    for _ in range(3):
        receivers.ask(room, picture)  # memory is filled anew each time
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)


def test_a_frame_sent_twice_is_answered_like_one(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    receivers.ask(room, picture, times=3)
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


def test_one_image_in_many_rooms_is_encoded_once(worker, receivers, new_room, new_picture, direct, wait_for):
    def total(name):
        return sum(value for sample, value in worker.metrics().items() if sample.startswith(name))

    picture, n_rooms = new_picture(), 30
    hits, encoded = total("encodepool_hits_total"), total("encodepool_batch_items_total")
    for _ in range(n_rooms):
        room = new_room()
        worker.encode(image_request(room, picture))
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)

    wait_for(lambda: total("encodepool_hits_total") >= hits + n_rooms - 1, what="the hits to be counted")
    # The loop reports once a second, so a few items of earlier tests may be counted only now.
    assert total("encodepool_batch_items_total") - encoded < n_rooms / 2


def test_two_hundred_rooms_arrive_each_with_its_own_rows(worker, receivers, new_room, new_picture, direct):
    sizes = [(4, 4), (8, 8), (4, 12), (16, 8), (2, 2), (12, 12), (6, 10), (10, 4)]
    rooms = {new_room(): new_picture(*sizes[i % len(sizes)]) for i in range(200)}
    receivers.remote.start(
        "receive",
        address=receivers.address,
        rooms=[(room, picture.tokens) for room, picture in rooms.items()],
        hidden=256,
        dtype="torch.float32",
        levels=3,
        window=32,
    )
    in_flight = deque()
    for room, picture in rooms.items():
        if len(in_flight) >= 32:
            assert in_flight.popleft().result(30).accepted
        in_flight.append(worker.encoder.Encode.future(image_request(room, picture), timeout=30))
    assert all(call.result(30).accepted for call in in_flight)
    received = {entry["room"]: entry for entry in receivers.remote.finish()}

    assert {entry["status"] for entry in received.values()} == {"Success"}
    wrong = [
        room
        for room, picture in rooms.items()
        if direct(picture).digest != {half: received[room][half] for half in ("main", "deepstack")}
    ]
    assert wrong == []
