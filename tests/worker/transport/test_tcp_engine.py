"""The tcp engine alone: its faults, its handshake, and what it does about strangers."""

import socket
import threading
import time
from contextlib import closing

import pytest

from encodepool_worker.errors import (
    RegistrationFailed,
    TransportError,
    WriteRefused,
    WriteTimedOut,
)
from encodepool_worker.transport import tcp
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.transport.tcp_faults import Fault


@pytest.fixture
def pair(engine_of, make_region):
    """A writing and a written engine in this process, with 64 KiB each."""
    source, target = make_region(65536), make_region(65536)
    writer, written = engine_of("tcp", timeout_s=0.5), engine_of("tcp")
    writer.register(source.ptr, source.nbytes)
    written.register(target.ptr, target.nbytes)
    return writer, source, written, target


@pytest.fixture
def dial():
    """Raw connections to an engine, as a stranger would make them."""
    opened = []

    def dial(engine):
        host, port = engine.session.split(":")
        opened.append(socket.create_connection((host, int(port)), timeout=5.0))
        return opened[-1]

    yield dial
    for sock in opened:
        sock.close()


def closed_by_peer(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def hello(sock, version=tcp.VERSION):
    sock.sendall(tcp.HELLO.pack(tcp.MAGIC, version, 0))
    return tcp.HELLO.unpack(sock.recv(tcp.HELLO.size))


# --- faults


def test_a_late_write_lands_after_its_failure(pair):
    writer, source, written, target = pair
    source.fill(1)
    written.faults.plan(Fault.LATE)
    with pytest.raises(WriteTimedOut) as failure:
        writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert failure.value.released
    assert target.memory[0] == 0
    assert written.faults.land() == 1
    assert target.memory[0] == 1
    assert written.faults.land() == 0


def test_a_dropped_write_fails_at_once_and_never_lands(pair):
    writer, source, written, target = pair
    source.fill(1)
    written.faults.plan(Fault.DROP)
    with pytest.raises(WriteRefused):
        writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert target.memory[0] == 0
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert target.memory[0] == 1


def test_a_truncated_write_fails_at_once_and_leaves_half_of_it(pair):
    writer, source, written, target = pair
    source.fill(1)
    written.faults.plan(Fault.TRUNCATE)
    with pytest.raises(WriteRefused):
        writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert target.memory[:100] == b"\1" * 50 + bytes(50)


def test_a_write_that_lands_backwards_is_whole_in_the_end(pair):
    writer, source, written, target = pair
    source.memory[:20000] = bytes(i % 251 for i in range(20000))
    written.faults.plan(Fault.REORDER)
    writer.write(
        written.session, [(source.ptr, target.ptr, 9999), (source.ptr + 9999, target.ptr + 9999, 10001)]
    )
    assert target.memory[:20000] == source.memory[:20000]


def test_a_corrupted_write_succeeds_with_one_wrong_bit(pair):
    writer, source, written, target = pair
    source.fill(2)
    written.faults.plan(Fault.CORRUPT)
    writer.write(written.session, [(source.ptr, target.ptr, 100), (source.ptr, target.ptr + 200, 10)])
    assert target.memory[0:3] == b"\x03\x02\x02"
    assert target.memory[200] == 2


def test_a_duplicated_write_lands_twice(pair):
    writer, source, written, target = pair
    source.fill(2)
    written.faults.plan(Fault.DUPLICATE)
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert target.memory[0] == 2
    target.fill(0)
    assert written.faults.held == 1
    written.faults.land()
    assert target.memory[0] == 2


def test_held_bytes_are_dropped_with_their_memory(pair):
    writer, source, written, target = pair
    written.faults.plan(Fault.DUPLICATE)
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    written.unregister(target.ptr)
    assert written.faults.land() == 0


def test_a_delayed_answer_arrives_in_the_end(pair):
    writer, source, written, target = pair
    written.faults.delay(0.2)
    started_s = time.monotonic()
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert time.monotonic() - started_s >= 0.2
    written.faults.delay(0)
    writer.write(written.session, [(source.ptr, target.ptr, 100)])


def test_a_frozen_engine_answers_nothing_until_it_thaws(pair):
    writer, source, written, target = pair
    written.faults.freeze()
    with pytest.raises(WriteRefused, match="no progress"):
        writer.write(written.session, [(source.ptr, target.ptr, 100)])
    answers = []
    thread = threading.Thread(target=lambda: answers.append(writer.probe(written.session)))
    thread.start()
    written.faults.thaw()
    thread.join()
    assert answers == [True]
    writer.write(written.session, [(source.ptr, target.ptr, 100)])


def test_a_frozen_engine_can_be_closed(pair):
    writer, _, written, _ = pair
    written.faults.freeze()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(writer.probe(written.session)))
    thread.start()
    written.close()
    thread.join()
    assert answers == [False]


# --- connections


def test_connections_are_used_again(pair):
    writer, source, written, target = pair
    for _ in range(50):
        writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert sum(len(idle) for idle in writer._idle.values()) == 1


def test_a_peer_that_restarted_on_its_port_is_reached_again(pair, make_region):
    writer, source, written, target = pair
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    port = int(written.session.split(":")[1])
    written.close()
    again = TcpEngine("127.0.0.1", port=port)
    again.register(target.ptr, target.nbytes)
    source.fill(6)
    writer.write(again.session, [(source.ptr, target.ptr, 100)])
    assert target.memory[0] == 6
    again.close()


def test_connections_to_peers_that_are_gone_do_not_pile_up(pair):
    """Every receiver that starts has a session of its own, and a worker lives for weeks."""
    writer, source, written, target = pair
    for _ in range(5):
        with closing(TcpEngine()) as receiver:
            receiver.register(target.ptr, target.nbytes)
            writer.write(receiver.session, [(source.ptr, target.ptr, 100)])
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
    assert list(writer._idle) == [written.session]
    assert len(writer._open) == 1


def test_many_threads_may_write_at_once(pair):
    writer, source, written, target = pair
    source.fill(3)
    errors = []

    def write(index):
        try:
            for step in range(20):
                offset = index * 4096 + step * 100
                writer.write(written.session, [(source.ptr + offset, target.ptr + offset, 100)])
        except TransportError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(target.memory[index * 4096 + 1999] == 3 for index in range(8))


def test_an_ipv6_session_has_brackets(make_region):
    try:
        engine = TcpEngine("::1")
    except TransportError:
        pytest.skip("no IPv6 loopback on this machine")
    region = make_region(4096)
    engine.register(region.ptr, region.nbytes)
    assert engine.session.startswith("[::1]:")
    assert engine.probe(engine.session)
    engine.write(engine.session, [(region.ptr, region.ptr + 100, 10)])
    engine.close()


def test_a_port_in_use_is_an_error_at_once(engine_of):
    first = engine_of("tcp")
    with pytest.raises(TransportError, match="cannot listen"):
        TcpEngine("127.0.0.1", port=int(first.session.split(":")[1]))


def test_unregister_waits_for_a_write_that_is_landing(pair, dial):
    """A peer that stopped in the middle of its payload must not keep the memory in use."""
    _, _, written, target = pair
    sock = dial(written)
    hello(sock)
    sock.sendall(tcp.REQUEST.pack(tcp.WRITE, 1, 1) + tcp.TARGET.pack(target.ptr, 1000))
    assert tcp.VERDICT.unpack(sock.recv(tcp.VERDICT.size)) == (1, tcp.GO)
    sock.sendall(b"x" * 10)
    written.unregister(target.ptr)
    assert closed_by_peer(sock)


def test_a_closed_engine_registers_nothing(pair):
    writer, source, _, _ = pair
    writer.close()
    with pytest.raises(RegistrationFailed):
        writer.register(source.ptr + 8192, 1)
    assert not writer.probe("127.0.0.1:1")


def test_too_many_slices_are_refused(pair):
    writer, source, written, target = pair
    with pytest.raises(WriteRefused, match="slices"):
        writer.write(written.session, [(source.ptr, target.ptr, 1)] * (tcp.MAX_SLICES + 1))


# --- strangers


def test_another_version_is_refused_by_name(pair, wait_until):
    writer, source, _, _ = pair
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        sock, _ = listener.accept()
        sock.recv(tcp.HELLO.size)
        sock.sendall(tcp.HELLO.pack(tcp.MAGIC, 9, 0))
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(WriteRefused, match="version 9"):
        writer.write(f"127.0.0.1:{listener.getsockname()[1]}", [(source.ptr, 4096, 1)])
    thread.join()
    listener.close()


def test_a_stranger_of_another_version_learns_ours(pair, dial):
    sock = dial(pair[2])
    assert hello(sock, version=2) == (tcp.MAGIC, tcp.VERSION, 0)
    assert closed_by_peer(sock)


@pytest.mark.parametrize(
    "request_bytes",
    [
        tcp.REQUEST.pack(9, 1, 1),
        tcp.REQUEST.pack(tcp.WRITE, 1, 0),
        tcp.REQUEST.pack(tcp.WRITE, 1, 2**32 - 1),
    ],
)
def test_a_request_that_makes_no_sense_ends_the_conversation(pair, dial, request_bytes):
    sock = dial(pair[2])
    hello(sock)
    sock.sendall(request_bytes)
    assert closed_by_peer(sock)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (65530, 10), (0, 2**63), (2**63, 2**63)])
def test_ranges_are_checked_before_any_payload(pair, dial, offset, nbytes):
    _, _, written, target = pair
    sock = dial(written)
    hello(sock)
    address = (target.ptr + offset) % 2**64
    sock.sendall(tcp.REQUEST.pack(tcp.WRITE, 5, 1) + tcp.TARGET.pack(address, nbytes))
    assert tcp.VERDICT.unpack(sock.recv(tcp.VERDICT.size)) == (5, tcp.NOT_REGISTERED)


def test_garbage_ends_the_conversation_and_disturbs_nobody(pair, dial):
    writer, source, written, target = pair
    sock = dial(written)
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    while not closed_by_peer(sock):
        pass
    writer.write(written.session, [(source.ptr, target.ptr, 100)])
