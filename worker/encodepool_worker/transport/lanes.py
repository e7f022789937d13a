"""The sender's threads, and which of them a peer is holding up."""

import threading
import time
from collections.abc import Callable, Iterable

from .sender_types import SenderLimits


class Lanes:
    """``run`` is each lane's thread. Not thread-safe: the sender's lock guards it."""

    def __init__(self, run: Callable[[], None], limits: SenderLimits) -> None:
        self._run = run
        self._limits = limits
        self._busy_since_s: dict[threading.Thread, float | None] = {}
        self._started = 0

    def __len__(self) -> int:
        return len(self._busy_since_s)

    @property
    def threads(self) -> list[threading.Thread]:
        return list(self._busy_since_s)

    @property
    def busy(self) -> int:
        return sum(since_s is not None for since_s in self._busy_since_s.values())

    @property
    def free(self) -> int:
        """Lanes that no peer has been holding up for ``lane_patience_s``."""
        late_s = time.monotonic() - self._limits.lane_patience_s
        return sum(since_s is None or since_s > late_s for since_s in self._busy_since_s.values())

    @property
    def too_many(self) -> bool:
        return self.free > self._limits.lanes

    def start(self) -> None:
        self._started += 1
        name = f"encodepool-lane-{self._started}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._busy_since_s[thread] = None
        thread.start()

    def replace_held(self) -> None:
        """Start a lane if too few are free and there may be another."""
        if self.free < self._limits.lanes and len(self) < self._limits.max_lanes:
            self.start()

    def mark(self, *, busy: bool) -> None:
        """What the calling lane does from now on."""
        self._busy_since_s[threading.current_thread()] = time.monotonic() if busy else None

    def leave(self) -> None:
        """The calling lane ends."""
        del self._busy_since_s[threading.current_thread()]


def join_all(threads: Iterable[threading.Thread], deadline_s: float) -> None:
    """Wait for threads, together until the monotonic time ``deadline_s``."""
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
