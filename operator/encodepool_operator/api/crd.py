"""The CustomResourceDefinition, made from the tables of fields and rules."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from . import labels, native, rules
from .field import INT32_MAX, Field, Kind, Unset
from .fields import SPEC
from .names import NAME_LIMIT, NAME_PATTERN
from .status_fields import STATUS

PLURAL = "encodepools"
SINGULAR = "encodepool"
SHORT_NAME = "epool"

GENERATIONS = ("4542bcb178",)
"""Hashes of all schemas that were ever released, the newest last. Their number is the generation that
an operator compares with the one on the cluster, so a change of the schema adds a hash."""

PERCENT_PATTERN = "^(100|[1-9]?[0-9])%$"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    path: str
    doc: str


COLUMNS = (
    Column("Desired", "integer", ".spec.replicas", "Groups that are wanted."),
    Column("Ready", "integer", ".status.readyReplicas", "Groups whose pods are all ready."),
    Column("Updated", "integer", ".status.updatedReplicas", "Groups on the wanted revision."),
    Column("TP", "integer", ".spec.tensorParallelSize", "Ranks of a group."),
    Column("Model", "string", ".status.model", "The served model name."),
    Column(
        "Available",
        "string",
        '.status.conditions[?(@.type=="Available")].status',
        "Whether enough groups are in the published list.",
    ),
    Column("Age", "date", ".metadata.creationTimestamp", "Time since the pool was made."),
)


def crd() -> dict[str, Any]:
    """The whole object, as ``kubectl apply`` takes it."""
    version = {
        "name": labels.API_VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": c.name, "type": c.type, "jsonPath": c.path, "description": c.doc} for c in COLUMNS
        ],
        "schema": {"openAPIV3Schema": _root()},
        "subresources": {
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
            "status": {},
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{labels.API_GROUP}",
            "annotations": {
                labels.SCHEMA_GENERATION: str(len(GENERATIONS)),
                labels.SCHEMA_HASH: schema_hash(version),
            },
        },
        "spec": {
            "group": labels.API_GROUP,
            "names": {
                "kind": labels.KIND,
                "listKind": f"{labels.KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def schema_hash(version: Mapping[str, Any]) -> str:
    """Hash of what a version accepts and stores; its texts play no part."""
    text = json.dumps(_without_texts(version), sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:10]


def served_schema_problem(annotations: Mapping[str, str]) -> str:
    """What is wrong with the schema that the cluster serves, "" if nothing.

    ``annotations`` are those of the CustomResourceDefinition there. An older schema drops fields that
    it does not know without a word; a newer one serves this operator.
    """
    ours = len(GENERATIONS)
    served = annotations.get(labels.SCHEMA_GENERATION, "")
    if not served.isdecimal():
        return f"the CustomResourceDefinition lacks annotation {labels.SCHEMA_GENERATION}: apply crds/ again"
    if int(served) < ours:
        return (
            f"the CustomResourceDefinition is of generation {served}, this operator's of {ours}: apply crds/"
        )
    return ""


def published_schema_problem(document: Mapping[str, Any]) -> str:
    """Like ``served_schema_problem``, from the OpenAPI document that the API server publishes for the
    group: it has all fields and no annotations. It may lack the kind for a moment, which says nothing."""
    schemas = (document.get("components") or {}).get("schemas") or {}
    name = ".".join((*reversed(labels.API_GROUP.split(".")), labels.API_VERSION, labels.KIND))
    if name not in schemas:
        return ""
    there = set(_paths(schemas[name]))
    # The server puts the whole of ObjectMeta in place of what the CRD says of it.
    missing = [path for path in _paths(_root()) if path not in there and not path.startswith("metadata.")]
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"the CustomResourceDefinition lacks {missing[0]}{more}: apply crds/"


def _paths(schema: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every field below, as in ``spec.model.name``."""
    for key, one in (schema.get("properties") or {}).items():
        yield f"{above}{key}"
        yield from _paths(one, f"{above}{key}.")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            yield from _paths(schema[inner], above)


def _root() -> dict[str, Any]:
    name = {"type": "string", "minLength": 1, "maxLength": NAME_LIMIT, "pattern": NAME_PATTERN}
    return {
        "type": "object",
        "description": "A pool of vision-encode workers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "maxLength": 253},
            "kind": {"type": "string", "maxLength": 63},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": schema(SPEC, "spec"),
            "status": schema(STATUS, "status"),
        },
    }


def schema(field: Field, path: str) -> dict[str, Any]:
    """The structural schema of one field; ``path`` finds the rules that look at it as ``self``."""
    out: dict[str, Any] = {"description": field.doc} | _typed(field, path)
    default = default_of(field)
    if default is not None:
        out["default"] = default
    validations = _validations(path)
    if validations:
        out["x-kubernetes-validations"] = validations
    return out


def default_of(field: Field) -> Any:
    """What the API server fills in, None for nothing.

    An empty text, list or map has the same meaning as a key that is left out, so it is not filled in.
    """
    if field.kind is Kind.OBJECT:
        return {} if field.default == {} and field is not SPEC else None
    if isinstance(field.default, Unset) or field.default in ("", (), {}):
        return None
    return field.default


def _typed(field: Field, path: str) -> dict[str, Any]:
    match field.kind:
        case Kind.INTEGER:
            width = "int32" if field.maximum <= INT32_MAX else "int64"
            bounds: dict[str, Any] = {"minimum": field.minimum}
            if field.maximum < INT32_MAX:
                bounds["maximum"] = field.maximum
            return {"type": "integer", "format": width} | bounds
        case Kind.BOOLEAN:
            return {"type": "boolean"}
        case Kind.STRING:
            return _string(field)
        case Kind.INT_OR_PERCENT:
            return {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "minimum": 0,
                "maximum": INT32_MAX,
                "maxLength": 4,
                "pattern": PERCENT_PATTERN,
            }
        case Kind.OBJECT:
            return _object(field, path)
        case Kind.LIST:
            return _list(field, path)
        case Kind.STRING_MAP:
            assert field.item is not None
            values = _string(field.item)
            return {"type": "object", "maxProperties": field.max_length, "additionalProperties": values}
        case Kind.NATIVE:
            return _natively(native.SCHEMAS[field.native], path)


def _string(field: Field) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "string"}
    if field.choices:
        return out | {"enum": list(field.choices)}
    if field.min_length:
        out["minLength"] = field.min_length
    out["maxLength"] = field.max_length
    if field.pattern:
        out["pattern"] = field.pattern if field.min_length else f"^$|{field.pattern}"
    return out


def _object(field: Field, path: str) -> dict[str, Any]:
    assert field.shape is not None
    parts = field.shape.fields
    out: dict[str, Any] = {
        "type": "object",
        "properties": {part.key: schema(part, f"{path}.{part.key}") for part in parts},
    }
    required = [part.key for part in parts if part.default is Unset.REQUIRED]
    return out | {"required": required} if required else out


def _list(field: Field, path: str) -> dict[str, Any]:
    assert field.item is not None
    item = schema(field.item, f"{path}[*]")
    del item["description"]
    out: dict[str, Any] = {"type": "array", "maxItems": field.max_length, "items": item}
    if field.list_keys:
        return out | {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": list(field.list_keys),
        }
    return out | {"x-kubernetes-list-type": "set" if field.unique else "atomic"}


def _natively(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy of a native schema with the rules that belong inside it."""
    out = dict(given)
    properties = given.get("properties")
    if properties is not None:
        inner = {}
        for key, value in properties.items():
            copied = _natively(value, f"{path}.{key}")
            validations = _validations(f"{path}.{key}")
            inner[key] = copied | {"x-kubernetes-validations": validations} if validations else copied
        out["properties"] = inner
    return out


def _validations(path: str) -> list[dict[str, Any]]:
    """CEL rules over the object at ``path``."""
    out = [
        {"rule": rule.cel, "message": rule.message, "fieldPath": rule.field_path}
        for rule in rules.RULES
        if rule.cel and rule.scope == path
    ]
    if path == "spec":
        out += [
            {"rule": fixed.cel, "message": rules.Fixed.message, "fieldPath": f".{fixed.key}"}
            for fixed in rules.FIXED
        ]
    return out


def _without_texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_texts(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, inner in value.items():
        if key == "properties":  # its keys are fields, one of which may be called description
            out[key] = {name: _without_texts(part) for name, part in inner.items()}
        elif key != "description":
            out[key] = _without_texts(inner)
    return out
