"""What a gateway's pings meet at the gRPC port; `python -m tests.worker.frontend.pinging` shows more."""

import asyncio

from tests.worker.frontend.pinging import Pinging

from encodepool_worker.frontend.grpc_server import MIN_PING_INTERVAL_S, GrpcServer

TIMES = 4
"""gRPC forgives two pings that come too early, and the first has none before it."""


def test_idle_connections_that_ping_are_kept_and_floods_are_cut():
    async def story():
        server = GrpcServer([], "127.0.0.1", 0, 1 << 20)
        port = await server.start()
        idle = await Pinging.connect("127.0.0.1", port)
        watching = await Pinging.connect("127.0.0.1", port, watch=True)

        # Each ping comes 0.2 s after the shortest interval that is allowed: 16 s in all.
        interval_s = MIN_PING_INTERVAL_S + 0.2
        await asyncio.gather(idle.ping_every(interval_s, TIMES), watching.ping_every(interval_s, TIMES))
        assert await idle.answered(TIMES), idle.goaway
        assert await watching.answered(TIMES), watching.goaway
        assert watching.watch_messages == 1
        assert not watching.watch_ended

        flood = await Pinging.connect("127.0.0.1", port)
        await flood.ping_every(0.0, TIMES)
        assert not await flood.answered(TIMES + 1)
        assert flood.goaway == "too_many_pings"
        # The others do not pay for it.
        assert not idle.is_cut
        assert not watching.is_cut

        for connection in (idle, watching, flood):
            await connection.close()
        await server.stop()

    asyncio.run(story())
