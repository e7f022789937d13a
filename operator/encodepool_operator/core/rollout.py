"""Which groups move to the wanted revision now.

A group moves as a whole: it is drained, stopped, and started again with the new revision. Groups that
do not serve move first and cost nothing; of those that serve, as many as ``maxUnavailable`` allows
beside everything else that is down. ``maxSurge`` groups above replicas may run meanwhile; at the end
the last old groups go instead of being started again, so every group is started once.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from encodepool_operator.api.types import IntOrPercent, Rollout

from .group import GroupView


@dataclass(frozen=True, slots=True)
class Budget:
    """Groups that may be down, and groups that may exist above replicas; never both 0."""

    max_unavailable: int
    max_surge: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Groups to drain now: ``free`` do not serve, ``paid`` do and are within the budget."""

    free: tuple[GroupView, ...]
    paid: tuple[GroupView, ...]


def budget(rollout: Rollout, replicas: int) -> Budget:
    """Shares are of ``replicas``: down for maxUnavailable, up for maxSurge, as Deployments do.

    Unset means 0 down and 1 surge with one replica, else 1 down and none. Two zeros would never move
    anything: then one group may be down, or one more may run if maxUnavailable itself says 0.
    """
    single = replicas == 1
    down = rollout.max_unavailable or IntOrPercent(0 if single else 1)
    surge = rollout.max_surge or IntOrPercent(1 if single else 0)
    resolved = Budget(
        min(down.of(replicas, round_up=False), replicas),
        surge.of(replicas, round_up=True),
    )
    if resolved.max_unavailable == 0 and resolved.max_surge == 0:
        return Budget(0, 1) if down.value == 0 and rollout.max_surge is None else Budget(1, 0)
    return resolved


def held(index: int, rollout: Rollout) -> bool:
    """Whether the group keeps its revision: the rollout is paused, or it is below the partition."""
    return rollout.paused or index < rollout.partition


def outdated(views: Sequence[GroupView], target: str, rollout: Rollout) -> list[GroupView]:
    """Groups on another revision that the rollout is to replace."""
    return [
        view
        for view in views
        if view.record is not None and view.record.revision != target and not held(view.index, rollout)
    ]


def surge(views: Sequence[GroupView], target: str, rollout: Rollout, allowed: Budget) -> int:
    """Groups above replicas that may exist now: no more than there are old ones still running."""
    old = sum(view.running for view in outdated(views, target, rollout))
    return min(allowed.max_surge, old)


def moves(
    candidates: Sequence[GroupView],
    listed: AbstractSet[int],
    replicas: int,
    allowed: Budget,
) -> Moves:
    """Choose among ``candidates``: old, running groups that are not going away already.

    ``listed``: indices of the groups that serve now and will go on doing so. Highest index first.
    """
    ordered = sorted(candidates, key=lambda view: -view.index)
    free = tuple(view for view in ordered if not view.ready)
    ready = [view for view in ordered if view.ready]
    room = len(listed) - (replicas - allowed.max_unavailable)
    return Moves(free, tuple(ready[: max(room, 0)]))
