"""The end of a worker, seen from the frontend: withdraw, refuse, let the loop finish, leave."""

import asyncio
import time
from collections.abc import Callable

from ..logs import get_logger
from .back import LoopLink
from .health import Health

MARGIN_S = 5.0
"""For the loop to fail what is left, and to tell the receivers, once nothing can land any more."""

RETRY_S = 0.1


async def drain(
    health: Health,
    link: LoopLink,
    drained: asyncio.Event,
    *,
    drain_s: float,
    margin_s: float = MARGIN_S,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """True once nothing accepted is left, False if the loop did not say so in time.

    From the first line on, readiness is lost and Encode is answered UNAVAILABLE. Everything that
    was submitted before is ahead of the Drain message, because both go through one socket.
    """
    health.drain("the worker is draining")
    if health.state is None:
        return True  # The loop never reported, so nothing was ever accepted.
    deadline_s = clock() + drain_s
    give_up_s = deadline_s + margin_s
    while not link.drain(deadline_s):
        if clock() > give_up_s:
            return False
        await asyncio.sleep(RETRY_S)
    get_logger().info("draining", seconds=drain_s)
    try:
        await asyncio.wait_for(drained.wait(), max(0.0, give_up_s - clock()))
    except TimeoutError:
        return False
    return True
