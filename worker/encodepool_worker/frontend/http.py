"""Starting and ending an HTTP server of this process. A port that cannot be bound is an error."""

from aiohttp import web

from ..errors import ConfigError

BACKLOG = 512
SHUTDOWN_S = 1.0


class HttpServer:
    """One application on one port; port 0 takes any free one."""

    def __init__(self, app: web.Application, host: str, port: int, purpose: str) -> None:
        self._host = host
        self._port = port
        self._purpose = purpose
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)

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
