"""The supervisor over small real children: one lost, all ended, and always with a reason."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from encodepool_worker.rundir import PREFIX, start_ticks, sweep
from encodepool_worker.supervisor import MAX_TERMINATION_BYTES

PROGRAMS = Path(__file__).parent / "programs"


class Family:
    """A supervisor, its children's notes, and what must be true once it has ended."""

    def __init__(self, folder, wait_until):
        self.folder = folder
        self.wait_until = wait_until
        self.termination_log = folder / "termination-log"
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir(exist_ok=True)
        self.process = None

    def start(self, first="good", second="good", state_dir=None, extra=(), **patience):
        (self.folder / "notes.0").unlink(missing_ok=True)
        (self.folder / "notes.1").unlink(missing_ok=True)
        children = [
            ["frontend", "frontend", None, self.command(first, 0)],
            ["rank 0", "rank", 0, self.command(second, 1)],
        ]
        argv = [sys.executable, PROGRAMS / "supervise.py", "--termination-log", self.termination_log]
        argv += ["--temp-dir", self.temp_dir, "--patience", json.dumps(patience), *extra]
        if state_dir:
            argv += ["--state-dir", state_dir]
        for child in children:
            argv += ["--child", json.dumps(child)]
        self.log = self.folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        return self

    def command(self, habit, index):
        return [
            sys.executable,
            str(PROGRAMS / "child.py"),
            habit,
            "--notes",
            str(self.folder / f"notes.{index}"),
        ]

    def notes(self, index):
        try:
            return (self.folder / f"notes.{index}").read_text().splitlines()
        except FileNotFoundError:
            return []

    def pid(self, index):
        line = self.wait_until(lambda: [n for n in self.notes(index) if n.startswith("pid ")])[0]
        return int(line.split()[1])

    def pids(self):
        return [self.pid(0), self.pid(1)]

    def wait_ready(self):
        self.wait_until(lambda: self.log.read_text().count("child is ready") == 2, what=self.log.read_text())
        return self.pids()

    def ended(self, seconds=10):
        code = self.process.wait(seconds)
        self.wait_until(lambda: not any(alive(pid) for pid in self.pids()), what="children have ended")
        return code

    def run_dirs(self):
        return list(self.temp_dir.glob(f"{PREFIX}*"))


def silence_s(family):
    """Of rank 0, as the termination log tells it."""
    [seconds] = re.findall("^rank 0 has been silent for ([0-9.]+) s$", family.termination_log.read_text())
    return float(seconds)


def alive(pid):
    return start_ticks(pid) is not None


@pytest.fixture
def family(short_dir, wait_until):
    family = Family(short_dir, wait_until)
    yield family
    if family.process is not None:
        if family.process.poll() is None:
            family.process.kill()
        family.process.wait()
        # Whatever happened, the lifeline ends the children of a supervisor that is gone.
        for pid in family.pids():
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not any(alive(pid) for pid in family.pids()), what="no child is left")


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("dies", "rank 0 ended with exit code 7"),
        ("speaks", "rank 0: the device is on fire"),
        ("ends", "rank 0 ended without being asked to"),
    ],
)
def test_a_child_that_ends_takes_the_worker_with_it_and_the_reason_is_written_down(family, habit, reason):
    family.start("good", habit)
    assert family.ended() == 1
    assert family.termination_log.read_text() == reason
    assert reason in family.log.read_text()
    assert "term" not in family.notes(0)
    assert family.run_dirs() == []


def test_last_words_without_an_end_are_cut_where_they_are_kept(family):
    family.start("good", "babbles")
    assert family.ended() == 1
    told = family.termination_log.read_text()
    assert told == f"rank 0: no end of it{'!' * 4096}"[:MAX_TERMINATION_BYTES]
    assert family.log.stat().st_size < 10_000


def test_a_killed_child_is_named_with_its_signal(family):
    family.start()
    os.kill(family.wait_ready()[0], signal.SIGKILL)
    assert family.ended() == 1
    reason = "frontend was killed by signal 9 (SIGKILL): out of memory?"
    assert family.termination_log.read_text() == reason
    assert f"farewell {reason}" in family.notes(1), "rank 0 is told, so that it can tell its receivers"


def test_a_frozen_child_is_noticed_in_about_five_seconds(family):
    family.start()
    pids = family.wait_ready()
    os.kill(pids[1], signal.SIGSTOP)
    frozen_s = time.monotonic()
    assert family.ended() == 1
    assert time.monotonic() - frozen_s > 3.9
    assert 5.0 <= silence_s(family) < 10


def test_a_child_that_starts_slowly_but_beats_is_waited_for(family):
    family.start("good", "slow", starting_s=1.5)
    started_s = time.monotonic()
    family.wait_until(lambda: time.monotonic() - started_s > 3)
    assert family.process.poll() is None


def test_a_child_that_never_beats_is_given_the_longer_time_and_no_more(family):
    family.start("good", "silent", starting_s=1.5, working_s=5.0)
    assert family.ended() == 1
    assert 1.5 <= silence_s(family) < 5.0


def test_sigterm_is_passed_on_and_a_clean_end_is_exit_code_zero(family):
    family.start()
    family.wait_ready()
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 0
    assert family.notes(0)[-1] == family.notes(1)[-1] == "term"
    assert not family.termination_log.exists()
    assert family.run_dirs() == []


def test_a_child_that_fails_while_it_drains_is_a_failure_of_the_worker(family):
    family.start("good", "fails")
    family.wait_ready()
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 1
    assert family.termination_log.read_text() == "rank 0 ended with exit code 5"


def test_sigterm_during_the_start_ends_cleanly(family):
    family.start("slow", "slow")
    family.pids()
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 0


def test_a_second_sigterm_ends_at_once(family):
    family.start("good", "stubborn")
    family.wait_ready()
    family.process.send_signal(signal.SIGTERM)
    family.wait_until(lambda: "term" in family.notes(1))
    assert family.process.poll() is None
    family.process.send_signal(signal.SIGTERM)
    assert family.ended(3) == 1
    assert "second SIGTERM" in family.termination_log.read_text()


def test_a_drain_that_takes_too_long_is_cut_off(family):
    family.start("good", "stubborn", drain_s=1.0)
    family.wait_ready()
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 1
    assert family.termination_log.read_text() == "rank 0 did not end within 1 s of being asked to"


def test_a_child_that_freezes_during_the_drain_is_noticed_too(family):
    family.start("good", "stubborn", working_s=2.0)
    family.wait_ready()
    family.process.send_signal(signal.SIGTERM)
    family.wait_until(lambda: "term" in family.notes(1))
    os.kill(family.pid(1), signal.SIGSTOP)
    assert family.ended() == 1
    assert "rank 0 has been silent" in family.termination_log.read_text()


def test_children_exit_when_the_supervisor_is_killed_and_the_next_one_sweeps_its_folder(family):
    family.start()
    pids = family.wait_ready()
    family.process.kill()
    family.process.wait()
    family.wait_until(lambda: not any(alive(pid) for pid in pids), what="the lifeline ends the children")
    assert len(family.run_dirs()) == 1

    left = family.run_dirs()[0]
    family.start()
    family.wait_ready()
    assert not left.exists()
    assert len(family.run_dirs()) == 1
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 0
    assert family.run_dirs() == []


def test_a_folder_of_a_living_supervisor_is_not_swept(family):
    family.start()
    family.wait_ready()
    kept = family.run_dirs()
    assert sweep(family.temp_dir) == []
    assert family.run_dirs() == kept


def test_a_folder_with_a_reused_pid_is_swept_and_a_foreign_name_or_link_is_not(short_dir):
    old = short_dir / f"{PREFIX}{os.getpid()}-1-abc"
    old.mkdir()
    (old / "intake.ipc").touch()
    strange = short_dir / f"{PREFIX}notes"
    strange.mkdir()
    link = short_dir / f"{PREFIX}{os.getpid()}-2-abc"
    link.symlink_to(strange)
    assert sweep(short_dir) == [old]
    assert strange.exists()
    assert link.is_symlink()


def test_the_run_folder_is_private(family):
    family.start()
    family.wait_ready()
    line = next(n for n in family.notes(0) if n.startswith("run_dir "))
    assert line.split()[2] == "700"


def test_the_pids_of_a_local_pool_are_published_and_withdrawn(family, short_dir):
    state_dir = short_dir / "state"
    family.start(state_dir=state_dir)
    pids = family.wait_ready()
    rows = json.loads((state_dir / "run" / "2.5.json").read_text())
    common = {"group": 2, "incarnation": 5}
    assert rows == [
        {"pid": family.process.pid, **common, "role": "supervisor", "rank": None},
        {"pid": pids[0], **common, "role": "frontend", "rank": None},
        {"pid": pids[1], **common, "role": "rank", "rank": 0},
    ]
    assert (state_dir / "log" / "2.5.frontend.log").exists()
    assert (state_dir / "log" / "2.5.rank.log").exists()
    family.process.send_signal(signal.SIGTERM)
    assert family.ended() == 0
    assert list((state_dir / "run").iterdir()) == []


def test_a_supervisor_that_was_suspended_with_its_children_does_not_blame_them(family):
    family.start(working_s=1.5)
    pids = [*family.wait_ready(), family.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    frozen_s = time.monotonic()
    family.wait_until(lambda: time.monotonic() - frozen_s > 3.5)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    family.wait_until(lambda: "was suspended" in family.log.read_text())
    thawed_s = time.monotonic()
    family.wait_until(lambda: time.monotonic() - thawed_s > 2)
    assert family.process.poll() is None


def test_the_supervisor_is_small(family):
    family.start(extra=["--report-modules"])
    family.wait_ready()
    assert "heavy modules: []" in family.log.read_text()
    assert psutil.Process(family.process.pid).memory_info().rss < 60 * 2**20


def test_orphans_are_reaped_as_by_pid_1(family):
    """A subreaper stands in for PID 1: orphans become its children and must not stay as zombies."""
    family.start("good", "orphan", extra=["--subreaper"])
    family.wait_ready()
    line = family.wait_until(lambda: [n for n in family.notes(1) if n.startswith("orphan ")])[0]
    family.wait_until(lambda: not Path(f"/proc/{line.split()[1]}").exists(), what="the orphan is reaped")


def test_a_temporary_folder_that_is_too_deep_for_sockets_is_refused_with_the_way_out(family, short_dir):
    family.temp_dir = short_dir / ("x" * 90)
    family.temp_dir.mkdir()
    family.start()
    assert family.process.wait(10) == 1
    family.process = None
    assert "set TMPDIR to a shorter path" in family.termination_log.read_text()
    assert list((short_dir / ("x" * 90)).iterdir()) == []
