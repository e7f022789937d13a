"""Starting a controller that outlives whoever asked for it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .statedir import StateDir

RUN_LOG_BYTES = 16 * 1024 * 1024
"""A controller's log that has grown above this is put aside (one is kept) when the next one starts."""


def detach(state_dir: StateDir, worker: str) -> subprocess.Popen[bytes]:
    """Start ``encodepool local run`` in a session of its own, with streams of its own."""
    path = state_dir.log / "run.log"
    if path.exists() and path.stat().st_size > RUN_LOG_BYTES:
        path.replace(path.with_name("run.log.1"))
    argv = [*_this_program(), "local", "run", "--state-dir", str(state_dir.root)]
    if worker:
        argv += ["--worker-command", worker]
    with path.open("ab") as stream:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # Not in a folder that somebody may want to unmount or delete.
            cwd="/",
            start_new_session=True,
        )


def _this_program() -> Sequence[str]:
    script = Path(sys.executable).parent / "encodepool"
    # -P: nothing is imported from the current folder.
    return (
        [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", "encodepool_operator"]
    )
