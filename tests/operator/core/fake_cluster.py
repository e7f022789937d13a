"""A small cluster for the planner: a StatefulSet controller, kubelets, and a shell that carries out
actions with preconditions. Every step is asked for by the test; nothing happens by itself."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from encodepool_operator.api import labels
from encodepool_operator.api.parse import parse_pool
from encodepool_operator.api.types import EncodePool
from encodepool_operator.core.actions import (
    Action,
    ApplyChild,
    DeleteGroup,
    DeletePod,
    DropChild,
    DropRevision,
    Publish,
    RecordGroup,
    RepairGroup,
    ReserveIncarnations,
    SaveRevision,
    StartGroup,
    StopGroup,
    Withdraw,
    WriteEndpoints,
    WriteStatus,
)
from encodepool_operator.core.plan import Plan, plan
from encodepool_operator.core.record import annotations_of, record_of
from encodepool_operator.core.snapshot import (
    ChildObject,
    ContainerFailure,
    Drift,
    GroupObject,
    GroupSnapshot,
    PodFacts,
    PodPhase,
    RevisionRecord,
    Snapshot,
)

START = 1_800_000_000.0


def manifest(**spec: Any) -> dict[str, Any]:
    """A manifest with what every pool needs; keyword arguments become keys of ``spec``."""
    return {
        "apiVersion": "encodepool.dev/v1alpha1",
        "kind": "EncodePool",
        "metadata": {"name": "demo", "namespace": "epd", "uid": "uid-demo", "generation": 1},
        "spec": {"model": {"name": "acme/vl-2b"}, **spec},
    }


class Conflict(Exception):
    """A precondition does not hold (409), or the object is not there (404)."""


@dataclass
class FakeSet:
    """A StatefulSet. ``seen`` is what the controller has acted on: generation, replicas, template.

    ``drift``: somebody has edited it.
    """

    replicas: int
    generation: int
    annotations: dict[str, str]
    version: int = 1
    deleting: bool = False
    observed_generation: int = 0
    current_pods: int = 0
    seen_replicas: int = 0
    seen_template: tuple[int, str] = (0, "")
    drift: Drift | None = None

    @property
    def template(self) -> tuple[int, str]:
        return int(self.annotations[labels.INCARNATION]), self.annotations[labels.REVISION]


@dataclass
class Cache:
    """What a lagging watch has delivered: pods and the controller's answers, by group."""

    pods: dict[int, tuple[PodFacts, ...]]
    answers: dict[int, tuple[int, int]]


class FakeCluster:
    def __init__(self, document: dict[str, Any], *, shared_host: bool = False) -> None:
        self.document = document
        self._pool: EncodePool | None = None
        self.shared_host = shared_host
        self.now = START
        self.default_image = "worker:1"
        self.sets: dict[int, FakeSet] = {}
        self.pods: list[tuple[int, PodFacts]] = []
        self.revision_of: dict[str, str] = {}
        self.revisions: dict[str, RevisionRecord] = {}
        self.documents: dict[str, str] | None = None
        self.status: dict[str, Any] | None = None
        self.last_incarnation = 0
        self.taken_ports: frozenset[int] = frozenset()
        self.foreign: frozenset[str] = frozenset()
        self.children: dict[tuple[str, str], Drift | None] = {}
        self.executed: list[Action] = []
        self.before_action: list[Callable[[Action], None]] = []
        self.cache = Cache({}, {})
        self._uids = 0

    # The manifest

    @property
    def pool(self) -> EncodePool:
        if self._pool is None:
            self._pool = parse_pool(self.document)
        return self._pool

    def edit(self, **spec: Any) -> None:
        """Change keys of the spec, as ``kubectl apply`` does."""
        self.document["spec"] = self.document["spec"] | spec
        self.document["metadata"]["generation"] += 1
        self._pool = None

    def annotate(self, key: str, value: str) -> None:
        self.document["metadata"].setdefault("annotations", {})[key] = value
        self._pool = None

    # What the planner sees

    def refresh(self, *, pods: bool = True, answers: bool = True) -> None:
        """The watches deliver what has happened so far; each has its own delay."""
        if pods:
            self.cache.pods = {group: self.pods_of(group) for group in {group for group, _ in self.pods}}
        if answers:
            self.cache.answers = {
                index: (item.observed_generation, item.current_pods) for index, item in self.sets.items()
            }

    def snapshot(self) -> Snapshot:
        """From the cache; our own writes are in it at once, as their responses are."""
        groups = []
        for index in sorted(set(self.sets) | set(self.cache.pods)):
            item = self.sets.get(index)
            obj = None
            if item is not None:
                observed, current = self.cache.answers.get(index, (0, 0))
                obj = GroupObject(
                    item.replicas,
                    item.generation,
                    observed,
                    current,
                    record_of(item.annotations),
                    item.deleting,
                    str(item.version),
                    item.drift,
                )
            groups.append(GroupSnapshot(index, obj, self.cache.pods.get(index, ())))
        return Snapshot(
            self.pool,
            tuple(groups),
            tuple(self.revisions.values()),
            self.last_incarnation,
            self.documents,
            self.status,
            self.taken_ports,
            self.shared_host,
            self.default_image,
            self.foreign,
            None if self.shared_host else self._children(),
        )

    def _children(self) -> tuple[ChildObject, ...]:
        return tuple(ChildObject(*key, drift, "1") for key, drift in self.children.items())

    # The shell

    def plan(self, *, fresh: bool = True) -> Plan:
        if fresh:
            self.refresh()
        return plan(self.snapshot(), self.now)

    def reconcile(self, *, fresh: bool = True, stop_after: int | None = None) -> Plan:
        """Plan and carry out; ``stop_after``: the operator dies after that many actions."""
        planned = self.plan(fresh=fresh)
        self.carry_out(planned.actions[:stop_after])
        return planned

    def carry_out(self, actions: Iterable[Action]) -> None:
        failed: set[int] = set()
        for action in actions:
            if action.group in failed:
                continue
            for check in self.before_action:
                check(action)
            try:
                self._do(action)
            except Conflict:
                if action.group is None:
                    return
                failed.add(action.group)
            else:
                self.executed.append(action)

    def _do(self, action: Action) -> None:
        match action:
            case SaveRevision():
                self.revisions[action.revision.name] = action.revision
            case DropRevision():
                del self.revisions[action.name]
            case ReserveIncarnations():
                self.last_incarnation = action.last
            case ApplyChild():
                assert (action.rendered["kind"], action.rendered["metadata"]["name"]) == (
                    action.kind,
                    action.name,
                )
                self.children[action.kind, action.name] = None
            case DropChild():
                del self.children[action.kind, action.name]
            case RecordGroup() | RepairGroup():
                item = self._set(action.group, action.version)
                item.annotations = annotations_of(action.record)
                if item.replicas != action.replicas:
                    item.replicas = action.replicas
                    item.generation += 1
                # Whole objects are written; what others added stays until it is taken out.
                if isinstance(action, RepairGroup) or item.drift is None or not item.drift.remove:
                    item.drift = None
            case StopGroup() | StartGroup():
                if isinstance(action, StartGroup) and not action.version:
                    if action.group in self.sets:
                        raise Conflict
                    self.sets[action.group] = FakeSet(0, 0, {})
                item = self._set(action.group, action.version)
                item.annotations = annotations_of(action.record)
                item.replicas = action.replicas if isinstance(action, StartGroup) else 0
                item.generation += 1
                item.drift = None
            case DeleteGroup():
                self._set(action.group, action.version)
                self.delete_set(action.group)
            case DeletePod():
                self._pod(action.uid)
                if action.grace_s == 0:
                    self.pods = [(group, pod) for group, pod in self.pods if pod.uid != action.uid]
                else:
                    self.change(action.uid, terminating_since=self.now, ready=False)
            case Withdraw():
                self.change(action.uid, publication=None)
                self._response(action.group, action.uid)
            case Publish():
                if self._pod(action.uid).version != action.version:
                    raise Conflict
                self.change(action.uid, publication=action.publication)
                self._response(action.group, action.uid)
            case WriteEndpoints():
                self.documents = dict(action.documents)
            case WriteStatus():
                self.status = json.loads(json.dumps(action.status))

    def _set(self, group: int, version: str) -> FakeSet:
        item = self.sets.get(group)
        if item is None or (version and version != str(item.version)):
            raise Conflict
        item.version += 1
        return item

    def _response(self, group: int, uid: str) -> None:
        """The pod as a write returned it goes into the cache at once."""
        pods = self.cache.pods.get(group, ())
        self.cache.pods[group] = tuple(self._pod(uid) if pod.uid == uid else pod for pod in pods)

    def _pod(self, uid: str) -> PodFacts:
        for _, pod in self.pods:
            if pod.uid == uid:
                return pod
        raise Conflict

    # The controller and the kubelets

    def pods_of(self, group: int) -> tuple[PodFacts, ...]:
        found = [pod for index, pod in self.pods if index == group]
        return tuple(sorted(found, key=lambda pod: (pod.index, pod.uid)))

    def change(self, uid: str, **facts: Any) -> None:
        pod = self._pod(uid)
        if "ready" in facts and facts["ready"] != pod.ready:
            facts["ready_changed_at"] = self.now
        new = replace(pod, version=str(int(pod.version) + 1), **facts)
        self.pods = [(group, new if old.uid == uid else old) for group, old in self.pods]

    def delete_set(self, index: int) -> None:
        """The object goes; the garbage collector ends its pods."""
        del self.sets[index]
        for pod in self.pods_of(index):
            if pod.terminating_since is None:
                self.change(pod.uid, terminating_since=self.now, ready=False)

    def control(self, index: int) -> bool:
        """One pass of the StatefulSet controller over one set; True if it changed anything."""
        item = self.sets.get(index)
        if item is None:
            return False
        before = (item.observed_generation, item.current_pods, len(self.pods), self.pods)
        item.observed_generation = item.generation
        item.seen_replicas, item.seen_template = item.replicas, item.template
        pods = self.pods_of(index)
        for pod in pods:
            ended = pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)
            if pod.terminating_since is None and (pod.index >= item.seen_replicas or ended):
                self.change(pod.uid, terminating_since=self.now, ready=False)
        present = {pod.index for pod in pods}
        for ordinal in range(item.seen_replicas):
            if ordinal not in present:
                self._create_pod(index, ordinal, item.seen_template)
        item.current_pods = len(self.pods_of(index))
        return before != (item.observed_generation, item.current_pods, len(self.pods), self.pods)

    def _create_pod(self, index: int, ordinal: int, template: tuple[int, str]) -> None:
        self._uids += 1
        incarnation, revision = template
        ip = "127.0.0.1" if self.shared_host else f"10.0.{self._uids // 250}.{self._uids % 250 + 1}"
        pod = PodFacts(
            f"demo-{index}-{ordinal}",
            f"uid-{self._uids}",
            ordinal,
            incarnation,
            ips=(ip,),
            node=f"node-{self._uids % 3}",
            version="1",
        )
        self.revision_of[pod.uid] = revision
        self.pods.append((index, pod))

    def kubelet(self, uid: str) -> bool:
        """One step of a pod's life: runs, started, ready; or, if it is terminating, gone."""
        pod = self._pod(uid)
        if pod.node_lost_since is not None:
            return False
        if pod.terminating_since is not None:
            self.pods = [(group, other) for group, other in self.pods if other.uid != uid]
        elif pod.phase is PodPhase.PENDING:
            self.change(uid, phase=PodPhase.RUNNING, launched=True)
        elif pod.phase is not PodPhase.RUNNING:
            return False
        elif not pod.started:
            self.change(uid, started=True)
        elif not pod.ready:
            self.change(uid, ready=True)
        else:
            return False
        return True

    # Edits by hand

    def edit_group(self, index: int, drift: Drift) -> None:
        self.sets[index].drift = drift
        self.sets[index].version += 1

    # Faults

    def clock_back(self, seconds: float) -> None:
        """The operator's clock ran ahead and is corrected; times on pods were never wrong."""
        self.now -= seconds
        for _, pod in list(self.pods):
            facts = {
                name: min(at, self.now)
                for name in ("ready_changed_at", "terminating_since", "node_lost_since")
                if (at := getattr(pod, name)) is not None
            }
            self.pods = [(group, replace(p, **facts) if p is pod else p) for group, p in self.pods]

    def restart_in_place(self, uid: str, exit_code: int = 1, message: str = "boom") -> None:
        pod = self._pod(uid)
        self.change(
            uid,
            ready=False,
            started=False,
            restart_count=pod.restart_count + 1,
            failure=ContainerFailure(exit_code, "Error", message, at=self.now),
        )

    def evict(self, uid: str) -> None:
        self.change(uid, ready=False, phase=PodPhase.FAILED, disrupted=True)

    def kill(self, uid: str) -> None:
        """kubectl delete pod."""
        self.change(uid, ready=False, terminating_since=self.now)

    def lose_node(self, node: str) -> None:
        for _, pod in list(self.pods):
            if pod.node == node:
                self.change(pod.uid, ready=False, node_lost_since=self.now, terminating_since=self.now)

    # Stories

    def settle(self, *, except_pods: Collection[str] = ()) -> bool:
        """Controller and kubelets go on until nothing of theirs changes."""
        moved = False
        for _ in range(50):
            again = [self.control(index) for index in list(self.sets)]
            for _, pod in list(self.pods):
                if pod.uid not in except_pods:
                    again.append(self.kubelet(pod.uid))
            if not any(again):
                return moved
            moved = True
        raise AssertionError("the cluster does not come to rest")

    def run(self, max_steps: int = 400) -> int:
        """Reconcile, let the cluster follow, wait where the plan says so, until nothing is left.

        Returns the number of steps. Waits are jumps of the clock to ``wake_at``; far ones end it.
        """
        for step in range(max_steps):
            planned = self.reconcile()
            moved = self.settle()
            if planned.actions or moved:
                continue
            if planned.wake_at is None or planned.wake_at > self.now + 3000:
                return step
            self.now = planned.wake_at
        raise AssertionError(f"no rest after {max_steps} steps: {[a.reason for a in self.plan().actions]}")

    def listed(self) -> list[str]:
        workers = json.loads((self.documents or {"workers.json": '{"workers":[]}'})["workers.json"])[
            "workers"
        ]
        return [worker["id"].rpartition("/")[2] for worker in workers]

    def entries(self) -> list[dict[str, Any]]:
        assert self.documents is not None
        return list(json.loads(self.documents["endpoints.json"])["endpoints"])

    def condition(self, kind: str) -> tuple[str, str] | None:
        """(status, reason) of a condition, None while it is absent."""
        for item in (self.status or {}).get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"]
        return None


@dataclass
class Story:
    """Reasons of the actions carried out since the last look."""

    cluster: FakeCluster
    seen: int = field(default=0)

    def lines(self, *, quiet: Collection[type] = (WriteStatus, WriteEndpoints, SaveRevision)) -> list[str]:
        new = self.cluster.executed[self.seen :]
        self.seen = len(self.cluster.executed)
        return [f"{type(a).__name__} {a.group}" for a in new if type(a) not in quiet]
