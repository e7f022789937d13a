"""Rank 0 and its followers in threads of one process, over the real channel: orders, answers, silence."""

import contextlib
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from encodepool_worker.core import instructions as do
from encodepool_worker.errors import GroupLost, WireError
from encodepool_worker.shell import follower, rank_server
from encodepool_worker.shell.metrics import Metrics
from encodepool_worker.types import Grid, Modality, Status
from encodepool_worker.wire import intake
from encodepool_worker.wire import ranks as wire

POISON, NOT_FINITE = 1000.0, 2000.0
N_TOKENS = 16
GROUP = {"tensor_parallel_size": 2, "dist_init_port": 1}


@pytest.fixture
def group(open_rig):
    return open_rig(**GROUP)


@pytest.fixture
def impatient(monkeypatch):
    """Both ends give up sooner."""
    monkeypatch.setattr(rank_server, "SILENCE_S", 2.0)
    monkeypatch.setattr(follower, "SILENCE_S", 2.0)


class Separate:
    """The rig's tower, so held up, failing or different that only one rank notices."""

    def __init__(self, tower, gate=None, error=None, more=0):
        self.spec, self.row_width = tower.spec, tower.row_width
        self.tower, self.gate, self.error, self.more = tower, gate, error, more

    def encode(self, items, *, batch=0):
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return self.tower.encode(items, batch=batch) + self.more


def test_each_rank_serves_its_receivers_from_its_own_store(open_rig, tower):
    """The ranks' rows differ here, to be told apart."""
    group = open_rig(**GROUP, follower_tower=Separate(tower, more=100))
    upper, lower = group.prefill(), group.prefill()
    _, pixels = group.submit(room=3, content=1)
    upper.announce(3, row_start=0, n_rows=8, rank=0)
    lower.announce(3, row_start=8, n_rows=8, rank=1)
    assert upper.verdict() == lower.verdict() == (3, Status.SUCCESS)
    main, deepstack = group.tower.halves(pixels)
    for prefill, first, more in ((upper, 0, 0), (lower, 8, 100)):
        for got, rows in zip(prefill.received(), (main, deepstack), strict=True):
            row = len(rows) // N_TOKENS
            wanted = np.frombuffer(rows[first * row : (first + 8) * row], np.float32) + more
            assert np.array_equal(np.frombuffer(got[: 8 * row], np.float32), wanted)
    group.wait_until(
        lambda: group.rank.loop._more_samples()["encodepool_transfer_bytes_total"] == len(main + deepstack),
        what="the follower's bytes are counted",
    )


def test_many_rooms_and_hits_arrive_from_both_ranks(group):
    prefills = [group.prefill() for _ in range(2)]
    for room in range(30):
        _, pixels = group.submit(room=room, content=room % 20)
        for rank, prefill in enumerate(prefills):
            prefill.announce(room, rank=rank)
        for prefill in prefills:
            assert prefill.verdict() == (room, Status.SUCCESS)
            assert prefill.received() == group.tower.halves(pixels)
    assert len(group.followers[0].follower._pixels) == 0


def test_an_item_without_finite_rows_fails_alone_on_all_ranks(group):
    prefill, other = group.prefill(), group.prefill()
    for room, first in ((1, NOT_FINITE), (2, None)):
        group.submit(room=room, content=room, first=first)
        for rank, one in enumerate((prefill, other)):
            one.announce(room, rank=rank)
    for one in (prefill, other):
        verdicts = {one.verdict(), one.verdict()}
        assert verdicts == {(1, Status.FAILED), (2, Status.SUCCESS)}


def test_what_fails_on_one_rank_alone_has_failed(open_rig, tower):
    group = open_rig(**GROUP, follower_tower=Separate(tower, error=RuntimeError("out of memory")))
    prefill = group.prefill()
    group.submit(room=1, content=1)
    prefill.announce(1)
    group.prefill().announce(1, rank=1)
    assert prefill.verdict() == (1, Status.FAILED)
    assert "out of memory" in "".join(group.pipeline.story(1))


def test_a_batch_is_done_when_the_last_rank_has_stored_its_rows(open_rig, tower):
    gate = threading.Event()
    group = open_rig(**GROUP, follower_tower=Separate(tower, gate=gate))
    prefill = group.prefill()
    group.submit(room=1, content=1)
    prefill.announce(1)
    group.prefill().announce(1, rank=1)
    group.wait_until(lambda: tower.batches, what="rank 0 is done")
    assert not prefill.status.poll(300), "shipped before every rank had the rows"
    gate.set()
    assert prefill.verdict() == (1, Status.SUCCESS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"incarnation": 7}, "incarnation 7, rank 0 0"), ({"tensor_parallel_size": 4}, "size 4, rank 0 2")],
)
def test_a_follower_of_another_start_is_turned_away_with_the_reason(open_rig, changes, reason):
    group = open_rig(**GROUP, stale=changes)
    [stale, _] = group.followers
    assert reason in stale.lost
    assert group.counter("encodepool_ranks_refused_total") == 1


def test_silence_ends_both_sides_with_the_reason(impatient, group, monkeypatch):
    """The follower falls silent; then rank 0's channel has ended, and that is silence as well."""
    thread = group.followers[0]
    monkeypatch.setattr(thread.follower, "_report", lambda now_s: None)
    reason = group.wait_until(lambda: group.crashes, 15, "rank 0 gives up")[0]
    assert reason.startswith("rank 1 has been silent for ")
    group.wait_until(lambda: thread.lost, 15, "the follower gives up")
    assert thread.lost.startswith("rank 0 has been silent for ")
    group.crashes.clear()


class SlowLink:
    """What a follower hears through this address comes with so many bytes a second."""

    def __init__(self, bytes_per_s):
        self.bytes_per_s = bytes_per_s
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.threads = []

    def __call__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.run(self.accept, (host, int(port)))
        return f"tcp://127.0.0.1:{self.sockets[0].getsockname()[1]}"

    def accept(self, leader):
        near, far = self.sockets[0].accept()[0], socket.create_connection(leader)
        self.sockets += [near, far]
        self.run(self.pump, near, far, 0)
        self.run(self.pump, far, near, 1 / self.bytes_per_s)

    def pump(self, source, target, s_per_byte):
        try:
            while data := source.recv(2048):
                time.sleep(len(data) * s_per_byte)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end is gone
            pass

    def run(self, target, *args):
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        self.threads[-1].start()

    def close(self):
        for thread in self.threads:
            thread.join(10)
        for one in self.sockets:
            one.close()


@pytest.fixture
def slow_link():
    link = SlowLink(bytes_per_s=30_000)
    yield link
    link.close()


def test_pixels_that_take_longer_than_a_rank_may_be_silent_end_nothing(
    slow_link, impatient, open_rig, monkeypatch
):
    monkeypatch.setattr(wire, "MAX_PIECE_BYTES", 8192)
    group = open_rig(**GROUP, via=slow_link)
    prefill, other = (group.prefill(n_tokens=1024) for _ in range(2))
    began_s = time.monotonic()
    _, pixels = group.submit(room=1, content=1, grid=Grid(1, 64, 64))
    for rank, one in enumerate((prefill, other)):
        one.announce(1, rank=rank, n_rows=1024, span=1024)
    for one in (prefill, other):
        assert one.verdict(seconds=20) == (1, Status.SUCCESS)
        assert one.received() == group.tower.halves(pixels)
    assert time.monotonic() - began_s > follower.SILENCE_S


def test_when_a_rank_is_lost_the_receivers_are_told_but_not_where_a_write_is_under_way(
    impatient, group, monkeypatch
):
    under_way, done = group.prefill(), group.prefill()
    group.submit(room=1, content=1)
    under_way.announce(1, rank=1)
    done.announce(1)
    under_way.freeze_with_a_write()
    assert done.verdict() == (1, Status.SUCCESS)
    group.tower.gate.clear()
    waiting = [group.prefill() for _ in range(3)]
    group.submit(room=2, content=2)
    for rank, one in enumerate(waiting[:2]):
        one.announce(2, rank=rank)
    waiting[2].announce(3, rank=1)  # whose request never comes
    group.hear_state(lambda state: state.batch_age_s is not None)
    monkeypatch.setattr(group.followers[0].follower, "_report", lambda now_s: None)
    for room, one in zip((2, 2, 3), waiting, strict=True):
        assert one.verdict() == (room, Status.FAILED)
    group.loop_thread.join(5)
    assert not group.loop_thread.is_alive()
    assert not under_way.status.poll(200)
    [reason] = group.crashes
    assert reason.startswith("rank 1 has been silent for ")
    group.crashes.clear()
    group.tower.gate.set()
    group.left_behind = 1  # the batch's


def test_the_receiver_of_a_write_that_the_lost_rank_never_heard_of_is_told(impatient, group, monkeypatch):
    server = group.rank.server
    send = server._send_one

    def unreachable(rank, message, *payloads):
        if isinstance(message, wire.Write):
            raise GroupLost("rank 1 cannot be reached")
        send(rank, message, *payloads)

    monkeypatch.setattr(server, "_send_one", unreachable)
    prefill = group.prefill().announce(1, rank=1)
    group.prefill().announce(1)
    group.submit(room=1, content=1)
    assert prefill.verdict() == (1, Status.FAILED)
    group.loop_thread.join(5)
    assert group.crashes == ["rank 1 cannot be reached"]
    group.crashes.clear()


def test_ranks_that_never_say_hello_end_the_start_and_are_named(tower, wait_until, monkeypatch):
    monkeypatch.setattr(rank_server, "HELLO_S", 0.3)
    expected = wire.Hello(rank=0, size=3, incarnation=1, tiers=(16,), tower=tower.spec)
    crashes = []
    server = rank_server.RankServer(
        "127.0.0.1", expected, answer=print, joined=print, metrics=Metrics(), crash=crashes.append
    )
    try:
        [reason] = wait_until(lambda: crashes)
    finally:
        server.close()
    assert reason == "rank 1 and rank 2 did not join within 0.3 s of rank 0 being ready"


def test_a_batch_that_outlives_the_drain_keeps_the_other_ranks(group, monkeypatch):
    """They used to leave rank 0 in the middle of a sum, and the drain ended as a failure."""
    thread, ended = group.followers[0], threading.Event()
    monkeypatch.setattr(thread.follower, "_say_ended", ended.set)
    group.tower.gate.clear()
    group.submit(room=1, content=1)
    group.hear_state(lambda state: state.batch_age_s is not None)
    group.tell(intake.Drain(deadline_s=time.monotonic()))
    group.loop_thread.join(10)
    closing = threading.Thread(target=group.rank.close)
    group.rank.close = lambda: closing.join(20)  # what the rig does in the end
    group.left_behind = 1  # the batch's, as the loop has ended
    closing.start()
    assert not ended.wait(0.5)
    group.tower.gate.set()
    assert ended.wait(10)


# --- messages


def a_batch():
    job = wire.JobHeader(
        entry=1,
        request_id="r",
        index=0,
        room=2**62,
        key=bytes(16),
        modality=Modality.IMAGE,
        n_tokens=1,
        cost=1,
        extents=((0, 16), (32, 48)),
        grids=((1, 2, 2),),
        dtype="float32",
        shape=(4, 6),
    )
    return wire.Batch(5, (job,))


def a_piece(start=0, nbytes=96):
    return wire.Outgoing().encode(wire.Piece(0, start), bytes(nbytes))


def test_messages_arrive_as_they_were():
    out, back = wire.Outgoing(), wire.Incoming()
    assert back.from_leader(out.encode(a_batch())) == (a_batch(), [])
    write = wire.Write(9, "host:1", ((0, 2**64 - 16, 16),))
    assert back.from_leader(out.encode(write)) == (write, [])
    assert back.from_leader(out.encode(wire.Piece(0, 4), b"some")) == (wire.Piece(0, 4), [b"some"])


@pytest.mark.parametrize("piece_bytes", [1, 7, 96, 200])
def test_pixels_are_whole_again_however_they_are_cut(piece_bytes, monkeypatch):
    monkeypatch.setattr(wire, "MAX_PIECE_BYTES", piece_bytes)
    [job] = a_batch().jobs
    nothing = msgspec.structs.replace(job, shape=(0, 6))
    sent = [b"", bytes(range(96)), b"", bytes(range(96, 192)), b""]
    arriving = wire.Assembly(wire.Batch(1, (nothing, job, nothing, job, nothing)))
    for piece, payload in wire.pieces(sent):
        assert not arriving.is_complete
        arriving.add(piece, payload)
    assert arriving.is_complete
    assert arriving.pixels == sent


@pytest.mark.parametrize("wrong", [(0, 4, 8), (1, 0, 8), (0, 0, 97), (0, 0, 0)])
def test_a_piece_that_is_not_next_or_too_long_is_an_error_of_the_wire(wrong):
    job, start, nbytes = wrong
    with pytest.raises(WireError):
        wire.Assembly(a_batch()).add(wire.Piece(job, start), memoryview(bytes(nbytes)))


@pytest.mark.parametrize("shape", [(-1, 4), (-1, -4), (1 << 60,), (1 << 26, 2)])
def test_pixels_that_no_item_may_have_are_an_error_of_the_wire(shape):
    [job] = a_batch().jobs
    with pytest.raises(WireError):
        wire.Assembly(wire.Batch(1, (msgspec.structs.replace(job, shape=shape),)))


def test_a_batch_before_the_last_pixels_of_the_one_before_ends_the_follower(impatient, group):
    thread = group.followers[0]
    group.rank.server._to_all(a_batch(), [])
    group.rank.server._to_all(a_batch(), [])
    group.wait_until(lambda: thread.lost, 10, "the follower gives up")
    assert "pixels of the one before are missing" in thread.lost
    group.wait_until(lambda: group.crashes, 10, "rank 0 gives up")
    group.crashes.clear()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:1],
        lambda frames: [frames[0][:4], *frames[1:]],
        lambda frames: [b"\x01" + bytes(7), *frames[1:]],  # one was lost
        lambda frames: [frames[0], b"\xc1", *frames[2:]],
        lambda frames: frames[:2],
        lambda frames: [*frames, b"\0"],
        lambda frames: [frames[0], wire.Outgoing().encode(wire.End())[1], *frames[2:]],
        lambda frames: [frames[0], wire.Outgoing().encode(wire.Written(1))[1]],
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_wire(spoil):
    frames = spoil(a_piece())
    with pytest.raises(WireError):
        wire.Incoming().from_leader(frames)


def test_a_follower_that_leaves_an_order_out_is_found_out_at_its_next_message(impatient, group):
    server = group.rank.server
    server._followers[1].incoming._next = 10**6
    reason = group.wait_until(lambda: group.crashes, 10, "rank 0 gives up")[0]
    assert "messages were lost" in reason
    group.crashes.clear()


def test_without_the_token_nothing_is_heard(group):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, b"1")
    stranger.setsockopt(zmq.PLAIN_USERNAME, b"rank")
    stranger.setsockopt(zmq.PLAIN_PASSWORD, group.rank.server.token[::-1].encode())
    try:
        stranger.connect(group.rank.server.address)
        with contextlib.suppress(zmq.Again):  # once he has been refused nothing takes his messages
            for _ in range(100):
                stranger.send_multipart([bytes(8), b"\x80"], zmq.NOBLOCK)
        prefill = group.prefill()
        group.submit(room=1, content=1)
        prefill.announce(1)
        group.prefill().announce(1, rank=1)
        assert prefill.verdict() == (1, Status.SUCCESS)
        group.wait_until(lambda: group.counter("encodepool_ranks_refused_total"), what="he was refused")
        assert not stranger.poll(100)
    finally:
        stranger.close()
        context.term()


def test_an_order_for_a_rank_that_has_not_joined_ends_the_group(impatient, group):
    group.rank.server._followers[1].joined = False
    group.rank.server.retire(do.RetireEngine(1, 1))
    assert "before it had joined" in group.wait_until(lambda: group.crashes, 10, "rank 0 gives up")[0]
    group.crashes.clear()


def test_registrations_are_told_of_known_receivers_once_a_second_and_of_strangers_never(group):
    """They used to share a budget, which strangers could use up."""
    told = []
    follower_of = group.followers[0].follower
    registered, follower_of._sender.registered = follower_of._sender.registered, told.append
    began_s = time.monotonic()
    try:
        prefill = group.prefill()
        group.submit(room=1, content=1)
        prefill.announce(1, rank=1)
        group.prefill().announce(1)
        assert prefill.verdict() == (1, Status.SUCCESS)
        for number in range(20_000):
            group.rank.server.registered(1, f"127.0.0.1:{number % 5000}")
            group.rank.server.registered(1, prefill.engine.session)
        group.wait_until(lambda: told, what="the known one is told")
        n_beats = 2 + (time.monotonic() - began_s) / rank_server.BEAT_S
        assert told == [prefill.engine.session] * len(told)
        assert len(told) <= n_beats
    finally:
        follower_of._sender.registered = registered
