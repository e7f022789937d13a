"""The published documents: golden texts, the gateway's rules, who may be listed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.operator.core.fake_cluster import START

from encodepool_operator.core import endpoints
from encodepool_operator.core.endpoints import Endpoint, documents, lines_of, listed_ids, manifest_problems
from encodepool_operator.core.plan import upkeep
from encodepool_operator.core.snapshot import Publication

LISTED = Endpoint(
    "epd/demo/0-3", 0, 3, "10.0.0.5", 10001, 10000, "acme/vl-2b", 2, True, False, "", "node-1", "zone-a"
)
SIX = replace(LISTED, id="epd/demo/1-4", group=1, incarnation=4, host="fd00::5")
AWAY = replace(
    LISTED,
    id="epd/demo/2-5",
    group=2,
    incarnation=5,
    host="",
    ready=False,
    draining=True,
    reason="it is being drained",
    node="",
    zone="",
)

FOLDER = Path(__file__).parent / "golden"
GOLDEN = {
    name: (FOLDER / name).read_text()
    for name in ("workers.json", "endpoints.json", "smg-workers.json", "smg-args")
}


def published(*entries):
    return documents("epd", "demo", "acme/vl-2b", [lines_of("demo", entry) for entry in entries])


def test_the_published_documents_are_these_texts():
    assert published(LISTED, SIX, AWAY) == GOLDEN
    assert manifest_problems(GOLDEN["workers.json"]) == []
    for name in ("workers.json", "endpoints.json", "smg-workers.json"):
        json.loads(GOLDEN[name])


def test_a_pool_without_groups_publishes_empty_lists():
    texts = published()
    assert texts["workers.json"] == '{"version":1,"workers":[]}\n'
    assert json.loads(texts["endpoints.json"])["endpoints"] == []
    assert (texts["smg-workers.json"], texts["smg-args"]) == ("[]\n", "")
    assert manifest_problems(texts["workers.json"]) == []


def test_only_groups_in_the_list_have_their_ids_there():
    assert listed_ids(published(LISTED, SIX, AWAY)) == {"epd/demo/0-3", "epd/demo/1-4"}


@pytest.mark.parametrize(
    "texts", [None, {}, {"workers.json": "{"}, {"workers.json": "[]"}, {"workers.json": '{"workers":3}'}]
)
def test_a_list_that_somebody_broke_lists_nobody(texts):
    assert listed_ids(texts) == frozenset()


WORKER = json.loads(GOLDEN["workers.json"])["workers"][0]


def worker(**change):
    return json.dumps({"version": 1, "workers": [{**WORKER, **change}]})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "exactly the keys version and workers"),
        ('{"workers":[]}', "exactly the keys version and workers"),
        ('{"version":1,"workers":[],"generation":2}', "exactly the keys version and workers"),
        ('{"version":2,"workers":[]}', "version must be 1, is 2"),
        ('{"version":"1","workers":[]}', "version must be 1, is '1'"),
        ('{"version":true,"workers":[]}', "version must be 1, is True"),
        ('{"version":1,"workers":{}}', "workers must be a list"),
        ('{"version":1,"workers":["x"]}', "workers[0]: must have exactly the keys"),
        (worker(labels={}), "workers[0]: must have exactly the keys"),
        (worker(id=""), "workers[0]: id must be a text"),
        (worker(url=""), "workers[0]: url must be a text"),
        (worker(model_id=None), "workers[0]: model_id must be a text"),
        (worker(worker_type="encoder"), "worker_type must be encode, is 'encoder'"),
        (worker(bootstrap_port=70000), "bootstrap_port must be 1 to 65535, is 70000"),
        (worker(bootstrap_port="18995"), "bootstrap_port must be 1 to 65535, is '18995'"),
        (worker(bootstrap_port=0), "bootstrap_port must be 1 to 65535, is 0"),
        (worker(bootstrap_port=True), "bootstrap_port must be 1 to 65535, is True"),
        (worker(bootstrap_port=None), "bootstrap_port must be 1 to 65535, is None"),
        (worker(url="http://10.0.0.5:1"), "url must be grpc://IP:PORT"),
        (worker(url="10.0.0.5:1"), "url must be grpc://IP:PORT"),
        (worker(url="GRPC://10.0.0.5:1"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://10.0.0.5"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://10.0.0.5:0"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://10.0.0.5:99999"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://10.0.0.5:1/"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://demo-peers.epd.svc:1"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://fd00::5:1"), "url must be grpc://IP:PORT"),
        (worker(url="grpc://[10.0.0.5]:1"), "url must be grpc://IP:PORT"),
    ],
)
def test_what_the_gateway_rejects_or_misreads_is_found_before_it_is_written(text, problem):
    assert any(problem in found for found in manifest_problems(text)), manifest_problems(text)


@pytest.mark.parametrize(("second", "key"), [({"url": "grpc://10.0.0.6:1"}, "id"), ({"id": "x"}, "url")])
def test_two_entries_with_one_id_or_one_url_are_found(second, key):
    text = json.dumps({"version": 1, "workers": [WORKER, {**WORKER, **second}]})
    assert manifest_problems(text) == [f"workers[1]: same {key} as workers[0]"]


@pytest.mark.parametrize(
    ("ips", "family", "expected"),
    [
        (("10.0.0.5", "fd00::5"), "", "10.0.0.5"),
        (("10.0.0.5", "fd00::5"), "IPv6", "fd00::5"),
        (("fd00::5", "10.0.0.5"), "IPv4", "10.0.0.5"),
        (("10.0.0.5",), "IPv6", ""),
        (("demo-0.demo-peers",), "", ""),
        ((), "", ""),
    ],
)
def test_the_address_is_an_ip_of_the_wanted_family_and_never_a_name(make_pod, ips, family, expected):
    assert endpoints.address(make_pod(ips=ips), family) == expected


@pytest.mark.parametrize(
    ("pod", "record", "ok"),
    [
        ({}, {}, True),
        ({"ready": False}, {}, False),
        ({"ips": ()}, {}, False),
        ({}, {"draining_since": START}, False),
        ({}, {"withdrawn_at": START - 9.9}, False),
        ({}, {"withdrawn_at": START - 10}, True),
    ],
)
def test_routable_is_proven_ready_with_an_address_and_not_just_withdrawn(
    make_pod, make_group, view_of, make_spec, pod, record, ok
):
    view = view_of(make_group(make_pod(**pod), record=record))
    assert endpoints.routable(view, make_spec(), START) == ok


def test_what_is_published_comes_from_the_record_and_the_spec(make_pod, make_group, view_of, make_spec):
    view = view_of(make_group(make_pod()))
    assert endpoints.publication(view, make_spec()) == Publication(10000, 10001, "acme/vl-2b")
    orphan = replace(view, record=None)
    assert endpoints.publication(orphan, make_spec()) is None
    assert endpoints.relist_at(orphan) is None
    entry = {"ready": False, "draining": False, "reason": "r"}
    assert endpoints.endpoint("epd", "demo", orphan, make_spec(), **entry) is None


def keep_up(pool):
    """As long as the spec cannot be used; the actions, by kind."""
    done = []
    for _ in range(20):
        pool.refresh()
        step = upkeep(pool.snapshot(), ["spec.image: is wrong"], pool.now)
        pool.carry_out(step.actions)
        done += [type(action).__name__ for action in step.actions]
        pool.settle()
        if not step.actions and step.wake_at is None:
            return done
        if not step.actions:
            pool.now = step.wake_at
    raise AssertionError(f"no rest: {done}")


def test_with_a_spec_that_cannot_be_used_the_list_stays_true(cluster):
    pool = cluster(replicas=3)
    pool.run()
    objects = {index: (item.replicas, item.generation) for index, item in pool.sets.items()}
    assert keep_up(pool) == ["WriteStatus"]
    assert pool.condition("Stalled") == ("True", "InvalidSpec")

    # A group that dies leaves list and status, and is neither stopped nor started again.
    pool.restart_in_place(pool.pods_of(0)[0].uid)
    assert keep_up(pool) == ["Withdraw", "WriteEndpoints", "WriteStatus"]
    assert pool.listed() == ["1-2", "2-3"]
    assert {index: (item.replicas, item.generation) for index, item in pool.sets.items()} == objects
    assert [(group["index"], group["phase"]) for group in pool.status["groups"]] == [(0, "Failing")]
    assert pool.status["availableReplicas"] == 2
    assert pool.status["lastIncarnation"] == 3
    assert pool.condition("Ready") == ("False", "InvalidSpec")

    # One that is not ready for a while is withdrawn, and comes back.
    (pod,) = pool.pods_of(1)
    pool.change(pod.uid, ready=False)
    pool.refresh()
    pool.carry_out(upkeep(pool.snapshot(), ["spec.image: is wrong"], pool.now).actions)
    assert pool.listed() == ["2-3"]
    pool.change(pod.uid, ready=True)
    keep_up(pool)
    assert pool.listed() == ["1-2", "2-3"]

    # And with a spec that can be used again all is mended.
    pool.run()
    assert pool.listed() == ["0-4", "1-2", "2-3"]
    assert pool.condition("Ready") == ("True", "Complete")
