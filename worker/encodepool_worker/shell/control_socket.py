"""Frames of the receivers: bound on an address of this machine, any free port."""

import ipaddress
import time
from typing import Any

import zmq

from ..core.events import Announced
from ..errors import WireError
from ..logs import get_logger
from ..wire.control import Registration, decode_control
from .inbox import Inbox
from .metrics import Metrics
from .threads import Crash, Listener

MAX_PART_BYTES = 4096
"""The longest part of a real frame is an address; ZMQ closes the connection of whoever sends more."""

RECEIVE_BACKLOG = 10_000
KEEPALIVE_IDLE_S = 30
LOG_EVERY_S = 1.0


class ControlSocket:
    """Turns receivers' frames into Announced. One that cannot be read is counted and dropped.

    Raises zmq.ZMQError where the address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        *,
        inbox: Inbox,
        metrics: Metrics,
        crash: Crash,
    ) -> None:
        self._inbox = inbox
        self._metrics = metrics
        self._log = get_logger()
        self._logged_s = float("-inf")
        socket = context.socket(zmq.PULL)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_BACKLOG)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES)
        # A prefill pod that vanished leaves a half-open connection; this is how it ends.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.bind(f"tcp://{bracketed(host)}:*")
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._listener = Listener("control", socket, self._take, crash, copy=True)

    def close(self) -> None:
        self._listener.close()

    def _take(self, frames: list[Any]) -> None:
        try:
            frame = decode_control(frames)
        except WireError as error:
            self._metrics.add("encodepool_frames_malformed_total")
            now_s = time.monotonic()
            if now_s - self._logged_s >= LOG_EVERY_S:
                # Anyone can send these; they must not fill the log.
                self._logged_s = now_s
                self._log.warning("malformed control frame dropped", problem=str(error)[:200])
            return
        if not isinstance(frame, Registration):
            self._inbox.put(Announced(*frame))


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, as URLs and ZMQ want it; anything else as it is."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
