"""Wrong values are refused before anything is installed, each with a message that names the value."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "encodepool"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a value that is not known": ({"replica": 2}, "at '': additional properties 'replica' not allowed"),
    "one below another": (
        {"image": {"repository": "a", "version": "1"}},
        "at '/image': additional properties 'version' not allowed",
    ),
    "scope": ({"scope": "all"}, "at '/scope': value must be one of 'cluster', 'namespace'"),
    "no scope": ({"scope": None}, "at '': missing property 'scope'"),
    "a namespace's name": (
        {"scope": "namespace", "watchNamespaces": ["Team_A"]},
        "at '/watchNamespaces/0': 'Team_A' does not match pattern",
    ),
    "namespaces as one text": (
        {"scope": "namespace", "watchNamespaces": "a,b"},
        "at '/watchNamespaces': got string, want array",
    ),
    "a namespace twice": (
        {"scope": "namespace", "watchNamespaces": ["a", "a"]},
        "at '/watchNamespaces': items at 0 and 1 are equal",
    ),
    "crds.install": (
        {"crds": {"install": "yes"}},
        "at '/crds/install': value must be one of 'auto', true, false",
    ),
    "crds.keep": ({"crds": {"keep": "yes"}}, "at '/crds/keep': got string, want boolean"),
    "no replicas": ({"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
    "too many replicas": ({"replicas": 6}, "at '/replicas': maximum: got 6, want 5"),
    "a tag in the repository": (
        {"image": {"repository": "encodepool/operator:v1"}},
        "at '/image/repository': 'encodepool/operator:v1' does not match pattern",
    ),
    "no image": (
        {"image": {"repository": ""}},
        "at '/image/repository': '' does not match pattern",
    ),
    "a tag that is a number": ({"image": {"tag": 1.2}}, "at '/image/tag': got number, want string"),
    "a digest cut short": (
        {"image": {"digest": "sha256:0123"}},
        "at '/image/digest': 'sha256:0123' does not match pattern",
    ),
    "pullPolicy": (
        {"image": {"pullPolicy": "Sometimes"}},
        "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
    ),
    "pull secrets as texts": (
        {"imagePullSecrets": ["pull"]},
        "at '/imagePullSecrets/0': got string, want object",
    ),
    "the worker's image": (
        {"workerImage": {"repository": "Worker"}},
        "at '/workerImage/repository': 'Worker' does not match pattern",
    ),
    "logLevel": (
        {"logLevel": "verbose"},
        "at '/logLevel': value must be one of 'debug', 'info', 'warning', 'error'",
    ),
    "the account's name": (
        {"serviceAccount": {"name": "-x"}},
        "at '/serviceAccount/name': '-x' does not match pattern",
    ),
    "an annotation that is no text": (
        {"serviceAccount": {"annotations": {"a": 1}}},
        "at '/serviceAccount/annotations/a': got number, want string",
    ),
    "root": ({"runAsUser": 0}, "at '/runAsUser': minimum: got 0, want 1"),
    "root's group": ({"runAsGroup": 0}, "at '/runAsGroup': minimum: got 0, want 1"),
    "no quantity": (
        {"resources": {"limits": {"memory": "lots"}}},
        "at '/resources/limits/memory': 'lots' does not match pattern",
    ),
    "no duration": (
        {"metrics": {"serviceMonitor": {"interval": "30"}}},
        "at '/metrics/serviceMonitor/interval': '30' does not match pattern",
    ),
    "no port": (
        {"networkPolicy": {"apiServer": {"ports": [70000]}}},
        "at '/networkPolicy/apiServer/ports/0': maximum: got 70,000, want 65,535",
    ),
    "ports none": (
        {"networkPolicy": {"apiServer": {"ports": []}}},
        "at '/networkPolicy/apiServer/ports': minItems: got 0, want 1",
    ),
    "an address without its length": (
        {"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1"]}}},
        "at '/networkPolicy/apiServer/cidrs/0': '10.0.0.1' does not match pattern",
    ),
    "a toleration misspelt": (
        {"tolerations": [{"keys": "a"}]},
        "at '/tolerations/0': additional properties 'keys' not allowed",
    ),
    "an affinity misspelt": (
        {"affinity": {"nodeAffinty": {}}},
        "at '/affinity': additional properties 'nodeAffinty' not allowed",
    ),
    "a variable without a name": (
        {"extraEnv": [{"value": "1"}]},
        "at '/extraEnv/0': missing property 'name'",
    ),
    "a mount without a path": (
        {"extraVolumeMounts": [{"name": "a"}]},
        "at '/extraVolumeMounts/0': missing property 'mountPath'",
    ),
    "a relative mount": (
        {"extraVolumeMounts": [{"name": "a", "mountPath": "a"}]},
        "at '/extraVolumeMounts/0/mountPath': 'a' does not match pattern",
    ),
    "a name too long": (
        {"fullnameOverride": "x" * 51},
        "at '/fullnameOverride': maxLength: got 51, want 50",
    ),
    # Two values that do not go together: said in words, by the templates.
    "namespaces in cluster scope": (
        {"watchNamespaces": ["a"]},
        "watchNamespaces is for scope: namespace; with scope: cluster all namespaces are watched.",
    ),
    "rights for the account of everybody": (
        {"serviceAccount": {"create": False}},
        "serviceAccount.create is false: set serviceAccount.name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_with_a_message(helm: Any, tmp_path: Path, case: str) -> None:
    values, message = REFUSED[case]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert message in helm.refusal("--values", file)


def test_every_value_is_checked(helm: Any, tmp_path: Path) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    paths = [path for path, _ in runpy.run_path(str(CHART / "generate.py"))["leaves"](schema)]
    wrong: dict[str, Any] = {}
    for path in paths:
        place = wrong
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = 0.5  # what no value may be
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(wrong))
    refusal = helm.refusal("--values", file)
    assert len(paths) > 40
    assert [path for path in paths if f"at '/{'/'.join(path)}': " not in refusal] == []


def objects_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object, by its place."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path or "/", schema
        for key, one in schema.items():
            yield from objects_of(one, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from objects_of(one, f"{path}/{number}")


def test_no_object_takes_unknown_keys_but_those_that_kubernetes_checks() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = dict(objects_of(schema))
    assert found.pop("/definitions/native") == {
        "$comment": "An object of Kubernetes' own, which the API server checks.",
        "type": "object",
    }
    for name in ("texts", "quantities"):  # maps from any key to a checked value
        assert isinstance(found.pop(f"/definitions/{name}")["additionalProperties"], dict)
    assert len(found) > 15
    assert [path for path, one in found.items() if one.get("additionalProperties") is not False] == []


def test_a_chart_that_contains_this_one_may_hand_down_what_helm_adds(helm: Any, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / "encodepool").symlink_to(CHART)
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0"}
    chart["dependencies"] = [  # type: ignore[assignment]
        {"name": "encodepool", "version": ">=0", "condition": "encodepool.enabled"}
    ]
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (parent / "values.yaml").write_text(
        yaml.safe_dump({"global": {"registry": "x"}, "encodepool": {"enabled": True, "replicas": 1}})
    )
    objects = helm.objects(chart=parent)
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 1
