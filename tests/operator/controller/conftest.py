"""A pool's objects as the API server has them, made by the operator's own builders, and a set clock."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.api.types import EncodePool
from encodepool_operator.controller import observe
from encodepool_operator.controller.pools import Pools
from encodepool_operator.core import revision
from encodepool_operator.core.record import GroupRecord, PortBlock
from encodepool_operator.core.render import children, configmap, controllerrevision, statefulset
from encodepool_operator.core.render.pod import template
from encodepool_operator.core.snapshot import RevisionRecord
from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.kinds import BY_NAME, Kind

PORTS = PortBlock(10000, 10001, 10002, 9400)
Object = dict[str, Any]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Stage:
    """A cache, the pools in it, and an observer; objects get versions as they are put."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.changed: list[Any] = []
        self.cache = Cache(
            observe.TRIM,
            lambda kind, before, after: self.changed.append(self.pools.note(kind, before, after)),
        )
        self.observer = observe.Observer(self.pools, "default:1")
        self._versions = itertools.count(100)

    def put(self, obj: Object, uid: str = "", **metadata: Any) -> Object:
        """Put a changed copy of ``obj``; the copy."""
        obj = copy.deepcopy(obj)
        meta = obj["metadata"]
        meta |= {"resourceVersion": str(next(self._versions)), **metadata}
        meta["uid"] = uid or meta.get("uid") or f"uid-of-{meta['name']}"
        kind = self.kind(obj)
        assert self.cache.put(kind, obj)
        return obj

    def drop(self, obj: Object) -> None:
        self.cache.drop(self.kind(obj), obj)

    @staticmethod
    def kind(obj: Object) -> Kind:
        return BY_NAME[obj["kind"]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def make_pool() -> Callable[..., Object]:
    """``make_pool(replicas=2, ...)``: the resource with these keys of ``spec``."""

    def make(**spec: Any) -> Object:
        return {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodePool",
            "metadata": {"name": "demo", "namespace": "ns", "uid": "pool-uid", "generation": 1},
            "spec": {"model": {"name": "acme/vl"}, "image": "worker:1", **spec},
        }

    return make


@pytest.fixture
def pool(make_pool: Callable[..., Object]) -> EncodePool:
    return parse_pool(make_pool())


@pytest.fixture
def record() -> GroupRecord:
    return GroupRecord(7, "", PORTS, 1000.0)


@pytest.fixture
def kept(pool: EncodePool) -> RevisionRecord:
    """The revision that the pool wants, with its template."""
    chosen = revision.choose(pool.spec, "default:1", ())
    made = template("demo", chosen.name, revision.read_spec(chosen) or pool.spec)
    return RevisionRecord(chosen.name, 1, chosen.source, chosen.spec, revision.canonical(made))


@pytest.fixture
def make_group(pool: EncodePool, kept: RevisionRecord, record: GroupRecord) -> Callable[..., Object]:
    """``make_group(0)``: the StatefulSet of a group as the operator writes it, and as its controller
    reports of it."""

    def make(index: int = 0, replicas: int = 1) -> Object:
        own = GroupRecord(record.incarnation, kept.name, record.ports, record.started_at)
        built = statefulset.build(pool, index, replicas, own, kept)
        built["metadata"]["generation"] = 1
        return built | {"status": {"observedGeneration": 1, "replicas": replicas}}

    return make


@pytest.fixture
def make_others(pool: EncodePool, kept: RevisionRecord) -> Callable[[], list[Object]]:
    """Services, disruption budget, revision and list of the pool."""

    def make() -> list[Object]:
        built = [children.render(pool, kind, name) for kind, name in children.wanted(pool)]
        listed = configmap.build(pool, {"workers.json": "{}", "endpoints.json": "[]"})
        return [*built, controllerrevision.build(pool, kept), listed]

    return make


@pytest.fixture
def make_pod() -> Callable[..., Object]:
    """``make_pod(0)``: the ready pod of group 0; keyword arguments replace parts of its status."""

    def make(group: int = 0, index: int = 0, **status: Any) -> Object:
        name = f"demo-{group}"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{index}",
                "namespace": "ns",
                "labels": {
                    "encodepool.dev/pool": "demo",
                    "encodepool.dev/group": str(group),
                    "encodepool.dev/incarnation": "7",
                    "apps.kubernetes.io/pod-index": str(index),
                },
                "ownerReferences": [
                    {"kind": "StatefulSet", "name": name, "uid": f"uid-of-{name}", "controller": True}
                ],
            },
            "spec": {"nodeName": "node-1", "containers": [{"name": "encode"}]},
            "status": {
                "phase": "Running",
                "podIPs": [{"ip": "10.0.0.5"}, {"ip": "fd00::5"}],
                "conditions": [
                    {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                ],
                "containerStatuses": [
                    {
                        "name": "encode",
                        "started": True,
                        "restartCount": 0,
                        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    }
                ],
            }
            | status,
        }

    return make
