"""The sender's threads: as many as have something to do, and a few that wait."""

import threading
import time
from collections.abc import Callable, Iterable

from .sender_types import SenderLimits


class Lanes:
    """``run`` is each lane's thread. Not thread-safe: ``lock``, the sender's, guards it."""

    def __init__(self, run: Callable[[], None], limits: SenderLimits, lock: threading.Lock) -> None:
        self._run = run
        self._limits = limits
        self._work = threading.Condition(lock)
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._started = 0

    def __len__(self) -> int:
        return len(self._threads)

    @property
    def threads(self) -> list[threading.Thread]:
        return list(self._threads)

    def start(self) -> None:
        self._started += 1
        name = f"encodepool-lane-{self._started}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def wake(self) -> None:
        """There is something to do: for a lane that waits, else for a new one if there may be one."""
        if self._idle:
            self._work.notify()
        elif len(self) < self._limits.max_lanes:
            self.start()

    def wake_all(self) -> None:
        self._work.notify_all()

    def wait(self) -> bool:
        """The calling lane has nothing to do. False when enough others wait: then it should end."""
        if self._idle >= self._limits.lanes:
            return False
        self._idle += 1
        self._work.wait()
        self._idle -= 1
        return True

    def leave(self) -> None:
        """The calling lane ends."""
        self._threads.discard(threading.current_thread())


def join_all(threads: Iterable[threading.Thread], deadline_s: float) -> None:
    """Wait for threads, together until the monotonic time ``deadline_s``."""
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
