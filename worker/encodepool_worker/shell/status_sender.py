"""Status frames to the receivers: never blocks, bounded towards each of them, forgets the unused.

The reference sends with a blocking socket per thread and endpoint: after 1,001 frames to an
endpoint that is gone it blocks for ever, and with it everything behind.
"""

import ipaddress
import time
from collections import OrderedDict

import zmq

from ..logs import LimitedLog
from ..types import Status
from ..wire.control import encode_status
from .control_socket import bracketed
from .metrics import Metrics

Endpoint = tuple[str, int]

MAX_PER_ENDPOINT = 1000
"""Frames kept for an endpoint that does not take them; the next one is dropped and counted."""

MAX_ENDPOINTS = 1024
UNUSED_AFTER_S = 330.0
"""As long as a room is remembered: a frame for a frozen receiver waits here, and prefill waits 300 s."""

CLOSE_LINGER_MS = 1000
RECONNECT_MS = 200
RECONNECT_MAX_MS = 5000
"""A receiver that is gone is tried ever more seldom, for as long as its socket is kept."""


class StatusSender:
    """A PUSH socket for each endpoint in use. Belongs to one thread, which it never makes wait."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_per_endpoint: int = MAX_PER_ENDPOINT,
        max_endpoints: int = MAX_ENDPOINTS,
        unused_after_s: float = UNUSED_AFTER_S,
    ) -> None:
        self._metrics = metrics
        self._log = LimitedLog(per_s=1, burst=10)
        self._max_per_endpoint = max_per_endpoint
        self._max_endpoints = max_endpoints
        self._unused_after_s = unused_after_s
        # A context of its own, so that ending it waits for status frames and nothing else.
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._context.set(zmq.MAX_SOCKETS, max_endpoints + 8)
        self._sockets: OrderedDict[Endpoint, tuple[zmq.Socket[bytes], float]] = OrderedDict()

    @property
    def n_endpoints(self) -> int:
        return len(self._sockets)

    def send(self, endpoint: Endpoint, room: int, status: Status, rank: int) -> None:
        """In the name of encode rank ``rank``. What cannot be kept is dropped and counted."""
        socket = self._socket(endpoint)
        if socket is None:
            return
        try:
            socket.send_multipart(encode_status(room, status, rank), zmq.NOBLOCK)
        except zmq.Again:
            self._drop()

    def close_unused(self) -> None:
        """To be called now and then."""
        while self._sockets:
            _, used_s = next(iter(self._sockets.values()))
            if time.monotonic() < used_s + self._unused_after_s:
                return
            _, (socket, _) = self._sockets.popitem(last=False)
            socket.close()

    def close(self) -> None:
        """Send what waits, giving the network a second; the rest is dropped."""
        for socket, _ in self._sockets.values():
            socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()

    def _socket(self, endpoint: Endpoint) -> "zmq.Socket[bytes] | None":
        known = self._sockets.pop(endpoint, None)
        socket = known[0] if known else self._connect(endpoint)
        if socket is not None:
            self._sockets[endpoint] = (socket, time.monotonic())
        return socket

    def _connect(self, endpoint: Endpoint) -> "zmq.Socket[bytes] | None":
        host, port = endpoint
        try:
            # Names are refused: ZMQ would look them up in the thread that serves all sockets.
            address = str(ipaddress.ip_address(host.strip("[]")))
        except ValueError:
            self._drop()
            self._log.warning("status frame dropped: the receiver's host is no address", host=host)
            return None
        if len(self._sockets) >= self._max_endpoints:
            _, (oldest, _) = self._sockets.popitem(last=False)
            oldest.close(linger=CLOSE_LINGER_MS)
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            # Closed sockets count until they have lingered: whoever names many endpoints, and anyone
            # can, gets fewer frames and does not end the worker.
            self._drop()
            self._log.warning("status frame dropped: no socket for it", problem=str(error), host=host)
            return None
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, self._max_per_endpoint)
        socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.connect(f"tcp://{bracketed(address)}:{port}")
        return socket

    def _drop(self) -> None:
        self._metrics.add("encodepool_status_dropped_total")
