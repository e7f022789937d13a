"""Pools of many kinds as a cluster would hold them: what is published, and the pods it is read from.

The planner and the renderers are the operator's own; the cluster under them is `FakeCluster`, whose pods
here get loopback addresses, so that a real gateway can be given the lists.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.operator.core.fake_cluster import FakeCluster, manifest

from encodepool_operator.api import labels
from encodepool_operator.core.record import record_of
from encodepool_operator.core.render import children, leader, statefulset
from encodepool_operator.core.snapshot import PodFacts, PodPhase

NAMESPACE, POOL = "epd", "demo"
MODEL = "acme/vl-2b"

Object = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """What can be read of a pool once the operator has written all it wants to write.

    ``documents`` is the ConfigMap's data, ``pods`` and ``service`` (``<pool>-encode``) are objects.
    """

    scenario: str
    name: str
    documents: Mapping[str, str]
    pods: tuple[Object, ...]
    service: Object

    def __str__(self) -> str:
        return f"{self.scenario}, {self.name}"

    def ready(self) -> frozenset[tuple[str, int]]:
        """(url, bootstrap port) of every group that endpoints.json calls ready."""
        entries = json.loads(self.documents["endpoints.json"])["endpoints"]
        return frozenset((entry["url"], entry["bootstrapPort"]) for entry in entries if entry["ready"])


class Addressed(FakeCluster):
    """Pods get their addresses from ``ips``: (number of the pod, its node) -> ``status.podIPs``."""

    def __init__(self, document: Object, ips: Callable[[int, str], tuple[str, ...]]) -> None:
        super().__init__(document)
        self._ips = ips
        self._given: set[str] = set()

    def control(self, index: int) -> bool:
        moved = super().control(index)
        for pod in self.pods_of(index):
            if pod.uid not in self._given:
                self._given.add(pod.uid)
                self.change(pod.uid, ips=self._ips(len(self._given), pod.node))
        return moved

    def moment(self, scenario: str, name: str) -> Moment:
        pods = [self._object(group, pod) for group, pod in self.pods]
        service = children.render(self.pool, "Service", f"{POOL}-encode")
        return Moment(scenario, name, dict(self.documents or {}), tuple(pods), service)

    def _object(self, group: int, pod: PodFacts) -> Object:
        """The pod as the API server shows it."""
        record = record_of(self.sets[group].annotations)
        assert record is not None
        built = statefulset.build(
            self.pool, group, self.pool.spec.pods_per_group, record, self.revisions[self.revision_of[pod.uid]]
        )
        meta = built["spec"]["template"]["metadata"]
        published = leader.patch(pod.publication) if pod.publication is not None else {}
        ending = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if pod.terminating_since is not None else {}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.name,
                "namespace": NAMESPACE,
                "uid": pod.uid,
                "labels": meta["labels"] | {labels.POD_INDEX: str(pod.index)} | published.get("labels", {}),
                "annotations": meta["annotations"] | published.get("annotations", {}),
                **ending,
            },
            "spec": built["spec"]["template"]["spec"],
            "status": {
                "phase": pod.phase.value if isinstance(pod.phase, PodPhase) else str(pod.phase),
                "podIP": pod.ips[0],
                "podIPs": [{"ip": ip} for ip in pod.ips],
                "conditions": [{"type": "Ready", "status": "True" if pod.ready else "False"}],
            },
        }


@dataclass(frozen=True)
class Scenario:
    """``spec`` of a pool of three groups; ``ips`` as `Addressed` wants them."""

    name: str
    spec: Object
    ips: Callable[[int, str], tuple[str, ...]]


def _v4(net: int) -> Callable[[int, str], tuple[str, ...]]:
    return lambda number, _: (f"127.{net}.0.{number}",)


SCENARIOS = [
    Scenario("TP 1", {}, _v4(11)),
    Scenario("TP 2", {"tensorParallelSize": 2}, _v4(12)),
    Scenario("TP 4 on two pods", {"tensorParallelSize": 4, "ranksPerPod": 2}, _v4(13)),
    Scenario(
        "hostNetwork",
        {"network": {"hostNetwork": True}},
        lambda _, node: (f"127.14.0.{int(node.rpartition('-')[2]) + 1}",),
    ),
    Scenario("dual stack", {}, lambda number, _: (f"127.15.0.{number}", "::1")),
    Scenario("dual stack, IPv6 first", {}, lambda number, _: ("::1", f"127.16.0.{number}")),
    Scenario("IPv6", {"network": {"ipFamily": "IPv6"}}, lambda *_: ("::1",)),
]


def _pool(number: int, scenario: Scenario) -> Object:
    """Each scenario has ports of its own, since some share an address; none of Mooncake's 15000 to 17000."""
    spec = {"replicas": 3, **scenario.spec}
    network = {"portRange": {"start": 20000 + 1000 * number, "size": 1000}}
    return manifest(**spec | {"network": scenario.spec.get("network", {}) | network})


def _steps(cluster: Addressed) -> Iterator[None]:
    """Each time the operator has carried out what there is to do, until nothing is left."""
    for _ in range(400):
        planned = cluster.reconcile()
        while planned.actions:
            planned = cluster.reconcile()
        yield
        if cluster.settle():
            continue
        if planned.wake_at is None or planned.wake_at > cluster.now + 3000:
            return
        cluster.now = planned.wake_at
    raise AssertionError("the pool does not come to rest")


@cache
def story(name: str) -> tuple[Moment, ...]:
    """One scenario: started, at every step of a rollout, and scaled to zero."""
    number, scenario = next((n, one) for n, one in enumerate(SCENARIOS) if one.name == name)
    cluster = Addressed(_pool(number, scenario), scenario.ips)
    cluster.run()
    out = [cluster.moment(name, "started")]
    cluster.edit(batching={"maxItemsPerBatch": 8})
    for step, _ in enumerate(_steps(cluster)):
        out.append(cluster.moment(name, f"rollout, step {step}"))
    cluster.edit(replicas=0)
    cluster.run()
    out.append(cluster.moment(name, "scaled to zero"))
    return tuple(out)


def highlights(name: str) -> tuple[Moment, Moment, Moment]:
    """Of a scenario: started, a moment of the rollout that lists old and new groups, scaled to zero."""
    started, *between, zero = story(name)
    mixed = next(m for m in between if started.ready() & m.ready() and m.ready() - started.ready())
    return started, mixed, zero
