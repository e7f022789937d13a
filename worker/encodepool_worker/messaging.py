"""ZMQ contexts whose background threads let the thread that sends go on."""

import os
import threading

import zmq


def make_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for a thread that must not wait for what it sends.

    Each message wakes the context's thread, and Linux may let that run on the sender's own core at once,
    through the whole network stack, while the sender stands still: 100 to 350 us a message on two cores,
    10 to 50 with this (``docs/decisions/0012``). Threads of the batch class
    do not preempt the one that woke them.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if _may_be_batch():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def _may_be_batch() -> bool:
    """Tried out first: where a sandbox forbids the class, ZMQ would end the process."""
    worked: list[bool] = []

    def attempt() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread alone
        except OSError:
            return
        worked.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(worked)
