"""A server before the real API server that passes everything on, but for the faults it is told to make.

The operator gets a kubeconfig that names the proxy; the proxy asks the API server as a user of its own. So
each answer is real, and the audit log tells what got through.
"""

import asyncio
import itertools
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

END_TO_END = ("accept", "content-type", "user-agent")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``code`` is what it was answered, 0 if its connection was cut. ``at_s``: monotonic."""

    number: int
    method: str
    path: str
    watch: bool
    code: int
    at_s: float
    body: str = ""

    @property
    def kind(self) -> str:
        """The plural of what it is about."""
        parts = self.path.strip("/").split("/")
        at = parts.index("namespaces") + 2 if "namespaces" in parts and len(parts) > 4 else -1
        return parts[at] if at < len(parts) else ""


@dataclass(slots=True)
class Fault:
    """What happens to requests that ``hits``; it ends after ``times`` of them, or when it is mended.

    ``code`` answers it instead of the server; with ``after_s`` as Retry-After. ``inside``: a watch begins,
    and tells of an error of that code in its first event. ``mute``: a watch is passed on as far as its
    headers, then nothing more comes. ``cut``: the connection ends without an answer.
    """

    hits: Callable[[Asked], bool]
    code: int = 0
    inside: int = 0
    mute: bool = False
    cut: bool = False
    after_s: float | None = None
    times: int | None = None
    met: list[Asked] = field(default_factory=list)

    def takes(self, asked: Asked) -> bool:
        return (self.times is None or len(self.met) < self.times) and self.hits(asked)


class FaultProxy:
    """``kubeconfig`` is what its clients log in with; ``asked`` is every request so far, oldest first."""

    def __init__(self, upstream: Path, folder: Path) -> None:
        given = json.loads(upstream.read_text())
        self._server = given["clusters"][0]["cluster"]["server"]
        self._ssl = ssl.create_default_context(
            cafile=given["clusters"][0]["cluster"]["certificate-authority"]
        )
        user = given["users"][0]["user"]
        self._ssl.load_cert_chain(user["client-certificate"], user["client-key"])
        self.kubeconfig = folder / "through-proxy.kubeconfig"
        self._given = given
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._faults: list[Fault] = []
        self._open: set[asyncio.Transport] = set()
        self._numbers = itertools.count()
        self.asked: list[Asked] = []

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        self._thread.start()
        self._call(self._start())
        try:
            yield self
        finally:
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    # What a test says

    def fault(self, hits: Callable[[Asked], bool], **how: Any) -> Fault:
        made = Fault(hits, **how)
        self._faults = [*self._faults, made]
        return made

    def mend(self) -> None:
        """No more faults; watches that were muted stay so."""
        self._faults = []

    def cut_watches(self) -> int:
        """End every watch that is open, in the middle; how many there were."""
        found = len(self._open)

        def cut() -> None:
            for transport in tuple(self._open):
                transport.abort()

        self._loop.call_soon_threadsafe(cut)
        return found

    @property
    def open_watches(self) -> int:
        return len(self._open)

    # The server

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0), auto_decompress=False
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        cluster = {"server": f"http://127.0.0.1:{self._runner.addresses[0][1]}"}
        content = {**self._given, "clusters": [{"name": "test", "cluster": cluster}]}
        self.kubeconfig.write_text(json.dumps({**content, "users": [{"name": "test", "user": {}}]}))

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        for _ in range(5):  # turns of the loop, in which the connections are closed
            await asyncio.sleep(0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        watch = request.query.get("watch") in ("true", "1")
        text = body.decode(errors="replace")
        asked = Asked(
            next(self._numbers), request.method, request.path, watch, 0, time.monotonic(), text[:2000]
        )
        fault = next((one for one in self._faults if one.takes(asked)), None)
        code = 0
        try:
            if fault is None:
                response = await self._pass_on(request, body, watch)
            else:
                fault.met.append(asked)
                response = await self._go_wrong(request, fault)
            code = response.status
            return response
        finally:
            if not watch:  # a watch is noted when it begins
                self._note(asked, code)

    def _note(self, asked: Asked, code: int) -> None:
        self.asked.append(
            Asked(asked.number, asked.method, asked.path, asked.watch, code, asked.at_s, asked.body)
        )

    async def _go_wrong(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=499)
        if fault.code:
            headers = {"Retry-After": f"{fault.after_s:g}"} if fault.after_s is not None else {}
            return web.json_response(_status(fault.code), status=fault.code, headers=headers)
        response = web.StreamResponse()
        with self._counted(request):
            await response.prepare(request)
            if fault.inside:
                event = {"type": "ERROR", "object": _status(fault.inside)}
                await response.write(json.dumps(event).encode() + b"\n")
            else:
                await asyncio.Event().wait()
        return response

    async def _pass_on(self, request: web.Request, body: bytes, watch: bool) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() in END_TO_END}
        try:
            answer = await self._session.request(
                request.method,
                self._server + request.raw_path,
                data=body or None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        except aiohttp.ClientError:
            return web.json_response(_status(502), status=502)
        async with answer:
            kept: Mapping[str, str] = {"Content-Type": answer.headers.get("Content-Type", "")}
            if not watch or answer.status != 200:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(status=200, headers=kept)
            with self._counted(request):
                try:
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        if any(one.mute and one.hits(_asked(request)) for one in self._faults):
                            await asyncio.Event().wait()
                        await response.write(chunk)
                except ConnectionError:
                    pass  # it was cut, or the client has left
            return response

    @contextmanager
    def _counted(self, request: web.Request) -> Iterator[None]:
        transport: Any = request.transport
        self._open.add(transport)
        self._note(_asked(request), 200)
        try:
            yield
        finally:
            self._open.discard(transport)


def _asked(request: web.Request) -> Asked:
    return Asked(-1, request.method, request.path, True, 0, time.monotonic())


def _status(code: int) -> dict[str, Any]:
    reasons = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reasons.get(code, "ServiceUnavailable"),
        "message": f"a fault made by the test: {code}",
        "code": code,
    }
