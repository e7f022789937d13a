"""What can go wrong at the far end of a transfer, on request: for tests and rehearsals."""

import ctypes
import threading
from collections import deque
from enum import Enum


class Fault(Enum):
    """What happens to one incoming write."""

    DROP = "drop"  # received, thrown away, the connection closed without an answer
    TRUNCATE = "truncate"  # the first half of each slice landed, the connection closed without an answer
    CORRUPT = "corrupt"  # one bit of the first byte flipped, then acknowledged
    REORDER = "reorder"  # landed piece by piece, the last one first, then acknowledged
    DUPLICATE = "duplicate"  # landed and acknowledged, and once more with ``land``
    LATE = "late"  # received but not answered; lands with ``land``


class Faults:
    """Misbehaviour of one engine towards those who write to it; none by default. Thread-safe.

    ``freeze`` acts like a stopped process: connections are accepted (the kernel does that),
    nothing is answered until ``thaw``. The others apply to the next writes, in the order given.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: deque[Fault] = deque()
        self._held: list[tuple[int, bytes]] = []
        self._frozen = False
        self._ended = False
        self._delay_s = 0.0

    def freeze(self) -> None:
        with self._changed:
            self._frozen = True

    def thaw(self) -> None:
        with self._changed:
            self._frozen = False
            self._changed.notify_all()

    def delay(self, seconds: float) -> None:
        """Hold back every acknowledgement by this long; 0 ends it."""
        with self._changed:
            self._delay_s = seconds
            self._changed.notify_all()

    def plan(self, *faults: Fault) -> None:
        """What happens to the next writes, one fault each."""
        with self._changed:
            self._next.extend(faults)

    @property
    def held(self) -> int:
        """Slices received that ``land`` would put into memory."""
        with self._changed:
            return len(self._held)

    def land(self) -> int:
        """Put what LATE and DUPLICATE held back into memory now; the number of slices."""
        with self._changed:
            held, self._held = self._held, []
            for ptr, payload in held:
                ctypes.memmove(ptr, payload, len(payload))
            return len(held)

    # --- called by the engine

    def wait_while_frozen(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen or self._ended)
            if self._ended:
                raise ConnectionAbortedError("the engine is closed")

    def wait_before_answer(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._delay_s or self._ended, timeout=self._delay_s)
        self.wait_while_frozen()

    def take(self) -> Fault | None:
        with self._changed:
            return self._next.popleft() if self._next else None

    def play(self, fault: Fault, payload: list[tuple[int, bytes]]) -> None:
        """Land ``payload``, the bytes of each slice by address, the way ``fault`` says."""
        with self._changed:
            if fault in (Fault.LATE, Fault.DUPLICATE):
                self._held += payload
            if fault is Fault.CORRUPT:
                ptr, first = payload[0]
                payload = [(ptr, bytes([first[0] ^ 1]) + first[1:]), *payload[1:]]
            if fault is Fault.TRUNCATE:
                payload = [(ptr, data[: len(data) // 2]) for ptr, data in payload]
            if fault is Fault.REORDER:
                payload = [piece for ptr, data in reversed(payload) for piece in _backwards(ptr, data)]
            if fault not in (Fault.DROP, Fault.LATE):
                for ptr, data in payload:
                    ctypes.memmove(ptr, data, len(data))

    def forget_held(self) -> None:
        """The memory they belong to is going away."""
        with self._changed:
            self._held.clear()

    def end(self) -> None:
        """The engine is closing: nobody waits any longer."""
        with self._changed:
            self._ended = True
            self._held.clear()
            self._changed.notify_all()


def _backwards(ptr: int, data: bytes, piece_bytes: int = 4096) -> list[tuple[int, bytes]]:
    starts = range(0, len(data), piece_bytes)
    return [(ptr + start, data[start : start + piece_bytes]) for start in reversed(starts)]
