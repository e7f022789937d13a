"""One slow, frozen or vanished peer must never hold up another; late writes settle by proof."""

import threading
import time
from collections import Counter

from encodepool_worker.errors import WriteTimedOut
from encodepool_worker.transport.base import Done, Failed, Settled


def test_a_frozen_new_peer_fails_within_the_probe_timeout_and_delays_nobody(
    sender_of, receiver_of, send, inbox
):
    """Opening a frozen peer used to block every transfer of the process for a minute."""
    frozen, healthy = receiver_of("tcp"), receiver_of("tcp")
    frozen.ask("freeze")
    sender = sender_of(lanes=1, max_lanes=1, engines=1, max_engines=1, max_unsettled_s=5.0)
    started_s = time.monotonic()
    stuck = [send(sender, frozen) for _ in range(4)]
    numbers = [send(sender, healthy) for _ in range(10)]
    for number in numbers:
        assert inbox.answer(number) == Done(number)
    assert inbox.at_s[numbers[-1]] - started_s < 0.3

    for number in stuck:
        answer = inbox.answer(number, timeout_s=2.0)
        assert isinstance(answer, Failed)
        assert not answer.may_land_late
        assert "does not answer" in answer.reason
    frozen.ask("thaw")


def test_a_peer_that_froze_later_holds_one_lane_and_the_breaker_opens(
    sender_of, receiver_of, send, inbox, wait_until
):
    frozen, healthy = receiver_of("tcp"), receiver_of("tcp")
    sender = sender_of(lanes=1, timeout_s=1.0)
    for receiver in (frozen, healthy):
        assert isinstance(inbox.answer(send(sender, receiver)), Done)
    frozen.ask("freeze")
    stuck = [send(sender, frozen) for _ in range(3)]
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    started_s = time.monotonic()
    number = send(sender, healthy)
    assert inbox.answer(number) == Done(number)
    assert inbox.at_s[number] - started_s < 0.7  # another lane took over
    assert sender.snapshot().lanes_busy == 1

    for write_id in stuck:
        assert isinstance(inbox.answer(write_id), Failed)
    started_s = time.monotonic()
    refused = send(sender, frozen)
    assert isinstance(inbox.answer(refused), Failed)
    assert inbox.at_s[refused] - started_s < 0.2
    assert sender.snapshot().peers["broken"] == 1

    frozen.ask("thaw")
    wait_until(lambda: isinstance(inbox.answer(send(sender, frozen)), Done), what="the breaker's end")
    assert sender.snapshot().peers["broken"] == 0


def test_a_write_that_timed_out_settles_when_its_peer_answers_again(sender_of, receiver_of, send, inbox):
    receiver = receiver_of("tcp")
    sender = sender_of()
    inbox.answer(send(sender, receiver))
    receiver.ask("plan", faults=["late"])
    number = send(sender, receiver)
    answer = inbox.answer(number)
    assert isinstance(answer, Failed)
    assert answer.may_land_late
    assert inbox.settled(number) == Settled(number, by_probe=True)
    assert receiver.ask("land")["slices"] == 1


def test_a_write_that_timed_out_settles_when_its_peer_is_gone(
    sender_of, receiver_of, send, inbox, wait_until
):
    receiver = receiver_of("tcp")
    sender = sender_of(timeout_s=1.0)
    inbox.answer(send(sender, receiver))
    receiver.ask("plan", faults=["late"])
    number = send(sender, receiver)
    wait_until(lambda: receiver.ask("held")["slices"])
    receiver.ask("freeze")
    assert inbox.answer(number).may_land_late
    assert inbox.of(number)[1:] == []
    receiver.kill()
    assert inbox.settled(number) == Settled(number, by_probe=False)


def test_a_silent_peers_write_settles_when_the_time_is_over(sender_of, send, inbox, script, address):
    """The engine has closed its connection already, so there is nothing to close."""
    silent = threading.Event()

    def probe(engine, session):
        if script.writes:
            silent.wait()
            return False
        return True

    def write(engine, session, slices):
        script.writes.append(session)
        raise WriteTimedOut("no progress", released=True)

    script.probe, script.write = probe, write
    sender = sender_of(make_engine=script.make, max_unsettled_s=0.5)
    number = send(sender, address("p:1"))
    assert inbox.answer(number).may_land_late
    assert inbox.settled(number) == Settled(number, by_probe=False)
    assert not any(engine.closed.is_set() for engine in script.made)
    silent.set()


def test_otherwise_its_engine_is_retired_and_closed_first(sender_of, send, inbox, script, address):

    def probe(engine, session):
        if script.writes and session == "p:1":
            time.sleep(0.35)  # longer than the probe timeout: silent, not refused
            return False
        return True

    def write(engine, session, slices):
        if session == "p:1":
            script.writes.append(script.made.index(engine))
            raise WriteTimedOut("transfer timeout", released=False)

    script.probe, script.write = probe, write
    sender = sender_of(make_engine=script.make, max_unsettled_s=0.5, engines=1, max_engines=2)
    inbox.answer(send(sender, address("q:1")))
    number = send(sender, address("p:1"))
    assert inbox.answer(number).may_land_late
    assert inbox.settled(number) == Settled(number, by_probe=False)
    assert script.made[script.writes[0]].closed.is_set()
    assert isinstance(inbox.answer(send(sender, address("q:1"))), Done)  # on a fresh engine
    assert sender.snapshot().engines == 1


def test_too_many_unsettled_bytes_retire_the_engine_early(sender_of, send, inbox, script, address):
    silent = threading.Event()

    def probe(engine, session):
        return not script.writes or (silent.wait() and False)

    def write(engine, session, slices):
        script.writes.append(session)
        raise WriteTimedOut("no progress", released=True)

    script.probe, script.write = probe, write
    sender = sender_of(make_engine=script.make, max_unsettled_bytes=500)
    number = send(sender, address("p:1"), nbytes=1000)
    assert inbox.settled(number, timeout_s=2.0) == Settled(number, by_probe=False)
    silent.set()


def test_a_stuck_open_moves_other_peers_to_another_engine(
    sender_of, send, inbox, wait_until, script, address
):
    """Frozen between its probe and its first write: the engine's lock is held for a minute."""
    release = threading.Event()

    def write(engine, session, slices):
        if session == "frozen:1":
            release.wait()
            raise WriteTimedOut("handshake timed out")
        script.writes.append(script.made.index(engine))

    script.write = write
    sender = sender_of(make_engine=script.make, engines=1, max_engines=2)
    inbox.answer(send(sender, address("old:1")))
    number = send(sender, address("frozen:1"))
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    started_s = time.monotonic()
    others = [send(sender, address(peer)) for peer in ("old:1", "new:1", "old:1")]
    for other in others:
        assert isinstance(inbox.answer(other), Done)
        assert inbox.at_s[other] - started_s < 1.0
    assert script.writes == [0, 1, 1, 1]
    assert sender.snapshot().engines_stuck == 1

    release.set()
    assert inbox.answer(number).may_land_late
    assert inbox.settled(number).by_probe
    assert sender.snapshot().engines_stuck == 0  # in use again, not closed
    assert not any(engine.closed.is_set() for engine in script.made)


def test_with_every_engine_stuck_writes_fail_in_time(sender_of, send, inbox, wait_until, script, address):
    release = threading.Event()

    def write(engine, session, slices):
        if session == "frozen:1":
            release.wait()

    script.write = write
    sender = sender_of(make_engine=script.make, engines=1, max_engines=1, engine_wait_s=0.4)
    stuck = send(sender, address("frozen:1"))
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    answer = inbox.answer(send(sender, address("other:1")))
    assert isinstance(answer, Failed)
    assert "no engine became free" in answer.reason
    assert not answer.may_land_late
    release.set()
    assert inbox.answer(stuck) == Done(stuck)


def test_no_call_begins_while_another_opens_a_session(sender_of, send, inbox, script, address):
    lock = threading.Lock()
    inside = Counter()
    opened = set()
    wrong = []

    def write(engine, session, slices):
        with lock:
            if session not in opened:
                if inside["open"] or inside["young"]:
                    wrong.append(session)
                inside["open"] += 1
            elif inside["open"]:
                wrong.append(session)
        time.sleep(0.002)
        with lock:
            if session not in opened:
                inside["open"] -= 1
                opened.add(session)

    script.write = write
    sender = sender_of(make_engine=script.make, lanes=4, engines=1, max_engines=1)
    numbers = [send(sender, address(f"p:{peer}")) for _ in range(5) for peer in range(1, 9)]
    for number in numbers:
        assert isinstance(inbox.answer(number), Done)
    assert wrong == []
