"""Whoever reads a pool's list, and however, finds the same workers: at every step of a pool's life."""

import copy
import ipaddress
import json
import shlex

import pytest
from tests.consumers.published import MODEL, NAMESPACE, POOL, SCENARIOS, story
from tests.consumers.smg_rules import Selector, Worker, bracketed, from_api, from_args, from_file, from_pods

from encodepool_operator.api import labels
from encodepool_operator.core.consumer import ways

NAMES = [scenario.name for scenario in SCENARIOS]
FLAGS = next(way.flags for way in ways(NAMESPACE, POOL) if way.key == "smg").split()


def decoys(pods):
    """Pods that look like ours and are not to be taken; those of the other pool are routable."""
    out = []
    for change in (
        {"labels": {labels.POOL: "other", labels.ROUTABLE: "true", labels.ROLE: "encode"}},
        {"namespace": "elsewhere"},
        {"labels": {labels.ROUTABLE: None}},
        {"labels": {labels.ROUTABLE: "false"}},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ):
        for pod in pods:
            decoy = copy.deepcopy(pod)
            new = dict(change)
            decoy["metadata"]["labels"] |= new.pop("labels", {})
            decoy["metadata"] |= new
            out.append(decoy)
    return out


def from_service(pods, service):
    """What EndpointSlices of the Service hold: (url of the gRPC port, bootstrap port)."""
    [family] = service["spec"].get("ipFamilies", [""])
    ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert next(iter(ports)) == "grpc", "some take the first port"
    taken = set()
    for pod in pods:
        ready = all(c["status"] == "True" for c in pod["status"]["conditions"])
        if not ready or "deletionTimestamp" in pod["metadata"]:
            continue
        if not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items():
            continue
        numbers = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
        ip = next(
            item["ip"]
            for item in pod["status"]["podIPs"]
            if family in ("", f"IPv{ipaddress.ip_address(item['ip']).version}")
        )
        taken.add((f"grpc://{bracketed(ip)}:{numbers[ports['grpc']]}", numbers[ports["bootstrap"]]))
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_every_reading_yields_the_same_workers(name):
    for moment in story(name):
        expected = frozenset(Worker("encode", url, port) for url, port in moment.ready())
        documents = moment.documents
        readings = {
            "file": from_file(documents["workers.json"]),
            "command line": from_args(shlex.split(documents["smg-args"])),
            "API": from_api(json.loads(documents["smg-workers.json"])),
            "pods": from_pods(moment.pods, Selector.from_flags(FLAGS)),
        }
        assert readings == dict.fromkeys(readings, expected), moment
        assert from_service(moment.pods, moment.service) == moment.ready(), moment


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_names_the_model_that_the_worker_serves(name):
    """The gateway pairs encode with prefill by this name; it is in the worker's flags too."""
    for moment in story(name):
        entries = json.loads(moment.documents["workers.json"])["workers"]
        bodies = json.loads(moment.documents["smg-workers.json"])
        assert {entry["model_id"] for entry in entries} <= {MODEL}
        assert {body["labels"]["served_model_name"] for body in bodies} <= {MODEL}
        for pod in moment.pods:
            assert f"--served-model-name={MODEL}" in pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("name", NAMES)
def test_a_decoy_pod_is_never_taken(name):
    selector, started = Selector.from_flags(FLAGS), story(name)[0]
    assert len(started.ready()) == 3
    looking_alike = decoys(started.pods)
    assert from_pods(started.pods, selector) != frozenset()
    assert from_pods(looking_alike, selector) == frozenset()
    # A Service sees its own namespace only.
    near = [pod for pod in looking_alike if pod["metadata"]["namespace"] == NAMESPACE]
    assert from_service(near, started.service) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_stories_are_what_they_are_called(name):
    """Else the tests above would compare empty sets."""
    started, *rollout, zero = [moment.ready() for moment in story(name)]
    assert (len(started), len(zero)) == (3, 0)
    assert {len(ready) for ready in rollout} == {2, 3}, "one group at a time"
    assert len(frozenset().union(started, *rollout)) == 6, "every start has an address of its own"
    first = story(name)[0]
    pods = 6 if name == "TP 4 on two pods" else 3
    assert len(first.pods) == pods
    assert all(("[::1]" in url) == ("IPv6" in name) for url, _ in started)
