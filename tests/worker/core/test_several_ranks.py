"""Rooms of a group of ranks: who speaks to which rank, which rows each serves, one answer of all."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.events import BatchEncoded, BatchFailed, Demoted, DemoteFailed
from encodepool_worker.core.gather import Gather
from encodepool_worker.core.geometry import balanced_shard, block_of
from encodepool_worker.core.room import RoomState
from encodepool_worker.errors import WorkerError
from encodepool_worker.testing import make_item, make_layout, make_receiver, make_shards
from encodepool_worker.types import ByteRange, Status

LAYOUT = make_layout(7, levels=1)


@pytest.fixture
def pair(open_driver):
    return open_driver(n_ranks=2)


def failed(driver, room=1):
    """Sessions that were told, all of them Failed."""
    told = driver.told(room)
    assert {status for _, status in told} <= {Status.FAILED}
    return sorted(session for session, _ in told)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("n_ranks", "fanout"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_the_blocks_of_the_ranks_are_their_receivers_shards_end_to_end(n_tokens, n_ranks, fanout):
    reached = 0
    for rank in range(n_ranks):
        start, stop = block_of(n_tokens, n_ranks, fanout, rank)
        assert start == reached
        for shard in range(rank * fanout, (rank + 1) * fanout):
            assert balanced_shard(n_tokens, n_ranks * fanout, shard)[0] == reached
            reached = balanced_shard(n_tokens, n_ranks * fanout, shard)[1]
        assert stop == reached
    assert reached == n_tokens


def test_a_room_ships_when_the_receivers_of_every_rank_have_spoken(pair):
    p, q, r, s = make_shards("pqrs", layout=LAYOUT, n_ranks=2)
    pair.submit(make_item(1, layout=LAYOUT))
    pair.encoded()
    pair.announce(1, p, q, r)
    assert pair.state(1) is RoomState.PARKED
    pair.announce(1, s)
    ranks = {write.receiver.session: write.receiver.rank for write in pair.writes.values()}
    assert ranks == {"p": 0, "q": 0, "r": 1, "s": 1}
    for session in "pqrs":
        pair.land(1, session)
    assert pair.told(1) == [(session, Status.SUCCESS) for session in "pqrs"]
    assert pair.state(1) is RoomState.DONE


def test_one_receiver_too_many_at_a_rank_does_not_count_for_the_other(pair):
    pair.submit(make_item(1, layout=LAYOUT))
    pair.encoded()
    everything = {"layout": LAYOUT}
    pair.announce(1, make_receiver("p", **everything), make_receiver("surplus", **everything))
    assert failed(pair) == ["surplus"]
    assert pair.state(1) is RoomState.PARKED
    pair.announce(1, make_receiver("q", rank=1, **everything))
    assert {write.receiver.session for write in pair.writes.values()} == {"p", "q"}


def test_a_receiver_that_speaks_to_two_ranks_fails_its_room(pair):
    pair.submit(make_item(1, layout=LAYOUT))
    pair.announce(1, make_receiver("p", layout=LAYOUT), make_receiver("p", layout=LAYOUT, rank=1))
    assert failed(pair) == ["p"]
    assert "speaks to ranks 0 and 1" in "".join(pair.pipeline.story(1))
    pair.encoded()


@pytest.mark.parametrize(
    "rows",
    [
        [(4, 7), (0, 4)],  # the other's
        [(0, 3), (3, 7)],  # another cut
        [(0, 4), (4, 6)],  # short of the end
        [(0, 4), (7, 7)],  # nothing, where there are rows
    ],
)
def test_rows_that_are_not_their_ranks_fail_the_room(pair, rows):
    pair.submit(make_item(1, layout=LAYOUT))
    pair.encoded()
    for rank, (session, shard) in enumerate(zip("pq", rows, strict=True)):
        pair.announce(1, make_receiver(session, layout=LAYOUT, rows=shard, rank=rank))
    assert failed(pair) == ["p", "q"]
    assert "encode rank" in "".join(pair.pipeline.story(1))


def test_a_rank_whose_block_is_empty_is_served_without_a_write(pair):
    one = make_layout(1)
    pair.submit(make_item(1, layout=one))
    pair.encoded()
    pair.announce(1, *make_shards("pq", layout=one, n_ranks=2))
    assert [write.receiver.session for write in pair.writes.values()] == ["p"]
    assert pair.told(1) == [("q", Status.SUCCESS)]


# --- one answer of all ranks


BATCH = do.RunBatch(4, ())
COPY = do.Demote(9, (ByteRange(0, 1),), (ByteRange(1, 2),))


@pytest.mark.parametrize(
    ("order", "answers", "folded"),
    [
        (BATCH, [BatchEncoded(4), BatchEncoded(4)], BatchEncoded(4)),
        (
            BATCH,
            [BatchEncoded(4, {1: "bad"}), BatchEncoded(4, {1: "worse", 2: "bad"})],
            BatchEncoded(4, {1: "bad", 2: "bad"}),
        ),
        (BATCH, [BatchEncoded(4, {1: "bad"}), BatchFailed(4, "full")], BatchFailed(4, "bad; full")),
        (BATCH, [BatchFailed(4, "rank 1 failed"), BatchFailed(4, "x")], BatchFailed(4, "rank 1 failed; x")),
        (BATCH, [BatchFailed(4, "same"), BatchFailed(4, "same")], BatchFailed(4, "same")),
        (COPY, [Demoted(9), Demoted(9)], Demoted(9)),
        (COPY, [Demoted(9), DemoteFailed(9, "no")], DemoteFailed(9, "no")),
        (COPY, [DemoteFailed(9, ""), Demoted(9)], DemoteFailed(9, "failed")),
    ],
)
@pytest.mark.parametrize("order_of_arrival", [(0, 1), (1, 0)])
def test_what_failed_on_any_rank_has_failed(order, answers, folded, order_of_arrival):
    gather = Gather(2)
    gather.begin(order)
    first, last = order_of_arrival
    assert gather.add(first, answers[first]) is None
    assert gather.add(last, answers[last]) == folded
    assert len(gather) == 0


def test_an_answer_that_nobody_waits_for_is_our_own_bug():
    gather = Gather(2)
    gather.begin(BATCH)
    gather.begin(COPY)
    gather.add(0, BatchEncoded(4))
    for rank, answer in [(0, BatchEncoded(4)), (1, BatchEncoded(5)), (2, BatchEncoded(4)), (1, Demoted(4))]:
        with pytest.raises(WorkerError, match="nobody waits for"):
            gather.add(rank, answer)
    assert len(gather) == 2
