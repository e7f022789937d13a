"""What a real API server accepts and refuses of a pool, and that it is what the parser does.

Documents are created without effect (``dryRun=All``) and strictly, as kubectl does by default.
"""

import asyncio
import json
import re

import pytest
from kubernetes.client.exceptions import ApiException
from tests.cluster.operator_stage import GROUP, PLURAL, VERSION, Pools, apply_definition
from tests.operator.api import rule_tables

from encodepool_operator.api.document import spec_document
from encodepool_operator.api.parse import InvalidPool, parse_pool
from encodepool_operator.api.rules import FIXED, RULES, Fixed
from encodepool_operator.kube.client import FIELD_MANAGER, Client
from encodepool_operator.kube.kinds import POOL

NOT_CHECKED = "some validation rules were not checked"
"""What the server adds where the schema refuses already, so that CEL rules were not asked."""


@pytest.fixture(scope="module")
def definition(kube):
    apply_definition(kube)


@pytest.fixture
def pools(kube, definition, namespace):
    return Pools(kube, namespace)


def manifest(name="demo", **spec):
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EncodePool",
        "metadata": {"name": name},
        "spec": {"model": {"name": "acme/vl-2b"}, **spec},
    }


@pytest.fixture
def ask(pools):
    """``ask(manifest)``: the object that would be stored. Raises ApiException."""

    def create(document):
        return pools.custom.create_namespaced_custom_object(
            GROUP, VERSION, pools.namespace, PLURAL, document, dry_run="All", field_validation="Strict"
        )

    return create


def complaints(error):
    """(field, message) of everything that the server refuses; a field that it does not know is one."""
    body = json.loads(error.body)
    if error.status == 400:
        return [(field, "unknown field") for field in re.findall(r'unknown field "([^"]+)"', body["message"])]
    assert error.status == 422, body
    found = [(one["field"], one["message"]) for one in body["details"]["causes"]]
    return [(field, message) for field, message in found if NOT_CHECKED not in message]


def refused(ask, document):
    """What the server complains of, and the fields that the parser does; both must refuse."""
    with pytest.raises(ApiException) as server:
        ask(document)
    with pytest.raises(InvalidPool) as parser:
        parse_pool(document)
    return complaints(server.value), [problem.path for problem in parser.value.problems]


def rule_of(problem):
    """The rule whose path and message a problem of the parser begins with."""
    (found,) = (
        rule
        for rule in RULES
        if re.match(re.escape(rule.path).replace(r"\*", r"[^:]+") + ": " + re.escape(rule.message), problem)
    )
    return found


def test_every_rule_is_told_at_its_field_with_its_message(ask):
    hit = set()
    for spec, problem in rule_tables.BROKEN:
        rule = rule_of(problem)
        if rule.path == "spec.podTemplate.spec.*":
            ask(manifest(**spec))  # the schema leaves this part open, so only the parser tells
            continue
        found, (path,) = refused(ask, manifest(**spec))
        if rule.cel:
            assert found == [(path, f"Invalid value: {rule.message}")]
        else:
            # The schema's own words, at the field or at the item that has it.
            (field, _) = found[0]
            assert len(found) == 1
            assert path == field or path.startswith(f"{field}.") or field.startswith(f"{path}["), found
        hit.add(rule)
    assert hit >= {rule for rule in RULES if rule.cel}


def test_what_comes_close_to_a_rule_is_taken_and_means_the_same(ask):
    for spec in (*rule_tables.CLOSE, {}, {"tensorParallelSize": 4, "ranksPerPod": 2}, {"replicas": 500}):
        document = manifest(**spec)
        stored = ask(document)
        assert parse_pool(stored).spec == parse_pool(document).spec


def test_the_server_fills_in_the_defaults_that_the_parser_has(ask):
    document = manifest(model={"path": "/m"}, placement={"topology": {}})
    stored = ask(document)["spec"]
    assert (stored["replicas"], stored["network"]["portRange"]["start"]) == (1, 10000)
    assert stored["placement"]["topology"]["mode"] == "Required"
    derived = {"ranksPerPod", "protocol"}
    pairs = [(spec_document(parse_pool(document).spec), stored)]
    while pairs:
        whole, part = pairs.pop()
        for key, value in whole.items():
            if isinstance(value, dict):
                pairs.append((value, part.get(key, {})))
            elif key not in derived and value not in ("", []):
                assert part[key] == value


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ({"replica": 2}, ["spec.replica"]),
        (
            {"model": {"name": "m", "Path": "/m"}, "drain": {"seconds": 1}},
            ["spec.model.Path", "spec.drain.seconds"],
        ),
        ({"podTemplate": {"containers": []}}, ["spec.podTemplate.containers"]),
    ],
)
def test_unknown_fields_are_reported(ask, spec, fields):
    found, paths = refused(ask, manifest(**spec))
    assert sorted(field for field, _ in found) == sorted(paths) == sorted(fields)


def test_an_unknown_field_of_a_native_object_is_reported_by_the_server_alone(ask):
    with pytest.raises(ApiException) as caught:
        ask(manifest(env=[{"name": "A", "valu": "x"}]))
    assert complaints(caught.value) == [("spec.env[0].valu", "unknown field")]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"replicas": 501}, "spec.replicas"),
        ({"replicas": -1}, "spec.replicas"),
        ({"replicas": "two"}, "spec.replicas"),
        ({"tensorParallelSize": 0}, "spec.tensorParallelSize"),
        ({"tensorParallelSize": 65}, "spec.tensorParallelSize"),
        ({"model": {"name": "m", "dtype": "int8"}}, "spec.model.dtype"),
        ({"model": {"name": "m" * 513}}, "spec.model.name"),
        ({"model": {"name": "m", "tokenSecretRef": {"name": "s"}}}, "spec.model.tokenSecretRef.key"),
        ({"model": {"name": "m", "cache": {"hostPath": {"path": "x"}}}}, "spec.model.cache.hostPath.path"),
        ({"transfer": {"ibDevices": [f"d{i}" for i in range(17)]}}, "spec.transfer.ibDevices"),
        ({"transfer": {"ibDevices": ["a b"]}}, "spec.transfer.ibDevices[0]"),
        ({"batching": {"maxItemsPerBatch": 0}}, "spec.batching.maxItemsPerBatch"),
        ({"sharedMemory": "1 GB"}, "spec.sharedMemory"),
        ({"rollout": {"maxSurge": "101%"}}, "spec.rollout.maxSurge"),
        ({"rollout": {"maxUnavailable": -1}}, "spec.rollout.maxUnavailable"),
        ({"rollout": {"paused": "yes"}}, "spec.rollout.paused"),
        ({"env": [{"name": f"A{i}"} for i in range(257)]}, "spec.env"),
        ({"args": ["x"] * 257}, "spec.args"),
        ({"placement": {"nodeSelector": {"a": "x" * 64}}}, "spec.placement.nodeSelector.a"),
    ],
)
def test_limits_are_those_of_the_parser(ask, spec, field):
    found, paths = refused(ask, manifest(**spec))
    assert paths == [field]
    # The scale subresource complains of the same field once more, in its own spelling.
    assert {where.removeprefix(".") for where, _ in found} == {field}, found


@pytest.mark.parametrize("name", ["x" * 41, "1a", "a.b", "a-"])
def test_names_that_no_child_could_bear_are_refused(ask, name):
    found, paths = refused(ask, manifest(name))
    assert paths == ["metadata.name"]
    assert {field for field, _ in found} == {"metadata.name"}


def test_what_decides_the_shape_of_a_group_stays_as_it_is(pools):
    pools.custom.create_namespaced_custom_object(
        GROUP, VERSION, pools.namespace, PLURAL, manifest(replicas=0, tensorParallelSize=4)
    )

    def change(**spec):
        return pools.custom.patch_namespaced_custom_object(
            GROUP, VERSION, pools.namespace, PLURAL, "demo", {"spec": spec}, dry_run="All"
        )

    changes = {
        "tensorParallelSize": {"tensorParallelSize": 8, "ranksPerPod": 4},
        "ranksPerPod": {"ranksPerPod": 2},
    }
    assert set(changes) == {fixed.key for fixed in FIXED}
    for key, spec in changes.items():
        with pytest.raises(ApiException) as caught:
            change(**spec)
        assert complaints(caught.value) == [(f"spec.{key}", f"Invalid value: {Fixed.message}")]
    # To write down what was derived changes nothing; and everything else may change.
    assert change(ranksPerPod=4, replicas=3, image="other:1")["spec"]["replicas"] == 3


def owned(obj, manager):
    """Top-level fields of ``obj``, and those of its spec, that this manager owns."""
    fields = [entry["fieldsV1"] for entry in obj["metadata"]["managedFields"] if entry["manager"] == manager]
    return {
        f"{top}.{key}".replace("f:", "").removesuffix(".")
        for one in fields
        for top, inner in one.items()
        for key in (inner if top == "f:spec" else [""])
        if key != "."
    }


def test_three_who_apply_do_not_fight(cluster, pools):
    async def story():
        async with await cluster.aio_client() as api:
            ours = Client(api.configuration)

            async def apply(manager, spec):
                body = manifest() | {"spec": spec}
                return await ours._send(
                    "patch",
                    "PATCH",
                    POOL.path(pools.namespace, "demo"),
                    query={"fieldManager": manager, "force": "false"},  # a conflict would be 409
                    body=body,
                    content_type="application/apply-patch+yaml",
                )

            async def tell(**status):
                obj = {"metadata": {"namespace": pools.namespace, "name": "demo"}, "status": status}
                return await ours.apply(POOL, obj, subresource="status")

            try:
                model = {"model": {"name": "acme/vl-2b"}, "image": "worker:1"}
                await apply("person", model)
                await apply("scaler", {"replicas": 3})
                told = await tell(replicas=1, readyReplicas=1)
                assert told["spec"]["replicas"] == 3
                await apply("person", model | {"image": "worker:2"})
                await apply("scaler", {"replicas": 2})
                last = await tell(replicas=3, readyReplicas=2)
                # Everybody says again what they said: nothing is written, so nobody is woken.
                for again in (
                    await apply("person", model | {"image": "worker:2"}),
                    await apply("scaler", {"replicas": 2}),
                    await tell(replicas=3, readyReplicas=2),
                ):
                    assert again["metadata"]["resourceVersion"] == last["metadata"]["resourceVersion"]
                return last
            finally:
                await ours.close()

    obj = asyncio.run(story())
    assert (obj["spec"]["replicas"], obj["spec"]["image"]) == (2, "worker:2")
    assert (obj["status"]["replicas"], obj["status"]["readyReplicas"]) == (3, 2)
    assert owned(obj, "person") == {"spec.model", "spec.image"}
    assert owned(obj, "scaler") == {"spec.replicas"}
    assert owned(obj, FIELD_MANAGER) == {"status"}
