"""The operator's own HTTP server, as strangers meet it."""

import asyncio
import logging

from encodepool_operator.controller.health import HealthServer, Progress
from encodepool_operator.controller.metrics import Metrics


async def first_line(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


def test_requests_that_are_no_http_are_answered_and_fill_no_log(caplog):
    async def story():
        server = HealthServer(Metrics(), lambda: Progress(0.0, 0.0, 60.0, 0.0, 60.0), lambda: None)
        port = await server.start("127.0.0.1", 0)
        for _ in range(50):
            assert b" 400 " in await first_line(port, b"GET / HTTP/9.9\r\n\r\n")
        assert b" 200 " in await first_line(port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert caplog.records == []
