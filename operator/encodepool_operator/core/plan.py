"""``plan(snapshot, now) -> Plan``: everything one pool needs next, recomputed from what is there.

Nothing is remembered between plans but what the actions write. Every plan takes at most one step per
group; the shell carries it out, looks again, and plans again until a plan is empty. The order inside
a plan is the order of safety: a withdrawal is recorded, the label goes, the list follows, and only
then is a group stopped; a start follows the reservation of its number; the status comes last. A
group is listed only once its label is seen, so the label always comes before the list.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from encodepool_operator.api import names

from . import drain, endpoints, report, revision, rollout, status
from .actions import (
    Action,
    ApplyChild,
    DeletePod,
    DropChild,
    DropRevision,
    Publish,
    ReserveIncarnations,
    SaveRevision,
    StartGroup,
    Withdraw,
    WriteEndpoints,
    WriteStatus,
)
from .draft import Draft
from .evidence import sentence
from .group import GroupView, Phase, failed, started
from .memo import Memo
from .render import children
from .snapshot import RevisionRecord, Snapshot

TAKE_UP_S = 5.0
"""A gateway sends to a group some seconds after it is listed, and drops one that leaves the list at
once: a rollout that trades one for the other in one write leaves a gateway with neither. Pools
whose ``settleSeconds`` is less say that theirs are quicker."""

NO_PORTS_RETRY_S = 30.0
"""Ports are freed by others, of whom this pool hears nothing: look again after this time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in order, and when to plan again if nothing changes (None: never)."""

    actions: tuple[Action, ...]
    wake_at: float | None = None


def plan(snapshot: Snapshot, now: float, memo: Memo | None = None) -> Plan:
    """The next step of one pool. ``now`` is wall-clock seconds since the epoch.

    A pool that is as it should be gets no actions. ``memo`` (one per pool, kept by the shell) saves
    time and changes nothing else.
    """
    draft = Draft(snapshot, round(now, 3), Memo() if memo is None else memo)
    _stop_failed(draft)
    missing = _remove_surplus(draft)
    _roll_out(draft)
    _withdraw(draft)
    _stop_drained(draft)
    _start(draft, missing)
    _seal(draft)
    _repair(draft)
    _publish(draft)
    _delete_pods(draft)
    return _assemble(draft)


def upkeep(snapshot: Snapshot, problems: Sequence[str], now: float, memo: Memo | None = None) -> Plan:
    """What a pool whose spec cannot be used needs all the same: that the list is true.

    What has died is withdrawn and what is ready again is published; nothing is started, stopped or
    changed. The snapshot's pool has the spec that its groups were last started with; ``problems`` are
    those of the one that is wanted.
    """
    draft = Draft(snapshot, round(now, 3), Memo() if memo is None else memo)
    _stop_failed(draft)  # for what follows from it: these stops are not carried out
    _withdraw(draft)
    _seal(draft)
    _publish(draft)
    actions: list[Action] = [*draft.records.values(), *draft.labels, *_list(draft)]
    wake_at = _wake_at(draft)  # without the progress of a rollout: there is none
    if snapshot.status is not None:
        known = status.observed(snapshot.status, report.pool_status(draft))
        told = status.invalid(draft.pool.metadata.generation, problems, known, draft.now)
        if told != dict(snapshot.status):
            actions.append(WriteStatus(told, "the pool's state has changed"))
    return Plan(tuple(actions), wake_at)


def _stop_failed(draft: Draft) -> None:
    for view in draft.views.values():
        if view.failure is None or view.record is None:
            continue
        record = failed(view.record, view.failure, draft.rules)
        reason = f"group {view.index} failed and is stopped: {sentence(view.failure)}"
        draft.stop(view, record, reason)


def _remove_surplus(draft: Draft) -> int:
    """Drain or delete groups above what is wanted; returns how many groups are missing instead."""
    managed = draft.managed()
    rules, target = draft.spec.rollout, draft.target.name
    wanted = draft.spec.replicas + rollout.surge(managed, target, rules, draft.budget)
    old = frozenset(view.index for view in rollout.outdated(managed, target, rules))
    for view in drain.victims(managed, len(managed) - wanted, old):
        if view.gone:
            draft.delete(view, f"group {view.index} is stopped and not needed")
        elif view.running and not view.draining and view.index not in draft.changes:
            draft.drain(view, f"{len(managed)} groups exist and {wanted} are wanted")
    return wanted - len(managed)


def _roll_out(draft: Draft) -> None:
    target = draft.target.name
    candidates = [
        view
        for view in rollout.outdated(draft.managed(), target, draft.spec.rollout)
        if view.running and not view.draining and view.index not in draft.changes
    ]
    if not candidates:
        return
    moves = rollout.moves(candidates, _taken_up(draft), draft.spec.replicas, draft.budget)
    for view in (*moves.free, *moves.paid):
        own = (view.record.revision if view.record is not None else "") or "an unknown one"
        draft.drain(view, f"revision {target} replaces {own}")


def _taken_up(draft: Draft) -> frozenset[int]:
    """Listed groups that gateways send to by now: the rollout may count on them."""
    wait_s = min(TAKE_UP_S, float(draft.spec.drain.settle_seconds))
    counted = set()
    for index in draft.listed():
        leader = draft.views[index].leader
        at = leader.publication.at if leader is not None and leader.publication is not None else None
        # A time in the future is of another clock, and says nothing.
        if at is not None and at <= draft.now < at + wait_s:
            draft.wakes.append(at + wait_s)
        else:
            counted.add(index)
    return frozenset(counted)


def _withdraw(draft: Draft) -> None:
    """Take off the list what must not be there, and note when, for settling and relisting."""
    for view in list(draft.views.values()):
        listed = draft.id_of(view) in draft.published
        if draft.serves(view) or not (view.labelled or listed):
            continue
        reason = f"group {view.index} is taken off the list: {view.why or 'its label is missing'}"
        again = endpoints.relist_at(view)
        stopping = view.index in draft.changes  # its next start has another URL
        if view.record is not None and not stopping and (again is None or draft.now >= again):
            draft.record(view, replace(view.record, withdrawn_at=draft.now), reason)
        for pod in view.labelled:
            draft.labels.append(Withdraw(view.index, pod.name, pod.uid, reason))


def _stop_drained(draft: Draft) -> None:
    """Stop what has settled. A withdrawal in the same plan comes before the stop."""
    for view in draft.managed():
        if not view.draining or not view.running or view.index in draft.changes:
            continue
        assert view.record is not None
        settled = drain.settled_at(view, draft.spec.drain.settle_seconds)
        if settled is not None and draft.now < settled:
            draft.wakes.append(settled)
            continue
        recorded = draft.records.pop(view.index, None)
        reason = recorded.reason if recorded else f"group {view.index} has been drained and is stopped"
        draft.stop(view, view.record, reason)


def _start(draft: Draft, missing: int) -> None:
    # A start whose revision cannot be kept could never be written again.
    blocked = _is_foreign(draft, "ControllerRevision")
    for view in draft.managed():
        if not view.gone or view.index in draft.changes or blocked:
            continue
        wanted = draft.revision_for(view.index, view.record)
        moved = view.record is not None and view.record.revision != wanted.name
        if view.phase is Phase.BACKOFF and not moved:
            continue  # another revision may well work, so it does not wait
        how = f"with revision {wanted.name}" if moved else "again"
        _start_group(draft, view.index, view, wanted, f"group {view.index} is started {how}")
    free = draft.free_indices()
    for _ in range(0 if blocked else missing):
        index = next(free)
        wanted = draft.revision_for(index, None)
        _start_group(draft, index, None, wanted, f"group {index} is missing and is started")


def _start_group(
    draft: Draft, index: int, view: GroupView | None, wanted: RevisionRecord, reason: str
) -> None:
    spec = revision.read_spec(wanted) or draft.spec
    address = None if draft.no_ports else draft.book.assign(index, spec.network)
    if address is None:
        draft.no_ports = True
        draft.wakes.append(draft.now + NO_PORTS_RETRY_S)
        return
    before = view.record if view is not None else None
    version = draft.version_of(view) if view is not None else ""
    record = started(before, address.incarnation, wanted.name, address.ports, draft.rules, draft.now)
    draft.start(StartGroup(index, spec.pods_per_group, wanted, record, reason, version))


def _seal(draft: Draft) -> None:
    for view in list(draft.views.values()):
        asked = view.source.object
        if view.index in draft.changes or view.index in draft.records or view.record is None or asked is None:
            continue
        if view.seal is not None:
            record = replace(view.record, seal=view.seal)
            draft.record(view, record, f"group {view.index} is complete and has started")
        elif view.record != asked.record and not asked.deleting:
            draft.record(view, view.record, f"the clock went back: times of group {view.index} follow")


def _repair(draft: Draft) -> None:
    """Objects that somebody edited, unless this plan writes them anyway."""
    for view in draft.views.values():
        asked = view.source.object
        if asked is None or asked.drift is None or asked.deleting or view.record is None:
            continue
        if view.index in draft.changes or view.index in draft.records:
            continue
        draft.repair(view, asked.drift)


def _publish(draft: Draft) -> None:
    for view in draft.views.values():
        again = endpoints.relist_at(view)
        if view.ready and again is not None:
            draft.wakes.append(again)
        leader = view.leader
        if leader is None or view.index in draft.changes or view.index in draft.records:
            continue
        spec = draft.spec_of(view)
        wanted = endpoints.publication(view, spec)
        if wanted is None or leader.publication == wanted or not endpoints.routable(view, spec, draft.now):
            continue
        reason = f"group {view.index} is ready and is published"
        wanted = replace(wanted, at=draft.now)
        draft.labels.append(Publish(view.index, leader.name, leader.uid, wanted, reason, leader.version))


def _delete_pods(draft: Draft) -> None:
    """Pods on lost nodes go by force once they are terminating; pods without an object just go."""
    limit = draft.spec.restart.lost_node_seconds
    for view in draft.views.values():
        for pod in view.source.pods:
            if pod.terminating_since is None:
                if view.source.object is None:
                    reason = f"pod {pod.name} belongs to no group any more"
                    draft.pods.append(DeletePod(view.index, pod.name, pod.uid, None, reason))
            elif pod.node_lost_since is not None and limit and not pod.exclusive_volume:
                at = pod.node_lost_since + limit
                if draft.now < at:
                    draft.wakes.append(at)
                    continue
                reason = f"pod {pod.name} hangs on node {pod.node}, which has been lost for {limit} s"
                draft.pods.append(DeletePod(view.index, pod.name, pod.uid, 0, reason))


def _assemble(draft: Draft) -> Plan:
    snapshot = draft.snapshot
    actions: list[Action] = []
    if draft.target not in snapshot.revisions and not _is_foreign(draft, "ControllerRevision"):
        reason = f"revision {draft.target.name} of the pods' spec is wanted"
        actions.append(SaveRevision(draft.target, reason))
    actions.extend(draft.records.values())
    actions.extend(draft.labels)
    actions.extend(_list(draft))
    actions.extend(change for change in draft.changes.values() if not isinstance(change, StartGroup))
    actions.extend(draft.repairs)
    actions.extend(draft.pods)
    actions.extend(_children(draft))
    starts = [change for change in draft.changes.values() if isinstance(change, StartGroup)]
    if starts:
        last = draft.book.last
        actions.append(ReserveIncarnations(last, f"{len(starts)} starts take numbers up to {last}"))
    actions.extend(starts)
    actions.extend(_drop_revisions(draft))
    told = report.pool_status(draft)
    if snapshot.status is None or told != dict(snapshot.status):
        actions.append(WriteStatus(told, "the pool's state has changed"))
    return Plan(tuple(actions), _wake_at(draft))


def _wake_at(draft: Draft) -> float | None:
    wakes = [*draft.wakes, *(view.wake_at for view in draft.views.values() if view.wake_at is not None)]
    return min((at for at in wakes if at > draft.now), default=None)


def _list(draft: Draft) -> list[WriteEndpoints]:
    """The write of the documents, where they are not as they should be."""
    published = draft.snapshot.documents
    wanted = report.documents(draft)
    if (published is not None and wanted == dict(published)) or _is_foreign(draft, "ConfigMap"):
        return []
    reason = report.change_of_list(draft, wanted)
    return [WriteEndpoints(wanted, reason, draft.snapshot.documents_version)]


def _is_foreign(draft: Draft, kind: str) -> bool:
    """Whether the pool's object of this kind belongs to somebody else: it is reported, never written."""
    pool = draft.pool.metadata.name
    name = {
        "ConfigMap": names.endpoints_config_map(pool),
        "ControllerRevision": names.revision_object(pool, draft.target.name),
    }[kind]
    return f"{kind}/{name}" in draft.snapshot.foreign


def _children(draft: Draft) -> list[ApplyChild | DropChild]:
    """Services and the disruption budget. They come before the starts of a plan, so that a pod finds
    its governing Service, and after everything that keeps what runs in order."""
    existing = draft.snapshot.children
    if existing is None:
        return []
    found = {(child.kind, child.name): child for child in existing}
    out: list[ApplyChild | DropChild] = []
    wanted = children.wanted(draft.pool)
    for kind, name in wanted:
        child = found.pop((kind, name), None)
        if f"{kind}/{name}" in draft.snapshot.foreign or (child is not None and child.drift is None):
            continue
        if child is None:
            reason = f"{kind} {name} is missing"
        else:
            assert child.drift is not None
            reason = f"{kind} {name} is not as it should be: {child.drift.reason}"
        out.append(ApplyChild(kind, name, children.render(draft.pool, kind, name), reason))
    for child in found.values():
        reason = f"{child.kind} {child.name} is not wanted any more"
        out.append(DropChild(child.kind, child.name, reason, child.version))
    return out


def _drop_revisions(draft: Draft) -> list[DropRevision]:
    groups = (group.object for group in draft.snapshot.groups)
    used = {asked.record.revision for asked in groups if asked is not None and asked.record is not None}
    used |= {view.record.revision for view in draft.views.values() if view.record is not None}
    used |= {draft.target.name, draft.current}
    limit = draft.spec.revision_history_limit
    return [
        DropRevision(record.name, f"revision {record.name} is not used and not recent")
        for record in revision.superfluous(draft.snapshot.revisions, frozenset(used), limit)
    ]
