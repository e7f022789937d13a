"""``encodepool local up``: hand the manifest over, see that a controller runs, wait for the outcome."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from encodepool_operator.api.rules import refused_changes

from .command import visible_devices, worker_argv
from .counter import UserCounter, user_state_dir
from .detach import detach
from .errors import LocalError, ManifestError
from .fit import check_fit
from .logs import last_lines
from .manifest import Manifest, load, load_kept
from .report import GroupRow, Report, condition, digest, read_report
from .state import load_state
from .statedir import StateDir, write_atomic

POLL_S = 0.1
LOG_LINES = 15


def up(
    file: Path,
    state_dir: StateDir,
    environ: Mapping[str, str],
    *,
    worker: str = "",
    note: Callable[[str], None],
    progress: Callable[[Report], None],
) -> Report:
    """Make the pool of ``state_dir`` what ``file`` says; returns what it is once it is ready.

    Raises ManifestError for a file that cannot be used (nothing has been changed then), LocalError
    when the pool cannot become ready; the controller goes on trying in that case.
    """
    manifest = load(file)
    worker_argv(worker)
    # A running controller's workers have its environment, a worker of the user's own what he gives it.
    runs = state_dir.holder() is not None
    inherited = None if worker or runs else environ
    devices = visible_devices(environ)
    check_fit(manifest.pool.spec, devices=devices, environ=inherited, replaces=runs and not worker)
    if not runs:
        UserCounter(user_state_dir(environ)).check()
    kept = state_dir.manifest
    if kept.exists() and not state_dir.lock_file.exists() and not kept.samefile(file):
        raise LocalError(f"{kept} is not of a pool's making: choose a --state-dir that is the pool's alone")
    state_dir.create()
    _check_change(state_dir, manifest)
    for text in manifest.notes:
        note(text)
    write_atomic(state_dir.manifest, manifest.text)
    run = _ensure_controller(state_dir, worker, note)
    return _wait(state_dir, digest(manifest.text), run, progress)


def _check_change(state_dir: StateDir, manifest: Manifest) -> None:
    """A directory holds one pool, and some parts of a pool are for life."""
    if not state_dir.manifest.exists() or not load_state(state_dir.state).groups:
        return
    try:
        before, after = load_kept(state_dir.manifest).pool, manifest.pool
    except ManifestError:
        return  # somebody spoiled the copy; it is about to be replaced
    for key in ("name", "namespace"):
        old, new = getattr(before.metadata, key), getattr(after.metadata, key)
        if old != new:
            raise ManifestError(
                f"metadata.{key}: {state_dir.root} runs pool {old!r}, not {new!r}; "
                "give each pool its own --state-dir, or take this one down first"
            )
    refused = refused_changes(before.spec, after.spec)
    if refused:
        raise ManifestError(
            "; ".join(f"{path}: {message}" for path, message in refused)
            + f", or take {state_dir.root} down first"
        )


def _ensure_controller(
    state_dir: StateDir, worker: str, note: Callable[[str], None]
) -> subprocess.Popen[bytes] | None:
    """Our own controller's process; None where one runs already."""
    said = False
    while (pid := state_dir.holder()) is not None:
        report = read_report(state_dir.status)
        if report is None or report.pid != pid or not report.stopping:
            return None
        if not said:
            note("waiting for the pool that is going down")
            said = True
        time.sleep(POLL_S)
    # What an earlier controller said must not be taken for the new one's word.
    state_dir.status.unlink(missing_ok=True)
    return detach(state_dir, worker)


def _wait(
    state_dir: StateDir,
    wanted: str,
    run: subprocess.Popen[bytes] | None,
    progress: Callable[[Report], None],
) -> Report:
    restarts: dict[tuple[int, str], int] | None = None
    while True:
        # In this order: a controller that has just ended has written its last report before.
        alive = state_dir.holder() is not None or (run is not None and run.poll() is None)
        report = read_report(state_dir.status)
        # A pool may come back to a text it already follows: what is said then is about the text between.
        if report is not None and report.read == wanted and report.problem:
            raise LocalError(report.problem)
        if report is not None and report.read == report.manifest == wanted and not report.stopping:
            if restarts is None:
                restarts = {(row.group, row.revision): row.restarts for row in report.groups}
            progress(report)
            if is_ready(report):
                return report
            _check_hope(state_dir, report, restarts)
        if not alive:
            lines = last_lines(state_dir.log / "run.log", LOG_LINES)
            raise LocalError(f"the controller has ended; see {state_dir.log / 'run.log'}", tuple(lines))
        time.sleep(POLL_S)


def is_ready(report: Report) -> bool:
    """All wanted groups are ready and listed, and no group is on its way."""
    return condition(report.status, "Ready").get("status") == "True"


def _check_hope(state_dir: StateDir, report: Report, restarts_before: Mapping[tuple[int, str], int]) -> None:
    """Raises LocalError when a group cannot come up.

    A first failure may be an accident and is followed by an immediate restart. A group that fails
    again has to wait, and so would we.
    """
    for row in report.groups:
        before = restarts_before.get((row.group, row.revision), 0)
        failed_again = row.phase == "Backoff" and row.restarts > before
        if row.exhausted or (failed_again and row.revision == report.revision):
            raise LocalError(
                f"group {row.group} does not start: {row.reason}. It is tried again and again: correct "
                f"the manifest and run up again, or end the pool with `encodepool local down --state-dir "
                f"{state_dir.root}`",
                tuple(failed_log(state_dir, row)),
            )
    progressing = condition(report.status, "Progressing")
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        raise LocalError(f"the pool does not come up: {progressing.get('message', '')}")


def failed_log(state_dir: StateDir, row: GroupRow) -> list[str]:
    """The last lines that the processes of the group's failed start left behind."""
    incarnation = row.failed_incarnation if row.failed_incarnation is not None else row.incarnation
    out = []
    for path in sorted(state_dir.log.glob(f"{row.group}.{incarnation}.*.log")):
        lines = last_lines(path, LOG_LINES)
        if lines:
            out += [f"--- {path}", *lines]
    return out
