"""Crowds of slow, frozen and silent receivers: a healthy one has its rows all the same."""

import threading
import time
from collections import Counter

import pytest

from encodepool_worker.errors import WriteTimedOut
from encodepool_worker.transport.base import Done, Failed

NEVER_S = 60.0
"""A patience that no test outlasts: what happens within it happens without it."""


class Gate:
    """Holds up what passes for some sessions, until it is opened."""

    def __init__(self):
        self.held = Counter()
        self._lock = threading.Lock()
        self._opened = threading.Event()

    def __call__(self, session):
        with self._lock:
            self.held[session] += 1
        assert self._opened.wait(NEVER_S)

    def open(self):
        self._opened.set()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


def crowd_of(address, name, count):
    return [address(f"{name}:{number}") for number in range(1, count + 1)]


def test_slow_receivers_have_no_lane_that_a_quick_one_needs(
    sender_of, send, inbox, script, address, gate, wait_until
):
    """As many slow ones as lanes used to make everybody wait as long as one of their writes."""
    slow, healthy = crowd_of(address, "slow", 3), address("healthy:1")
    shut = threading.Event()

    def write(engine, session, slices):
        if session.startswith("slow"):
            if shut.is_set():
                gate(session)
            else:
                time.sleep(0.45)  # longer than slow_s: this is how it is found out

    script.write = write
    sender = sender_of(make_engine=script.make, slow_s=0.4, lane_patience_s=NEVER_S)
    for number in [send(sender, peer) for peer in (*slow, healthy)]:
        assert inbox.answer(number) == Done(number)
    shut.set()
    stuck = [send(sender, peer) for peer in slow for _ in range(2)]
    wait_until(lambda: len(gate.held) == 2)
    for _ in range(20):
        number = send(sender, healthy)
        assert inbox.answer(number) == Done(number)
    assert len(gate.held) == 2, "the third waits for these"
    gate.open()
    for number in stuck:
        assert inbox.answer(number) == Done(number)


def test_quick_receivers_do_not_wait_for_new_ones(sender_of, send, inbox, script, address, gate, wait_until):
    healthy, newcomers = address("healthy:1"), crowd_of(address, "new", 5)
    script.write = lambda engine, session, slices: gate(session) if session.startswith("new") else None
    sender = sender_of(make_engine=script.make, slow_s=NEVER_S, lane_patience_s=NEVER_S)
    inbox.answer(send(sender, healthy))
    stuck = [send(sender, peer) for peer in newcomers]
    wait_until(lambda: gate.held)
    number = send(sender, healthy)
    assert inbox.answer(number) == Done(number)
    gate.open()
    for number in stuck:
        assert inbox.answer(number) == Done(number)


def test_a_crowd_that_freezes_in_its_writes_leaves_lanes_to_the_others(
    sender_of, send, inbox, script, address, gate, wait_until
):
    """A rack goes down: all of its receivers were quick a moment ago, and have a write waiting."""
    rack, healthy = crowd_of(address, "rack", 12), address("healthy:1")
    frozen = threading.Event()

    def probe(engine, session):
        if frozen.is_set() and session.startswith("rack"):
            gate(session)
        return True

    def write(engine, session, slices):
        if frozen.is_set() and session.startswith("rack"):
            gate("a write")
            raise WriteTimedOut("no progress", released=True)

    script.probe, script.write = probe, write
    sender = sender_of(make_engine=script.make, slow_s=0.3)
    for number in [send(sender, peer) for peer in (*rack, healthy)]:
        assert inbox.answer(number) == Done(number)
    frozen.set()
    stuck = [send(sender, peer) for peer in rack]
    number = send(sender, healthy)
    assert inbox.answer(number) == Done(number)
    wait_until(lambda: sum(bool(inbox.of(number)) for number in stuck) >= len(rack) - 4)
    assert gate.held["a write"] <= 4
    for _ in range(5):
        number = send(sender, healthy)
        assert inbox.answer(number) == Done(number)
    gate.open()
    for number in stuck:
        assert isinstance(inbox.answer(number), Failed)


def test_as_many_frozen_receivers_as_lanes_do_not_have_them_all(
    sender_of, receiver_of, send, inbox, wait_until
):
    healthy, *crowd = [receiver_of("tcp") for _ in range(4)]
    sender = sender_of(lanes=1, max_lanes=3, slow_s=0.3, timeout_s=5.0)
    for number in [send(sender, receiver) for receiver in (healthy, *crowd)]:
        assert inbox.answer(number) == Done(number)
    for receiver in crowd:
        receiver.ask("freeze")
    stuck = [send(sender, receiver) for receiver in crowd]
    wait_until(lambda: sender.snapshot().lanes_busy == 1)
    number = send(sender, healthy)
    assert inbox.answer(number) == Done(number)
    assert inbox.of(stuck[0]) == [], "it used to be waited for"
    for number in stuck[1:]:
        assert "does not answer" in inbox.answer(number).reason
    for receiver in crowd:
        receiver.ask("thaw")
    assert inbox.answer(stuck[0]) == Done(stuck[0])


def test_receivers_known_to_be_silent_leave_probes_to_a_new_one(
    sender_of, send, inbox, script, address, gate, wait_until
):
    """A probe of a frozen receiver lasts long after everybody has stopped waiting for it."""
    hanging, silent = crowd_of(address, "hanging", 2), crowd_of(address, "silent", 2)

    def probe(engine, session):
        if session.startswith("hanging"):
            gate(session)
        if session.startswith("silent"):
            time.sleep(0.15)  # longer than the probe timeout: silent, not refused
            return False
        return True

    script.probe = probe
    sender = sender_of(make_engine=script.make, max_probes=4, probe_timeout_s=0.1)
    for number in [send(sender, peer) for peer in (*hanging, *silent)]:
        assert "does not answer" in inbox.answer(number).reason
    wait_until(lambda: sender.snapshot().probes == 2)
    numbers = [send(sender, peer) for peer in silent]
    newcomer = send(sender, address("new:1"))
    assert inbox.answer(newcomer) == Done(newcomer)
    for number in numbers:
        assert "2 other peers are being probed" in inbox.answer(number).reason


def test_a_first_contact_waits_for_a_probe_as_long_as_for_its_answer(
    sender_of, send, inbox, script, address, gate, wait_until
):
    script.probe = lambda engine, session: gate(session) or True
    sender = sender_of(make_engine=script.make, max_probes=2, probe_timeout_s=NEVER_S)
    numbers = [send(sender, peer) for peer in crowd_of(address, "p", 4)]
    wait_until(lambda: len(gate.held) == 2)
    assert sender.snapshot().probes == 2
    assert not inbox.events
    gate.open()
    for number in numbers:
        assert inbox.answer(number) == Done(number)


def test_with_all_probes_taken_known_receivers_do_not_fail_for_want_of_one(
    sender_of, send, inbox, script, address, gate, wait_until
):
    """Two writes that drag on have everybody else asked, who then failed after two seconds."""
    slow, silent, healthy = crowd_of(address, "slow", 2), crowd_of(address, "silent", 2), address("healthy:1")
    shut = threading.Event()
    script.write = lambda engine, session, slices: (
        gate(session) if shut.is_set() and session.startswith("slow") else None
    )
    script.probe = lambda engine, session: gate("a probe") if session.startswith("silent") else True
    sender = sender_of(make_engine=script.make, max_probes=2, probe_fresh_s=0.3)
    for number in [send(sender, peer) for peer in (*slow, healthy)]:
        assert inbox.answer(number) == Done(number)
    for number in [send(sender, peer) for peer in silent]:
        assert "does not answer" in inbox.answer(number).reason
    shut.set()
    stuck = [send(sender, peer) for peer in slow]
    wait_until(lambda: len(gate.held) == 3)
    dragging_s = (
        time.monotonic() + 0.4
    )  # longer than a probe's answer is good for, and than one is waited for
    wait_until(lambda: time.monotonic() > dragging_s)
    in_line = send(sender, healthy)
    kept_s = time.monotonic() + 0.4
    wait_until(lambda: time.monotonic() > kept_s)
    assert inbox.of(in_line) == []
    gate.open()
    for number in (in_line, *stuck):
        assert inbox.answer(number) == Done(number)


def test_it_does_not_wait_any_longer_than_that(sender_of, send, inbox, script, address, gate, wait_until):
    script.probe = lambda engine, session: gate(session) or True
    sender = sender_of(make_engine=script.make, max_probes=1)
    first, kept_waiting = (send(sender, peer) for peer in crowd_of(address, "p", 2))
    assert "does not answer" in inbox.answer(first).reason
    assert "being probed" in inbox.answer(kept_waiting).reason
    assert sender.snapshot().queued == 0
