"""One worker of two ranks and TokenSpeed's receivers: every pairing, and errors of one rank alone."""

import socket
import time

import numpy as np
import pytest
import zmq
from tests.e2e.gateway import image_request
from tests.e2e.raising_rank import COMMAND, TRIGGER
from tests.e2e.receiving import HIDDEN, LEVELS
from tests.e2e.running import HOST, RunningWorker
from tests.peers.tokenspeed.remote import PeerError

from encodepool_worker.testing import make_layout, make_receiver
from encodepool_worker.wire.control import Registration, encode_registration, encode_transfer_info

pytestmark = pytest.mark.real

N_RANKS = 2
CLOSE = 1e-4
FLOOD_S = 2.0


@pytest.fixture(scope="module")
def worker(fork, tiny_model, free_port, shared_prefill, tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    flags = {"tensor-parallel-size": N_RANKS, "store-device-mib": 64}
    running = RunningWorker(fork, COMMAND, tiny_model, folder / "log", free_port, flags)
    yield running.ready()
    assert running.stop(60) == 0, running.log_tail()


@pytest.fixture
def received(receivers, tmp_path):
    """``received(room, picture, tp_size, shard)``: (main, deepstack) of the whole item, float32."""

    def read(room, picture, tp_size, shard):
        path = tmp_path / f"{room}.npz"
        receivers.remote.call("save", room=room, path=str(path), tp_size=tp_size)
        with np.load(path) as halves:
            parts = {
                name: [halves[f"{name}.{rank}"] for rank in range(tp_size)] for name in ("main", "deepstack")
            }
        receivers.forget(room, tp_size=tp_size)
        out = []
        for name, width in (("main", HIDDEN), ("deepstack", HIDDEN * LEVELS)):
            pieces = [
                np.ascontiguousarray(piece).view(np.float32).reshape(-1, width) for piece in parts[name]
            ]
            if shard:
                out.append(np.concatenate(pieces))
            else:
                assert all(np.array_equal(pieces[0], piece) for piece in pieces), "ranks hold different rows"
                out.append(pieces[0])
        return out

    return read


def assert_close(got, rows):
    for half, wanted in zip(got, (rows.main, rows.deepstack), strict=True):
        assert np.abs(half.ravel() - np.frombuffer(wanted, np.float32)).max() < CLOSE


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_rows_of_two_ranks_arrive_at_prefill_of_two_and_four(
    tp_size, shard, worker, receivers, received, new_room, new_picture, direct
):
    first, again, picture = new_room(), new_room(), new_picture(6, 10)  # 15 rows: nothing divides them
    got = []
    for room in (first, again):  # the second from the stores
        worker.encode(image_request(room, picture))
        receivers.ask(room, picture, tp_size=tp_size, shard=shard)
        verdict = receivers.verdict(room, tp_size=tp_size)
        assert set(verdict["ranks"].values()) == {"Success"}, verdict
        got.append(received(room, picture, tp_size, shard))
    assert_close(got[0], direct(picture))
    assert all(np.array_equal(*halves) for halves in zip(*got, strict=True))


def test_a_rank_whose_receivers_want_no_rows_is_done_as_well(
    worker, receivers, received, new_room, new_picture, direct
):
    room, picture = new_room(), new_picture(2, 2)  # one row for four
    receivers.ask(room, picture, tp_size=4, shard=True)
    worker.encode(image_request(room, picture))
    assert receivers.verdict(room, tp_size=4)["ranks"] == dict.fromkeys("0123", "Success")
    assert_close(received(room, picture, 4, True), direct(picture))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_prefill_that_the_ranks_cannot_share_is_refused_by_tokenspeed(
    tp_size, worker, receivers, new_room, new_picture
):
    picture = new_picture()
    layout = {"tokens": picture.tokens, "hidden": HIDDEN, "levels": LEVELS, "dtype": "torch.float32"}
    with pytest.raises(PeerError, match="prefill_tp to be a multiple of encode_tp"):
        receivers.remote.call("ask", address=worker.bootstrap, room=new_room(), tp_size=tp_size, **layout)


def test_receivers_of_every_rank_are_told_when_their_item_fails(worker, receivers, new_room, new_picture):
    bad, good = new_room(), new_room()
    spoiled, picture = new_picture(has_nan=True), new_picture()
    for room, content in ((bad, spoiled), (good, picture)):
        receivers.ask(room, content, tp_size=4, shard=True)
        worker.encode(image_request(room, content))
    assert receivers.verdict(bad, tp_size=4)["ranks"] == dict.fromkeys("0123", "Failed")
    assert receivers.verdict(good, tp_size=4)["ranks"] == dict.fromkeys("0123", "Success")


def test_a_rank_that_raises_in_the_tower_fails_that_batch_and_nothing_else(
    worker, receivers, received, new_room, new_picture, direct
):
    for _ in range(2):
        bad, good = new_room(), new_room()
        spoiled, picture = new_picture(*TRIGGER), new_picture()
        receivers.ask(bad, spoiled, tp_size=2)
        worker.encode(image_request(bad, spoiled))
        assert receivers.verdict(bad, tp_size=2)["ranks"] == dict.fromkeys("01", "Failed")
        receivers.ask(good, picture, tp_size=2)
        worker.encode(image_request(good, picture))
        assert receivers.verdict(good, tp_size=2)["ranks"] == dict.fromkeys("01", "Success")
        assert_close(received(good, picture, 2, False), direct(picture))
    assert "rank 1 failed" in worker.log_tail(20000), "the room's reason names the rank"


def test_a_flood_at_a_followers_control_socket_holds_nobody_up(
    worker, receivers, new_room, new_picture, free_port
):
    receiver = make_receiver("nobody:1", layout=make_layout(4, HIDDEN, LEVELS), status_port=free_port())
    control = worker.control(rank=1)
    context = zmq.Context()
    flood = context.socket(zmq.PUSH)
    flood.setsockopt(zmq.LINGER, 0)
    flood.connect(f"tcp://{control}")
    host, _, port = control.rpartition(":")
    try:
        until_s = time.monotonic() + FLOOD_S
        n_served = 0
        while time.monotonic() < until_s or n_served < 3:
            for room in range(2000):
                try:
                    flood.send_multipart(encode_transfer_info(10_000 + room % 500, receiver), zmq.NOBLOCK)
                    flood.send_multipart([b"nonsense", b"x" * 100], zmq.NOBLOCK)
                    flood.send_multipart(encode_registration(Registration(f"h:{room}", HOST, 1)), zmq.NOBLOCK)
                except zmq.Again:
                    break
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\xff" * 4096)
            room, picture = new_room(), new_picture()
            receivers.ask(room, picture, tp_size=2)
            worker.encode(image_request(room, picture))
            assert set(receivers.verdict(room, tp_size=2)["ranks"].values()) == {"Success"}
            n_served += 1
    finally:
        flood.close()
        context.term()


def test_a_stranger_cannot_speak_on_the_channel_of_the_ranks(worker, wait_for):
    ports = worker.tcp_ports()
    known = {int(worker.control(rank).rpartition(":")[2]) for rank in range(N_RANKS)}
    [channel] = {port for port in ports if speaks_plain(port)} - known
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, b"1")
    stranger.setsockopt(zmq.PLAIN_USERNAME, b"rank")
    stranger.setsockopt(zmq.PLAIN_PASSWORD, b"0" * 32)
    try:
        stranger.connect(f"tcp://{HOST}:{channel}")
        stranger.send_multipart([bytes(8), b"\x80"])
        wait_for(
            lambda: worker.metrics().get("encodepool_ranks_refused_total", 0) > 0, what="he was turned away"
        )
        assert worker.process.poll() is None
    finally:
        stranger.close()
        context.term()


def speaks_plain(port):
    """Whether a ZMQ server at this port greets with the PLAIN mechanism."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    try:
        with socket.create_connection((HOST, port), timeout=2) as probe:
            probe.settimeout(0.5)
            probe.sendall(greeting)
            answer = b""
            while len(answer) < 32:
                piece = probe.recv(64)
                if not piece:
                    return False
                answer += piece
            return answer[:1] == b"\xff" and answer[12:17] == b"PLAIN"
    except OSError:
        return False
