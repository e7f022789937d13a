"""Random pools, pods and faults against the planner, with the rules that must hold at every step.

The operator sees the cluster late, dies in the middle of a plan, and its clock jumps; users change
the manifest, delete pods and whole StatefulSets; containers crash, nodes go. When the faults stop, the
pool must come to rest as its spec asks for, and at rest nothing may be written.
"""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.operator.core.fake_cluster import FakeCluster, manifest

from encodepool_operator.api import labels
from encodepool_operator.api.parse import parse_pool
from encodepool_operator.core import rollout
from encodepool_operator.core.actions import (
    Action,
    Publish,
    RecordGroup,
    StartGroup,
    StopGroup,
    WriteEndpoints,
)
from encodepool_operator.core.addresses import port_space
from encodepool_operator.core.endpoints import listed_ids, manifest_problems
from encodepool_operator.core.record import record_of
from encodepool_operator.core.snapshot import Drift, GroupSnapshot, PodPhase, Snapshot

SPECS = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 4),
        "image": st.sampled_from(["", "worker:2", "worker:3"]),
        "rollout": st.fixed_dictionaries(
            {
                "partition": st.sampled_from([0, 0, 0, 1, 2]),
                "paused": st.sampled_from([False, False, False, True]),
            },
            optional={
                "maxUnavailable": st.sampled_from([1, 2, "50%"]),
                "maxSurge": st.sampled_from([0, 1, 2]),
            },
        ),
    }
)


class Watch:
    """Sees every action just before it happens and knows what the plan was made from."""

    def __init__(self, cluster: FakeCluster, settle_s: int) -> None:
        self.cluster = cluster
        self.settle_s = settle_s
        self.basis: Snapshot = cluster.snapshot()
        self.incarnation_of_port: dict[tuple[str, int], int] = {}
        self.unlisted_at: dict[str, float] = {}
        cluster.before_action.append(self.check)

    def group(self, index: int) -> GroupSnapshot:
        return next(group for group in self.basis.groups if group.index == index)

    def check(self, action: Action) -> None:
        match action:
            case StartGroup():
                self.start(action)
            case StopGroup():
                self.stop(action)
            case Publish():
                assert could_serve(self.group(action.group)), action
            case WriteEndpoints():
                self.endpoints(action)
            case _:
                pass

    def start(self, action: StartGroup) -> None:
        """No (host, port) twice within a walk of the range, and never the same pods' ports twice."""
        spec = self.cluster.pool.spec
        space = port_space(spec.network, self.cluster.shared_host)
        record = action.record
        assert record.incarnation <= self.cluster.last_incarnation, "the number must be reserved first"
        assert action.revision.name in self.cluster.revisions, "the revision must be kept first"
        assert bool(action.revision.template) != self.cluster.shared_host
        for port in record.ports if space.shared else ():
            before = self.incarnation_of_port.get(("127.0.0.1", port))
            assert before is None or record.incarnation - before >= space.slots, (port, before, record)
            self.incarnation_of_port["127.0.0.1", port] = record.incarnation
        others = [
            port
            for index, item in self.cluster.sets.items()
            if index != action.group
            for port in record_of(item.annotations).ports
        ]
        assert not space.shared or not set(others) & set(record.ports)
        assert not self.cluster.pods_of(action.group), "old and new members would meet"

    def stop(self, action: StopGroup) -> None:
        """Off the label and off the list before a stop, and settled unless it failed."""
        for pod in self.cluster.pods_of(action.group):
            assert pod.publication is None, f"stopped while published: {action.reason}"
        ids = [item.partition("-")[0] for item in self.cluster.listed()]
        assert str(action.group) not in ids, f"stopped while listed: {action.reason}"
        record = action.record
        failed_now = record.failure is not None and record.failure.incarnation == record.incarnation
        if record.withdrawn_at is not None and not failed_now:
            assert self.cluster.now >= record.withdrawn_at + self.settle_s

    def endpoints(self, action: WriteEndpoints) -> None:
        """Valid for the gateway; what is new could serve; nothing returns within 10 s of leaving.

        By id, so by start: a range of six blocks may be walked in less than 10 s.
        """
        text = action.documents["workers.json"]
        assert manifest_problems(text) == []
        new = {worker["id"] for worker in json.loads(text)["workers"]}
        before = listed_ids(self.cluster.documents)
        for item in before - new:
            self.unlisted_at[item] = self.cluster.now
        for item in new - before:
            index = int(item.rpartition("/")[2].partition("-")[0])
            assert could_serve(self.group(index)), f"{item} could not serve when it was listed"
            away = self.cluster.now - self.unlisted_at.get(item, -1e9)
            assert away >= 10, f"{item} is listed again {away} s after its withdrawal"

    def clock_went_back(self) -> None:
        """Times measured against the old clock count from now."""
        for item, at in self.unlisted_at.items():
            self.unlisted_at[item] = min(at, self.cluster.now)


def could_serve(group: GroupSnapshot) -> bool:
    """Whether every pod is there, ready, untouched since its seal, and the group is wanted."""
    asked = group.object
    if asked is None or asked.record is None or asked.record.seal is None or asked.replicas == 0:
        return False
    seal = [(pod.uid, pod.restart_count) for pod in asked.record.seal.pods]
    return (
        asked.record.draining_since is None
        and [(pod.uid, pod.restart_count) for pod in group.pods] == seal
        and all(pod.ready and pod.incarnation == asked.record.incarnation for pod in group.pods)
    )


def broken(group: GroupSnapshot) -> bool:
    """A sealed group that can be seen to have failed."""
    asked = group.object
    if asked is None or asked.record is None or asked.record.seal is None or asked.replicas == 0:
        return False
    seal = [(pod.uid, pod.restart_count) for pod in asked.record.seal.pods]
    return [(pod.uid, pod.restart_count) for pod in group.pods] != seal or any(
        pod.terminating_since is not None or pod.phase is not PodPhase.RUNNING for pod in group.pods
    )


DELIVERED = st.sampled_from(["all", "all", "all", "pods", "answers", "nothing"])
"""What the watches have delivered when the operator looks."""


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        spec=SPECS,
        shared=st.booleans(),
        pods=st.sampled_from([1, 1, 2]),
        max_restarts=st.sampled_from([None, 1, 3]),
        settle_s=st.sampled_from([0, 10, 10, 25]),
        n_ports=st.sampled_from([24, 40]),
        at_rest=st.sampled_from([True, True, True, False]),
    )
    def create(
        self,
        spec: dict[str, Any],
        shared: bool,
        pods: int,
        max_restarts: int | None,
        settle_s: int,
        n_ports: int,
        at_rest: bool,
    ) -> None:
        restart = {
            "startupDeadlineSeconds": 120,
            "lostNodeSeconds": 30,
            "backoff": {"baseSeconds": 10, "maxSeconds": 60, "resetSeconds": 300},
        }
        document = manifest(
            **spec,
            tensorParallelSize=pods,
            ranksPerPod=1,
            network={"portRange": {"start": 10000, "size": n_ports}, "metricsPort": 9400},
            restart=restart | ({} if max_restarts is None else {"maxRestarts": max_restarts}),
            drain={"settleSeconds": settle_s},
        )
        document["spec"]["rollout"]["progressDeadlineSeconds"] = 130
        self.cluster = FakeCluster(document, shared_host=shared)
        self.pods = pods
        self.watch = Watch(self.cluster, settle_s)
        if at_rest:
            self.operator_runs_on("all", 6)

    # The world goes on

    @rule(delivered=DELIVERED, dies_after=st.sampled_from([None, None, None, 0, 1, 2, 3, 5]))
    def operator(self, delivered: str, dies_after: int | None) -> None:
        self.cluster.refresh(pods=delivered in ("all", "pods"), answers=delivered in ("all", "answers"))
        self.watch.basis = self.cluster.snapshot()
        planned = self.cluster.plan(fresh=False)
        self.check_budget(planned.actions)
        self.cluster.carry_out(planned.actions[:dies_after])
        if dies_after is None:
            still = {int(item.partition("-")[0]) for item in self.cluster.listed()}
            failed = {group.index for group in self.watch.basis.groups if broken(group)}
            assert not still & failed, "a failed group is still listed after the plan that saw it"

    def check_budget(self, actions: tuple[Action, ...]) -> None:
        """A rollout takes no more healthy groups away than maxUnavailable leaves room for."""
        spec = self.cluster.pool.spec
        serving = {
            group.index
            for group in self.watch.basis.groups
            if could_serve(group) and group.pods[0].publication is not None
        }
        taken = {
            action.group
            for action in actions
            if isinstance(action, RecordGroup | StopGroup)
            and action.record.draining_since is not None
            and "replaces" in action.reason
        } & serving
        if taken:
            down = rollout.budget(spec.rollout, spec.replicas).max_unavailable
            assert len(serving - taken) >= spec.replicas - down, (taken, serving, spec.replicas, down)

    @rule(data=st.data())
    def controller(self, data: st.DataObject) -> None:
        if self.cluster.sets:
            self.cluster.control(data.draw(st.sampled_from(sorted(self.cluster.sets))))

    @rule(data=st.data(), steps=st.integers(1, 3))
    def kubelet(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            if self.cluster.pods:
                self.cluster.kubelet(data.draw(st.sampled_from([pod.uid for _, pod in self.cluster.pods])))

    @rule()
    def everything_follows(self) -> None:
        self.cluster.settle()

    @rule(delivered=DELIVERED, steps=st.integers(1, 6))
    def operator_runs_on(self, delivered: str, steps: int) -> None:
        for _ in range(steps):
            self.operator(delivered, None)
            self.cluster.settle()

    @rule(steps=st.integers(2, 6), seconds=st.sampled_from([0.0, 4.0, 11.0, 30.0]))
    def all_is_quiet(self, steps: int, seconds: float) -> None:
        """Nothing goes wrong for a while, so pools do reach the states that faults then meet."""
        self.operator_runs_on("all", steps)
        self.cluster.now += seconds
        self.operator_runs_on("all", steps)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 50.0, 130.0, 1300.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds

    # Users

    @rule(spec=SPECS)
    def manifest_changes(self, spec: dict[str, Any]) -> None:
        spec = spec | {"rollout": spec["rollout"] | {"progressDeadlineSeconds": 130}}
        self.cluster.edit(**spec)

    @rule(replicas=st.integers(0, 4))
    def scale(self, replicas: int) -> None:
        self.cluster.edit(replicas=replicas)

    @rule(data=st.data())
    def user_deletes_a_group_object(self, data: st.DataObject) -> None:
        """Seen together with the pods: an index is free once its object and pods are gone, and a
        watch on pods that is older than one on their deleted owner could hide some. (On a cluster
        their names are then still taken, and their incarnation gives them away.)"""
        if self.cluster.sets:
            self.cluster.refresh()
            self.cluster.delete_set(data.draw(st.sampled_from(sorted(self.cluster.sets))))

    @rule(data=st.data())
    def user_takes_a_label_off(self, data: st.DataObject) -> None:
        labelled = [pod.uid for _, pod in self.cluster.pods if pod.publication is not None]
        if labelled:
            self.cluster.change(data.draw(st.sampled_from(labelled)), publication=None)

    @rule(data=st.data(), remove=st.sampled_from([(), ("/spec/template/spec/hostPID",)]))
    def user_edits_a_group_object(self, data: st.DataObject, remove: tuple[str, ...]) -> None:
        if self.cluster.sets:
            index = data.draw(st.sampled_from(sorted(self.cluster.sets)))
            self.cluster.edit_group(index, Drift("spec.template was edited", remove))

    @rule(data=st.data(), deletes=st.booleans())
    def user_edits_or_deletes_a_child(self, data: st.DataObject, deletes: bool) -> None:
        if self.cluster.children:
            key = data.draw(st.sampled_from(sorted(self.cluster.children)))
            if deletes:
                del self.cluster.children[key]
            else:
                self.cluster.children[key] = Drift("spec.clusterIP was edited")

    @rule()
    def operator_is_upgraded(self) -> None:
        self.cluster.default_image += "1"

    # Faults

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data(), fault=st.sampled_from(["kill", "crash", "evict", "unready", "replace"]))
    def pod_fault(self, data: st.DataObject, fault: str) -> None:
        group, pod = data.draw(st.sampled_from(self.cluster.pods))
        uid = pod.uid
        if fault == "kill":
            self.cluster.kill(uid)
        elif fault == "crash" and pod.phase is PodPhase.RUNNING:
            self.cluster.restart_in_place(uid)
        elif fault == "evict" and pod.phase is PodPhase.RUNNING:
            self.cluster.evict(uid)
        elif fault == "unready" and pod.ready:
            self.cluster.change(uid, ready=False)
        elif fault == "replace" and pod.node_lost_since is None:  # gone and back between two looks
            self.cluster.kill(uid)
            self.cluster.kubelet(uid)
            self.cluster.control(group)

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data())
    def node_is_lost(self, data: st.DataObject) -> None:
        self.cluster.lose_node(data.draw(st.sampled_from(sorted({pod.node for _, pod in self.cluster.pods}))))

    @rule(seconds=st.sampled_from([20.0, 500.0]))
    def clock_goes_back(self, seconds: float) -> None:
        self.cluster.clock_back(seconds)
        self.watch.clock_went_back()

    # What must always hold

    @invariant()
    def members_of_a_group_are_of_one_start_and_one_revision(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for index in {group for group, _ in self.cluster.pods}:
            pods = self.cluster.pods_of(index)
            assert len({pod.incarnation for pod in pods}) == 1, pods
            assert len({self.cluster.revision_of[pod.uid] for pod in pods}) == 1, pods

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.comes_to_rest()

    def comes_to_rest(self) -> None:
        """No more faults: the pool becomes what its spec asks for, and then nothing is written."""
        cluster = self.cluster
        cluster.annotate(labels.RESUME, "after the faults")
        rules = cluster.document["spec"]["rollout"] | {"paused": False, "partition": 0}
        cluster.edit(rollout=rules)
        for _ in range(300):
            cluster.refresh()
            self.watch.basis = cluster.snapshot()
            planned = cluster.plan(fresh=False)
            cluster.carry_out(planned.actions)
            moved = cluster.settle()
            if not planned.actions and not moved:
                done = cluster.condition("Ready") == ("True", "Complete")
                if done or planned.wake_at is None:
                    break
                assert planned.wake_at <= cluster.now + 130.001, "a wait is longer than any limit in the spec"
                cluster.now = planned.wake_at
        assert cluster.condition("Ready") == ("True", "Complete"), cluster.status
        assert cluster.plan().actions == ()
        assert not any(item.drift for item in cluster.sets.values())
        assert not any(cluster.children.values())
        assert len(cluster.children) == (0 if cluster.shared_host else 3 - (self.pods > 1))
        pool = parse_pool(cluster.document)
        assert len(cluster.listed()) == pool.spec.replicas
        wanted = (cluster.status or {})["updateRevision"]
        assert {record_of(item.annotations).revision for item in cluster.sets.values()} <= {wanted}
        for seconds in (1.0, 3600.0, 1e6):
            cluster.now += seconds
            assert cluster.plan().actions == (), "a pool at rest writes nothing, however long it rests"


PoolMachine.TestCase.settings = settings(
    max_examples=45,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.timeout(100)
class TestPoolMachine(PoolMachine.TestCase):
    """Runs the machine."""
