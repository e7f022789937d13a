"""The chart in cluster scope: what its notes promise, how its pods are kept, and what they ask for."""

import json
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.cluster.helm_network import connections, dropped, only_the_api_server
from tests.cluster.helm_rights import Story, differences, rights_of
from tests.cluster.helm_stage import (
    CHART,
    DEPLOYMENT,
    RELEASE,
    Shell,
    commands,
    first_process,
    lease_holder,
    operator_pods,
    released,
)
from tests.cluster.kit.audit import now
from tests.cluster.kit.deploy import example_pool
from tests.cluster.kit.network import run
from tests.cluster.kit.waiting import run_in_pod
from tests.cluster.node_stage import with_models_of
from tests.cluster.operator_stage import Pools, StandIn

SYSTEM = "helm-release"
API_PORT, METRICS_PORT = 443, 8080
STEADY_S = 6
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@pytest.fixture(scope="module")
def release(nodes, node_kube, tmp_path_factory):
    shell = Shell(nodes.kubeconfig, tmp_path_factory.mktemp("helm"))
    with released(shell, node_kube, SYSTEM) as installed:
        yield installed


@pytest.fixture
def pools(node_kube, node_namespace):
    return Pools(node_kube, node_namespace)


@contextmanager
def no_room(api, nodes):
    """Nodes that take no new pods: those of a pool then wait for a stand-in."""
    core = client.CoreV1Api(api)
    for name in nodes.node_names:
        core.patch_node(name, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        for name in nodes.node_names:
            core.patch_node(name, {"spec": {"unschedulable": None}})


def status_of(process):
    """/proc/PID/status as a dictionary."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def hand_over(api, wait_for):
    """Evict the operator's pod that leads; returns when the other one does."""
    leader = lease_holder(api, SYSTEM)
    evict(api, leader)
    wait_for(lambda: lease_holder(api, SYSTEM) not in ("", leader), what="another replica leading")


def evict(api, pod):
    body = {"metadata": {"name": pod, "namespace": SYSTEM}}
    client.CoreV1Api(api).create_namespaced_pod_eviction(pod, SYSTEM, body)


def two_ready(api):
    pods = operator_pods(api, SYSTEM)
    ready = [pod for pod in pods if all(one.ready for one in pod.status.container_statuses or [])]
    return pods if len(ready) == len(pods) == 2 else None


def test_the_notes_lead_to_a_published_pool_as_they_are_printed(release, nodes, node_kube):
    operator, make, watch, use = commands(release.notes)
    assert "successfully rolled out" in release.shell.script(operator)
    with no_room(node_kube, nodes), StandIn(node_kube, "default").running():
        try:
            assert "encodepool.encodepool.dev/qwen3-vl created" in release.shell.script(make)
            said = release.shell.script(watch)
            assert "condition met" in said
            assert "GroupPublished" in said
            list_and_flags = release.shell.script(use)
            assert "workers.json" in list_and_flags
            assert "--service-discovery" in list_and_flags
        finally:
            Pools(node_kube, "default").delete("qwen3-vl")


def test_wrong_values_change_nothing(release):
    refused = release.shell.try_helm(
        "upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--reset-then-reuse-values", "--set", "replicas=0"
    )
    assert refused.returncode != 0
    assert "at '/replicas': minimum: got 0, want 1" in refused.stderr
    assert len(json.loads(release.shell.helm("history", RELEASE, "-n", SYSTEM, "-o", "json"))) == 1


def test_the_operators_pods_are_spread_and_locked_down(release, nodes, node_kube, wait_for):
    pods = wait_for(lambda: two_ready(node_kube), 60, "two pods being Ready")
    assert {pod.spec.node_name for pod in pods} == set(nodes.node_names)
    for pod in pods:
        status = status_of(first_process(nodes, pod))
        assert set(status["Uid"].split()) == {"65532"}
        assert set(status["Gid"].split()) == {"65532"}
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2", "no filter"
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
        with pytest.raises(AssertionError, match="Read-only file system"):
            run_in_pod(node_kube, SYSTEM, pod.metadata.name, ["touch", "/here"])
        run_in_pod(node_kube, SYSTEM, pod.metadata.name, ["touch", "/tmp/here"])


def test_the_charts_own_test_passes(release):
    assert re.search(r"Phase:\s+Succeeded", release.shell.helm("test", RELEASE, "--namespace", SYSTEM))


def test_a_drain_takes_one_replica_and_the_other_goes_on(release, node_kube, wait_for):
    wait_for(lambda: two_ready(node_kube), 60, "two pods being Ready")
    leader = lease_holder(node_kube, SYSTEM)
    other = next(pod.metadata.name for pod in operator_pods(node_kube, SYSTEM) if pod.metadata.name != leader)
    evict(node_kube, leader)
    with pytest.raises(ApiException, match="disruption budget"):
        evict(node_kube, other)
    wait_for(lambda: lease_holder(node_kube, SYSTEM) == other, what="the other replica leading")


@pytest.mark.timeout(240)
def test_the_operator_needs_all_of_its_rights_and_no_others(release, nodes, node_kube, pools, wait_for):
    def asked():
        return [one for one in nodes.audit(release.since) if one.user == release.account]

    manifest = release.shell.helm("get", "manifest", RELEASE, "--namespace", SYSTEM)
    rights = rights_of(manifest, DEPLOYMENT, SYSTEM)
    with StandIn(node_kube, pools.namespace).running():
        wait_for(lambda: two_ready(node_kube), 60, "two pods being Ready")
        Story(pools, asked).tell(lambda: hand_over(node_kube, wait_for))
    found = asked()
    assert [one for one in found if one.code == 403] == []
    assert differences(rights, found) == ([], [])


@pytest.mark.timeout(180)
def test_the_operator_brings_up_a_pool_with_nothing_but_the_api_server_in_reach(
    release, nodes, node_kube, pools, tiny_model, wait_for
):
    # Cut them off, and start them anew within the same networks: nothing can have been asked before.
    before = wait_for(lambda: two_ready(node_kube), 60, "two pods being Ready")
    counts = {pod.metadata.uid: restarts(pod) for pod in before}
    for pod in before:
        process = first_process(nodes, pod)
        only_the_api_server(process.pid, nodes.addresses.api_service, API_PORT, METRICS_PORT)
        process.kill()

    def again():
        pods = two_ready(node_kube) or []
        return pods if pods and all(restarts(pod) > counts.get(pod.metadata.uid, 0) for pod in pods) else None

    after = wait_for(again, 60, "both containers running again")
    assert [pod.metadata.uid for pod in after] == [pod.metadata.uid for pod in before]
    processes = [first_process(nodes, pod) for pod in after]
    pids = [process.pid for process in processes]

    with connections(pids, METRICS_PORT) as seen:
        spec = with_models_of(example_pool(), tiny_model.parent, tiny_model.name)["spec"]
        pools.create("real", **spec | {"replicas": 1})
        pools.wait_ready("real", 90)
    assert len(pools.workers("real")) == 1
    assert seen == {(nodes.addresses.api_service, API_PORT)}
    assert [dropped(pid) for pid in pids] == [0, 0]

    # In steady state, too, and the Lease is all that is written.
    since = now()
    with connections(pids, METRICS_PORT) as seen:
        time.sleep(STEADY_S)
    assert seen == {(nodes.addresses.api_service, API_PORT)}
    mine = [one for one in nodes.audit(since) if one.user == release.account]
    assert {(one.verb, one.resource) for one in mine if one.writes} == {("update", "leases")}
    assert [dropped(pid) for pid in pids] == [0, 0]

    # The worker can be reached, but not from there.
    (pod,) = pools.pods("real")
    worker = (pod["status"]["podIP"], metrics_port(pod))
    run_python(CONNECT, *worker)
    with pytest.raises(RuntimeError, match="timed out"):
        run_python(CONNECT, *worker, within=pids[0])
    assert dropped(pids[0]) > 0
    assert all(psutil.pid_exists(pid) for pid in pids)


def restarts(pod):
    return sum(one.restart_count for one in pod.status.container_statuses)


def metrics_port(pod):
    ports = pod["spec"]["containers"][0]["ports"]
    return next(port["containerPort"] for port in ports if port["name"] == "metrics")


def run_python(code, *arguments, within=None):
    enter = () if within is None else ("-t", within, "-n")
    return run("nsenter", *enter, "--", sys.executable, "-c", code, *arguments)
