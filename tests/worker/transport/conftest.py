"""Receivers in their own processes, a region to send from, and a check that nothing is left over."""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from encodepool_worker.transport.base import Done, Failed, Settled
from encodepool_worker.transport.mooncake import MooncakeEngine
from encodepool_worker.transport.sender import Sender
from encodepool_worker.transport.sender_types import SenderLimits
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.types import Slice

RECEIVER = Path(__file__).with_name("receiver.py")


def wait_until(condition, timeout_s=10.0, what="the condition"):
    """Poll until ``condition()`` is true and return its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {timeout_s} s")
        time.sleep(0.005)
    return value


@pytest.fixture(name="wait_until")
def _wait_until():
    return wait_until


class Region:
    """Anonymous memory with an address."""

    def __init__(self, nbytes):
        self.memory = mmap.mmap(-1, nbytes)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = nbytes

    def fill(self, byte):
        self.memory[:] = bytes([byte]) * self.nbytes


class ReceiverProcess:
    """A receiver in another process. ``ask(do, ...)`` sends a command and returns the answer."""

    def __init__(self, engine, nbytes):
        self.process = subprocess.Popen(
            [sys.executable, str(RECEIVER), engine, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._line()
        self.session, self.ptr, self.nbytes = first["session"], first["ptr"], first["nbytes"]

    def _line(self):
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError("the receiver ended")
            if line.startswith("{"):  # Mooncake prints a few lines of its own
                return json.loads(line)

    def ask(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def first_and_last(self):
        read = self.ask("read", at=0, nbytes=self.nbytes)
        return read["first"], read["last"]

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        # Until all of its threads stand still: one that waits for a core may answer a probe meanwhile.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def threads_and_fds():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def mooncake_warm():
    """What Mooncake keeps for the whole process exists before anything is counted."""
    MooncakeEngine("127.0.0.1").close()


@pytest.fixture(autouse=True)
def nothing_left_over(mooncake_warm):
    """Threads and file descriptors are as many after a test as before."""
    before = threads_and_fds()
    threads_before = set(threading.enumerate())
    yield

    def back_to_normal():
        threads, fds = threads_and_fds()
        return threads <= before[0] and fds <= before[1]

    wait_until(back_to_normal, 65.0, f"threads and fds {before}")
    left = set(threading.enumerate()) - threads_before
    assert [thread.name for thread in left if thread.name.startswith("encodepool")] == []


@pytest.fixture
def region():
    return Region(1 << 20)


@pytest.fixture
def make_region():
    return Region


@pytest.fixture
def receiver_of(nothing_left_over):
    """Start receivers: ``receiver_of("tcp")``."""
    started = []

    def start(engine, nbytes=1 << 20):
        started.append(ReceiverProcess(engine, nbytes))
        return started[-1]

    yield start
    for receiver in started:
        receiver.close()


@pytest.fixture
def engine_of(nothing_left_over):
    """Make engines of this process: ``engine_of("tcp")``."""
    made = []

    def make(name, timeout_s=5.0):
        if name == "tcp":
            engine = TcpEngine("127.0.0.1", timeout_s=timeout_s)
        else:
            engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=timeout_s)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


# --- senders

QUICK = {
    "probe_timeout_s": 0.3,
    "probe_pause_s": 0.05,
    "open_timeout_s": 0.2,
    "lane_patience_s": 0.1,
    "slow_s": 0.05,
    "breaker_s": 0.2,
    "probe_fresh_s": 0.2,
}


class Inbox:
    """Where the sender posts to. Checks what is promised of each write's events."""

    def __init__(self, wait_until):
        self._wait_until = wait_until
        self._lock = threading.Lock()
        self.events = []
        self.at_s = {}

    def __call__(self, event):
        with self._lock:
            self.events.append(event)
            self.at_s.setdefault(event.write_id, time.monotonic())

    def of(self, write_id):
        with self._lock:
            return [event for event in self.events if event.write_id == write_id]

    def answer(self, write_id, timeout_s=10.0):
        """The Done or Failed of a write."""
        return self._wait_until(lambda: self.of(write_id), timeout_s, f"an answer to write {write_id}")[0]

    def settled(self, write_id, timeout_s=10.0):
        return self._wait_until(lambda: self.of(write_id)[1:], timeout_s, f"the end of write {write_id}")[0]

    def check(self):
        """One answer each; Settled exactly after a Failed that may land late, and behind it."""
        for write_id in {event.write_id for event in self.events}:
            first, *rest = self.of(write_id)
            assert isinstance(first, Done | Failed)
            late = isinstance(first, Failed) and first.may_land_late
            assert [type(event) for event in rest] == ([Settled] if late else []), self.of(write_id)


@pytest.fixture
def inbox(wait_until):
    inbox = Inbox(wait_until)
    yield inbox
    inbox.check()


@pytest.fixture
def sender_of(inbox, region, nothing_left_over):
    """Make a sender over tcp engines: ``sender_of(timeout_s=..., make_engine=..., **limits)``."""
    made = []

    def make(timeout_s=0.5, make_engine=None, **limits):
        make_engine = make_engine or (lambda: TcpEngine("127.0.0.1", timeout_s=timeout_s))
        sender = Sender(make_engine, [region], inbox, SenderLimits(**{**QUICK, **limits}))
        made.append(sender)
        return sender

    yield make
    for sender in made:
        assert sender.close()


@pytest.fixture
def send(inbox):
    """Submit one write of ``nbytes`` from the start of the region; returns its number."""
    numbers = iter(range(1, 1_000_000))

    def send(sender, receiver, nbytes=1000, source=0):
        write_id = next(numbers)
        sender.submit(write_id, receiver.session, [Slice(source, receiver.ptr + source, nbytes)])
        return write_id

    return send


class ScriptedEngine:
    """An engine whose calls do what the test says; for orders that no real peer plays on demand."""

    def __init__(self, script):
        self.script = script
        self.session = "127.0.0.1:9"
        self.closed = threading.Event()

    def register(self, ptr, nbytes, *, receives=True):
        pass

    def unregister(self, ptr):
        pass

    def probe(self, session):
        return self.script.probe(self, session)

    def write(self, session, slices):
        self.script.write(self, session, slices)

    def close(self):
        self.closed.set()


class Script:
    """Default behaviour: every probe is answered, every write lands. ``made`` are the engines."""

    def __init__(self):
        self.made = []
        self.writes = []

    def make(self):
        self.made.append(ScriptedEngine(self))
        return self.made[-1]

    def probe(self, engine, session):
        return True

    def write(self, engine, session, slices):
        self.writes.append((self.made.index(engine), session))


class Address:
    """A peer that only a script knows."""

    def __init__(self, session):
        self.session = session
        self.ptr = 4096


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def address():
    """Make a peer that only a script knows: ``address("p:1")``."""
    return Address
