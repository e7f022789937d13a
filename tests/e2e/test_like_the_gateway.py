"""The Encode service as SMG uses it: what it asks at registration, and how it sends an image."""

import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2
from tests.e2e.gateway import SHM, image_request, pixels_in_shared_memory
from tests.e2e.running import http

pytestmark = pytest.mark.real


@pytest.fixture
def arrives(worker, receivers, new_room, direct):
    """``arrives(request, picture)``: the request is accepted and its rows are the tower's."""

    def check(request, picture):
        assert worker.encode(request).accepted
        room = request.items[0].bootstrap_room
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)

    return check


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pixels_inline(dtype, new_room, new_picture, arrives):
    picture = new_picture(16, 16)
    arrives(image_request(new_room(), picture, dtype), picture)


def test_a_video(new_room, new_picture, arrives):
    """Three pairs of frames: its own modality and grid tensor, three times the rows of one."""
    video = new_picture(8, 12, t=3)
    request = image_request(new_room(), video)
    assert request.mm_inputs.items[0].modality == common_pb2.VIDEO
    assert video.tokens == 3 * 24
    arrives(request, video)


def test_a_video_with_a_placeholder_for_each_frame(new_room, new_picture, arrives):
    video = new_picture(8, 8, t=2)
    request = image_request(new_room(), video)
    item = request.mm_inputs.items[0]
    del item.placeholders[:]
    for offset in (7, 40):
        item.placeholders.add(offset=offset, length=16)
    arrives(request, video)


def test_pixels_in_shared_memory_are_read_before_the_answer(new_room, new_picture, arrives):
    """The gateway removes the segment as soon as Encode is answered."""
    picture = new_picture(16, 16)
    with pixels_in_shared_memory(image_request(new_room(), picture)) as request:
        name = request.mm_inputs.items[0].encoder_input.shm.name
        arrives(request, picture)
    assert not (SHM / name).exists()


def test_a_message_of_many_megabytes_is_taken(worker, receivers, new_room, new_picture):
    room, picture = new_room(), new_picture(64, 64)  # 1024 x 1024 pixels, 12 MiB
    assert worker.encode(image_request(room, picture)).accepted
    receivers.ask(room, picture)
    assert receivers.verdict(room, timeout_s=60)["status"] == "Success"
    receivers.forget(room)


def test_equal_images_in_different_rooms_each_arrive(new_room, new_picture, arrives):
    picture = new_picture()
    for _ in range(3):
        arrives(image_request(new_room(), picture), picture)


def test_the_same_request_again_is_accepted(worker, receivers, new_room, new_picture):
    room, picture = new_room(), new_picture()
    for _ in range(2):
        assert worker.encode(image_request(room, picture)).accepted
    receivers.ask(room, picture)
    assert receivers.verdict(room)["status"] == "Success"
    receivers.forget(room)


def test_model_info_names_the_model_and_how_pixels_should_come(worker, tiny_model):
    info = worker.scheduler.GetModelInfo(tokenspeed_scheduler_pb2.GetModelInfoRequest(), timeout=5)
    assert info.served_model_name == tiny_model.name
    assert info.model_path == str(tiny_model)
    assert info.supports_vision
    assert set(info.supported_modalities) == {common_pb2.IMAGE, common_pb2.VIDEO}
    assert info.multimodal_encoder_dtype in ("float32", "bfloat16", "float16")


def test_server_info_names_the_shared_memory(worker):
    """What SMG compares before it uses shared memory: <boot id>:<device of /dev/shm>."""
    info = worker.scheduler.GetServerInfo(tokenspeed_scheduler_pb2.GetServerInfoRequest(), timeout=5)
    with open("/proc/sys/kernel/random/boot_id") as boot:
        expected = f"{boot.read().strip()}:{os.stat(SHM).st_dev}"
    assert info.scheduler_info["shm_namespace_id"] == expected


def test_it_is_healthy_and_reports_its_load(worker):
    health = worker.scheduler.HealthCheck(tokenspeed_scheduler_pb2.HealthCheckRequest(), timeout=5)
    assert health.healthy
    loads = worker.scheduler.GetLoads(tokenspeed_scheduler_pb2.GetLoadsRequest(), timeout=5)
    assert len(loads.loads) == loads.dp_rank_count == 1
    standard = health_pb2_grpc.HealthStub(worker.channel)
    answer = standard.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for probe in ("livez", "readyz"):
        assert http(f"{worker.metrics_url}/{probe}")[0] == 200


def test_it_does_not_generate(worker):
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.scheduler.Generate(tokenspeed_scheduler_pb2.GenerateRequest(), timeout=5))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_other_engines_are_unknown(worker):
    """SMG asks for the health of five engines at once and takes the one that answers."""
    ask = worker.channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")
    with pytest.raises(grpc.RpcError) as caught:
        ask(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
