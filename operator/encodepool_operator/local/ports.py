"""Which ports of this machine are taken: asked by binding, the one test that cannot be wrong."""

import errno
import socket
from collections.abc import Iterable

HOST = "127.0.0.1"
"""Where the workers of a local pool listen: the first pod of each group."""


def host_of(pod: int) -> str:
    """Address of a group's pod ``pod``. All pods of a start have the same ports, as on a cluster."""
    return f"127.0.0.{1 + pod}"


def taken(ports: Iterable[int]) -> frozenset[int]:
    """Those of ``ports`` that a worker could not listen on now."""
    return frozenset(port for port in ports if not _can_listen(port))


def _can_listen(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: a connection of an earlier worker in TIME_WAIT is no obstacle to them.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
