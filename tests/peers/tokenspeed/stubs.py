"""Make TokenSpeed's embedding transfer importable on a machine without a GPU.

The transfer itself (``tokenspeed.runtime.epd``) is plain Python over Mooncake and ZeroMQ, but
importing it asks for two CUDA-only packages. Those two answer with empty mock modules; the
transfer calls none of them. Managers, senders, receivers, bootstrap server and frames are
TokenSpeed's own.

Call `install` before the first ``import tokenspeed``.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from unittest.mock import MagicMock

CUDA_ONLY = ("tokenspeed_kernel", "tokenspeed_triton")


class _MockPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the given root packages, and anything below them, as mock modules."""

    def __init__(self, roots: Iterable[str]) -> None:
        self.roots = frozenset(roots)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__name__ = spec.name
        module.__spec__ = spec
        module.__loader__ = self
        module.__path__ = []
        module.__file__ = None
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _no_pages(*_args: object, **_kwargs: object) -> int:
    raise NotImplementedError("pages belong to the KV transfer, which these tests do not drive")


def install(local_ip: str = "127.0.0.1") -> None:
    """Prepare this process, once.

    ``local_ip`` is the address TokenSpeed binds and advertises. It finds that address by asking
    for the route to a public host, which an isolated machine does not have.
    """
    # TokenSpeed always asks Mooncake for RDMA; this makes Mooncake answer with TCP.
    os.environ.setdefault("MC_FORCE_TCP", "true")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

    absent = [root for root in CUDA_ONLY if importlib.util.find_spec(root) is None]
    sys.meta_path.insert(0, _MockPackages(absent))

    from mooncake.engine import TransferEngine

    if not hasattr(TransferEngine, "batch_transfer_sync_write_pages"):
        # TokenSpeed refuses an engine without it, but only its KV transfer calls it.
        TransferEngine.batch_transfer_sync_write_pages = _no_pages

    from tokenspeed.runtime.utils import network

    network.get_local_ip_by_remote = lambda: local_ip
