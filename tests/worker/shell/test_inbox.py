"""The inbox: order kept, outside events bounded, answers never held up."""

import threading
import time

from encodepool_worker.core.events import Aborted, Written
from encodepool_worker.shell.inbox import Inbox


def test_events_come_out_in_order_and_all_at_once():
    inbox = Inbox()
    sent = [Aborted(1, "x"), Written(2), Aborted(3, "y")]
    inbox.put(sent[0])
    inbox.answer(sent[1])
    inbox.put(sent[2])
    assert inbox.take(0) == sent
    assert inbox.take(0) == []


def test_taking_waits_for_an_event_and_no_longer(wait_until):
    inbox = Inbox()
    taken = []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take(30)), daemon=True)
    reader.start()
    inbox.answer(Written(1))
    reader.join(5)
    assert taken == [Written(1)]


def test_taking_returns_empty_when_the_time_is_over():
    started_s = time.monotonic()
    assert Inbox().take(0.05) == []
    assert 0.04 < time.monotonic() - started_s < 5


def test_a_full_inbox_holds_up_the_outside_but_not_the_answers(wait_until):
    inbox = Inbox(max_outside=2)
    for room in (1, 2):
        inbox.put(Aborted(room, ""))
    done = threading.Event()
    threading.Thread(target=lambda: (inbox.put(Aborted(3, "")), done.set()), daemon=True).start()
    inbox.answer(Written(9))
    assert not done.wait(0.1)

    assert [type(event) for event in inbox.take(0)] == [Aborted, Aborted, Written]
    assert done.wait(5)
    assert inbox.take(5) == [Aborted(3, "")]


def test_closing_frees_whoever_waits_and_takes_nothing_more():
    inbox = Inbox(max_outside=1)
    inbox.put(Aborted(1, ""))
    results = []
    waiting = threading.Thread(target=lambda: results.append(inbox.put(Aborted(2, ""))), daemon=True)
    waiting.start()
    inbox.close()
    waiting.join(5)
    assert results == [False]
    assert inbox.put(Aborted(3, "")) is False
    assert inbox.take(0) == [Aborted(1, "")]
