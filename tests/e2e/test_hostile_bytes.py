"""Bytes that nobody should send: whatever arrives on whichever socket, the next good room succeeds."""

import os
import pickle
import random
import socket
import struct
from pathlib import Path

import grpc
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.e2e.gateway import Picture, image_request
from tests.e2e.nonsense import (
    ANNOUNCEMENT,
    SUBMIT,
    control_frames,
    encode_requests,
    intake_frames,
    mutations,
    registrations,
)
from tests.e2e.running import http

from encodepool_worker.wire import intake

pytestmark = pytest.mark.real

WORKER = {"drain_seconds": 5}
"""A message that is damaged into another good one is an item that nobody asks for: it holds up a drain."""

GOOD = ANNOUNCEMENT

MALFORMED = [
    [b""],
    [b"None"],
    [b"None", b"127.0.0.1"],
    [b"not-a-number"] * 13,
    [b"\xff\xfe"] * 13,
    [b"1"] * 12,
    [b"-1", *GOOD[1:]],
    [b"9" * 40, *GOOD[1:]],
    [b" 7_7 ", *GOOD[1:]],
    [*GOOD[:2], b"70000", *GOOD[3:]],
    [*GOOD[:3], b"", *GOOD[4:]],
    [*GOOD[:4], b"short", b"short", *GOOD[6:]],
    [*GOOD[:6], b"99999999999999999999", *GOOD[7:]],
    [*GOOD[:10], b"0", *GOOD[11:]],
    [*GOOD[:10], b"1000000", *GOOD[11:]],
    [b"x" * 1_000_000] * 13,
    [b""] * 5_000,
]


@pytest.fixture
def push():
    """``push(endpoint, messages)``: from a socket that has sent them all when it is closed."""
    context = zmq.Context()

    def send(endpoint, messages):
        link = context.socket(zmq.PUSH)
        link.setsockopt(zmq.LINGER, 5_000)
        link.setsockopt(zmq.SNDTIMEO, 5_000)
        link.connect(endpoint)
        for parts in messages:
            link.send_multipart(parts)
        link.close()

    yield send
    context.term()


@pytest.fixture
def good_room_succeeds(worker, receivers, new_room, new_picture, direct):
    def check():
        assert worker.process.poll() is None, worker.log_tail()
        room, picture = new_room(), new_picture()
        assert worker.encode(image_request(room, picture)).accepted
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)

    return check


def test_malformed_control_frames_change_nothing(worker, push, good_room_succeeds):
    good_room_succeeds()
    endpoint = f"tcp://{worker.control()}"
    push(endpoint, MALFORMED)
    push(endpoint, mutations(GOOD, 500, seed=1))
    good_room_succeeds()


def test_malformed_intake_frames_change_nothing(worker, push, good_room_succeeds):
    """The intake is the frontend's own; what else reaches it must not stop the loop."""
    endpoint = f"ipc://{worker.run_dir() / 'intake.ipc'}"
    submit = intake.encode(SUBMIT, bytes(4 * 1536 * 4))
    push(endpoint, [[b""], [b"\xc1"], [b"x" * 2_000_000], [b"{}", b"payload"], submit[:1], [b""] * 100])
    push(endpoint, mutations([bytes(part) for part in submit], 500, seed=2))
    good_room_succeeds()


def test_malformed_http_bodies_change_nothing(worker, good_room_succeeds):
    before = worker.control()
    route = f"http://{worker.bootstrap}/route"
    for body in (b"", b"{}", b"[]", b"\xff", b"[" * 50_000, b'{"role": "Prefill"}', b"x" * 10_000_000):
        assert http(route, "PUT", body)[0] in (0, 400, 413), body[:20]
    assert http(route, "POST", b"{}")[0] == 405
    assert http(route)[0] == 400
    for query in ("engine_rank=7&target_dp_group=0", "engine_rank=x&target_dp_group=0"):
        assert 400 <= http(f"{route}?{query}")[0] < 600
    assert worker.control() == before
    good_room_succeeds()


def test_bytes_that_are_no_message_at_all_leave_the_ports_serving(worker, good_room_succeeds):
    for port in (worker.grpc_port, worker.bootstrap_port, worker.metrics_port, control_port(worker)):
        for data in (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", random.Random(port).randbytes(5_000)):
            send_raw(port, data)
    good_room_succeeds()


FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The fixtures belong to the module's worker, which is meant to live through all examples."""

ENCODE = "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"


def test_any_encode_request_is_taken_or_refused_by_name(worker, good_room_succeeds):
    encode = worker.channel.unary_unary(ENCODE)
    answers = {}

    # Which examples come depends on more than the seed: of 100, some had one kind of answer too few.
    @settings(FUZZ, max_examples=300)
    @given(encode_requests())
    def send(raw):
        error = encode.future(raw, timeout=30).exception()
        field = error.details().split(": ")[0] if error else "OK"
        answers[field] = answers.get(field, 0) + 1
        assert field
        if error:
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert len(error.details()) < 500

    send()
    print(answers)
    assert len(answers) > 10, "the requests were all refused alike"
    assert "OK" in answers
    assert worker.metrics().get('encodepool_requests_total{outcome="broken"}', 0) == 0
    good_room_succeeds()


def test_any_control_frame_is_heard_or_dropped(worker, push, good_room_succeeds, wait_for):
    @FUZZ
    @given(st.lists(control_frames(), min_size=5, max_size=10))
    def send(frames):
        push(f"tcp://{worker.control()}", frames)

    def malformed():
        return worker.metrics().get("encodepool_frames_malformed_total", 0)

    before = malformed()
    send()
    good_room_succeeds()
    wait_for(lambda: malformed() > before)


def test_any_intake_frame_is_heard_or_dropped(worker, push, good_room_succeeds):
    endpoint = f"ipc://{worker.run_dir() / 'intake.ipc'}"

    @FUZZ
    @given(st.lists(intake_frames(), min_size=5, max_size=10))
    def send(messages):
        push(endpoint, messages)

    send()
    good_room_succeeds()


def test_any_registration_that_is_not_ours_is_refused(worker, good_room_succeeds):
    before = worker.control()
    statuses = set()

    @FUZZ
    @given(registrations())
    def put(body):
        status, text = http(f"http://{worker.bootstrap}/route", "PUT", body)
        assert status in (400, 409), (status, text, body)
        statuses.add(status)

    put()
    assert statuses == {400, 409}
    assert worker.control() == before
    good_room_succeeds()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def control_port(worker):
    return int(worker.control().rsplit(":", 1)[1])


def send_raw(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            link.settimeout(1)
            while link.recv(65536):
                pass
        except OSError:
            pass  # Hung up on: as it should be.


def test_a_pickle_has_no_effect_on_any_port(worker, push, good_room_succeeds, tmp_path, receivers):
    good_room_succeeds()  # all ports are open, the engine's among them
    made = tmp_path / "made-by-a-pickle"
    bombs = [pickle.dumps(Bomb(made), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    ports = worker.tcp_ports()
    assert {worker.grpc_port, worker.bootstrap_port, worker.metrics_port, control_port(worker)} <= ports
    for port in ports:
        for bomb in bombs:
            send_raw(port, bomb)
            send_raw(port, struct.pack("<Q", len(bomb)) + bomb)
    for endpoint in (f"tcp://{worker.control()}", f"ipc://{worker.run_dir() / 'intake.ipc'}"):
        push(endpoint, [[bomb] * parts for bomb in bombs for parts in (1, 2, 6, 13)])
    for bomb in bombs:
        for method in ("PUT", "POST"):
            for url in (f"http://{worker.bootstrap}/route", f"{worker.metrics_url}/metrics"):
                http(url, method, bomb)
        request = image_request(1, Picture(4, 4, 2))
        item = request.mm_inputs.items[0]
        item.content_hash, item.encoder_input.inline = bomb, bomb
        item.model_specific_tensors["image_grid_thw"].inline = bomb
        for body in (bomb, request.SerializeToString()):
            with pytest.raises(grpc.RpcError):
                worker.channel.unary_unary(ENCODE)(body, timeout=30)

    good_room_succeeds()
    assert not made.exists()
    pickle.loads(bombs[-1])  # noqa: S301 - the bomb is ours, and it works
    assert made.exists()


def test_frames_for_rooms_that_never_come_are_bounded(worker, push, good_room_succeeds):
    """More rooms than a worker keeps open: the surplus is refused, and the others still served."""
    good_room_succeeds()
    rank = max(worker.processes(), key=lambda process: process.memory_info().rss)
    before = rank.memory_info().rss
    frames = ([str(room).encode(), *GOOD[1:]] for room in range(10_000_000, 10_070_000))
    push(f"tcp://{worker.control()}", frames)
    good_room_succeeds()
    assert rank.memory_info().rss - before < 400 << 20
