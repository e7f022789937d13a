"""Mooncake's transfer engine (TCP or RDMA) behind our Engine protocol.

The only importer of ``mooncake``. Facts this file relies on were measured with 0.3.13.post1 and
stand in docs/decisions/0003-mooncake-timeouts-and-late-landing.md.
"""

import math
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ..errors import (
    ConfigError,
    RegistrationFailed,
    TransportError,
    WriteRefused,
    WriteTimedOut,
    WriteTorn,
)
from .base import MAX_SLICES_PER_BATCH, RawSlice
from .ranges import Ranges

PROTOCOLS = ("tcp", "rdma")
CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")

_RDMA_DEVICES = Path("/sys/class/infiniband")

_DEFAULT_TRANSFER_TIMEOUT_S = 30
_SHORTEST_TRANSFER_TIMEOUT_S = 5  # Mooncake raises lower values to this
_SLACK_S = 0.5  # timeouts were seen to fire up to 70 ms late


class MooncakeEngine:
    """One TransferEngine. ``host`` is the address peers reach this machine at."""

    def __init__(
        self, host: str, *, protocol: str = "tcp", devices: str = "", timeout_s: float = 5.0
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError([f"transfer protocol {protocol!r} is not one of {', '.join(PROTOCOLS)}"])
        if protocol == "rdma" and not _RDMA_DEVICES.is_dir() and os.environ.get("MC_FORCE_TCP") is None:
            # Mooncake would fall back to TCP without a word.
            raise ConfigError(
                [
                    f"transfer protocol rdma, but this machine has no RDMA devices ({_RDMA_DEVICES} is "
                    "missing); give the pod its devices, or choose protocol tcp"
                ]
            )
        apply_environment(wanted_environment(protocol, timeout_s), os.environ, _ours)
        self._protocol = protocol
        self._progress_s = _seconds("MC_TCP_PROGRESS_TIMEOUT_SEC", timeout_s)
        self._transfer_s = _seconds("MC_TRANSFER_TIMEOUT", _DEFAULT_TRANSFER_TIMEOUT_S)
        self._ranges = Ranges()
        # Calls take their own reference, so dropping this one frees the engine after the last call.
        self._engine: Any = _load()()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransportError(
                f"Mooncake did not start on {host} with protocol {protocol} (code {code}); "
                f"check the address and, for rdma, the devices ({devices or 'none named'})"
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    @property
    def session(self) -> str:
        return self._session

    def register(self, ptr: int, nbytes: int, *, receives: bool = True) -> None:
        """``receives`` changes nothing: Mooncake registers all memory for reading and writing alike."""
        self._ranges.add(ptr, nbytes)
        code = self._alive().register_memory(ptr, nbytes)
        if code != 0:
            self._ranges.remove(ptr)
            raise RegistrationFailed(f"Mooncake refused {nbytes} bytes at {ptr:#x} (code {code})")

    def unregister(self, ptr: int) -> None:
        if self._ranges.remove(ptr) and self._engine is not None:
            self._engine.unregister_memory(ptr)

    def probe(self, session: str) -> bool:
        """Takes 61 s for a frozen peer, and holds no lock that a write needs."""
        return bool(self._alive().send_probe(session) == 0)

    def write(self, session: str, slices: Sequence[RawSlice]) -> None:
        """Spins on a core until the peer has acknowledged, or until the timeout."""
        wanted = [one for one in slices if one[2]]
        # Over TCP Mooncake would read unregistered memory without complaint, over RDMA it would not.
        missing = self._ranges.missing((source, nbytes) for source, _, nbytes in wanted)
        if missing is not None:
            raise WriteRefused(f"{missing[1]} bytes at {missing[0]:#x} are not registered here")
        for first in range(0, len(wanted), MAX_SLICES_PER_BATCH):
            self._write_batch(session, wanted[first : first + MAX_SLICES_PER_BATCH])

    def close(self) -> None:
        """Holds the interpreter for a second: Mooncake joins its listener in the destructor."""
        self._engine = None

    def _write_batch(self, session: str, batch: Sequence[RawSlice]) -> None:
        engine = self._alive()
        started_s = time.monotonic()
        code = engine.batch_transfer_sync_write(
            session,
            [source for source, _, _ in batch],
            [target for _, target, _ in batch],
            [nbytes for _, _, nbytes in batch],
        )
        del engine  # an error's traceback would keep it from being freed
        if code == 0:
            return
        took_s = time.monotonic() - started_s
        what = f"Mooncake write of {len(batch)} slices to {session} failed (code {code}) after {took_s:.2f} s"
        if took_s >= min(self._progress_s, self._transfer_s) - _SLACK_S:
            # The progress timeout closes the connection; the transfer timeout only stops waiting.
            released = self._protocol == "tcp" and took_s < self._transfer_s - _SLACK_S
            raise WriteTimedOut(what, released=released)
        if len(batch) == 1:
            raise WriteRefused(what)
        # One bad slice fails the batch at once while the others are still being sent.
        raise WriteTorn(what)

    def _alive(self) -> Any:
        engine = self._engine
        if engine is None:
            raise WriteRefused("the engine is closed")
        return engine


_ours: dict[str, str] = {}  # what this module has put into the environment


def wanted_environment(protocol: str, timeout_s: float) -> dict[str, str]:
    """The variables that Mooncake reads each time an engine is made.

    On TCP the progress timeout must come before the transfer timeout: only the former closes the
    connection, after the latter Mooncake goes on reading the source.
    """
    whole_s = max(1, math.ceil(timeout_s))
    wanted = {
        # Every failure reaches the caller as an error; at its default level Mooncake logs each
        # engine, each peer and each failure in several lines.
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "3",
    }
    wanted["MC_TCP_PROGRESS_TIMEOUT_SEC"] = str(whole_s)
    wanted["MC_TCP_STATUS_TIMEOUT_SEC"] = str(whole_s)
    if protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
        wanted["MC_TRANSFER_TIMEOUT"] = str(max(_DEFAULT_TRANSFER_TIMEOUT_S, 3 * whole_s))
    else:
        wanted["MC_TRANSFER_TIMEOUT"] = str(max(_SHORTEST_TRANSFER_TIMEOUT_S, whole_s))
    return wanted


def apply_environment(
    wanted: Mapping[str, str], environ: MutableMapping[str, str], ours: dict[str, str]
) -> None:
    """Set ``wanted`` where the user has set nothing; ``ours`` remembers what was set here."""
    for name in set(ours) - set(wanted):
        if environ.get(name) == ours.pop(name):
            del environ[name]
    for name, value in wanted.items():
        if environ.get(name) in (None, ours.get(name)):
            environ[name] = ours[name] = value


def _seconds(name: str, default_s: float) -> float:
    try:
        return float(os.environ[name])
    except (KeyError, ValueError):
        return float(default_s)


def is_cuda_build() -> bool:
    """Whether the wheel installed here knows a GPU's memory: over TCP it copies it to the host first.

    The others take such an address for one of the host's and die of reading it. Their module is
    the same, so only the name of the wheel tells.
    """
    for name in CUDA_WHEELS:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def _load() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as exc:
        raise ConfigError(
            [
                f"Mooncake cannot be loaded ({exc}): install one of encodepool[worker] (no CUDA), "
                "encodepool[worker-cuda12] or encodepool[worker-cuda13], which exclude each other, and on "
                "Debian the packages libibverbs1 librdmacm1 libnuma1 liburing2; or run with "
                "--transfer-backend tcp"
            ]
        ) from exc
    return TransferEngine
