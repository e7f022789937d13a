"""How pools of a cluster are shown: the columns of ``kubectl get``, and one pool in detail."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from encodepool_operator.core import consumer, reasons

from .progress import PIPE_WIDTH, Screen

Object = Mapping[str, Any]

POOL_COLUMNS = ("NAMESPACE", "NAME", "DESIRED", "READY", "UPDATED", "TP", "MODEL", "AVAILABLE", "AGE")
GROUP_COLUMNS = ("GROUP", "PHASE", "REVISION", "INCARNATION", "HOST", "RESTARTS", "REASON")
CONDITION_COLUMNS = ("CONDITION", "STATUS", "REASON", "MESSAGE")
PLAN_COLUMNS = ("ACTION", "GROUP", "REASON")


def print_table(pools: Sequence[Object], *, detailed: bool) -> None:
    _console().print(_shown(pools, detailed, datetime.now(UTC)))


def print_plan(steps: Sequence[Object]) -> None:
    console = _console()
    if not steps:
        console.print("nothing to do")
        return
    table = _table(PLAN_COLUMNS)
    for step in steps:
        _add(table, step["action"], "" if step["group"] is None else step["group"], step["reason"])
    console.print(table)


def print_gateway_flags(pool: str, listed: str) -> None:
    """One line of flags for each way; ``listed`` are the published tokens of the groups of now."""
    namespace, _, name = pool.partition("/")
    click.echo(f"# pool {pool}")
    for way in consumer.ways(namespace, name):
        click.echo(f"# {way.title}" + (f"; add {way.needs}" if way.needs else ""))
        click.echo(" ".join([way.flags, *(listed.split() if way.key == consumer.STATIC else ())]))


class LiveTable(Screen):
    """Shows pools again and again: in place on a terminal, elsewhere one table after another."""

    def __init__(self, *, detailed: bool) -> None:
        super().__init__(_console())
        self._detailed = detailed

    def show(self, pools: Sequence[Object]) -> None:
        shown = _shown(pools, self._detailed, datetime.now(UTC))
        if self._console.is_terminal:
            self._live.update(shown, refresh=True)
        else:
            self._console.print(shown)

    def trouble(self, why: str) -> None:
        """The pools cannot be read now."""
        click.echo(f"{why}; trying again", err=True)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _shown(pools: Sequence[Object], detailed: bool, now: datetime) -> Group | Table | str:
    if not pools:
        return "no EncodePools found"
    table = _table(POOL_COLUMNS)
    for pool in pools:
        _add(table, *_pool_cells(pool, now))
    if not detailed:
        return table
    status = pools[0].get("status") or {}
    parts: list[Table | Text] = [table, _conditions(status)]
    if status.get("groups"):
        parts.append(_groups(status))
    advice = _advice(status)
    if advice:
        parts.append(Text("\n".join(advice)))
    spaced: list[Table | Text] = []
    for part in parts:
        spaced += [part, Text()]
    return Group(*spaced[:-1])


def _pool_cells(pool: Object, now: datetime) -> tuple[Any, ...]:
    meta, spec, status = pool["metadata"], pool.get("spec") or {}, pool.get("status") or {}
    model = spec.get("model") or {}
    available: Object = next((c for c in status.get("conditions") or () if c["type"] == "Available"), {})
    return (
        meta.get("namespace", ""),
        meta["name"],
        spec.get("replicas", ""),
        status.get("readyReplicas", 0),
        status.get("updatedReplicas", 0),
        spec.get("tensorParallelSize", ""),
        status.get("model") or model.get("name") or model.get("path") or "",
        available.get("status", "Unknown"),
        _age(meta.get("creationTimestamp", ""), now),
    )


def _conditions(status: Object) -> Table:
    table = _table(CONDITION_COLUMNS)
    for condition in status.get("conditions") or ():
        _add(table, *(condition.get(key, "") for key in ("type", "status", "reason", "message")))
    return table


def _advice(status: Object) -> list[str]:
    """A line for each reason that asks for somebody: what to do, and where more stands."""
    known = [(one["type"], one.get("reason", "")) for one in status.get("conditions") or ()]
    return [f"{reason.name}: {reason.act} ({reason.page})" for reason in reasons.to_act_on(known)]


def _groups(status: Object) -> Table:
    table = _table(GROUP_COLUMNS)
    for group in status["groups"]:
        keys = ("index", "phase", "revision", "incarnation", "host", "restarts", "reason")
        _add(table, *(group.get(key, "") for key in keys))
    if status.get("groupsTruncated"):
        _add(table, "...", f"and {status['groupsTruncated']} more")
    return table


def _table(columns: Sequence[str]) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="")


def _add(table: Table, *cells: Any) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _age(created: str, now: datetime) -> str:
    try:
        passed_s = int((now - datetime.fromisoformat(created)).total_seconds())
    except ValueError:
        return ""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed_s >= 2 * length_s:
            return f"{passed_s // length_s}{unit}"
    return f"{max(0, passed_s)}s"
