"""SIGTERM: what was accepted is delivered or told Failed, and nothing is left behind."""

import subprocess
from pathlib import Path

import grpc
import psutil
import pytest
from tests.e2e.gateway import SHM, image_request
from tests.e2e.receiving import Receivers
from tests.e2e.running import http

pytestmark = pytest.mark.real


@pytest.fixture
def stopping(start_worker, shared_prefill):
    """A worker for one test, with receivers."""
    started = []

    def start(**settings):
        running = start_worker(**settings).ready()
        started.append(running)
        return running, Receivers(shared_prefill, running.bootstrap)

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(10)


@pytest.fixture
def nothing_left():
    """``nothing_left(worker)`` before the end returns the check for after it."""

    def remember(worker):
        processes = worker.processes()
        run_dir = worker.run_dir()
        before = {path.name for path in SHM.iterdir()}

        def check():
            gone, alive = psutil.wait_procs(processes, timeout=10)
            assert alive == [], gone
            assert not run_dir.exists()
            assert {path.name for path in Path(SHM).iterdir()} <= before

        return check

    return remember


def test_rooms_under_way_are_delivered_or_told(stopping, nothing_left, new_room, new_picture, direct):
    worker, receivers = stopping()
    check = nothing_left(worker)
    rooms = {new_room(): new_picture(12, 12) for _ in range(60)}
    calls = {}
    for room, picture in rooms.items():
        receivers.ask(room, picture)
        calls[room] = worker.encoder.Encode.future(image_request(room, picture), timeout=30)
    next(iter(calls.values())).result(30)
    worker.terminate()

    accepted = set()
    for room, call in calls.items():
        if call.exception(30) is None:
            accepted.add(room)
        else:
            assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    told = {room: receivers.verdict(room, timeout_s=20)["status"] for room in rooms}
    assert worker.process.wait(30) == 0, worker.log_tail()
    print(f"accepted {len(accepted)}, delivered {sum(s == 'Success' for s in told.values())} of {len(rooms)}")

    assert accepted
    assert all(told[room] == "Success" for room in accepted), "accepted rooms have 60 s to finish"
    assert "Timeout" not in told.values(), "a refused room is told as well"
    for room in rooms:
        if told[room] == "Success":
            assert receivers.digest(room) == direct(rooms[room]).digest
        receivers.forget(room)
    check()


def test_a_drain_takes_nothing_new_and_ends_in_time(
    stopping, nothing_left, new_room, new_picture, clock, wait_for
):
    """One room waits for its second rank until the drain ends, another is delivered meanwhile."""
    worker, receivers = stopping(drain_seconds=3)
    check = nothing_left(worker)
    stuck, served, picture = new_room(), new_room(), new_picture()
    for room in (stuck, served):
        worker.encode(image_request(room, picture))
    receivers.ask(stuck, picture, tp_size=2, ranks=[0])
    asked_at = clock()
    worker.terminate()

    wait_for(lambda: http(f"{worker.metrics_url}/readyz")[0] == 503, what="readyz to say no")
    with pytest.raises(grpc.RpcError) as caught:
        worker.encode(image_request(new_room(), picture))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    receivers.ask(served, picture)
    assert receivers.verdict(served)["status"] == "Success", "what was accepted is still delivered"
    receivers.forget(served)

    verdict = receivers.verdict(stuck, tp_size=2)
    assert verdict["status"] == "Failed"
    print(f"told {verdict['at'] - asked_at:.2f} s after the request to stop")
    assert 2 < verdict["at"] - asked_at < 6
    assert worker.process.wait(20) == 0, worker.log_tail()
    receivers.forget(stuck, tp_size=2)
    check()


def test_a_second_signal_does_not_wait(stopping, nothing_left, new_room, new_picture):
    worker, _ = stopping(drain_seconds=60)
    check = nothing_left(worker)
    worker.encode(image_request(new_room(), new_picture()))  # nobody asks for it: a drain lasts a minute
    worker.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(1)
    worker.terminate()
    worker.process.wait(10)
    check()


@pytest.mark.parametrize("victim", ["frontend", "rank"])
def test_the_death_of_one_process_ends_the_worker(victim, stopping, nothing_left, tmp_path):
    """A group lives and dies as a whole; whoever restarts it reads why."""
    reason = tmp_path / "termination"
    worker, _ = stopping(termination_log=reason)
    check = nothing_left(worker)
    module = {"frontend": "encodepool_worker.frontend", "rank": "encodepool_worker.shell"}[victim]
    [process] = [p for p in worker.processes() if module in p.cmdline()]
    process.kill()

    assert worker.process.wait(15) == 1
    assert victim in reason.read_text()
    assert "SIGKILL" in reason.read_text()
    check()
