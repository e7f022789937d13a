"""One operator, and pools that are made, change, fail and go, on a real control plane.

Pods are made Ready by a stand-in for the kubelet (``operator_stage.StandIn``).
"""

import json

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import (
    Pools,
    StandIn,
    admin_kubeconfig,
    annotations_of,
    apply_definition,
    labels_of,
    start_operator,
    wait_at_rest,
)

USER = "operator-of-life"


@pytest.fixture(scope="module")
def home(cluster, kube, wait_for):
    """The namespace of all tests here."""
    core = client.CoreV1Api(kube)
    name = "operator-life"
    core.create_namespace({"metadata": {"name": name}})
    wait_for(lambda: core.list_namespaced_service_account(name).items, what="the service account")
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="module")
def definition(cluster, kube):
    """The CRD, as users apply it."""
    apply_definition(kube)


@pytest.fixture(scope="module")
def kubelet(kube, home):
    with StandIn(kube, home).running() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def operator(cluster, spawn, program, tmp_path_factory, home, definition):
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    running = start_operator(
        spawn,
        program,
        admin_kubeconfig(cluster, USER),
        log,
        "--namespace",
        home,
        "--lease-namespace",
        home,
        "--default-worker-image",
        "localhost/default:1",
    )
    running.wait_line("lease taken")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def pools(kube, home, kubelet, operator):
    return Pools(kube, home)


def hosts(workers):
    return {(worker["url"], worker["bootstrap_port"]) for worker in workers}


def test_an_applied_pool_is_brought_up_and_published(pools, wait_for):
    pools.create("up")
    pools.wait_ready("up")

    groups = pools.groups("up")
    assert sorted(groups) == ["up-0", "up-1"]
    assert groups["up-0"]["spec"]["updateStrategy"]["type"] == "OnDelete"
    assert [item for item in pools.children("up") if not item.startswith("EndpointSlice")] == sorted(
        [
            "ConfigMap/up-endpoints",
            f"ControllerRevision/up-{pools.status('up')['currentRevision']}",
            "Pod/up-0-0",
            "Pod/up-1-0",
            "PodDisruptionBudget/up-leaders",
            "Service/up-encode",
            "Service/up-peers",
            "StatefulSet/up-0",
            "StatefulSet/up-1",
            # The controller's own, which it gives the labels of the pods.
            *(item for item in pools.children("up") if item.startswith("ControllerRevision/up-0-")),
            *(item for item in pools.children("up") if item.startswith("ControllerRevision/up-1-")),
        ]
    )
    # Every leader says the same as the list.
    told = {
        (
            f"grpc://{pod['status']['podIP']}:{annotations_of(pod)['smg.ai/worker-ports']}",
            int(annotations_of(pod)["sglang.ai/bootstrap-port"]),
        )
        for pod in pools.routable("up")
    }
    assert len(told) == 2
    assert hosts(pools.workers("up")) == told
    assert {labels_of(pod)["llm-d.ai/role"] for pod in pools.routable("up")} == {"encode"}
    entries = json.loads(pools.documents("up")["endpoints.json"])["endpoints"]
    assert [entry["ready"] for entry in entries] == [True, True]
    assert pools.condition("up", "Available")["status"] == "True"
    assert pools.condition("up", "EndpointsPublished")["status"] == "True"

    # The front Service's slices carry each pod's own ports.
    def slices():
        found = pools.discovery.list_namespaced_endpoint_slice(
            pools.namespace, label_selector="kubernetes.io/service-name=up-encode"
        ).items
        ready = [(s, e) for s in found for e in s.endpoints or () if e.conditions.ready]
        return ready if len(ready) == 2 else None

    for piece, endpoint in wait_for(slices, what="the slices of up-encode"):
        ports = {port.name: port.port for port in piece.ports}
        assert (f"grpc://{endpoint.addresses[0]}:{ports['grpc']}", ports["bootstrap"]) in told
        assert {port.name: port.app_protocol for port in piece.ports}["grpc"] == "kubernetes.io/h2c"
    wanted = {"RevisionSaved", "GroupStarted", "GroupPublished"}
    wait_for(lambda: wanted <= {reason for reason, _ in pools.events("up")}, what="the Events of the start")


def test_what_dies_leaves_the_list_also_while_the_spec_cannot_be_used(pools, kubelet, wait_for):
    pools.create("broken", replicas=2)
    pools.wait_ready("broken")
    # The schema leaves this part open, so the API server takes it.
    pools.patch("broken", podTemplate={"spec": {"volumes": [{"emptyDir": {}}]}})
    wait_for(
        lambda: pools.condition("broken", "Stalled").get("reason") == "InvalidSpec", what="the condition"
    )
    dead, alive = sorted(pools.pods("broken"), key=lambda pod: pod["metadata"]["name"])
    kubelet.restart(dead)
    wait_for(lambda: len(pools.workers("broken")) == 1, what="the dead group leaving the list")
    assert [pod["metadata"]["name"] for pod in pools.routable("broken")] == [alive["metadata"]["name"]]
    wait_for(lambda: pools.status("broken")["availableReplicas"] == 1, what="the status")
    assert [group["spec"]["replicas"] for group in pools.groups("broken").values()] == [1, 1]
    pools.patch("broken", podTemplate=None)
    pools.wait_ready("broken")


def test_the_scale_subresource_adds_and_takes_groups(pools, wait_for):
    pools.create("scaled", replicas=1)
    pools.wait_ready("scaled")
    pools.scale("scaled", 3)
    pools.wait_ready("scaled")
    assert sorted(pools.groups("scaled")) == ["scaled-0", "scaled-1", "scaled-2"]
    scale = pools.custom.get_namespaced_custom_object_scale(
        "encodepool.dev", "v1alpha1", pools.namespace, "encodepools", "scaled"
    )
    leaders = pools.core.list_namespaced_pod(pools.namespace, label_selector=scale["status"]["selector"])
    assert (scale["status"]["replicas"], len(leaders.items)) == (3, 3)
    pools.scale("scaled", 1)
    wait_for(lambda: sorted(pools.groups("scaled")) == ["scaled-0"], what="two groups going")
    pools.wait_ready("scaled")
    assert [worker["id"].rpartition("/")[2][0] for worker in pools.workers("scaled")] == ["0"]


def test_what_somebody_edits_is_repaired_without_moving_a_pod(pools, wait_for):
    pools.create("edited", replicas=1)
    pools.wait_ready("edited")
    (pod,) = pools.pods("edited")

    # A field of ours in a Service, and a Service that is deleted.
    pools.core.patch_namespaced_service(
        "edited-peers", pools.namespace, {"spec": {"publishNotReadyAddresses": False}}
    )
    pools.core.delete_namespaced_service("edited-encode", pools.namespace)
    pools.core.patch_namespaced_config_map(
        "edited-endpoints", pools.namespace, {"data": {"workers.json": "{}"}}
    )

    def repaired():
        try:
            service = pools.core.read_namespaced_service("edited-peers", pools.namespace)
            pools.core.read_namespaced_service("edited-encode", pools.namespace)
        except ApiException:
            return False
        listed = json.loads(pools.documents("edited")["workers.json"]).get("workers")
        return service.spec.publish_not_ready_addresses and listed

    wait_for(repaired, what="the Services and the list as they were")

    # A field of ours, and an addition, in the StatefulSet's template.
    pools.apps.patch_namespaced_stateful_set(
        "edited-0",
        pools.namespace,
        {
            "spec": {
                "template": {
                    "spec": {
                        "containers": [
                            {"name": "encode", "image": "evil:1"},
                            {"name": "side", "image": "s:1"},
                        ]
                    }
                }
            }
        },
    )

    def template():
        group = pools.groups("edited")["edited-0"]
        found = [(c["name"], c["image"]) for c in group["spec"]["template"]["spec"]["containers"]]
        return found == [("encode", "localhost/host:1")]

    wait_for(template, what="the template as it was")

    def told():
        return any(r == "GroupRepaired" and "evil:1" in m for r, m in pools.events("edited"))

    wait_for(told, what="the Event about it")
    assert [p["metadata"]["uid"] for p in pools.pods("edited")] == [pod["metadata"]["uid"]]
    assert pools.condition("edited", "Ready")["status"] == "True"


def test_what_the_server_refuses_is_told_and_stops_no_other_pool(pools, wait_for, cluster):
    pools.create("good", replicas=1)
    pools.create("bad", replicas=1, podTemplate={"spec": {"dnsPolicy": "Nonsense"}})
    pools.wait_ready("good")

    def told():
        condition = pools.condition("bad", "Stalled")
        return condition["status"] == "True" and "dnsPolicy" in condition["message"]

    wait_for(told, what="the refusal in a condition")
    assert pools.condition("bad", "Stalled")["reason"] == "WriteRefused"
    # It is asked for again and again, but seldom and without effect.
    wait_at_rest(cluster, USER)
    since, before = now(), (pools.status("bad"), pools.documents("bad"))
    asked = wait_for(
        lambda: [one for one in cluster.audit(since) if one.writes and one.name.startswith("bad")],
        what="the next try",
    )
    assert all(one.dry_run for one in asked)
    assert (pools.status("bad"), pools.documents("bad")) == before
    pools.core.delete_namespaced_pod("good-0-0", pools.namespace)
    wait_for(lambda: pools.workers("good"), what="the good pool serving again")

    pools.patch("bad", podTemplate=None)
    pools.wait_ready("bad")
    assert pools.condition("bad", "Stalled")["status"] == ""


def test_an_object_of_our_name_that_is_not_ours_is_never_written(pools, wait_for):
    theirs = {"metadata": {"name": "taken-endpoints"}, "data": {"workers.json": "mine"}}
    pools.core.create_namespaced_config_map(pools.namespace, theirs)
    pools.apps.create_namespaced_stateful_set(
        pools.namespace,
        {
            "metadata": {"name": "taken-0"},
            "spec": {
                "serviceName": "x",
                "replicas": 0,
                "selector": {"matchLabels": {"app": "x"}},
                "template": {
                    "metadata": {"labels": {"app": "x"}},
                    "spec": {"containers": [{"name": "c", "image": "i:1"}]},
                },
            },
        },
    )
    pools.create("taken", replicas=1)

    def told():
        message = pools.condition("taken", "Stalled")["message"]
        return "ConfigMap/taken-endpoints" in message and "StatefulSet/taken-0" in message

    wait_for(told, what="both names in a condition")
    assert pools.documents("taken") == {"workers.json": "mine"}
    left = pools.apps.read_namespaced_stateful_set("taken-0", pools.namespace)
    assert left.spec.selector.match_labels == {"app": "x"}
    # The group takes the next free index instead.
    wait_for(lambda: sorted(pools.groups("taken")) == ["taken-1"], what="group 1")

    pools.core.delete_namespaced_config_map("taken-endpoints", pools.namespace)
    pools.apps.delete_namespaced_stateful_set("taken-0", pools.namespace)
    wait_for(lambda: "ConfigMap/taken-endpoints" in pools.children("taken"), 60, "our own list")
    pools.wait_ready("taken")
    assert len(pools.workers("taken")) == 1
    assert pools.condition("taken", "Stalled")["status"] == ""


def test_each_replica_of_the_operator_answers_its_probes(operator):
    from urllib.request import ProxyHandler, build_opener

    opener = build_opener(ProxyHandler({}))

    def read(path):
        with opener.open(f"http://127.0.0.1:{operator.port}{path}", timeout=5) as answer:
            return answer.read().decode()

    assert (read("/livez"), read("/readyz")) == ("ok", "ok")
    metrics = read("/metrics")
    assert "encodepool_operator_leading 1.0" in metrics
    assert 'encodepool_operator_api_calls_total{code="200",verb="patch"}' in metrics
    assert 'phase="Ready"' in metrics
    assert "encodepool_operator_stalled_watches_total{" not in metrics
