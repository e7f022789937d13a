"""Starting and ending an HTTP server of this process. A port that cannot be bound is an error."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..errors import ConfigError
from ..logs import LimitedLog

BACKLOG = 512
SHUTDOWN_S = 1.0


class HttpServer:
    """One application on one port; port 0 takes any free one."""

    def __init__(self, app: web.Application, host: str, port: int, purpose: str) -> None:
        self._host = host
        self._port = port
        self._purpose = purpose
        self._runner = web.AppRunner(
            app, access_log=None, logger=_logger(), handle_signals=False, shutdown_timeout=SHUTDOWN_S
        )

    async def start(self) -> int:
        """The port it listens on. Raises ConfigError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self._host} port {self._port}"
            raise ConfigError([f"{self._purpose}: cannot listen on {where}: {error.strerror}"]) from error
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        await self._runner.cleanup()


class _Complaints(logging.Handler):
    """What aiohttp says of requests, as lines of ours: few, since strangers cause them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = LimitedLog(per_s=1, burst=10)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._log.warning("an HTTP request cannot be read", problem=repr(error.message)[:200])
        else:
            self._log.warning(record.getMessage(), exc_info=record.exc_info)


def _logger() -> logging.Logger:
    """Of one server, and known to nobody else."""
    logger = logging.Logger("encodepool.http")
    logger.addHandler(_Complaints())
    return logger
