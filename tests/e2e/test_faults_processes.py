"""Processes that are stopped, continued and killed: late bytes, drains, leftovers, a full /dev/shm.

The first fixture stops a receiver for a minute; the other stories are told meanwhile.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tests.e2e.gateway import SHM, image_request
from tests.e2e.late_receiver import UNTOUCHED
from tests.e2e.receiving import HIDDEN, LEVELS, Receivers
from tests.e2e.running import RunningWorker, http

pytestmark = pytest.mark.real

TIMEOUT_S, QUARANTINE_S = 5, 10
WORKER = {
    "store_device_mib": 64,
    "transfer_timeout_seconds": TIMEOUT_S,
    "quarantine_seconds": QUARANTINE_S,
    "drain_seconds": 5,
}
SLACK_S = 5.0
"""For two busy cores."""


class Light:
    """A light receiver in its own process, and what the tests do to it."""

    def __init__(self, warm_python, log):
        with log.open("ab") as stderr:
            self.process = warm_python.popen(
                [sys.executable, "-m", "tests.e2e.late_receiver", str(32 << 20)],
                environ=os.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._answer()

    def _answer(self):
        for line in self.process.stdout:
            if line.startswith(("{", "null")):  # Mooncake prints a few lines of its own
                return json.loads(line)
        raise AssertionError("the receiver ended")

    def call(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def ask(self, worker, room, picture):
        self.call(
            "ask", control=worker.control(), room=room, tokens=picture.tokens, hidden=HIDDEN, levels=LEVELS
        )

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def light_receiver(warm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("light")
    started = []

    def start():
        started.append(Light(warm_python, folder / f"receiver.{len(started)}.log"))
        return started[-1]

    yield start
    for receiver in started:
        receiver.close()


@pytest.fixture(scope="module")
def stop_under_a_write(light_receiver, new_room, new_picture, wait_for):
    """``stop_under_a_write(worker, h, w)``: a receiver stopped before its room's rows are sent."""

    def verdict(receiver, room):
        return wait_for(lambda: receiver.call("look", room=room)["status"], 30, "the verdict")

    def stop(worker, h, w):
        receiver = light_receiver()
        room, picture = new_room(), new_picture()
        receiver.ask(worker, room, picture)
        worker.encode(image_request(room, picture))
        assert verdict(receiver, room) == "SUCCESS"  # written to before
        room, picture = new_room(), new_picture(h, w)
        receiver.ask(worker, room, picture)
        # A room that is refused, asked for on the same connection: once it is answered, the frame
        # before it has arrived too.
        refused, other = new_room(), new_picture()
        request = image_request(refused, other)
        request.mm_inputs.items[0].placeholders[0].length += 1
        with pytest.raises(grpc.RpcError):
            worker.encode(request)
        receiver.ask(worker, refused, other)
        assert verdict(receiver, refused) == "FAILED"
        receiver.freeze()
        worker.encode(image_request(room, picture))
        return receiver, room, picture

    return stop


@pytest.fixture(scope="module")
def sleepers(worker, stop_under_a_write, wait_for):
    """Two receivers stopped in the middle of a write, and when their writes had timed out."""
    late = "encodepool_quarantines_total"
    before = worker.metrics().get(late, 0)
    stopped = [stop_under_a_write(worker, 64, 64) for _ in range(2)]
    wait_for(
        lambda: worker.metrics().get(late, 0) >= before + 2, 6 * TIMEOUT_S, "both writes to have timed out"
    )
    return stopped, time.monotonic()


@pytest.fixture(scope="module")
def foreign_bytes(direct, tmp_path_factory):
    """How many bytes lay in a failed room's memory that are neither its own nor untouched; and its own."""
    path = tmp_path_factory.mktemp("rows") / "seen"

    def count(receiver, room, picture):
        receiver.call("save", room=room, path=str(path))
        rows = direct(picture)
        own = np.frombuffer(rows.main + rows.deepstack, np.uint8)
        seen = np.frombuffer(path.read_bytes(), np.uint8)
        landed = own == seen
        return int((~landed & (seen != UNTOUCHED)).sum()), int(landed.sum())

    return count


@pytest.fixture
def arrives(worker, receivers, new_room, new_picture, direct):
    def check():
        room, picture = new_room(), new_picture(32, 32)
        worker.encode(image_request(room, picture))
        asked_at = receivers.ask(room, picture)
        verdict = receivers.verdict(room)
        assert verdict["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)
        return verdict["at"] - asked_at

    return check


def test_a_receiver_stopped_for_two_seconds_is_told_when_nothing_can_be_written_any_more(
    worker, sleepers, foreign_bytes, arrives, wait_for
):
    """What it frees on Failed stays as it made it: the late bytes have landed before."""
    [(receiver, room, picture), _], timed_out_s = sleepers
    time.sleep(max(0.0, timed_out_s + 2 - time.monotonic()))  # the two seconds are the story
    receiver.thaw()
    thawed_s = time.monotonic()
    # Its rows' place in the store may be used for others only after that, too: fill it several times.
    for _ in range(5):
        arrives()
    seen = wait_for(
        lambda: (look := receiver.call("look", room=room))["status"] and look, QUARANTINE_S + 10, "Failed"
    )
    assert seen["status"] == "FAILED"
    assert QUARANTINE_S - 0.5 < seen["at"] - thawed_s < QUARANTINE_S + SLACK_S
    foreign, landed = foreign_bytes(receiver, room, picture)
    print(
        f"told {seen['at'] - thawed_s:.1f} s after it went on; {landed} bytes had landed, {foreign} foreign"
    )
    assert foreign == 0
    for _ in range(5):
        arrives()
    assert receiver.call("look", room=room)["written_after"] == 0


def test_a_drain_does_not_wait_for_a_receiver_that_is_silent(start_worker, stop_under_a_write, wait_for):
    """It may stay silent for ever. The worker ends well, and Failed is there for it when it wakes."""
    times = {"transfer_timeout_seconds": 1, "quarantine_seconds": 3, "drain_seconds": 2}
    worker = start_worker(**times).ready()
    receiver, room, _ = stop_under_a_write(worker, 16, 16)
    started_s = time.monotonic()
    assert worker.stop(sum(times.values()) + 20) == 0, worker.log_tail()
    took_s = time.monotonic() - started_s
    print(f"drained in {took_s:.1f} s beside a receiver that never answered")
    assert took_s < sum(times.values()) + 2 * SLACK_S
    receiver.thaw()
    wait_for(lambda: receiver.call("look", room=room)["status"] == "FAILED", 10, "Failed")


# --- killed at any moment


@pytest.fixture
def short_dir():
    """A socket's path has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="ep-"))
    yield path
    shutil.rmtree(path)


def test_a_worker_killed_at_any_moment_leaves_nothing_that_the_next_start_does_not_sweep(
    spawn, fork, program, tiny_model, free_port, tmp_path, short_dir, new_room, new_picture, wait_for
):
    """Four lives ended at random: while Python starts, while the model loads, and under requests.

    The first two are fresh processes, because a forked one does not start Python.
    """
    dice = random.Random(20)
    segments = {path.name for path in SHM.iterdir()}
    lives = [dice.uniform(0.1, 1.5), dice.uniform(1.5, 3.0), None, None]
    for number, lifetime_s in enumerate(lives):
        start = fork if lifetime_s is None else spawn
        worker = RunningWorker(
            lambda argv, log, start=start: start(argv, log, {"TMPDIR": str(short_dir)}),
            [program("encodepool-worker")],
            tiny_model,
            tmp_path / f"life.{number}.log",
            free_port,
            {"transfer-backend": "tcp"},
        )
        if lifetime_s is None:
            worker.ready()
            ending = threading.Event()
            calls = threading.Thread(target=send_until, args=(worker, ending, new_room, new_picture))
            calls.start()
            lifetime_s = dice.uniform(0.2, 1.0)
        else:
            calls = None
        time.sleep(lifetime_s)  # the moment is what is drawn
        processes = worker.processes()
        worker.process.kill()
        worker.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert alive == [], f"life {number} left {alive} after {lifetime_s:.2f} s"
        if calls is not None:
            ending.set()
            calls.join()
            worker._channel.close()
    assert {path.name for path in SHM.iterdir()} <= segments

    last = RunningWorker(
        lambda argv, log: spawn(argv, log, {"TMPDIR": str(short_dir)}),
        [program("encodepool-worker")],
        tiny_model,
        tmp_path / "last.log",
        free_port,
        {"transfer-backend": "tcp"},
    )
    wait_for(lambda: "child started" in last.log.read_text(), 60, "the next start")
    assert list(short_dir.iterdir()) == [last.run_dir()]
    assert last.stop(60) == 0
    assert list(short_dir.iterdir()) == []


def send_until(worker, ending, new_room, new_picture):
    while not ending.is_set():
        try:
            worker.encode(image_request(new_room(), new_picture()), timeout_s=2)
        except grpc.RpcError:
            ending.wait(0.05)


# --- a full /dev/shm


def can_unshare():
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and done.returncode == 0


def room_left(folder):
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


@pytest.mark.skipif(not can_unshare(), reason="a /dev/shm of its own needs root and unshare")
def test_a_full_dev_shm_costs_only_what_was_to_lie_there(
    spawn, program, tiny_model, free_port, tmp_path, shared_prefill, new_room, new_picture, direct
):
    """Pixels by segment are refused by name while it is full; pixels in the message are served.

    A fresh process, because only that can be started in a mount namespace of its own.
    """
    in_its_own_shm = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"',
        "sh",
    ]
    worker = RunningWorker(
        lambda argv, log: spawn([*in_its_own_shm, *argv], log),
        [program("encodepool-worker")],
        tiny_model,
        tmp_path / "worker.log",
        free_port,
        {"drain-seconds": 5},
    ).ready()
    receivers = Receivers(shared_prefill, worker.bootstrap)
    shm = Path(f"/proc/{worker.process.pid}/root/dev/shm")

    def by_segment(room, picture, name):
        request = image_request(room, picture)
        encoder_input = request.mm_inputs.items[0].encoder_input
        data = bytes(encoder_input.inline)
        encoder_input.shm.name, encoder_input.shm.nbytes = name, len(data)
        segment = shm / name
        segment.touch(0o600)
        if room_left(shm) < len(data):
            with pytest.raises(OSError, match="No space left"):
                segment.write_bytes(data)
        else:
            segment.write_bytes(data)
        return request

    def arrives(room, picture):
        receivers.ask(room, picture)
        assert receivers.verdict(room)["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)

    room, picture = new_room(), new_picture()
    assert worker.encode(by_segment(room, picture, "smg-tokenspeed-1-1-1")).accepted
    arrives(room, picture)

    filler = shm / "filler"
    filler.write_bytes(bytes(room_left(shm)))
    assert room_left(shm) == 0
    room, picture = new_room(), new_picture()
    asked_at = receivers.ask(room, picture)
    with pytest.raises(grpc.RpcError) as caught:
        worker.encode(by_segment(room, picture, "smg-tokenspeed-1-1-2"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "shm" in caught.value.details()
    verdict = receivers.verdict(room)
    assert verdict["status"] == "Failed"
    assert verdict["at"] - asked_at < 3 + SLACK_S
    receivers.forget(room)
    room, picture = new_room(), new_picture()
    assert worker.encode(image_request(room, picture)).accepted
    arrives(room, picture)
    assert http(f"{worker.metrics_url}/readyz")[0] == 200

    filler.unlink()
    room, picture = new_room(), new_picture()
    assert worker.encode(by_segment(room, picture, "smg-tokenspeed-1-1-3")).accepted
    arrives(room, picture)
    assert worker.stop(60) == 0, worker.log_tail()


# --- and the one that was stopped for a minute


def test_after_a_minute_the_late_bytes_are_still_the_rooms_own(
    worker, sleepers, foreign_bytes, arrives, wait_for
):
    """Nobody waits longer for a silent receiver. Its late bytes and its Failed then lie in its own sockets,
    and their order is its own (docs/limits.md); foreign bytes are never among them."""
    [_, (receiver, room, picture)], timed_out_s = sleepers
    time.sleep(max(0.0, timed_out_s + 62 - time.monotonic()))  # the minute is the story
    wait_for(lambda: worker.metrics()["encodepool_store_pinned_bytes"] == 0, 20, "the quarantine's end")
    for _ in range(5):
        arrives()
    receiver.thaw()
    seen = wait_for(lambda: (look := receiver.call("look", room=room))["status"] and look, 20, "Failed")
    assert seen["status"] == "FAILED"
    foreign, landed = foreign_bytes(receiver, room, picture)
    time.sleep(1)  # for what its engine may still take from its sockets
    late = receiver.call("look", room=room)["written_after"]
    print(f"before Failed {landed} bytes had landed; {late} bytes were written into what it had freed")
    assert foreign == 0
    assert arrives() < SLACK_S
