"""What ZMQ's PUSH sends arrives as it was sent; whoever goes beyond a bound loses the connection."""

import errno
import itertools
import os
import re
import select
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.shell import zmtp
from encodepool_worker.shell.zmtp import Decoder, NotZmtp, ZmtpServer

PUSH_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH\x08Identity\x00\x00\x00\x00"
OPENING = zmtp.GREETING + bytes((4, len(PUSH_READY))) + PUSH_READY


class Ears:
    """A server in a thread, and what it heard."""

    def __init__(self, host="127.0.0.1", **bounds):
        known = {"max_parts": 16, "max_part_bytes": 4096, "max_peers": 4}
        self.messages, self.problems, self._peers = [], [], []
        self.most_at_once = 0
        self.server = ZmtpServer(host, **(known | bounds), on_problem=self.problems.append)
        self.port = self.server.port
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while True:
            wait_s = min(60.0, max(0.0, self.server.due_s() - time.monotonic()))
            if self._stop_fd in select.select([self.server, self._stop_fd], [], [], wait_s)[0]:
                self.server.close()
                return
            messages = self.server.receive()
            self.most_at_once = max(self.most_at_once, len(messages))
            self.messages += messages

    def connect(self, data=b""):
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self._peers.append(peer)
        peer.sendall(data)
        return peer

    def close(self):
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(10)
        assert not self._thread.is_alive()
        os.close(self._stop_fd)
        for peer in self._peers:
            peer.close()


@pytest.fixture
def ears():
    ears = Ears()
    yield ears
    ears.close()


@pytest.fixture
def push(ears):
    context = zmq.Context()
    link = context.socket(zmq.PUSH)
    link.setsockopt(zmq.LINGER, 0)
    link.connect(f"tcp://127.0.0.1:{ears.port}")
    yield link
    link.close()
    context.term()


def is_closed(peer):
    """The other side has hung up."""
    peer.settimeout(10)
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    peer.close()
    return True


def frame(body, more=False):
    return bytes((more, len(body))) + body


def test_messages_of_a_real_push_socket_arrive_in_order(ears, push, wait_for):
    sent = [[b"%d" % n, b"", b"x" * (n % 4096)][: n % 3 + 1] for n in range(2000)]
    for parts in sent:
        push.send_multipart(parts)
    wait_for(lambda: len(ears.messages) == len(sent))
    assert ears.messages == sent
    assert ears.problems == []


def test_many_push_sockets_are_heard_side_by_side(ears, wait_for):
    context = zmq.Context()
    links = [context.socket(zmq.PUSH) for _ in range(4)]
    for n, link in enumerate(links):
        link.connect(f"tcp://127.0.0.1:{ears.port}")
        for _ in range(50):
            link.send_multipart([b"%d" % n, b"more"])
    wait_for(lambda: len(ears.messages) == 200)
    context.destroy(linger=0)


def test_a_flood_of_tiny_messages_is_given_out_in_portions_and_others_are_heard_between(ears, wait_for):
    flood = ears.connect(OPENING)
    other = ears.connect(OPENING)
    wait_for(lambda: sum(peer.decoder.ready for peer in ears.server._peers.values()) == 2)
    n_tiny = 100_000
    sender = threading.Thread(target=flood.sendall, args=(frame(b"") * n_tiny,))
    sender.start()
    wait_for(lambda: len(ears.messages) > 1000)
    other.sendall(frame(b"and I"))
    wait_for(lambda: [b"and I"] in ears.messages)
    heard_after = ears.messages.index([b"and I"])
    sender.join()
    wait_for(lambda: len(ears.messages) == n_tiny + 1)
    assert heard_after < n_tiny, "before the flood had ended"
    assert ears.most_at_once == zmtp.MESSAGES_AT_ONCE


def test_an_address_of_version_6_is_served(wait_for):
    try:
        ears = Ears("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    context = zmq.Context()
    link = context.socket(zmq.PUSH)
    link.setsockopt(zmq.IPV6, 1)
    link.connect(f"tcp://[::1]:{ears.port}")
    link.send(b"hello")
    wait_for(lambda: ears.messages == [[b"hello"]])
    context.destroy(linger=0)
    ears.close()


TOO_MUCH = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "an older version": zmtp.SIGNATURE + b"\x01" + bytes(60),
    "another mechanism": zmtp.GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32),
    "a message before READY": zmtp.GREETING + frame(b"early"),
    "a part that is too long": OPENING + b"\x02" + (4097).to_bytes(8, "big"),
    "a part of any length": OPENING + b"\x02" + b"\xff" * 8,
    "too many parts": OPENING + frame(b"", more=True) * 1100,
    "flags nobody knows": OPENING + b"\x80\x00",
    "an error": zmtp.GREETING + frame(b"\x05ERROR\x02no").replace(b"\0", b"\4", 1),
}


@pytest.mark.parametrize("data", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_connection_that_goes_beyond_a_bound_is_closed_and_the_others_go_on(ears, push, data, wait_for):
    push.send(b"before")
    wait_for(lambda: ears.messages == [[b"before"]])
    assert is_closed(ears.connect(data))
    wait_for(lambda: len(ears.problems) == 1)
    push.send(b"after")
    wait_for(lambda: ears.messages == [[b"before"], [b"after"]])


def test_parts_beyond_those_of_interest_are_left_out(ears, push, wait_for):
    push.send_multipart([b"%d" % n for n in range(100)])
    push.send(b"next")
    wait_for(lambda: len(ears.messages) == 2)
    assert ears.messages == [[b"%d" % n for n in range(16)], [b"next"]]


def rss_mib():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def test_a_message_of_millions_of_empty_parts_costs_nothing(ears, wait_for):
    """ZMQ's own PULL socket kept 64 bytes for each of them: 16 MiB from the network became 500 MiB."""
    before = rss_mib()
    for _ in range(20):
        try:
            ears.connect(OPENING + frame(b"", more=True) * (1 << 20)).close()
        except OSError:
            pass  # hung up on while still sending
    wait_for(lambda: len(ears.problems) == 20)
    assert rss_mib() - before < 50
    assert ears.messages == []


def test_connections_are_bounded_and_those_that_say_nothing_give_way(monkeypatch, wait_for):
    ears = Ears(max_peers=2)
    silent, spoken = ears.connect(), ears.connect(OPENING)
    wait_for(lambda: any(peer.decoder.ready for peer in ears.server._peers.values()))
    assert is_closed(ears.connect()), "both are young, so there is no room"
    wait_for(lambda: ears.problems == ["2 connections are open"])
    monkeypatch.setattr(zmtp, "HANDSHAKE_S", 0.0)
    newcomer = ears.connect(OPENING + frame(b"hello"))
    wait_for(lambda: ears.messages == [[b"hello"]])
    assert is_closed(silent)
    spoken.sendall(frame(b"still here"))
    wait_for(lambda: ears.messages == [[b"hello"], [b"still here"]])
    for peer in (spoken, newcomer):
        peer.close()
    ears.close()


class ShortOfDescriptors:
    """A listening socket; while ``short`` there is no descriptor for another connection."""

    def __init__(self, listener):
        self._listener = listener
        self.short = False
        self.tries = 0

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        self.tries += 1
        if self.short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_without_file_descriptors_connections_wait_and_nobody_is_cut_off(monkeypatch, wait_for):
    make = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: ShortOfDescriptors(make(*a, **k)))
    ears = Ears()
    listener = ears.server._listener
    spoken = ears.connect(OPENING + frame(b"1"))
    wait_for(lambda: ears.messages == [[b"1"]])
    listener.short, listener.tries = True, 0
    ears.connect(OPENING + frame(b"waits"))
    wait_for(lambda: len(ears.problems) >= 2)
    assert listener.tries <= 3, "it does not ask again and again"
    spoken.sendall(frame(b"2"))
    wait_for(lambda: ears.messages == [[b"1"], [b"2"]])
    listener.short = False
    wait_for(lambda: ears.messages == [[b"1"], [b"2"], [b"waits"]])
    assert set(ears.problems) == {"a connection has to wait: Too many open files"}
    ears.close()


STREAM = OPENING + frame(b"a", more=True) + frame(b"") + frame(b"b" * 200) + b"\x02" + bytes(7) + b"\x03abc"
HEARD = [[b"a", b""], [b"b" * 200], [b"abc"]]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_bytes_may_come_in_any_pieces(cuts):
    decoder = Decoder(16, 4096)
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:stop] for start, stop in itertools.pairwise(edges)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == HEARD


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: OPENING + tail))
def test_any_bytes_are_messages_or_refused(data):
    try:
        messages = Decoder(4, 64).feed(data)
    except NotZmtp:
        return
    assert all(1 <= len(parts) <= 4 and max(map(len, parts)) <= 64 for parts in messages)
