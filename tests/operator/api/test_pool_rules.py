"""Rules that need more than one field, and names."""

import pytest

from encodepool_operator.api import labels, names
from encodepool_operator.api.parse import InvalidPool, parse_pool
from encodepool_operator.api.rules import refused_changes

MODEL = {"name": "m"}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"model": {}}, "spec.model: needs name (on the model hub) or path (a folder)"),
        ({"model": {"name": "a", "path": "/b"}}, "spec.model: must have only one of name and path"),
        ({"model": {"path": "//"}}, "spec.model.path: must name a folder, is '//'"),
        (
            {"model": {"name": "a", "cache": {"emptyDir": {}, "hostPath": {"path": "/x"}}}},
            "spec.model.cache: must have only one of pvc, hostPath and emptyDir",
        ),
        (
            {"tensorParallelSize": 4, "ranksPerPod": 3},
            "spec.ranksPerPod: must divide tensorParallelSize (4), is 3",
        ),
        (
            {"transfer": {"backend": "tcp", "protocol": "rdma"}},
            "spec.transfer.protocol: must be tcp with backend tcp, is 'rdma'",
        ),
        (
            {"transfer": {"protocol": "tcp", "ibDevices": ["mlx5_0"]}},
            "spec.transfer.ibDevices: may be set only with protocol rdma",
        ),
        (
            {"transfer": {"ibDevices": ["mlx5_0", "mlx5_0"]}},
            "spec.transfer.ibDevices: must not name a device twice",
        ),
        (
            {"network": {"portRange": {"start": 65000, "size": 1000}}},
            "spec.network.portRange: must end at 65535, ends at 65999",
        ),
        (
            {"network": {"portRange": {"start": 29999, "size": 4}}},
            "spec.network.portRange: must stay out of 30000-32767 (NodePorts), is 29999-30002",
        ),
        (
            {"network": {"portRange": {"start": 60000, "size": 100}}},
            "spec.network.portRange: must stay out of 32768-60999 (outgoing connections), is 60000-60099",
        ),
        (
            {"network": {"metricsPort": 10000}},
            "spec.network.metricsPort: must lie outside portRange, is 10000",
        ),
        (
            {"restart": {"backoff": {"baseSeconds": 20, "maxSeconds": 10}}},
            "spec.restart.backoff.maxSeconds: must be at least baseSeconds (20), is 10",
        ),
        (
            {"rollout": {"maxUnavailable": 0, "maxSurge": "0%"}},
            "spec.rollout.maxUnavailable: must not be 0 while maxSurge is 0: no group could ever move",
        ),
        ({"env": [{"value": "x"}]}, "spec.env[0].name: is required"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, "spec.env[1].name: must not be given twice, is 'A'"),
        (
            {"podTemplate": {"containers": []}},
            "spec.podTemplate.containers: unknown field; a pod template has metadata and spec",
        ),
        ({"podTemplate": {"spec": 5}}, "spec.podTemplate.spec: must be an object"),
    ],
)
def test_a_broken_rule_is_told_at_its_field(manifest, spec, problem):
    with pytest.raises(InvalidPool) as caught:
        parse_pool(manifest(**spec))
    assert [str(found) for found in caught.value.problems] == [problem]


@pytest.mark.parametrize(
    "spec",
    [
        {"network": {"portRange": {"start": 61000, "size": 4000}}},
        {"network": {"portRange": {"start": 29000, "size": 1000}}},
        {"rollout": {"maxUnavailable": 0}},
        {"rollout": {"maxUnavailable": 0, "maxSurge": 1}},
        {"transfer": {"ibDevices": ["mlx5_0"]}},
        {"model": {"name": "a", "cache": {"hostPath": {"path": "/x"}}}},
        {"podTemplate": {"spec": {"hostPID": True}}},
    ],
)
def test_what_looks_close_to_a_rule_may_pass(manifest, spec):
    parse_pool(manifest(**spec))


def test_the_shape_of_a_group_cannot_be_changed(manifest):
    old = parse_pool(manifest(tensorParallelSize=4)).spec
    new = parse_pool(manifest(tensorParallelSize=4, ranksPerPod=2, replicas=9)).spec
    assert refused_changes(old, old) == []
    assert refused_changes(old, new) == [
        ("spec.ranksPerPod", "cannot be changed (from 4 to 2); make another pool")
    ]


@pytest.mark.parametrize("name", ["a", "demo", "a-1", "x" * 40])
def test_good_names(name):
    assert names.name_problem(name) is None


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "x" * 41, "a\n"])
def test_bad_names(name):
    assert names.name_problem(name)


def test_the_longest_names_still_fit_into_a_label():
    assert len(names.pod("x" * names.NAME_LIMIT, 499, 63)) <= 63
    assert len(names.revision_object("x" * names.NAME_LIMIT, "0123456789")) <= 63


def test_names_of_children():
    assert names.group_object("demo", 3) == "demo-3"
    assert names.peers_service("demo") == "demo-peers"
    assert names.encode_service("demo") == "demo-encode"
    assert names.endpoints_config_map("demo") == "demo-endpoints"
    assert names.endpoint_id("epd", "demo", 2, 14) == "epd/demo/2-14"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"model": {"name": "acme/vl"}, "publish": {"servedModelName": "vl"}}, "vl"),
        ({"model": {"name": "acme/vl"}}, "acme/vl"),
        ({"model": {"path": "/models/tiny/"}}, "tiny"),
        ({"model": {"path": "tiny"}}, "tiny"),
    ],
)
def test_the_served_name_is_chosen_or_the_hub_name_or_the_folder(manifest, spec, name):
    assert names.served_model_name(parse_pool(manifest(**spec)).spec) == name


def test_labels_of_a_child_name_its_pool_and_group():
    assert labels.child_labels("demo", 3) == {
        "app.kubernetes.io/name": "encodepool",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "encode",
        "app.kubernetes.io/managed-by": "encodepool-operator",
        "encodepool.dev/pool": "demo",
        "encodepool.dev/group": "3",
    }
    assert "encodepool.dev/group" not in labels.child_labels("demo")
