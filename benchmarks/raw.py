"""Mooncake by itself: one batch write, the fastest way for bytes into a receiver's memory."""

import ctypes
import mmap
import os
import time

from benchmarks.peer import HOST
from benchmarks.rank import Peer

from encodepool_worker.transport.mooncake import wanted_environment


class RawMooncake:
    """One engine with registered memory to write from."""

    def __init__(self, nbytes: int, timeout_s: float = 5.0) -> None:
        os.environ.update(wanted_environment("tcp", timeout_s))  # the same protocol as the worker's engines
        from mooncake.engine import TransferEngine

        self._memory = mmap.mmap(-1, nbytes)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self.ptr, 1, nbytes)
        self._engine = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake did not start")
        if self._engine.register_memory(self.ptr, nbytes) != 0:
            raise RuntimeError("Mooncake did not register the memory")

    def write(self, peer: Peer, nbytes: int, count: int = 1) -> float:
        """Seconds of one batch of ``count`` pieces, one behind the other on both sides."""
        starts = [index * nbytes for index in range(count)]
        began_s = time.perf_counter()
        code = self._engine.batch_transfer_sync_write(
            peer.session, [self.ptr + at for at in starts], [peer.ptr + at for at in starts], [nbytes] * count
        )
        took_s = time.perf_counter() - began_s
        if code != 0:
            raise RuntimeError(f"a raw write of {count} x {nbytes} bytes failed with {code}")
        return took_s
