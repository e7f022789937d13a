"""A room that fails is known to its receiver at once. Left to itself it would wait 300 s."""

import grpc
import pytest
from tests.e2e.gateway import image_request

pytestmark = pytest.mark.real

TOLD_S = 3.0
"""Above the one second of the contract, for machines with two busy cores."""


def refused(worker, request):
    """The Encode call is answered with an error, which this returns."""
    with pytest.raises(grpc.RpcError) as caught:
        worker.encode(request)
    return caught.value


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


def break_grid(request):
    grid = request.mm_inputs.items[0].model_specific_tensors["image_grid_thw"]
    grid.inline = (1).to_bytes(8, "little") + (7).to_bytes(8, "little") * 2


def break_placeholders(request):
    request.mm_inputs.items[0].placeholders[0].length += 1


def break_dtype(request):
    request.mm_inputs.items[0].encoder_input.dtype = "int64"


def break_bytes(request):
    item = request.mm_inputs.items[0].encoder_input
    item.inline = item.inline[:-2]


def make_audio(request):
    request.mm_inputs.items[0].modality = 2


def make_remote(request):
    request.mm_inputs.items[0].encoder_input.remote.transport = "nixl"


def point_outside_shared_memory(request):
    item = request.mm_inputs.items[0].encoder_input
    item.shm.name, item.shm.nbytes = "../etc/passwd", len(item.inline) or 1


def name_a_segment_that_is_not_there(request):
    item = request.mm_inputs.items[0].encoder_input
    nbytes = len(item.inline)
    item.shm.name, item.shm.nbytes = "smg-tokenspeed-0-0-0", nbytes


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (break_grid, "image_grid_thw"),
        (break_placeholders, "placeholders"),
        (break_dtype, "dtype"),
        (break_bytes, "encoder_input"),
        (make_audio, "modality"),
        (make_remote, "remote"),
        (point_outside_shared_memory, "shm"),
        (name_a_segment_that_is_not_there, "shm"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_refused_request_is_told_before_and_after_its_receiver_speaks(
    spoil, field, worker, receivers, new_room, new_picture, record_property, clock
):
    early, late, picture = new_room(), new_room(), new_picture()
    receivers.ask(early, picture)
    for room in (early, late):
        request = image_request(room, picture)
        spoil(request)
        sent_at = clock()
        error = refused(worker, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in error.details()
        if room == early:
            assert_failed_within(TOLD_S, receivers, early, sent_at, record_property)
            receivers.forget(early)

    asked_at = receivers.ask(late, picture)
    assert_failed_within(TOLD_S, receivers, late, asked_at, record_property)
    receivers.forget(late)


def test_a_bad_request_does_not_touch_a_live_room(worker, receivers, new_room, new_picture, direct):
    room, picture = new_room(), new_picture()
    worker.encode(image_request(room, picture))  # parked: nobody has asked yet
    bad = image_request(room, picture)
    break_grid(bad)
    assert refused(worker, bad).code() is grpc.StatusCode.INVALID_ARGUMENT
    other = image_request(room, new_picture(), request_id="encode-somebody-else")
    assert refused(worker, other).code() is grpc.StatusCode.INVALID_ARGUMENT

    receivers.ask(room, picture)
    assert receivers.verdict(room)["status"] == "Success"
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
