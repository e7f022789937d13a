"""Which objects of the cache belong to which pool and group, kept up to date change by change.

An object is filed under the pool that its owner or label names; whether it really is that pool's is decided
when a snapshot is made (``observe``). A group remembers its ``GroupSnapshot`` until one of its objects
changes, so an event costs what its group costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.core.snapshot import GroupSnapshot
from encodepool_operator.kube.client import controller_of
from encodepool_operator.kube.kinds import POD, POOL, REVISION, STATEFUL_SET, Kind

Object = Mapping[str, Any]
PoolKey = tuple[str, str]
"""(namespace, name)"""


@dataclass(slots=True)
class HeldGroup:
    """``snapshot`` is None after a change: it has to be made anew. ``foreign``: the StatefulSet was found
    to be somebody else's when it was made."""

    stateful_set: Object | None = None
    pods: dict[str, Object] = field(default_factory=dict)
    snapshot: GroupSnapshot | None = None
    foreign: bool = False


@dataclass(slots=True)
class HeldPool:
    """``others`` are the objects that belong to no group: Services, ConfigMap, revisions ...

    ``count`` grows with every change of anything that is filed here.
    """

    pool: Object | None = None
    groups: dict[int, HeldGroup] = field(default_factory=dict)
    others: dict[tuple[Kind, str], Object] = field(default_factory=dict)
    count: int = 0

    @property
    def empty(self) -> bool:
        return self.pool is None and not self.groups and not self.others


class Pools:
    """``note`` is the cache's ``changed``."""

    def __init__(self) -> None:
        self._held: dict[PoolKey, HeldPool] = {}

    def existing(self) -> list[PoolKey]:
        """Pools that there are, not only objects that name them."""
        return [key for key, held in self._held.items() if held.pool is not None]

    def all(self) -> list[PoolKey]:
        """All keys under which something is filed."""
        return list(self._held)

    def get(self, key: PoolKey) -> HeldPool | None:
        return self._held.get(key)

    def note(self, kind: Kind, before: Object | None, after: Object | None) -> PoolKey | None:
        """File the change; the pool that it concerns, None if it concerns none."""
        if before is not None and after is not None:
            old, new = pool_of(kind, before), pool_of(kind, after)
            if old is not None and old != new:
                self._file(kind, old, before, None)
        obj = after if after is not None else before
        assert obj is not None
        key = pool_of(kind, obj)
        if key is not None:
            self._file(kind, key, obj, after)
        return key

    def _file(self, kind: Kind, key: PoolKey, obj: Object, after: Object | None) -> None:
        """``after`` None takes ``obj`` out."""
        held = self._held.setdefault(key, HeldPool())
        held.count += 1
        name = obj["metadata"]["name"]
        new_pool = kind is POOL and (after is None or held.pool is None or _uid(held.pool) != _uid(after))
        if new_pool or kind is REVISION:
            # What is ours depends on the pool's uid; whether a group was edited, on its revision.
            for group in held.groups.values():
                group.snapshot = None
        if kind is POOL:
            held.pool = after
        elif kind in (STATEFUL_SET, POD):
            self._file_in_group(kind, held, key[1], obj, after)
        elif after is None:
            held.others.pop((kind, name), None)
        else:
            held.others[kind, name] = after
        if held.empty:
            del self._held[key]

    def _file_in_group(
        self, kind: Kind, held: HeldPool, pool: str, obj: Object, after: Object | None
    ) -> None:
        name = obj["metadata"]["name"]
        index = group_of(kind, pool, obj)
        if index is None:
            return
        group = held.groups.setdefault(index, HeldGroup())
        group.snapshot = None
        if kind is STATEFUL_SET:
            group.stateful_set = after
        elif after is None:
            group.pods.pop(name, None)
        else:
            group.pods[name] = after
        if group.stateful_set is None and not group.pods:
            del held.groups[index]


def pool_of(kind: Kind, obj: Object) -> PoolKey | None:
    """By its controller, which nobody can take away by accident, else by the label."""
    meta = obj["metadata"]
    if kind is POOL:
        return meta.get("namespace", ""), meta["name"]
    owner = controller_of(obj)
    if owner is not None and owner.get("kind") == POOL.kind:
        name = owner.get("name")
    else:
        name = (meta.get("labels") or {}).get(labels.POOL)
    return (meta.get("namespace", ""), name) if name else None


def group_of(kind: Kind, pool: str, obj: Object) -> int | None:
    """The group whose name the object bears; None for a name that no group of the pool has."""
    name = obj["metadata"]["name"]
    if kind is POD:
        name = name.rpartition("-")[0]
        owner = controller_of(obj)
        if owner is not None and (owner.get("kind"), owner.get("name")) != (STATEFUL_SET.kind, name):
            return None
    index = name.rpartition("-")[2]
    if not index.isdecimal() or names.group_object(pool, int(index)) != name:
        return None
    return int(index)


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))
