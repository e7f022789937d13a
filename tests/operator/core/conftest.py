"""Builders for the planner's tests: each test names only the facts that matter to it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.core.fake_cluster import START, FakeCluster, manifest

from encodepool_operator.api.parse import parse_spec
from encodepool_operator.api.types import Spec
from encodepool_operator.core.group import GroupRules, GroupView, derive
from encodepool_operator.core.record import GroupRecord, PortBlock, Seal, SealedPod
from encodepool_operator.core.snapshot import GroupObject, GroupSnapshot, PodFacts, PodPhase

PORTS = PortBlock(10000, 10001, 10002, 9400)


@pytest.fixture
def now() -> float:
    return START


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    """``make_spec(replicas=3, ...)``: a parsed spec."""
    return lambda **spec: parse_spec(manifest(**spec)["spec"])


@pytest.fixture
def cluster() -> Callable[..., FakeCluster]:
    """``cluster(replicas=3, ...)``: a cluster with a pool that was just applied."""

    def make(*, shared_host: bool = False, **spec: Any) -> FakeCluster:
        return FakeCluster(manifest(**spec), shared_host=shared_host)

    return make


@pytest.fixture
def make_pod() -> Callable[..., PodFacts]:
    """A pod that is ready since ``START - 50``; keyword arguments change facts."""

    def make(index: int = 0, **facts: Any) -> PodFacts:
        pod = PodFacts(
            f"demo-0-{index}",
            f"uid-{index}",
            index,
            incarnation=7,
            phase=PodPhase.RUNNING,
            ips=("10.0.0.5",),
            node="node-1",
            launched=True,
            started=True,
            ready=True,
            ready_changed_at=START - 50,
            version="1",
        )
        return replace(pod, **facts)

    return make


@pytest.fixture
def make_record() -> Callable[..., GroupRecord]:
    """Start 7 of group 0, begun 60 s ago, not sealed."""
    return lambda **facts: replace(GroupRecord(7, "rev", PORTS, START - 60), **facts)


@pytest.fixture
def make_group(make_record: Callable[..., GroupRecord]) -> Callable[..., GroupSnapshot]:
    """A group of the given pods; ``sealed`` with their uids by default, ``record`` adds facts."""

    def make(
        *pods: PodFacts, sealed: bool = True, replicas: int | None = None, index: int = 0, **more: Any
    ) -> GroupSnapshot:
        record = make_record(**more.pop("record", {}))
        if sealed and record.seal is None:
            uids = more.pop("uids", [pod.uid for pod in pods])
            record = replace(record, seal=Seal(tuple(SealedPod(uid, 0) for uid in uids), START - 50))
        asked = len(pods) if replicas is None else replicas
        obj = GroupObject(asked, 3, 3, len(pods), record, version="9")
        return GroupSnapshot(index, replace(obj, **more), pods)

    return make


@pytest.fixture
def rules(make_spec: Callable[..., Spec]) -> GroupRules:
    return GroupRules(make_spec().restart, "uid-demo")


@pytest.fixture
def view_of(rules: GroupRules) -> Callable[..., GroupView]:
    """``view_of(group, at=..., resume=..., restart=...)``: derive with changed rules."""

    def view(group: GroupSnapshot, at: float = START, **change: Any) -> GroupView:
        return derive(group, replace(rules, **change), at)

    return view
