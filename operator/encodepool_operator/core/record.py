"""What the operator remembers about a group: the annotations of its StatefulSet.

Nothing durable is kept in memory. A ``GroupRecord`` is written with every change of the group's
object and read back from it, on a cluster as annotations, locally from the state file, in both
cases as the same ``dict[str, str]``. Times are wall-clock seconds since the epoch in memory and
RFC 3339 in UTC with milliseconds in the annotations.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from encodepool_operator.api import labels

MESSAGE_LIMIT_BYTES = 256
"""A failure keeps this much of the termination message; status objects must stay small."""


class RecordError(ValueError):
    """An annotation of ours cannot be read: somebody edited it. Names the annotation."""

    def __init__(self, annotation: str, value: str | None) -> None:
        shown = "missing" if value is None else f"{value!r}, which the operator never writes"
        super().__init__(f"annotation {annotation} is {shown}")
        self.annotation = annotation


@dataclass(frozen=True, slots=True)
class PortBlock:
    """The ports of one start. ``metrics`` is the fixed port of the spec on a pod network."""

    bootstrap: int
    grpc: int
    dist_init: int
    metrics: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.bootstrap, self.grpc, self.dist_init, self.metrics))


@dataclass(frozen=True, slots=True)
class SealedPod:
    uid: str
    restart_count: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Who was in the group when it was first complete and started, sorted by pod index."""

    pods: tuple[SealedPod, ...]
    at: float


@dataclass(frozen=True, slots=True)
class LastFailure:
    """Why a group was recreated, kept until the next failure.

    ``reason`` is one CamelCase word. ``counted``: a container failed, so the failure counts for
    backoff and ``maxRestarts``; an eviction or a plain deletion does not. ``message`` is at most
    ``MESSAGE_LIMIT_BYTES`` long in UTF-8.
    """

    at: float
    incarnation: int
    reason: str
    pod: str = ""
    node: str = ""
    container: str = ""
    exit_code: int | None = None
    message: str = ""
    counted: bool = True


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Durable facts of one group.

    ``restarts`` counts failures in a row of this revision; ``resumed`` is the value of the pool's
    resume annotation that was last honoured. ``seal``, ``withdrawn_at`` and ``draining_since``
    belong to this incarnation.
    """

    incarnation: int
    revision: str
    ports: PortBlock
    started_at: float
    seal: Seal | None = None
    restarts: int = 0
    failure: LastFailure | None = None
    withdrawn_at: float | None = None
    draining_since: float | None = None
    resumed: str = ""


def rfc3339(at: float) -> str:
    """Seconds since the epoch as ``2026-01-31T08:00:00.000Z``; times are kept to the millisecond."""
    return datetime.fromtimestamp(round(at, 3), UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def seconds(text: str) -> float:
    """Inverse of ``rfc3339``; takes any RFC 3339 time. Raises ValueError."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    return round(at.timestamp(), 3)


def shortened(message: str, limit: int = MESSAGE_LIMIT_BYTES) -> str:
    """The end of ``message`` (errors come last) in at most ``limit`` bytes of UTF-8."""
    encoded = message.strip().encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return "…" + encoded[-(limit - 3) :].decode(errors="ignore")


def not_after(record: GroupRecord, now: float) -> GroupRecord:
    """The record with times that lie in the future moved to ``now``.

    The wall clock may be set back; a wait that was measured against the old clock would otherwise
    last as long as the jump. The millisecond of tolerance is the annotations' rounding.
    """

    limit = now + 0.001
    times = (
        record.started_at,
        record.seal.at if record.seal is not None else None,
        record.failure.at if record.failure is not None else None,
        record.withdrawn_at,
        record.draining_since,
    )
    if all(at is None or at <= limit for at in times):
        return record

    def cap(at: float) -> float:
        return at if at <= limit else round(now, 3)

    capped = replace(record, started_at=cap(record.started_at))
    if record.seal is not None:
        capped = replace(capped, seal=replace(record.seal, at=cap(record.seal.at)))
    if record.failure is not None:
        capped = replace(capped, failure=replace(record.failure, at=cap(record.failure.at)))
    if record.withdrawn_at is not None:
        capped = replace(capped, withdrawn_at=cap(record.withdrawn_at))
    if record.draining_since is not None:
        capped = replace(capped, draining_since=cap(record.draining_since))
    return capped


def annotations_of(record: GroupRecord) -> dict[str, str]:
    """The record as annotations; what is None or empty is left out."""
    out = {
        labels.INCARNATION: str(record.incarnation),
        labels.REVISION: record.revision,
        labels.PORTS: ",".join(str(port) for port in record.ports),
        labels.STARTED_AT: rfc3339(record.started_at),
        labels.RESTARTS: str(record.restarts),
    }
    if record.seal is not None:
        pods = [[pod.uid, pod.restart_count] for pod in record.seal.pods]
        out[labels.SEAL] = _compact({"at": rfc3339(record.seal.at), "pods": pods})
    if record.failure is not None:
        out[labels.LAST_FAILURE] = _compact(failure_object(record.failure))
    if record.withdrawn_at is not None:
        out[labels.WITHDRAWN_AT] = rfc3339(record.withdrawn_at)
    if record.draining_since is not None:
        out[labels.DRAINING_SINCE] = rfc3339(record.draining_since)
    if record.resumed:
        out[labels.RESUMED] = record.resumed
    return out


def record_of(annotations: Mapping[str, str]) -> GroupRecord:
    """Inverse of ``annotations_of``; other annotations are ignored. Raises RecordError."""
    read = _Annotations(annotations)
    return GroupRecord(
        incarnation=read.required(labels.INCARNATION, int),
        revision=read.required(labels.REVISION, str),
        ports=read.required(labels.PORTS, _ports),
        started_at=read.required(labels.STARTED_AT, seconds),
        seal=read.optional(labels.SEAL, _seal),
        restarts=read.required(labels.RESTARTS, int),
        failure=read.optional(labels.LAST_FAILURE, _failure),
        withdrawn_at=read.optional(labels.WITHDRAWN_AT, seconds),
        draining_since=read.optional(labels.DRAINING_SINCE, seconds),
        resumed=annotations.get(labels.RESUMED, ""),
    )


def failure_object(failure: LastFailure) -> dict[str, Any]:
    """The failure as JSON values, for the annotation and for ``status.groups[].lastFailure``.

    An unknown exit code is left out: the API server drops nulls, so a status with one would never
    read as it was written.
    """
    out: dict[str, Any] = {
        "time": rfc3339(failure.at),
        "incarnation": failure.incarnation,
        "reason": failure.reason,
        "pod": failure.pod,
        "node": failure.node,
        "container": failure.container,
        "message": failure.message,
        "counted": failure.counted,
    }
    return out if failure.exit_code is None else out | {"exitCode": failure.exit_code}


class _Annotations:
    """Reads single annotations and says which one cannot be read."""

    def __init__(self, annotations: Mapping[str, str]) -> None:
        self.annotations = annotations

    def required(self, key: str, convert: Any) -> Any:
        if key not in self.annotations:
            raise RecordError(key, None)
        return self.optional(key, convert)

    def optional(self, key: str, convert: Any) -> Any:
        text = self.annotations.get(key)
        if text is None:
            return None
        try:
            return convert(text)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise RecordError(key, text) from exc


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _ports(text: str) -> PortBlock:
    return PortBlock(*(int(port) for port in text.split(",")))


def _seal(text: str) -> Seal:
    value = json.loads(text)
    pods = tuple(SealedPod(str(uid), int(restart_count)) for uid, restart_count in value["pods"])
    return Seal(pods, seconds(value["at"]))


def _failure(text: str) -> LastFailure:
    value = json.loads(text)
    exit_code = value.get("exitCode")
    return LastFailure(
        at=seconds(value["time"]),
        incarnation=int(value["incarnation"]),
        reason=str(value["reason"]),
        pod=str(value["pod"]),
        node=str(value["node"]),
        container=str(value["container"]),
        exit_code=None if exit_code is None else int(exit_code),
        message=str(value["message"]),
        counted=bool(value["counted"]),
    )
