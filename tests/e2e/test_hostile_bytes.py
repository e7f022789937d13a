"""Bytes that nobody should send: whatever arrives on whichever socket, the next good room succeeds."""

import os
import pickle
import random
import socket
import struct
from pathlib import Path

import pytest
import zmq
from tests.e2e.gateway import image_request
from tests.e2e.running import http

from encodepool_worker.wire import intake

pytestmark = pytest.mark.real

WORKER = {"drain_seconds": 5}
"""A message that is damaged into another good one is an item that nobody asks for: it holds up a drain."""

POINTER = bytes(8)
GOOD = [b"77", b"127.0.0.1", b"9", b"127.0.0.1:9", POINTER, POINTER, b"16", b"256", b"torch.float32"]
GOOD += [b"1", b"1", b"0", b"16"]

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


def mutations(frames, count, seed):
    """``count`` copies of a message, each with parts cut, flipped, dropped, doubled or grown."""
    dice = random.Random(seed)
    for _ in range(count):
        parts = [bytearray(part) for part in frames]
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(parts))
            kind = dice.randrange(5)
            if kind == 0:
                del parts[at][dice.randrange(len(parts[at]) + 1) :]
            elif kind == 1 and parts[at]:
                parts[at][dice.randrange(len(parts[at]))] ^= 1 << dice.randrange(8)
            elif kind == 2 and len(parts) > 1:
                del parts[at]
            elif kind == 3:
                parts.insert(at, bytearray(parts[at]))
            else:
                parts[at] += dice.randbytes(dice.randrange(64))
        yield [bytes(part) for part in parts]


def test_malformed_control_frames_change_nothing(worker, push, good_room_succeeds):
    good_room_succeeds()
    endpoint = f"tcp://{worker.control()}"
    push(endpoint, MALFORMED)
    push(endpoint, mutations(GOOD, 500, seed=1))
    good_room_succeeds()


def test_malformed_intake_frames_change_nothing(worker, push, good_room_succeeds):
    """The intake is the frontend's own; what else reaches it must not stop the loop."""
    endpoint = f"ipc://{worker.run_dir() / 'intake.ipc'}"
    submit = intake.encode(
        intake.Submit(
            seq=2**40,
            request_id="stranger",
            index=0,
            room=5,
            modality=intake.Modality.IMAGE,
            key=bytes(16),
            grids=((1, 2, 2),),
            n_tokens=1,
            cost=1,
            deadline_s=None,
            pixel_dtype="float32",
            pixel_shape=(4, 1536),
        ),
        bytes(4 * 1536 * 4),
    )
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
        http(f"http://{worker.bootstrap}/route", "PUT", bomb)

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
