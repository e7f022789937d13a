import asyncio

import pytest

from encodepool_operator.controller.queue import KeyQueue


@pytest.fixture
def queue(clock):
    return KeyQueue(clock)


def ready(queue):
    """The keys that can be taken now, in order; none of them is given back."""
    taken = []
    while (key := queue.take_due()[0]) is not None:
        taken.append(key)
    return taken


def test_a_key_named_often_is_there_once(queue):
    for key in ("a", "b", "a", "a", "b"):
        queue.add(key)
    assert queue.depth == 2
    assert ready(queue) == ["a", "b"]


def test_an_earlier_time_wins_and_a_later_one_does_not(queue, clock):
    queue.add("a", 10)
    queue.add("a", 20)
    queue.add("b", 10)
    queue.add("b", 1)
    assert ready(queue) == []
    clock.pass_s(1)
    assert ready(queue) == ["b"]
    clock.pass_s(9)
    assert ready(queue) == ["a"]
    clock.pass_s(100)
    queue.done("a")
    queue.done("b")
    assert ready(queue) == []  # the times that were overtaken bring nothing


def test_a_key_that_is_worked_on_waits_until_it_is_done(queue):
    queue.add("a")
    assert ready(queue) == ["a"]
    queue.add("a")
    queue.add("a")
    queue.add("b")
    assert ready(queue) == ["b"]
    queue.done("a")
    assert ready(queue) == ["a"]
    queue.done("a")
    assert ready(queue) == []


def test_a_waiting_worker_is_woken(clock):
    async def story():
        queue = KeyQueue(clock)
        waiting = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.add("a")
        return await asyncio.wait_for(waiting, 1)

    assert asyncio.run(story()) == "a"


def test_a_forgotten_key_does_not_come(queue):
    queue.add("a")
    queue.forget("a")
    assert ready(queue) == []


def test_the_age_is_that_of_the_longest_wait_or_work(queue, clock):
    assert queue.age_s == 0
    queue.add("later", 50)
    assert queue.age_s == 0  # it is not due
    queue.add("a")
    clock.pass_s(5)
    assert (queue.age_s, queue.depth) == (5, 1)
    assert ready(queue) == ["a"]
    clock.pass_s(7)
    assert queue.age_s == 7
    queue.done("a")
    assert queue.age_s == 0
