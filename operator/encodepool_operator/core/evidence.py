"""What shows that a running group has failed. Level based: found from what is there, also when it
happened while the operator was down.

Once a group is sealed, any pod that is not in the seal, is missing, is terminating, has ended or was
restarted in place shows it. Before the seal nothing is held against a group in which some pod has
not run yet (an image still pulling) until ``startupDeadlineSeconds`` have passed.

A failure *counts* (for backoff and ``maxRestarts``) when a container failed or the group did not come
up; evictions, deletions and lost nodes do not count.
"""

from dataclasses import dataclass

from encodepool_operator.api.types import Restart

from .record import GroupRecord, LastFailure, shortened
from .snapshot import GroupObject, GroupSnapshot, PodFacts, PodPhase

ENDED = (PodPhase.FAILED, PodPhase.SUCCEEDED)


@dataclass(frozen=True, slots=True)
class Finding:
    """A failure, if there is one, else when to look again although nothing has changed."""

    failure: LastFailure | None
    wake_at: float | None = None


def examine(
    group: GroupSnapshot, asked: GroupObject, record: GroupRecord, restart: Restart, now: float
) -> Finding:
    """Look for a failure of a group whose object asks for pods."""
    failure = _seen_on_pods(group, asked, record, now)
    if failure is not None:
        return Finding(failure)
    wakes: list[float] = []
    for pod in group.pods:
        if pod.node_lost_since is not None and restart.lost_node_seconds:
            at = pod.node_lost_since + restart.lost_node_seconds
            if now >= at and pod.terminating_since is None:
                message = f"node {pod.node} has been lost for {restart.lost_node_seconds} s"
                return Finding(_failure(record, now, "NodeLost", message, pod=pod, counted=False))
            wakes.append(at)
    failure, deadline = _too_late(group, asked, record, restart, now)
    if failure is not None:
        return Finding(failure)
    if deadline is not None:
        wakes.append(deadline)
    return Finding(None, min((at for at in wakes if at > now), default=None))


def sentence(failure: LastFailure) -> str:
    """The failure for humans, without times."""
    where = f"pod {failure.pod}: " if failure.pod else ""
    code = f" (exit code {failure.exit_code})" if failure.exit_code is not None else ""
    text = f": {failure.message}" if failure.message else ""
    return f"{where}{failure.reason}{code}{text}"


def _seen_on_pods(
    group: GroupSnapshot, asked: GroupObject, record: GroupRecord, now: float
) -> LastFailure | None:
    for pod in group.pods:
        if pod.incarnation != record.incarnation:
            message = f"it belongs to start {pod.incarnation} of the pool, the group to {record.incarnation}"
            return _failure(record, now, "ForeignIncarnation", message, pod=pod, counted=False)
    sealed = None
    if record.seal is not None:
        sealed = {pod.uid: pod.restart_count for pod in record.seal.pods}
    elif len(group.pods) < asked.replicas or not all(_has_run(pod) for pod in group.pods):
        return None
    for pod in group.pods:
        ended = pod.phase in ENDED
        if pod.disrupted and (ended or pod.terminating_since is not None):
            return _failure(record, now, "Evicted", _text(pod), pod=pod, counted=False)
        if pod.terminating_since is not None:
            return _failure(record, now, "PodDeleted", "", pod=pod, counted=False)
    for pod in group.pods:
        baseline = 0 if sealed is None else sealed.get(pod.uid)
        if baseline is not None and (pod.phase in ENDED or pod.restart_count > baseline):
            return _container_failure(record, pod, now)
    if sealed is None:
        return None
    for pod in group.pods:
        if pod.uid not in sealed:
            return _failure(
                record,
                now,
                "PodReplaced",
                "it is not the pod the group was sealed with",
                pod=pod,
                counted=False,
            )
    if len(group.pods) < len(sealed):
        message = f"{len(sealed) - len(group.pods)} of {len(sealed)} pods are missing"
        return _failure(record, now, "PodMissing", message, counted=False)
    return None


def _too_late(
    group: GroupSnapshot, asked: GroupObject, record: GroupRecord, restart: Restart, now: float
) -> tuple[LastFailure | None, float | None]:
    """A start that takes too long, or a sealed group that has not been ready for as long."""
    limit = restart.startup_deadline_seconds
    if record.seal is None:
        at = record.started_at + limit
        if now < at:
            return None, at
        message = f"not started within {limit} s: {waiting_for(group, asked)}"
        return _failure(record, now, "StartupDeadline", message), None
    deadline = None
    for pod in group.pods:
        if not pod.ready:
            at = max(pod.ready_changed_at or 0.0, record.seal.at) + limit
            if now >= at:
                return _failure(record, now, "NotReady", f"not ready for {limit} s", pod=pod), None
            deadline = at if deadline is None else min(deadline, at)
    return None, deadline


def waiting_for(group: GroupSnapshot, asked: GroupObject) -> str:
    """What a group that is not ready waits for, in a few words."""
    for pod in group.pods:
        if pod.waiting:
            return f"pod {pod.name}: {pod.waiting}"
    for pod in group.pods:
        if not pod.ready:
            return f"pod {pod.name} is not {'ready' if pod.started else 'started'}"
    if len(group.pods) < asked.replicas:
        return f"{len(group.pods)} of {asked.replicas} pods exist"
    return "nothing"


def _has_run(pod: PodFacts) -> bool:
    return pod.launched or pod.failure is not None


def _text(pod: PodFacts) -> str:
    return pod.failure.message if pod.failure is not None else ""


def _container_failure(record: GroupRecord, pod: PodFacts, now: float) -> LastFailure:
    ended = pod.failure
    if ended is None:
        return _failure(record, now, "ContainerEnded", "", pod=pod, counted=not pod.disrupted)
    return LastFailure(
        at=now if ended.at is None else round(min(ended.at, now), 3),
        incarnation=record.incarnation,
        reason=ended.reason or "ContainerEnded",
        pod=pod.name,
        node=pod.node,
        container=ended.container,
        exit_code=ended.exit_code,
        message=shortened(ended.message),
        counted=not pod.disrupted,
    )


def _failure(
    record: GroupRecord,
    now: float,
    reason: str,
    message: str,
    *,
    pod: PodFacts | None = None,
    counted: bool = True,
) -> LastFailure:
    return LastFailure(
        at=now,
        incarnation=record.incarnation,
        reason=reason,
        pod=pod.name if pod else "",
        node=pod.node if pod else "",
        message=shortened(message),
        counted=counted,
    )
