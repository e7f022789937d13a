"""Which groups move to another revision, and which go when there are too many."""

from dataclasses import dataclass

import pytest

from encodepool_operator.core.drain import settled_at, victims
from encodepool_operator.core.rollout import Budget, budget, held, moves, outdated, surge


@dataclass
class View:
    """The few facts of a group that these decisions look at."""

    index: int
    ready: bool = True
    running: bool = True
    draining: bool = False
    revision: str = "old"

    @property
    def record(self):
        return self


@pytest.mark.parametrize(
    ("replicas", "rollout", "expected"),
    [
        (1, {}, Budget(0, 1)),
        (4, {}, Budget(1, 0)),
        (0, {}, Budget(1, 0)),
        (10, {"maxUnavailable": "25%"}, Budget(2, 0)),
        (10, {"maxSurge": "25%"}, Budget(1, 3)),
        (3, {"maxUnavailable": "10%"}, Budget(1, 0)),  # 0 after rounding down
        (3, {"maxUnavailable": 0}, Budget(0, 1)),  # somebody wants none down
        (1, {"maxSurge": 0}, Budget(1, 0)),
        (3, {"maxUnavailable": 9, "maxSurge": 2}, Budget(3, 2)),
    ],
)
def test_the_budget_of_a_rollout(make_spec, replicas, rollout, expected):
    assert budget(make_spec(rollout=rollout).rollout, replicas) == expected


def test_a_paused_rollout_holds_all_and_a_partition_the_lower_ones(make_spec):
    paused = make_spec(rollout={"paused": True}).rollout
    partition = make_spec(rollout={"partition": 2}).rollout
    assert [held(i, paused) for i in range(3)] == [True, True, True]
    assert [held(i, partition) for i in range(3)] == [True, True, False]
    views = [View(0), View(1), View(2), View(3, revision="new")]
    assert [view.index for view in outdated(views, "new", partition)] == [2]
    assert outdated(views, "new", paused) == []


@pytest.mark.parametrize(
    ("views", "allowed", "free", "paid"),
    [
        ([View(0), View(1), View(2)], Budget(1, 0), [], [2]),
        ([View(0), View(1), View(2)], Budget(2, 0), [], [2, 1]),
        ([View(0), View(1, ready=False), View(2, ready=False)], Budget(1, 0), [2, 1], []),
        ([View(0), View(1, ready=False), View(2)], Budget(2, 0), [1], [2]),
        ([View(0), View(1), View(2)], Budget(0, 1), [], []),
    ],
)
def test_broken_groups_move_for_free_and_healthy_ones_within_the_budget(views, allowed, free, paid):
    listed = {view.index for view in views if view.ready}
    chosen = moves(views, listed, 3, allowed)
    assert [view.index for view in chosen.free] == free
    assert [view.index for view in chosen.paid] == paid


def test_with_surge_a_healthy_group_may_go_for_every_one_above_replicas():
    chosen = moves([View(0), View(1)], {0, 1, 7, 8}, 2, Budget(0, 2))
    assert [view.index for view in chosen.paid] == [1, 0]


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([View(0), View(1), View(2)], 2),
        ([View(0), View(1, running=False)], 1),
        ([View(0, revision="new")], 0),
        ([], 0),
    ],
)
def test_surge_lasts_as_long_as_old_groups_run(make_spec, views, expected):
    assert surge(views, "new", make_spec().rollout, Budget(1, 2)) == expected


@pytest.mark.parametrize(
    ("views", "first"),
    [
        ([View(0), View(1), View(2)], [2, 1, 0]),
        ([View(0), View(1, ready=False), View(2)], [1, 2, 0]),
        ([View(0, running=False, ready=False), View(1, ready=False), View(2)], [0, 1, 2]),
        ([View(0, revision="stale"), View(1), View(2)], [0, 2, 1]),
        ([View(0, draining=True, ready=False), View(1, ready=False), View(2)], [0, 1, 2]),
        ([View(0, draining=True), View(1, running=False, ready=False)], [0, 1]),
    ],
)
def test_victims_are_draining_then_broken_then_old_then_the_highest(views, first):
    stale = frozenset(view.index for view in views if view.revision == "stale")
    assert [view.index for view in victims(views, 3, stale)] == first
    assert victims(views, 0, stale) == victims(views, -2, stale) == []


def test_only_a_group_that_was_listed_has_to_settle(make_pod, make_group, view_of, now):
    assert settled_at(view_of(make_group(make_pod())), 10) is None
    assert settled_at(view_of(make_group(make_pod(), record={"withdrawn_at": now})), 10) == now + 10
