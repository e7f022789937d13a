"""Memory that TokenSpeed sends from or receives into, and when a room reached its verdict."""

import hashlib
import threading
import time
from typing import Any

import numpy as np

FAILED, SUCCESS = 0, 5
STATUS_NAMES = {
    None: "Unknown",
    0: "Failed",
    1: "Bootstrapping",
    2: "Bootstrapped",
    3: "WaitingForInput",
    4: "Transferring",
    5: "Success",
}
ELEMENT_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4}

UNTOUCHED = 0xA5
"""Receive memory is filled with this byte before a room is asked for."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def pattern(room: int, nbytes: int, part: int = 0) -> Bytes:
    """Bytes that tell rooms, halves (``part`` 0 main, 1 deepstack) and places apart.

    byte[i] = (131 * room + 17 * part + 7 * i + 13 * (i >> 8) + 29 * (i >> 16)) mod 256
    """
    i = np.arange(nbytes, dtype=np.uint32)
    base = (131 * room + 17 * part) & 0xFF
    return ((base + 7 * i + 13 * (i >> 8) + 29 * (i >> 16)) & 0xFF).astype(np.uint8)


def sha256(data: Bytes | bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Arena:
    """Page-aligned bytes, handed out in turn, so that memory is reused as late as possible."""

    PAGE = 4096

    def __init__(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + self.PAGE, dtype=np.uint8)
        shift = -raw.ctypes.data % self.PAGE
        self.memory: Bytes = raw[shift : shift + nbytes]
        self._next = 0
        self._held: dict[int, int] = {}

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` that overlap no piece still held; zero bytes are a legal piece."""
        ends = sorted(-(-(start + size) // self.PAGE) * self.PAGE for start, size in self._held.items())
        for start in (self._next, *(end for end in ends if end > self._next), 0, *ends):
            if start + nbytes <= self.nbytes and self._is_free(start, nbytes):
                break
        else:
            raise MemoryError(f"{nbytes} bytes do not fit beside {len(self._held)} pieces in use")
        if nbytes:
            self._held[start] = nbytes
            self._next = -(-(start + nbytes) // self.PAGE) * self.PAGE
        return self.memory[start : start + nbytes]

    def give_back(self, piece: Bytes) -> None:
        if len(piece):
            del self._held[int(piece.ctypes.data) - self.address]

    def _is_free(self, start: int, nbytes: int) -> bool:
        return not any(held < start + nbytes and start < held + size for held, size in self._held.items())


class Verdicts:
    """When each room of a TokenSpeed manager became Success or Failed (monotonic seconds)."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._change = threading.Condition()
        self._reached: dict[int, tuple[int, float]] = {}
        self._update = manager.update_status
        manager.update_status = self._observe

    def _observe(self, room: int, status: int) -> None:
        self._update(room, status)
        now = self._manager.request_status.get(room)
        if now in (FAILED, SUCCESS):
            with self._change:
                if self._reached.get(room, (None,))[0] != now:
                    self._reached[room] = (now, time.monotonic())
                    self._change.notify_all()

    def wait(self, room: int, timeout_s: float) -> dict[str, Any]:
        """``{"status", "at", "reason"}``; status Timeout when nothing came within ``timeout_s``."""
        with self._change:
            self._change.wait_for(lambda: room in self._reached, timeout_s)
            reached = self._reached.get(room)
        if reached is None:
            return {"status": "Timeout", "at": None, "reason": None}
        status, at = reached
        reason = self._manager.failure_records.get(room)
        return {"status": STATUS_NAMES[status], "at": at, "reason": reason}

    def forget(self, room: int) -> None:
        with self._change:
            self._reached.pop(room, None)
