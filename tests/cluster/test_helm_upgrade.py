"""A release that grows older: upgraded with its CRD, uninstalled, and installed again."""

import json

import pytest
import yaml
from kubernetes import client
from tests.cluster.helm_rights import AWAY
from tests.cluster.helm_stage import (
    CRD,
    Shell,
    operator_pods,
    previous_chart,
    released,
)
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import GROUP, SPEC, VERSION, Pools, StandIn

SYSTEM = "helm-upgrade"
GONE = "spec.revisionHistoryLimit"
"""A field that the previous version of the chart does not know."""


@pytest.fixture(scope="module")
def release(nodes, node_kube, tmp_path_factory):
    folder = tmp_path_factory.mktemp("helm")
    shell = Shell(nodes.kubeconfig, folder)
    with released(shell, node_kube, SYSTEM, chart=previous_chart(folder, GONE)) as installed:
        yield installed


@pytest.fixture
def pools(node_kube, node_namespace):
    with StandIn(node_kube, node_namespace).running():
        yield Pools(node_kube, node_namespace)


def manifest(pools, **spec):
    return yaml.safe_dump(
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "EncodePool",
            "metadata": {"name": "old", "namespace": pools.namespace},
            "spec": {**SPEC, "podTemplate": AWAY, **spec},
        }
    )


def versions(pools):
    """Every pod, StatefulSet and list of the pool, with its version: what changes when it is written."""
    found = [*pools.pods("old"), *pools.groups("old").values()]
    return sorted((one["metadata"]["name"], one["metadata"]["resourceVersion"]) for one in found)


def definition(api):
    return client.ApiextensionsV1Api(api).read_custom_resource_definition(CRD)


def generation(api):
    return int(definition(api).metadata.annotations[f"{GROUP}/schema-generation"])


def written(nodes, release, since):
    """What the operator wrote beside its Lease and Events."""
    return {
        (one.verb, f"{one.resource}/{one.subresource}")
        for one in nodes.audit(since)
        if one.user == release.account and one.writes and one.resource not in ("leases", "events")
    }


def test_an_upgrade_brings_the_new_crd_and_moves_no_pod(release, nodes, node_kube, pools, wait_for):
    shell = release.shell
    refused = shell.try_kubectl("apply", "-f", "-", text=manifest(pools, revisionHistoryLimit=1))
    assert f'unknown field "{GONE}"' in refused.stderr

    # The operator is newer than the CRD here, and says so where one looks.
    shell.kubectl("apply", "-f", "-", text=manifest(pools))
    wait_for(lambda: len(pools.workers("old")) == 2 if pools.groups("old") else False, 60, "the list")
    ours = generation_of_sources()
    stalled = wait_for(lambda: pools.condition("old", "Stalled"), what="the condition")
    assert (stalled["status"], stalled["reason"]) == ("True", "SchemaOutdated")
    assert stalled["message"] == (
        f"the CustomResourceDefinition is of generation 0, this operator's of {ours}: apply crds/"
    )
    logs = [
        shell.kubectl("logs", "--namespace", SYSTEM, pod.metadata.name)
        for pod in operator_pods(node_kube, SYSTEM)
    ]
    assert all('event="the served schema is outdated"' in log for log in logs)
    before = versions(pools)
    old_pods = {pod.metadata.name for pod in operator_pods(node_kube, SYSTEM)}

    since = now()
    shell.upgrade(SYSTEM)
    assert generation(node_kube) == ours
    assert not old_pods & {pod.metadata.name for pod in operator_pods(node_kube, SYSTEM)}
    listed = json.loads(shell.helm("list", "--namespace", SYSTEM, "--output", "json"))
    assert [one["chart"].rpartition("-")[2] != "0.0.9" for one in listed] == [True]
    wait_for(lambda: pools.condition("old", "Stalled")["status"] == "", what="the condition being taken back")
    shell.kubectl("apply", "-f", "-", text=manifest(pools, revisionHistoryLimit=1))
    pools.wait_ready("old")
    assert pools.get("old")["spec"]["revisionHistoryLimit"] == 1
    assert versions(pools) == before
    assert written(nodes, release, since) == {("patch", "encodepools/status")}


def test_pools_outlive_the_release_and_the_next_one_adopts_them(release, nodes, node_kube, pools, wait_for):
    shell = release.shell
    shell.kubectl("apply", "-f", "-", text=manifest(pools))
    pools.wait_ready("old")
    wait_for(lambda: len(pools.workers("old")) == 2, what="the list")
    before = versions(pools)

    assert f"[CustomResourceDefinition] {CRD}" in shell.uninstall(SYSTEM)
    everything = "all,role,rolebinding,poddisruptionbudget"
    wait_for(
        lambda: shell.kubectl("get", everything, "--namespace", SYSTEM) == "", 60, "the release being gone"
    )
    left = shell.kubectl("get", "clusterrole,clusterrolebinding", "--output", "name")
    assert not [line for line in left.splitlines() if "encodepool" in line]
    assert definition(node_kube).metadata.deletion_timestamp is None
    pools.scale("old", 3)
    assert versions(pools) == before

    since = now()
    shell.install(SYSTEM)
    wait_for(lambda: len(pools.workers("old")) == 3, 60, "the third group in the list")
    assert set(before) <= set(versions(pools))
    assert ("patch", "statefulsets/") in written(nodes, release, since)


def generation_of_sources():
    from tests.cluster.kit.pods import CHECKOUT

    text = (CHECKOUT / "crds" / "encodepools.yaml").read_text()
    return int(yaml.safe_load(text)["metadata"]["annotations"][f"{GROUP}/schema-generation"])
