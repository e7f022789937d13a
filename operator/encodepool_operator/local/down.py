"""``encodepool local down``: drain, end every process, leave nothing; also when no controller runs."""

import logging
import shutil
import signal
import time
from collections.abc import Callable, Mapping

from encodepool_operator.core.render.engine import END_S, grace_s
from encodepool_operator.core.revision import read_spec

from .errors import LocalError, ManifestError
from .manifest import load_kept
from .processes import ProcessId, identify, is_known, kill_session, send
from .publish import empty_documents, write_documents
from .report import Report, members, read_report, write_members
from .state import load_state, save_state
from .statedir import StateDir

POLL_S = 0.1
REAPED_S = 5.0
SLACK_S = 15.0
"""Beyond what the manifest allows, for a busy machine."""


def down(
    state_dir: StateDir,
    environ: Mapping[str, str],
    *,
    note: Callable[[str], None],
    progress: Callable[[Report], None],
) -> str:
    """End the pool of ``state_dir``; what was ended, in words. Asked for twice, it does nothing the
    second time and returns "".

    A controller that runs is asked to; without one this process does it. What has not ended within
    the times of its manifest is killed. Raises LocalError if something outlives even that.
    """
    if not state_dir.root.is_dir():
        note(f"there is no pool in {state_dir.root}")
        return ""
    began_s, report = time.monotonic(), read_report(state_dir.status)
    state = load_state(state_dir.state)
    processes = len(members(state_dir, state)) + (state_dir.holder() is not None)
    if not state.groups and not processes:
        note(f"no pool runs in {state_dir.root}")
        return ""
    limit_s = _limit_s(state_dir)
    try:
        _ask_controller(state_dir, limit_s, note, progress)
        if load_state(state_dir.state).groups:
            _end_from_here(state_dir, environ, limit_s, note)
    except KeyboardInterrupt:
        again = f"`encodepool local down --state-dir {state_dir.root}`"
        if state_dir.holder() is not None:
            note(f"the pool goes on draining and ends by itself; {again} ends it at once")
        else:
            note(f"not all of the pool may have ended; {again} ends the rest")
        raise
    name = report.pool if report is not None else f"of {state_dir.root}"
    groups = "1 group" if len(state.groups) == 1 else f"{len(state.groups)} groups"
    ended = "1 process" if processes == 1 else f"{processes} processes"
    return f"pool {name} is down: {groups}, {ended} ended in {time.monotonic() - began_s:.1f} s"


def _end_from_here(
    state_dir: StateDir, environ: Mapping[str, str], limit_s: float, note: Callable[[str], None]
) -> None:
    # Only a pool without a controller needs one in this process.
    from .logs import setup_logs
    from .run import run_controller, surroundings

    note(f"no controller runs, ending the pool of {state_dir.root} from here")
    setup_logs(logging.WARNING)
    try:
        run_controller(state_dir, surroundings([], environ), stopping=True, limit_s=limit_s)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, a pool can be ended
        note(f"ending the pool without a drain: {error}")
    if load_state(state_dir.state).groups:
        note("not everything ended in time, killing it")
        _kill(state_dir)


def _limit_s(state_dir: StateDir) -> float:
    """How long a drain may take: settle, the longest grace period of any start, and some slack."""
    specs = [read_spec(kept) for kept in load_state(state_dir.state).revisions]
    longest_s = max((grace_s(spec) for spec in specs if spec is not None), default=END_S)
    try:
        settle_s = load_kept(state_dir.manifest).pool.spec.drain.settle_seconds
    except ManifestError:
        settle_s = 0
    return settle_s + longest_s + SLACK_S


def _ask_controller(
    state_dir: StateDir, limit_s: float, note: Callable[[str], None], progress: Callable[[Report], None]
) -> None:
    """SIGTERM to whoever holds the directory, until nobody does; SIGKILL when it takes too long."""
    deadline_s = time.monotonic() + limit_s
    asked: ProcessId | None = None
    while (pid := state_dir.holder()) is not None:
        # Its pid is in the lock file a moment after the lock is taken.
        process = identify(pid) if pid else None
        if process is not None and asked != process:
            send(process, signal.SIGTERM)
            asked = process
        if time.monotonic() > deadline_s and process is not None:
            note(f"the controller (process {pid}) does not end, killing it")
            send(process, signal.SIGKILL)
        if asked is not None:
            _show(state_dir, progress)
        time.sleep(POLL_S)
    if asked is not None:
        _show(state_dir, progress)
        # Its parent is the machine's first process, which may take a moment to reap it.
        reaped_by_s = time.monotonic() + REAPED_S
        while is_known(asked) and time.monotonic() < reaped_by_s:
            time.sleep(POLL_S)


def _show(state_dir: StateDir, progress: Callable[[Report], None]) -> None:
    report = read_report(state_dir.status)
    if report is not None:
        progress(report)


def _kill(state_dir: StateDir) -> None:
    """The end without a planner: nobody is listed, nobody runs, nothing is remembered."""
    with state_dir.locked():
        state = load_state(state_dir.state)
        write_documents(state_dir.endpoints, empty_documents(state_dir.endpoints))
        for pod in state.pods():
            if pod.process is not None and not kill_session(pod.process):
                raise LocalError(f"process {pod.process.pid} outlives SIGKILL; look for it in `ps`")
            if pod.temp_dir:
                shutil.rmtree(pod.temp_dir, ignore_errors=True)
        state.groups.clear()
        save_state(state_dir.state, state)
        write_members(state_dir.processes, [])
