"""Frames of the receivers: bound on an address of this machine, any free port."""

import ipaddress
import os
from collections.abc import Callable
from typing import Any

from ..core.events import Announced
from ..errors import WireError
from ..logs import LimitedLog
from ..wire.control import Registration, decode_control
from .inbox import Inbox
from .metrics import Metrics
from .threads import Crash, start_thread
from .zmtp import ZmtpServer

MAX_PART_BYTES = 4096
"""The longest part of a real frame is an address; the connection of whoever sends more is closed."""

MAX_PARTS = 16
"""A transfer info has 13; parts beyond are ignored, as the reference does, but not without end."""

MAX_CONNECTIONS = 2048
"""One for each prefill rank. Together with the bounds above they hold 128 MiB at most."""


class ControlSocket:
    """Turns frames of receivers of one rank into Announced. One that cannot be read is counted and dropped.

    ``on_registration`` is called with the session of each receiver that introduces itself, from the
    socket's thread, before the frames behind it.
    Raises OSError where the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        rank: int,
        inbox: Inbox,
        metrics: Metrics,
        crash: Crash,
        on_registration: Callable[[str], None] = lambda session: None,
    ) -> None:
        self._rank = rank
        self._inbox = inbox
        self._on_registration = on_registration
        self._metrics = metrics
        self._log = LimitedLog(per_s=1, burst=10)
        self._server = ZmtpServer(
            host, max_parts=MAX_PARTS, max_part_bytes=MAX_PART_BYTES, max_peers=MAX_CONNECTIONS
        )
        self.port = self._server.port
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = start_thread("control", self._run, crash)

    def close(self) -> None:
        """What waits in the connections is given up. Returns when the thread has ended."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        self._server.serve(self._take, self._closed, self._stop_fd)

    def _closed(self, problem: str) -> None:
        self._metrics.add("encodepool_frames_malformed_total")
        self._log.warning("control connection closed", problem=problem[:200])

    def _take(self, frames: list[Any]) -> None:
        try:
            frame = decode_control(frames, self._rank)
        except WireError as error:
            self._metrics.add("encodepool_frames_malformed_total")
            # Anyone can send these; they must not fill the log.
            self._log.warning("malformed control frame dropped", problem=str(error)[:200])
            return
        if isinstance(frame, Registration):
            self._on_registration(frame.session)
        else:
            self._inbox.put(Announced(*frame))


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, as URLs and ZMQ want it; anything else as it is."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
