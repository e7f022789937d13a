"""Who may write next, without threads: quick receivers beside slow, new and frozen ones."""

from dataclasses import replace

import pytest

from encodepool_worker.transport.sender_types import Pace, Peer, SenderLimits
from encodepool_worker.transport.turns import ASKED_AT_ONCE, Turns

LIMITS = SenderLimits(lanes=2, max_lanes=8, slow_s=0.1, lane_patience_s=0.5, probe_fresh_s=1.0)
NOW_S = 1000.0
ROOM = 100
"""Probes that may begin."""


class Play:
    """A clock, and the turns that have been taken."""

    def __init__(self):
        self.turns = Turns(LIMITS)
        self.now_s = NOW_S
        self.room = ROOM

    def peers(self, pace, count, answered_s=NOW_S):
        """In line, in this order."""
        made = [Peer(f"{pace.value}:{n}", pace=pace, answered_s=answered_s) for n in range(count)]
        for peer in made:
            self.turns.add(peer)
        return made

    def begin(self):
        """All who have their turn now begin a write."""
        begun = []
        while (peer := self.turns.next(self.now_s, self.room)) is not None:
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
        assert turns.next(NOW_S, ROOM) is peer
        turns.began(peer, NOW_S)
        assert turns.next(NOW_S, ROOM) is None
        turns.ended(peer, NOW_S)


def test_while_as_many_writes_as_lanes_drag_on_only_who_was_heard_of_since_may_write(play):
    frozen = play.peers(Pace.QUICK, 2, answered_s=NOW_S - 0.01)
    assert play.begin() == frozen
    [healthy, unsure] = play.peers(Pace.QUICK, 2, answered_s=NOW_S - 0.01)
    assert not play.turns.must_ask(unsure, play.now_s, play.room)
    play.pass_s(0.2)
    assert play.turns.must_ask(unsure, play.now_s, play.room)
    healthy.answered_s = play.now_s - 0.15
    assert not play.turns.must_ask(healthy, play.now_s, play.room)
    play.end(frozen[0])
    assert not play.turns.must_ask(unsure, play.now_s, play.room)


def test_slow_ones_are_asked_at_most_once_a_while(play):
    play.peers(Pace.SLOW, 2)
    play.begin()
    play.pass_s(0.2)
    patient, long_silent = Peer("p:1", pace=Pace.SLOW), Peer("q:1", pace=Pace.SLOW)
    patient.answered_s, long_silent.answered_s = play.now_s - 0.9, play.now_s - 1.1
    assert not play.turns.must_ask(patient, play.now_s, play.room)
    assert play.turns.must_ask(long_silent, play.now_s, play.room)


def test_who_was_asked_on_its_turn_has_the_next_one(play):
    [asked, other] = play.peers(Pace.QUICK, 2)
    assert play.turns.next(play.now_s, play.room) is asked
    play.turns.asked(asked, play.now_s)
    play.turns.add(asked)
    assert play.begin() == [asked, other]


def drag_on(play):
    """Two quick ones have frozen in their writes; whoever was last heard of before now has to be asked."""
    play.peers(Pace.QUICK, 2)
    play.begin()
    play.pass_s(0.2)


def ask(play, count):
    """Those whose turn it is to be asked."""
    asked = []
    for _ in range(count):
        peer = play.turns.next(play.now_s, play.room)
        assert play.turns.must_ask(peer, play.now_s, play.room)
        play.turns.asked(peer, play.now_s)
        asked.append(peer)
    return asked


def test_not_everybody_is_asked_at_once_but_who_need_not_be_has_its_turn(play):
    drag_on(play)
    peers = play.peers(Pace.QUICK, ASKED_AT_ONCE + 3, answered_s=NOW_S - 0.1)
    asked = ask(play, ASKED_AT_ONCE)
    assert not play.turns.is_anyones(play.now_s, play.room)
    [heard_of] = play.peers(Pace.QUICK, 1, answered_s=play.now_s)
    assert play.begin() == [heard_of]
    play.turns.remove(asked[0])  # it is gone
    ask(play, 1)
    assert not play.turns.is_anyones(play.now_s, play.room)
    play.pass_s(0.2)  # those do not answer
    ask(play, 2)
    assert play.turns.waiting == 0
    assert {peer.listed for peer in peers} == {False}


def test_who_comes_after_a_rack_that_froze_is_asked_at_once(play):
    """It used to be asked after all of them: 1.7 s behind 250."""
    drag_on(play)
    rack = play.peers(Pace.QUICK, 250, answered_s=NOW_S - 0.1)
    [healthy] = play.peers(Pace.QUICK, 1, answered_s=NOW_S - 0.1)
    asked = ask(play, ASKED_AT_ONCE)
    assert healthy in asked
    assert rack[: ASKED_AT_ONCE // 2] == asked[: ASKED_AT_ONCE // 2]


def test_where_nobody_can_be_asked_who_was_heard_of_lately_writes_and_the_others_stay_in_line(play):
    drag_on(play)
    [long_silent] = play.peers(Pace.QUICK, 1, answered_s=play.now_s - 1.1)
    [fresh] = play.peers(Pace.QUICK, 1, answered_s=play.now_s - 0.9)
    play.room = 0
    assert play.begin() == [fresh]
    assert long_silent.listed
    play.room = 1
    assert ask(play, 1) == [long_silent]


def test_where_nobody_can_be_asked_those_known_to_be_slow_make_nobody_wait(play):
    play.peers(Pace.SLOW, 2)
    play.begin()
    play.pass_s(0.2)
    [unsure] = play.peers(Pace.QUICK, 1, answered_s=play.now_s - 1.1)
    assert play.turns.must_ask(unsure, play.now_s, play.room)
    play.room = 0
    assert play.begin() == [unsure]


def test_after_a_long_pause_one_is_asked_even_where_no_probe_is_free(play):
    """It waits for a probe, as a new one does, and no longer."""
    drag_on(play)
    play.room = 0
    [idle] = play.peers(Pace.QUICK, 1, answered_s=NOW_S - LIMITS.idle_s - 1.0)
    assert ask(play, 1) == [idle]


def test_new_ones_and_slow_ones_have_half_each_while_both_wait(play):
    """Slow ones used to wait for as long as new ones kept coming."""
    slow = play.peers(Pace.SLOW, 3)
    new = play.peers(Pace.NEW, 20)
    assert play.begin() == [new[0], slow[0]]
    for number in range(1, 5):
        play.pass_s(0.02)
        play.end(new[number - 1])
        assert play.begin() == [new[number]], "the slow one still writes"
    play.end(slow[0])
    assert play.begin() == [slow[1]]


def test_where_there_is_one_lane_for_new_and_slow_ones_they_take_turns(play):
    play.turns = Turns(replace(LIMITS, lanes=1))
    slow, new = play.peers(Pace.SLOW, 2), play.peers(Pace.NEW, 4)
    order = []
    for _ in range(4):
        [peer] = play.begin()
        order.append(peer)
        play.end(peer)
    assert order == [new[0], slow[0], new[1], slow[1]]


def test_nobody_stands_in_line_twice_or_after_its_queue_has_failed(play):
    [one, other] = play.peers(Pace.QUICK, 2)
    play.turns.add(one)
    play.turns.remove(other)
    play.turns.remove(other)
    assert play.turns.waiting == 1
    assert play.begin() == [one]
