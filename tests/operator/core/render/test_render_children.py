"""Services, disruption budget, owner, and the marks of a routable leader."""

from dataclasses import replace

import pytest
from tests.operator.core.render.render_pools import POOLS, objects_of, pool_of

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.core.render import children, common, leader, pdb
from encodepool_operator.core.snapshot import Publication

PUBLISHED = Publication(10000, 10001, "acme/vl")


def pool_with(**spec):
    return parse_pool(
        {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodePool",
            "metadata": {"name": "demo", "namespace": "epd", "uid": "u"},
            "spec": {"model": {"name": "m"}} | spec,
        }
    )


@pytest.mark.parametrize("name", POOLS)
def test_every_child_has_the_labels_of_the_contract_and_the_pool_as_controller(name):
    pool = pool_of(name)
    for item in objects_of(pool):
        meta = item["metadata"]
        assert meta["namespace"] == "epd"
        assert {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
            "app.kubernetes.io/managed-by",
            "encodepool.dev/pool",
        } <= meta["labels"].keys()
        assert ("encodepool.dev/group" in meta["labels"]) == (item["kind"] == "StatefulSet")
        assert common.is_owned(item, pool.metadata.uid)
        assert not common.is_owned(item, "another")


def test_gateways_find_the_encode_service_and_not_the_one_for_peers():
    pool = pool_with()
    encode = children.render(pool, "Service", "demo-encode")
    peers = children.render(pool, "Service", "demo-peers")
    assert encode["metadata"]["labels"]["llm-d.ai/role"] == "encode"
    assert "llm-d.ai/role" not in peers["metadata"]["labels"]
    assert encode["spec"]["selector"]["encodepool.dev/routable"] == "true"
    assert encode["spec"]["ports"][0]["name"] == "grpc"
    assert encode["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"
    assert peers["spec"]["publishNotReadyAddresses"] is True
    assert encode["spec"].get("publishNotReadyAddresses") is None
    assert encode["spec"]["clusterIP"] == peers["spec"]["clusterIP"] == "None"


def test_a_family_that_is_asked_for_is_the_services_only_one():
    spec = children.render(pool_with(network={"ipFamily": "IPv6"}), "Service", "demo-encode")["spec"]
    assert (spec["ipFamilies"], spec["ipFamilyPolicy"]) == (["IPv6"], "SingleStack")


@pytest.mark.parametrize(
    ("replicas", "rollout", "least"),
    [
        (0, {}, 0),
        (1, {}, 0),
        (3, {}, 2),
        (10, {"maxUnavailable": "25%"}, 8),
        (4, {"maxUnavailable": 0, "maxSurge": 1}, 3),
        (2, {"maxUnavailable": 5}, 0),
    ],
)
def test_the_budget_leaves_as_many_as_the_rollout_does_but_never_all(replicas, rollout, least):
    built = pdb.build(pool_with(replicas=replicas, rollout=rollout))
    assert built["spec"]["minAvailable"] == least


def test_groups_of_several_pods_have_no_budget():
    pool = pool_with(tensorParallelSize=2, ranksPerPod=1)
    assert pdb.build(pool) is None
    assert [name for _, name in children.wanted(pool)] == ["demo-peers", "demo-encode"]
    with pytest.raises(KeyError):
        children.render(pool, "PodDisruptionBudget", "demo-leaders")


@pytest.mark.parametrize("name", POOLS)
def test_what_is_wanted_is_what_can_be_rendered(name):
    pool = pool_of(name)
    for kind, child in children.wanted(pool):
        built = children.render(pool, kind, child)
        assert (built["kind"], built["metadata"]["name"]) == (kind, child)


def merged(pod, patch):
    """A JSON merge patch, as the API server applies it."""
    out = {key: dict(value) for key, value in pod.items()}
    for part, values in patch.items():
        for key, value in values.items():
            if value is None:
                out[part].pop(key, None)
            else:
                out[part][key] = value
    return out


def test_a_leader_is_marked_and_read_back_and_unmarked():
    pod = {"labels": {"encodepool.dev/pool": "demo"}, "annotations": {}}
    assert leader.read(given=pod["labels"], annotations={}) is None
    marked = merged(pod, leader.patch(PUBLISHED))
    assert marked["labels"]["encodepool.dev/routable"] == "true"
    assert marked["annotations"] == {
        "sglang.ai/bootstrap-port": "10000",
        "smg.ai/worker-ports": "10001",
        "encodepool.dev/model-id": "acme/vl",
    }
    assert leader.read(marked["labels"], marked["annotations"]) == PUBLISHED
    dated = merged(pod, leader.patch(replace(PUBLISHED, at=1800000000.5)))
    assert dated["annotations"]["encodepool.dev/published-at"] == "2027-01-15T08:00:00.500Z"
    read = leader.read(dated["labels"], dated["annotations"])
    assert read is not None
    assert read.at == 1800000000.5
    unmarked = merged(marked, leader.patch(None))
    assert unmarked["labels"] == pod["labels"]
    assert leader.read(unmarked["labels"], unmarked["annotations"]) is None


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("labels", "encodepool.dev/routable", None),
        ("labels", "llm-d.ai/role", "prefill"),
        ("annotations", "smg.ai/worker-ports", "x"),
        ("annotations", "smg.ai/worker-ports", None),
        ("annotations", "encodepool.dev/model-id", "other"),
    ],
)
def test_a_mark_that_somebody_broke_reads_as_one_that_no_plan_wants(part, key, value):
    pod = merged({"labels": {}, "annotations": {}}, leader.patch(PUBLISHED))
    broken = merged(pod, {part: {key: value}})
    read = leader.read(broken["labels"], broken["annotations"])
    assert read is not None
    assert read != PUBLISHED
