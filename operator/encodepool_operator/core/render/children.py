"""The pool's children beside groups, revisions and the list: which there are, and how each looks."""

from typing import Any

from encodepool_operator.api import names
from encodepool_operator.api.types import EncodePool

from . import pdb, services

SERVICE = "Service"
DISRUPTION_BUDGET = "PodDisruptionBudget"


def wanted(pool: EncodePool) -> tuple[tuple[str, str], ...]:
    """(kind, name) of every child, in the order in which they are written."""
    name = pool.metadata.name
    children = [(SERVICE, names.peers_service(name)), (SERVICE, names.encode_service(name))]
    if pool.spec.pods_per_group == 1:
        children.append((DISRUPTION_BUDGET, names.disruption_budget(name)))
    return tuple(children)


def render(pool: EncodePool, kind: str, name: str) -> dict[str, Any]:
    """The whole object. Raises KeyError for a child that is not ``wanted``."""
    built = [services.peers(pool), services.encode(pool), pdb.build(pool)]
    objects = {(str(o["kind"]), str(o["metadata"]["name"])): o for o in built if o is not None}
    return objects[kind, name]
