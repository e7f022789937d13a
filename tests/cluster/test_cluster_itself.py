"""The test cluster is a real one: its authorization, controllers, nodes and pods do their work."""

import asyncio
import urllib.request

import pytest
from kubernetes import client
from kubernetes.aio import client as aio
from kubernetes.client.exceptions import ApiException
from tests.cluster.kit import audit as auditing
from tests.cluster.kit.pods import CHECKOUT, host_pod, is_ready, program_folder, web_pod
from tests.cluster.kit.waiting import (
    explain,
    run_in_pod,
    wait_for_async,
    wait_pod,
    wait_pod_ended,
    wait_pod_ready,
)

HOSTNAME = "kubernetes.io/hostname"


def read(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as answer:
        return answer.read().decode()


def stateful_set(name: str, replicas: int) -> dict:
    return {
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [{"name": "main", "image": "localhost/nothing:1"}]},
            },
        },
    }


def grant_reading_of_pods(api, namespace, subject):
    rbac = client.RbacAuthorizationV1Api(api)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    rbac.create_namespaced_role(namespace, {"metadata": {"name": "reader"}, "rules": rules})
    binding = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [subject],
    }
    rbac.create_namespaced_role_binding(namespace, binding)


def test_a_service_account_may_do_only_what_its_role_grants(cluster, kube, namespace, wait_for):
    client.CoreV1Api(kube).create_namespaced_service_account(namespace, {"metadata": {"name": "robot"}})
    with cluster.client(cluster.service_account_kubeconfig(namespace, "robot")) as robot:
        core = client.CoreV1Api(robot)
        with pytest.raises(ApiException, match="403"):
            core.list_namespaced_pod(namespace)

        grant_reading_of_pods(
            kube, namespace, {"kind": "ServiceAccount", "name": "robot", "namespace": namespace}
        )

        def may_list() -> bool:
            try:
                core.list_namespaced_pod(namespace)
            except ApiException:
                return False
            return True

        wait_for(may_list, what="the role to count")
        with pytest.raises(ApiException, match="403"):
            core.list_namespaced_secret(namespace)


def test_a_user_is_who_the_certificate_names(cluster, kube):
    with cluster.client(cluster.user_kubeconfig("eve", ["readers"])) as eve:
        review = client.AuthenticationV1Api(eve).create_self_subject_review({})
    assert review.status.user_info.username == "eve"
    assert "readers" in review.status.user_info.groups


def test_the_audit_log_tells_who_asked_for_what_since_when(cluster, audit, kube, namespace):
    core = client.CoreV1Api(kube)
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "before"}})
    since = auditing.now()
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "after"}})
    with cluster.client(cluster.user_kubeconfig("mallory")) as mallory:
        with pytest.raises(ApiException, match="403"):
            client.CoreV1Api(mallory).delete_namespaced_config_map("before", namespace)

    asked = [one for one in audit(since) if one.resource == "configmaps" and one.name in ("before", "after")]

    assert [(one.user, one.verb, one.namespace, one.name, one.code, one.writes) for one in asked] == [
        ("admin", "create", namespace, "after", 201, True),
        ("mallory", "delete", namespace, "before", 403, True),
    ]


def test_controllers_make_and_collect_pods_that_no_node_runs(kube, namespace, wait_for):
    apps, core = client.AppsV1Api(kube), client.CoreV1Api(kube)
    apps.create_namespaced_stateful_set(namespace, stateful_set("s", 2))

    def pods():
        return core.list_namespaced_pod(namespace).items

    wait_for(lambda: sorted(pod.metadata.name for pod in pods()) == ["s-0", "s-1"], what="two pods")
    assert {pod.status.phase for pod in pods()} == {"Pending"}
    apps.delete_namespaced_stateful_set("s", namespace, propagation_policy="Foreground")
    wait_for(lambda: not pods(), what="the pods to be collected")


def test_the_asynchronous_client_watches(cluster, namespace):
    async def watch_one() -> str:
        async with await cluster.aio_client() as api:
            core = aio.CoreV1Api(api)
            await core.create_namespaced_config_map(namespace, {"metadata": {"name": "seen"}})

            async def names() -> set[str]:
                return {one.metadata.name for one in (await core.list_namespaced_config_map(namespace)).items}

            await wait_for_async(names, what="a config map")
            return "seen" if "seen" in await names() else ""

    assert asyncio.run(watch_one()) == "seen"


def test_pods_on_two_nodes_reach_each_other_and_are_reached(nodes, node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    for name in nodes.node_names:
        core.create_namespaced_pod(node_namespace, web_pod(f"on-{name}", nodeSelector={HOSTNAME: name}))
    pods = [wait_pod_ready(node_kube, node_namespace, f"on-{name}") for name in nodes.node_names]
    first, second = (pod.status.pod_ip for pod in pods)

    assert [pod.spec.node_name for pod in pods] == ["node-1", "node-2"]
    assert read(f"http://{first}:8080/") == "on-node-1\n"
    assert read(f"http://{second}:8080/") == "on-node-2\n"
    fetch = ["wget", "-qO-", f"http://{second}:8080/"]
    assert run_in_pod(node_kube, node_namespace, "on-node-1", fetch) == "on-node-2\n"


def test_a_stopped_node_starts_again_with_its_pods(nodes, node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    core.create_namespaced_pod(node_namespace, web_pod("web", nodeSelector={HOSTNAME: "node-2"}))
    before = wait_pod_ready(node_kube, node_namespace, "web")
    nodes.stop_node("node-2")
    with pytest.raises(OSError):
        read(f"http://{before.status.pod_ip}:8080/")

    nodes.start_node("node-2")

    def restarted(pod) -> bool:
        return is_ready(pod) and pod.status.container_statuses[0].restart_count == 1

    after = wait_pod(node_kube, node_namespace, "web", restarted, "Ready again", timeout_s=60)
    assert after.metadata.uid == before.metadata.uid
    assert read(f"http://{after.status.pod_ip}:8080/") == "web\n"


FETCH_BY_NAME = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://web.{sys.argv[1]}.svc.cluster.local/", timeout=5).read().decode())
"""


def test_a_service_is_reached_by_name_and_address(node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    core.create_namespaced_pod(node_namespace, web_pod("server", labels={"app": "web"}))
    ports = [{"port": 80, "targetPort": 8080}]
    service = core.create_namespaced_service(
        node_namespace, {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    )
    wait_pod_ready(node_kube, node_namespace, "server")
    command = [str(program_folder() / "python"), "-c", FETCH_BY_NAME, node_namespace]
    # It starts again until it gets an answer: kube-proxy and DNS hear of the Service in their own time.
    core.create_namespaced_pod(node_namespace, host_pod("asker", command, restartPolicy="OnFailure"))

    wait_pod_ended(node_kube, node_namespace, "asker", timeout_s=60)
    assert core.read_namespaced_pod_log("asker", node_namespace).strip() == "server"
    assert read(f"http://{service.spec.cluster_ip}/") == "server\n"


def test_the_worker_command_runs_in_a_pod_as_an_ordinary_user(node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    core.create_namespaced_pod(
        node_namespace, host_pod("help", ["encodepool-worker", "--help"], restartPolicy="Never")
    )
    ended = wait_pod_ended(node_kube, node_namespace, "help", timeout_s=60)
    log = core.read_namespaced_pod_log("help", node_namespace)
    assert ended.status.phase == "Succeeded", log + explain(node_kube, node_namespace)
    assert "serve" in log


IMPORT_ALL = """
import os, torch, mooncake.engine, encodepool_worker
assert float((torch.ones(8, 8) @ torch.ones(8, 8))[0, 0]) == 8
mooncake.engine.TransferEngine()
print(os.getuid(), encodepool_worker.__file__)
"""


@pytest.mark.timeout(180)
def test_torch_and_mooncake_run_in_a_pod_from_the_mounted_environment(node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    core.create_namespaced_pod(
        node_namespace, host_pod("imports", ["python", "-c", IMPORT_ALL], restartPolicy="Never")
    )
    ended = wait_pod_ended(node_kube, node_namespace, "imports", timeout_s=120)
    log = core.read_namespaced_pod_log("imports", node_namespace)
    assert ended.status.phase == "Succeeded", log + explain(node_kube, node_namespace)
    assert log.splitlines()[-1] == f"65532 {CHECKOUT / 'worker' / 'encodepool_worker' / '__init__.py'}"


ASK_FOR_PODS = """
import sys
from kubernetes import client, config
config.load_incluster_config()
print(len(client.CoreV1Api().list_namespaced_pod(sys.argv[1]).items))
"""


def test_a_pod_reaches_the_api_server_as_its_service_account(node_kube, node_namespace):
    core = client.CoreV1Api(node_kube)
    core.create_namespaced_service_account(node_namespace, {"metadata": {"name": "robot"}})
    robot = {"kind": "ServiceAccount", "name": "robot", "namespace": node_namespace}
    grant_reading_of_pods(node_kube, node_namespace, robot)
    command = ["python", "-c", ASK_FOR_PODS, node_namespace]
    asker = host_pod("asker", command, serviceAccountName="robot", restartPolicy="OnFailure")
    core.create_namespaced_pod(node_namespace, asker)

    wait_pod_ended(node_kube, node_namespace, "asker", timeout_s=60)
    assert core.read_namespaced_pod_log("asker", node_namespace).strip() == "1"
