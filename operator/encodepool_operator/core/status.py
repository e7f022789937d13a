"""The pool's status: kstatus conditions, counters in groups and ranks, and the abnormal groups.

It holds what is, so nothing in it drives a decision, but for ``lastIncarnation``, ``currentRevision``
and the start of the progress deadline, which are facts that nothing else keeps. It changes only when
one of its values does, and it is bounded: at most ``GROUP_LIMIT`` groups are listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool

from .consumer import consumer
from .group import GroupView, Phase
from .record import failure_object, rfc3339, seconds
from .rollout import Budget, held
from .snapshot import Trouble

GROUP_LIMIT = 20
"""Abnormal groups listed in the status; the rest is counted in ``groupsTruncated``."""

MESSAGE_LIMIT = 1024

ORDER = (
    Phase.FAILING,
    Phase.LOST,
    Phase.BACKOFF,
    Phase.STOPPED,
    Phase.STARTING,
    Phase.DRAINING,
    Phase.READY,
)
"""Abnormal groups are listed in this order: what needs a human first."""

WORDS = {
    Phase.FAILING: "failing",
    Phase.LOST: "on a lost node",
    Phase.BACKOFF: "waiting to be started again",
    Phase.STOPPED: "stopped",
    Phase.STARTING: "starting",
    Phase.DRAINING: "draining",
    Phase.READY: "ready and not listed yet",
}


@dataclass(frozen=True, slots=True)
class PoolView:
    """Everything the status says, as decided in one plan.

    ``listed``            indices of groups in the published list
    ``hosts``             hosts of the groups by index, "" or missing where unknown
    ``last_incarnation``  as it will be after the plan
    ``no_ports``          a group could not start because every port block is held
    ``foreign``           "Kind/name" of objects that bear our names
    ``troubles``          why the shell cannot do what was planned before
    """

    pool: EncodePool
    views: Sequence[GroupView]
    target: str
    budget: Budget
    listed: frozenset[int]
    hosts: Mapping[int, str]
    last_incarnation: int
    current_revision: str
    no_ports: bool
    foreign: frozenset[str]
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """``wake_at``: when the status changes although no fact does (the progress deadline)."""

    document: dict[str, Any]
    wake_at: float | None


@dataclass(frozen=True, slots=True)
class _Condition:
    type: str
    value: bool
    reason: str
    message: str


def complete(view: PoolView) -> bool:
    """Whether the pool is what the spec asks for: every group listed, and none too many or old."""
    replicas = view.pool.spec.replicas
    return len(view.views) == len(view.listed) == replicas and not any(
        _old(group, view) for group in view.views
    )


def build(view: PoolView, previous: Mapping[str, Any] | None, now: float) -> Status:
    """The status as it should read now; equal to ``previous`` when nothing changed."""
    before = previous or {}
    progress, deadline = _progress(view, before, now)
    done = complete(view)
    paused = view.pool.spec.rollout.paused
    late = not done and not paused and now >= deadline
    conditions = _conditions(view, done=done, late=late)
    abnormal = [group for group in view.views if group.index not in view.listed]
    abnormal.sort(key=lambda group: (ORDER.index(group.phase), group.index))
    on_target = [g for g in view.views if g.running and g.record and g.record.revision == view.target]
    ranks = view.pool.spec.tensor_parallel_size
    document: dict[str, Any] = {
        "observedGeneration": view.pool.metadata.generation,
        "model": names.served_model_name(view.pool.spec),
        "replicas": len(view.views),
        "readyReplicas": sum(group.ready for group in view.views),
        "updatedReplicas": len(on_target),
        "availableReplicas": len(view.listed),
        "unavailableReplicas": max(view.pool.spec.replicas - len(view.listed), 0),
        "ranks": len(view.views) * ranks,
        "readyRanks": sum(group.ready for group in view.views) * ranks,
        "selector": f"{labels.POOL}={view.pool.metadata.name},{labels.POD_INDEX}=0",
        "currentRevision": view.current_revision,
        "updateRevision": view.target,
        "lastIncarnation": view.last_incarnation,
        "rollout": progress,
        "conditions": _stamped(conditions, before.get("conditions"), now),
        "groupsTruncated": max(len(abnormal) - GROUP_LIMIT, 0),
        "consumer": consumer(view.pool.metadata.namespace, view.pool.metadata.name),
    }
    if abnormal:  # server-side apply turns a list that becomes empty into a missing one
        shown = abnormal[:GROUP_LIMIT]
        document["groups"] = [_group(group, view.hosts.get(group.index, "")) for group in shown]
    return Status(document, deadline if not done and not paused and now < deadline else None)


OBSERVED = (
    "readyReplicas",
    "availableReplicas",
    "unavailableReplicas",
    "readyRanks",
    "groups",
    "groupsTruncated",
)
"""What a status says of groups whatever the spec is."""


def observed(previous: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """``previous`` with what ``built`` says of the groups that are there."""
    available = {item["type"]: item for item in built["conditions"] if item["type"] == "Available"}
    return {
        **{key: value for key, value in previous.items() if key not in OBSERVED},
        **{key: built[key] for key in OBSERVED if key in built},
        "conditions": [available.get(item["type"], item) for item in previous.get("conditions") or ()],
    }


def invalid(
    pool_generation: int, problems: Sequence[str], previous: Mapping[str, Any] | None, now: float
) -> dict[str, Any]:
    """The status of a pool whose spec cannot be used: what runs goes on, nothing is started or stopped."""
    before = dict(previous or {})
    message = "; ".join(problems)[:MESSAGE_LIMIT]
    kept = [
        _Condition(str(item["type"]), item["status"] == "True", str(item["reason"]), str(item["message"]))
        for item in before.get("conditions") or ()
        if item["type"] not in ("Ready", "Stalled", "Reconciling")
    ]
    conditions = [
        _Condition("Ready", False, "InvalidSpec", message),
        *kept,
        _Condition("Stalled", True, "InvalidSpec", message),
    ]
    return before | {
        "observedGeneration": pool_generation,
        "conditions": _stamped(conditions, before.get("conditions"), now),
    }


def _old(group: GroupView, view: PoolView) -> bool:
    revision = group.record.revision if group.record is not None else view.target
    return revision != view.target and not held(group.index, view.pool.spec.rollout)


def _progress(view: PoolView, before: Mapping[str, Any], now: float) -> tuple[dict[str, Any], float]:
    """The rollout's progress, and when it is too late for more.

    Progress is: another generation, another group updated and listed, or leaving the complete state.
    """
    updated = sum(
        group.index in view.listed and group.record is not None and group.record.revision == view.target
        for group in view.views
    )
    old = before.get("rollout") or {}
    was_complete = any(
        condition.get("type") == "Progressing" and condition.get("reason") == "Complete"
        for condition in before.get("conditions") or ()
    )
    moved = (
        before.get("observedGeneration") != view.pool.metadata.generation
        or updated > int(old.get("updatedAvailable", 0))
        or (was_complete and not complete(view))
    )
    try:
        since = now if moved else min(seconds(str(old.get("progressedAt"))), now)
    except ValueError:
        since = now
    limit = view.pool.spec.rollout.progress_deadline_seconds
    return {"updatedAvailable": updated, "progressedAt": rfc3339(since)}, since + limit


def _conditions(view: PoolView, *, done: bool, late: bool) -> list[_Condition]:
    replicas, listed = view.pool.spec.replicas, len(view.listed)
    counts = f"{listed} of {replicas} groups are available"
    least = max(replicas - view.budget.max_unavailable, 0)
    broken = [group for group in view.views if group.phase in (Phase.FAILING, Phase.BACKOFF, Phase.LOST)]
    stalled = _stalled(view, late)
    conditions = [
        _Condition("Ready", done, "Complete" if done else "Incomplete", counts),
        _Condition("Available", listed >= least, "Enough" if listed >= least else "TooFew", counts),
        _progressing(view, done, late),
        _degraded(broken),
        _endpoints_published(view),
    ]
    if stalled is not None:
        conditions.append(stalled)
    elif not done and not view.pool.spec.rollout.paused:
        conditions.append(_Condition("Reconciling", True, "Incomplete", counts))
    return conditions


def _progressing(view: PoolView, done: bool, late: bool) -> _Condition:
    if done:
        return _Condition("Progressing", True, "Complete", "every group is where it should be")
    if view.pool.spec.rollout.paused:
        return _Condition("Progressing", False, "Paused", "the rollout is paused")
    if late:
        limit = view.pool.spec.rollout.progress_deadline_seconds
        return _Condition("Progressing", False, "ProgressDeadlineExceeded", f"no progress for {limit} s")
    return _Condition("Progressing", True, "Moving", _moving(view))


def _moving(view: PoolView) -> str:
    """What happens to the groups, in numbers: a rollout and a change of replicas read differently."""
    old = sum(_old(group, view) for group in view.views)
    parts = [f"{old} to move to revision {view.target}"] if old else []
    for phase in ORDER:
        count = sum(group.phase is phase and group.index not in view.listed for group in view.views)
        parts += [f"{count} {WORDS[phase]}"] if count else []
    missing = view.pool.spec.replicas - len(view.views)
    parts += [f"{missing} to be made"] if missing > 0 else []
    return f"groups: {', '.join(parts) or f'{-missing} too many'}"


def _degraded(broken: Sequence[GroupView]) -> _Condition:
    if not broken:
        return _Condition("Degraded", False, "NoGroupFailed", "no group has failed")
    worst = min(broken, key=lambda group: (ORDER.index(group.phase), group.index))
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    return _Condition("Degraded", True, "GroupsFailed", f"group {worst.index}{more}: {worst.why}")


def _endpoints_published(view: PoolView) -> _Condition:
    if view.listed:
        message = f"{len(view.listed)} groups are listed"
        return _Condition("EndpointsPublished", True, "Listed", message)
    message = "no group is listed: a gateway sends pixels to prefill, or refuses images"
    return _Condition("EndpointsPublished", False, "NoGroupListed", message)


def _stalled(view: PoolView, late: bool) -> _Condition | None:
    if view.foreign:
        names = ", ".join(sorted(view.foreign))
        return _Condition("Stalled", True, "NameTaken", f"not ours, and not touched: {names}")
    if view.troubles:
        message = "; ".join(trouble.message for trouble in view.troubles)
        return _Condition("Stalled", True, view.troubles[0].reason, message)
    if view.no_ports:
        ports = view.pool.spec.network.port_range
        message = f"no free block in ports {ports.start}-{ports.start + ports.size - 1}; widen portRange"
        return _Condition("Stalled", True, "PortsExhausted", message)
    exhausted = [group.index for group in view.views if group.exhausted]
    if exhausted:
        message = f"{len(exhausted)} groups stay stopped after too many restarts, first group {exhausted[0]}"
        return _Condition("Stalled", True, "RestartsExhausted", message)
    if late:
        limit = view.pool.spec.rollout.progress_deadline_seconds
        return _Condition("Stalled", True, "ProgressDeadlineExceeded", f"no progress for {limit} s")
    return None


def _stamped(
    conditions: Sequence[_Condition], before: Sequence[Mapping[str, Any]] | None, now: float
) -> list[dict[str, Any]]:
    """Conditions as JSON values; the time of the last change of value is carried over."""
    old = {item.get("type"): item for item in before or ()}
    out = []
    for condition in conditions:
        value = "True" if condition.value else "False"
        since = rfc3339(now)
        known = old.get(condition.type)
        if known is not None and known.get("status") == value:
            since = str(known.get("lastTransitionTime") or since)
        out.append(
            {
                "type": condition.type,
                "status": value,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_LIMIT],
                "lastTransitionTime": since,
            }
        )
    return out


def _group(group: GroupView, host: str) -> dict[str, Any]:
    record = group.record
    out: dict[str, Any] = {"index": group.index, "phase": group.phase.value, "reason": group.why}
    if record is None:
        return out
    out |= {
        "revision": record.revision,
        "incarnation": record.incarnation,
        "host": host,
        "bootstrapPort": record.ports.bootstrap,
        "restarts": record.restarts,
    }
    if group.restart_at is not None:
        out["nextRestartTime"] = rfc3339(group.restart_at)
    if record.failure is not None:
        out["lastFailure"] = failure_object(record.failure)
    return out
