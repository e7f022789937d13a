"""Running a controller in this process."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from .command import visible_devices
from .controller import Controller, Outside
from .counter import UserCounter, user_state_dir
from .statedir import StateDir


def surroundings(worker: Sequence[str], environ: Mapping[str, str]) -> Outside:
    """What this machine offers a controller."""
    return Outside(
        worker=worker,
        environ=environ,
        devices=visible_devices(environ),
        cpus=len(os.sched_getaffinity(0)),
        counter=UserCounter(user_state_dir(environ)),
    )


def run_controller(
    state_dir: StateDir, outside: Outside, *, stopping: bool = False, limit_s: float | None = None
) -> None:
    """Run the pool of ``state_dir`` until it is down, or for ``limit_s``.

    Raises StateDirBusy if somebody else does.
    """

    async def run() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await Controller(state_dir, outside, stopping=stopping).run()
        except TimeoutError:
            pass

    with state_dir.locked():
        asyncio.run(run())
