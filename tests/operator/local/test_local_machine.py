"""The kubelet's part alone: what happens to one worker that is started, probed and ended."""

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

from encodepool_operator.local.machine import Machine
from encodepool_operator.local.processes import is_running
from encodepool_operator.local.state import PodState
from encodepool_operator.local.statedir import StateDir

FAKE_WORKER = Path(__file__).parent / "fake_worker.py"


class Bench:
    """One machine with one pod of group 0."""

    def __init__(self, folder, port):
        self.control = folder / "control"
        self.control.mkdir()
        self.dir = StateDir.at(folder / "state")
        self.dir.create()
        self.changed = asyncio.Event()
        self.machine = Machine(self.dir, self.changed.set, probe_period_s=0.05)
        self.pod = PodState(name="pool-0-0", uid="uid", incarnation=1)
        self.port = port
        self.saved = []

    def launch(self, argv=None, save=None):
        worker = [sys.executable, "-IS", str(FAKE_WORKER), "serve", "--control", str(self.control)]
        settings = {
            "state-dir": self.dir.root,
            "termination-log": self.dir.termination_file(0, 1, 0),
            "host": "127.0.0.1",
            "group": 0,
            "incarnation": 1,
            "metrics-port": self.port(),
            "grpc-port": self.port(),
            "bootstrap-port": self.port(),
        }
        for name, value in settings.items():
            worker += [f"--{name}", str(value)]
        self.machine.launch(
            0,
            self.pod,
            argv or worker,
            lambda temp_dir: os.environ | {"TMPDIR": str(temp_dir)},
            metrics_port=settings["metrics-port"],
            startup_deadline_s=60,
            save=save or (lambda: self.saved.append(self.pod.process)),
        )

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def bench(folder, port):
    made = Bench(folder, port)
    try:
        yield made
    finally:
        made.machine.terminate(made.pod, 0)
        await made.until(lambda: made.machine.is_gone(made.pod))
        await made.machine.close()
        made.machine.check()


def test_a_worker_is_written_down_before_its_first_step_and_becomes_ready(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            b.launch()
            assert b.saved == [b.pod.process]
            await b.until(lambda: b.pod.ready)
            assert b.pod.started
            assert b.pod.ready_changed_at is not None

    asyncio.run(story())


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            (b.control / "deaf").touch()
            b.launch()
            await b.until(lambda: b.pod.ready)
            began_s = time.monotonic()
            b.machine.terminate(b.pod, 0.5)
            await b.until(lambda: b.machine.is_gone(b.pod))
            assert time.monotonic() - began_s >= 0.5
            assert b.pod.exited.exit_code == 137
            assert b.pod.exited.message == "killed by signal 9 (SIGKILL)", "not the last line of its log"
            assert not Path(b.pod.temp_dir).exists()

    asyncio.run(story())


def test_a_worker_that_drains_in_time_ends_by_itself(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            b.launch()
            await b.until(lambda: b.pod.ready)
            b.machine.terminate(b.pod, 30)
            await b.until(lambda: b.machine.is_gone(b.pod))
            assert (b.pod.exited.exit_code, b.pod.exited.reason) == (0, "Completed")

    asyncio.run(story())


def test_a_crash_is_told_with_the_workers_last_words(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            (b.control / "crash").write_text("the checkpoint has no vision tower")
            b.launch()
            await b.until(lambda: b.pod.exited)
            assert b.pod.exited.exit_code == 1
            assert b.pod.exited.message == "the checkpoint has no vision tower"
            assert not b.machine.is_gone(b.pod), "a failed pod stays until it is told to go"

    asyncio.run(story())


def test_a_program_that_is_not_there_is_a_failure_like_any_other(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            b.launch(["/nowhere/worker"])
            await b.until(lambda: b.pod.exited)
            assert b.pod.exited.exit_code == 127
            assert "/nowhere/worker" in b.pod.exited.message

    asyncio.run(story())


def test_a_worker_that_cannot_be_written_down_is_not_started(tmp_path, free_port):
    async def story():
        async with bench(tmp_path, free_port) as b:
            born = []

            def full():
                born.append(b.pod.process)
                raise OSError(28, "No space left on device")

            try:
                b.launch(save=full)
            except OSError:
                pass
            assert not is_running(born[0])
            assert b.pod.process is None
            assert not (b.dir.log / "0.1.frontend.log").exists()
            b.launch()
            await b.until(lambda: b.pod.ready)

    asyncio.run(story())
