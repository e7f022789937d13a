"""``encodepool endpoints follow`` on a real API server: which rights it needs, what it survives."""

import json
import signal

import pytest
from kubernetes import client
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import admin_kubeconfig

POOLS = ("one", "two")


def listed(pool, *groups):
    workers = [
        {
            "id": f"ns/{pool}/{group}-1",
            "url": f"grpc://10.{len(pool)}.{ord(pool[0])}.{group}:10001",
            "worker_type": "encode",
            "bootstrap_port": 10000,
            "model_id": "m",
        }
        for group in groups
    ]
    return json.dumps({"version": 1, "workers": workers})


@pytest.fixture
def lists(kube, namespace):
    """``lists(pool, 0, 1)`` publishes a list with these groups, ``lists(pool, None)`` takes it away."""
    core = client.CoreV1Api(kube)

    def publish(pool, *groups):
        name = f"{pool}-endpoints"
        if groups == (None,):
            core.delete_namespaced_config_map(name, namespace)
            return
        body = {"metadata": {"name": name}, "data": {"workers.json": listed(pool, *groups)}}
        try:
            core.patch_namespaced_config_map(name, namespace, body)
        except client.ApiException as error:
            if error.status != 404:
                raise
            core.create_namespaced_config_map(namespace, body)

    return publish


@pytest.fixture
def follower(spawn, program, namespace, tmp_path):
    """``follower(kubeconfig)``: the running command; it keeps ``tmp_path/workers.json``."""

    def start(kubeconfig):
        pools = [part for pool in POOLS for part in ("--pool", f"{namespace}/{pool}")]
        argv = [program("encodepool"), "endpoints", "follow", *pools, "--out", tmp_path / "workers.json"]
        argv += ["--health-file", tmp_path / "health"]
        return spawn(argv, tmp_path / "log", env={"KUBECONFIG": str(kubeconfig)})

    return start


def ids(path):
    return [worker["id"].removeprefix("ns/") for worker in json.loads(path.read_text())["workers"]]


def test_list_and_watch_on_the_named_lists_are_all_it_needs(
    cluster, kube, namespace, lists, follower, tmp_path, wait_for
):
    client.CoreV1Api(kube).create_namespaced_service_account(namespace, {"metadata": {"name": "gateway"}})
    rights = client.RbacAuthorizationV1Api(kube)
    names = [f"{pool}-endpoints" for pool in POOLS]
    rule = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "verbs": ["list", "watch"],
        "resourceNames": names,
    }
    rights.create_namespaced_role(namespace, {"metadata": {"name": "lists"}, "rules": [rule]})
    kubeconfig = cluster.service_account_kubeconfig(namespace, "gateway")
    out, log, health = (tmp_path / name for name in ("workers.json", "log", "health"))
    lists("one", 0)

    denied = follower(kubeconfig)
    assert denied.wait(60) == 1
    assert "needs list and watch on the lists' ConfigMaps" in log.read_text()

    binding = {
        "metadata": {"name": "lists"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "lists"},
        "subjects": [{"kind": "ServiceAccount", "name": "gateway", "namespace": namespace}],
    }
    rights.create_namespaced_role_binding(namespace, binding)
    account = f"system:serviceaccount:{namespace}:gateway"
    review = {
        "spec": {
            "user": account,
            "resourceAttributes": {
                "namespace": namespace,
                "verb": "watch",
                "resource": "configmaps",
                "name": names[0],
            },
        }
    }
    wait_for(
        lambda: client.AuthorizationV1Api(kube).create_subject_access_review(review).status.allowed,
        what="the rights",
    )
    since = now()
    process = follower(kubeconfig)
    wait_for(lambda: f"{namespace}/two: is not there" in log.read_text(), 60, "what it waits for")
    assert not out.exists()
    assert not health.exists()
    lists("two", 0, 1)
    wait_for(health.exists, 20, "the first file")
    assert ids(out) == ["one/0-1", "two/0-1", "two/1-1"]
    lists("two", 1)
    wait_for(lambda: ids(out) == ["one/0-1", "two/1-1"], 20, "the withdrawal")

    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    asked = [one for one in cluster.audit(since) if one.user == account]
    assert {(one.verb, one.resource, one.code) for one in asked} == {
        ("list", "configmaps", 200),
        ("watch", "configmaps", 200),
    }


def test_it_outlives_the_api_server_and_writes_no_half_list(
    cluster, lists, follower, namespace, tmp_path, wait_for
):
    out, health = tmp_path / "workers.json", tmp_path / "health"
    lists("one", 0)
    lists("two", 0)
    with FaultProxy(admin_kubeconfig(cluster, "follower"), tmp_path).running() as proxy:
        process = follower(proxy.kubeconfig)
        wait_for(health.exists, 60, "the first file")

        # The server goes away, in the middle of watches; the lists change meanwhile.
        down = proxy.fault(lambda asked: True, cut=True)
        wait_for(lambda: proxy.cut_watches() == 0 and len(down.met) > 3, 20, "tries")
        lists("one", 0, 1)
        lists("two", None)
        assert ids(out) == ["one/0-1", "two/0-1"]
        proxy.mend()
        wait_for(lambda: "one/1-1" in ids(out), 30, "what was missed")
        # A list that is taken away and written again at once was never away.
        assert ids(out) == ["one/0-1", "one/1-1", "two/0-1"]
        lists("two", 3)
        wait_for(lambda: ids(out) == ["one/0-1", "one/1-1", "two/3-1"], 30, "the list that is back")

        # One that stays away is empty; and a watch that tells nothing costs seconds.
        lists("two", None)
        wait_for(lambda: ids(out) == ["one/0-1", "one/1-1"], 30, "the list that is gone")
        proxy.fault(lambda asked: asked.watch, mute=True)
        lists("one", 5)
        wait_for(lambda: ids(out) == ["one/5-1"], 30, "the change that no watch told of")
        assert process.poll() is None
