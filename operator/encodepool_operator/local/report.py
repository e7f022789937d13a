"""``status.json`` and ``processes.json``: what the controller tells everybody else."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from encodepool_operator.api import labels
from encodepool_operator.api.types import EncodePool
from encodepool_operator.core.group import GroupRules, GroupView, derive
from encodepool_operator.core.snapshot import Snapshot

from .ports import HOST
from .state import PoolState
from .statedir import StateDir, read_text, write_atomic


class GroupRow(msgspec.Struct, frozen=True):
    """One line of ``encodepool local status``; addresses are "" while the group is stopped."""

    group: int
    phase: str
    revision: str
    incarnation: int
    url: str
    bootstrap: str
    restarts: int
    reason: str
    listed: bool
    metrics: str = ""
    failed_incarnation: int | None = None
    exhausted: bool = False


class Report(msgspec.Struct, frozen=True):
    """The whole of ``status.json``.

    ``read`` is the digest of the text that was last read from ``DIR/pool.yaml``, ``manifest`` of the
    one that is carried out; they differ while ``problem`` says why the newer cannot be used.
    """

    pool: str
    namespace: str
    pid: int
    read: str
    manifest: str
    stopping: bool
    revision: str
    groups: list[GroupRow]
    status: dict[str, Any]
    problem: str = ""


class Member(msgspec.Struct, frozen=True):
    """One process of a pool: a line of ``processes.json`` (contract.md, "Files of local mode")."""

    pid: int
    group: int
    incarnation: int
    role: str
    rank: int | None = None


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def group_rules(pool: EncodePool) -> GroupRules:
    """As the planner makes them: the life of a group depends on these."""
    return GroupRules(pool.spec.restart, pool.metadata.uid, pool.metadata.annotations.get(labels.RESUME, ""))


def group_rows(snapshot: Snapshot, now: float) -> list[GroupRow]:
    rules = group_rules(snapshot.pool)
    return [_row(derive(group, rules, now)) for group in snapshot.groups]


def read_report(path: Path) -> Report | None:
    """What the controller last said; None if nothing, or nothing that this version understands."""
    text = read_text(path)
    try:
        return msgspec.json.decode(text, type=Report) if text is not None else None
    except msgspec.MsgspecError:
        return None


def write_report(path: Path, report: Report, before: Report | None) -> Report:
    if report != before:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    return report


def members(state_dir: StateDir, state: PoolState) -> list[Member]:
    """Supervisors from our own table; their children as each supervisor wrote them down."""
    found = []
    for index, group in sorted(state.groups.items()):
        for pod in group.pods:
            if pod.process is None or pod.exited is not None:
                continue
            found.append(Member(pod.process.pid, index, pod.incarnation, "supervisor"))
            found += _children(state_dir.children_file(index, pod.incarnation, pod.index))
    return found


def write_members(path: Path, found: list[Member]) -> None:
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n"
    if read_text(path) != text:
        write_atomic(path, text)


def _children(path: Path) -> list[Member]:
    text = read_text(path)
    try:
        rows = msgspec.json.decode(text, type=list[Member]) if text is not None else []
    except msgspec.MsgspecError:
        return []
    return [row for row in rows if row.role != "supervisor"]


def _row(view: GroupView) -> GroupRow:
    record = view.record
    running = view.running and record is not None
    failure = record.failure if record is not None else None
    return GroupRow(
        group=view.index,
        phase=view.phase.value,
        revision=record.revision if record else "",
        incarnation=record.incarnation if record else 0,
        url=f"grpc://{HOST}:{record.ports.grpc}" if running and record else "",
        bootstrap=f"{HOST}:{record.ports.bootstrap}" if running and record else "",
        restarts=record.restarts if record else 0,
        reason=view.why,
        listed=bool(view.labelled),
        metrics=f"http://{HOST}:{record.ports.metrics}/metrics" if running and record else "",
        failed_incarnation=failure.incarnation if failure else None,
        exhausted=view.exhausted,
    )


def condition(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One condition of a pool's status; empty if it is not there."""
    return next((found for found in status.get("conditions", []) if found.get("type") == name), {})
