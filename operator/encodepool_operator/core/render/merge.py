"""A user's pod template under what the operator owns.

Where both say something, the operator's value stands. Objects are merged key by key; lists whose
items Kubernetes tells apart by a key are merged by it; any other list is one value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from encodepool_operator.api.native import KEY_DEFAULTS, LIST_KEYS, list_keys

_DEEP = frozenset({"containers", "initContainers"})
"""Lists whose items are merged; of other lists an item of ours replaces the user's."""

_WHOLE = frozenset({"startupProbe", "readinessProbe", "livenessProbe", "preStop", "valueFrom"})
"""Objects of which ours replaces the user's: two handlers in one probe are no probe."""

_UNITED = frozenset({"tolerations", "add"})
"""Lists where both stand: ours and what the user has beside them (``add`` of capabilities)."""


def merge(under: Any, over: Any, key: str = "") -> Any:
    """A new value; ``key`` is where both stand. Keys without a value (null) are left out."""
    if isinstance(under, Mapping) and isinstance(over, Mapping) and key not in _WHOLE:
        out = {name: merge(under.get(name), value, name) for name, value in over.items()}
        out |= {name: cleaned(value) for name, value in under.items() if name not in over}
        return {name: value for name, value in out.items() if value is not None}
    if isinstance(under, Sequence) and isinstance(over, list) and not isinstance(under, str):
        if key in LIST_KEYS:
            return _by_key(under, over, key)
        if key in _UNITED:
            return [*over, *(cleaned(item) for item in under if item not in over)]
    return cleaned(over)


def cleaned(value: Any) -> Any:
    """A deep copy without keys that have no value."""
    if isinstance(value, Mapping):
        return {key: cleaned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [cleaned(item) for item in value]
    return value


def item_key(item: Any, key: str) -> dict[str, Any]:
    """What tells an item of list ``key`` from the others."""
    return {name: item.get(name, KEY_DEFAULTS.get(name)) for name in list_keys(key, item)}


def _by_key(under: Sequence[Any], over: list[Any], key: str) -> list[Any]:
    """Ours first and in our order, then what only the user has."""
    # Ports have names, and a port of ours is a place to be filled: both tell whether one is taken.
    names = {item["name"] for item in over if key == "ports" and "name" in item}
    theirs = {_hashable(item_key(item, key)): item for item in under}
    out = []
    for item in over:
        other = theirs.pop(_hashable(item_key(item, key)), None)
        out.append(merge(other, item) if key in _DEEP and other is not None else cleaned(item))
    return [*out, *(cleaned(item) for item in theirs.values() if item.get("name") not in names)]


def _hashable(key: dict[str, Any]) -> str:
    return repr(key)
