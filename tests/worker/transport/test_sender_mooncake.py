"""The sender over real Mooncake engines, with receivers stopped by SIGSTOP."""

import itertools
import socket
import threading
import time

import pytest

from encodepool_worker.errors import WriteRefused
from encodepool_worker.transport.base import Done, Failed, Settled
from encodepool_worker.transport.engine_pool import EnginePool
from encodepool_worker.transport.mooncake import MooncakeEngine
from encodepool_worker.transport.regions import Region
from encodepool_worker.transport.sender import Sender
from encodepool_worker.transport.sender_types import SenderLimits
from encodepool_worker.types import Slice

pytestmark = pytest.mark.real


class Posted:
    def __init__(self):
        self.events = {}
        self.at_s = {}

    def __call__(self, event):
        self.at_s.setdefault(event.write_id, time.monotonic())
        self.events.setdefault(event.write_id, []).append(event)


class FreezesAfterItsProbe:
    """A Mooncake engine during whose first write to ``victim`` the victim is stopped already."""

    def __init__(self, victim, stopped):
        self._engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=1.0)
        self._victim = victim
        self._stopped = stopped
        self.session = self._engine.session
        self.register = self._engine.register
        self.unregister = self._engine.unregister
        self.probe = self._engine.probe

    def write(self, session, slices):
        if session == self._victim.session and not self._stopped.is_set():
            self._victim.stop()
            self._stopped.set()
        self._engine.write(session, slices)

    def close(self):
        for name in ("register", "unregister", "probe"):
            delattr(self, name)
        self._engine.close()


@pytest.fixture
def posted():
    return Posted()


@pytest.fixture
def sender_of(region, posted, nothing_left_over):
    made = []

    def make(make_engine=None, **limits):
        make_engine = make_engine or (lambda: MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=1.0))
        made.append(Sender(make_engine, [region], posted, SenderLimits(**limits)))
        return made[-1]

    yield make
    for sender in made:
        assert sender.close(timeout_s=20.0)


def whole(receiver):
    return [Slice(0, receiver.ptr, receiver.nbytes // 2), Slice(512, receiver.ptr + 600_000, 1024)]


def test_a_receiver_frozen_before_its_first_write_delays_nobody(
    sender_of, posted, receiver_of, wait_until, region
):
    """Bare Mooncake: every transfer of the process waits 61 s. Here: well under a second."""
    frozen, healthy, newcomer = (receiver_of("mooncake") for _ in range(3))
    region.fill(4)
    sender = sender_of()
    sender.submit(1, healthy.session, whole(healthy))
    wait_until(lambda: posted.events.get(1))
    frozen.stop()

    started_s = time.monotonic()
    sender.submit(2, frozen.session, whole(frozen))
    sender.submit(3, healthy.session, whole(healthy))
    sender.submit(4, newcomer.session, whole(newcomer))
    wait_until(lambda: 3 in posted.events and 4 in posted.events)
    assert posted.events[3] == [Done(3)]
    assert posted.events[4] == [Done(4)]
    assert max(posted.at_s[3], posted.at_s[4]) - started_s < 1.0

    wait_until(lambda: posted.events.get(2), 5.0)
    assert posted.events[2][0].may_land_late is False
    assert 1.9 < posted.at_s[2] - started_s < 4.0
    assert newcomer.ask("read", at=600_000, nbytes=1024)["last"] == 4
    frozen.go_on()

    def lands():
        write_id = len(posted.events) + 10
        sender.submit(write_id, frozen.session, whole(frozen))
        return wait_until(lambda: posted.events.get(write_id)) == [Done(write_id)]

    wait_until(lands, what="a write to the receiver that woke up")


def test_a_receiver_frozen_between_its_probe_and_its_first_write_delays_nobody_for_a_second(
    sender_of, posted, receiver_of, wait_until
):
    """The engine's lock is held by the opening call; the other peers move to another engine."""
    frozen, healthy, newcomer = (receiver_of("mooncake") for _ in range(3))
    stopped = threading.Event()
    sender = sender_of(lambda: FreezesAfterItsProbe(frozen, stopped), engines=1, max_engines=2)
    sender.submit(1, healthy.session, whole(healthy))
    wait_until(lambda: posted.events.get(1))
    sender.submit(2, frozen.session, whole(frozen))
    assert stopped.wait(5.0)

    started_s = time.monotonic()
    sender.submit(3, healthy.session, whole(healthy))
    sender.submit(4, newcomer.session, whole(newcomer))
    wait_until(lambda: 3 in posted.events and 4 in posted.events)
    assert posted.events[3] == [Done(3)]
    assert posted.events[4] == [Done(4)]
    assert max(posted.at_s[3], posted.at_s[4]) - started_s < 1.0
    assert 2 not in posted.events
    assert sender.snapshot().engines == 2

    frozen.go_on()
    wait_until(lambda: posted.events.get(2), what="the end of the opening call")
    wait_until(lambda: sender.snapshot().engines_stuck == 0)


def test_a_receiver_that_froze_later_times_out_and_settles_when_it_wakes(
    sender_of, posted, receiver_of, wait_until
):
    receiver, healthy = receiver_of("mooncake"), receiver_of("mooncake")
    # Long against what a busy machine needs, so that a healthy receiver shows whether it had to wait.
    sender = sender_of(lambda: MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=4.0), lanes=1)
    sender.submit(1, receiver.session, whole(receiver))
    sender.submit(2, healthy.session, whole(healthy))
    wait_until(lambda: 1 in posted.events and 2 in posted.events)
    assert (posted.events[1], posted.events[2]) == ([Done(1)], [Done(2)])
    receiver.stop()
    started_s = time.monotonic()
    sender.submit(3, receiver.session, whole(receiver))
    wait_until(lambda: sender.snapshot().lanes_busy)
    sender.submit(4, healthy.session, whole(healthy))
    wait_until(lambda: 4 in posted.events)
    assert posted.events[4] == [Done(4)]
    assert posted.at_s[4] - started_s < 3.0

    wait_until(lambda: 3 in posted.events)
    (answer,) = posted.events[3]
    assert isinstance(answer, Failed)
    assert answer.may_land_late
    receiver.go_on()
    wait_until(lambda: len(posted.events[3]) == 2)
    assert posted.events[3][1] == Settled(3, by_probe=True)


def test_a_killed_receiver_fails_at_once_and_leaves_nothing_unsettled(
    sender_of, posted, receiver_of, wait_until
):
    receiver = receiver_of("mooncake")
    sender = sender_of()
    sender.submit(1, receiver.session, whole(receiver))
    wait_until(lambda: 1 in posted.events)
    receiver.kill()
    started_s = time.monotonic()
    sender.submit(2, receiver.session, whole(receiver))
    wait_until(lambda: 2 in posted.events)
    assert isinstance(posted.events[2][0], Failed)
    assert posted.at_s[2] - started_s < 2.0
    if posted.events[2][0].may_land_late:
        wait_until(lambda: len(posted.events[2]) == 2)
        assert posted.events[2][1] == Settled(2, by_probe=False)


class Relay:
    """A session that outlives the process behind it: what connects here reaches ``target``."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = None
        self._links = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                caller, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                called = socket.create_connection((host, int(port)))
            except OSError:
                return
            self._links += [caller, called]
            for one, other in ((caller, called), (called, caller)):
                self._threads.append(threading.Thread(target=self._pump, args=(one, other)))
                self._threads[-1].start()

    @staticmethod
    def _pump(one, other):
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of them is gone; the other hears of it from its own side

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for link in (self._listener, *self._links):
            link.close()


@pytest.fixture
def relay(nothing_left_over):
    relay = Relay()
    yield relay
    relay.close()


def test_a_receiver_that_restarted_under_its_old_session_is_reached_at_once(
    sender_of, posted, receiver_of, relay, wait_until, region
):
    """Mooncake asks a session once where its data port is, and is refused there ever after."""
    sender = sender_of()
    region.fill(6)
    for write_id in (1, 2, 3):
        receiver = receiver_of("mooncake")
        relay.target = receiver.session
        sender.registered(relay.session)
        sender.submit(write_id, relay.session, whole(receiver))
        wait_until(lambda number=write_id: number in posted.events)
        assert posted.events[write_id] == [Done(write_id)]
        assert receiver.first_and_last()[0] == 6
        receiver.kill()


def test_a_receiver_that_restarted_without_a_word_is_reached_after_one_failure(
    sender_of, posted, receiver_of, relay, wait_until, region
):
    sender = sender_of()
    receiver = receiver_of("mooncake")
    relay.target = receiver.session
    sender.submit(1, relay.session, whole(receiver))
    wait_until(lambda: posted.events.get(1) == [Done(1)])
    receiver.kill()
    receiver = receiver_of("mooncake")
    relay.target = receiver.session
    sender.submit(2, relay.session, whole(receiver))
    # Of several slices some might be under way: such a write is not tried again, and settles.
    wait_until(lambda: len(posted.events.get(2, [])) == 2)
    assert posted.events[2][1] == Settled(2, by_probe=True)
    sender.submit(3, relay.session, whole(receiver))
    wait_until(lambda: 3 in posted.events)
    assert posted.events[3] == [Done(3)]


def test_closing_engines_leaves_the_heartbeat_its_turn(region):
    """The interpreter stands still for up to a second with each engine, and then runs for as long."""
    ends = []

    class Closing(MooncakeEngine):
        def close(self):
            began_s = time.monotonic()
            super().close()
            ends.append((began_s, time.monotonic()))

    pool = EnginePool(
        lambda: Closing("127.0.0.1"),
        [Region(region.ptr, region.nbytes)],
        engines=3,
        max_engines=3,
        open_timeout_s=0.5,
        wait_s=1.0,
    )
    for port in (1, 2, 3):
        with pytest.raises(WriteRefused):
            pool.write(f"127.0.0.1:{port}", [(region.ptr, 4096, 10)])
    assert pool.counts()[0] == 3
    pool.close()
    assert len(ends) == 3
    assert max(ended_s - began_s for began_s, ended_s in ends) > 0.1, "else nothing stood still"
    for (began_s, ended_s), (next_s, _) in itertools.pairwise(ends):
        assert next_s - ended_s >= ended_s - began_s
