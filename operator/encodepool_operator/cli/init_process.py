"""What is different for the first process of a container."""

import os
import signal
from types import FrameType
from typing import NoReturn

EXIT_TERMINATED = 128 + signal.SIGTERM


def end_on_sigterm() -> None:
    """Let SIGTERM end this process until a command sets a handler of its own.

    The kernel drops signals for process 1 that it has no handler for, and a container is asked to end
    only once: told to while it still imports, it would stay for its whole grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """Nothing has begun yet that would have to be brought to an end."""
    os._exit(EXIT_TERMINATED)
