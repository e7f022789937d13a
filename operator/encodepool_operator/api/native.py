"""Schemas of the Kubernetes types that the resource passes on, and how Kubernetes merges lists.

Only as deep as a wrong key can be told from a right one by the API server; the values are checked by
Kubernetes when a pod is made. Everything is bounded, as the cost limit of CEL rules demands.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Schema = dict[str, Any]

LIST_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "containers": ("name",),
        "initContainers": ("name",),
        "env": ("name",),
        "ports": ("containerPort", "protocol"),
        "volumes": ("name",),
        "volumeMounts": ("mountPath",),
        "volumeDevices": ("devicePath",),
        "imagePullSecrets": ("name",),
        "hostAliases": ("ip",),
        "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
        "resourceClaims": ("name",),
        "claims": ("name",),
        "ownerReferences": ("uid",),
    }
)
"""Lists of a pod template whose items Kubernetes tells apart by these keys. Others are one value."""


def list_keys(key: str, item: Any) -> tuple[str, ...]:
    """Keys that tell ``item`` from the others of list ``key``; a port may be a Service's."""
    if key == "ports" and "containerPort" not in item:
        return ("port", "protocol")
    return LIST_KEYS[key]


KEY_DEFAULTS: Mapping[str, Any] = MappingProxyType({"protocol": "TCP"})
"""What Kubernetes fills in for a key that is left out."""

QUANTITY = r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+|[KMGTPE]i|[numkMGTPE])?$"
"""A resource quantity. https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


def _text(max_length: int = 253, **more: Any) -> Schema:
    return {"type": "string", "maxLength": max_length, **more}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    out: Schema = {"type": "object", "properties": properties}
    return out | {"required": list(required)} if required else out


def _list(items: Schema, max_items: int = 64, *keys: str) -> Schema:
    out: Schema = {"type": "array", "maxItems": max_items, "items": items}
    if keys:
        out |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
    return out


def _map(values: Schema, max_properties: int = 64) -> Schema:
    return {"type": "object", "maxProperties": max_properties, "additionalProperties": values}


_BOOLEAN: Schema = {"type": "boolean"}
_QUANTITY: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "maxLength": 64,
    "pattern": QUANTITY,
}
_NAME = _text(253, minLength=1)
_KEY_REF = _object(("name", "key"), name=_NAME, key=_NAME, optional=_BOOLEAN)
_LABEL_VALUE = _text(63)

_REQUIREMENT = _object(("key", "operator"), key=_text(317), operator=_text(16), values=_list(_text(253), 256))
_LABEL_SELECTOR = _object(matchExpressions=_list(_REQUIREMENT), matchLabels=_map(_LABEL_VALUE))
_NODE_TERM = _object(matchExpressions=_list(_REQUIREMENT), matchFields=_list(_REQUIREMENT))
_POD_TERM = _object(
    ("topologyKey",),
    labelSelector=_LABEL_SELECTOR,
    namespaceSelector=_LABEL_SELECTOR,
    namespaces=_list(_text(63)),
    topologyKey=_text(317, minLength=1),
    matchLabelKeys=_list(_text(317)),
    mismatchLabelKeys=_list(_text(317)),
)
_WEIGHT: Schema = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 100}
_POD_AFFINITY = _object(
    requiredDuringSchedulingIgnoredDuringExecution=_list(_POD_TERM),
    preferredDuringSchedulingIgnoredDuringExecution=_list(
        _object(("weight", "podAffinityTerm"), weight=_WEIGHT, podAffinityTerm=_POD_TERM)
    ),
)

SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        "EnvVar": _object(
            ("name",),
            name=_NAME,
            value=_text(32768),
            valueFrom=_object(
                configMapKeyRef=_KEY_REF,
                secretKeyRef=_KEY_REF,
                fieldRef=_object(("fieldPath",), apiVersion=_text(63), fieldPath=_text(512)),
                resourceFieldRef=_object(
                    ("resource",), containerName=_text(63), resource=_text(253), divisor=_QUANTITY
                ),
            ),
        ),
        "EnvFromSource": _object(
            prefix=_text(253),
            configMapRef=_object(("name",), name=_NAME, optional=_BOOLEAN),
            secretRef=_object(("name",), name=_NAME, optional=_BOOLEAN),
        ),
        "Toleration": _object(
            key=_text(317),
            operator=_text(16),
            value=_LABEL_VALUE,
            effect=_text(32),
            tolerationSeconds={"type": "integer", "format": "int64"},
        ),
        "LocalObjectReference": _object(("name",), name=_NAME),
        "ResourceRequirements": _object(
            limits=_map(_QUANTITY, 32),
            requests=_map(_QUANTITY, 32),
            claims=_list(_object(("name",), name=_NAME, request=_text(253)), 16, "name"),
        ),
        "Affinity": _object(
            nodeAffinity=_object(
                requiredDuringSchedulingIgnoredDuringExecution=_object(
                    ("nodeSelectorTerms",), nodeSelectorTerms=_list(_NODE_TERM)
                ),
                preferredDuringSchedulingIgnoredDuringExecution=_list(
                    _object(("weight", "preference"), weight=_WEIGHT, preference=_NODE_TERM)
                ),
            ),
            podAffinity=_POD_AFFINITY,
            podAntiAffinity=_POD_AFFINITY,
        ),
        "PodTemplate": _object(
            metadata=_object(labels=_map(_LABEL_VALUE), annotations=_map(_text(65536))),
            spec={"type": "object", "maxProperties": 128, "x-kubernetes-preserve-unknown-fields": True},
        ),
    }
)
"""By the type's name in Kubernetes' API."""
