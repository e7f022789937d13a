"""Typed values back to the resource's JSON, along the same table that the parser uses."""

from typing import Any

from .field import Field, Kind, Unset
from .fields import SPEC
from .types import Spec


def spec_document(spec: Spec) -> dict[str, Any]:
    """The whole spec as JSON values, defaults and derived values written out."""
    document = _value(SPEC, spec, pods_only=False, sparse=False)
    assert isinstance(document, dict)
    return document


def pod_document(spec: Spec, *, sparse: bool) -> dict[str, Any]:
    """The parts of the spec that reach a group's pods.

    ``sparse`` leaves out what stands at its default, so that a field added to the resource later
    changes nothing for pools that do not use it.
    """
    document = _value(SPEC, spec, pods_only=True, sparse=sparse)
    assert isinstance(document, dict)
    return document


def _value(field: Field, value: Any, *, pods_only: bool, sparse: bool) -> Any:
    if field.kind is Kind.OBJECT and value is not None:
        assert field.shape is not None
        out = {}
        for part in field.shape.fields:
            if pods_only and not part.pods:
                continue
            inner = _value(part, getattr(value, part.attribute), pods_only=pods_only, sparse=sparse)
            if inner is None or (sparse and _is_default(part, inner)):
                continue
            if inner == {} and part.default == {}:
                continue  # nothing of it is set, or nothing of it reaches pods
            if inner == "" and part.default is Unset.UNSET:
                continue  # an unset choice has no spelling in the resource
            out[part.key] = inner
        return out
    if field.kind is Kind.INT_OR_PERCENT and value is not None:
        return str(value) if value.percent else value.value
    if field.kind is Kind.LIST:
        return list(value)
    return dict(value) if field.kind in (Kind.NATIVE, Kind.STRING_MAP) else value


def _is_default(field: Field, value: Any) -> bool:
    """An empty optional object ("emptyDir: {}") is a choice, so it never counts as the default."""
    if field.kind is Kind.LIST:
        return not value
    return bool(value == field.default)
