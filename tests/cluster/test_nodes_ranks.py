"""Groups of two pods on two real nodes: both ranks of a group serve, are lost, and come back together."""

import time

import grpc
import numpy as np
import pytest
from kubernetes import client
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc
from tests.cluster.kit.deploy import example_pool
from tests.cluster.kit.waiting import explain, wait_for
from tests.cluster.node_stage import START_S, group_of, inventory, with_models_of
from tests.cluster.node_traffic import ENCODE_TIMEOUT_S, Published, Traffic, addresses_of
from tests.cluster.operator_stage import Pools, admin_kubeconfig, apply_definition, start_operator
from tests.e2e.gateway import Picture, image_request
from tests.e2e.receiving import Receivers, tower_rows
from tests.e2e.running import CHANNEL_OPTIONS

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

NAMESPACE, PAIR = "nodes-ranks", "pair"
N_RANKS = 2
CLOSE = 1e-4
SETTLE_S = 6
LAG_S, WITHIN_S = 2.5, 4.5


class TwoReceivers:
    """As ``node_traffic.Sender``, with two prefill ranks, each of which wants half of the rows."""

    def __init__(self, prefill, new_picture, direct, folder):
        self._prefill, self._new_picture, self._direct, self._folder = prefill, new_picture, direct, folder
        self._rooms = iter(range(1 << 41, 1 << 42))

    def send(self, worker, still=lambda: True):
        address = worker["url"].removeprefix("grpc://")
        receivers = Receivers(self._prefill, f"{address.rpartition(':')[0]}:{worker['bootstrap_port']}")
        room, picture = next(self._rooms), self._new_picture()
        receivers.ask(room, picture, tp_size=N_RANKS, shard=True)
        try:
            if not still():
                return None
            with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(channel)
                stub.Encode(image_request(room, picture), timeout=ENCODE_TIMEOUT_S)
            verdict = receivers.verdict(room, tp_size=N_RANKS)
            if set(verdict["ranks"].values()) != {"Success"}:
                return str(verdict)
            return "" if self._arrived(room, picture) else "other rows"
        except grpc.RpcError as error:
            return str(error)
        finally:
            receivers.forget(room, tp_size=N_RANKS)

    def _arrived(self, room, picture):
        path = self._folder / f"{room}.npz"
        self._prefill.call("save", room=room, path=str(path), tp_size=N_RANKS)
        rows = self._direct(picture)
        with np.load(path) as saved:
            for name, wanted in (("main", rows.main), ("deepstack", rows.deepstack)):
                halves = [saved[f"{name}.{rank}"].reshape(-1).view(np.uint8) for rank in range(N_RANKS)]
                got = np.concatenate(halves).view(np.float32)
                if np.abs(got - np.frombuffer(wanted, np.float32)).max() >= CLOSE:
                    return False
        path.unlink()
        return True


@pytest.fixture(scope="module")
def sender(nodes, tokenspeed, tiny_model, tmp_path_factory):
    seeds = iter(range(1, 1 << 20))
    return TwoReceivers(
        tokenspeed("prefill", local_ip=nodes.addresses.machine),
        lambda: Picture(8, 8, next(seeds)),
        tower_rows(tiny_model),
        tmp_path_factory.mktemp("rows"),
    )


@pytest.fixture(scope="module")
def pools(nodes, node_kube, spawn, program, tmp_path_factory):
    core = client.CoreV1Api(node_kube)
    core.create_namespace({"metadata": {"name": NAMESPACE}})
    wait_for(lambda: "ServiceAccount/default" in inventory(node_kube, NAMESPACE), what="the namespace")
    apply_definition(node_kube)
    log = tmp_path_factory.mktemp("operator") / "log"
    account = admin_kubeconfig(nodes, "operator-of-ranks")
    operator = start_operator(
        spawn, program, account, log, "--namespace", NAMESPACE, "--lease-namespace", NAMESPACE
    )
    operator.wait_line("lease taken")
    yield Pools(node_kube, NAMESPACE)
    assert operator.stop() == 0, operator.log()
    core.delete_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def published(pools):
    with Published(pools, PAIR).followed() as followed:
        yield followed


@pytest.fixture(scope="module")
def manifest(tiny_model):
    made = with_models_of(example_pool(), tiny_model.parent, tiny_model.name)
    made["metadata"] |= {"name": PAIR, "namespace": NAMESPACE}
    made["spec"] |= {
        "replicas": 2,
        "tensorParallelSize": N_RANKS,
        "ranksPerPod": 1,
        "drain": {"settleSeconds": SETTLE_S},
    }
    made["spec"]["restart"] |= {"backoff": {"baseSeconds": 1}, "startupDeadlineSeconds": 1200}
    # A group's pods on two nodes.
    made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"encodepool.dev/pool": PAIR}},
            "matchLabelKeys": ["encodepool.dev/group"],
        }
    ]
    return made


def wait_listed(pools, published, count, gone=()):
    try:
        wait_for(
            lambda: len(published.now) == count and not published.now.keys() & set(gone),
            2 * START_S,
            f"{count} groups in the list",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(pools.core.api_client, NAMESPACE)}") from error
    return dict(published.now)


def test_two_groups_of_two_pods_serve_from_both_nodes_and_one_is_replaced_as_a_whole(
    pools, published, manifest, sender
):
    pools.custom.create_namespaced_custom_object(
        "encodepool.dev", "v1alpha1", NAMESPACE, "encodepools", manifest
    )
    before = wait_listed(pools, published, 2)
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pools.pods(PAIR)}
    assert len(placed) == 2 * N_RANKS
    for group in range(2):
        assert placed[f"{PAIR}-{group}-0"] != placed[f"{PAIR}-{group}-1"], "a group spans the nodes"
    assert [sender.send(worker) for worker in before.values()] == ["", ""]

    victim = min(before)
    uids = {
        p["metadata"]["uid"]
        for p in pools.pods(PAIR)
        if p["metadata"]["name"].startswith(f"{PAIR}-{group_of(victim)}-")
    }
    since = time.monotonic()
    with Traffic(sender, published, LAG_S, WITHIN_S).flowing() as traffic:
        pools.core.delete_namespaced_pod(f"{PAIR}-{group_of(victim)}-1", NAMESPACE)
        after = wait_listed(pools, published, 2, gone=(victim,))
        print(f"listed again {time.monotonic() - since:.1f} s after a follower's pod was deleted")
        sent = traffic.sent
        wait_for(lambda: traffic.sent > sent + 4, 60, "requests to the new group")
    lost = [failure for failure in traffic.failures if victim not in failure]
    assert lost == [], "an entry that was listed could not serve"
    assert not uids & {pod["metadata"]["uid"] for pod in pools.pods(PAIR)}, "both pods are others"
    assert not addresses_of(before[victim]) & {a for worker in after.values() for a in addresses_of(worker)}
    assert published.unlisted_at(max(before), since) is None
    assert published.reused_addresses() == []
