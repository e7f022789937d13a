"""Everything a network can do to a write, by the shipped `tcp` transport between real processes.

The receiver is the shipped client's, in this process, so that its end of the transport can be told to
misbehave. The rule in all of it: Success means that the rows are there, Failed that nothing will be
written any more, and whatever happened to one room, the next one arrives.
"""

import time

import pytest
from tests.e2e.gateway import image_request
from tests.e2e.receiving import HIDDEN, LEVELS

from encodepool_worker.client.receiver import PrefillRank, Shard
from encodepool_worker.errors import ClientError
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.transport.tcp_faults import Fault
from encodepool_worker.types import RowLayout

pytestmark = pytest.mark.real

TIMEOUT_S, QUARANTINE_S = 1, 2
WORKER = {
    "transfer_backend": "tcp",
    "transfer_timeout_seconds": TIMEOUT_S,
    "quarantine_seconds": QUARANTINE_S,
    "drain_seconds": 5,
}
TOLD_S = 1.0 + 2.0
"""The second of the contract, and two more for two busy cores."""


class Receiver:
    """One prefill rank whose engine can be made to misbehave."""

    def __init__(self, worker):
        self.engine = TcpEngine("127.0.0.1")
        self.faults = self.engine.faults
        self.rank = PrefillRank(self.engine, "127.0.0.1", arena_bytes=8 << 20)
        self._address = ("127.0.0.1", worker.bootstrap_port)

    def ask(self, room, picture):
        layout = RowLayout(picture.tokens, HIDDEN, LEVELS, "float32")
        return self.rank.announce(self._address, room, layout, Shard(0, picture.tokens), 5.0)

    def rows(self, offer, timeout_s=20.0):
        """(main, deepstack) bytes; ClientError for Failed and for silence."""
        got = self.rank.wait(offer, timeout_s)
        return got.main.tobytes(), got.deepstack.tobytes()


@pytest.fixture
def open_receiver(worker):
    opened = []

    def make():
        opened.append(Receiver(worker))
        return opened[-1]

    yield make
    for receiver in opened:
        receiver.rank.close()


@pytest.fixture
def receiver(open_receiver):
    return open_receiver()


@pytest.fixture
def encoded(worker, new_room, new_picture):
    """A room whose request was accepted, and its image."""

    def make(**picture):
        room, image = new_room(), new_picture(8, 8, **picture)
        assert worker.encode(image_request(room, image)).accepted
        return room, image

    return make


@pytest.fixture
def arrives(encoded, direct):
    """``arrives(receiver)``: a new room arrives there, byte for byte; seconds it took."""

    def check(receiver):
        room, image = encoded()
        asked_s = time.monotonic()
        rows = direct(image)
        assert receiver.rows(receiver.ask(room, image)) == (rows.main, rows.deepstack)
        return time.monotonic() - asked_s

    return check


def failed(receiver, offer):
    with pytest.raises(ClientError, match="failed room"):
        receiver.rows(offer)
    return time.monotonic()


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE, Fault.DUPLICATE, Fault.REORDER])
def test_a_write_lost_cut_short_doubled_or_out_of_order_still_arrives_whole(
    fault, receiver, encoded, direct, arrives
):
    """A lost one is written again; Success is not said before all of it is there."""
    arrives(receiver)
    room, image = encoded()
    receiver.faults.plan(fault)
    rows = direct(image)
    assert receiver.rows(receiver.ask(room, image)) == (rows.main, rows.deepstack)
    receiver.faults.land()
    arrives(receiver)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE])
def test_a_write_that_is_lost_twice_fails_at_once_and_only_its_room(fault, receiver, encoded, arrives):
    room, image = encoded()
    receiver.faults.plan(fault, fault)
    asked_s = time.monotonic()
    assert failed(receiver, receiver.ask(room, image)) - asked_s < TOLD_S
    arrives(receiver)


def test_a_flipped_bit_spoils_one_shipment_and_never_the_stored_rows(receiver, encoded, direct):
    """Beyond TCP's own checksum nobody looks at the bytes (docs/limits.md); asked again, they are right."""
    room, image = encoded()
    receiver.faults.plan(Fault.CORRUPT)
    main, deepstack = receiver.rows(receiver.ask(room, image))
    rows = direct(image)
    assert [a ^ b for a, b in zip(main, rows.main, strict=True) if a != b] == [1]
    assert deepstack == rows.deepstack
    assert receiver.rows(receiver.ask(room, image)) == (rows.main, rows.deepstack)


def test_a_slow_receiver_is_waited_for_and_delays_nobody(open_receiver, encoded, direct, arrives):
    slow, healthy = open_receiver(), open_receiver()
    arrives(slow)
    slow.faults.delay(TIMEOUT_S / 2)
    room, image = encoded()
    offer = slow.ask(room, image)
    assert arrives(healthy) < 1
    rows = direct(image)
    assert slow.rows(offer) == (rows.main, rows.deepstack)


def test_late_bytes_land_before_the_receiver_is_told_failed(
    open_receiver, encoded, arrives, worker, wait_for
):
    """Failed lets it free the memory. Until then the room's own bytes may come, and after it nothing."""
    receiver, healthy = open_receiver(), open_receiver()
    arrives(receiver)
    room, image = encoded()
    receiver.faults.plan(Fault.LATE)
    offer = receiver.ask(room, image)
    asked_s = time.monotonic()
    assert arrives(healthy) < 1, "nobody else waits"
    told_s = failed(receiver, offer)
    assert TIMEOUT_S + QUARANTINE_S - 0.1 < told_s - asked_s < TIMEOUT_S + QUARANTINE_S + TOLD_S
    wait_for(lambda: worker.metrics()["encodepool_store_pinned_bytes"] == 0, what="the memory's release")
    arrives(receiver)


def test_a_frozen_receiver_costs_its_own_rooms_and_is_served_when_it_thaws(
    open_receiver, encoded, arrives, wait_for
):
    frozen, healthy = open_receiver(), open_receiver()
    arrives(frozen)
    frozen.faults.freeze()
    offers = [frozen.ask(*encoded()) for _ in range(3)]
    assert max(arrives(healthy) for _ in range(10)) < 1
    for offer in offers:
        failed(frozen, offer)  # nothing was sent that could land late, so it is told
    frozen.faults.thaw()

    def served():
        try:
            return arrives(frozen)
        except ClientError:
            return None  # its breaker is open for two seconds

    wait_for(served, 10, "the first room after the thaw")


def test_a_receiver_that_is_gone_costs_its_own_room_only(open_receiver, encoded, arrives, worker, wait_for):
    gone, healthy = open_receiver(), open_receiver()
    arrives(gone)
    gone.engine.close()
    room, image = encoded()
    offer = gone.ask(room, image)
    assert arrives(healthy) < 1
    failed(gone, offer)
    wait_for(lambda: f"room={room} " in worker.log_tail(), 5, "the lost room's line in the log")
    [line] = [line for line in worker.log_tail().splitlines() if f"room={room} " in line]
    assert "room failed" in line
    assert "Submitted" in line, "the line tells the room's story"
    assert "Ship(" in line
