"""The prefill side: what it says, which verdicts it believes, and what becomes of its memory."""

import threading

import numpy as np
import pytest

from encodepool_worker.client.arena import QUARANTINE_S, Arena
from encodepool_worker.client.receiver import PrefillRank, Shard, shard_of
from encodepool_worker.errors import ClientError
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.types import RowLayout

HOST = "127.0.0.1"
WHOLE = Shard(0, 10)
SUCCESS, FAILED = 5, 0


@pytest.fixture
def open_rank():
    ranks = []

    def make(**how):
        how.setdefault("arena_bytes", 1 << 20)
        ranks.append(PrefillRank(TcpEngine(HOST), HOST, **how))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def layout_of(side, n_tokens=10):
    return RowLayout(n_tokens, side.hidden, side.levels, side.dtype)


def test_rows_come_as_they_were_sent(open_side, open_rank):
    for dtype in ("float32", "float16", "bfloat16"):
        for levels in (0, 3):
            side, rank = open_side(dtype=dtype, levels=levels), open_rank()
            offer = rank.announce(side.bootstrap, 7, layout_of(side), WHOLE, 1.0)
            main, deepstack = side.offer(7)

            rows = rank.wait(offer, 5.0)

            assert np.array_equal(rows.main, main)
            assert rows.main.dtype == (np.uint16 if dtype == "bfloat16" else dtype)
            if levels:
                assert np.array_equal(rows.deepstack, deepstack)
            else:
                assert rows.deepstack is None


def test_it_registers_once_and_announces_each_room(side, open_rank):
    rank = open_rank()
    for room in (1, 2, 2**63 - 2):
        offer = rank.announce(side.bootstrap, room, layout_of(side), WHOLE, 1.0)
        side.offer(room)
        rank.wait(offer, 5.0)

    assert [len(frames) for _, frames in side.frames] == [6, 13, 13, 13]
    registration, announcement = side.frames[0][1], side.frames[1][1]
    assert registration[0] == b"None"
    assert registration[1:4] == announcement[1:4] == [b"127.0.0.1", b"%d" % rank.status_port, registration[3]]
    assert announcement[6:] == [b"10", b"8", b"torch.float32", b"1", b"1", b"0", b"10"]


def test_ranks_receive_their_shards_from_their_encode_rank(open_side, open_rank):
    """Four receivers, two encode ranks: 0 and 1 are served by rank 0, 2 and 3 by rank 1."""
    side = open_side(tp=2)
    ranks = [open_rank(rank=number, tp_size=4) for number in range(4)]
    shards = [shard_of(10, number, 4) for number in range(4)]
    assert shards == [Shard(0, 3), Shard(3, 3), Shard(6, 2), Shard(8, 2)]
    offers = [
        rank.announce(side.bootstrap, 9, layout_of(side), shard, 1.0)
        for rank, shard in zip(ranks, shards, strict=True)
    ]
    main, deepstack = side.offer(9)

    rows = [rank.wait(offer, 5.0) for rank, offer in zip(ranks, offers, strict=True)]

    assert np.array_equal(np.concatenate([r.main for r in rows]), main)
    assert np.array_equal(np.concatenate([r.deepstack for r in rows]), deepstack)
    assert [sorted(i["row_start"] for i in side.infos(9, rank)) for rank in (0, 1)] == [[0, 3], [6, 8]]
    assert {i["fanout"] for rank in (0, 1) for i in side.infos(9, rank)} == {2}


def test_a_shard_without_rows_still_needs_its_success(side, open_rank):
    ranks = [open_rank(rank=number, tp_size=2) for number in range(2)]
    offers = [
        rank.announce(side.bootstrap, 3, layout_of(side, 1), shard_of(1, rank.rank, 2), 1.0) for rank in ranks
    ]
    side.offer(3, n_tokens=1)

    rows = [rank.wait(offer, 5.0) for rank, offer in zip(ranks, offers, strict=True)]

    assert [r.main.shape for r in rows] == [(1, 8), (0, 8)]


def test_success_of_a_rank_that_was_not_asked_is_not_believed(side, open_rank, until):
    """In the reference any Success from anyone is believed, and the rows are whatever lay there."""
    rank = open_rank()

    def lie(side, number, room, info):
        side.say(number, info, room, SUCCESS, as_rank=1)

    side.on_ship = lie
    offer = rank.announce(side.bootstrap, 4, layout_of(side), WHOLE, 1.0)
    side.offer(4)
    until(lambda: rank.counts.foreign_rank == 1)

    side.write(0, 4, side.infos(4)[0])
    side.say(0, side.infos(4)[0], 4, SUCCESS)

    assert rank.wait(offer, 5.0).main.shape == (10, 8)


def test_success_without_all_rows_written_is_an_error(side, open_rank):
    def write_one_row_less(side, number, room, info):
        side.write(number, room, {**info, "n_rows": info["n_rows"] - 1})
        side.say(number, info, room, SUCCESS)

    side.on_ship = write_one_row_less
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 5, layout_of(side), WHOLE, 1.0)
    side.offer(5)

    with pytest.raises(ClientError, match="not all of its rows were written"):
        rank.wait(offer, 5.0)


def test_the_first_verdict_counts(side, open_rank, until):
    def say_twice(side, number, room, info):
        side.write(number, room, info)
        side.say(number, info, room, SUCCESS)
        side.say(number, info, room, FAILED)

    side.on_ship = say_twice
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 6, layout_of(side), WHOLE, 1.0)
    side.offer(6)
    until(lambda: rank.counts.repeated == 1)

    assert rank.wait(offer, 5.0).main.shape == (10, 8)


def test_failed_is_an_error_at_once(side, open_rank):
    side.on_ship = lambda side, number, room, info: side.say(number, info, room, FAILED)
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 8, layout_of(side), WHOLE, 1.0)
    side.offer(8)

    with pytest.raises(ClientError, match="failed room 8"):
        rank.wait(offer, 5.0)


def test_nonsense_on_the_status_socket_does_no_harm(side, open_rank, until):
    """A two-part frame ends the reference's status thread, and with it every later transfer."""
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 11, layout_of(side), WHOLE, 1.0)
    until(lambda: side.infos(11), "the announcement")
    for frames in ([b"11"], [b"11", b"5"], [b"x", b"5", b"0"], [b"11", b"3", b"0"], [b"11", b"5", b"\xff"]):
        side.send_frames(side.infos(11)[0], frames)
    side.send_frames(side.infos(11)[0], [b"12", b"5", b"0"])
    until(lambda: (rank.counts.malformed, rank.counts.unknown_room) == (5, 1))

    main, _ = side.offer(11)

    assert np.array_equal(rank.wait(offer, 5.0).main, main)


def test_silence_is_an_error_and_the_memory_is_not_used_again(side, open_rank, until):
    """The bytes of the silent room may still come; the next room must not lie there."""
    side.on_ship = lambda *_: None
    rank = open_rank(arena_bytes=8192)
    offer = rank.announce(side.bootstrap, 12, layout_of(side), WHOLE, 1.0)
    side.offer(12)
    with pytest.raises(ClientError, match=r"no verdict within 0\.2 s"):
        rank.wait(offer, 0.2)
    second = rank.announce(side.bootstrap, 13, layout_of(side), WHOLE, 1.0)

    with pytest.raises(ClientError, match="no receive memory"):
        rank.announce(side.bootstrap, 14, layout_of(side), WHOLE, 0.1)

    until(lambda: side.infos(13), "the second announcement")
    assert side.infos(13)[0]["main"] - side.infos(12)[0]["main"] == 4096
    rank.give_up(second)


def test_the_way_is_asked_for_again_after_silence(open_side, open_rank, until):
    """In the reference a receiver keeps a dead control port for ever."""
    side = open_side()
    side.on_ship = lambda *_: None
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)
    with pytest.raises(ClientError):
        rank.wait(offer, 0.1)

    other = rank.announce(side.bootstrap, 2, layout_of(side), WHOLE, 1.0)

    until(lambda: [len(f) for _, f in side.frames] == [6, 13, 6, 13], "a second registration")
    rank.give_up(other)


def test_a_room_is_used_once(side, open_rank):
    rank = open_rank()
    rank.announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)

    with pytest.raises(ClientError, match="rooms are used once"):
        rank.announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)


def test_pairing_that_cannot_work_is_named(open_side, open_rank):
    side = open_side(tp=2)

    with pytest.raises(ClientError, match="multiple of 2"):
        open_rank(tp_size=3).announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)
    side.registered = False
    with pytest.raises(ClientError, match="no encode rank has registered"):
        open_rank(tp_size=2).announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)
    with pytest.raises(ClientError, match=r"cannot be reached .*is the pool up"):
        open_rank().announce((HOST, 1), 1, layout_of(side), WHOLE, 1.0)


def test_closing_ends_those_who_wait(side, open_rank):
    side.on_ship = lambda *_: None
    rank = open_rank()
    offer = rank.announce(side.bootstrap, 1, layout_of(side), WHOLE, 1.0)
    ended = []

    def wait():
        try:
            rank.wait(offer, 60.0)
        except ClientError as closed:
            ended.append(str(closed))

    waiter = threading.Thread(target=wait)
    waiter.start()
    rank.close()
    waiter.join(10)

    assert ended == ["the client was closed while it waited for room 1"]
    with pytest.raises(ClientError, match="closed"):
        rank.announce(side.bootstrap, 2, layout_of(side), WHOLE, 1.0)


def test_arena_hands_out_gaps_and_rests_what_failed():
    now = [0.0]
    arena = Arena(3 * 4096, clock=lambda: now[0])
    assert [arena.take(100, 0), arena.take(4096, 0), arena.take(1, 0)] == [0, 4096, 8192]
    with pytest.raises(ClientError, match="no receive memory"):
        arena.take(1, 0)

    arena.give_back(4096)
    assert arena.take(4000, 0) == 4096

    arena.settle(0)
    now[0] = QUARANTINE_S - 0.1
    with pytest.raises(ClientError, match="no receive memory"):
        arena.take(1, 0)
    now[0] = QUARANTINE_S
    assert arena.take(1, 0) == 0
    with pytest.raises(ClientError, match="--receive-mib"):
        arena.take(4 * 4096, 0)
