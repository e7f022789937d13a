"""What is different for the first process of a container."""

import os
import signal
from types import FrameType
from typing import NoReturn

EXIT_TERMINATED = 128 + signal.SIGTERM


def end_on_sigterm() -> None:
    """Let SIGTERM end this process until a command sets a handler of its own.

    For process 1 the kernel drops signals that have no handler, and the kubelet asks only once: a pod
    that is deleted just after its start would stay for its whole grace period. Everywhere else a
    process ends by default.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """Nothing was started yet that had to be ended."""
    os._exit(EXIT_TERMINATED)
