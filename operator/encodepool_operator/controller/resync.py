"""Lists compared with the cache: the net under the watches, which have been seen to fall silent.

Every ``PERIOD_S`` each kind is listed. What the list knows better goes into the cache at once, so the
pools are right whatever became of the watch. It is also remembered: a watch that has still not told of
it one period later tells nothing at all, and the process ends to be started anew.

A watch that lists again by itself (after 410 Gone) never tells of what was deleted in between. Such a
list is recognised, and followed by one of ours; deletions found then are not held against the watch. One
that finds nothing cannot be recognised, so no deletion is owed where a list of ours is empty too, or where
the watch has told of something newer.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Client, version_of
from encodepool_operator.kube.errors import ApiError, KubeError
from encodepool_operator.kube.kinds import Kind

from .metrics import Metrics

PERIOD_S = 300.0
FIRST_S = 10.0
"""The first comparison comes soon: the watches have begun after the lists that filled the cache."""

RELIST_PAUSE_S = 1.0
RETRY_S = 5.0

Object = Mapping[str, Any]
log = structlog.get_logger(__name__)


class WatchStalled(Exception):
    """A watch has told nothing of a change for a whole period."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind, and the label selector it is listed and watched with."""

    kind: Kind
    selector: str


@dataclass(frozen=True, slots=True)
class _Debt:
    """A change that a watch owes us: ``version`` of the object, or its deletion if None, as a list of
    version ``at`` told it."""

    uid: str
    version: int | None
    at: int
    seen_s: float


class Resync:
    """``namespaces`` are those that are watched; (``""``,) = all of them. ``period_s`` lies between two
    comparisons."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        watched: Sequence[Watched],
        namespaces: Sequence[str],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        period_s: float = PERIOD_S,
    ) -> None:
        self._client = client
        self._cache = cache
        self._watched = tuple(watched)
        self._namespaces = tuple(namespaces)
        self._metrics = metrics
        self._clock = clock
        self._period_s = period_s
        self._debts: dict[tuple[Kind, str, str], _Debt] = {}
        self._relisted: set[Kind] = set()
        self._wake = asyncio.Event()
        self._events_s: dict[Kind, float] = {}
        self.complete_s: float | None = None
        """When the last complete comparison ended; None before the first."""

    async def fill(self) -> None:
        """The first lists, before anything is watched. Tries until they are there."""
        for watched in self._watched:
            while True:
                try:
                    await self._compare(watched, owed=False, version="")
                    break
                except KubeError as error:
                    log.warning("cannot list yet", kind=watched.kind.plural, why=str(error))
                    await asyncio.sleep(RETRY_S)
        self.complete_s = self._clock()

    def heard(self, kind: Kind, event: str | None, obj: Object) -> None:
        """A watch told of ``obj``: ``event`` is "ADDED", "MODIFIED" or "DELETED", or None when it
        stands in a list that the watch has made."""
        self._events_s[kind] = self._clock()
        meta = obj["metadata"]
        key = (kind, meta.get("namespace", ""), meta["name"])
        debt = self._debts.get(key)
        if debt is not None:
            deleted = event == "DELETED" and meta.get("uid") == debt.uid
            newer = debt.version is not None and version_of(obj) >= debt.version
            other = meta.get("uid") != debt.uid
            if deleted or newer or other:
                del self._debts[key]
        if event is not None and self._debts:
            # A watch tells in order: it is past that deletion, or has listed again since.
            self._waive_deletions(kind, "" if "" in self._namespaces else key[1], before=version_of(obj))
        if event is None and kind not in self._relisted:
            self._relisted.add(kind)
            self._wake.set()

    def show(self) -> None:
        """Bring the gauges up to date."""
        now_s = self._clock()
        for watched in self._watched:
            heard_s = self._events_s.get(watched.kind)
            if heard_s is not None:
                self._metrics.watch_age_seconds.labels(watched.kind.plural).set(now_s - heard_s)
        if self.complete_s is not None:
            self._metrics.resync_age_seconds.set(now_s - self.complete_s)

    async def run(self) -> None:
        """Ends only with WatchStalled, or by being cancelled."""
        next_s = self._clock() + min(FIRST_S, self._period_s)
        while True:
            await self._rest(next_s)
            if self._relisted:
                await asyncio.sleep(RELIST_PAUSE_S)
                kinds, self._relisted = self._relisted, set()
                await self._all([w for w in self._watched if w.kind in kinds], owed=False)
            if self._clock() >= next_s:
                complete = await self._all(self._watched, owed=True)
                next_s = self._clock() + (self._period_s if complete else min(RETRY_S, self._period_s))
                self._check()

    async def _rest(self, until_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _all(self, watched: Sequence[Watched], *, owed: bool) -> bool:
        """Compare these kinds; False if one could not be listed."""
        for one in watched:
            try:
                await self._compare(one, owed=owed, version="0")
            except KubeError as error:
                log.warning("cannot list", kind=one.kind.plural, why=str(error))
                return False
            if not owed:  # a watch that lists again is awake, and will not tell of what was deleted before
                self._waive_deletions(one.kind, "")
        if owed:
            self.complete_s = self._clock()
        return True

    async def _compare(self, watched: Watched, *, owed: bool, version: str) -> None:
        kind = watched.kind
        for namespace in self._namespaces:
            before = {
                (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]): obj
                for obj in self._cache.all(kind)
                if namespace in ("", obj["metadata"].get("namespace", ""))
            }
            try:
                listed = await self._client.list(kind, namespace, watched.selector, version)
            except ApiError as error:
                if error.code != 404:  # 410: a list was so long that its version was given up
                    raise
                continue  # the kind is not served (any more): its watch ends, and with it the process
            at = int(listed.version or 0)
            for obj in listed.items:
                meta = obj["metadata"]
                before.pop((meta.get("namespace", ""), meta["name"]), None)
                if self._cache.put(kind, obj) and owed:
                    self._owe(kind, obj, version_of(obj), at)
            for missing in before.values():
                # A list older than the object says nothing about it.
                if version_of(missing) <= at and self._cache.drop(kind, missing) and owed:
                    self._owe(kind, missing, None, at)
            if not listed.items:
                self._waive_deletions(kind, namespace)

    def _waive_deletions(self, kind: Kind, namespace: str, before: int | None = None) -> None:
        """``namespace`` "" = all. ``before``: only those that a list older than this told of."""
        for key, debt in list(self._debts.items()):
            old = before is None or debt.at < before
            if key[0] is kind and namespace in ("", key[1]) and debt.version is None and old:
                del self._debts[key]

    def _owe(self, kind: Kind, obj: Object, version: int | None, at: int) -> None:
        meta = obj["metadata"]
        self._metrics.resync_differences.labels(kind.plural).inc()
        log.info(
            "a list knew better than the watch",
            kind=kind.plural,
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            gone=version is None,
        )
        key = (kind, meta.get("namespace", ""), meta["name"])
        self._debts[key] = _Debt(meta.get("uid", ""), version, at, self._clock())

    def _check(self) -> None:
        """Raise WatchStalled if a debt has not been paid within a period."""
        now_s = self._clock()
        for (kind, namespace, name), debt in self._debts.items():
            if now_s - debt.seen_s >= self._period_s:
                self._metrics.stalled_watches.labels(kind.plural).inc()
                raise WatchStalled(f"the watch of {kind.plural} has not told of {namespace}/{name}")
