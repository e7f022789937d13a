"""What TokenSpeed's encode side leaves without an answer, blocks on, or takes although it is wrong.

Each row was seen with TokenSpeed 0.1.1. The test named beside it shows the same against its real
receivers with our worker on the other side. Rows whose fault lies in the receiver itself (it believes
any Success, and a short status frame ends its status thread) have a test that we never send such a
thing; the shipped client has tests that it is not taken in by it.
"""

import ast
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import zmq
from tests.e2e.gateway import SHM, image_request
from tests.e2e.receiving import Receivers

from encodepool_worker.types import Receiver
from encodepool_worker.wire.control import encode_transfer_info

pytestmark = pytest.mark.real

HERE = "e2e/test_where_the_reference_is_silent.py"
TOLD = "e2e/test_failures_are_told.py"
ARRIVE = "e2e/test_rooms_arrive.py"

ROWS = {
    "restarted on the same address: old frames go nowhere": [
        "e2e/test_local_pool.py::test_a_lost_group_leaves_the_list_and_returns_under_another_address"
    ],
    "room failed before the frame: no answer": [
        f"{TOLD}::test_a_receiver_that_comes_after_the_failure_is_told_too"
    ],
    "parked room reaped: the late receiver is not told": [
        f"{HERE}::test_a_receiver_that_comes_after_its_room_was_given_up_is_told"
    ],
    "parked room reaped: the one rank of two that spoke is not told": [
        f"{HERE}::test_the_one_rank_of_two_that_spoke_is_told_when_its_room_is_given_up"
    ],
    "room used twice: the second is dropped without an answer": [
        f"{HERE}::test_a_room_used_twice_is_refused_and_its_receivers_are_answered"
    ],
    "two chunks in one room: the second is lost and Success is said": [
        "e2e/test_refusals.py::test_a_live_room_is_untouched_by_whatever_names_it",
        f"{HERE}::test_a_room_used_twice_is_refused_and_its_receivers_are_answered",
    ],
    "frame repeated after Success: kept for ever, no answer": [
        f"{ARRIVE}::test_a_finished_room_is_shipped_again_to_other_memory",
        f"{ARRIVE}::test_a_frame_sent_twice_is_answered_like_one",
    ],
    "shards that stop short of the item: Success": [
        f"{TOLD}::test_shards_that_do_not_cover_the_item_fail_every_rank"
    ],
    "a status frame of two parts kills the receiver": [
        "worker/wire/test_control_frames.py::test_a_status_is_these_bytes"
    ],
    "Success without data is believed": [
        f"{ARRIVE}::test_nothing_is_sent_before_every_rank_has_spoken",
        "worker/client/test_receiver.py::test_success_of_a_rank_that_was_not_asked_is_not_believed",
    ],
    "frozen receiver: its queue blocked for 30 s, or all queues for 61 s": [
        "e2e/test_frozen_receiver.py::test_a_frozen_receiver_delays_healthy_ones_by_less_than_a_second"
    ],
    "killed receiver": ["e2e/test_frozen_receiver.py::test_a_killed_receiver_costs_its_own_room_only"],
    "status frames to a dead endpoint: after 1001 everything behind blocks": [
        f"{HERE}::test_a_status_endpoint_that_never_reads_holds_up_nobody"
    ],
    "bootstrap accepts but is silent: the receiver is blocked": [
        f"{HERE}::test_a_receiver_can_open_its_room_while_the_loop_stands_still"
    ],
    "hits overtake, the ring fills with rooms nobody asks for: 120 s": [
        f"{HERE}::test_receivers_that_ask_in_order_are_served_past_rooms_that_nobody_asks_for"
    ],
}

WORKER = {"park_seconds": 20, "store_device_mib": 1, "drain_seconds": 10}
PARK_S = 20.0
TOLD_S = 3.0
STORE_BYTES = 1 << 20
ROW_BYTES = 256 * 4 * 4
"""One token of the tiny model: 256 values of 4 bytes, and three times that for deepstack."""


def test_every_row_names_tests_that_exist():
    tests = Path(__file__).parent.parent
    known = {}
    for name in sorted({name for names in ROWS.values() for name in names}):
        file, _, function = name.partition("::")
        if file not in known:
            tree = ast.parse((tests / file).read_text())
            known[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in known[file], name


def assert_told_failed(receivers, room, since_s, **rest):
    verdict = receivers.verdict(room, **rest)
    assert verdict["status"] == "Failed", verdict
    assert verdict["at"] - since_s < TOLD_S
    assert receivers.untouched(room, **rest)
    receivers.forget(room, **rest)


@pytest.fixture
def arrives(worker, receivers, new_room, new_picture, direct):
    """A new room arrives, byte for byte; seconds from its frame to its verdict."""

    def check(picture=None, room=None):
        if room is None:
            room, picture = new_room(), picture or new_picture()
            assert worker.encode(image_request(room, picture)).accepted
        asked_at = receivers.ask(room, picture)
        verdict = receivers.verdict(room)
        assert verdict["status"] == "Success", verdict
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)
        return verdict["at"] - asked_at

    return check


@pytest.fixture(scope="module")
def left_alone(worker, shared_prefill, new_room, new_picture):
    """Two rooms that will be given up while the other stories are told.

    Nobody asks for the first, and one rank of two for the second. Also when they were encoded.
    """
    receivers, picture = Receivers(shared_prefill, worker.bootstrap), new_picture()
    rooms = new_room(), new_room()
    for room in rooms:
        worker.encode(image_request(room, picture))
    receivers.ask(rooms[1], picture, tp_size=2, ranks=[0])
    return *rooms, picture, time.monotonic()


@pytest.fixture
def ended(worker):
    """Rooms that have ended so far, with or without success."""
    return lambda: sum(n for name, n in worker.metrics().items() if name.startswith("encodepool_rooms_total"))


def test_a_room_used_twice_is_refused_and_its_receivers_are_answered(
    worker, receivers, left_alone, new_room, new_picture, arrives
):
    room, first, second = new_room(), new_picture(8, 8), new_picture(4, 4)
    worker.encode(image_request(room, first))
    for when in ("while it is open", "after it has ended"):
        with pytest.raises(grpc.RpcError) as caught:
            worker.encode(image_request(room, second, request_id="somebody-else"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, when
        assert "bootstrap_room" in caught.value.details(), when
        if when == "while it is open":
            arrives(first, room)
    # Whoever waits for the second image there is told; the rows it would get are not the ones it means.
    assert_told_failed(receivers, room, receivers.ask(room, second))


def test_a_receiver_can_open_its_room_while_the_loop_stands_still(
    worker, receivers, new_room, new_picture, direct
):
    """The bootstrap server is another process; the reference's shares one with its loop."""
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))
    [rank] = [p for p in worker.processes() if "encodepool_worker.shell" in p.cmdline()]
    rank.suspend()
    try:
        started_s = time.monotonic()
        receivers.ask(room, picture)  # asks the bootstrap server where the rank is, if it does not know
        assert time.monotonic() - started_s < 2
        assert receivers.verdict(room, timeout_s=0.5)["status"] == "Timeout"
    finally:
        rank.resume()
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)


@pytest.fixture
def announce_raw(worker):
    """Send many frames for one room that name a status endpoint of the test's."""
    context = zmq.Context()

    def send(room, status_port, count):
        link = context.socket(zmq.PUSH)
        link.setsockopt(zmq.LINGER, 10_000)
        link.setsockopt(zmq.SNDTIMEO, 10_000)
        link.connect(f"tcp://{worker.control()}")
        where = Receiver(
            session="127.0.0.1:9",
            host="127.0.0.1",
            status_port=status_port,
            main_ptr=4096,
            deepstack_ptr=4096,
            n_rows=16,
            hidden=256,
            dtype="torch.float32",
            has_deepstack=True,
            fanout=1,
            row_start=0,
            span=16,
        )
        for _ in range(count):
            link.send_multipart(encode_transfer_info(room, where))
        link.close()

    yield send
    context.term()


def test_a_status_endpoint_that_never_reads_holds_up_nobody(
    worker, new_room, new_picture, announce_raw, arrives, wait_for
):
    """The reference blocks for ever after 1,001 frames: here 3,000 to one that takes none of them."""
    dropped = "encodepool_status_dropped_total"
    room, picture = new_room(), new_picture(has_nan=True)
    worker.encode(image_request(room, picture))
    # Once it has failed, each of its frames is answered.
    wait_for(lambda: f"room={room} " in worker.log_tail(), 10, "the room to have failed")
    before = worker.metrics().get(dropped, 0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        announce_raw(room, deaf.getsockname()[1], 3000)
        delays = [arrives() for _ in range(5)]
        deadline = time.monotonic() + 10
        while worker.metrics().get(dropped, 0) - before < 1500:
            assert time.monotonic() < deadline, "what the endpoint does not take is dropped and counted"
            time.sleep(0.1)
    assert max(delays) < TOLD_S


def test_receivers_that_ask_in_order_are_served_past_rooms_that_nobody_asks_for(
    worker, receivers, new_room, new_picture, arrives
):
    """Forty rows for a store of sixteen, a third of the rooms a repeat. Each is asked for in its turn."""
    pictures = [new_picture() for _ in range(20)]
    assert sum(picture.tokens for picture in pictures) * ROW_BYTES > STORE_BYTES
    orphans = [(new_room(), new_picture()) for _ in range(20)]
    rooms = [(new_room(), pictures[i * 2 // 3]) for i in range(30)]
    for room, picture in [*rooms[:10], *orphans, *rooms[10:]]:
        assert worker.encode(image_request(room, picture)).accepted
    for room, picture in rooms:
        assert arrives(picture, room) < PARK_S


def test_rows_that_fill_the_store_take_turns(worker, receivers, new_room, new_picture, direct):
    """A store of one entry: each room waits for the one before it to be shipped."""
    rooms = {new_room(): new_picture(24, 32) for _ in range(4)}
    for room, picture in rooms.items():
        assert picture.tokens * ROW_BYTES > STORE_BYTES / 2
        receivers.ask(room, picture)
        assert worker.encode(image_request(room, picture)).accepted
    for room, picture in rooms.items():
        assert receivers.verdict(room, timeout_s=60)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)


def test_the_one_rank_of_two_that_spoke_is_told_when_its_room_is_given_up(receivers, left_alone):
    _, room, picture, encoded_s = left_alone
    verdict = receivers.verdict(room, timeout_s=PARK_S + TOLD_S, tp_size=2)
    assert verdict["status"] == "Failed", verdict
    assert PARK_S - 1 < verdict["at"] - encoded_s < PARK_S + TOLD_S
    assert receivers.untouched(room, tp_size=2)
    receivers.forget(room, tp_size=2)
    late = receivers.ask(room, picture, tp_size=2, ranks=[1])
    assert_told_failed(receivers, room, late, tp_size=2)


def test_a_receiver_that_comes_after_its_room_was_given_up_is_told(receivers, left_alone):
    """Its room was given up no later than the one above."""
    room, _, picture, _ = left_alone
    assert_told_failed(receivers, room, receivers.ask(room, picture))


class Footprint:
    """What a worker holds of the machine."""

    def __init__(self, worker):
        processes = worker.processes()
        self.files = sum(process.num_fds() for process in processes)
        self.threads = sum(process.num_threads() for process in processes)
        self.bytes = sum(process.memory_info().rss for process in processes)
        self.segments = {path.name for path in SHM.iterdir()}


def test_ten_thousand_rooms_that_nobody_asks_for_end_once_and_leave_nothing(
    worker, receivers, new_room, new_picture, arrives, ended, wait_for
):
    arrives()
    before = Footprint(worker)
    picture = new_picture(2, 2)

    def send(count):
        """The rooms of those that were accepted."""
        request, accepted = image_request(0, picture), []
        for _ in range(count):
            room = new_room()
            request.items[0].bootstrap_room, request.request_id = room, f"nobody-{room:x}"
            try:
                worker.encode(request)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # the queue may be full
                    raise
            else:
                accepted.append(room)
        return accepted

    with ThreadPoolExecutor(10) as senders:
        accepted = [room for rooms in senders.map(send, [1000] * 10) for room in rooms]
    print(f"{len(accepted)} of 10000 accepted")
    assert len(accepted) > 5000

    def all_accepted():
        return worker.metrics()['encodepool_requests_total{outcome="accepted"}']

    wait_for(lambda: ended() >= all_accepted(), PARK_S + 30, "every accepted room to end")
    time.sleep(1.5)  # the loop reports its counters once a second: an end too many would show
    assert ended() == all_accepted(), "each ends exactly once"
    samples = worker.metrics()
    assert sum(n for name, n in samples.items() if 'state="held"' in name) == 0
    assert samples["encodepool_queue_items"] == 0
    for room in accepted[:: len(accepted) // 10]:
        assert_told_failed(receivers, room, receivers.ask(room, new_picture(2, 2)))
    arrives()
    after = Footprint(worker)
    assert after.files <= before.files + 4
    assert after.threads <= before.threads + 4
    # Tombstones are kept for 330 s: half a kilobyte each.
    assert after.bytes < before.bytes + (96 << 20)
    assert after.segments <= before.segments
