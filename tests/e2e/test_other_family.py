"""The other family of towers: patches of 14, windows, no deepstack; images and videos."""

import subprocess

import pytest
from tests.e2e.gateway import image_request
from tests.e2e.receiving import Receivers, tower_rows

pytestmark = pytest.mark.real

PATCH_WIDTH = 3 * 2 * 14 * 14


@pytest.fixture(scope="module")
def model(tmp_path_factory, program):
    folder = tmp_path_factory.mktemp("qwen2_5") / "tiny-qwen2-5-vl"
    command = [program("encodepool-worker"), "make-tiny-model", "--family", "qwen2_5_vl", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def other_worker(start_worker, model, shared_prefill):
    running = start_worker(model=model, drain_seconds=5)
    yield running.ready()
    assert running.stop(60) == 0, running.log_tail()


@pytest.mark.parametrize(("h", "w", "t"), [(16, 16, 1), (10, 26, 1), (4, 6, 2), (8, 8, 3)])
def test_rows_arrive(h, w, t, other_worker, shared_prefill, model, new_room, new_picture):
    room, picture = new_room(), new_picture(h, w, t=t, patch_width=PATCH_WIDTH)
    receivers = Receivers(shared_prefill, other_worker.bootstrap)
    assert other_worker.encode(image_request(room, picture)).accepted
    receivers.ask(room, picture, levels=0)
    assert receivers.verdict(room)["status"] == "Success"
    assert receivers.digest(room)["main"] == tower_rows(model)(picture).digest["main"]
    receivers.forget(room)
