"""What is refused is refused by name, its receivers hear of it at once, and nothing else changes."""

import os
import struct

import grpc
import pytest
from tests.e2e.gateway import Picture, image_request
from tests.e2e.spoiling import IF_ROOT, REFUSALS, SHM, make_segments

pytestmark = pytest.mark.real

WORKER = {"drain_seconds": 5, "store_device_mib": 1, "max_tokens_per_batch": 64, "max_queue_tokens": 64}
"""A store of sixteen pictures of 8 x 8 patches, half of it for rooms whose receivers have not spoken."""

TOLD_S = 3.0
"""Above the one second of the contract, for machines with two busy cores."""

TABLE = REFUSALS + (IF_ROOT if os.geteuid() == 0 else [])


@pytest.fixture(scope="module", autouse=True)
def segments():
    """Segments as a gateway would leave them; nobody but us may remove them."""
    made = make_segments(64 * 1536 * 2)
    yield made
    left = [path for path in made if path.is_symlink() or path.exists()]
    for path in left:
        path.unlink()
    assert left == made, "the worker unlinked a segment that was not its own"


@pytest.fixture
def refused(worker):
    """``refused(request)``: the error that the Encode call is answered with."""

    def send(request, timeout_s=30.0):
        with pytest.raises(grpc.RpcError) as caught:
            worker.encode(request, timeout_s)
        return caught.value

    return send


@pytest.fixture
def arrives(worker, receivers, new_room, new_picture, direct):
    """``arrives()``: the next good room succeeds; ``arrives(request, picture)``: this one does."""

    def check(request=None, picture=None):
        picture = picture or new_picture()
        request = request or image_request(new_room(), picture)
        room = request.items[0].bootstrap_room
        assert worker.encode(request).accepted
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)

    return check


@pytest.fixture
def is_told(receivers):
    """``is_told(room, since_s)``: its receiver hears Failed in time, and nothing was written."""

    def check(room, since_s):
        verdict = receivers.verdict(room)
        assert verdict["status"] == "Failed", verdict
        told_s = verdict["at"] - since_s
        print(f"told after {told_s:.3f} s")
        assert told_s < TOLD_S
        assert receivers.untouched(room)
        receivers.forget(room)

    return check


@pytest.mark.parametrize(("spoil", "field"), [row[1:] for row in TABLE], ids=[row.name for row in TABLE])
def test_a_bad_request_is_refused_by_its_field_and_told_before_and_after_its_receiver_speaks(
    spoil, field, refused, receivers, is_told, arrives, new_room, new_picture, clock
):
    early, late, picture = new_room(), new_room(), new_picture()
    receivers.ask(early, picture)
    for room in (early, late):
        request = image_request(room, picture)
        spoil(request)
        sent_at = clock()
        error = refused(request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().split(": ")[0] == field
        if room == early:
            is_told(early, sent_at)
    is_told(late, receivers.ask(late, picture))
    arrives()


@pytest.mark.parametrize("rooms", [[], [1, 2], [-1], [-(2**63)]], ids=str)
def test_a_request_without_one_room_in_range_is_refused_by_name(rooms, refused, new_picture, arrives):
    request = image_request(7, new_picture())
    del request.items[:]
    for room in rooms:
        request.items.add(bootstrap_room=room)
    error = refused(request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().split(": ")[0] == ("items[0].bootstrap_room" if len(rooms) == 1 else "items")
    arrives()


def test_memory_is_what_it_was_after_many_refusals(worker, refused, new_room, arrives, segments):
    picture = Picture(8, 8, 4242)

    def refuse_all():
        for row in TABLE:
            request = image_request(new_room(), picture)
            row.spoil(request)
            refused(request)

    def state():
        processes = worker.processes()
        return (
            sum(process.memory_info().rss for process in processes) >> 20,
            sum(process.num_fds() for process in processes),
            sorted(path.name for path in SHM.iterdir() if path.name.startswith(("encodepool", "smg"))),
        )

    refuse_all()
    arrives()
    rss_mib, n_fds, names = state()
    for _ in range(6):
        refuse_all()
    arrives()
    after_mib, n_fds_after, names_after = state()
    print(f"{6 * len(TABLE)} refusals: {rss_mib} -> {after_mib} MiB, {n_fds} -> {n_fds_after} descriptors")
    assert after_mib - rss_mib < 24
    assert abs(n_fds_after - n_fds) <= 4
    assert names_after == names


# --- rooms of others


def test_a_live_room_is_untouched_by_whatever_names_it(
    worker, receivers, refused, new_room, new_picture, direct
):
    """Bad requests, another's item, another's request: the room's own item still arrives."""
    room, picture = new_room(), new_picture()
    assert worker.encode(image_request(room, picture)).accepted  # parked: nobody has asked yet
    for row in TABLE:
        bad = image_request(room, picture)
        row.spoil(bad)
        assert refused(bad).code() is grpc.StatusCode.INVALID_ARGUMENT
    for other in (
        image_request(room, new_picture()),
        image_request(room, picture, request_id="encode-of-somebody-else"),
    ):
        assert refused(other).details().split(": ")[0] == "bootstrap_room"
    assert worker.encode(image_request(room, picture)).accepted, "the same again is welcome"

    receivers.ask(room, picture)
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room) == direct(picture).digest
    receivers.forget(room)
    assert refused(image_request(room, new_picture())).details().split(": ")[0] == "bootstrap_room"


def test_a_request_that_is_in_another_room_fails_the_new_room_only(
    worker, receivers, refused, is_told, new_room, new_picture, clock
):
    first, second, picture = new_room(), new_room(), new_picture()
    assert worker.encode(image_request(first, picture, request_id="encode-twice")).accepted
    receivers.ask(second, picture)
    sent_at = clock()
    error = refused(image_request(second, picture, request_id="encode-twice"))
    assert error.details().split(": ")[0] == "request_id"
    is_told(second, sent_at)
    receivers.ask(first, picture)
    assert receivers.verdict(first)["status"] == "Success"
    receivers.forget(first)


def test_one_content_hash_on_two_images_changes_nothing(new_room, new_picture, arrives):
    """The hash is the gateway's word; rows are found by what we hashed ourselves."""
    for picture in (new_picture(), new_picture()):
        request = image_request(new_room(), picture)
        request.mm_inputs.items[0].content_hash = b"forged" * 5
        arrives(request, picture)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pixels_that_are_no_numbers_fail_their_own_room(
    value, worker, receivers, is_told, new_room, new_picture, arrives, clock
):
    room, picture = new_room(), new_picture()
    request = image_request(room, picture, "float32")
    pixels = request.mm_inputs.items[0].encoder_input
    pixels.inline = struct.pack("<f", value) + pixels.inline[4:]
    receivers.ask(room, picture)
    sent_at = clock()
    assert worker.encode(request).accepted  # the tower finds out
    is_told(room, sent_at)
    arrives()


# --- no credit, too late


def test_an_item_larger_than_the_store_is_refused_and_told(
    refused, receivers, is_told, new_room, new_picture, arrives, clock
):
    room, picture = new_room(), new_picture(32, 34)
    receivers.ask(room, picture)
    sent_at = clock()
    error = refused(image_request(room, picture))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the store holds" in error.details()
    is_told(room, sent_at)
    arrives()


@pytest.fixture
def park(worker, new_room, new_picture, wait_for):
    """``park(n, timeout_s)``: rooms whose rows lie in the store; the receivers of none has spoken."""

    def fill(n, timeout_s=30.0):
        rooms = {}
        for _ in range(n):
            room, rooms[room] = (room := new_room()), new_picture()
            assert worker.encode(image_request(room, rooms[room]), timeout_s).accepted
            wait_for(lambda: worker.metrics()["encodepool_credit_tokens"] == 0, 20, "the credit")
        return rooms

    return fill


def test_without_credit_a_request_is_refused_and_told_and_everything_taken_arrives(
    worker, receivers, refused, is_told, new_room, new_picture, direct, arrives, park
):
    """Eight pictures fill their half of the store, four wait for it, the next is too much."""
    taken = park(8)
    for _ in range(4):
        room, taken[room] = (room := new_room()), new_picture()
        assert worker.encode(image_request(room, taken[room])).accepted

    room, picture = new_room(), new_picture()
    error = refused(image_request(room, picture))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "64 of 64 tokens are waiting" in error.details()
    is_told(room, receivers.ask(room, picture))

    for room, picture in taken.items():
        receivers.ask(room, picture)
    for room, picture in taken.items():
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)
    arrives()


def test_a_deadline_ends_its_room_before_the_tower(
    worker, receivers, is_told, new_room, new_picture, arrives, wait_for, park
):
    """Eight parked rooms fill their half of the store; the ninth waits for the tower in vain."""
    expired = "encodepool_expired_total"
    before = worker.metrics()[expired]
    rooms = park(8)
    room, picture = new_room(), new_picture()
    assert worker.encode(image_request(room, picture), timeout_s=3.0).accepted
    wait_for(lambda: worker.metrics()[expired] == before + 1, 20, "its deadline")
    is_told(room, receivers.ask(room, picture))
    for room, picture in rooms.items():
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        receivers.forget(room)
    arrives()


def test_a_deadline_ends_its_room_before_the_send(worker, receivers, is_told, arrives, wait_for, park):
    failed = 'encodepool_rooms_total{outcome="failed"}'
    before = worker.metrics().get(failed, 0)
    [(room, picture)] = park(1, timeout_s=3.0).items()
    wait_for(lambda: worker.metrics().get(failed, 0) == before + 1, 20, "its deadline")
    is_told(room, receivers.ask(room, picture))
    arrives()
