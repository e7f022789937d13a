"""Closing an engine on request: the pipeline asks for it when late writes pin too many bytes."""

import threading

import pytest

from encodepool_worker.errors import WriteTimedOut, WriteTorn
from encodepool_worker.transport.base import Failed, Settled
from encodepool_worker.transport.sender import Sender
from encodepool_worker.transport.sender_types import SenderLimits


@pytest.fixture
def silent_peer(script):
    """Every write times out without the engine letting go; probes are answered before, never after."""
    woken = threading.Event()

    def probe(engine, session):
        if script.writes:
            woken.wait(0.3)  # longer than the probe timeout: silent, not refused
            return False
        return True

    def write(engine, session, slices):
        script.writes.append(engine)
        raise WriteTimedOut("no progress")

    script.probe, script.write = probe, write
    yield
    woken.set()


LIMITS = SenderLimits(probe_timeout_s=0.2, probe_pause_s=0.05, engines=1, max_unsettled_s=30.0)


def test_a_late_write_is_settled_by_closing_its_engine(
    sender_of, send, inbox, script, address, silent_peer, wait_until
):
    sender = sender_of(make_engine=script.make, probe_timeout_s=0.2, engines=1, max_unsettled_s=30.0)
    number = send(sender, address("p:1"))
    assert inbox.answer(number).may_land_late
    wait_until(lambda: sender.snapshot().unsettled == 1)
    sender.retire(number + 1)
    assert inbox.of(number)[1:] == []
    sender.retire(number)
    assert inbox.settled(number) == Settled(number, by_probe=False)
    assert script.made[0].closed.is_set()


def test_a_request_made_while_the_failure_is_being_told_is_not_lost(
    region, send, inbox, script, address, silent_peer
):
    """The pipeline decides in the moment it hears of the failure, before the sender has noted it."""

    def post(event):
        inbox(event)
        if isinstance(event, Failed):
            sender.retire(event.write_id)

    sender = Sender(script.make, [region], post, LIMITS)
    number = send(sender, address("p:1"))
    assert inbox.settled(number) == Settled(number, by_probe=False)
    assert script.made[0].closed.is_set()
    sender.close()


@pytest.mark.parametrize(("error", "registers"), [(WriteTorn, False), (WriteTimedOut, True)])
def test_the_engine_of_a_late_write_is_closed_although_its_peer_has_moved_on(
    sender_of, send, inbox, script, address, error, registers
):
    """A torn write, or a peer that registers anew, moves the peer to another engine: not its late write."""
    silent, never = threading.Event(), threading.Event()
    # Longer than the probe timeout: silent, not refused.
    script.probe = lambda engine, session: not silent.is_set() or never.wait(0.3)
    sender = sender_of(make_engine=script.make, probe_timeout_s=0.2, max_unsettled_s=30.0)
    inbox.answer(send(sender, address("p:1")))
    [wrote] = {engine for engine, _ in script.writes}

    def write(engine, session, slices):
        silent.set()
        if registers:
            sender.registered(session)
        raise error("some of it is under way")

    script.write = write
    number = send(sender, address("p:1"))
    assert inbox.answer(number).may_land_late
    sender.retire(number)
    assert inbox.settled(number) == Settled(number, by_probe=False)
    assert script.made[wrote].closed.is_set()
