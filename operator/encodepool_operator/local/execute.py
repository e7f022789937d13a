"""Carries out what the planner asks for, on this machine.

Everything here happens in one breath, without awaiting: between a snapshot and the last action of
its plan nothing else can change the state, so preconditions fail only where two of one plan's
actions contradict each other.
"""

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from encodepool_operator.api import names
from encodepool_operator.api.types import Spec
from encodepool_operator.core import actions as plan_actions
from encodepool_operator.core.actions import Action
from encodepool_operator.core.record import GroupRecord, annotations_of
from encodepool_operator.core.render.engine import END_S, grace_s
from encodepool_operator.core.revision import read_spec

from . import observe
from .command import worker_environment, worker_flags
from .counter import UserCounter
from .machine import Machine
from .manifest import gpus, needed_devices
from .publish import write_documents
from .state import GroupState, PodState, PoolState, save_state
from .statedir import StateDir

KEPT_STARTS = 10
"""Log files of this many starts are kept for each group."""

log = structlog.get_logger(__name__)


class ActionFailed(Exception):
    """The object of an action is not as the plan assumed: plan again."""


class Executor:
    """Owns the pool's state on disk; the machine below it changes pods, this changes groups."""

    def __init__(
        self,
        state_dir: StateDir,
        state: PoolState,
        machine: Machine,
        counter: UserCounter,
        *,
        worker: Sequence[str],
        environ: Mapping[str, str],
        devices: Sequence[str],
        cpus: int,
    ) -> None:
        self._dir = state_dir
        self._state = state
        self._machine = machine
        self._counter = counter
        self._worker = list(worker)
        self._environ = environ
        self._devices = list(devices)
        self._cpus = cpus
        self._saved = ""
        self.status: Mapping[str, Any] | None = None

    def adopt(self) -> None:
        """Take over what an earlier controller left running."""
        for index, group in self._state.groups.items():
            record, spec = self._wanted(group)
            for pod in group.pods:
                if record is None or spec is None:
                    # Nobody can say what it is: it must not go on unseen.
                    self._machine.terminate(pod, 0)
                self._machine.adopt(
                    index,
                    pod,
                    metrics_port=record.ports.metrics if record else 0,
                    startup_deadline_s=spec.restart.startup_deadline_seconds if spec else 0,
                )

    def carry_out(self, pool: str, actions: Iterable[Action], seen_incarnation: int) -> None:
        """In order; ``seen_incarnation`` is the counter that the plan was made from."""
        failed: set[int] = set()
        for action in actions:
            if action.group in failed:
                continue
            try:
                self._one(pool, action, seen_incarnation)
            except ActionFailed as error:
                log.warning("not done", action=type(action).__name__, why=str(error))
                if action.group is None:
                    return
                failed.add(action.group)
                continue
            self.save()
            if not isinstance(action, plan_actions.WriteStatus):
                log.info(action.reason, action=type(action).__name__, group=action.group)

    def _one(self, pool: str, action: Action, seen_incarnation: int) -> None:
        match action:
            case plan_actions.SaveRevision():
                self._drop_revision(action.revision.name)
                self._state.revisions.append(action.revision)
            case plan_actions.DropRevision():
                self._drop_revision(action.name)
            case plan_actions.ReserveIncarnations():
                if not self._counter.reserve(action.last, seen=seen_incarnation):
                    raise ActionFailed("another pool of this user took the incarnation")
            case plan_actions.RecordGroup():
                self._group(action.group, action.version).annotations = annotations_of(action.record)
            case plan_actions.Publish():
                self._pod(action.group, action.uid).publication = action.publication
            case plan_actions.Withdraw():
                self._pod(action.group, action.uid).publication = None
            case plan_actions.WriteEndpoints():
                write_documents(self._dir.endpoints, action.documents)
            case plan_actions.StartGroup():
                self._start(pool, action)
            case plan_actions.StopGroup():
                self._stop(action)
            case plan_actions.DeleteGroup():
                if self._group(action.group, action.version).pods:
                    raise ActionFailed("its processes are still there")
                del self._state.groups[action.group]
            case plan_actions.DeletePod():
                pod = self._pod(action.group, action.uid)
                grace_s = self._grace_s(action.group) if action.grace_s is None else action.grace_s
                self._machine.terminate(pod, grace_s)
            case plan_actions.WriteStatus():
                self.status = action.status
            case plan_actions.ApplyChild() | plan_actions.DropChild() | plan_actions.RepairGroup():
                # Never planned: the snapshot says that there are no such children, and no drift.
                raise ActionFailed("one machine has no such object")

    def _start(self, pool: str, action: plan_actions.StartGroup) -> None:
        before = self._state.groups.get(action.group)
        if before is not None:
            self._group(action.group, action.version)
            if before.replicas or before.pods:
                raise ActionFailed("it is not stopped")
        elif action.version:
            raise ActionFailed("it is gone")
        incarnation = action.record.incarnation
        self._state.groups[action.group] = GroupState(
            replicas=action.replicas,
            generation=before.generation + 1 if before else 1,
            annotations=annotations_of(action.record),
            pods=[
                PodState(
                    name=names.pod(pool, action.group, index),
                    uid=str(uuid.uuid4()),
                    incarnation=incarnation,
                    index=index,
                )
                for index in range(action.replicas)
            ],
        )

    def _stop(self, action: plan_actions.StopGroup) -> None:
        group = self._group(action.group, action.version)
        grace_s = self._grace_s(action.group)
        group.replicas = 0
        group.generation += 1
        group.annotations = annotations_of(action.record)
        for pod in group.pods:
            self._machine.terminate(pod, grace_s)

    def launch_waiting(self, pool: str, replicas: int) -> bool:
        """Give a process to every pod that has none, as far as there are devices.

        True if that changed anything, be it only what a pod waits for.
        """
        before = self._saved
        for index, group in sorted(self._state.groups.items()):
            for pod in group.pods:
                if pod.process is None and pod.terminating_since is None and pod.exited is None:
                    self._launch(pool, index, group, pod, replicas)
        self.save()
        return self._saved != before

    def _launch(self, pool: str, index: int, group: GroupState, pod: PodState, replicas: int) -> None:
        record, spec = self._wanted(group)
        if record is None or spec is None:
            pod.waiting = "its revision cannot be read"
            return
        needed = needed_devices(spec)
        held = {device for other in self._state.pods() for device in other.devices}
        free = [device for device in self._devices if device not in held]
        if needed > len(free):
            pod.waiting = f"Unschedulable: needs {gpus(needed)}, {len(free)} of {len(self._devices)} are free"
            return
        pod.devices = free[:needed]
        self._prune_logs(index)
        flags = worker_flags(
            spec,
            pool=pool,
            group=index,
            incarnation=pod.incarnation,
            pod=pod.index,
            ports=record.ports,
            state_dir=self._dir,
        )

        def environment(temp_dir: Path) -> dict[str, str]:
            return worker_environment(
                spec,
                self._environ,
                devices=pod.devices,
                cpus=self._cpus // (max(1, replicas) * spec.tensor_parallel_size),
                temp_dir=temp_dir,
            )

        self._machine.launch(
            index,
            pod,
            [*self._worker, *flags],
            environment,
            metrics_port=record.ports.metrics,
            startup_deadline_s=spec.restart.startup_deadline_seconds,
            save=self.save,
        )

    def forget_gone(self) -> None:
        """Drop pods that were told to go and of which nothing is left."""
        for group in self._state.groups.values():
            group.pods = [pod for pod in group.pods if not self._machine.is_gone(pod)]
        self.save()

    def save(self) -> None:
        self._saved = save_state(self._dir.state, self._state, self._saved)

    def _group(self, index: int, version: str) -> GroupState:
        group = self._state.groups.get(index)
        if group is None:
            raise ActionFailed(f"group {index} is gone")
        if version and version != str(group.generation):
            raise ActionFailed(f"group {index} has changed")
        return group

    def _pod(self, index: int, uid: str) -> PodState:
        group = self._group(index, "")
        pod = next((pod for pod in group.pods if pod.uid == uid), None)
        if pod is None:
            raise ActionFailed(f"the pod of group {index} is gone")
        return pod

    def _grace_s(self, index: int) -> float:
        """The grace period of the group's pods; short where its revision cannot be read."""
        _, spec = self._wanted(self._state.groups[index])
        return grace_s(spec) if spec else END_S

    def _wanted(self, group: GroupState) -> tuple[GroupRecord | None, Spec | None]:
        """The group's record and its revision's spec; None for what cannot be read."""
        record = observe.record(group)
        kept = next((kept for kept in self._state.revisions if record and kept.name == record.revision), None)
        return record, read_spec(kept) if kept else None

    def _drop_revision(self, name: str) -> None:
        self._state.revisions = [kept for kept in self._state.revisions if kept.name != name]

    def _prune_logs(self, index: int) -> None:
        """A group that starts over and over must not fill the disk."""
        by_start: dict[int, list[Path]] = {}
        words = self._dir.run.glob(f"{index}.*.termination")
        for path in (*self._dir.log.glob(f"{index}.*.*.log"), *words):
            incarnation = path.name.split(".")[1]
            if incarnation.isdigit():
                by_start.setdefault(int(incarnation), []).append(path)
        for path in itertools.chain.from_iterable(
            by_start[start] for start in sorted(by_start)[: -(KEPT_STARTS - 1)]
        ):
            path.unlink(missing_ok=True)
