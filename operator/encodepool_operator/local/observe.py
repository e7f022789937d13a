"""What the planner is shown of this machine: state entries as groups, processes as pods."""

from encodepool_operator.core.record import GroupRecord, RecordError, record_of
from encodepool_operator.core.snapshot import (
    ContainerFailure,
    GroupObject,
    GroupSnapshot,
    PodFacts,
    PodPhase,
    RevisionRecord,
)

from .ports import host_of
from .state import GroupState, PodState, PoolState


def revisions(state: PoolState) -> tuple[RevisionRecord, ...]:
    return tuple(state.revisions)


def groups(state: PoolState) -> tuple[GroupSnapshot, ...]:
    """All groups, by index."""
    return tuple(_group(index, group) for index, group in sorted(state.groups.items()))


def record(group: GroupState) -> GroupRecord | None:
    """What is remembered of the group; None where somebody spoiled it."""
    try:
        return record_of(group.annotations)
    except RecordError:
        return None


def _group(index: int, group: GroupState) -> GroupSnapshot:
    return GroupSnapshot(
        index=index,
        object=GroupObject(
            replicas=group.replicas,
            generation=group.generation,
            # Orders are carried out in the same breath, so they are always observed.
            observed_generation=group.generation,
            current_pods=len(group.pods),
            record=record(group),
            version=str(group.generation),
        ),
        pods=tuple(_pod(pod) for pod in group.pods),
    )


def _pod(pod: PodState) -> PodFacts:
    return PodFacts(
        name=pod.name,
        uid=pod.uid,
        index=pod.index,
        incarnation=pod.incarnation,
        phase=_phase(pod),
        ips=(host_of(pod.index),),
        launched=pod.launched_at is not None,
        started=pod.started,
        ready=pod.ready and pod.terminating_since is None and pod.exited is None,
        ready_changed_at=pod.ready_changed_at,
        failure=_failure(pod),
        terminating_since=pod.terminating_since,
        waiting=pod.waiting,
        publication=pod.publication,
        version=pod.uid,
    )


def _phase(pod: PodState) -> PodPhase:
    if pod.exited is not None:
        return PodPhase.SUCCEEDED if pod.exited.exit_code == 0 else PodPhase.FAILED
    return PodPhase.RUNNING if pod.process is not None else PodPhase.PENDING


def _failure(pod: PodState) -> ContainerFailure | None:
    if pod.exited is None:
        return None
    return ContainerFailure(
        exit_code=pod.exited.exit_code,
        reason=pod.exited.reason,
        message=pod.exited.message,
        at=pod.exited.at,
    )
