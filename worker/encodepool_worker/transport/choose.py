"""The transfer engine of a backend. Both sides of a transfer must use the same one."""

from ..errors import ConfigError
from .base import Engine

BACKENDS = ("mooncake", "tcp")
TIMEOUT_S = 5.0


def reads_device_memory(backend: str) -> bool:
    """Whether engines of this backend, as installed here, can send from a GPU's memory."""
    if backend == "mooncake":
        from .mooncake import is_cuda_build

        return is_cuda_build()
    return False


def make_engine(
    backend: str,
    host: str,
    *,
    protocol: str = "tcp",
    devices: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Engine:
    """An engine reachable at ``host``. ``protocol`` (tcp or rdma) and ``devices`` are Mooncake's.

    Raises ConfigError, TransportError.
    """
    if backend == "tcp":
        from .tcp import TcpEngine

        return TcpEngine(host, timeout_s=timeout_s)
    if backend == "mooncake":
        # Only here: the import needs system libraries that a machine without RDMA may lack.
        from .mooncake import MooncakeEngine

        return MooncakeEngine(host, protocol=protocol, devices=devices, timeout_s=timeout_s)
    raise ConfigError([f"transfer backend {backend!r} is not one of {', '.join(BACKENDS)}"])
