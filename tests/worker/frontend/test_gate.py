"""Calls wait in order for room in the account, and giving up leaves nothing behind."""

import asyncio

import pytest

from encodepool_worker.frontend import gate as gate_module
from encodepool_worker.frontend.admission import Account, Limits, NoCredit
from encodepool_worker.frontend.gate import Gate

LIMITS = Limits(pixel_bytes=200_000, message_bytes=100_000, queue_tokens=1, queue_s=1.0)


async def settle():
    """Lets everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_calls_are_let_in_in_the_order_they_came():
    async def story():
        gate = Gate(Account(LIMITS))
        first, second = await gate.enter(), await gate.enter()
        order = []

        async def call(name):
            order.append((name, await gate.enter()))

        waiting = [asyncio.create_task(call(name)) for name in "abc"]
        await settle()
        assert (order, gate.waiting) == ([], 3)

        gate.account.drop(first)
        gate.refresh()
        await settle()
        assert [name for name, _ in order] == ["a"]

        gate.account.measured(second, 65536)
        gate.account.drop(order[0][1])
        gate.refresh()
        await settle()
        assert [name for name, _ in order] == ["a", "b"]
        waiting[2].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert gate.waiting == 0

    asyncio.run(story())


def test_a_call_that_gives_up_while_waiting_is_passed_over():
    async def story():
        gate = Gate(Account(LIMITS))
        holds = [await gate.enter(), await gate.enter()]
        gone, next_in_line = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
        await settle()
        gone.cancel()
        await settle()
        gate.account.drop(holds[0])
        gate.refresh()
        assert isinstance(await next_in_line, int)
        assert gate.account.readers == 2

    asyncio.run(story())


def test_a_call_cancelled_in_the_turn_in_which_it_is_let_in_gives_its_hold_back():
    async def story():
        gate = Gate(Account(LIMITS))
        holds = [await gate.enter(), await gate.enter()]
        gone, next_in_line = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
        await settle()
        gate.account.drop(holds[0])
        gate.refresh()
        gone.cancel()
        assert isinstance(await next_in_line, int)
        assert gone.cancelled()
        assert gate.account.readers == 2

    asyncio.run(story())


def test_the_number_of_waiting_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_WAITING", 1)

    async def story():
        gate = Gate(Account(LIMITS))
        await gate.enter(), await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await settle()
        with pytest.raises(NoCredit, match="waiting to be read"):
            await gate.enter()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(story())
