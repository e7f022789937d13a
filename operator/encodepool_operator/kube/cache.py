"""The objects we watch, as last heard of: from the watch, from lists, and from answers to our writes.

The three arrive in any order; resourceVersion decides which is newer. What was deleted stays deleted:
a late answer to a write does not bring it back. (A watch also says "deleted" of an object that does not
match its selector any more; such an object may come back in a newer version.)
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .client import version_of
from .kinds import Kind

Object = Mapping[str, Any]
Trim = Callable[[Object], Object]
Changed = Callable[[Kind, Object | None, Object | None], None]
"""Called with what was known before and what is known now; None = not there."""

MAX_GRAVES = 10_000


def no_trim(obj: Object) -> Object:
    return obj


class Cache:
    """``trim`` by kind cuts an object down to what is needed of it, to save memory.

    ``changed`` is called once for every change, before the method that made it returns.
    """

    def __init__(self, trim: Mapping[Kind, Trim], changed: Changed) -> None:
        self._trim = trim
        self._changed = changed
        self._objects: dict[Kind, dict[tuple[str, str], Object]] = {}
        self._graves: OrderedDict[str, int] = OrderedDict()  # uid -> last version, oldest first

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(tuple(self._objects.get(kind, {}).values()))

    def put(self, kind: Kind, obj: Object) -> bool:
        """Note that ``obj`` exists; True if that was news."""
        meta = obj["metadata"]
        if version_of(obj) < self._graves.get(meta.get("uid"), 0):
            return False
        held = self._objects.setdefault(kind, {})
        key = (meta.get("namespace", ""), meta["name"])
        before = held.get(key)
        if before is not None and version_of(before) >= version_of(obj):
            return False
        if before is not None and before["metadata"].get("uid") != meta.get("uid"):
            self._bury(before)
        held[key] = self._trim.get(kind, no_trim)(obj)
        self._changed(kind, before, held[key])
        return True

    def drop(self, kind: Kind, obj: Object) -> bool:
        """Note that this very object (by uid) is gone; True if that was news."""
        meta = obj["metadata"]
        held = self._objects.get(kind, {})
        key = (meta.get("namespace", ""), meta["name"])
        before = held.get(key)
        self._bury(obj)
        if before is None or before["metadata"].get("uid") != meta.get("uid"):
            return False
        del held[key]
        self._changed(kind, before, None)
        return True

    def _bury(self, obj: Object) -> None:
        uid = obj["metadata"].get("uid")
        if uid:
            self._graves[uid] = max(version_of(obj), self._graves.get(uid, 0))
            self._graves.move_to_end(uid)
            while len(self._graves) > MAX_GRAVES:
                self._graves.popitem(last=False)
