"""Frames of the receivers: bound on an address of this machine, any free port."""

import ipaddress
from collections.abc import Callable

from ..core.events import Announced
from ..errors import WireError
from ..logs import LimitedLog
from ..wire.control import Registration, decode_control
from .metrics import Metrics
from .zmtp import ZmtpServer

MAX_PART_BYTES = 4096
"""The longest part of a real frame is an address; the connection of whoever sends more is closed."""

MAX_PARTS = 16
"""A transfer info has 13; parts beyond are ignored, as the reference does, but not without end."""

MAX_CONNECTIONS = 2048
"""One for each prefill rank. Together with the bounds above they hold 128 MiB at most."""


class ControlSocket:
    """Turns frames of receivers of one rank into Announced. One that cannot be read is counted and dropped.

    A source of the inbox. ``on_registration`` is called with the session of each receiver that
    introduces itself, before the frames behind it are read. Raises OSError where the address cannot
    be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        rank: int,
        metrics: Metrics,
        on_registration: Callable[[str], None] = lambda session: None,
    ) -> None:
        self._rank = rank
        self._on_registration = on_registration
        self._metrics = metrics
        self._log = LimitedLog(per_s=1, burst=10)
        self._server = ZmtpServer(
            host,
            max_parts=MAX_PARTS,
            max_part_bytes=MAX_PART_BYTES,
            max_peers=MAX_CONNECTIONS,
            on_problem=self._problem,
        )
        self.port = self._server.port
        self.fileno = self._server.fileno
        self.due_s = self._server.due_s
        self.close = self._server.close

    def read(self) -> list[Announced]:
        return [event for frames in self._server.receive() if (event := self._event(frames)) is not None]

    def _event(self, frames: list[bytes]) -> Announced | None:
        try:
            frame = decode_control(frames, self._rank)
        except WireError as error:
            self._metrics.add("encodepool_frames_malformed_total")
            # Anyone can send these; they must not fill the log.
            self._log.warning("malformed control frame dropped", problem=str(error)[:200])
            return None
        if isinstance(frame, Registration):
            self._on_registration(frame.session)
            return None
        return Announced(*frame)

    def _problem(self, problem: str) -> None:
        self._metrics.add("encodepool_frames_malformed_total")
        self._log.warning("control connection closed", problem=problem[:200])


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, as URLs and ZMQ want it; anything else as it is."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
