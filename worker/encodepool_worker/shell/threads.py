"""Threads that cannot die unseen."""

import threading
from collections.abc import Callable

from ..logs import get_logger

Crash = Callable[[str], None]
"""Called with a reason when a thread met what it cannot: the process has to end."""

MESSAGES_PER_POLL = 64
"""Of a ZMQ socket at most, before anything else has its turn."""


def start_thread(name: str, target: Callable[[], None], crash: Crash) -> threading.Thread:
    """A daemon thread; an exception that leaves it ends the worker instead of stopping in silence."""

    def run() -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 (handed on)
            get_logger().exception("a thread failed", thread=name)
            crash(f"thread {name} failed: {error!r}")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
