"""``encodepool-operator run``: all parts put together, and taken apart in the right order.

Every part is one task that never ends by itself. The first that ends, or a signal, ends all: work is
stopped, then the Lease is released so that another replica goes on at once, then the watches are closed.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import NotLeading
from encodepool_operator.kube.lease import Lease, LeaseLost, LeaseName
from encodepool_operator.kube.login import Login, log_in

from . import health, observe
from .definition import schema_problem, until_schema_fits, wait_until_served
from .events import EventPoster
from .execute import Executor
from .metrics import Metrics
from .pools import PoolKey, Pools
from .queue import KeyQueue
from .reconcile import Reconciler
from .resync import PERIOD_S, Resync, WatchStalled
from .watch import WatchEnded, watch

WORKERS = 4
"""Pools that are worked on at once; each has many requests under way."""

LEASE_LIMIT_S = 60.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """``namespaces`` () = all of the cluster. ``port`` 0 = any free one."""

    namespaces: tuple[str, ...] = ()
    default_image: str = ""
    host: str = ""
    port: int = 8080
    lease_namespace: str = ""
    lease_name: str = "encodepool-operator"


async def run_operator(options: Options) -> int:
    """Run until SIGTERM or SIGINT (exit code 0), or until a part fails (1). Raises LoginError, OSError."""
    return await Operator(options, await log_in()).run()


class Operator:
    """One run of the operator. Give it a running event loop. ``resync_s`` lies between two comparisons
    of the cache with lists."""

    def __init__(self, options: Options, login: Login, *, resync_s: float = PERIOD_S) -> None:
        self._options = options
        self._login = login
        self._clock = time.monotonic
        self._stopping = asyncio.Event()
        self._unwatch = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._failed = False

        identity = f"{socket.gethostname()}-{os.getpid()}"
        self._metrics = Metrics()
        # Renewals must not wait behind the writes of a large pool, so they have a client of their own.
        self._lease_client = Client(login.configuration, self._metrics.observe_call)
        self._lease = Lease(
            self._lease_client,
            LeaseName(options.lease_namespace or login.namespace, options.lease_name, identity),
        )
        self._client = Client(login.configuration, self._metrics.observe_call, may_write=self._lease.is_held)
        self._queue: KeyQueue[PoolKey] = KeyQueue(self._clock)
        self._pools = Pools()
        self._cache = Cache(observe.TRIM, self._changed)
        self._resync_s = resync_s
        self._resync = Resync(
            self._client,
            self._cache,
            observe.WATCHED,
            options.namespaces or ("",),
            self._metrics,
            period_s=resync_s,
        )
        self._poster = EventPoster(self._client, self._metrics, identity)
        self._observer = observe.Observer(self._pools, options.default_image)
        self._reconciler = Reconciler(
            self._pools,
            self._observer,
            Executor(self._client, self._cache, self._observer),
            self._queue,
            self._poster,
            self._metrics,
            clock=self._clock,
        )
        self._health = health.HealthServer(self._metrics, self._progress, self._refresh)

    async def run(self) -> int:
        self._take_signals()
        try:
            port = await self._health.start(self._options.host, self._options.port)
            where = ", ".join(self._options.namespaces) or "all namespaces"
            log.info("operator started", watching=where, port=port)
            self._spawn("start", self._start())
            await self._until_ended()
        finally:
            await self._shut_down()
        return 1 if self._failed else 0

    async def _start(self) -> None:
        await wait_until_served(self._client)
        clusterwide = not self._options.namespaces
        self._reconciler.schema_problem = await schema_problem(self._client, clusterwide=clusterwide)
        if self._reconciler.schema_problem:
            self._spawn("schema", self._follow_schema(clusterwide))
        await self._resync.fill()
        log.info("cache filled", pools=len(self._pools.existing()))
        self._spawn("lease", self._lease.run())
        self._spawn("resync", self._resync.run())
        self._spawn("events", self._poster.run())
        self._spawn("lead", self._lead())
        self._spawn(
            "watch",
            watch(
                observe.WATCHED,
                self._options.namespaces or ("",),
                self._heard,
                self._login,
                self._unwatch,
                self._take_signals,
            ),
        )

    async def _follow_schema(self, clusterwide: bool) -> None:
        await until_schema_fits(self._client, clusterwide=clusterwide)
        self._reconciler.schema_problem = ""
        if self._lease.held.is_set():
            for key in self._pools.existing():
                self._reconciler.changed(key)

    async def _lead(self) -> None:
        """Work while the Lease is ours. Losing it ends the process (``LeaseLost``, or NotLeading here)."""
        lost = False
        await self._lease.held.wait()
        # Watches of several kinds are not in step, and one may have been silent for a while: pods whose
        # StatefulSet we have not heard of yet would look like pods that are left over.
        await self._resync.fill()
        self._metrics.leading.set(1)
        for key in self._pools.existing():
            self._queue.add(key)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._reconciler.work())
        except* NotLeading:
            lost = True
        if lost:
            raise NotLeading  # alone: it is no defect, and needs no traceback

    # What comes in

    def _heard(self, kind: Any, event: str | None, obj: Any) -> None:
        self._resync.heard(kind, event, obj)
        if event == "DELETED":
            self._cache.drop(kind, obj)
        else:
            self._cache.put(kind, obj)

    def _changed(self, kind: Any, before: Any, after: Any) -> None:
        if before is not None and (
            after is None or after["metadata"].get("uid") != before["metadata"].get("uid")
        ):
            self._observer.forget(before)
        key = self._pools.note(kind, before, after)
        if key is not None and self._lease.held.is_set():
            self._reconciler.changed(key)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)

    # Life of the process

    def _spawn(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        self._tasks[asyncio.create_task(part, name=name)] = name

    async def _until_ended(self) -> None:
        """Until a signal, or until a part ends that should not."""
        signalled = asyncio.create_task(self._stopping.wait(), name="signal")
        try:
            while True:
                done, _ = await asyncio.wait(
                    {signalled, *self._tasks}, return_when=asyncio.FIRST_COMPLETED, timeout=1.0
                )
                if signalled in done:
                    log.info("asked to stop")
                    return
                for task in done:
                    name = self._tasks.pop(task)
                    error = task.exception()
                    if name in ("start", "schema") and error is None:
                        continue
                    self._failed = True
                    known = isinstance(error, LeaseLost | NotLeading | WatchStalled | WatchEnded)
                    log.error(
                        "the operator ends", part=name, why=str(error), exc_info=None if known else error
                    )
                    return
        finally:
            signalled.cancel()

    async def _shut_down(self) -> None:
        watching = [task for task, name in self._tasks.items() if name == "watch"]
        others = [task for task in self._tasks if task not in watching]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._lease.release()
        await self._health.close()
        self._unwatch.set()
        await asyncio.gather(*watching, return_exceptions=True)
        await self._client.close()
        await self._lease_client.close()

    # What is shown

    def _progress(self) -> health.Progress:
        now_s = self._clock()
        complete_s = self._resync.complete_s
        return health.Progress(
            queue_s=self._queue.age_s if self._lease.held.is_set() else 0.0,
            resync_s=None if complete_s is None else now_s - complete_s,
            resync_limit_s=3 * self._resync_s,
            lease_s=0.0 if complete_s is None else now_s - max(self._lease.looked_at_s, complete_s),
            lease_limit_s=LEASE_LIMIT_S,
        )

    def _refresh(self) -> None:
        self._metrics.queue_depth.set(self._queue.depth)
        self._metrics.queue_age_seconds.set(self._queue.age_s)
        self._resync.show()
        self._reconciler.gauges.show()
