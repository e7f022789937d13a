"""Who may write next, without threads: quick receivers beside slow, new and frozen ones."""

import pytest

from encodepool_worker.transport.sender_types import Pace, Peer, SenderLimits
from encodepool_worker.transport.turns import ASKED_AT_ONCE, Turns

LIMITS = SenderLimits(lanes=2, max_lanes=8, slow_s=0.1, lane_patience_s=0.5, probe_fresh_s=1.0)
NOW_S = 1000.0


class Play:
    """A clock, and the turns that have been taken."""

    def __init__(self):
        self.turns = Turns(LIMITS)
        self.now_s = NOW_S

    def peers(self, pace, count, answered_s=NOW_S):
        """In line, in this order."""
        made = [Peer(f"{pace.value}:{n}", pace=pace, answered_s=answered_s) for n in range(count)]
        for peer in made:
            self.turns.add(peer)
        return made

    def begin(self):
        """All who have their turn now begin a write."""
        begun = []
        while (peer := self.turns.next(self.now_s)) is not None:
            self.turns.began(peer, self.now_s)
            begun.append(peer)
        return begun

    def end(self, *peers):
        for peer in peers:
            self.turns.ended(peer, self.now_s)

    def pass_s(self, seconds):
        self.now_s += seconds


@pytest.fixture
def play():
    return Play()


def test_quick_ones_come_first_then_new_ones_then_slow_ones(play):
    slow, new, quick = (play.peers(pace, 1) for pace in (Pace.SLOW, Pace.NEW, Pace.QUICK))
    assert play.begin() == [*quick, *new, *slow]
    assert play.turns.writing == 3
    assert play.turns.waiting == 0


def test_slow_ones_have_as_many_lanes_as_quick_ones_and_none_of_theirs(play):
    slow = play.peers(Pace.SLOW, 5)
    assert play.begin() == slow[:2]
    quick = play.peers(Pace.QUICK, 3)
    assert play.begin() == quick[:2]
    play.end(quick[0], slow[0])
    assert play.begin() == [quick[2], slow[2]]


def test_a_peer_is_as_quick_as_its_last_write(play):
    [peer] = play.peers(Pace.NEW, 1)
    paces = []
    for took_s in (0.05, 0.2, 0.05):
        play.turns.add(peer)
        assert play.begin() == [peer]
        play.pass_s(took_s)
        play.end(peer)
        paces.append(peer.pace)
    assert paces == [Pace.QUICK, Pace.SLOW, Pace.QUICK]


def test_a_quick_one_whose_write_drags_on_gives_its_lane_to_another(play):
    quick = play.peers(Pace.QUICK, 4)
    assert play.begin() == quick[:2]
    play.pass_s(0.05)
    assert play.begin() == []
    play.pass_s(0.1)
    assert play.begin() == quick[2:]


def test_slow_ones_that_are_very_slow_are_joined_by_others_but_never_take_the_last_lanes(play):
    slow = play.peers(Pace.SLOW, 9)
    assert play.begin() == slow[:2]
    play.pass_s(0.3)
    assert play.begin() == []
    for count in (4, 6):
        play.pass_s(0.6)
        assert play.begin() == slow[count - 2 : count]
    play.pass_s(60.0)
    assert play.begin() == []
    quick = play.peers(Pace.QUICK, 2)
    assert play.begin() == quick
    assert play.turns.writing == LIMITS.max_lanes


def test_with_a_single_lane_everybody_has_it_in_turn():
    turns = Turns(SenderLimits(lanes=1, max_lanes=1))
    new, slow = Peer("new:1"), Peer("slow:1", pace=Pace.SLOW)
    for peer in (slow, new):
        turns.add(peer)
    for peer in (new, slow):
        assert turns.next(NOW_S) is peer
        turns.began(peer, NOW_S)
        assert turns.next(NOW_S) is None
        turns.ended(peer, NOW_S)


def test_while_as_many_writes_as_lanes_drag_on_only_who_was_heard_of_since_may_write(play):
    frozen = play.peers(Pace.QUICK, 2, answered_s=NOW_S - 0.01)
    assert play.begin() == frozen
    [healthy, unsure] = play.peers(Pace.QUICK, 2, answered_s=NOW_S - 0.01)
    assert not play.turns.must_ask(unsure, play.now_s)
    play.pass_s(0.2)
    assert play.turns.must_ask(unsure, play.now_s)
    healthy.answered_s = play.now_s - 0.15
    assert not play.turns.must_ask(healthy, play.now_s)
    play.end(frozen[0])
    assert not play.turns.must_ask(unsure, play.now_s)


def test_slow_ones_are_asked_at_most_once_a_while(play):
    play.peers(Pace.SLOW, 2)
    play.begin()
    play.pass_s(0.2)
    patient, long_silent = Peer("p:1", pace=Pace.SLOW), Peer("q:1", pace=Pace.SLOW)
    patient.answered_s, long_silent.answered_s = play.now_s - 0.9, play.now_s - 1.1
    assert not play.turns.must_ask(patient, play.now_s)
    assert play.turns.must_ask(long_silent, play.now_s)


def test_who_was_asked_on_its_turn_has_the_next_one(play):
    [asked, other] = play.peers(Pace.QUICK, 2)
    assert play.turns.next(play.now_s) is asked
    play.turns.asked(asked, play.now_s)
    play.turns.add(asked)
    assert play.begin() == [asked, other]


def test_not_everybody_is_asked_at_once(play):
    peers = play.peers(Pace.QUICK, ASKED_AT_ONCE + 3)
    for peer in peers[:ASKED_AT_ONCE]:
        assert play.turns.next(play.now_s) is peer
        play.turns.asked(peer, play.now_s)
    assert play.turns.next(play.now_s) is None
    play.turns.remove(peers[0])  # it is gone
    assert play.turns.next(play.now_s) is peers[ASKED_AT_ONCE]
    play.turns.asked(peers[ASKED_AT_ONCE], play.now_s)
    assert not play.turns.is_anyones(play.now_s)
    play.pass_s(0.2)  # those do not answer
    assert play.turns.next(play.now_s) is peers[ASKED_AT_ONCE + 1]


def test_nobody_stands_in_line_twice_or_after_its_queue_has_failed(play):
    [one, other] = play.peers(Pace.QUICK, 2)
    play.turns.add(one)
    play.turns.remove(other)
    play.turns.remove(other)
    assert play.turns.waiting == 1
    assert play.begin() == [one]
