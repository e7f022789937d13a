"""The cache as the planner sees it: one pool's objects become a ``Snapshot``. No input or output here.

What is ours is decided by the controller in the owner references: objects that only bear our names or
labels are named in ``Snapshot.foreign`` and otherwise left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool, Metadata
from encodepool_operator.core import endpoints
from encodepool_operator.core.record import RecordError, record_of
from encodepool_operator.core.render import children, common, controllerrevision, drift
from encodepool_operator.core.revision import read_spec
from encodepool_operator.core.snapshot import (
    ChildObject,
    Drift,
    GroupObject,
    GroupSnapshot,
    PodFacts,
    RevisionRecord,
    Snapshot,
    Trouble,
)
from encodepool_operator.kube.client import FIELD_MANAGER, controller_of
from encodepool_operator.kube.kinds import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    POD,
    POOL,
    REVISION,
    SERVICE,
    STATEFUL_SET,
    Kind,
)

from . import podfacts
from .pools import HeldGroup, HeldPool, PoolKey, Pools
from .resync import Watched

Object = Mapping[str, Any]

WATCHED = (
    Watched(POOL, ""),
    # A StatefulSet gives its revisions the labels of its pods; ours belong to no group.
    Watched(REVISION, f"{labels.POOL},!{labels.GROUP}"),
    Watched(STATEFUL_SET, labels.POOL),
    Watched(POD, labels.POOL),
    Watched(SERVICE, labels.POOL),
    Watched(CONFIG_MAP, labels.POOL),
    Watched(DISRUPTION_BUDGET, labels.POOL),
)

DOCUMENTS = (endpoints.WORKERS, endpoints.ENDPOINTS, endpoints.SMG_WORKERS, endpoints.SMG_ARGS)
CHILD_KINDS = {SERVICE.kind: SERVICE, DISRUPTION_BUDGET.kind: DISRUPTION_BUDGET}


def _without_fields(obj: Object) -> Object:
    """Without who owns which field, and in Services and the like that is most of the object."""
    meta = obj["metadata"]
    if "managedFields" not in meta:
        return obj
    return {**obj, "metadata": {key: meta[key] for key in meta if key != "managedFields"}}


TRIM = {
    POD: podfacts.trim,
    POOL: _without_fields,
    REVISION: _without_fields,
    SERVICE: _without_fields,
    CONFIG_MAP: _without_fields,
    DISRUPTION_BUDGET: _without_fields,
}
"""What the cache keeps. StatefulSets are kept whole: additions to them are found by field owner."""


class Observer:
    """Makes snapshots. ``settled`` remembers the difference that an object had in the answer to our own
    write: something on the cluster insists on it, and to write again would never end."""

    def __init__(self, pools: Pools, default_image: str) -> None:
        self._pools = pools
        self._default_image = default_image
        self._settled: dict[str, Drift] = {}
        self._read: dict[str, tuple[Object, str, RevisionRecord | None]] = {}

    def snapshot(
        self,
        key: PoolKey,
        pool: EncodePool,
        strangers: Iterable[str] = (),
        troubles: tuple[Trouble, ...] = (),
    ) -> Snapshot:
        """``strangers`` are "Kind/name" of objects that are not in the cache because they lack our label."""
        held = self._pools.get(key)
        assert held is not None
        assert held.pool is not None
        uid = pool.metadata.uid
        revisions = self._revisions(held, key[1], uid)
        groups = self._groups(held, pool, {record.name: record for record in revisions})
        listed = held.others.get((CONFIG_MAP, names.endpoints_config_map(key[1])))
        own = listed is not None and common.is_owned(listed, uid)
        status: Mapping[str, Any] | None = held.pool.get("status") or None
        return Snapshot(
            pool=pool,
            groups=groups,
            revisions=revisions,
            last_incarnation=int((status or {}).get("lastIncarnation") or 0),
            documents=_documents(listed) if listed is not None and own else None,
            documents_version=version(listed) if listed is not None and own else "",
            status=status,
            taken_ports=self._taken_ports(key) if pool.spec.network.host_network else frozenset(),
            default_image=self._default_image,
            foreign=frozenset(strangers) | self._foreign(held, key[1], uid),
            children=self._children(held, pool),
            troubles=troubles,
        )

    def last_used(self, key: PoolKey, meta: Metadata) -> EncodePool | None:
        """The pool with the spec of its newest revision, for one whose own spec cannot be used: it wants
        the groups that there are. None if nothing was ever started."""
        held = self._pools.get(key)
        kept = self._revisions(held, key[1], meta.uid) if held is not None else ()
        spec = read_spec(kept[-1]) if kept else None
        if held is None or spec is None:
            return None
        groups = sum(group.stateful_set is not None for group in held.groups.values())
        return EncodePool(meta, replace(spec, replicas=groups))

    def wrote(self, kind: Kind, pool: EncodePool, answer: Object, revision: RevisionRecord | None) -> None:
        """Note what the answer to our own write of a group or a child differs in from what we wrote."""
        found = self._difference(kind, pool, answer, revision)
        uid = str(answer["metadata"].get("uid", ""))
        if found is None:
            self._settled.pop(uid, None)
        else:
            self._settled[uid] = found

    def forget(self, obj: Object) -> None:
        """It is gone."""
        uid = str(obj["metadata"].get("uid", ""))
        self._settled.pop(uid, None)
        self._read.pop(uid, None)

    def _drift(
        self, kind: Kind, pool: EncodePool, live: Object, revision: RevisionRecord | None
    ) -> Drift | None:
        found = self._difference(kind, pool, live, revision)
        return None if found == self._settled.get(str(live["metadata"].get("uid", ""))) else found

    def _difference(
        self, kind: Kind, pool: EncodePool, live: Object, revision: RevisionRecord | None
    ) -> Drift | None:
        name = live["metadata"]["name"]
        if kind is STATEFUL_SET:
            if revision is None:
                return None
            return drift.compare_group(pool, live, _index_of(live), revision, FIELD_MANAGER)
        return drift.compare(children.render(pool, kind.kind, name), live)

    # Parts

    def _groups(
        self, held: HeldPool, pool: EncodePool, revisions: Mapping[str, RevisionRecord]
    ) -> tuple[GroupSnapshot, ...]:
        out = []
        for index in sorted(held.groups):
            group = held.groups[index]
            if group.snapshot is None:
                group.snapshot = self._group(index, group, pool, revisions)
            if group.snapshot.object is not None or group.snapshot.pods:
                out.append(group.snapshot)
        return tuple(out)

    def _group(
        self, index: int, group: HeldGroup, pool: EncodePool, revisions: Mapping[str, RevisionRecord]
    ) -> GroupSnapshot:
        live = group.stateful_set
        foreign = live is not None and not common.is_owned(live, pool.metadata.uid)
        group.foreign = foreign
        pods: list[PodFacts] = []
        for pod in group.pods.values():
            owner = controller_of(pod)
            if foreign and live is not None and owner and owner.get("uid") == live["metadata"].get("uid"):
                continue  # of somebody else's StatefulSet
            found = podfacts.facts(pod)
            if found is not None:
                pods.append(found)
        pods.sort(key=lambda pod: (pod.index, pod.uid))
        asked = None if live is None or foreign else self._object(live, pool, revisions)
        return GroupSnapshot(index, asked, tuple(pods))

    def _object(self, live: Object, pool: EncodePool, revisions: Mapping[str, RevisionRecord]) -> GroupObject:
        meta, spec, status = live["metadata"], live["spec"], live.get("status") or {}
        try:
            record = record_of(meta.get("annotations") or {})
        except RecordError:
            record = None
        revision = revisions.get(record.revision) if record is not None else None
        return GroupObject(
            replicas=int(spec.get("replicas", 1)),
            generation=int(meta.get("generation", 0)),
            observed_generation=int(status.get("observedGeneration") or 0),
            current_pods=int(status.get("replicas") or 0),
            record=record,
            deleting="deletionTimestamp" in meta,
            version=version(live),
            drift=self._drift(STATEFUL_SET, pool, live, revision),
        )

    def _revisions(self, held: HeldPool, pool: str, uid: str) -> tuple[RevisionRecord, ...]:
        found = (self._revision(obj, pool, uid) for (kind, _), obj in held.others.items() if kind is REVISION)
        return tuple(sorted((record for record in found if record is not None), key=lambda r: r.number))

    def _revision(self, obj: Object, pool: str, uid: str) -> RevisionRecord | None:
        """Read once per version: a revision holds a whole pod template."""
        key = str(obj["metadata"].get("uid"))
        known = self._read.get(key)
        if known is None or known[0] is not obj or known[1] != uid:
            known = self._read[key] = (obj, uid, controllerrevision.read(obj, pool, uid))
        return known[2]

    def _children(self, held: HeldPool, pool: EncodePool) -> tuple[ChildObject, ...]:
        wanted = frozenset(children.wanted(pool))
        out = []
        for (kind, name), live in sorted(held.others.items(), key=lambda item: (item[0][0].kind, item[0][1])):
            if kind.kind not in CHILD_KINDS or not common.is_owned(live, pool.metadata.uid):
                continue
            found = self._drift(kind, pool, live, None) if (kind.kind, name) in wanted else None
            out.append(ChildObject(kind.kind, name, found, version(live)))
        return tuple(out)

    def _foreign(self, held: HeldPool, pool: str, uid: str) -> frozenset[str]:
        """Objects of our names in the cache that another, or nobody, controls. After ``_groups``."""
        ours = {
            (SERVICE, names.peers_service(pool)),
            (SERVICE, names.encode_service(pool)),
            (CONFIG_MAP, names.endpoints_config_map(pool)),
            (DISRUPTION_BUDGET, names.disruption_budget(pool)),
        }
        found = [
            f"{kind.kind}/{name}"
            for (kind, name), obj in held.others.items()
            if ((kind, name) in ours or (kind is REVISION and name.startswith(f"{pool}-")))
            and not common.is_owned(obj, uid)
        ]
        found += [
            f"{STATEFUL_SET.kind}/{names.group_object(pool, index)}"
            for index, group in held.groups.items()
            if group.foreign
        ]
        return frozenset(found)

    def _taken_ports(self, key: PoolKey) -> frozenset[int]:
        """Ports of the nodes that groups of other pools hold, running or stopped."""
        taken: set[int] = set()
        for other in self._pools.all():
            if other == key:
                continue
            held = self._pools.get(other)
            for group in held.groups.values() if held is not None else ():
                live = group.stateful_set
                if live is None or not live["spec"]["template"]["spec"].get("hostNetwork"):
                    continue
                try:
                    taken.update(record_of(live["metadata"].get("annotations") or {}).ports)
                except RecordError:
                    continue
        return frozenset(taken)


def version(obj: Object) -> str:
    """The precondition that is handed to the planner and comes back in its actions."""
    return f"{obj['metadata'].get('uid', '')}/{obj['metadata'].get('resourceVersion', '')}"


def preconditions(text: str) -> dict[str, str]:
    """``version`` as fields of ``metadata``."""
    uid, _, resource_version = text.partition("/")
    return {"uid": uid, "resourceVersion": resource_version}


def _index_of(live: Object) -> int:
    return int(live["metadata"]["name"].rpartition("-")[2])


def _documents(config_map: Object) -> dict[str, str]:
    data = config_map.get("data") or {}
    return {name: data[name] for name in DOCUMENTS if name in data}
