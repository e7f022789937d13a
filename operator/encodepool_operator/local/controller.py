"""``encodepool local run``: kubelet, StatefulSet controller and executor of the planner in one loop.

Every turn is the same: look at everything, ask the planner, carry its actions out, until it has
none; then wait. What ends a wait is a process that exits, a probe whose answer changes, a manifest
that changes, a signal, or the time the planner named. No turn depends on why it was woken.

SIGTERM: the pool is wanted with no groups, so the planner drains all of them, and the loop ends
when nothing is left. A second SIGTERM does without the drain.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from encodepool_operator.api.types import EncodePool
from encodepool_operator.core.actions import StartGroup
from encodepool_operator.core.plan import Plan, plan
from encodepool_operator.core.revision import choose
from encodepool_operator.core.snapshot import Snapshot

from . import observe
from .counter import Counter, UserCounter
from .errors import LocalError, ManifestError
from .execute import Executor
from .machine import Machine
from .manifest import load_kept
from .ports import taken
from .processes import kill_session
from .publish import read_documents
from .report import Report, digest, group_rows, members, read_report, write_members, write_report
from .state import load_state
from .statedir import StateDir, read_text

MANIFEST_POLL_S = 0.5

MAX_STEPS = 200
"""Plans in a row without a pause. Each step of each group is one, so a sound planner stays far below."""

BREATH_S = 1.0
"""Pause after ``MAX_STEPS``: a planner that never rests must not take the processor."""

RESYNC_S = 30.0
"""Longest wait between two looks: the wall clock may be set, and files may be changed by others."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outside:
    """What the controller is given instead of asking for it."""

    worker: Sequence[str]
    environ: Mapping[str, str]
    devices: Sequence[str]
    cpus: int
    counter: UserCounter


class Controller:
    """Runs the pool of one state directory until it has been taken down."""

    def __init__(self, state_dir: StateDir, outside: Outside, *, stopping: bool = False) -> None:
        self._dir = state_dir
        self._outside = outside
        self._stopping = stopping
        self._wake = asyncio.Event()
        self._state = load_state(state_dir.state)
        self._machine = Machine(state_dir, self._wake.set)
        self._executor = Executor(
            state_dir,
            self._state,
            self._machine,
            outside.counter,
            worker=outside.worker,
            environ=outside.environ,
            devices=outside.devices,
            cpus=outside.cpus,
        )
        self._pool: EncodePool | None = None
        self._read = ""
        self._manifest = ""
        self._problem = ""
        self._report = read_report(state_dir.status)
        if self._report is not None:
            # Conditions keep the times of their last change over a new controller.
            self._executor.status = self._report.status

    async def run(self) -> None:
        """Until the pool is down. The caller holds the directory's lock."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        watching = asyncio.create_task(self._watch_manifest())
        try:
            self._executor.adopt()
            while True:
                self._wake.clear()
                self._check_directory()
                try:
                    self._read_manifest()
                    wake_at = self._converge()
                except LocalError:
                    raise
                except Exception as error:
                    # A full disk, no more processes, a defect: workers must not be left unwatched.
                    log.error("this turn failed", exc_info=True)
                    self._tell_problem(f"{type(error).__name__}: {error}")
                    wake_at = time.time() + BREATH_S
                if self._stopping and not self._state.groups:
                    return
                await self._rest(wake_at)
        finally:
            watching.cancel()
            await self._machine.close()

    def _asked_to_stop(self) -> None:
        if self._stopping:
            log.warning("asked to stop twice: ending everything at once")
            for pod in self._state.pods():
                self._machine.terminate(pod, 0)
        self._stopping = True
        self._wake.set()

    def _check_directory(self) -> None:
        """Without its directory a pool can be neither followed nor ended by anybody: end it now."""
        if self._dir.root.is_dir():
            return
        for pod in self._state.pods():
            if pod.process is not None:
                kill_session(pod.process)
            if pod.temp_dir:
                shutil.rmtree(pod.temp_dir, ignore_errors=True)
        raise LocalError(f"{self._dir.root} is gone; its processes were killed")

    async def _rest(self, wake_at: float | None) -> None:
        left_s = RESYNC_S if wake_at is None else min(max(0.0, wake_at - time.time()), RESYNC_S)
        try:
            async with asyncio.timeout(left_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    # --- the manifest

    async def _watch_manifest(self) -> None:
        seen = None
        while True:
            try:
                stat = os.stat(self._dir.manifest)
                now = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            except OSError:
                now = None
            if now != seen:
                seen = now
                self._wake.set()
            await asyncio.sleep(MANIFEST_POLL_S)

    def _read_manifest(self) -> None:
        """Follow the file; a text that cannot be used leaves the pool as it was."""
        text = read_text(self._dir.manifest) or ""
        if digest(text) == self._read:
            return
        self._read = digest(text)
        try:
            pool = load_kept(self._dir.manifest).pool
        except ManifestError as error:
            if self._pool is None:
                raise
            self._problem = str(error)
            log.error("the manifest is not followed", why=self._problem)
            return
        self._manifest, self._problem = self._read, ""
        generation = self._pool.metadata.generation if self._pool else 0
        if self._pool is None or _numbered(pool, generation) != self._pool:
            self._pool = _numbered(pool, generation + 1)
            log.info("manifest read", pool=pool.metadata.name, replicas=pool.spec.replicas)

    # --- one turn

    def _converge(self) -> float | None:
        """Plan and act until there is nothing to do; when to look again although nothing happens."""
        if self._pool is None:
            return None
        for _ in range(MAX_STEPS):
            self._machine.check()
            self._executor.forget_gone()
            counter = self._outside.counter.read()
            snapshot, step = self._plan(counter)
            self._executor.carry_out(self._pool.metadata.name, step.actions, counter.last)
            launched = self._executor.launch_waiting(self._pool.metadata.name, self._pool.spec.replicas)
            if not step.actions and not launched:
                self._tell(snapshot)
                return step.wake_at
        self._tell(snapshot)
        log.error("the plan does not come to rest", actions=[type(a).__name__ for a in step.actions])
        return time.time() + BREATH_S

    def _plan(self, counter: Counter) -> tuple[Snapshot, Plan]:
        """A plan whose starts use only ports that can be listened on now."""
        blocked: frozenset[int] = frozenset()
        while True:
            snapshot = self._snapshot(counter, blocked)
            step = plan(snapshot, time.time())
            starts = [action for action in step.actions if isinstance(action, StartGroup)]
            wanted = {port for start in starts for port in start.record.ports}
            # Each round names a port that no round before it named, so the rounds end.
            found = taken(wanted - blocked)
            if not found:
                return snapshot, step
            log.info("ports are taken, passing them over", ports=sorted(found))
            blocked |= found

    def _snapshot(self, counter: Counter, blocked: frozenset[int]) -> Snapshot:
        pool = self._pool
        assert pool is not None
        pool = replace(pool, metadata=replace(pool.metadata, uid=counter.uid))
        if self._stopping:
            pool = replace(pool, spec=replace(pool.spec, replicas=0))
        return Snapshot(
            pool=pool,
            groups=observe.groups(self._state),
            revisions=tuple(self._state.revisions),
            last_incarnation=counter.last,
            documents=read_documents(self._dir.endpoints),
            status=self._executor.status,
            taken_ports=blocked,
            shared_host=True,
        )

    def _tell_problem(self, problem: str) -> None:
        if self._report is not None:
            told = msgspec.structs.replace(self._report, problem=problem, read=self._read)
            try:
                self._report = write_report(self._dir.status, told, self._report)
            except OSError as error:
                log.error("status not written", error=str(error))

    def _tell(self, snapshot: Snapshot) -> None:
        pool = snapshot.pool
        status: Mapping[str, Any] = self._executor.status or {}
        report = Report(
            pool=pool.metadata.name,
            namespace=pool.metadata.namespace,
            pid=os.getpid(),
            read=self._read,
            manifest=self._manifest,
            stopping=self._stopping,
            revision=choose(pool.spec, snapshot.default_image, snapshot.revisions).name,
            groups=group_rows(snapshot, time.time()),
            # The counter is the user's: it moves with other pools, and this one would have news.
            status={key: value for key, value in status.items() if key != "lastIncarnation"},
            problem=self._problem,
        )
        self._report = write_report(self._dir.status, report, self._report)
        write_members(self._dir.processes, members(self._dir, self._state))


def _numbered(pool: EncodePool, generation: int) -> EncodePool:
    """As an API server numbers a resource: the manifest itself has no generation."""
    return replace(pool, metadata=replace(pool.metadata, generation=generation))
