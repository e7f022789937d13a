"""The field table, the Python types and the JSON of a spec say the same."""

from dataclasses import fields, is_dataclass

import pytest

from encodepool_operator.api.document import pod_document, spec_document
from encodepool_operator.api.field import Field, Kind, Unset
from encodepool_operator.api.fields import SPEC
from encodepool_operator.api.parse import parse_pool, parse_spec


def walk(field: Field, path: str = "spec"):
    yield path, field
    for part in field.shape.fields if field.shape else ():
        yield from walk(part, f"{path}.{part.key}")


FIELDS = list(walk(SPEC))


@pytest.mark.parametrize(
    ("path", "field"), [item for item in FIELDS if item[1].shape], ids=lambda x: str(x)[:40]
)
def test_every_object_has_a_type_with_the_same_attributes(path, field):
    assert is_dataclass(field.shape.make)
    assert [part.attribute for part in field.shape.fields] == [f.name for f in fields(field.shape.make)]
    assert len({part.key for part in field.shape.fields}) == len(field.shape.fields)


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[path for path, _ in FIELDS])
def test_every_field_is_documented_and_bounded_and_its_default_is_allowed(path, field):
    assert field.doc.endswith("."), "a sentence for docs/api.md"
    assert field.minimum <= field.maximum < 2**31
    assert field.min_length <= field.max_length
    if field.kind is Kind.LIST:
        assert field.item is not None
    if isinstance(field.default, int) and field.kind is Kind.INTEGER:
        assert field.minimum <= field.default <= field.maximum
    if field.choices:
        assert field.default is Unset.UNSET or field.default in field.choices


FULL = {
    "replicas": 3,
    "tensorParallelSize": 4,
    "ranksPerPod": 2,
    "model": {
        "path": "/m",
        "revision": "main",
        "dtype": "bfloat16",
        "tokenSecretRef": {"name": "s", "key": "k"},
        "cache": {"pvc": {"claimName": "c", "subPath": "x", "readOnly": False}},
    },
    "batching": {"maxTokensPerBatch": 1, "maxItemsPerBatch": 2, "maxQueueSeconds": 3},
    "store": {"deviceMiB": 5, "hostMiB": 6},
    "transfer": {"backend": "mooncake", "protocol": "rdma", "ibDevices": ["a"], "timeoutSeconds": 7},
    "network": {
        "hostNetwork": True,
        "portRange": {"start": 20000, "size": 40},
        "metricsPort": 9401,
        "ipFamily": "IPv4",
    },
    "accelerator": {"resourceName": "example.com/gpu", "perRank": 0},
    "rdma": {"resourceName": "rdma/ib", "count": 2, "ipcLock": False},
    "sharedMemory": "1Gi",
    "restart": {
        "backoff": {"baseSeconds": 1, "maxSeconds": 2, "resetSeconds": 3},
        "maxRestarts": 4,
        "startupDeadlineSeconds": 5,
        "lostNodeSeconds": 6,
    },
    "rollout": {
        "maxUnavailable": "50%",
        "maxSurge": 2,
        "partition": 1,
        "paused": True,
        "progressDeadlineSeconds": 9,
    },
    "revisionHistoryLimit": 1,
    "drain": {"timeoutSeconds": 8, "settleSeconds": 9},
    "publish": {"servedModelName": "n"},
    "placement": {
        "topology": {"key": "rack", "mode": "Preferred", "exclusive": True},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "x"}],
        "affinity": {"podAffinity": {}},
        "priorityClassName": "p",
        "schedulerName": "s",
        "runtimeClassName": "r",
    },
    "resources": {"limits": {"cpu": "1"}},
    "image": "i",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "r"}],
    "serviceAccountName": "sa",
    "env": [{"name": "A", "value": "1"}],
    "envFrom": [{"configMapRef": {"name": "c"}}],
    "args": ["--x"],
    "podTemplate": {"metadata": {}},
}


def test_a_spec_that_sets_every_field_comes_back_as_it_was(manifest):
    spec = parse_pool(manifest() | {"spec": FULL}).spec
    document = spec_document(spec)
    document["model"].pop("name")
    assert document == FULL
    assert set(FULL) == {field.key for field in SPEC.shape.fields}, "a field is missing from this test"


def test_a_spec_of_defaults_comes_back_as_the_same_spec(manifest):
    spec = parse_pool(manifest()).spec
    assert parse_spec(spec_document(spec)) == spec


def test_the_pods_parts_leave_out_what_only_the_planner_reads(manifest):
    document = pod_document(parse_pool(manifest() | {"spec": FULL}).spec, sparse=False)
    assert not {"replicas", "rollout", "revisionHistoryLimit"} & set(document)
    assert document["restart"] == {"startupDeadlineSeconds": 5}
    assert document["drain"] == {"timeoutSeconds": 8}


def test_a_sparse_document_holds_only_what_differs_from_the_defaults(manifest):
    document = pod_document(parse_pool(manifest(store={"hostMiB": 7})).spec, sparse=True)
    assert document == {
        "ranksPerPod": 1,
        "model": {"name": "acme/vl-2b"},
        "store": {"hostMiB": 7},
        "transfer": {"protocol": "rdma"},
    }
