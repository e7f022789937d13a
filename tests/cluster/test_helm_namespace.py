"""The chart in namespace scope, installed by somebody who has no rights beyond that namespace."""

import pytest
import yaml
from tests.cluster.helm_rights import AWAY, Story, differences, rights_of
from tests.cluster.helm_stage import (
    CHART,
    DEPLOYMENT,
    RELEASE,
    Release,
    Shell,
    commands,
    lease_holder,
    older_definition,
    operator_pods,
    remove_definition,
)
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import GROUP, SPEC, VERSION, Pools, StandIn

TEAM = "team"
"""The namespace in the chart's README."""

GONE = "spec.revisionHistoryLimit"
_, ADMINISTRATORS, USERS = commands((CHART / "README.md").read_text())
APPLY_CRD, MAKE_USERS_ROLES, GRANT = ADMINISTRATORS.splitlines()


@pytest.fixture(scope="module")
def admin(nodes, node_kube, tmp_path_factory):
    """Somebody who may write to the whole cluster, and did what README.md says, but with an older CRD."""
    shell = Shell(nodes.kubeconfig, tmp_path_factory.mktemp("admin"))
    remove_definition(node_kube)
    shell.kubectl("create", "namespace", TEAM)
    shell.kubectl(
        "create", "rolebinding", "boss", "--clusterrole=admin", "--user=alice", f"--namespace={TEAM}"
    )
    try:
        shell.kubectl("apply", "--server-side", "-f", "-", text=yaml.safe_dump(older_definition(GONE)))
        shell.script(MAKE_USERS_ROLES)
        yield shell
    finally:
        shell.try_helm("uninstall", RELEASE, "--namespace", TEAM, "--wait")
        shell.kubectl("delete", "namespace", TEAM, "--wait=false")
        shell.script(MAKE_USERS_ROLES.replace("kubectl apply", "kubectl delete"))
        remove_definition(node_kube)


@pytest.fixture(scope="module")
def alice(nodes, tmp_path_factory):
    """Has the role ``admin`` of the namespace."""
    return Shell(nodes.user_kubeconfig("alice"), tmp_path_factory.mktemp("alice"))


@pytest.fixture(scope="module")
def release(admin, alice):
    since = now()
    admin.script(GRANT)
    said = alice.script(f"{USERS} --values {alice.values} --wait --timeout 90s")
    return Release(alice, TEAM, said.partition("NOTES:\n")[2], since)


def test_who_has_no_rights_beyond_the_namespace_cannot_grant_them(admin, alice):
    with pytest.raises(AssertionError, match="attempting to grant RBAC permissions not currently held"):
        alice.script(GRANT)


def test_the_release_is_all_in_its_namespace(release):
    made = [
        one for one in yaml.safe_load_all(release.shell.helm("get", "manifest", RELEASE, "-n", TEAM)) if one
    ]
    assert {one["metadata"]["namespace"] for one in made} == {TEAM}
    assert release.shell.helm("test", RELEASE, "--namespace", TEAM)


def test_an_outdated_crd_is_told_until_it_is_replaced(release, admin, nodes, node_kube, wait_for):
    pools = Pools(node_kube, TEAM)
    pods = [pod.metadata.uid for pod in operator_pods(node_kube, TEAM)]
    manifest = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EncodePool",
        "metadata": {"name": "told", "namespace": TEAM},
        "spec": {**SPEC, "replicas": 0, "podTemplate": AWAY},
    }
    release.shell.kubectl("apply", "-f", "-", text=yaml.safe_dump(manifest))
    stalled = wait_for(lambda: pools.condition("told", "Stalled")["status"] == "True", 30, "the condition")
    assert stalled
    assert pools.condition("told", "Stalled")["message"] == (
        f"the CustomResourceDefinition lacks {GONE}: apply crds/"
    )

    how, *_ = commands(release.notes)
    assert how == APPLY_CRD.strip()
    admin.script(how)
    wait_for(lambda: pools.condition("told", "Stalled")["status"] == "", 30, "the condition being taken back")
    assert [pod.metadata.uid for pod in operator_pods(node_kube, TEAM)] == pods
    pools.delete("told")


@pytest.mark.timeout(240)
def test_the_operator_needs_all_of_its_rights_and_no_others(release, admin, nodes, node_kube, wait_for):
    pools = Pools(node_kube, TEAM)

    def asked():
        return [one for one in nodes.audit(release.since) if one.user == release.account]

    def hand_over():
        leader = lease_holder(node_kube, TEAM)
        pools.core.delete_namespaced_pod(leader, TEAM)
        wait_for(lambda: lease_holder(node_kube, TEAM) not in ("", leader), 30, "another replica leading")

    rights = rights_of(admin.script(GRANT.partition("|")[0]), DEPLOYMENT, TEAM)
    assert {right.namespace for right in rights} == {TEAM}
    admin.script(APPLY_CRD)
    with StandIn(node_kube, TEAM).running():
        Story(pools, asked).tell(hand_over)
    found = asked()
    assert [one for one in found if one.code == 403] == []
    assert differences(rights, found) == ([], [])
