"""Become ``python -m MODULE ARGUMENTS`` in a process that has just been forked from a warm one."""

import atexit
import fcntl
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
ABOVE = 500
"""Descriptors are moved up here while those below get their numbers."""


def module_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(module, its arguments) of ``python [-P] -m MODULE ...`` or of the command ``encodepool-worker``."""
    if Path(argv[0]).name == "encodepool-worker":
        return "encodepool_worker.cli.main", list(argv[1:])
    rest = [word for word in argv[1:2] if word != "-P"] + list(argv[2:])
    if argv[0] != sys.executable or rest[:1] != ["-m"]:
        raise ValueError(f"only `python -m MODULE` can be forked, not {argv[:3]}")
    return rest[1], rest[2:]


def become(
    argv: Sequence[str],
    *,
    descriptors: Mapping[int, int],
    environ: Mapping[str, str] | None = None,
    enter: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Never returns, so nothing of the caller's is finalized: objects that own descriptors stay alive.

    ``enter`` comes first: a new session or process group. ``descriptors`` says which descriptor of the
    caller becomes which here; all others are closed.
    """
    status = 1
    try:
        enter()
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        moved = {target: fcntl.fcntl(source, fcntl.F_DUPFD, ABOVE) for target, source in descriptors.items()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in moved.values():
                with suppress(OSError):  # the one that listed them
                    os.close(int(name))
        for target, source in moved.items():
            os.dup2(source, target)
            os.close(source)
        tempfile.tempdir = None
        if environ is not None:
            for name in set(os.environ) - set(environ):
                del os.environ[name]
            os.environ.update(environ)
        module, arguments = module_of(argv)
        setproctitle(" ".join(argv))  # tests and people tell processes apart by their command lines
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    # What the interpreter does when it ends, in its order.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)
