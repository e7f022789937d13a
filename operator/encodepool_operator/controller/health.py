"""The operator's own HTTP server: /livez, /readyz and /metrics.

Alive means that it gets on: the event loop answers, no pool waits or is worked on for too long, and the
lists are compared as they should be. Ready means that its cache is filled, also while another replica
holds the Lease.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .metrics import Metrics

QUEUE_LIMIT_S = 300.0
"""Longer than any backoff and any plan."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Ages in seconds; None = not begun. ``lease_s``: since the Lease was last read or written."""

    queue_s: float
    resync_s: float | None
    resync_limit_s: float
    lease_s: float
    lease_limit_s: float


def stuck(progress: Progress) -> str:
    """Why the process should be restarted, "" if it should not."""
    if progress.queue_s > QUEUE_LIMIT_S:
        return f"a pool has waited for {progress.queue_s:.0f} s"
    if progress.resync_s is not None and progress.resync_s > progress.resync_limit_s:
        return f"nothing has been listed for {progress.resync_s:.0f} s"
    if progress.lease_s > progress.lease_limit_s:
        return f"the lease has not been looked at for {progress.lease_s:.0f} s"
    return ""


class HealthServer:
    """``refresh`` brings gauges up to date before they are shown."""

    def __init__(
        self,
        metrics: Metrics,
        progress: Callable[[], Progress],
        refresh: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._progress = progress
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port, which the system chooses for 0. Raises OSError."""
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show)
        self._runner = web.AppRunner(app, access_log=None, logger=_logger(), shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host or None, port)
        await site.start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:
        why = stuck(self._progress())
        return web.Response(status=503 if why else 200, text=why or "ok")

    async def _readyz(self, request: web.Request) -> web.Response:
        filled = self._progress().resync_s is not None
        return web.Response(
            status=200 if filled else 503, text="ok" if filled else "the cache is not filled yet"
        )

    async def _show(self, request: web.Request) -> web.Response:
        self._refresh()
        return web.Response(
            body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _logger() -> logging.Logger:
    """aiohttp's, without a traceback for each request of a stranger that is no HTTP (answered with 400)."""
    logger = logging.getLogger("encodepool.health")
    logger.addFilter(_is_about_us)
    return logger


def _is_about_us(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
