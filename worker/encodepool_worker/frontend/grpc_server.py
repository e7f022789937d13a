"""The gRPC port: our two services, grpc.health.v1 and reflection."""

from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..errors import ConfigError
from . import scheduler, servicer

MAX_CONCURRENT_STREAMS = 256
"""Per connection. No bound on memory: what waits is not read."""

WINDOW_BYTES = 65536
"""What a peer may send on a stream that nobody reads yet; also HTTP/2's own default."""

MIN_PING_INTERVAL_S = 5
"""Peers may ping this often, on idle connections too: SMG does every 30 s. Where the option is missing or
misspelt gRPC asks for 300 s, and cuts the connection at the fourth ping (GOAWAY ``too_many_pings``)."""

STOP_GRACE_S = 1.0

HEALTH_NAMES = ("", servicer.SERVICE, scheduler.SERVICE)


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of the server.

    Without a fixed window gRPC measures the bandwidth and widens the window of *every* stream, to
    megabytes on a fast link: 80 unread messages of 8 MiB then lay in memory as 540 MiB.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", 4 * 1024 * 1024),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # Two workers on one port would share its calls without a word.
        ("grpc.so_reuseport", 0),
        # A gateway whose machine is gone must not keep a reader's share of the budget.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class GrpcServer:
    """Serves until stopped; answers health checks with NOT_SERVING until told otherwise."""

    def __init__(self, handlers: Iterable[Any], host: str, port: int, max_message_bytes: int) -> None:
        self._host = host
        self._port = port
        self._server = grpc.aio.server(options=server_options(max_message_bytes))
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*HEALTH_NAMES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.serving = False

    async def start(self) -> int:
        """The port it listens on. Raises ConfigError."""
        await self.set_health(False)
        host = f"[{self._host}]" if ":" in self._host else self._host
        problem: Exception | None = None
        try:
            port = int(self._server.add_insecure_port(f"{host}:{self._port}"))
        except RuntimeError as error:
            port, problem = 0, error
        if port == 0:
            raise ConfigError([f"gRPC: cannot listen on {self._host} port {self._port}"]) from problem
        await self._server.start()
        self.serving = True
        return port

    async def set_health(self, good: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    async def stop(self) -> None:
        self.serving = False
        await self._server.stop(STOP_GRACE_S)
