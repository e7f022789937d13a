"""The sender over the tcp engine and over scripted engines: answers, retries, bounds, the end."""

import threading
import time
from collections import Counter

import pytest

from encodepool_worker.errors import TransportError, WriteRefused, WriteTimedOut, WriteTorn
from encodepool_worker.transport.base import Done, Failed, Settled
from encodepool_worker.transport.sender import Sender
from encodepool_worker.types import Slice

# --- writes


def test_writes_land_and_are_answered_once(sender_of, receiver_of, region, send, inbox):
    receiver = receiver_of("tcp")
    sender = sender_of()
    region.fill(5)
    numbers = [send(sender, receiver, nbytes=100, source=100 * i) for i in range(50)]
    assert [inbox.answer(number) for number in numbers] == [Done(number) for number in numbers]

    read = receiver.ask("read", at=0, nbytes=5000)
    assert (read["first"], read["last"]) == (5, 5)
    seen = sender.snapshot()
    assert seen.outcomes == {"done": 50}
    assert seen.written_bytes == 5000
    assert seen.peers == {"ready": 1, "probing": 0, "broken": 0}


def test_writes_to_one_peer_keep_their_order(sender_of, receiver_of, send, inbox):
    receiver = receiver_of("tcp")
    sender = sender_of(lanes=4)
    numbers = [send(sender, receiver) for _ in range(30)]
    for number in numbers:
        inbox.answer(number)
    assert [event.write_id for event in inbox.events] == numbers


def test_one_peer_never_occupies_more_than_one_lane(sender_of, send, inbox, wait_until, script, address):
    release = threading.Event()
    inside = Counter()
    most = Counter()
    lock = threading.Lock()

    def write(engine, session, slices):
        with lock:
            inside[session] += 1
            most[session] = max(most[session], inside[session])
        release.wait()
        with lock:
            inside[session] -= 1

    sender = sender_of(make_engine=script.make, lanes=3)
    for session in ("p:1", "q:1"):
        inbox.answer(send(sender, address(session)))
    script.write = write
    numbers = [send(sender, address("p:1"))]
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    numbers += [send(sender, address("p:1")) for _ in range(5)]
    other = send(sender, address("q:1"))
    wait_until(lambda: inside["q:1"] == 1)
    release.set()
    for number in [*numbers, other]:
        assert inbox.answer(number) == Done(number)
    assert most == {"p:1": 1, "q:1": 1}


def test_a_write_of_no_rows_is_done_without_a_peer(sender_of, inbox):
    sender = sender_of()
    sender.submit(1, "127.0.0.1:1", [Slice(0, 0, 0)])
    assert inbox.answer(1) == Done(1)


def test_a_peer_that_is_not_there_fails_its_writes_at_once(sender_of, send, inbox, address):
    sender = sender_of()
    numbers = [send(sender, address("127.0.0.1:1")) for _ in range(3)]
    for number in numbers:
        answer = inbox.answer(number, timeout_s=2.0)
        assert isinstance(answer, Failed)
        assert not answer.may_land_late
        assert "gone" in answer.reason


def test_a_fast_failure_is_tried_once_more(sender_of, send, inbox, script, address):
    failures = iter([True, False])

    def write(engine, session, slices):
        if next(failures):
            raise WriteRefused("the connection was cut")

    script.write = write
    sender = sender_of(make_engine=script.make)
    assert inbox.answer(send(sender, address("p:1"))) == Done(1)


def test_a_write_that_keeps_failing_fails_after_the_second_try(sender_of, send, inbox, script, address):

    def write(engine, session, slices):
        script.writes.append(session)
        raise WriteRefused("not registered")

    script.write = write
    sender = sender_of(make_engine=script.make)
    assert inbox.answer(send(sender, address("p:1"))) == Failed(1, "not registered", False)
    assert len(script.writes) == 2


def test_a_torn_write_is_not_tried_again_and_settles_by_a_probe(sender_of, send, inbox, script, address):
    """Mooncake fails a batch at once for one bad slice while it still sends the others."""

    def write(engine, session, slices):
        script.writes.append(session)
        raise WriteTorn("one slice failed")

    script.write = write
    sender = sender_of(make_engine=script.make)
    assert inbox.answer(send(sender, address("p:1"))) == Failed(1, "one slice failed", True)
    assert inbox.settled(1) == Settled(1, by_probe=True)
    assert len(script.writes) == 1


def test_an_unknown_error_may_land_late_and_the_lane_lives_on(sender_of, send, inbox, script, address):
    outcomes = iter([ValueError("cannot cast"), None])

    def write(engine, session, slices):
        error = next(outcomes)
        if error:
            raise error

    script.write = write
    sender = sender_of(make_engine=script.make, lanes=1, max_lanes=1)
    assert inbox.answer(send(sender, address("p:1"))) == Failed(1, "cannot cast", True)
    assert inbox.settled(1).by_probe
    assert inbox.answer(send(sender, address("p:1"))) == Done(2)


# --- bounds


def test_a_peer_that_answers_probes_but_takes_no_write_is_left_alone_for_a_while(
    sender_of, send, inbox, wait_until, script, address
):
    broken = threading.Event()
    broken.set()

    def write(engine, session, slices):
        if broken.is_set():
            raise WriteTimedOut("data port closed", released=True)

    script.write = write
    sender = sender_of(make_engine=script.make, breaker_s=0.5)
    numbers = [send(sender, address("p:1")) for _ in range(3)]
    for number in numbers:
        assert inbox.answer(number).reason == "data port closed"
    wait_until(lambda: sender.snapshot().peers["broken"] == 1)
    assert "writes to it fail" in inbox.answer(send(sender, address("p:1"))).reason

    broken.clear()
    wait_until(lambda: isinstance(inbox.answer(send(sender, address("p:1"))), Done))
    for number in numbers:
        assert inbox.settled(number).by_probe


def test_queues_are_bounded(sender_of, send, inbox, wait_until, script, address):
    release = threading.Event()
    script.write = lambda engine, session, slices: release.wait()
    sender = sender_of(make_engine=script.make, max_queued_per_peer=3, max_queued=5)
    first = send(sender, address("p:1"))
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    waiting = [send(sender, address("p:1")) for _ in range(3)]
    too_many = send(sender, address("p:1"))
    assert "too many writes wait" in inbox.answer(too_many).reason
    release.set()
    for number in [first, *waiting]:
        assert inbox.answer(number) == Done(number)


def test_peers_are_forgotten_when_there_are_too_many(sender_of, send, inbox, script, address):
    sender = sender_of(make_engine=script.make, max_peers=3)
    for peer in range(10):
        inbox.answer(send(sender, address(f"p:{peer}")))
    assert sum(sender.snapshot().peers.values()) == 3


def test_an_idle_peer_is_probed_before_its_next_write(sender_of, send, inbox, script, address):
    probed = []
    script.probe = lambda engine, session: probed.append(session) or True
    sender = sender_of(make_engine=script.make, idle_s=0.3, probe_fresh_s=0.1)
    inbox.answer(send(sender, address("p:1")))
    inbox.answer(send(sender, address("p:1")))
    assert len(probed) == 1
    time.sleep(0.35)  # the idle time itself is what is tested
    inbox.answer(send(sender, address("p:1")))
    assert len(probed) == 2


# --- the end


def test_close_answers_everything(sender_of, receiver_of, send, inbox):
    frozen, healthy = receiver_of("tcp"), receiver_of("tcp")
    sender = sender_of(timeout_s=0.5)
    for receiver in (frozen, healthy):
        inbox.answer(send(sender, receiver))
    frozen.ask("plan", faults=["late"])
    numbers = [send(sender, receiver) for receiver in (frozen, healthy) for _ in range(5)]
    assert sender.close()
    assert sender.close()
    assert {event.write_id for event in inbox.events} >= set(numbers)
    inbox.check()
    count = len(inbox.events)
    sender.submit(999, healthy.session, [Slice(0, healthy.ptr, 10)])
    assert len(inbox.events) == count  # nothing is posted after close


def test_a_first_engine_that_cannot_be_made_is_an_error_at_once(region, inbox):
    def make_engine():
        raise TransportError("no such device")

    with pytest.raises(TransportError, match="no such device"):
        Sender(make_engine, [region], inbox)


def test_many_peers_many_writes_under_faults_are_all_answered(sender_of, receiver_of, send, inbox):
    receivers = [receiver_of("tcp") for _ in range(4)]
    receivers[1].ask("plan", faults=["drop", "late", "corrupt", "duplicate"] * 3)
    receivers[2].ask("delay", seconds=0.01)
    sender = sender_of(timeout_s=0.3, lanes=3)
    numbers = [send(sender, receivers[i % 4], nbytes=2000) for i in range(200)]
    receivers[3].kill()
    for number in numbers:
        answer = inbox.answer(number, timeout_s=20.0)
        if isinstance(answer, Failed) and answer.may_land_late:
            inbox.settled(number)
    outcomes = Counter(type(inbox.answer(number)).__name__ for number in numbers)
    assert outcomes["Done"] >= 100


def test_a_probe_that_cannot_be_made_settles_nothing_and_is_tried_again(
    sender_of, send, inbox, script, address, wait_until
):
    """An engine that fails at once says nothing of the peer, whose late write may still land."""
    sender = sender_of(make_engine=script.make, probe_pause_s=0.02)
    peer = address("p:1")
    assert inbox.answer(send(sender, peer)) == Done(1)
    tries = []

    def time_out(engine, session, slices):
        raise WriteTimedOut("no progress")

    def probe(engine, session):
        tries.append(session)
        if len(tries) < 4:
            raise TransportError("no further engine could be made") if len(tries) % 2 else OSError("no port")
        return True

    script.write, script.probe = time_out, probe
    assert inbox.answer(send(sender, peer)).may_land_late
    assert inbox.settled(2) == Settled(2, by_probe=True)
    assert len(tries) == 4
