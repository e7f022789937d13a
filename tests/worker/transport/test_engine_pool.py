"""Engines come and go: one at a time, and another one for a peer that restarted under its old name."""

import ctypes
import itertools
import threading
import time

import pytest

from encodepool_worker.errors import RegistrationFailed, TransportError, WriteRefused, WriteTimedOut
from encodepool_worker.transport import engine_pool
from encodepool_worker.transport.base import Done, Failed
from encodepool_worker.transport.engine_pool import EnginePool
from encodepool_worker.transport.regions import Region

HELD_S = 0.3
"""How long closing a scripted engine stops every Python thread; Mooncake takes a second."""


class Others:
    """Threads that want to run every few milliseconds. ``turns`` counts how often each of them did."""

    def __init__(self, n_threads=8):
        self._end = threading.Event()
        self.turns = [0] * n_threads
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(n_threads)]

    def _run(self, number):
        while not self._end.wait(0.005):
            self.turns[number] += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def others():
    with Others() as others:
        yield others


@pytest.fixture
def stopping_the_world(script, others):
    """Engines whose end holds the interpreter, as the destructor of Mooncake's does.

    ``turns`` has, for each end of an engine, what everybody else had before it and after.
    """
    libc = ctypes.PyDLL(None)  # calls through it keep the interpreter lock
    make, script.turns = script.make, []

    def close():
        before = list(others.turns)
        libc.usleep(int(HELD_S * 1e6))
        script.turns.append((before, list(others.turns)))

    def make_one():
        engine = make()
        engine.close = close
        return engine

    script.make = make_one
    return script


def everybody_had_a_turn_between(ends):
    """``ends``: (turns before, turns after) of each end of an engine."""
    pauses = [zip(end[1], start[0], strict=True) for end, start in itertools.pairwise(ends)]
    return all(after < before for pause in pauses for after, before in pause)


@pytest.fixture
def pool_of(region):
    def make(script, engines, max_engines):
        return EnginePool(
            script.make,
            [Region(region.ptr, region.nbytes)],
            engines=engines,
            max_engines=max_engines,
            open_timeout_s=0.2,
            wait_s=1.0,
        )

    return make


def test_engines_closed_at_the_end_leave_a_turn_to_everybody_else(stopping_the_world, pool_of):
    """Four in a row would be four seconds of silence; the supervisor gives up after five."""
    pool = pool_of(stopping_the_world, engines=4, max_engines=4)
    for peer in range(4):
        pool.write(f"p:{peer}", [(1, 2, 3)])
    assert len(stopping_the_world.made) == 4
    pool.close()
    assert len(stopping_the_world.turns) == 4
    assert everybody_had_a_turn_between(stopping_the_world.turns)


def test_retired_engines_are_closed_one_at_a_time(stopping_the_world, pool_of):
    pool = pool_of(stopping_the_world, engines=3, max_engines=6)
    for peer in range(3):
        pool.write(f"p:{peer}", [(1, 2, 3)])
    assert pool.close_due_s() is None
    for number in range(3):
        pool.retire(number)
    closed = []
    while (due_s := pool.close_due_s()) is not None:
        time.sleep(max(0.0, due_s - time.monotonic()))  # what the sender's watcher does
        number = pool.close_retired()
        if number is not None:
            closed.append(number)
    assert closed == [0, 1, 2]
    assert everybody_had_a_turn_between(stopping_the_world.turns)
    pool.close()


def test_a_new_receiver_has_its_turn_on_an_engine_that_is_never_at_rest(script, pool_of):
    """Its first write has to have the engine to itself as it begins, and no pause may ever come."""
    pool = pool_of(script, engines=1, max_engines=1)
    met = threading.Event()

    def write_on(session):
        while not met.is_set():
            pool.write(session, [(1, 2, 3)])

    for peer in range(4):
        pool.write(f"p:{peer}", [(1, 2, 3)])
    script.write = lambda engine, session, slices: time.sleep(0.02)
    others = [threading.Thread(target=write_on, args=(f"p:{peer}",)) for peer in range(4)]
    for thread in others:
        thread.start()
    try:
        for peer in range(5):
            pool.write(f"new:{peer}", [(1, 2, 3)])
    finally:
        met.set()
        for thread in others:
            thread.join()
        pool.close()


@pytest.mark.parametrize("end", ["retired", "closed"])
def test_an_engine_that_ends_meanwhile_opens_no_connection_any_more(
    script, pool_of, monkeypatch, wait_until, end
):
    monkeypatch.setattr(engine_pool, "_PAST_THE_LOCK_S", 60.0)
    pool = pool_of(script, engines=1, max_engines=2)
    pool.write("p:1", [(1, 2, 3)])
    write, over = script.write, threading.Event()
    script.write = lambda engine, *call: over.wait() if call[0] == "p:1" else write(engine, *call)
    running = threading.Thread(target=pool.write, args=("p:1", [(1, 2, 3)]))
    running.start()
    refused = []

    def meet():
        try:
            pool.write("new:1", [(1, 2, 3)])
        except TransportError as exc:
            refused.append(str(exc))

    newcomer = threading.Thread(target=meet)
    newcomer.start()
    wait_until(lambda: pool._slots[0].opening == "new:1")
    if end == "retired":
        pool.retire(0)
    else:
        pool.close()
    over.set()
    for thread in (running, newcomer):
        thread.join()
    if end == "retired":
        assert script.writes[-1] == (1, "new:1")
        assert pool.close_retired() == 0
    else:
        assert refused == ["the engines are closed"]
    pool.close()


def test_where_no_second_engine_can_be_made_the_first_serves_everybody(
    sender_of, send, inbox, script, address
):
    make, tries = script.make, []

    def make_one():
        tries.append(None)
        if script.made:
            raise RegistrationFailed("no more memory can be registered")
        return make()

    sender = sender_of(make_engine=make_one)
    for peer in "abc":
        number = send(sender, address(f"{peer}:1"))
        assert inbox.answer(number) == Done(number)
    assert len(tries) == 2, "not again for every peer"


# --- a peer that restarted under its old session


@pytest.fixture
def remembering(script):
    """Engines that keep what they once learned of a session, as Mooncake keeps its data port."""
    script.lives = {}

    def write(engine, session, slices):
        known = engine.__dict__.setdefault("seen", {})
        life = known.setdefault(session, script.lives.get(session, 0))
        if life != script.lives.get(session, 0):
            raise WriteRefused("connection refused")
        script.writes.append((script.made.index(engine), session))

    script.write = write
    return script


def test_a_peer_that_restarted_under_its_old_session_is_reached_by_the_very_next_write(
    remembering, sender_of, send, inbox, address
):
    sender = sender_of(make_engine=remembering.make)
    assert inbox.answer(send(sender, address("p:1"))) == Done(1)
    for life in range(1, 4):  # as often as there are engines
        remembering.lives["p:1"] = life
        number = send(sender, address("p:1"))
        assert inbox.answer(number) == Done(number)
    assert sender.snapshot().engines == 4
    assert not any(engine.closed.is_set() for engine in remembering.made)


def test_with_every_engine_knowing_it_one_is_given_up_at_most_once_a_while(
    remembering, sender_of, send, inbox, address, wait_until, monkeypatch
):
    """A peer could otherwise make us close engine after engine, which stops everything each time."""
    sender = sender_of(make_engine=remembering.make, engines=1, max_engines=2)
    peer = address("p:1")
    inbox.answer(send(sender, peer))
    remembering.lives["p:1"] = 1
    assert isinstance(inbox.answer(send(sender, peer)), Done)
    remembering.lives["p:1"] = 2
    assert isinstance(inbox.answer(send(sender, peer)), Failed)  # both engines know it
    wait_until(lambda: remembering.made[0].closed.is_set(), what="the oldest engine's end")
    wait_until(lambda: isinstance(inbox.answer(send(sender, peer)), Done), what="the third life")

    remembering.lives["p:1"] = 3
    for _ in range(5):
        assert isinstance(inbox.answer(send(sender, peer)), Failed)
    assert len(remembering.made) == 3, "not again so soon"
    monkeypatch.setattr(engine_pool, "_RENEW_PAUSE_S", 0.0)
    wait_until(lambda: isinstance(inbox.answer(send(sender, peer)), Done), what="the fourth life")


def test_introducing_itself_again_and_again_closes_no_engine(remembering, sender_of, send, inbox, address):
    sender = sender_of(make_engine=remembering.make)
    sender.registered("p:1")
    for _ in range(10):
        number = send(sender, address("p:1"))
        assert inbox.answer(number) == Done(number)
        sender.registered("p:1")
    assert len(remembering.made) == 4
    assert not any(engine.closed.is_set() for engine in remembering.made)


def test_a_write_that_is_refused_at_first_contact_makes_no_engines(sender_of, send, inbox, script, address):
    """Whoever names memory it has not registered is refused, and costs nothing else."""

    def write(engine, session, slices):
        raise WriteRefused("not registered")

    script.write = write
    sender = sender_of(make_engine=script.make, engines=1)
    for _ in range(6):
        assert isinstance(inbox.answer(send(sender, address("p:1"))), Failed)
    assert len(script.made) == 1


def test_a_write_that_timed_out_makes_no_engines(sender_of, send, inbox, script, address):
    sender = sender_of(make_engine=script.make, engines=1)
    inbox.answer(send(sender, address("p:1")))

    def write(engine, session, slices):
        raise WriteTimedOut("no progress", released=True)

    script.write = write
    number = send(sender, address("p:1"))
    assert inbox.answer(number).may_land_late
    assert inbox.settled(number).by_probe
    assert len(script.made) == 1


def test_of_receivers_that_come_and_go_only_the_latest_are_remembered(script, pool_of, monkeypatch):
    monkeypatch.setattr(engine_pool, "_MAX_KNOWN", 3)
    pool = pool_of(script, engines=1, max_engines=1)
    for peer in (0, 1, 2, 0, 3):
        pool.write(f"p:{peer}", [(1, 2, 3)])
    assert [pool.needs_open(f"p:{peer}") for peer in range(4)] == [False, True, False, False]
    pool.close()
