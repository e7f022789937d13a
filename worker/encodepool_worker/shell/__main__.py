"""``python -m encodepool_worker.shell FLAGS``: one rank, as the supervisor starts it."""

import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ..child import FAREWELL_S, Child
from ..errors import ConfigError, WorkerError
from ..logs import get_logger, setup_logs
from ..settings import Settings

if TYPE_CHECKING:
    from .loop import Loop

FAREWELL_MARGIN_S = 0.5
"""Before the supervisor's patience ends, so that the reason is ours."""


def main(argv: list[str]) -> int:
    """0 after a drain, 1 after a failure, 2 for flags that cannot work."""
    try:
        settings = Settings.from_argv(argv)
    except ConfigError as error:
        print(f"rank: {error}", file=sys.stderr)
        return 2
    setup_logs(settings.log_level, role="rank", rank=settings.rank)
    child = Child(settings.lifeline_fd, settings.heartbeat_fd)
    child.start()
    # Nothing has been accepted yet: until the loop runs, asking to end is ending. By the kernel: a
    # handler of ours would wait for torch, which waits for the other ranks for minutes.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A lane, a probe or the watcher that dies in silence would leave rooms without a verdict.
    crash = Crasher(child)
    threading.excepthook = partial(_thread_failed, crash)
    _raise_file_limit()
    try:
        run(settings, child, crash)
    except WorkerError as error:
        get_logger().error("the rank cannot go on", problem=str(error))
        child.last_words(str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - torch has many: a GPU that is full, lost or of no use
        get_logger().exception("the rank cannot go on")
        child.last_words(f"{type(error).__name__}: {error}")
        return 1
    return 0


def run(settings: Settings, child: Child, crash: "Crasher") -> None:
    """Until it has drained. Raises WorkerError."""
    # After the heartbeat has begun: these take seconds to import.
    from ..towers.load import load_tower, pick_device
    from .follower import Follower
    from .rank import Rank, engine_maker
    from .tiers import plan_tiers

    log = get_logger()
    make_engine = engine_maker(settings)
    device = pick_device(settings.device)
    parallel = None
    if settings.tensor_parallel_size > 1:
        from .meeting import meet

        log.info("meeting the other ranks", rank=settings.rank, size=settings.tensor_parallel_size)
        device, parallel = meet(settings, device)
    log.info("loading", model=settings.model, device=str(device), load_format=settings.load_format)
    tower = load_tower(
        settings.model,
        load_format=settings.load_format,
        seed=settings.seed,
        dtype=settings.dtype,
        device=str(device),
        revision=settings.model_revision,
        graphs=settings.encoder_cuda_graphs == "true",
        parallel=parallel,
    )
    tower.warm_up()
    log.info("the tower is warm", family=tower.spec.family, dtype=tower.spec.dtype, graphs=tower.graphs)
    # What was loaded stays. Looking through it again would stop every thread for 0.2 s, now and then.
    gc.collect()
    gc.freeze()
    tiers = plan_tiers(settings, device)
    if settings.rank > 0 and parallel is not None:
        follower = Follower(
            settings,
            tower,
            make_engine,
            parallel=parallel,
            tiers=tiers,
            address=parallel.look_up("address"),
            token=parallel.look_up("token"),
            crash=crash,
            on_welcome=child.ready,
        )
        # Rank 0 says when this is the end.
        signal.signal(signal.SIGTERM, lambda *_: log.info("waiting for rank 0 to drain"))
        follower.run()
        # Rank 0 has drained, so nothing runs here any more. Freeing the engines would take seconds in
        # which the heartbeat stands still.
        _leave(0)
    rank = Rank(
        settings,
        tower,
        make_engine,
        tiers=tiers,
        crash=crash,
        parallel=parallel,
        on_routed=child.ready,
    )
    if parallel is not None and rank.server is not None:
        parallel.publish("token", rank.server.token)
        parallel.publish("address", rank.server.address)
    signal.signal(signal.SIGTERM, lambda *_: rank.loop.ask_to_end())
    crash.loop = rank.loop
    child.on_farewell = crash
    try:
        lost = rank.loop.run()
    except Exception:
        rank.say_farewell()
        raise
    finally:
        crash.loop = None
    if lost is not None:
        rank.say_farewell()
        raise WorkerError(lost)
    if not rank.close():
        log.warning("a batch or a write was still running at the end")


class Crasher:
    """Ends the process, from any thread, with the first reason for the termination message.

    At once, or where a loop runs: when it has told its receivers, which has a bound.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._lock = threading.Lock()
        self._called = False
        self.loop: Loop | None = None

    def __call__(self, reason: str) -> None:
        get_logger().error("the rank cannot go on", problem=reason)
        with self._lock:
            first, self._called = not self._called, True
        loop = self.loop  # the main thread takes it away when the loop has ended
        if loop is None:
            self._leave(reason)
        elif first:
            late = threading.Timer(FAREWELL_S - FAREWELL_MARGIN_S, self._leave, [reason])
            late.daemon = True
            late.start()
            loop.lose(reason)

    def _leave(self, reason: str) -> None:
        self._child.last_words(reason)
        os._exit(1)


def _thread_failed(crash: Callable[[str], None], args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    get_logger().error("a thread failed", thread=name, exc_info=args.exc_value)
    crash(f"thread {name} failed: {args.exc_value!r}")


def _raise_file_limit() -> None:
    """Every receiver costs file descriptors; the soft limit is often 1024 and the hard one high."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        get_logger().warning("the limit of open files stays as it is", problem=str(error))


def _leave(code: int) -> NoReturn:
    """Everything is said and sent. The interpreter's own end would free memory under a batch or a
    write that cannot be stopped."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
