"""Rank 0 and its followers in threads of one process, over the real channel: orders, answers, silence."""

import threading
import time

import numpy as np
import pytest
import zmq

from encodepool_worker.core import instructions as do
from encodepool_worker.errors import WireError
from encodepool_worker.shell import follower, rank_server
from encodepool_worker.types import Modality, Status
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


def test_messages_arrive_as_they_were_and_pixels_without_a_copy():
    out, back = wire.Outgoing(), wire.Incoming()
    pixels = bytearray(96)
    frames = out.encode(a_batch(), pixels)
    assert frames[2] is pixels
    message, [payload] = back.from_leader(frames)
    assert message == a_batch()
    assert payload.obj is pixels
    write = wire.Write(9, "host:1", ((0, 2**64 - 16, 16),))
    assert back.from_leader(out.encode(write)) == (write, [])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:1],
        lambda frames: [frames[0][:4], *frames[1:]],
        lambda frames: [b"\x01" + bytes(7), *frames[1:]],  # one was lost
        lambda frames: [frames[0], b"\xc1", *frames[2:]],
        lambda frames: frames[:2],
        lambda frames: [*frames[:2], bytes(95)],
        lambda frames: [*frames, b""],
        lambda frames: [frames[0], wire.Outgoing().encode(wire.End())[1], *frames[2:]],
        lambda frames: [frames[0], wire.Outgoing().encode(wire.Written(1))[1]],
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_wire(spoil):
    frames = spoil(wire.Outgoing().encode(a_batch(), bytes(96)))
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
        for _ in range(100):
            stranger.send_multipart([bytes(8), b"\x80"])
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


def test_a_flood_of_registrations_is_told_once_a_second_each_and_no_more_than_so_many(group):
    told = []
    follower_of = group.followers[0].follower
    registered, follower_of._sender.registered = follower_of._sender.registered, told.append
    began_s = time.monotonic()
    try:
        for number in range(20_000):
            group.rank.server.registered(1, f"127.0.0.1:{number % 5000}")
        group.wait_until(lambda: told, what="the first ones are told")
        prefill = group.prefill()
        group.submit(room=1, content=1)
        prefill.announce(1)
        group.prefill().announce(1, rank=1)
        assert prefill.verdict() == (1, Status.SUCCESS)
        n_beats = 2 + (time.monotonic() - began_s) / rank_server.BEAT_S
        assert len(told) <= n_beats * rank_server.MAX_REGISTRATIONS
    finally:
        follower_of._sender.registered = registered
