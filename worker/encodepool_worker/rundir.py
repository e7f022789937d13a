"""The folder of a worker's sockets, and the files by which a local pool finds its processes."""

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import ConfigError

PREFIX = "encodepool-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[^/]+")

MAX_SOCKET_PATH = 107
"""sun_path holds 108 bytes with its final zero."""

LONGEST_SOCKET_NAME = "/control-xx.ipc"


class RunDir:
    """A private folder (0700) for the time of one supervisor; makes it, sweeps old ones, removes it.

    Its name carries the supervisor's pid and start time, and an open file lock on it says that the
    supervisor lives: so a folder whose supervisor was killed is recognised, also from another PID
    namespace that shares the temporary folder. Raises ConfigError.
    """

    def __init__(self, temp_dir: Path | None = None) -> None:
        self._temp_dir = temp_dir if temp_dir is not None else Path(tempfile.gettempdir())
        self.path = Path()
        self._lock_fd = -1

    def __enter__(self) -> "RunDir":
        sweep(self._temp_dir)
        prefix = f"{PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-"
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self._temp_dir))
        except OSError as error:
            raise ConfigError(
                [f"no folder for sockets: {error}; set TMPDIR to a folder one can write to"]
            ) from error
        self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        if len(os.fsencode(self.path)) + len(LONGEST_SOCKET_NAME) > MAX_SOCKET_PATH:
            self._remove()
            raise ConfigError([f"{self.path} is too long for sockets: set TMPDIR to a shorter path"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def sweep(temp_dir: Path) -> list[Path]:
    """Remove the run folders of this user's supervisors that are gone; returns what it removed."""
    removed = []
    for path in sorted(temp_dir.glob(f"{PREFIX}*")):
        match = _NAME.fullmatch(path.name)
        if match is None or not _is_own_folder(path):
            continue
        pid, started = int(match[1]), int(match[2])
        if start_ticks(pid) == started or not _unlocked(path):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone, or ended and not reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses; the start time is field 22.
    rest = text.rpartition(")")[2].split()
    return None if rest[0] in "ZX" else int(rest[19])


def write_pids(
    path: Path, group: int, incarnation: int, members: Sequence[tuple[int, str, int | None]]
) -> None:
    """``[{pid, group, incarnation, role, rank}]`` of the members (pid, role, rank); atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"pid": pid, "group": group, "incarnation": incarnation, "role": role, "rank": rank}
        for pid, role, rank in members
    ]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(draft, path)


def _is_own_folder(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
