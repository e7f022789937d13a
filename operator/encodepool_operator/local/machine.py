"""The kubelet of one machine: runs the supervisors, probes them, sees them end, ends them.

It knows pods, not groups: it changes ``PodState`` and calls ``changed``; what that means is the
planner's business. A pod whose process has exited stays until it is told to terminate, as a failed
pod of a cluster does.
"""

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from . import probes
from .logs import last_lines
from .ports import host_of
from .processes import Exit, GatedProcess, is_running, is_stopped, kill_session, send
from .state import Exited, PodState
from .statedir import StateDir, read_text

LIVENESS_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for a worker that failed its probes: a frozen one ignores SIGTERM."""

MESSAGE_CHARS = 2000

log = structlog.get_logger(__name__)


class Machine:
    """Processes of one pool. All methods belong to the event loop's thread."""

    def __init__(
        self, state_dir: StateDir, changed: Callable[[], None], *, probe_period_s: float = probes.PERIOD_S
    ) -> None:
        self._dir = state_dir
        self._changed = changed
        self._probe_period_s = probe_period_s
        self._exits: dict[str, Exit] = {}
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def launch(
        self,
        group: int,
        pod: PodState,
        argv: Sequence[str],
        env: Callable[[Path], Mapping[str, str]],
        *,
        metrics_port: int,
        startup_deadline_s: float,
        save: Callable[[], None],
    ) -> None:
        """Start the pod's process; ``save`` is called between its birth and its first step.

        ``env`` is given the pod's temporary folder. A process that cannot be made at all (no
        memory, no such interpreter) counts as one that exited.
        """
        pod.waiting = ""
        pod.launched_at = time.time()
        try:
            pod.temp_dir = tempfile.mkdtemp(prefix="epool-")
            gated = GatedProcess(
                argv, env(Path(pod.temp_dir)), self._dir.supervisor_log(group, pod.incarnation, pod.index)
            )
        except OSError as error:
            shutil.rmtree(pod.temp_dir, ignore_errors=True)
            pod.exited = Exited(time.time(), None, "StartError", str(error))
            self._changed()
            return
        pod.process = gated.process
        try:
            save()
        except BaseException:
            gated.discard()
            shutil.rmtree(pod.temp_dir, ignore_errors=True)
            pod.process, pod.launched_at = None, None
            raise
        self._exits[pod.uid] = Exit(gated.process, gated.open_gate())
        self._watch(group, pod, metrics_port, startup_deadline_s)

    def adopt(self, group: int, pod: PodState, *, metrics_port: int, startup_deadline_s: float) -> None:
        """Take over a pod that an earlier controller started; it may have exited meanwhile."""
        if pod.process is None:
            return
        if pod.exited is None and not is_running(pod.process):
            # Now, not when its exit has been awaited: the first plan must not take it for ready.
            self._set_exited(group, pod, None)
        since_s = time.time() - (pod.launched_at or time.time())
        self._exits[pod.uid] = Exit(pod.process, None)
        self._watch(group, pod, metrics_port, max(0.0, startup_deadline_s - since_s))
        if pod.dead:
            self._spawn(self._end(pod, LIVENESS_GRACE_S))
        if pod.terminating_since is not None:
            # To the worker a second SIGTERM means: at once. It has had its first.
            self._asked.add(pod.uid)
            passed_s = max(0.0, time.time() - pod.terminating_since)
            self._spawn(self._end(pod, max(0.0, pod.grace_s - passed_s)))

    def terminate(self, pod: PodState, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after ``grace_s``; 0 kills at once. Asked twice, the shorter wins."""
        if pod.terminating_since is None:
            pod.terminating_since = time.time()
            pod.grace_s = grace_s
        pod.grace_s = min(pod.grace_s, grace_s)
        if pod.process is not None and pod.exited is None:
            self._spawn(self._end(pod, grace_s))

    def is_gone(self, pod: PodState) -> bool:
        """Told to terminate, and nothing of it is left."""
        return pod.terminating_since is not None and pod.uid not in self._exits

    def check(self) -> None:
        """Raises what one of the watchers died of: such an error must not go unseen."""
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop watching. The processes stay as they are."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, group: int, pod: PodState, metrics_port: int, startup_left_s: float) -> None:
        self._spawn(self._life(group, pod, metrics_port, startup_left_s))

    async def _life(self, group: int, pod: PodState, metrics_port: int, startup_left_s: float) -> None:
        state = probes.ProbeState(pod.started, pod.ready)
        prober = probes.Prober(
            host_of(pod.index),
            metrics_port,
            state,
            lambda: self._probed(pod, state),
            frozen=lambda: pod.process is not None and is_stopped(pod.process),
            startup_left_s=startup_left_s,
            period_s=self._probe_period_s,
        )
        probing = self._spawn(prober.run())
        process_exit = self._exits[pod.uid]
        try:
            exit_code = await process_exit.seen()
        finally:
            probing.cancel()
        if pod.exited is None:
            self._set_exited(group, pod, exit_code)
        self._changed()
        if not await process_exit.cleaned():
            log.error("processes outlive SIGKILL", pod=pod.name, session=pod.process and pod.process.pid)
        if pod.temp_dir:
            shutil.rmtree(pod.temp_dir, ignore_errors=True)
        # A killed supervisor could not remove its list of children.
        self._dir.children_file(group, pod.incarnation, pod.index).unlink(missing_ok=True)
        del self._exits[pod.uid]
        self._asked.discard(pod.uid)
        self._changed()

    def _probed(self, pod: PodState, state: probes.ProbeState) -> None:
        pod.started = state.started
        self._set_ready(pod, state.ready)
        if state.dead and not pod.dead:
            pod.dead = state.dead
            log.warning("probes failed, ending the worker", pod=pod.name, reason=state.dead)
            self._spawn(self._end(pod, LIVENESS_GRACE_S))
        self._changed()

    def _set_ready(self, pod: PodState, ready: bool) -> None:
        if pod.ready != ready:
            pod.ready = ready
            pod.ready_changed_at = time.time()

    async def _end(self, pod: PodState, grace_s: float) -> None:
        process = pod.process
        assert process is not None
        if grace_s > 0:
            if pod.uid not in self._asked:
                self._asked.add(pod.uid)
                send(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await Exit(process, None).seen()
                return
            except TimeoutError:
                log.warning("worker did not end in time, killing it", pod=pod.name, grace_s=grace_s)
        await asyncio.to_thread(kill_session, process)

    def _set_exited(self, group: int, pod: PodState, exit_code: int | None) -> None:
        """Note how it ended, in its own words where it left any."""
        said = read_text(self._dir.termination_file(group, pod.incarnation, pod.index))
        words = said or pod.dead or _killed_by(exit_code) or self._last_line(group, pod)
        reason = "Unhealthy" if pod.dead else "Completed" if exit_code == 0 else "Error"
        pod.exited = Exited(time.time(), exit_code, reason, words.strip()[-MESSAGE_CHARS:])
        self._set_ready(pod, False)

    def _last_line(self, group: int, pod: PodState) -> str:
        lines = last_lines(self._dir.supervisor_log(group, pod.incarnation, pod.index), 1)
        return lines[0] if lines else ""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._changed()


def _killed_by(exit_code: int | None) -> str:
    """Empty for a process that ended by itself. A worker that fails of its own accord says why."""
    if exit_code is None:
        return "killed, or ended without a word; its exit code was for a controller that is gone"
    if exit_code <= 128:
        return ""
    try:
        return f"killed by signal {exit_code - 128} ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""
