"""One plan in the making: the facts, what was decided so far, and questions about both.

``views`` follows the decisions: a group that is drained by this plan is DRAINING from then on, one
that is started is STARTING with its new record, so the list and the status tell what will be.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import Spec

from . import endpoints, revision, rollout
from .actions import (
    DeleteGroup,
    DeletePod,
    Publish,
    RecordGroup,
    RepairGroup,
    StartGroup,
    StopGroup,
    Withdraw,
)
from .addresses import AddressBook
from .group import GroupRules, GroupView, Phase
from .memo import Memo
from .record import GroupRecord
from .render.pod import template
from .snapshot import Drift, GroupSnapshot, RevisionRecord, Snapshot

Change: TypeAlias = StopGroup | DeleteGroup | StartGroup


class Draft:
    """``records`` and ``changes`` hold at most one action on each group's object."""

    def __init__(self, snapshot: Snapshot, now: float, memo: Memo) -> None:
        self.snapshot = snapshot
        self.memo = memo
        self.now = now
        self.pool = snapshot.pool
        self.spec = snapshot.pool.spec
        resume = self.pool.metadata.annotations.get(labels.RESUME, "")
        self.rules = GroupRules(self.spec.restart, self.pool.metadata.uid, resume)
        self.target = self._target()
        self.kept = {record.name: record for record in snapshot.revisions} | {self.target.name: self.target}
        self.current = str((snapshot.status or {}).get("currentRevision") or self.target.name)
        self.budget = rollout.budget(self.spec.rollout, self.spec.replicas)
        self.views = {group.index: memo.view(group, self.rules, now) for group in snapshot.groups}
        memo.forget_all_but(frozenset(self.views))
        self._specs: dict[str, Spec] = {}
        self._served: dict[int, tuple[GroupView, bool]] = {}
        self.published = endpoints.listed_ids(snapshot.documents)
        self.book = AddressBook(snapshot)
        self.no_ports = False
        self.wakes: list[float] = []
        self.records: dict[int, RecordGroup] = {}
        self.changes: dict[int, Change] = {}
        self.repairs: list[RepairGroup] = []
        self.labels: list[Withdraw | Publish] = []
        self.pods: list[DeletePod] = []

    def _target(self) -> RevisionRecord:
        """The wanted revision; a new one with its pod template, where pods are made from one."""
        chosen = revision.choose(self.spec, self.snapshot.default_image, self.snapshot.revisions)
        if self.snapshot.children is None or chosen.template:
            return chosen
        spec = revision.read_spec(chosen) or self.spec
        rendered = template(self.pool.metadata.name, chosen.name, spec)
        return replace(chosen, template=revision.canonical(rendered))

    # Questions

    def spec_of(self, view: GroupView) -> Spec:
        """The spec that the group's pods run: of its own revision, of the pool's if that is lost."""
        name = view.record.revision if view.record is not None else ""
        if name not in self._specs:
            kept = self.kept.get(name)
            self._specs[name] = (revision.read_spec(kept) if kept is not None else None) or self.spec
        return self._specs[name]

    def revision_of(self, view: GroupView) -> RevisionRecord:
        """The revision of the group's pods; the wanted one if that is lost."""
        name = view.record.revision if view.record is not None else ""
        return self.kept.get(name, self.target)

    def pods_asked_for(self, view: GroupView) -> int:
        """None, or all of a group: any other number was somebody's edit."""
        asked = view.source.object
        return self.spec_of(view).pods_per_group if asked is not None and asked.replicas else 0

    def id_of(self, view: GroupView) -> str:
        meta = self.pool.metadata
        incarnation = view.record.incarnation if view.record is not None else 0
        return names.endpoint_id(meta.namespace, meta.name, view.index, incarnation)

    def managed(self) -> list[GroupView]:
        """Groups that count as the pool's: those with an object that stays."""
        return [
            view
            for view in self.views.values()
            if view.source.object is not None and not view.source.object.deleting
        ]

    def version_of(self, view: GroupView) -> str:
        return view.source.object.version if view.source.object is not None else ""

    def serves(self, view: GroupView) -> bool:
        """In the list, or to be in it from this plan on: routable, and its label is in place."""
        if view.index in self.changes:
            return False
        known = self._served.get(view.index)
        if known is None or known[0] is not view:
            leader = view.leader
            labelled = leader is not None and leader.publication is not None
            known = (view, labelled and endpoints.routable(view, self.spec_of(view), self.now))
            self._served[view.index] = known
        return known[1]

    def serves_alone(self, view: GroupView) -> bool:
        """Whether the list is empty once this group leaves it."""
        others = (other for other in self.views.values() if other.index != view.index)
        return self.serves(view) and not any(self.serves(other) for other in others)

    def listed(self) -> frozenset[int]:
        return frozenset(view.index for view in self.views.values() if self.serves(view))

    def revision_for(self, index: int, record: GroupRecord | None) -> RevisionRecord:
        """The revision to start with: the wanted one, unless the rollout holds this group back."""
        if not rollout.held(index, self.spec.rollout):
            return self.target
        own = record.revision if record is not None else self.current
        return self.kept.get(own, self.target)

    def free_indices(self) -> Iterator[int]:
        """Indices without object and pods, lowest first; names taken by others are left out."""
        name = self.pool.metadata.name
        index = 0
        while True:
            taken = f"StatefulSet/{names.group_object(name, index)}" in self.snapshot.foreign
            if index not in self.views and not taken:
                yield index
            index += 1

    # Decisions

    def record(self, view: GroupView, record: GroupRecord, reason: str) -> None:
        """Plan to write ``record``; the first reason of a plan stands for all."""
        before = self.records.get(view.index)
        text = before.reason if before is not None else reason
        self.records[view.index] = RecordGroup(
            view.index,
            self.pods_asked_for(view),
            self.revision_of(view),
            record,
            text,
            self.version_of(view),
        )
        self.views[view.index] = replace(self.views[view.index], record=record)

    def drain(self, view: GroupView, why: str) -> None:
        """Begin to take the group away: later steps withdraw and stop it."""
        assert view.record is not None
        if self.serves_alone(view):
            why += "; no group is listed then, so a gateway sends pixels to prefill or refuses images"
        record = replace(view.record, draining_since=self.now)
        self.record(view, record, f"group {view.index} is drained: {why}")
        self.views[view.index] = replace(
            self.views[view.index], phase=Phase.DRAINING, why="it is being drained", ready=False, seal=None
        )

    def stop(self, view: GroupView, record: GroupRecord, reason: str) -> None:
        revision_of_pods = self.revision_of(view)
        version = self.version_of(view)
        self.changes[view.index] = StopGroup(view.index, revision_of_pods, record, reason, version)

    def repair(self, view: GroupView, drift: Drift) -> None:
        """Write the group's object as it was before somebody edited it."""
        asked = view.source.object
        assert asked is not None
        assert view.record is not None
        self.repairs.append(
            RepairGroup(
                view.index,
                self.pods_asked_for(view),
                self.revision_of(view),
                view.record,
                drift.remove,
                f"the object of group {view.index} was edited and is written again: {drift.reason}",
                asked.version,
            )
        )

    def start(self, action: StartGroup) -> None:
        before = self.views.get(action.group)
        self.records.pop(action.group, None)
        self.changes[action.group] = action
        source = before.source if before is not None else GroupSnapshot(action.group, None)
        self.views[action.group] = GroupView(
            action.group, source, action.record, Phase.STARTING, "it is being started", running=True
        )

    def delete(self, view: GroupView, reason: str) -> None:
        self.changes[view.index] = DeleteGroup(view.index, reason, self.version_of(view))
        del self.views[view.index]
