"""The transfer engine a client receives with."""

from ..errors import ClientError
from ..transport.base import Engine

BACKENDS = ("mooncake", "tcp")


def make_engine(backend: str, host: str, protocol: str = "tcp") -> Engine:
    """An engine reachable at ``host``. It must be of the kind the workers send with.

    ``protocol`` is Mooncake's: tcp or rdma. Raises ClientError, ConfigError, TransportError.
    """
    if backend == "tcp":
        from ..transport.tcp import TcpEngine

        return TcpEngine(host)
    if backend == "mooncake":
        from ..transport.mooncake import MooncakeEngine

        return MooncakeEngine(host, protocol=protocol)
    raise ClientError(f"transfer backend {backend!r} is not one of {', '.join(BACKENDS)}")
