"""ZMQ's own threads stand back behind the thread that sends, where the system lets them."""

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import zmq

from encodepool_worker.messaging import make_context


def threads():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@contextmanager
def threads_of(context):
    """Those that its first socket starts."""
    before = threads()
    socket = context.socket(zmq.PUSH)
    yield threads() - before
    socket.close()
    context.term()


def classes(tasks):
    return [os.sched_getscheduler(task) for task in tasks]


def test_the_threads_of_a_context_are_of_the_batch_class_and_ours_stay_as_they_are(wait_until):
    with threads_of(make_context()) as both:  # the one that sends and receives, the one that closes
        wait_until(lambda: classes(both) == [os.SCHED_BATCH] * 2)
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER


def test_where_the_class_is_forbidden_there_is_a_context_all_the_same(monkeypatch):
    def forbidden(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with threads_of(make_context()) as both:
        assert classes(both) == [os.SCHED_OTHER] * 2
