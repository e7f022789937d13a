"""What is due when, without a thread: the sender's questions to the clock."""

import pytest

from encodepool_worker.transport.deadlines import Deadlines
from encodepool_worker.transport.sender_types import Peer, Probe, SenderLimits, Unsettled

NOW_S = 1000.0
LIMITS = SenderLimits(probe_timeout_s=2.0, probe_pause_s=1.0, max_unsettled_s=60.0, max_unsettled_bytes=100)


@pytest.fixture
def due():
    return Deadlines(NOW_S, LIMITS)


def late(write_id, since_s, nbytes=10):
    return Unsettled(write_id, nbytes, engine=0, released=True, since_s=since_s)


def test_with_nothing_going_on_nothing_is_expected(due):
    assert due.unanswered([]) == []
    assert due.given_up([]) == []
    assert due.to_probe([], 0) == []
    assert due.wait_s is None


def test_a_probe_counts_as_unanswered_when_its_time_is_over(due):
    old, new = Probe(Peer("p:1"), NOW_S - 2.0), Probe(Peer("q:1"), NOW_S - 0.5)
    assert due.unanswered([old, new]) == [old]
    assert due.wait_s == 1.5


def test_a_late_write_is_given_up_after_its_time(due):
    peer = Peer("p:1", unsettled=[late(1, NOW_S - 60.0), late(2, NOW_S - 59.0)])
    assert due.given_up([peer]) == [(peer, peer.unsettled[0])]
    assert due.wait_s == 1.0


def test_late_writes_of_too_many_bytes_are_all_given_up(due):
    peers = [Peer("p:1", unsettled=[late(1, NOW_S, 60)]), Peer("q:1", unsettled=[late(2, NOW_S, 60)])]
    assert due.given_up(peers) == [(peer, peer.unsettled[0]) for peer in peers]
    assert due.wait_s == LIMITS.probe_pause_s, "an engine in use is asked for again"


def test_a_troubled_peer_is_probed_again_after_its_pause(due):
    waiting, ready, busy = Peer("p:1", probe_again_s=NOW_S + 0.25), Peer("q:1"), Peer("r:1", busy=True)
    assert due.to_probe([waiting, ready, busy], room=2) == [ready]
    assert due.wait_s == 0.25


def test_no_more_probes_begin_than_there_may_be(due):
    peers = [Peer(f"p:{number}") for number in range(3)]
    assert due.to_probe(peers, room=1) == peers[:1]
    assert due.to_probe(peers, room=0) == []
    assert due.wait_s == LIMITS.probe_pause_s


def test_what_is_past_is_due_at_once(due):
    due.look_at(NOW_S - 5.0)
    due.look_at(None)
    assert due.wait_s == 0.0
