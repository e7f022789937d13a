"""The PodDisruptionBudget on a pool's leaders, for pools whose groups are one pod."""

from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool

from .. import rollout
from . import common


def build(pool: EncodePool) -> dict[str, Any] | None:
    """None where a group is several pods: evicting any of them takes the group, which no budget over
    single pods can say.

    The least number is an integer, so that groups which are stopped count as down. One group at
    least may always be evicted, else a node could never be drained.
    """
    meta, spec = pool.metadata, pool.spec
    if spec.pods_per_group > 1:
        return None
    down = max(1, rollout.budget(spec.rollout, spec.replicas).max_unavailable)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": common.metadata(meta, names.disruption_budget(meta.name)),
        "spec": {
            "minAvailable": max(0, spec.replicas - down),
            "selector": {"matchLabels": {labels.POOL: meta.name, labels.POD_INDEX: "0"}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
