"""Where the pods of a group may run: the user's rules and those of ``placement.topology``."""

from collections.abc import Mapping
from typing import Any

from encodepool_operator.api import labels
from encodepool_operator.api.types import Spec

from . import fill
from .merge import cleaned

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
WEIGHT = 100


def affinity(pool: str, spec: Spec, *templates: Mapping[str, Any]) -> dict[str, Any]:
    """All rules put together: every required term holds, every preferred one counts.

    ``templates`` are affinities of the user, the stronger one last. Terms of a required nodeAffinity
    are alternatives, so there the stronger one stands alone.
    """
    out: dict[str, Any] = {}
    for given in (*templates, _topology(pool, spec)):
        for kind, rules in given.items():
            known = out.setdefault(kind, {})
            for when, terms in rules.items():
                together = isinstance(terms, list) and isinstance(known.get(when), list)
                known[when] = [*known[when], *cleaned(terms)] if together else cleaned(terms)
    return out


def _topology(pool: str, spec: Spec) -> dict[str, Any]:
    topology = spec.placement.topology
    if topology is None:
        return {}

    def rules(*selectors: dict[str, Any]) -> dict[str, Any]:
        terms = [{"labelSelector": selector, "topologyKey": topology.key} for selector in selectors]
        if topology.mode == "Required":
            return {REQUIRED: terms}
        return {PREFERRED: [{"weight": WEIGHT, "podAffinityTerm": term} for term in terms]}

    group = fill.text("{group}")
    out = {}
    if spec.pods_per_group > 1:
        out["podAffinity"] = rules({"matchLabels": {labels.POOL: pool, labels.GROUP: group}})
    if topology.exclusive:
        other_group = _expressions((labels.POOL, "In", [pool]), (labels.GROUP, "NotIn", [group]))
        other_pool = _expressions((labels.POOL, "Exists", []), (labels.POOL, "NotIn", [pool]))
        out["podAntiAffinity"] = rules(other_group, other_pool)
    return out


def _expressions(*parts: tuple[str, str, list[Any]]) -> dict[str, Any]:
    return {
        "matchExpressions": [
            {"key": key, "operator": operator} | ({"values": values} if values else {})
            for key, operator, values in parts
        ]
    }
