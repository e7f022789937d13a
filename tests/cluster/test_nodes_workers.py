"""The operator and real workers on two real nodes: the example pool from its first to its last day.

The tests share one pool. Each leaves it ready, so any of them can run alone.
"""

import signal
import time

import numpy as np
import pytest
from kubernetes import client
from tests.cluster.kit.deploy import example_pool
from tests.cluster.kit.pods import CHECKOUT, is_ready
from tests.cluster.kit.waiting import wait_for
from tests.cluster.node_stage import (
    START_S,
    TINY,
    NodeWorkers,
    Stage,
    group_of,
    inventory,
    pod_of,
    uids_of,
    with_models_of,
)
from tests.cluster.node_traffic import Published, Sender, Traffic
from tests.cluster.operator_stage import (
    Pools,
    admin_kubeconfig,
    annotations_of,
    apply_definition,
    labels_of,
    start_operator,
)
from tests.e2e.gateway import Picture
from tests.e2e.receiving import tower_rows

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SETTLE_S = 6
LAG_S, WITHIN_S = 2.5, 4.5
"""How late the traffic hears of a withdrawal, and how late it sends at most: within the settle time."""

DELETED_LAG_S, DELETED_WITHIN_S = 1.5, 3.5
"""The same for a pod that is deleted, which gets SIGTERM 5 s later."""


@pytest.fixture(scope="module")
def sender(nodes, tokenspeed, tiny_model):
    """With TokenSpeed's receiver on this machine, at the address by which pods reach it."""
    rooms, seeds = iter(range(1 << 40, 1 << 41)), iter(range(1, 1 << 20))
    receiver = tokenspeed("prefill", local_ip=nodes.addresses.machine)
    return Sender(receiver, lambda: next(rooms), lambda: Picture(8, 8, next(seeds)), tower_rows(tiny_model))


@pytest.fixture(scope="module")
def home(node_kube):
    core = client.CoreV1Api(node_kube)
    name = "nodes-workers"
    core.create_namespace({"metadata": {"name": name}})
    known = ("ConfigMap/kube-root-ca.crt", "ServiceAccount/default")
    wait_for(lambda: inventory(node_kube, name) == set(known), what="what every namespace has")
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="module")
def stage(nodes, node_kube, home, spawn, program, tmp_path_factory):
    pools = Pools(node_kube, home)
    folder = tmp_path_factory.mktemp("operator")
    account = admin_kubeconfig(nodes, "operator-of-nodes")

    def run_operator():
        log = folder / f"operator-{time.monotonic_ns()}.log"
        running = start_operator(spawn, program, account, log, "--namespace", home, "--lease-namespace", home)
        running.wait_line("lease taken")
        return running

    manifest = example_pool()
    manifest["spec"] |= {"drain": {"settleSeconds": SETTLE_S}}
    manifest["spec"]["restart"] |= {"backoff": {"baseSeconds": 1}, "startupDeadlineSeconds": 1200}
    before = inventory(node_kube, home)
    apply_definition(node_kube)
    made = Stage(
        nodes,
        node_kube,
        pools,
        NodeWorkers(nodes),
        Published(pools, TINY),
        run_operator,
        run_operator(),
        manifest,
        before,
    )
    with made.published.followed():
        yield made
    if made.operator.running:
        assert made.operator.stop() == 0, made.operator.log()
    print("\n".join(["", "measured on the nodes:", *made.measured]))


@pytest.fixture(scope="module")
def applied(stage, request):
    """The example pool, ready for the first time."""
    stage.kubectl("apply", "-f", str(CHECKOUT / "crds"))
    since = time.monotonic()
    stage.kubectl("apply", "-f", "-", given=stage.manifest)
    request.getfixturevalue("sender")  # it imports a lot, and the pods take their time as well
    stage.wait_ready()
    stage.took("two groups of the example, from apply to Ready", since)
    return stage


def test_the_applied_example_comes_up_and_its_rows_arrive(applied, sender):
    pools = applied.pools
    for kind in ("Ready", "Available", "EndpointsPublished"):
        assert pools.condition(TINY, kind)["status"] == "True"
    # Every leader says the same as the list, and the slices of the front Service do.
    told = {
        (
            f"grpc://{pod['status']['podIP']}:{annotations_of(pod)['smg.ai/worker-ports']}",
            int(annotations_of(pod)["sglang.ai/bootstrap-port"]),
        )
        for pod in pools.routable(TINY)
    }
    workers = pools.workers(TINY)
    assert len(workers) == 2
    assert {(worker["url"], worker["bootstrap_port"]) for worker in workers} == told

    def slices():
        found = pools.discovery.list_namespaced_endpoint_slice(
            pools.namespace, label_selector=f"kubernetes.io/service-name={TINY}-encode"
        ).items
        ready = [(s, e) for s in found for e in s.endpoints or () if e.conditions.ready]
        ports = [{port.name: port.port for port in s.ports} | {"ip": e.addresses[0]} for s, e in ready]
        return {(f"grpc://{p['ip']}:{p['grpc']}", p["bootstrap"]) for p in ports} == told

    wait_for(slices, what="the slices of the front Service")
    assert {worker["model_id"] for worker in workers} == {"tiny-qwen3-vl"}
    # Real pictures through real Mooncake into the receiver outside of the cluster.
    assert [sender.send(worker) for worker in workers] == ["", ""]


def test_the_client_finds_the_pool_by_its_name(applied, spawn, program, tiny_model, tmp_path):
    from PIL import Image

    image = tmp_path / "picture.png"
    noise = np.random.default_rng(7).integers(0, 255, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(noise).save(image)
    pool = f"{applied.pools.namespace}/{TINY}"
    env = {"KUBECONFIG": str(applied.cluster.kubeconfig)}
    through = [program("encodepool"), "encode", image, "--pool", pool, "--out", tmp_path / "through.npz"]
    model = ("--model", tiny_model, "--out", tmp_path / "direct.npz")
    direct = [program("encodepool-worker"), "rows", image, *model]
    runs = [spawn(argv, tmp_path / f"{i}.log", env=env) for i, argv in enumerate((through, direct))]
    assert [run.wait(90) for run in runs] == [0, 0], (tmp_path / "0.log").read_text()
    with np.load(tmp_path / "through.npz") as rows, np.load(tmp_path / "direct.npz") as expected:
        assert sorted(rows) == sorted(expected) == ["picture.deepstack", "picture.main"]
        assert all(np.array_equal(rows[name], expected[name]) for name in rows)


def test_a_new_model_revision_moves_group_by_group_and_loses_no_request(applied, sender, tiny_model):
    stage, pools = applied, applied.pools
    stage.replicas(2)
    old = pools.status(TINY)["currentRevision"]
    changed = with_models_of(stage.manifest, tiny_model.parent, tiny_model.name)
    changed["spec"]["model"]["revision"] = "v2"
    changed["spec"]["publish"]["servedModelName"] = "tiny-v2"
    since = time.monotonic()
    with Traffic(sender, stage.published, LAG_S, WITHIN_S).flowing() as traffic:
        stage.kubectl("apply", "-f", "-", given=changed)
        wait_for(lambda: pools.status(TINY)["currentRevision"] != old, 2 * START_S, "one revision")
        stage.wait_ready()
        stage.took("two groups moved to another revision under traffic", since)
        sent = traffic.sent
        wait_for(lambda: traffic.sent > sent + 4, 30, "requests to the new groups")
    stage.manifest = changed

    assert traffic.failures == []
    assert traffic.sent_to_withdrawn > 0  # else this test shows nothing of the settle time
    stage.measured.append(
        f"requests meanwhile: {traffic.sent}, {traffic.sent_to_withdrawn} to withdrawn groups"
    )
    assert stage.published.fewest_since(since) == 1
    for pod in pools.pods(TINY):
        assert annotations_of(pod)["encodepool.dev/revision"] == pools.status(TINY)["currentRevision"]
    assert {worker["model_id"] for worker in stage.published.now.values()} == {"tiny-v2"}


def test_the_scale_command_adds_a_group(applied, sender):
    stage = applied
    before = stage.replicas(2)
    since = time.monotonic()
    after = stage.replicas(3)
    stage.took("a third group by kubectl scale", since)
    assert before.items() <= after.items()
    assert [sender.send(worker) for name, worker in after.items() if name not in before] == [""]


def test_a_pod_that_is_deleted_serves_on_until_gateways_have_heard_of_it(applied, sender):
    """Nobody withdraws it first. Requests go on to the old list for a second, and none is lost."""
    stage, pools = applied, applied.pools
    before = stage.replicas(2)
    deleted, evicted = before
    with Traffic(sender, stage.published, DELETED_LAG_S, DELETED_WITHIN_S).flowing() as traffic:
        wait_for(lambda: traffic.sent > 4, 30, "the traffic")
        since = time.monotonic()
        pools.core.delete_namespaced_pod(pod_of(deleted), pools.namespace)
        pod = pools.core.read_namespaced_pod(pod_of(deleted), pools.namespace)
        assert pod.metadata.deletion_timestamp is not None
        [new] = stage.wait_replaced(before, deleted)
        stage.took("a deleted pod's group listed again", since)
        to_deleted = traffic.sent_to_withdrawn
        now = stage.published.now
        pools.core.create_namespaced_pod_eviction(
            pod_of(evicted), pools.namespace, {"metadata": {"name": pod_of(evicted)}}
        )
        stage.wait_replaced(now, evicted)
    assert traffic.failures == []
    assert 0 < to_deleted < traffic.sent_to_withdrawn  # else this shows nothing
    assert new["url"] not in {worker["url"] for worker in before.values()}
    assert [notice for notice in pools.events(TINY) if notice[0] == "GroupRepaired"] == []
    stage.wait_ready()


def test_groups_that_fail_come_back_at_another_address_with_their_evidence(applied, sender):
    stage, pools = applied, applied.pools
    before = stage.replicas(3)
    killed, deleted, orphaned = before
    seen, uids = len(pools.events(TINY)), uids_of(pools, TINY)

    since = time.monotonic()
    stage.workers.supervisor(TINY, group_of(killed)).send_signal(signal.SIGKILL)
    pools.core.delete_namespaced_pod(pod_of(deleted), pools.namespace)
    pools.apps.delete_namespaced_stateful_set(pod_of(orphaned)[:-2], pools.namespace)
    new = stage.wait_replaced(before, killed, deleted, orphaned)
    stage.unlisted("its container was killed", killed, since)
    stage.unlisted("its pod was deleted", deleted, since)
    stage.unlisted("its StatefulSet was deleted", orphaned, since)
    stage.took("all three listed again", since)
    assert [sender.send(worker) for worker in new] == ["", "", ""]

    failure = stage.last_failure(killed)
    assert (failure["exitCode"], failure["pod"], failure["counted"]) == (137, pod_of(killed), True)
    assert failure["node"] in stage.cluster.node_names
    assert stage.told(seen, "GroupFailed", pod_of(killed), "exit code 137")
    failure = stage.last_failure(deleted)
    assert (failure["reason"], failure["pod"], failure["counted"]) == ("PodDeleted", pod_of(deleted), False)
    assert stage.told(seen, "GroupFailed", pod_of(deleted), "PodDeleted")
    assert stage.told(seen, "GroupWithdrawn", f"group {group_of(orphaned)}", "its object is gone")
    stage.wait_ready()
    # No process of an old start lives on.
    wait_for(lambda: not uids & uids_of(pools, TINY), 60, "all pods being others")
    wait_for(lambda: len(stage.workers.of(TINY)) == 9, 60, "a supervisor, a frontend and a rank each")


def test_frozen_workers_are_unlisted_and_started_again(applied, sender):
    stage, pools = applied, applied.pools
    before = stage.replicas(3)
    untouched, in_part, whole = before
    seen = len(pools.events(TINY))

    since = time.monotonic()
    rank = stage.workers.child(TINY, group_of(in_part), "encodepool_worker.shell")
    for process in (rank, *stage.workers.whole(TINY, group_of(whole))):
        process.send_signal(signal.SIGSTOP)
    new = stage.wait_replaced(before, in_part, whole)
    stage.unlisted("its rank was frozen", in_part, since)
    stage.unlisted("all its processes were frozen", whole, since)
    stage.took("both listed again", since)
    assert [sender.send(worker) for worker in new] == ["", ""]

    assert stage.published.unlisted_at(untouched, since) is None
    failure = stage.last_failure(in_part)
    assert failure["exitCode"] == 1
    assert "rank 0 has been silent" in failure["message"]
    assert stage.told(seen, "GroupFailed", pod_of(in_part), "rank 0 has been silent")
    failure = stage.last_failure(whole)
    assert (failure.get("exitCode"), failure["counted"]) == (137, True), (failure, pools.events(TINY)[seen:])
    assert stage.told(seen, "GroupFailed", pod_of(whole), "exit code 137")
    stage.wait_ready()


def test_what_fails_while_no_operator_runs_is_found_by_the_next(applied, sender):
    stage, pools = applied, applied.pools
    stage.wait_ready()
    before, seen = stage.published.now, len(pools.events(TINY))
    victim = min(before)
    assert stage.operator.stop() == 0, stage.operator.log()
    stage.workers.supervisor(TINY, group_of(victim)).send_signal(signal.SIGKILL)

    def back():
        pod = pools.core.read_namespaced_pod(pod_of(victim), pools.namespace)
        return pod.status.container_statuses[0].restart_count == 1 and is_ready(pod)

    wait_for(back, START_S, "the kubelet's own restart")
    assert stage.published.now == before  # nobody has taken it off
    since = time.monotonic()
    stage.operator = stage.run_operator()
    new = stage.wait_replaced(before, victim)
    stage.took("a restart that no operator saw, from the next one's start to the list", since)
    assert [sender.send(worker) for worker in new] == [""]
    assert stage.last_failure(victim)["exitCode"] == 137
    assert stage.told(seen, "GroupFailed", pod_of(victim), "exit code 137")
    stage.wait_ready()


def test_scaled_down_and_deleted_the_pool_leaves_nothing(applied):
    stage, pools = applied, applied.pools
    stage.wait_ready()
    uids = uids_of(pools, TINY)
    since = time.monotonic()
    stage.replicas(1)
    wait_for(lambda: len(pools.groups(TINY)) == 1, 60, "one group")
    stage.took("down to one group", since)
    since = time.monotonic()
    stage.delete(TINY, uids)
    stage.took("a deleted pool is gone from cluster and nodes", since)
    assert stage.published.reused_addresses() == []


def test_on_the_network_of_the_nodes_every_start_has_ports_of_its_own(stage, sender, tiny_model):
    pools = stage.pools
    manifest = with_models_of(example_pool(), tiny_model.parent, tiny_model.name)
    manifest["metadata"]["name"] = name = "flat"
    # Both groups on one node: what one holds the other must not ask for.
    manifest["spec"] |= {
        "network": {"hostNetwork": True},
        "placement": {"nodeSelector": {"kubernetes.io/hostname": "node-2"}},
    }
    since = time.monotonic()
    stage.kubectl("apply", "-f", "-", given=manifest)
    stage.wait_ready(name)
    stage.took("two groups on the node's network", since)
    workers = pools.workers(name)
    assert {worker["url"].rpartition(":")[0] for worker in workers} == {
        f"grpc://{stage.cluster.addresses.node(2)}"
    }
    taken = []
    for pod in pools.pods(name):
        assert pod["status"]["podIP"] == stage.cluster.addresses.node(2)
        (container,) = pod["spec"]["containers"]
        assert all(port["hostPort"] == port["containerPort"] for port in container["ports"])
        taken += [port["hostPort"] for port in container["ports"]]
        assert labels_of(pod)["encodepool.dev/routable"] == "true"
    assert len(set(taken)) == 8
    assert [sender.send(worker) for worker in workers] == ["", ""]

    # Deleted while nobody watches: the garbage collector does it all.
    uids = uids_of(pools, name)
    assert stage.operator.stop() == 0, stage.operator.log()
    since = time.monotonic()
    stage.delete(name, uids)
    stage.took("a pool deleted without an operator is gone from cluster and nodes", since)
