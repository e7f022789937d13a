"""``encodepool-worker serve`` with its real children: ready, drained, and ended when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from encodepool_worker.rundir import start_ticks
from encodepool_worker.towers.tiny import write_tiny_model

START_SECONDS = 150
"""Importing torch and transformers takes seconds, and a minute on a machine that does much else."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("serve") / "model")


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Worker:
    def __init__(self, folder, model, wait_until, warm_python=None):
        self.wait_until = wait_until
        self.folder = folder
        self.state_dir = folder / "state"
        self.termination_log = folder / "reason"
        grpc, bootstrap, self.metrics = free_ports(3)
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "ENCODEPOOL_LOAD_FORMAT": "dummy",
            "ENCODEPOOL_STORE_DEVICE_MIB": "1",
            "ENCODEPOOL_TRANSFER_BACKEND": "tcp",
        }
        argv = [sys.executable, "-m", "encodepool_worker.cli.main", "serve", "--model", str(model)]
        argv += ["--grpc-port", str(grpc), "--bootstrap-port", str(bootstrap)]
        argv += ["--metrics-port", str(self.metrics), "--group", "1", "--incarnation", "4"]
        argv += ["--state-dir", str(self.state_dir), "--termination-log", str(self.termination_log)]
        with (folder / "log").open("wb") as log:
            if warm_python is None:
                self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environ)
            else:
                self.process = warm_python.popen(argv, stdout=log, stderr=log, environ=environ)

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=2) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, self.logs()
            return self.get("/readyz") == 200

        self.wait_until(ready, START_SECONDS, "ready")
        rows = json.loads((self.state_dir / "run" / "1.4.json").read_text())
        return {row["role"]: row["pid"] for row in rows}

    def logs(self):
        files = [self.folder / "log", *sorted((self.state_dir / "log").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in files)

    def left_over(self):
        return [*self.folder.glob("encodepool-*"), *(self.state_dir / "run").iterdir()]


@pytest.fixture
def worker(short_dir, model, wait_until, warm_python):
    worker = Worker(short_dir, model, wait_until, warm_python)
    yield worker
    worker.process.kill()
    worker.process.wait()


@pytest.fixture
def fresh_worker(short_dir, model, wait_until):
    """Started as a user starts it: nothing is imported yet."""
    worker = Worker(short_dir, model, wait_until)
    yield worker
    worker.process.kill()
    worker.process.wait()


def test_a_worker_becomes_ready_drains_on_sigterm_and_leaves_nothing(fresh_worker):
    worker = fresh_worker
    before = set(os.listdir("/dev/shm"))
    pids = worker.wait_ready()
    assert worker.get("/livez") == 200
    for pid in pids.values():
        assert str(worker.state_dir) in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0, worker.logs()
    assert not any(start_ticks(pid) for pid in pids.values())
    assert worker.left_over() == []
    assert not worker.termination_log.exists()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_frozen_rank_ends_the_worker_with_its_reason(worker):
    pids = worker.wait_ready()
    os.kill(pids["rank"], signal.SIGSTOP)
    frozen_s = time.monotonic()
    assert worker.process.wait(20) == 1
    assert time.monotonic() - frozen_s < 10
    assert worker.termination_log.read_text().startswith("rank 0 has been silent for 5.")
    assert not any(start_ticks(pid) for pid in pids.values())
    assert worker.left_over() == []
