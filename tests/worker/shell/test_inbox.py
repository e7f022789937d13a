"""The inbox: answers in their order and never held up, sources as they have something."""

import os
import threading
import time

import pytest

from encodepool_worker.core.events import Aborted, Written
from encodepool_worker.shell.inbox import Inbox


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
def inbox():
    inbox = Inbox()
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


def test_no_answer_is_slept_over(inbox):
    """Two threads in turn: each answer is given while the other goes to sleep, wakes up or is awake."""
    n_answers = 5000
    taken = threading.Semaphore(0)

    def answer():
        for number in range(n_answers):
            inbox.answer(Written(number))
            if number % 3:
                taken.acquire()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    got = []
    while len(got) < n_answers:
        events = inbox.take(10)
        assert events, f"asleep beside {len(got)} of {n_answers} answers"
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
