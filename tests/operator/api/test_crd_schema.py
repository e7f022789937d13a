"""The CRD says what the parser does: defaults, bounds, rules, names; and the files are up to date."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.operator.api.test_field_table import FIELDS
from tests.operator.core.fake_cluster import FakeCluster, manifest

from encodepool_operator.api import crd, labels, native, page, rules, schema
from encodepool_operator.api.document import spec_document
from encodepool_operator.api.field import Kind, Unset
from encodepool_operator.api.parse import parse_pool
from encodepool_operator.api.status_fields import STATUS
from encodepool_operator.core.render import engine, pod

ROOT = Path(__file__).resolve().parents[3]
OBJECT = crd.crd()
(VERSION,) = OBJECT["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]


def nodes(value, path=""):
    """(path, schema) of every schema node."""
    yield path, value
    for key, inner in value.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in value:
            yield from nodes(value[key], f"{path}[*]")


NODES = dict(nodes(SCHEMA))


def defaulted(schema, value):
    """``value`` with defaults filled in as the API server does."""
    if not isinstance(value, dict):
        return value
    out = dict(value)
    for key, inner in schema.get("properties", {}).items():
        if key not in out and "default" in inner:
            out[key] = inner["default"]
        if key in out:
            out[key] = defaulted(inner, out[key])
    return out


def test_generated_files_are_up_to_date():
    assert schema.problems(ROOT) == []


def test_the_check_tells_what_is_stale_and_writes_nothing(tmp_path, capsys):
    assert schema.main(["--check", "--root", str(tmp_path)]) == 1
    assert "crds/encodepools.yaml is not up to date" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert schema.main(["--root", str(tmp_path)]) == 0
    assert schema.main(["--check", "--root", str(tmp_path)]) == 0
    assert yaml.safe_load((tmp_path / schema.CRD_FILE).read_text()) == OBJECT


def test_the_file_is_small_enough_for_kubectl_apply():
    assert (ROOT / schema.CRD_FILE).stat().st_size < 200 * 1024


def test_a_changed_schema_needs_a_new_generation(monkeypatch):
    monkeypatch.setattr(crd, "GENERATIONS", (*crd.GENERATIONS, "0123456789"))
    assert crd.crd()["metadata"]["annotations"][labels.SCHEMA_GENERATION] == str(len(crd.GENERATIONS))
    texts = json.loads(json.dumps(VERSION).replace("Number of groups.", "How many."))
    assert crd.schema_hash(texts) == crd.schema_hash(VERSION), "texts play no part"
    other = json.loads(json.dumps(VERSION).replace('"maximum": 500', '"maximum": 501'))
    assert crd.schema_hash(other) != crd.schema_hash(VERSION)


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        ({}, "lacks annotation"),
        ({labels.SCHEMA_GENERATION: "x"}, "lacks annotation"),
        ({labels.SCHEMA_GENERATION: "0"}, f"of generation 0, this operator's of {len(crd.GENERATIONS)}"),
    ],
)
def test_an_older_schema_on_the_cluster_is_told(served, problem):
    assert problem in crd.served_schema_problem(served)


def test_the_same_schema_and_a_newer_one_are_fine():
    assert crd.served_schema_problem(OBJECT["metadata"]["annotations"]) == ""
    assert crd.served_schema_problem({labels.SCHEMA_GENERATION: "999"}) == ""


def published(schema):
    """The part of the API server's OpenAPI document that is looked at."""
    return {"components": {"schemas": {"dev.encodepool.v1alpha1.EncodePool": schema}}}


def test_fields_that_the_published_schema_lacks_are_told():
    served = json.loads(json.dumps(SCHEMA))
    served["properties"]["metadata"] = {"allOf": [{"$ref": "#/components/schemas/ObjectMeta"}]}
    assert crd.published_schema_problem(published(served)) == ""
    served["properties"]["more"] = {"type": "string"}
    assert crd.published_schema_problem(published(served)) == "", "a newer one serves us"
    del served["properties"]["spec"]["properties"]["model"]["properties"]["revision"]
    assert crd.published_schema_problem(published(served)).startswith(
        "the CustomResourceDefinition lacks spec.model.revision: "
    )
    del served["properties"]["status"]["properties"]["groups"]["items"]["properties"]["index"]
    assert "spec.model.revision and 1 more" in crd.published_schema_problem(published(served))


def test_a_kind_that_is_not_published_yet_is_no_problem():
    assert crd.published_schema_problem({"components": {"schemas": {}}}) == ""
    assert crd.published_schema_problem({}) == ""


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"name": "m"}},
        {"model": {"path": "/m", "cache": {"pvc": {"claimName": "c"}}}, "placement": {"topology": {}}},
        {"model": {"name": "m", "cache": {"emptyDir": {}}}, "rollout": {"maxSurge": "10%"}},
    ],
)
def test_the_schemas_defaults_are_the_parsers(manifest, spec):
    given = manifest() | {"spec": spec}
    filled = defaulted(SCHEMA, given)
    assert filled["spec"] != spec
    assert parse_pool(filled) == parse_pool(given)
    # And there is no default of the parser that the schema lacks, but for empty and derived ones.
    derived = {"ranksPerPod", "protocol"}
    pairs = [(spec_document(parse_pool(given).spec), filled["spec"])]
    while pairs:
        whole, part = pairs.pop()
        for key, value in whole.items():
            if isinstance(value, dict):
                pairs.append((value, part.get(key, {})))
            elif key not in derived and value not in ("", []):
                assert part[key] == value


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[path for path, _ in FIELDS])
def test_every_field_is_in_the_schema_with_its_bounds(path, field):
    node = NODES[f".{path}"]
    assert node["description"] == field.doc
    if field.kind is Kind.INTEGER:
        assert node["minimum"] == field.minimum
        assert node.get("maximum", 2**31 - 1) == field.maximum
    if field.choices:
        assert node["enum"] == list(field.choices)
    if field.default is Unset.REQUIRED:
        assert path.rpartition(".")[2] in NODES[f".{path.rpartition('.')[0]}"]["required"]


@pytest.mark.parametrize("path", [path for path in NODES if path not in ("", ".metadata")])
def test_every_text_list_and_map_is_bounded(path):
    """The API server refuses CEL rules over what may be of any size."""
    node = NODES[path]
    if node.get("x-kubernetes-int-or-string"):
        assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        assert node["maxLength"]
    elif node["type"] == "string":
        assert "maxLength" in node or "enum" in node
    elif node["type"] == "array":
        assert node["maxItems"] > 0
        assert "items" in node
    elif node["type"] == "object":
        assert "properties" in node or node["maxProperties"] > 0


def test_only_the_pod_template_takes_unknown_fields():
    open_nodes = [path for path, node in NODES.items() if node.get("x-kubernetes-preserve-unknown-fields")]
    assert open_nodes == [".spec.podTemplate.spec"]


def test_lists_are_merged_by_the_keys_that_kubernetes_uses():
    keyed = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in NODES.items()
        if node.get("x-kubernetes-list-type") == "map"
    }
    assert keyed[".spec.env"] == keyed[".spec.imagePullSecrets"] == ["name"]
    assert keyed[".status.conditions"] == ["type"]
    assert keyed[".status.groups"] == ["index"]
    for path, keys in keyed.items():
        items = NODES[f"{path}[*]"]
        assert set(keys) <= set(items["required"]), "a key must be there to tell items apart"
    assert NODES[".spec.transfer.ibDevices"]["x-kubernetes-list-type"] == "set"


def test_patterns_of_the_schema_let_an_empty_text_through_where_the_parser_does():
    for path, field in FIELDS:
        if field.kind is Kind.STRING and field.pattern:
            pattern = NODES[f".{path}"]["pattern"]
            assert bool(re.search(pattern, "")) == (field.min_length == 0), path


CEL = [(path, rule) for path, node in NODES.items() for rule in node.get("x-kubernetes-validations", ())]


@pytest.mark.parametrize(("path", "rule"), CEL, ids=[f"{p}{r['fieldPath']}" for p, r in CEL])
def test_every_rule_has_a_message_and_a_field_that_the_schema_knows(path, rule):
    assert set(rule) == {"rule", "message", "fieldPath"}
    assert rule["message"]
    assert "\n" not in rule["message"]
    assert len(rule["message"]) < 200
    assert f"{path}{rule['fieldPath']}" in NODES
    assert rule["rule"].count("(") == rule["rule"].count(")")


def test_every_rule_of_the_parser_is_in_the_schema():
    written = {(f"{path}{rule['fieldPath']}", rule["rule"]) for path, rule in CEL}
    for rule in rules.RULES:
        if rule.cel:
            assert (f".{rule.path}", rule.cel) in written
    assert len(written) == sum(bool(rule.cel) for rule in rules.RULES) + len(rules.FIXED)
    by_schema = [rule.message for rule in rules.RULES if not rule.cel]
    assert by_schema == [
        "must not name a device twice",
        "is required",
        "must not be given twice",
        "unknown field; a pod template has metadata and spec",
        "must be an object",
        "must be a list of objects that have their key",
    ], "the last one is the pod template's, which the schema leaves open"


def test_names_are_limited_by_the_schema_and_not_by_rules():
    name = SCHEMA["properties"]["metadata"]["properties"]["name"]
    assert name == {
        "type": "string",
        "minLength": 1,
        "maxLength": 40,
        "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$",
    }
    assert not any("metadata.name" in rule["rule"] for _, rule in CEL)


def test_names_subresources_and_columns_are_those_of_the_contract():
    assert OBJECT["metadata"]["name"] == "encodepools.encodepool.dev"
    assert OBJECT["spec"]["names"]["shortNames"] == ["epool"]
    assert OBJECT["spec"]["names"]["categories"] == ["all"]
    assert VERSION["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    columns = [column["name"] for column in VERSION["additionalPrinterColumns"]]
    assert columns == ["Desired", "Ready", "Updated", "TP", "Model", "Available", "Age"]
    for column in VERSION["additionalPrinterColumns"]:
        plain = column["jsonPath"].partition("[?")[0]
        assert plain in NODES or plain == ".metadata.creationTimestamp"


def unknown(value, schema, path="status"):
    """Places of ``value`` that the API server would drop, or refuse for their type or length."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]):
        yield f"{path} is a {type(value).__name__}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in schema["properties"]:
                yield f"{path}.{key}"
            else:
                yield from unknown(inner, schema["properties"][key], f"{path}.{key}")
        yield from (f"{path}.{key} is required" for key in schema.get("required", ()) if key not in value)
    elif isinstance(value, list):
        if len(value) > schema["maxItems"]:
            yield f"{path} is too long"
        for item in value:
            yield from unknown(item, schema["items"], f"{path}[]")
    elif isinstance(value, str) and len(value) > schema.get("maxLength", 1e9):
        yield f"{path} is too long"
    elif value not in schema.get("enum", [value]):
        yield f"{path} is {value!r}"


def test_nothing_of_a_status_is_dropped_by_the_schema():
    """What the schema does not know would be written again for ever."""
    cluster = FakeCluster(manifest(replicas=3, restart={"maxRestarts": 4}))
    seen = []
    cluster.before_action.append(lambda action: seen.append(getattr(action, "status", None)))
    cluster.run()
    for group in (0, 0, 0, 1):
        cluster.restart_in_place(cluster.pods_of(group)[0].uid, exit_code=-1)
        cluster.run()
    cluster.lose_node("node-2")
    cluster.edit(image="worker:2")
    cluster.run()
    statuses = [status for status in seen if status]
    assert any(item.get("lastFailure") for status in statuses for item in status.get("groups", ()))
    assert any(item.get("nextRestartTime") for status in statuses for item in status.get("groups", ()))
    problems = {text for status in statuses for text in unknown(status, SCHEMA["properties"]["status"])}
    assert problems == set()


@pytest.mark.parametrize("path", [path for path, _ in page.walk(crd.SPEC)])
def test_every_field_is_documented(path):
    assert f"| `{path}` |" in (ROOT / schema.PAGE_FILE).read_text()


def test_the_page_names_every_rule_and_every_field_of_the_status():
    text = page.page()
    for rule in rules.RULES:
        assert rule.message in text
    for path, _ in page.walk(STATUS):
        assert f"| `{path}` |" in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {3, 4, 7}, "a bar in a cell ends it"


def test_list_keys_of_the_table_are_those_that_templates_are_merged_by():
    for path, field in FIELDS:
        name = path.rpartition(".")[2]
        if field.list_keys:
            assert native.LIST_KEYS[name] == field.list_keys


def test_the_page_names_the_volumes_that_pods_have():
    text = page.page()
    for name, path in (
        (pod.TEMP_VOLUME, engine.TEMP),
        (pod.SHM_VOLUME, "/dev/shm"),
        (pod.MODELS_VOLUME, engine.MODELS),
    ):
        assert f"| `{name}` | `{path}` |" in text


def test_the_example_for_a_cluster_is_a_pool_without_unknown_fields():
    document = yaml.safe_load((ROOT / "examples/tiny-cluster.yaml").read_text())
    pool = parse_pool(document)
    assert pool.spec.replicas == 2
    volumes = {v["name"] for v in pod.template("tiny", "rev", pool.spec)["spec"]["volumes"]}
    (model,) = pool.spec.pod_template["spec"]["initContainers"]
    assert {mount["name"] for mount in model["volumeMounts"]} <= volumes
    assert model["image"] == pool.spec.image
