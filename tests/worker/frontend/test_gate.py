"""Calls wait for a place to be read: known connections in turn, new ones in a place of their own."""

import asyncio

import pytest

from encodepool_worker.frontend import gate as gate_module
from encodepool_worker.frontend.admission import Account, Limits, NoCredit
from encodepool_worker.frontend.gate import Gate

MESSAGE = 100_000
LIMITS = Limits(pixel_bytes=4 * MESSAGE, message_bytes=MESSAGE)
SMALL = 65_536


async def settle():
    """Lets everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


class Calls:
    """Calls at one gate, by name; ``holds`` are those that were let in, in order."""

    def __init__(self, hurried_s=5.0):
        self.gate = Gate(Account(LIMITS), hurried_s)
        self.holds = {}
        self.tasks = {}

    async def _enter(self, peer, name):
        self.holds[name] = await self.gate.enter(peer)

    async def come(self, peer, *names):
        for name in names:
            self.tasks[name] = asyncio.create_task(self._enter(peer, name))
            await settle()

    async def known(self, *peers):
        """These connections have each delivered a request."""
        for peer in peers:
            await self.come(peer, f"first of {peer}")
            self.gate.measured(self.holds[f"first of {peer}"], SMALL)
            self.end(f"first of {peer}")
        await settle()

    def end(self, name):
        self.gate.drop(self.holds.pop(name))

    @property
    def names(self):
        return list(self.holds)

    async def leave(self):
        for task in self.tasks.values():
            task.cancel()
        ends = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError | NoCredit) for end in ends), ends
        for name in self.names:
            self.end(name)
        assert self.gate.waiting == 0
        assert self.gate.account.held_bytes == 0
        assert self.gate._reading == {}


def story(test):
    """The test as a coroutine with ``calls``, which must leave nothing behind."""

    def run():
        async def whole():
            calls = Calls()
            await test(calls)
            await calls.leave()

        asyncio.run(whole())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@story
async def test_new_connections_share_one_place_and_leave_the_others_alone(calls):
    await calls.known("old")
    for peer in "abcd":
        await calls.come(peer, f"{peer}1", f"{peer}2")
    assert calls.names == ["a1"]
    await calls.come("old", "o1", "o2")
    assert calls.names == ["a1", "o1", "o2"]


@story
async def test_the_newest_of_the_new_comes_next(calls):
    """Those that went silent before it must not stand in front of one that means it."""
    for peer in "abc":
        await calls.come(peer, peer)
    calls.end("a")
    await settle()
    assert calls.names == ["c"]


@story
async def test_known_connections_read_in_turn_and_never_hold_every_place(calls):
    await calls.known("greedy", "modest")
    await calls.come("greedy", "g1", "g2", "g3", "g4")
    assert calls.names == ["g1", "g2"]
    await calls.come("modest", "m1", "m2")
    assert calls.names == ["g1", "g2", "m1"], "one place is left for new connections"
    calls.end("g1")
    await settle()
    assert calls.names == ["g2", "m1", "g3"]
    calls.end("g2")
    await settle()
    assert calls.names == ["m1", "g3", "m2"]
    await calls.come("stranger", "s1")
    assert calls.names == ["m1", "g3", "m2", "s1"]


@story
async def test_a_connection_is_known_with_its_first_request(calls):
    await calls.come("a", "a1", "a2", "a3")
    assert calls.names == ["a1"]
    calls.gate.measured(calls.holds["a1"], SMALL)
    await settle()
    assert calls.names == ["a1", "a2", "a3"], "what waited came along"


@story
async def test_a_full_queue_leaves_a_place_for_each_side(calls):
    await calls.known("old", "older")
    account = calls.gate.account
    for seq in range(2):
        hold = account.start_reading()
        account.hand_over(hold, seq, 1)
    assert account.queued_bytes == LIMITS.queued_bytes
    await calls.come("new", "n1", "n2")
    await calls.come("old", "o1")
    await calls.come("older", "o2")
    assert calls.names == ["n1", "o1"]
    calls.end("o1")
    await settle()
    assert calls.names == ["n1", "o2"]
    for seq in range(2):
        account.credit(seq)
    calls.gate.refresh()


@story
async def test_a_call_that_gives_up_while_waiting_is_passed_over(calls):
    await calls.come("a", "reads")
    await calls.come("b", "next")
    await calls.come("c", "gone")
    calls.tasks["gone"].cancel()
    await settle()
    calls.end("reads")
    await settle()
    assert calls.names == ["next"]


@story
async def test_a_call_cancelled_in_the_turn_in_which_it_is_let_in_gives_its_hold_back(calls):
    await calls.come("a", "reads")
    await calls.come("b", "next")
    await calls.come("c", "gone")
    calls.end("reads")
    calls.tasks["gone"].cancel()
    await settle()
    assert calls.names == ["next"]
    assert calls.gate.account.readers == 1


@story
async def test_a_reader_is_hurried_once_another_waits_for_its_place(calls):
    loop = asyncio.get_running_loop()
    calls.gate.hurried_s = 3.0
    await calls.known("old")
    began_s = loop.time()
    async with asyncio.timeout(30) as new_limit, asyncio.timeout(30) as old_limit:
        await calls.come("a", "silent")
        await calls.come("old", "o1")
        calls.gate.limit(calls.holds["silent"], new_limit)
        calls.gate.limit(calls.holds["o1"], old_limit)
        assert new_limit.when() - began_s > 20, "nobody waits"
        await calls.come("b", "waits")
        assert 2 < new_limit.when() - began_s < 4
        assert old_limit.when() - began_s > 20, "its place is not the one they wait for"


@story
async def test_a_message_that_has_arrived_is_not_hurried_while_it_is_being_looked_at(calls):
    """Its read has ended, and asyncio refuses to move the end of what has ended."""
    await calls.come("a", "reads")
    async with asyncio.timeout(30) as limit:
        calls.gate.limit(calls.holds["reads"], limit)
        calls.gate.arrived(calls.holds["reads"])
    await calls.come("b", "waits")
    assert calls.names == ["reads"]
    calls.gate.measured(calls.holds["reads"], SMALL)
    await settle()
    assert calls.names == ["reads", "waits"]


@story
async def test_a_connection_whose_message_is_late_is_new_again(calls):
    await calls.known("a", "b")
    await calls.come("a", "a1", "a2", "a3")
    assert calls.names == ["a1", "a2"]
    assert calls.gate.late(calls.holds.pop("a1")) is False
    await settle()
    assert calls.names == ["a2", "a3"], "in the place of the new"
    await calls.come("a", "a4")
    await calls.come("b", "b1", "b2")
    assert calls.names == ["a2", "a3", "b1", "b2"]


@story
async def test_the_number_of_waiting_calls_is_bounded_and_the_oldest_new_one_gives_way(calls):
    await calls.come("a", "reads")
    gate_module.MAX_WAITING, normal = 2, gate_module.MAX_WAITING
    try:
        await calls.come("b", "b1")
        await calls.come("c", "c1")
        await calls.come("d", "d1")
        assert isinstance(calls.tasks["b1"].exception(), NoCredit)
        assert calls.gate.waiting == 2
    finally:
        gate_module.MAX_WAITING = normal


@story
async def test_known_calls_are_turned_away_when_too_many_wait(calls):
    await calls.known("a")
    await calls.come("a", "a1", "a2", "a3")
    assert calls.gate.waiting == 1
    gate_module.MAX_WAITING, normal = 1, gate_module.MAX_WAITING
    try:
        with pytest.raises(NoCredit, match="waiting to be read"):
            await calls.gate.enter("a")
    finally:
        gate_module.MAX_WAITING = normal


@story
async def test_only_so_many_connections_are_remembered(calls):
    gate_module.MAX_KNOWN, normal = 2, gate_module.MAX_KNOWN
    try:
        await calls.known("a", "b", "c")
        assert list(calls.gate._known) == ["b", "c"]
    finally:
        gate_module.MAX_KNOWN = normal
