"""``python -m encodepool_worker.frontend FLAGS``: the frontend process, as the supervisor starts it."""

import asyncio
import os
import signal
import sys

from ..child import Child
from ..errors import ConfigError
from ..logs import get_logger, setup_logs
from ..settings import Settings


def main(argv: list[str]) -> int:
    """0 after a complete drain, 1 after a failure, 2 for flags that cannot work."""
    try:
        settings = Settings.from_argv(argv)
    except ConfigError as error:
        print(f"frontend: {error}", file=sys.stderr)
        return 2
    child = Child(settings.lifeline_fd, settings.heartbeat_fd)
    child.start()
    setup_logs(settings.log_level, role="frontend")
    try:
        return asyncio.run(serve(settings, child))
    except ConfigError as error:
        child.last_words(str(error))
        get_logger().error("the frontend cannot start", problem=str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it is, the termination message has to say it
        get_logger().exception("the frontend cannot go on")
        child.last_words(f"{type(error).__name__}: {error}")
        return 1


async def serve(settings: Settings, child: Child) -> int:
    """Raises ConfigError before anything is served."""
    # After the heartbeat has begun: these take half a second to import.
    from .app import Frontend
    from .follower import FollowerFrontend
    from .model import read_model

    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # told twice: at once
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    if settings.pod_index > 0:
        probes = FollowerFrontend(settings)
        await probes.start()
        child.ready()
        await probes.run(stop)
        return 0
    model = await asyncio.to_thread(read_model, settings)
    frontend = Frontend(settings, model)
    await frontend.start()
    child.ready()
    finished = await frontend.run(stop)
    if not finished:
        child.last_words(f"the drain did not end within {settings.drain_seconds:g} s")
    return 0 if finished else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
