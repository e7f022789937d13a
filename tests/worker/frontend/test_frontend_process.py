"""The process as the supervisor starts it: flags, heartbeat, ports, SIGTERM, lifeline."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import grpc
import pytest
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc as encoder_grpc
from tests.warm.client import WarmPython

from encodepool_worker.frontend.health import MAX_TURN_AGE_S
from encodepool_worker.wire import intake


class Process:
    """One frontend with its ports, and the supervisor's ends of its two pipes."""

    def __init__(
        self, warm: WarmPython, run_dir: Path, ports: tuple[int, int, int], flags: dict[str, object]
    ) -> None:
        self.run_dir = run_dir
        self.grpc_port, self.bootstrap_port, self.metrics_port = ports
        lifeline, self.lifeline = os.pipe()
        self.heartbeat, heartbeat = os.pipe()
        known = {
            "grpc-port": self.grpc_port,
            "bootstrap-port": self.bootstrap_port,
            "metrics-port": self.metrics_port,
            "run-dir": run_dir,
            "lifeline-fd": lifeline,
            "heartbeat-fd": heartbeat,
        }
        argv = [part for name, value in (known | flags).items() for part in (f"--{name}", str(value))]
        with (run_dir / "log").open("ab") as log:
            self.popen = warm.popen(
                [sys.executable, "-m", "encodepool_worker.frontend", *argv],
                environ=os.environ,
                stdout=log,
                stderr=log,
                pass_fds=(lifeline, heartbeat),
            )
        os.close(lifeline)
        os.close(heartbeat)

    @property
    def log(self) -> str:
        return (self.run_dir / "log").read_text()

    def beats(self) -> bytes:
        """Everything it said on the heartbeat until it ended."""
        self.popen.wait(20)
        with open(self.heartbeat, "rb", closefd=False) as pipe:
            return pipe.read()

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait(10)
        for fd in (self.lifeline, self.heartbeat):
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def process(warm_python, tmp_path, bare_model, free_port):
    started = []

    def start(**flags):
        ports = (free_port(), free_port(), free_port())
        found = Process(warm_python, tmp_path, ports, {"model": bare_model} | flags)
        started.append(found)
        return found

    yield start
    for found in started:
        found.close()


def test_a_worker_that_is_told_to_stop_finishes_what_it_accepted(process, rank0_at, encode_request, wait_for):
    p = process()

    async def story():
        async with rank0_at(p.run_dir, p.bootstrap_port, p.metrics_port) as rank0:
            rank0.policy = lambda message: (
                [intake.Admitted(seq=message.seq)] if isinstance(message, intake.Submit) else []
            )
            async with grpc.aio.insecure_channel(f"127.0.0.1:{p.grpc_port}") as channel:
                encoder = encoder_grpc.TokenSpeedEncoderStub(channel)
                assert (await encoder.Encode(encode_request(1))).accepted

                p.popen.send_signal(signal.SIGTERM)
                deadline_s = time.monotonic() + 5
                while not rank0.of(intake.Drain):
                    assert time.monotonic() < deadline_s
                    await asyncio.sleep(0.01)
                [drain] = rank0.of(intake.Drain)
                assert 50 < drain.deadline_s - time.monotonic() <= 60
                assert isinstance(rank0.received[-1][0], intake.Drain), "after everything submitted"

                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await encoder.Encode(encode_request(2))
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "draining" in error.value.details()
                while rank0.refused_rooms != [2]:
                    assert time.monotonic() < deadline_s
                    await asyncio.sleep(0.01)
                assert p.popen.poll() is None, "it waits for the loop"

                await rank0.send(intake.Drained())
                await asyncio.to_thread(p.popen.wait, 10)

    asyncio.run(story())
    assert p.popen.returncode == 0, p.log
    beats = p.beats()
    assert beats.startswith(b"s")
    assert b"r" in beats
    assert b"x" not in beats


def test_a_loop_that_does_not_finish_in_time_is_a_failure_with_a_reason(process, rank0_at):
    times = {"drain-seconds": 0.2, "transfer-timeout-seconds": 0.5, "quarantine-seconds": 1}
    p = process(**times)

    async def story():
        async with rank0_at(p.run_dir, p.bootstrap_port, p.metrics_port) as rank0:
            rank0.policy = lambda _: []
            p.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(p.popen.wait, 15)

    asyncio.run(story())
    assert p.popen.returncode == 1
    assert p.beats().endswith(b"xthe drain did not end within 0.2 s")


def test_before_the_loop_has_spoken_there_is_nothing_to_drain(process, wait_for):
    p = process()
    wait_for(lambda: "listening" in p.log, 20, "the ports")
    p.popen.send_signal(signal.SIGTERM)
    assert p.popen.wait(10) == 0, p.log


def test_a_second_sigterm_ends_it_at_once(process, rank0_at):
    p = process()

    async def story():
        async with rank0_at(p.run_dir, p.bootstrap_port, p.metrics_port) as rank0:
            rank0.policy = lambda _: []
            p.popen.send_signal(signal.SIGTERM)
            while not rank0.of(intake.Drain):
                await asyncio.sleep(0.01)
            p.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(p.popen.wait, 5)

    asyncio.run(story())
    assert p.popen.returncode == 1


def test_a_frontend_that_was_stopped_itself_does_not_blame_the_loop(process, rank0_at):
    """Ready is lost for good, so it must not be lost to reports that lay unread."""
    p = process()

    async def story():
        async with rank0_at(p.run_dir, p.bootstrap_port, p.metrics_port):
            p.popen.send_signal(signal.SIGSTOP)
            await asyncio.sleep(MAX_TURN_AGE_S + 0.5)  # nothing can be observed of a stopped process
            p.popen.send_signal(signal.SIGCONT)
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{p.metrics_port}/readyz") as answer:
                    assert (answer.status, await answer.text()) == (200, "ok")

    asyncio.run(story())


def test_it_goes_when_the_supervisor_goes(process, wait_for):
    p = process()
    wait_for(lambda: "listening" in p.log, 20, "the ports")
    os.close(p.lifeline)
    assert p.popen.wait(5) == 1


@pytest.mark.parametrize("port", ["grpc-port", "bootstrap-port", "metrics-port"])
def test_a_port_in_use_is_an_error_at_start_and_named(process, port, wait_for):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        p = process(**{port: number})
        assert p.popen.wait(20) == 1
    assert f"cannot listen on 127.0.0.1 port {number}".encode() in p.beats().rpartition(b"x")[2]


def test_a_model_it_cannot_use_is_an_error_at_start_and_named(process, tmp_path):
    folder = tmp_path / "audio"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    p = process(model=folder)
    assert p.popen.wait(20) == 1
    assert b"model_type is 'whisper'" in p.beats()


def test_flags_that_cannot_work_are_refused_with_code_2():
    run = subprocess.run(
        [sys.executable, "-m", "encodepool_worker.frontend", "--model", "m", "--rank", "x"],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert run.returncode == 2
    assert b"rank" in run.stderr


def test_the_process_loads_neither_torch_nor_mooncake_nor_numpy():
    script = (
        "import sys, encodepool_worker.frontend.app, encodepool_worker.frontend.model;"
        "print([name for name in ('torch', 'mooncake', 'numpy', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"
