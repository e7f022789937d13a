"""Processes of this machine: named without doubt, started so that none can be lost, ended for sure.

A process is named by its pid, its start time and the boot it lives in, so a number that was given
to somebody else is never taken for ours. A process is started behind a gate: it waits until its
name is on disk, and goes away by itself if the controller dies before that. It leads a session of
its own; when it dies, what is left of the session is killed, as a container's processes are when
the first of them dies.
"""

import asyncio
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GATE = 'read -r go && exec "$@" </dev/null'
"""Run by /bin/sh: wait for a line, then become the command. End of file: the controller is dead."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """``start_ticks`` is the kernel's start time of the process, in clock ticks since boot."""

    pid: int
    start_ticks: int
    boot: str


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    session: int
    start_ticks: int


def boot_id() -> str:
    """A new text at each boot: pids and start times repeat over boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> ProcessId | None:
    """The full name of a running process; None if there is none (a zombie does not run)."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessId(pid, stat.start_ticks, boot_id())


def is_running(process: ProcessId) -> bool:
    return identify(process.pid) == process


def is_known(process: ProcessId) -> bool:
    """Running, or ended and not yet reaped by its parent."""
    stat = _stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks and process.boot == boot_id()


def is_stopped(process: ProcessId) -> bool:
    """Frozen by SIGSTOP: it runs, and does nothing."""
    stat = _stat(process.pid)
    return stat is not None and stat.state == "T" and is_running(process)


def send(process: ProcessId, signum: int) -> bool:
    """Signal exactly this process; False if it is gone."""
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def open_process(process: ProcessId) -> int | None:
    """A pidfd of this very process (readable once it has exited); None if it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The descriptor is bound to whoever had the pid just now; is that the one that is meant?
    if is_running(process):
        return pidfd
    os.close(pidfd)
    return None


def session_members(leader: ProcessId) -> list[ProcessId]:
    """Running processes of the session that ``leader`` led, without it; also after its death.

    While a member lives the kernel gives the session's number to no new process, so whoever has it
    and is not older than the leader belongs to it.
    """
    if leader.boot != boot_id():
        return []
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader.pid:
            continue
        stat = _stat(int(entry))
        if (
            stat is not None
            and stat.state not in "ZX"
            and stat.session == leader.pid
            and stat.start_ticks >= leader.start_ticks
        ):
            found.append(ProcessId(int(entry), stat.start_ticks, leader.boot))
    return found


def kill_session(leader: ProcessId, timeout_s: float = 10.0) -> bool:
    """SIGKILL the leader and all that is left of its session; True once nobody is left.

    Blocks until the killed have gone; False if one outlives ``timeout_s`` (it hangs in the kernel).
    """
    deadline_s = time.monotonic() + timeout_s
    send(leader, signal.SIGKILL)
    while True:
        # Again until nobody is left: a member may have started another one meanwhile.
        members = session_members(leader)
        if is_running(leader):
            members.append(leader)
        if not members:
            return True
        for member in members:
            send(member, signal.SIGKILL)
        for member in members:
            if not wait_exit(member, max(0.0, deadline_s - time.monotonic())):
                return False


def wait_exit(process: ProcessId, timeout_s: float) -> bool:
    """Block until the process has exited; False if it runs on after ``timeout_s``."""
    pidfd = open_process(process)
    if pidfd is None:
        return True
    try:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        return bool(waiter.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


class GatedProcess:
    """A child that waits at its gate. ``open_gate`` lets it run, ``discard`` ends it unrun."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as stream:
            self._popen = subprocess.Popen(
                ["/bin/sh", "-c", GATE, "sh", *argv],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=dict(env),
                start_new_session=True,
            )
        process = identify(self._popen.pid)
        if process is None:
            self.discard()
            raise ChildProcessError(f"{argv[0]} was gone at once")
        self.process = process

    def open_gate(self) -> subprocess.Popen[bytes]:
        """The child runs its command from now on; the caller reaps it."""
        gate = self._popen.stdin
        assert gate is not None
        try:
            gate.write(b"go\n")
            gate.close()
        except BrokenPipeError:
            pass  # It died at the gate; its exit is seen like any other.
        return self._popen

    def discard(self) -> None:
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._popen.wait()


class Exit:
    """Waits for the exit of a process, our child or not, without polling."""

    def __init__(self, process: ProcessId, popen: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._popen = popen

    async def seen(self) -> int | None:
        """Return as soon as the process has exited: its exit code, 128 + n for signal n.

        None for a process that is not our child: the kernel tells only its parent. A child is not
        reaped yet, so nobody else can get its pid or the number of its session.
        """
        pidfd = os.pidfd_open(self._process.pid) if self._popen is not None else open_process(self._process)
        if pidfd is not None:
            loop = asyncio.get_running_loop()
            exited = asyncio.Event()
            loop.add_reader(pidfd, exited.set)
            try:
                await exited.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        if self._popen is None:
            return None
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status

    async def cleaned(self) -> bool:
        """After ``seen``: end what is left of the session, then reap; False if something hangs."""
        clean = await asyncio.to_thread(kill_session, self._process)
        if self._popen is not None:
            self._popen.wait()
        return clean


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets and may contain anything; fields are counted after it.
    rest = text[text.rindex(")") + 2 :].split()
    return _Stat(state=rest[0], session=int(rest[3]), start_ticks=int(rest[19]))
