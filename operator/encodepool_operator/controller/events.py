"""Kubernetes Events on the pool: one for each action that somebody may want to know of.

They are posted by a task of their own from a bounded queue, so they delay nothing and a burst costs
events, not memory. Many like actions of one plan become one Event.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from encodepool_operator.api import labels
from encodepool_operator.core import actions as planned
from encodepool_operator.core.actions import Action
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import KubeError, NotLeading
from encodepool_operator.kube.kinds import EVENT, POOL

from .metrics import Metrics

COMPONENT = "encodepool-operator"
QUEUE_LIMIT = 512
MESSAGE_LIMIT = 1024
EACH_LIMIT = 10
"""Up to so many like actions of one plan have an Event each, more have one together."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """``type`` is "Normal" or "Warning", ``reason`` one CamelCase word."""

    type: str
    reason: str
    message: str


def notice_of(action: Action) -> Notice | None:
    """None for actions that only keep books: nobody waits to hear of them."""
    match action:
        case planned.StartGroup():
            return Notice("Normal", "GroupStarted", action.reason)
        case planned.StopGroup():
            failure = action.record.failure
            if failure is not None and failure.incarnation == action.record.incarnation:
                return Notice("Warning", "GroupFailed", action.reason)
            return Notice("Normal", "GroupStopped", action.reason)
        case planned.DeleteGroup():
            return Notice("Normal", "GroupDeleted", action.reason)
        case planned.RecordGroup() if action.record.draining_since is not None:
            return Notice("Normal", "GroupDraining", action.reason)
        case planned.RepairGroup():
            return Notice("Warning", "GroupRepaired", action.reason)
        case planned.Publish():
            return Notice("Normal", "GroupPublished", action.reason)
        case planned.Withdraw():
            return Notice("Normal", "GroupWithdrawn", action.reason)
        case planned.DeletePod():
            return Notice("Warning", "PodDeleted", action.reason)
        case planned.SaveRevision():
            return Notice("Normal", "RevisionSaved", action.reason)
    return None


def notices(done: Sequence[Action]) -> list[Notice]:
    """The Events of the actions of one plan."""
    return grouped([notice for notice in map(notice_of, done) if notice is not None])


def grouped(found: Sequence[Notice]) -> list[Notice]:
    """The same, with one in place of more than ``EACH_LIMIT`` of a kind."""
    by_kind: dict[tuple[str, str], list[Notice]] = {}
    for notice in found:
        by_kind.setdefault((notice.type, notice.reason), []).append(notice)
    out: list[Notice] = []
    for (kind, reason), same in by_kind.items():
        if len(same) <= EACH_LIMIT:
            out += same
        else:
            out.append(Notice(kind, reason, f"{len(same)} times, first: {same[0].message}"))
    return out


class EventPoster:
    """``post`` never waits; ``run`` sends until cancelled."""

    def __init__(self, client: Client, metrics: Metrics, identity: str) -> None:
        self._client = client
        self._metrics = metrics
        self._identity = identity
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_LIMIT)

    def post(self, pool: Mapping[str, Any], notice: Notice) -> None:
        try:
            self._queue.put_nowait(self._event(pool, notice))
        except asyncio.QueueFull:
            self._metrics.events_dropped.inc()

    async def run(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                await self._client.create(EVENT, event)
            except (KubeError, NotLeading) as error:
                # The pool's namespace may be on its way out, the server busy, or the Lease about to be
                # lost, which is not for events to find out: the log has it anyway.
                self._metrics.events_dropped.inc()
                log.debug("an event was not posted", reason=event["reason"], why=str(error))

    def _event(self, pool: Mapping[str, Any], notice: Notice) -> dict[str, Any]:
        meta = pool["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "namespace": meta["namespace"],
                "name": f"{meta['name']}.{uuid.uuid4().hex[:16]}",
                "labels": {labels.POOL: meta["name"]},
            },
            "involvedObject": {
                "apiVersion": POOL.api_version,
                "kind": POOL.kind,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta.get("uid", ""),
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:MESSAGE_LIMIT],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._identity,
        }
