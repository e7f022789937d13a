"""The first process of a worker: starts the others and ends all of them when one is lost.

A group lives and dies as a whole, so there is one rule: when a child dies, or its heartbeat is
late, the reason is written down, every child is killed and the exit code is 1. Only rank 0, if it
is not the one that was lost, has a moment before that to tell its receivers. It works as PID 1
(it reaps every orphan) and imports neither torch nor grpc.

SIGTERM is passed on once: the children agree on the drain, and the exit code is 0 when all of theirs
are. A second SIGTERM kills them at once.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .child import FAREWELL_S, LAST_WORDS, MAX_LAST_WORDS_BYTES, READY
from .errors import ConfigError
from .logs import get_logger
from .rundir import RunDir, write_pids
from .settings import Settings

DEFAULT_TERMINATION_LOG = Path("/dev/termination-log")
MAX_TERMINATION_BYTES = 2048
"""Kubernetes cuts a termination message at 4096 bytes; the operator shows the first 256."""

END_S = 13.0
"""For the processes to end once nothing accepted is left; a pod has 15 s for it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: its name in reasons, and the command before the flags the supervisor adds."""

    name: str
    role: str
    command: tuple[str, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits, in seconds.

    ``starting_s`` bounds silence, not loading: the heartbeat runs all through a start, but one
    call into a library that loads from a slow disk can hold it up.
    """

    starting_s: float = 60.0
    working_s: float = 5.0
    drain_s: float = 70.0
    killed_s: float = 5.0


@dataclass(slots=True)
class _Running:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    heartbeat_fd: int
    lifeline_fd: int
    last_beat_s: float
    ready: bool = False
    last_words: bytes | None = None
    exit_code: int | None = None

    @property
    def ended_well(self) -> bool:
        """After being asked to. A signal that came before its handler is no failure either."""
        return self.exit_code in (0, -signal.SIGTERM)

    def allowed_silence_s(self, patience: Patience) -> float:
        return patience.working_s if self.ready else patience.starting_s


def children_of(settings: Settings) -> list[ChildSpec]:
    """The processes of one worker. ``-P``: nothing is imported from the current folder."""
    argv = tuple(settings.to_argv())
    python = (sys.executable, "-P", "-m")
    ranks = [
        ChildSpec(
            f"rank {rank}", "rank", (*python, "encodepool_worker.shell", "--rank", str(rank), *argv), rank
        )
        for rank in settings.own_ranks
    ]
    return [ChildSpec("frontend", "frontend", (*python, "encodepool_worker.frontend", *argv)), *ranks]


def supervise(settings: Settings) -> int:
    """Run one worker until it ends; returns the exit code. From the main thread only."""
    termination_log = Path(settings.termination_log) if settings.termination_log else DEFAULT_TERMINATION_LOG
    supervisor = Supervisor(
        children_of(replace(settings, run_dir="", lifeline_fd=-1, heartbeat_fd=-1, rank=0)),
        patience=Patience(drain_s=settings.drain_seconds + settings.wind_down_s + END_S),
        # The default file is made by the kubelet: where it is missing there is nobody to read it.
        termination_log=termination_log if settings.termination_log or termination_log.exists() else None,
        state_dir=Path(settings.state_dir) if settings.state_dir else None,
        group=settings.group,
        incarnation=settings.incarnation,
        pod=settings.pod_index,
    )
    return supervisor.run()


class Supervisor:
    """Owns the children, their pipes and the run folder. Single-threaded; used once."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        patience: Patience = Patience(),
        termination_log: Path | None = None,
        state_dir: Path | None = None,
        group: int = 0,
        incarnation: int = 0,
        pod: int = 0,
        temp_dir: Path | None = None,
    ) -> None:
        self._specs = tuple(children)
        self._patience = patience
        self._termination_log = termination_log
        self._state_dir = state_dir
        self._group = group
        self._incarnation = incarnation
        self._pod = pod
        self._temp_dir = temp_dir
        self._children: list[_Running] = []
        self._selector = selectors.DefaultSelector()
        self._reason: str | None = None
        self._stop_signal: int | None = None
        self._drain_until_s: float | None = None
        self._log = get_logger()

    def run(self) -> int:
        self._catch_signals()
        try:
            with RunDir(self._temp_dir) as run_dir:
                try:
                    for spec in self._specs:
                        self._children.append(self._start(spec, run_dir.path))
                    self._publish_pids()
                    return self._watch()
                except OSError as error:
                    return self._fail(f"the supervisor failed: {error}")
                finally:
                    self._kill_all()
                    self._unpublish_pids()
        except ConfigError as error:
            return self._fail(str(error))

    # --- the loop

    def _watch(self) -> int:
        while True:
            wake_s = self._next_deadline_s()
            numbers = self._turn(wake_s - time.monotonic())
            now_s = time.monotonic()
            self._forgive_own_sleep(now_s, wake_s)
            for number in numbers:
                if number in STOP_SIGNALS and not self._stop(number, now_s):
                    return self._fail(f"stopped at once by a second {signal.Signals(number).name}")
            code = self._verdict(now_s)
            if code is not None:
                return code

    def _turn(self, timeout_s: float) -> bytes:
        """Wait for a signal, a beat or the time; take beats and exits. Returns the signals."""
        numbers = b""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                numbers += os.read(key.fd, 64)
            else:
                self._take_beat(key.data)
        self._reap()
        return numbers

    def _verdict(self, now_s: float) -> int | None:
        """An exit code once this worker has ended, or has to."""
        ended = [child for child in self._children if child.exit_code is not None]
        lost = [child for child in ended if self._stop_signal is None or not child.ended_well]
        if lost:
            # One child's failure can be the end of another: the one that says why comes first.
            return self._lose(_epitaph(max(lost, key=lambda child: child.last_words is not None)), lost)
        for child in self._children:
            silence_s = now_s - child.last_beat_s
            if child.exit_code is None and silence_s > child.allowed_silence_s(self._patience):
                return self._lose(f"{child.spec.name} has been silent for {silence_s:.1f} s", [child])
        if len(ended) == len(self._children):
            self._log.info("stopped")
            return 130 if self._stop_signal == signal.SIGINT else 0
        if self._drain_until_s is not None and now_s > self._drain_until_s:
            names = " and ".join(c.spec.name for c in self._children if c.exit_code is None)
            return self._fail(f"{names} did not end within {self._patience.drain_s:g} s of being asked to")
        return None

    def _next_deadline_s(self) -> float:
        deadlines = [
            child.last_beat_s + child.allowed_silence_s(self._patience)
            for child in self._children
            if child.exit_code is None
        ]
        if self._drain_until_s is not None:
            deadlines.append(self._drain_until_s)
        # A hair later, so that a deadline has passed when it wakes us.
        return min(deadlines, default=time.monotonic()) + 0.01

    def _forgive_own_sleep(self, now_s: float, wake_s: float) -> None:
        """Whoever froze us (a paused container, a suspended machine) froze the children as well."""
        if now_s - wake_s > 1.0:
            self._log.warning("the supervisor was suspended", seconds=round(now_s - wake_s, 1))
            for child in self._children:
                child.last_beat_s = now_s

    def _take_beat(self, child: _Running) -> bool:
        """Read what lies in a child's pipe; False if there was nothing."""
        try:
            payload = os.read(child.heartbeat_fd, 4096)
        except BlockingIOError:
            return False
        if not payload:
            self._selector.unregister(child.heartbeat_fd)
            return False
        child.last_beat_s = time.monotonic()
        said = child.last_words
        if said is None:
            beats, marker, payload = payload.partition(LAST_WORDS)
            if READY in beats and not child.ready:
                child.ready = True
                self._log.info("child is ready", child=child.spec.name)
            if not marker:
                return True
        # More than is ever written down must not pile up here.
        child.last_words = ((said or b"") + payload)[:MAX_TERMINATION_BYTES]
        return True

    # --- signals

    def _catch_signals(self) -> None:
        """Signals as bytes on a pipe, so that one select waits for everything."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _noted)
        self._selector.register(read_fd, selectors.EVENT_READ)

    def _stop(self, number: int, now_s: float) -> bool:
        """Pass the first request to stop on; False if there was one before."""
        if self._stop_signal is not None:
            return False
        self._stop_signal = number
        self._drain_until_s = now_s + self._patience.drain_s
        self._log.info("stopping", signal=signal.Signals(number).name)
        for child in self._children:
            if child.exit_code is None:
                _send(child, signal.SIGTERM)
        return True

    # --- children

    def _start(self, spec: ChildSpec, run_dir: Path) -> _Running:
        lifeline_read, lifeline_write = os.pipe()
        beat_read, beat_write = os.pipe()
        os.set_blocking(beat_read, False)
        output = self._open_log(spec)
        argv = [*spec.command, "--run-dir", str(run_dir)]
        argv += ["--lifeline-fd", str(lifeline_read), "--heartbeat-fd", str(beat_write)]
        try:
            process = self.popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lifeline_read, beat_write),
                # A group of its own: Ctrl-C reaches the supervisor alone, which decides.
                process_group=0,
            )
        finally:
            os.close(lifeline_read)
            os.close(beat_write)
            if output is not None:
                os.close(output)
        child = _Running(spec, process, beat_read, lifeline_write, time.monotonic())
        self._selector.register(beat_read, selectors.EVENT_READ, child)
        self._log.info("child started", child=spec.name, pid=process.pid)
        return child

    def popen(self, argv: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a child. Tests put a fork of a process in its place that has its imports already."""
        return subprocess.Popen(argv, **options)

    def _open_log(self, spec: ChildSpec) -> int | None:
        """A local pool has a log file for each role; elsewhere the children share our streams."""
        if self._state_dir is None:
            return None
        folder = self._state_dir / "log"
        folder.mkdir(parents=True, exist_ok=True)
        # The first pod's frontend and rank 0 go without a number.
        role = f"{spec.role}{(self._pod if spec.rank is None else spec.rank) or ''}"
        name = f"{self._group}.{self._incarnation}.{role}.log"
        return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _reap(self) -> None:
        """Take every exit there is, also of orphans that PID 1 inherits."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self._children:
                if child.process.pid == pid:
                    child.exit_code = child.process.returncode = os.waitstatus_to_exitcode(status)
                    # What it wrote just before it ended counts.
                    while child.heartbeat_fd in self._selector.get_map() and self._take_beat(child):
                        pass

    def _kill_all(self) -> None:
        for child in self._children:
            if child.exit_code is None:
                _send(child, signal.SIGKILL)
        until_s = time.monotonic() + self._patience.killed_s
        while any(c.exit_code is None for c in self._children) and time.monotonic() < until_s:
            self._turn(until_s - time.monotonic())
        for child in self._children:
            os.close(child.lifeline_fd)
            os.close(child.heartbeat_fd)

    def _lose(self, reason: str, lost: Sequence[_Running]) -> int:
        """As ``_fail``, and rank 0 is told and waited for."""
        code = self._fail(reason)
        for child in self._children:
            if child.spec.rank != 0 or not child.ready or child in lost or child.exit_code is not None:
                continue
            try:
                os.write(child.lifeline_fd, reason.encode()[:MAX_LAST_WORDS_BYTES])
            except OSError:  # it has just ended
                continue
            until_s = time.monotonic() + FAREWELL_S
            while child.exit_code is None and time.monotonic() < until_s:
                self._turn(until_s - time.monotonic())
        return code

    # --- what others read

    def _fail(self, reason: str) -> int:
        """Write the first reason where people look for it; the exit code of a failure."""
        self._log.error("worker failed", reason=reason)
        if self._termination_log is not None:
            try:
                self._termination_log.write_bytes(reason.encode()[:MAX_TERMINATION_BYTES])
            except OSError as error:
                self._log.warning("termination log not written", error=str(error))
        return 1

    def _publish_pids(self) -> None:
        if self._state_dir is not None:
            members: list[tuple[int, str, int | None]] = [(os.getpid(), "supervisor", None)]
            members += [(c.process.pid, c.spec.role, c.spec.rank) for c in self._children]
            write_pids(self._pids_file(self._state_dir), self._group, self._incarnation, members)

    def _unpublish_pids(self) -> None:
        if self._state_dir is not None:
            self._pids_file(self._state_dir).unlink(missing_ok=True)

    def _pids_file(self, state_dir: Path) -> Path:
        start = f"{self._group}.{self._incarnation}"
        return state_dir / "run" / (f"{start}.{self._pod}.json" if self._pod else f"{start}.json")


def _noted(_number: int, _frame: Any) -> None:
    """The byte on the wake-up pipe says it all; a handler only has to exist."""


def _send(child: _Running, number: int) -> None:
    """To the child's whole group. The group may be gone; its exit is then on the way to us."""
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        pass


def _epitaph(child: _Running) -> str:
    """How a child ended, in its own words where it left any."""
    name, code = child.spec.name, child.exit_code or 0
    if child.last_words:
        return f"{name}: {child.last_words.decode(errors='replace')}"
    if code < 0:
        hint = ": out of memory?" if -code == signal.SIGKILL else ""
        return f"{name} was killed by signal {-code} ({signal.Signals(-code).name}){hint}"
    if code == 0:
        return f"{name} ended without being asked to"
    return f"{name} ended with exit code {code}"
