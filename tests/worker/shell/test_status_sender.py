"""Status frames over real sockets: never blocking, bounded for each receiver, unused ones closed."""

import time

import pytest
import zmq

from encodepool_worker.shell.metrics import Metrics
from encodepool_worker.shell.status_sender import StatusSender
from encodepool_worker.types import Status
from encodepool_worker.wire.control import decode_status

DROPPED = "encodepool_status_dropped_total"


@pytest.fixture
def open_sender():
    opened = []
    metrics = Metrics()

    def open_it(**limits):
        sender = StatusSender(metrics, **limits)
        opened.append(sender)
        return sender, metrics

    yield open_it
    for sender in opened:
        sender.close()


@pytest.fixture
def receiver():
    context = zmq.Context()
    sockets = []

    def open_it(host="127.0.0.1"):
        socket = context.socket(zmq.PULL)
        socket.setsockopt(zmq.IPV6, 1)
        sockets.append(socket)
        port = socket.bind_to_random_port(f"tcp://{host}")
        return socket, port

    yield open_it
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def receive(socket, seconds=5):
    assert socket.poll(seconds * 1000)
    return decode_status(socket.recv_multipart())


def test_a_status_arrives_with_room_and_rank(open_sender, receiver):
    sender, _ = open_sender()
    socket, port = receiver()
    sender.send(("127.0.0.1", port), 7, Status.SUCCESS, 3)
    sender.send(("127.0.0.1", port), 8, Status.FAILED, 3)
    assert receive(socket) == (7, Status.SUCCESS, 3)
    assert receive(socket) == (8, Status.FAILED, 3)


def test_ipv6_receivers_are_reached(open_sender, receiver):
    sender, _ = open_sender()
    try:
        socket, port = receiver("[::1]")
    except zmq.ZMQError:
        pytest.skip("this machine has no IPv6")
    sender.send(("::1", port), 7, Status.SUCCESS, 3)
    assert receive(socket) == (7, Status.SUCCESS, 3)


def test_a_receiver_that_is_gone_costs_a_bounded_number_of_frames_and_nobody_else(
    open_sender, receiver, wait_until
):
    """The reference blocks for ever after 1,001 frames to a dead endpoint."""
    sender, metrics = open_sender(max_per_endpoint=10)
    gone, dead_port = receiver()
    gone.close()
    socket, port = receiver()
    started_s = time.monotonic()
    for room in range(2000):
        sender.send(("127.0.0.1", dead_port), room, Status.FAILED, 3)
    assert time.monotonic() - started_s < 2
    sender.send(("127.0.0.1", port), 5, Status.SUCCESS, 3)
    assert receive(socket) == (5, Status.SUCCESS, 3)
    wait_until(lambda: metrics.snapshot().get(DROPPED, 0) >= 1980)


def test_a_host_that_is_no_address_is_dropped_and_counted(open_sender, wait_until):
    sender, metrics = open_sender()
    sender.send(("prefill.example", 5000), 7, Status.FAILED, 3)
    wait_until(lambda: metrics.snapshot().get(DROPPED) == 1)
    assert sender.n_endpoints == 0


def test_unused_endpoints_are_closed_without_anything_else_happening(open_sender, receiver, wait_until):
    sender, _ = open_sender(unused_after_s=0.2)
    socket, port = receiver()
    sender.send(("127.0.0.1", port), 7, Status.SUCCESS, 3)
    assert receive(socket) == (7, Status.SUCCESS, 3)

    def is_closed():
        sender.close_unused()
        return sender.n_endpoints == 0

    wait_until(is_closed)
    sender.send(("127.0.0.1", port), 8, Status.SUCCESS, 3)
    assert receive(socket) == (8, Status.SUCCESS, 3)


def test_the_least_used_endpoint_makes_room_for_a_new_one(open_sender, receiver, wait_until):
    sender, _ = open_sender(max_endpoints=2)
    sockets = [receiver() for _ in range(3)]
    for room, (_, port) in enumerate(sockets):
        sender.send(("127.0.0.1", port), room, Status.SUCCESS, 3)
    for room, (socket, _) in enumerate(sockets):
        assert receive(socket)[0] == room
    assert sender.n_endpoints == 2


def test_closing_sends_what_waits(receiver):
    sender = StatusSender(Metrics())
    socket, port = receiver()
    for room in range(100):
        sender.send(("127.0.0.1", port), room, Status.FAILED, 3)
    sender.close()
    assert [receive(socket)[0] for _ in range(100)] == list(range(100))


def test_closing_does_not_wait_long_for_a_dead_receiver(receiver):
    sender = StatusSender(Metrics())
    socket, port = receiver()
    socket.close()
    sender.send(("127.0.0.1", port), 1, Status.FAILED, 3)
    started_s = time.monotonic()
    sender.close()
    assert time.monotonic() - started_s < 3


def test_more_endpoints_than_sockets_cost_frames_and_not_the_worker(open_sender, receiver, wait_until):
    """Frames name the endpoints, and anyone can send frames."""
    sender, metrics = open_sender(max_endpoints=4)
    for number in range(1, 200):
        sender.send((f"127.1.0.{number}", 5000), 7, Status.FAILED, 3)  # nobody takes them: sockets linger
    wait_until(lambda: metrics.snapshot().get(DROPPED, 0) > 0)
    socket, port = receiver()

    def arrives():
        sender.send(("127.0.0.1", port), 8, Status.SUCCESS, 3)
        return socket.poll(100)

    wait_until(arrives)
    assert receive(socket) == (8, Status.SUCCESS, 3)
