"""The real gateway on real nodes: the example's page, command by command, and what the gateway follows."""

import itertools
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from kubernetes import client
from tests.cluster.gateway_stage import (
    MODEL,
    NAMESPACE,
    POOL,
    Page,
    Unlabelled,
    address_of,
    copy_example,
    log_of,
    received,
)
from tests.cluster.helm_stage import remove_definition
from tests.cluster.kit.pods import busybox_pod
from tests.cluster.kit.waiting import explain, wait_for, wait_pod_ready
from tests.cluster.operator_stage import Pools, annotations_of, labels_of
from tests.e2e.smg.page import EXAMPLE, scripts
from tests.peers.smg.gateway import Reached, picture

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SETTLE_S = 10
"""The pool's ``drain.settleSeconds``: so long a withdrawn group serves on. The gateways need about 1 s."""

CLIENTS, PICTURES = 2, 12
"""Of each gateway. More clients make prefill, on a machine with other work, so slow that SMG gives it up
after 3 s of silence (504)."""

KUBERNETES, FILE = "smg", "smg-file"


@pytest.fixture(scope="module")
def page(peers_installed, nodes, node_kube, tiny_model, free_port, tmp_path_factory):
    """The page up to the gateway: operator, pool, prefill and decode are there."""
    folder = tmp_path_factory.mktemp("epd-smg")
    copy_example(folder, tiny_model)
    page = Page(nodes.kubeconfig, folder, free_port())
    remove_definition(node_kube)
    install, *rest = scripts("On a cluster")
    try:
        try:
            page.run(install)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{explain(node_kube, NAMESPACE)}") from error
        page.rest = rest
        yield page
    finally:
        for script in scripts("Away again"):
            page.run(script)
        remove_definition(node_kube)


@pytest.fixture(scope="module")
def pools(node_kube):
    return Pools(node_kube, NAMESPACE)


@pytest.fixture(scope="module")
def answered(page, node_kube):
    """Both gateways of the page, each having answered; name -> gateway."""
    flags, kubernetes = page.rest
    [file] = scripts("With a file")
    try:
        said = {"flags": page.run(flags), KUBERNETES: page.run(kubernetes), FILE: page.run(file)}
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node_kube, NAMESPACE)}") from error
    gateways = {app: Reached(address_of(node_kube, app), 30000, MODEL) for app in (KUBERNETES, FILE)}
    return said, gateways


def published(pools):
    return {(worker["url"], worker["bootstrap_port"]) for worker in pools.workers(POOL)}


def test_the_page_leads_from_an_empty_cluster_to_answers_about_a_picture(answered, pools, node_kube):
    said, gateways = answered
    assert "a picture" in said[KUBERNETES].splitlines()
    assert "a picture" in said[FILE].splitlines()
    records = received(node_kube)
    assert {record["status"] for record in records} == {"Success"}
    hosts = {url.removeprefix("grpc://").rpartition(":")[0] for url, _ in published(pools)}
    assert {record["bootstrap"].rpartition(":")[0] for record in records} <= hosts
    assert any(record["bootstrap"] in said[KUBERNETES] for record in records), "the page shows the log"
    for gateway in gateways.values():
        gateway.wait_workers(published(pools))


@pytest.mark.parametrize(("way", "manifest"), [("smg", "cluster"), ("smgFile", "cluster-file")])
def test_the_flags_that_are_printed_are_those_of_the_manifest(way, manifest, answered, pools):
    said, _ = answered
    printed = pools.status(POOL)["consumer"][way]
    assert printed in said["flags"]
    documents = yaml.safe_load_all((EXAMPLE / manifest / "gateway.yaml").read_text())
    [pod] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    words = pod["containers"][0]["args"]
    flags = shlex.split(printed)
    assert flags == words[words.index(flags[0]) :][: len(flags)]


def test_a_decoy_pod_is_never_taken(answered, pools, node_kube):
    """Ready pods that differ from ours in one thing: another pool, not routable, another namespace."""
    _, gateways = answered
    [real, *_] = pools.routable(POOL)
    keys = ("encodepool.dev/pool", "encodepool.dev/routable", "llm-d.ai/role")
    ours = {key: labels_of(real)[key] for key in keys}
    notes = {
        key: value for key, value in annotations_of(real).items() if "smg.ai/" in key or "sglang.ai/" in key
    }
    decoys = {
        "other-pool": (NAMESPACE, ours | {"encodepool.dev/pool": "others"}),
        "not-routable": (NAMESPACE, {key: ours[key] for key in keys if key != "encodepool.dev/routable"}),
        "far-away": ("default", ours),
        # The gateway is to try this one, and cannot: when it does, it has heard of the others.
        "control": (NAMESPACE, {"epd-role": "decode"}),
    }
    core = client.CoreV1Api(node_kube)
    try:
        addresses = {}
        for name, (namespace, labels) in decoys.items():
            pod = busybox_pod(name, "sleep 600")
            pod["metadata"] |= {"labels": labels, "annotations": notes}
            core.create_namespaced_pod(namespace, pod)
            addresses[name] = wait_pod_ready(node_kube, namespace, name).status.pod_ip
        control = addresses.pop("control")
        wait_for(lambda: f"Registering worker {control}:" in log_of(node_kube, KUBERNETES), 60, "the control")
        tried = log_of(node_kube, KUBERNETES)
        assert [name for name, ip in addresses.items() if f"Registering worker {ip}:" in tried] == []
        assert gateways[KUBERNETES].encode_workers() == published(pools)
    finally:
        for name, (namespace, _) in decoys.items():
            core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)


def bootstrap_of(pod):
    return f"{pod['status']['podIP']}:{annotations_of(pod)['sglang.ai/bootstrap-port']}"


def records_of(answers, node_kube):
    """What prefill says of the images of these requests, by the time when they came to it."""
    wanted = {answer.request_id for answer in answers}

    def there():
        found = [record for record in received(node_kube) if record["request_id"] in wanted]
        return found if {record["request_id"] for record in found} == wanted else None

    return sorted(wait_for(there, 20, "the log of prefill"), key=lambda record: record["asked_at"])


@pytest.fixture
def sent_to(answered, node_kube):
    """``sent_to(bootstrap)``: gateway -> seeds of pictures that it sends to that group.

    It hashes a picture's content to a group, with either way of discovery. As their rows are in the
    group's store then, these pictures make dense traffic.
    """
    _, gateways = answered

    def find(bootstrap):
        out = {}
        for name, gateway in gateways.items():
            answers = [gateway.chat([picture(n)]) for n in range(PICTURES)]
            assert {answer.status for answer in answers} == {200}, log_of(node_kube, name)[-20000:]
            seeds = {answer.request_id: seed for seed, answer in enumerate(answers)}
            records = records_of(answers, node_kube)
            out[name] = [seeds[r["request_id"]] for r in records if r["bootstrap"] == bootstrap]
        return out

    return find


def test_a_withdrawn_group_gets_no_more_images_and_none_is_lost(
    answered, sent_to, pools, node_kube, record_property
):
    """Both gateways are sent pictures for the group that leaves; how long each goes on is told."""
    _, gateways = answered
    *_, leaves = sorted(pools.routable(POOL), key=lambda pod: int(labels_of(pod)["encodepool.dev/group"]))
    bootstrap = bootstrap_of(leaves)
    seeds = sent_to(bootstrap)
    assert all(seeds.values()), "neither gateway knows of one group only"
    answers = {name: [] for name in gateways}
    done = []

    def client_of(name, first):
        for seed in itertools.islice(itertools.cycle(seeds[name]), first, None):
            if done:
                return
            answers[name].append(gateways[name].chat([picture(seed)]))

    with Unlabelled(node_kube).watched() as unlabelled, ThreadPoolExecutor(2 * CLIENTS) as clients:
        running = [clients.submit(client_of, name, n) for name in gateways for n in range(CLIENTS)]
        try:
            wait_for(lambda: all(len(one) > 30 for one in answers.values()), 60, "the load to flow")
            pools.scale(POOL, 1)
            wait_for(lambda: len(published(pools)) == 1, 60, "one group in the list")
            wait_for(lambda: len(pools.pods(POOL)) == 1, 60, "the other group to be gone")
        finally:
            done.append(True)
        for future in running:
            future.result()
    bad = [(name, answer) for name, one in answers.items() for answer in one if answer.status != 200]
    assert bad == [], "\n".join(log_of(node_kube, name)[-20000:] for name in gateways)
    assert unlabelled.at.keys() == {bootstrap}, "the highest index leaves"
    left_at = unlabelled.at[bootstrap]
    for name, one in answers.items():
        records = records_of(one, node_kube)
        assert [record for record in records if record["status"] != "Success"] == []
        there = [record["asked_at"] for record in records if record["bootstrap"] == bootstrap]
        # Every one of these pictures was for the group that left, so the first that comes elsewhere
        # shows that the gateway has done with it. The truth lies between the two.
        last_s = there[-1] - left_at
        elsewhere_s = min(r["asked_at"] for r in records if r["asked_at"] > there[-1]) - left_at
        pause_s = max(b - a for a, b in itertools.pairwise(at for at in there if at < left_at))
        print(
            f"{name}: {len(one)} requests, none lost; last image for the withdrawn group {last_s:+.2f} s "
            f"after it lost its label, then elsewhere at {elsewhere_s:+.2f} s; before, an image at least "
            f"every {pause_s:.2f} s"
        )
        record_property(f"{name}_last_image_after_withdrawal_s", round(last_s, 2))
        record_property(f"{name}_elsewhere_after_withdrawal_s", round(elsewhere_s, 2))
        assert elsewhere_s < SETTLE_S
