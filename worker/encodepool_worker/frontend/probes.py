"""``/livez``, ``/readyz`` and ``/metrics`` on the metrics port."""

from collections.abc import Callable

from aiohttp import web

from .counts import CONTENT_TYPE
from .health import Report


def probes_app(
    *, alive: Callable[[], Report], ready: Callable[[], Report], metrics: Callable[[], bytes]
) -> web.Application:
    """Probes answer 200 ``ok``, or 503 with the reason."""

    def probe(judge: Callable[[], Report]) -> Callable[[web.Request], object]:
        async def answer(_request: web.Request) -> web.Response:
            report = judge()
            return web.Response(status=200 if report.good else 503, text=report.reason or "ok")

        return answer

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(client_max_size=1024)
    app.router.add_get("/livez", probe(alive))  # type: ignore[arg-type]
    app.router.add_get("/readyz", probe(ready))  # type: ignore[arg-type]
    app.router.add_get("/metrics", show)
    return app
