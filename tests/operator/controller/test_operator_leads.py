"""The whole operator against an API server of a few lines: what it does when the Lease becomes its own."""

import asyncio
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from kubernetes.aio.client import Configuration

from encodepool_operator.controller import observe
from encodepool_operator.controller.run import Operator, Options
from encodepool_operator.kube.client import IN_FLIGHT
from encodepool_operator.kube.kinds import CONFIG_MAP, POOL
from encodepool_operator.kube.login import Login

DEADLINE_S = 20.0


class Server:
    """Lists ``pools`` and nothing else, takes every Lease, and holds patches back until ``go``."""

    def __init__(self, *pools):
        self.pools = list(pools)
        self.asked = []
        self.patches = 0
        self.patched = asyncio.Event()
        self.go = asyncio.Event()

    async def answer(self, request):
        plural = request.path.rpartition("/")[2]
        self.asked.append((request.method, plural))
        if "/leases" in request.path:
            if request.method == "GET":
                return web.json_response({"kind": "Status", "message": "no"}, status=404)
            lease = await request.json()
            lease["metadata"] |= {"resourceVersion": "1"}
            return web.json_response(lease)
        if request.method == "GET":
            items = self.pools if plural == POOL.plural else []
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})
        self.patches += 1
        self.patched.set()
        await self.go.wait()
        return web.json_response({"kind": "Status", "message": "no"}, status=403)


@asynccontextmanager
async def operator_of(server):
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    configuration.proxy = None
    operator = Operator(Options(), Login(configuration, "ns", in_cluster=False))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield operator
    finally:
        await operator._shut_down()
        await runner.cleanup()


def test_who_comes_to_lead_looks_at_everything_before_it_writes(make_pool):
    async def story():
        server = Server({**make_pool(), "metadata": make_pool()["metadata"] | {"resourceVersion": "5"}})
        async with operator_of(server) as operator:
            await operator._resync.fill()
            server.asked.clear()
            operator._spawn("lease", operator._lease.run())
            operator._spawn("lead", operator._lead())
            await server.patched.wait()
            first = server.asked.index(next(asked for asked in server.asked if asked[0] == "PATCH"))
            listed = {plural for method, plural in server.asked[:first] if method == "GET"}
            assert listed >= {one.kind.plural for one in observe.WATCHED}
            server.go.set()

    asyncio.run(story())


def test_the_lease_is_renewed_while_all_other_requests_hang():
    async def story():
        server = Server()
        async with operator_of(server) as operator:
            await operator._lease._turn()
            obj = {"metadata": {"namespace": "ns", "name": "x"}}
            writes = [
                asyncio.create_task(operator._client.apply(CONFIG_MAP, obj)) for _ in range(2 * IN_FLIGHT)
            ]
            while server.patches < IN_FLIGHT:
                await server.patched.wait()
                server.patched.clear()
            renewed_s = operator._lease._renewed_at_s
            await operator._lease._turn()
            assert operator._lease._renewed_at_s > renewed_s
            assert not any(write.done() for write in writes)
            server.go.set()
            await asyncio.gather(*writes, return_exceptions=True)

    asyncio.run(story())


def test_a_lost_lease_is_told_in_one_line(make_pool):
    """Several pools may be under way, and each finds that it may not write any more."""

    async def story():
        server = Server()
        for name in ("a", "b", "c"):
            made = make_pool()
            server.pools.append(
                {**made, "metadata": made["metadata"] | {"name": name, "resourceVersion": "5"}}
            )
        async with operator_of(server) as operator:
            await operator._resync.fill()
            operator._lease.held.set()  # and it has run out since
            operator._spawn("lead", operator._lead())
            with structlog.testing.capture_logs() as logs:
                await operator._until_ended()
            assert operator._failed
            assert server.patches == 0
            return [entry for entry in logs if entry["log_level"] == "error"]

    (entry,) = asyncio.run(story())
    assert (entry["part"], entry["why"]) == ("lead", "the Lease is not held any more")
    assert entry["exc_info"] is None
