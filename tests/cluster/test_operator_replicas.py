"""The operator as a process that comes and goes: nothing to do is nothing written, and one acts at a time."""

import json
import time
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import (
    Pools,
    StandIn,
    admin_kubeconfig,
    annotations_of,
    apply_definition,
    start_operator,
    wait_at_rest,
)

from encodepool_operator.controller import observe
from encodepool_operator.kube.lease import VALID_S

STEADY_S = 60
WATCHED = {one.kind.plural for one in observe.WATCHED}


@pytest.fixture
def pools(kube, namespace):
    apply_definition(kube)
    with StandIn(kube, namespace).running() as stand_in:
        made = Pools(kube, namespace)
        made.kubelet = stand_in
        yield made


@pytest.fixture
def run_operator(cluster, spawn, program, tmp_path, namespace):
    """``run_operator(user, *flags)``: as a context, an operator for the test's namespace."""

    @contextmanager
    def run(user, *flags):
        here = ("--namespace", namespace, "--lease-namespace", namespace)
        log = tmp_path / f"{user}-{time.monotonic_ns()}.log"
        operator = start_operator(spawn, program, admin_kubeconfig(cluster, user), log, *here, *flags)
        try:
            yield operator
        finally:
            if operator.running:
                assert operator.stop() == 0, operator.log()

    return run


def writes(cluster, since, user):
    """What this user wrote beside its Lease and Events, as (verb, resource/subresource, name)."""
    return [
        (asked.verb, f"{asked.resource}/{asked.subresource}".rstrip("/"), asked.name)
        for asked in cluster.audit(since)
        if asked.user == user and asked.writes and asked.resource not in ("leases", "events")
    ]


@pytest.mark.timeout(240)
def test_in_steady_state_only_the_lease_is_written_also_by_an_upgraded_operator(
    cluster, pools, run_operator, wait_for
):
    user = "steady"
    with run_operator(user, "--default-worker-image", "localhost/old:1") as operator:
        operator.wait_line("lease taken")
        pools.create("still", replicas=3, image="")
        pools.wait_ready("still")
        wait_for(lambda: len(pools.workers("still")) == 3, what="the list")
        wait_at_rest(cluster, user)
        since = now()
        uids = sorted(pod["metadata"]["uid"] for pod in pools.pods("still"))
        time.sleep(STEADY_S)
        assert writes(cluster, since, user) == []
        asked = [one for one in cluster.audit(since) if one.user == user]
        renewals = [one for one in asked if one.resource == "leases"]
        assert {one.verb for one in renewals} == {"update"}
        assert STEADY_S / 3 <= len(renewals) <= STEADY_S
        assert not [one for one in asked if one.verb == "get"]

    since = now()
    with run_operator(user, "--default-worker-image", "localhost/new:1") as operator:
        operator.wait_line("lease taken")

        def compared():
            """A list from the server's memory is one that the cache is compared with."""
            asked = [one for one in cluster.audit(since) if one.user == user and one.verb == "list"]
            return {one.resource for one in asked if "resourceVersion=0" in one.uri} >= WATCHED

        wait_for(compared, 60, "the first comparison of lists")
        wait_at_rest(cluster, user)
        assert writes(cluster, since, user) == []
    assert sorted(pod["metadata"]["uid"] for pod in pools.pods("still")) == uids
    images = {
        container["image"]
        for group in pools.groups("still").values()
        for container in group["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"localhost/old:1"}


def test_of_two_operators_only_the_holder_of_the_lease_writes(cluster, pools, run_operator, wait_for):
    with run_operator("first") as first:
        first.wait_line("lease taken")
        with run_operator("second") as second:
            second.wait_line("cache filled")
            since = now()
            pools.create("shared", replicas=1)
            pools.wait_ready("shared")
            assert writes(cluster, since, "second") == []
            assert writes(cluster, since, "first")

            # SIGTERM: the other goes on at once, and changes nothing that it finds in order.
            wait_at_rest(cluster, "first")
            since = now()
            assert first.stop() == 0
            second.wait_line("lease taken", 10)
            taken = datetime.fromisoformat(
                second.log().partition("lease taken")[0].split("timestamp=")[-1][:26]
            )
            assert (taken.replace(tzinfo=UTC) - since).total_seconds() < VALID_S / 2
            pools.scale("shared", 2)
            pools.wait_ready("shared")
            assert writes(cluster, since, "first") == []
            names = [
                name for _, resource, name in writes(cluster, since, "second") if resource == "statefulsets"
            ]
            assert set(names) == {"shared-1"}


def test_a_killed_operator_is_replaced_when_its_lease_has_run_out(cluster, pools, run_operator):
    with run_operator("doomed") as doomed:
        doomed.wait_line("lease taken")
        with run_operator("heir") as heir:
            heir.wait_line("cache filled")
            pools.create("kept", replicas=1)
            pools.wait_ready("kept")
            doomed.kill()
            since = now()
            heir.wait_line("lease taken", 25)
            pools.scale("kept", 2)
            pools.wait_ready("kept")
            assert ("patch", "statefulsets", "kept-0") not in writes(cluster, since, "heir")


def test_what_failed_while_no_operator_ran_is_found_afterwards(pools, run_operator, wait_for):
    with run_operator("before") as operator:
        operator.wait_line("lease taken")
        pools.create("alone")
        pools.wait_ready("alone")
        wait_for(lambda: len(pools.workers("alone")) == 2, what="the list")
    before = {worker["id"]: worker for worker in pools.workers("alone")}
    pods = {pod["metadata"]["name"]: pod for pod in pools.pods("alone")}
    pools.kubelet.restart(pods["alone-0-0"])
    pools.core.delete_namespaced_pod("alone-1-0", pools.namespace)

    def replaced():
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pools.pods("alone")}
        return (
            uids.get("alone-1-0", pods["alone-1-0"]["metadata"]["uid"])
            != pods["alone-1-0"]["metadata"]["uid"]
        )

    wait_for(replaced, what="the controller's new pod")
    with run_operator("after") as operator:
        operator.wait_line("lease taken")

        def all_new():
            listed = {worker["id"]: worker for worker in pools.workers("alone")}
            return len(listed) == 2 and not listed.keys() & before.keys()

        wait_for(all_new, 60, "both groups listed anew")
        addresses = {(w["url"], w["bootstrap_port"]) for w in pools.workers("alone")}
        assert not addresses & {(w["url"], w["bootstrap_port"]) for w in before.values()}
        failures = {
            name: json.loads(annotations_of(group)["encodepool.dev/last-failure"])
            for name, group in pools.groups("alone").items()
        }
        assert failures["alone-0"]["exitCode"] == 137
        assert failures["alone-1"]["counted"] is False


def test_a_pool_that_is_deleted_while_no_operator_runs_leaves_nothing(pools, run_operator, wait_for):
    with run_operator("maker") as operator:
        operator.wait_line("lease taken")
        pools.create("orphan")
        pools.wait_ready("orphan")
    pools.delete("orphan")
    wait_for(lambda: pools.children("orphan") == [], 60, "everything of the pool being gone")
