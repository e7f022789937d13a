"""Places in a pod template that are filled in per start of a group.

A revision keeps its pod template rendered once; group, incarnation and ports differ per start. A place
is a JSON object with one key that no object of Kubernetes has, so no text of a user is ever taken for
one. A user who writes such a key all the same gets an object that the API server refuses.
"""

from collections.abc import Mapping
from typing import Any

from ..record import GroupRecord

TEXT = "$text"
NUMBER = "$number"

NAMES = ("group", "incarnation", "bootstrap", "grpc", "distInit", "metrics")


def text(pattern: str) -> dict[str, str]:
    """A text in which ``{group}`` and the other ``NAMES`` are filled in."""
    return {TEXT: pattern}


def number(name: str) -> dict[str, str]:
    return {NUMBER: name}


def values_of(group: int, record: GroupRecord) -> dict[str, int]:
    ports = record.ports
    numbers = (group, record.incarnation, ports.bootstrap, ports.grpc, ports.dist_init, ports.metrics)
    return dict(zip(NAMES, numbers, strict=True))


def filled(template: Any, values: Mapping[str, int]) -> Any:
    """A copy of ``template`` with every place filled in."""
    if isinstance(template, dict):
        place = next(iter(template.items())) if len(template) == 1 else ("", None)
        match place:
            case (kind, str(name)) if kind == NUMBER and name in values:
                return values[name]
            case (kind, str(out)) if kind == TEXT:
                for name, value in values.items():
                    out = out.replace(f"{{{name}}}", str(value))
                return out
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(item, values) for item in template]
    return template
