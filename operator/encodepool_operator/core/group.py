"""The life of one group: what it is now, derived from its object and pods, never stored.

A group is stopped and started as a whole through the replicas of its object. Members of two starts
never meet, because a start waits until the stop has been acted upon and no pod is left.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

from encodepool_operator.api import labels
from encodepool_operator.api.types import Backoff, Restart

from .evidence import examine, sentence, waiting_for
from .record import GroupRecord, LastFailure, PortBlock, Seal, SealedPod, not_after
from .snapshot import GroupObject, GroupSnapshot, PodFacts, PodPhase

JITTER = 0.25
"""A wait is shortened by up to this share, so that groups that failed together come back apart."""


class Phase(StrEnum):
    STOPPED = "Stopped"
    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    FAILING = "Failing"
    BACKOFF = "Backoff"
    LOST = "Lost"


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The parts of the pool that the life of its groups depends on.

    ``salt`` (the pool's uid) makes jitter differ between pools; ``resume`` is the value of the
    resume annotation, "" when there is none.
    """

    restart: Restart
    salt: str
    resume: str = ""


@dataclass(frozen=True, slots=True)
class GroupView:
    """What one group is now.

    ``record``      its durable facts, with no time after now; None when only pods are left
    ``why``         a few words for people; they hold no times, so they change only with the facts
    ``failure``     a failure found now that is not recorded yet: the group is to be stopped
    ``seal``        the seal to be written now: the group is complete and started for the first time
    ``ready``       every pod is ready, sealed, of one incarnation, and nothing is wrong
    ``running``     its object asks for pods
    ``gone``        nothing of its last start is left, a start may follow
    ``restart_at``  when backoff ends; None when there is no wait
    ``exhausted``   ``maxRestarts`` was passed: it stays stopped until resumed
    ``wake_at``     when this view changes although no fact does
    """

    index: int
    source: GroupSnapshot
    record: GroupRecord | None
    phase: Phase
    why: str = ""
    failure: LastFailure | None = None
    seal: Seal | None = None
    ready: bool = False
    running: bool = False
    gone: bool = False
    restart_at: float | None = None
    exhausted: bool = False
    wake_at: float | None = None

    @property
    def leader(self) -> PodFacts | None:
        """The pod that gateways talk to: index 0 of this incarnation, not on its way out."""
        record = self.record
        for pod in self.source.pods:
            if pod.index == 0 and record is not None and pod.incarnation == record.incarnation:
                return pod if pod.terminating_since is None else None
        return None

    @property
    def labelled(self) -> tuple[PodFacts, ...]:
        """Pods that carry the published label now."""
        return tuple(pod for pod in self.source.pods if pod.publication is not None)

    @property
    def draining(self) -> bool:
        return self.record is not None and self.record.draining_since is not None


def derive(group: GroupSnapshot, rules: GroupRules, now: float) -> GroupView:
    """The view of one group. Depends on this group's facts, the rules and now, nothing else."""
    asked = group.object
    if asked is None:
        return GroupView(group.index, group, None, Phase.STOPPED, "only pods are left, its object is gone")
    record = asked.record and not_after(asked.record, now)
    if asked.deleting:
        return GroupView(group.index, group, record, Phase.DRAINING, "its object is being deleted")
    if record is None:
        return _unreadable(group, asked, now)
    if asked.replicas > 0:
        return _running(group, asked, record, rules, now)
    return _stopped(group, asked, record, rules, now)


def failed(record: GroupRecord, failure: LastFailure, rules: GroupRules) -> GroupRecord:
    """The record of a group that is stopped because of ``failure``.

    Failures in a row are counted; a group that had been sealed for ``resetSeconds`` starts anew.
    """
    healthy_s = failure.at - record.seal.at if record.seal is not None else 0.0
    before = 0 if healthy_s >= rules.restart.backoff.reset_seconds else record.restarts
    restarts = before + 1 if failure.counted else before
    return replace(record, failure=failure, restarts=restarts, draining_since=None, resumed=rules.resume)


def started(
    before: GroupRecord | None,
    incarnation: int,
    revision: str,
    ports: PortBlock,
    rules: GroupRules,
    now: float,
) -> GroupRecord:
    """The record of a new start. A new revision, and a resume, begin with a clean count."""
    record = GroupRecord(incarnation, revision, ports, started_at=now, resumed=rules.resume)
    if before is None:
        return record
    same = before.revision == revision and before.resumed == rules.resume
    return replace(record, failure=before.failure, restarts=before.restarts if same else 0)


def backoff_s(backoff: Backoff, restarts: int, salt: str) -> float:
    """Wait before restart number ``restarts``: none for the first, then base x 2^n up to max.

    The jitter comes from ``salt``, so the same question always has the same answer.
    """
    if restarts <= 1:
        return 0.0
    doublings = min(restarts - 2, 30)
    full = min(backoff.max_seconds, backoff.base_seconds << doublings)
    share = int.from_bytes(sha256(salt.encode()).digest()[:4], "big") / 2**32
    return round(full * (1 - JITTER * share), 3)


def _running(
    group: GroupSnapshot, asked: GroupObject, record: GroupRecord, rules: GroupRules, now: float
) -> GroupView:
    finding = examine(group, asked, record, rules.restart, now)
    view = GroupView(group.index, group, record, Phase.STARTING, running=True, wake_at=finding.wake_at)
    if finding.failure is not None:
        return replace(view, phase=Phase.FAILING, why=sentence(finding.failure), failure=finding.failure)
    ready = (
        record.seal is not None
        and record.draining_since is None
        and len(group.pods) == asked.replicas
        and all(pod.ready for pod in group.pods)
    )
    if ready:
        return replace(view, phase=Phase.READY, ready=True)
    lost = next((pod for pod in group.pods if pod.node_lost_since is not None), None)
    if record.draining_since is not None:
        view = replace(view, phase=Phase.DRAINING, why="it is being drained")
    elif lost is not None:
        view = replace(view, phase=Phase.LOST, why=f"pod {lost.name} is on node {lost.node}, which is lost")
    else:
        view = replace(view, why=waiting_for(group, asked))
    return replace(view, seal=_seal(group, asked, record, now))


def _stopped(
    group: GroupSnapshot, asked: GroupObject, record: GroupRecord, rules: GroupRules, now: float
) -> GroupView:
    gone = not group.pods and asked.current_pods == 0 and asked.observed_generation >= asked.generation
    failure = record.failure
    if failure is not None and failure.incarnation != record.incarnation:
        failure = None  # of an earlier start; this one was stopped for another reason
    view = GroupView(group.index, group, record, Phase.STOPPED, "it is stopped", gone=gone)
    lost = next((pod for pod in group.pods if pod.node_lost_since is not None), None)
    if not gone:
        if lost is not None:
            why = f"pod {lost.name} is on node {lost.node}, which is lost"
            return replace(view, phase=Phase.LOST, why=why)
        if failure is None:
            return replace(view, phase=Phase.DRAINING, why="its pods are ending")
        return replace(view, phase=Phase.FAILING, why=sentence(failure))
    if failure is None or not failure.counted or record.resumed != rules.resume:
        return view
    if rules.restart.max_restarts is not None and record.restarts > rules.restart.max_restarts:
        why = (
            f"it stays stopped after {rules.restart.max_restarts} restarts, last {sentence(failure)}; "
            f"change annotation {labels.RESUME} of the pool to start it again"
        )
        return replace(view, phase=Phase.BACKOFF, why=why, exhausted=True)
    salt = f"{rules.salt}/{group.index}/{record.incarnation}"
    restart_at = round(failure.at + backoff_s(rules.restart.backoff, record.restarts, salt), 3)
    if now >= restart_at:
        return view
    why = f"it waits to be started again after {sentence(failure)}"
    return replace(view, phase=Phase.BACKOFF, why=why, restart_at=restart_at, wake_at=restart_at)


def _seal(group: GroupSnapshot, asked: GroupObject, record: GroupRecord, now: float) -> Seal | None:
    """The seal of a group that is complete and started and has none yet."""
    pods = sorted(group.pods, key=lambda pod: pod.index)
    complete = [pod.index for pod in pods] == list(range(asked.replicas))
    if record.seal is not None or not complete:
        return None
    if not all(pod.started and pod.phase is PodPhase.RUNNING for pod in pods):
        return None
    return Seal(tuple(SealedPod(pod.uid, pod.restart_count) for pod in pods), now)


def _unreadable(group: GroupSnapshot, asked: GroupObject, now: float) -> GroupView:
    """The annotations were edited: nothing is known about this start but what its pods say."""
    incarnation = max((pod.incarnation for pod in group.pods), default=0)
    message = "the annotations of its object cannot be read"
    failure = LastFailure(now, incarnation, "RecordUnreadable", message=message, counted=False)
    record = GroupRecord(incarnation, "", PortBlock(0, 0, 0, 0), started_at=now)
    return GroupView(
        group.index,
        group,
        record,
        Phase.FAILING,
        message,
        failure=failure,
        running=asked.replicas > 0,
    )
