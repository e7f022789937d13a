"""The inbox: answers in their order and never held up, sources as they have something."""

import os
import threading
import time
from collections import deque

import pytest

from encodepool_worker.core.events import Aborted, Written
from encodepool_worker.shell.inbox import ENOUGH, Inbox


class Pipe:
    """A source with something to read for each byte in its pipe; ``at_once`` of them at a time."""

    def __init__(self, at_once=2):
        self._out, self._in = os.pipe2(os.O_NONBLOCK)
        self._at_once = at_once
        self.due = float("inf")
        self.reads = 0

    def fileno(self):
        return self._out

    def due_s(self):
        return self.due

    def read(self):
        self.reads += 1
        try:
            return [Aborted(room, "") for room in os.read(self._out, self._at_once)]
        except BlockingIOError:
            return []

    def put(self, *rooms):
        os.write(self._in, bytes(rooms))

    def close(self):
        os.close(self._in)
        os.close(self._out)


@pytest.fixture
def crashes():
    return []


@pytest.fixture
def inbox(crashes):
    inbox = Inbox(crashes.append)
    yield inbox
    inbox.close()


@pytest.fixture
def pipe(inbox):
    pipe = Pipe()
    inbox.listen(pipe)
    yield pipe
    pipe.close()


def test_answers_come_out_in_order_and_all_at_once(inbox):
    sent = [Written(1), Written(2), Written(3)]
    for event in sent:
        inbox.answer(event)
    assert inbox.take(0) == sent
    assert inbox.take(0) == []


def test_taking_waits_for_an_answer_and_no_longer(inbox):
    taken = []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take(30)), daemon=True)
    reader.start()
    inbox.answer(Written(1))
    reader.join(5)
    assert taken == [Written(1)]


def test_taking_returns_empty_when_the_time_is_over(inbox):
    started_s = time.monotonic()
    assert inbox.take(0.05) == []
    assert 0.04 < time.monotonic() - started_s < 5


class Prompt(deque):
    """Answers, another one of which comes right after somebody has looked whether there are any."""

    def __init__(self, answer):
        super().__init__()
        self._answer = answer

    def __bool__(self):
        there = len(self) > 0
        answer, self._answer = self._answer, lambda: None
        answer()
        return there


def test_an_answer_between_looking_and_sleeping_is_not_slept_over(inbox):
    inbox._answers = Prompt(lambda: inbox.answer(Written(1)))
    started_s = time.monotonic()
    assert inbox.take(30) == [Written(1)]
    assert time.monotonic() - started_s < 10


def test_whoever_sees_the_owner_asleep_has_left_the_answer_before(inbox):
    """Else the owner wakes up for nothing, sleeps again, and the answer comes a sleep later."""

    class Late(deque):
        def append(self, event):
            inbox._asleep = True  # as if it had gone to sleep just before
            super().append(event)

    inbox._answers = Late()
    inbox.answer(Written(1))
    assert not inbox._asleep, "it was told to wake up after the answer was there"
    assert inbox.take(0) == [Written(1)]


def test_two_threads_in_turn_lose_no_answer(inbox):
    n_answers = 5000
    taken = threading.Semaphore(0)

    def answer():
        for number in range(n_answers):
            inbox.answer(Written(number))
            if number % 3:
                taken.acquire()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    got, until_s = [], time.monotonic() + 60
    while len(got) < n_answers and time.monotonic() < until_s:
        events = inbox.take(10)
        got += events
        for _ in events:
            taken.release()
    thread.join(5)
    assert [event.write for event in got] == list(range(n_answers))


def test_a_source_that_becomes_readable_ends_the_wait(inbox, pipe):
    taken = []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take(30)), daemon=True)
    reader.start()
    pipe.put(7)
    reader.join(5)
    assert taken == [Aborted(7, "")]


def test_a_flood_at_one_source_holds_up_neither_answers_nor_other_sources(inbox, pipe):
    other = Pipe()
    inbox.listen(other)
    pipe.put(*range(100))
    other.put(200)
    inbox.answer(Written(9))
    first = inbox.take(5)
    assert first[0] == Written(9)
    assert Aborted(200, "") in first
    assert len(first) == 4, "of the flood only what the source gives at once"
    inbox.answer(Written(10))
    assert inbox.take(5)[0] == Written(10)
    other.close()


def test_a_source_is_read_when_it_is_due_though_nothing_is_readable(inbox, pipe):
    pipe.due = time.monotonic() + 0.05
    assert inbox.take(30) == []
    assert pipe.reads == 1
    assert time.monotonic() >= pipe.due
    pipe.due = float("inf")
    assert inbox.take(0) == []
    assert pipe.reads == 1


def test_a_turn_takes_so_much_from_outside_and_the_next_goes_on_where_it_ended(inbox):
    pipes = [Pipe(at_once=ENOUGH) for _ in range(4)]
    for pipe in pipes:
        inbox.listen(pipe)
        pipe.put(*[number % 256 for number in range(2 * ENOUGH)])
    for _ in range(4):
        assert len(inbox.take(5)) == ENOUGH
    assert [pipe.reads for pipe in pipes] == [1, 1, 1, 1]
    for pipe in pipes:
        pipe.close()


def test_a_source_that_cannot_be_read_is_given_up_and_the_others_go_on(inbox, pipe, crashes):
    class Broken(Pipe):
        def read(self):
            raise OSError("no space left")

    broken = Broken()
    inbox.listen(broken)
    broken.put(1)
    pipe.put(7)
    inbox.answer(Written(1))
    assert inbox.take(5) == [Written(1), Aborted(7, "")]
    assert inbox.take(0) == []
    assert crashes == ["Broken cannot be read: OSError('no space left')"]
    broken.close()
