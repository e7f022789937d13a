"""Which groups go when there are too many, and when a group that still serves may be stopped."""

from collections.abc import Sequence

from .group import GroupView


def victims(views: Sequence[GroupView], count: int, outdated: frozenset[int]) -> list[GroupView]:
    """The ``count`` groups to remove, first to go first.

    A group that is already draining stays the victim; then broken ones (stopped before running),
    then those in ``outdated`` (on a revision that the rollout would replace), then the highest index.
    """

    def order(view: GroupView) -> tuple[bool, bool, bool, bool, int]:
        return (
            not view.draining,
            view.running,
            view.ready,
            view.index not in outdated,
            -view.index,
        )

    return sorted(views, key=order)[: max(count, 0)]


def settled_at(view: GroupView, settle_s: float) -> float | None:
    """When a withdrawn group may be stopped: gateways finish what they have sent.

    None when nothing of this incarnation was ever withdrawn, so nobody has to settle.
    """
    if view.record is None or view.record.withdrawn_at is None:
        return None
    return view.record.withdrawn_at + settle_s
