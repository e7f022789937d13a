"""The rank as a process: heartbeat, registration, drain, and last words when it cannot go on."""

import http.server
import os
import signal
import sys
import threading
import time
from functools import partial

import pytest
import zmq

from encodepool_worker.shell.__main__ import _thread_failed
from encodepool_worker.towers.tiny import write_tiny_model
from encodepool_worker.wire import intake

LOAD_SECONDS = 120
"""Importing torch and transformers takes seconds, and a minute on a machine that does much else."""

pytestmark = pytest.mark.timeout(300)


class RouteTable(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        self.server.seen.set()
        self.send_response(self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def route_table():
    server = http.server.HTTPServer(("127.0.0.1", 0), RouteTable)
    server.code, server.seen = 200, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("rank") / "model")


class Process:
    """A rank with the supervisor's ends of its pipes."""

    def __init__(self, warm_python, run_dir, model, bootstrap_port, more):
        lifeline, self.lifeline = os.pipe()
        self.heartbeat, heartbeat = os.pipe()
        self.log_path = run_dir / "log"
        flags = {
            "model": model,
            "load-format": "dummy",
            "bootstrap-port": bootstrap_port,
            "transfer-backend": "tcp",
            "store-device-mib": 1,
            "run-dir": run_dir,
            "lifeline-fd": lifeline,
            "heartbeat-fd": heartbeat,
            **more,
        }
        argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        with self.log_path.open("wb") as log:
            self.popen = warm_python.popen(
                [sys.executable, "-P", "-m", "encodepool_worker.shell", *argv],
                environ=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                pass_fds=(lifeline, heartbeat),
            )
        os.close(lifeline)
        os.close(heartbeat)

    def wait_ready(self):
        until_s = time.monotonic() + LOAD_SECONDS
        while b"r" not in os.read(self.heartbeat, 1):
            assert time.monotonic() < until_s
            assert self.popen.poll() is None, self.log_path.read_text()

    def last_words(self):
        """What follows the ``x`` on the heartbeat, once the process has ended."""
        with open(self.heartbeat, "rb", closefd=False) as pipe:
            return pipe.read().partition(b"x")[2].decode()

    def close(self):
        self.popen.kill()
        self.popen.wait()
        os.close(self.lifeline)
        os.close(self.heartbeat)


@pytest.fixture
def start(warm_python, short_dir, tiny_model, route_table):
    started = []

    def start_it(model=tiny_model, **more):
        started.append(Process(warm_python, short_dir, model, route_table.server_port, more))
        return started[-1]

    yield start_it
    for process in started:
        process.close()


def test_a_rank_becomes_ready_once_routed_and_ends_with_zero_after_a_drain(start, short_dir):
    before = set(os.listdir("/dev/shm"))
    process = start()
    process.wait_ready()
    context = zmq.Context()
    to_rank, from_rank = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    to_rank.connect(f"ipc://{short_dir}/intake.ipc")
    from_rank.connect(f"ipc://{short_dir}/back.ipc")
    try:

        def hear(wanted):
            while True:
                assert from_rank.poll(10_000)
                if any(wanted(message) for message in intake.decode_back(from_rank.recv_multipart())):
                    return

        hear(lambda message: isinstance(message, intake.State) and message.routed)
        process.popen.send_signal(signal.SIGTERM)
        to_rank.send_multipart(intake.encode(intake.Drain(deadline_s=time.monotonic() + 5)))
        hear(lambda message: isinstance(message, intake.Drained))
        assert process.popen.wait(20) == 0
    finally:
        to_rank.close(linger=0)
        from_rank.close(linger=0)
        context.term()
    assert set(os.listdir("/dev/shm")) <= before


def test_sigterm_while_the_model_loads_ends_at_once(start, wait_until):
    process = start()
    wait_until(lambda: "event=loading" in process.log_path.read_text(), LOAD_SECONDS)
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(LOAD_SECONDS) in (-signal.SIGTERM, 0)  # 0: it was quick, and has drained


def test_sigterm_while_the_other_ranks_are_missing_ends_at_once(start, wait_until, free_port):
    """It used to be noticed when the wait was over, after ten minutes."""
    process = start(**{"tensor-parallel-size": 2, "dist-init-port": free_port()})
    wait_until(lambda: "meeting the other ranks" in process.log_path.read_text(), LOAD_SECONDS)
    time.sleep(1)  # into torch's wait; a signal before it has always been enough
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(20) == -signal.SIGTERM


def test_a_model_that_cannot_be_loaded_is_told_in_the_last_words(start, short_dir):
    process = start(model=short_dir / "no-such-model")
    assert process.popen.wait(LOAD_SECONDS) == 1
    assert "no-such-model" in process.last_words()


def test_an_error_nobody_foresaw_is_told_in_the_last_words(start, short_dir):
    (short_dir / "back.ipc").mkdir()  # so that binding fails; a GPU without memory ends the same way
    process = start()
    assert process.popen.wait(LOAD_SECONDS) == 1
    assert "ZMQError" in process.last_words()


def test_a_thread_that_dies_ends_the_rank_with_its_name(monkeypatch):
    crashes = []
    monkeypatch.setattr(threading, "excepthook", partial(_thread_failed, crashes.append))
    thread = threading.Thread(target=lambda: 1 // 0, name="encodepool-sender")
    thread.start()
    thread.join()
    assert crashes == [
        "thread encodepool-sender failed: ZeroDivisionError('integer division or modulo by zero')"
    ]


def test_a_refusal_of_the_route_table_is_told_in_the_last_words(start, route_table):
    route_table.code = 409
    process = start()
    assert process.popen.wait(LOAD_SECONDS) == 1
    assert "refused this rank: 409" in process.last_words()


def test_the_end_of_the_supervisor_is_the_end_of_the_rank(start, wait_until):
    process = start()
    wait_until(lambda: "event=loading" in process.log_path.read_text(), LOAD_SECONDS)
    os.close(process.lifeline)
    process.lifeline = os.open(os.devnull, os.O_RDONLY)
    assert process.popen.wait(10) == 1
