"""Whether a child is still what was rendered: every rendered value must be in the live object.

What the API server fills in is in the live object alone and does not matter. What it leaves out is a
value that is empty (False, 0, "", {}, []), so an empty rendered value equals a missing one. Quantities are
compared as amounts.

Additions of others are left alone, but for those in a StatefulSet's pod template: they would reach
the group's pods. They are found through ``managedFields`` and taken out by a JSON patch, because
applying without them does not remove what another manager owns.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from encodepool_operator.api.native import KEY_DEFAULTS, LIST_KEYS
from encodepool_operator.api.types import EncodePool

from ..record import RecordError, record_of
from ..revision import read_spec
from ..snapshot import Drift, RevisionRecord
from . import quantity, statefulset
from .merge import item_key

_QUANTITIES = frozenset({"limits", "requests"})
_QUANTITY = "sizeLimit"
_QUANTITY_KEYS = frozenset({_QUANTITY, "divisor"})

_SHOWN = 60
"""Characters of a value in a reason."""


def compare(rendered: Mapping[str, Any], live: Mapping[str, Any]) -> Drift | None:
    """The first value of ``rendered`` that ``live`` does not have; None when it has them all."""
    difference = next(_differences(rendered, live, "", ""), "")
    return Drift(difference) if difference else None


def compare_group(
    pool: EncodePool, live: Mapping[str, Any], group: int, revision: RevisionRecord, manager: str
) -> Drift | None:
    """The same for a group's StatefulSet, with additions of others in its pod template.

    The annotations and whether pods are asked for are facts of the live object, so only a number of
    pods that the revision does not have differs. Nothing is said about an object whose annotations
    or revision cannot be read: the group is recreated for that. ``manager`` is our field manager.
    """
    spec = read_spec(revision)
    try:
        record = record_of(live["metadata"].get("annotations") or {})
    except RecordError:
        return None
    if spec is None:
        return None
    asked = live["spec"].get("replicas", 1)
    replicas = spec.pods_per_group if asked else 0
    rendered = statefulset.build(pool, group, replicas, record, revision)
    changed = compare(rendered, live)
    added = sorted(set(additions(rendered, live, manager)))
    if not added:
        return changed
    others = ", ".join(sorted({addition.manager for addition in added}))
    places = ", ".join(addition.path for addition in added[:3])
    more = f" and {len(added) - 3} more" if len(added) > 3 else ""
    reason = f"{others} added {places}{more}"
    # Later items of a list first, so that no removal moves what another one points at.
    pointers = sorted({addition.pointer for addition in added}, key=_removal_order, reverse=True)
    return Drift(f"{changed.reason}; {reason}" if changed else reason, tuple(pointers))


@dataclass(frozen=True, slots=True, order=True)
class Addition:
    """Something that another manager put into a template; ``pointer`` is a JSON pointer into the
    live object."""

    path: str
    pointer: str
    manager: str


def additions(rendered: Mapping[str, Any], live: Mapping[str, Any], manager: str) -> Iterator[Addition]:
    """What others added to ``spec.template``, each at its topmost place."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("manager") == manager or entry.get("subresource"):
            continue
        fields = entry.get("fieldsV1", {}).get("f:spec", {}).get("f:template")
        if fields:
            here = rendered["spec"]["template"], live["spec"]["template"]
            yield from _added(fields, *here, "spec.template", "/spec/template", str(entry.get("manager")))


def _added(
    fields: Mapping[str, Any], rendered: Any, live: Any, path: str, pointer: str, manager: str
) -> Iterator[Addition]:
    for name, inner in fields.items():
        kind, _, key = name.partition(":")
        if kind == "f" and isinstance(live, Mapping) and key in live:
            where, at = f"{path}.{key}", f"{pointer}/{_escaped(key)}"
            found = live[key], rendered.get(key)
        elif kind == "k" and isinstance(live, list):
            wanted = json.loads(key)
            index = _index(live, wanted)
            if index is None:
                continue
            where, at = f"{path}[{_label(wanted)}]", f"{pointer}/{index}"
            ours = _index(rendered, wanted)
            found = live[index], None if ours is None else rendered[ours]
        else:
            continue
        if found[1] is None:
            yield Addition(where, at, manager)
        elif isinstance(found[1], Mapping) or (isinstance(found[1], list) and key in LIST_KEYS):
            yield from _added(inner, found[1], found[0], where, at, manager)


def _differences(rendered: Any, live: Any, path: str, key: str) -> Iterator[str]:
    if rendered == live:
        return  # most parts are equal, and this is the fast way to see it
    if isinstance(rendered, dict):
        if not isinstance(live, dict):
            if rendered or live:
                yield _told(path, rendered, live)
            return
        for name, value in rendered.items():
            inner = _QUANTITY if key in _QUANTITIES else name
            yield from _differences(value, live.get(name), f"{path}.{name}" if path else name, inner)
    elif isinstance(rendered, list):
        yield from _list_differences(rendered, live, path, key)
    elif not rendered and live is None:
        return
    elif key not in _QUANTITY_KEYS or not quantity.same(rendered, live):
        yield _told(path, rendered, live)


def _list_differences(rendered: list[Any], live: Any, path: str, key: str) -> Iterator[str]:
    if not isinstance(live, list):
        if rendered or live:
            yield _told(path, rendered, live)
    elif key in LIST_KEYS:
        for item in rendered:
            wanted = item_key(item, key)
            index = _index(live, wanted)
            where = f"{path}[{_label(wanted)}]"
            if index is None:
                yield f"{where} is missing"
            else:
                yield from _differences(item, live[index], where, "")
    elif len(rendered) != len(live):
        yield f"{path} has {len(live)} items instead of {len(rendered)}"
    else:
        for i, (item, other) in enumerate(zip(rendered, live, strict=True)):
            yield from _differences(item, other, f"{path}[{i}]", "")


def _index(items: Any, wanted: Mapping[str, Any]) -> int | None:
    """Where the item with these keys is."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if all(item.get(key, KEY_DEFAULTS.get(key)) == value for key, value in wanted.items()):
            return i
    return None


def _label(wanted: Mapping[str, Any]) -> str:
    return "/".join(str(value) for value in wanted.values())


def _told(path: str, rendered: Any, live: Any) -> str:
    if live is None:
        return f"{path} is missing"
    return f"{path} is {_short(live)} instead of {_short(rendered)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _removal_order(pointer: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in pointer.split("/")]
