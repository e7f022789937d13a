"""The folder of a local pool: where its files are, how they are replaced, who may change them.

DIR/pool.yaml          the manifest that is being carried out
DIR/state.json         what must survive the controller: group records and processes
DIR/status.json        what the controller last saw; read by ``up`` and ``status``
DIR/processes.json     pids by group and role
DIR/endpoints/         the published list
DIR/log/               streams of every process
DIR/run/               pids of a supervisor's children, written by the supervisor
DIR/lock               held by the one process that may change the rest
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import LocalError


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace ``path`` so that a reader sees the old text or the new one.

    ``durable`` also survives a crash of the machine; without it only a crash of this process.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_text(path: Path) -> str | None:
    """The file's text, None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def check_writable(folder: Path) -> None:
    """Raises OSError where no file can be made in ``folder``."""
    with tempfile.TemporaryFile(dir=folder):
        pass


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below one state directory. ``root`` is absolute: it is in argument lists."""

    root: Path

    @classmethod
    def at(cls, path: Path | str) -> "StateDir":
        return cls(Path(path).expanduser().absolute())

    @property
    def manifest(self) -> Path:
        return self.root / "pool.yaml"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def processes(self) -> Path:
        return self.root / "processes.json"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    def log_file(self, group: int, incarnation: int, role: str) -> Path:
        return self.log / f"{group}.{incarnation}.{role}.log"

    def supervisor_log(self, group: int, incarnation: int, pod: int) -> Path:
        return self.log_file(group, incarnation, f"supervisor{pod or ''}")

    def children_file(self, group: int, incarnation: int, pod: int) -> Path:
        """Where the supervisor of this start's pod writes the pids of its children."""
        return self.run / f"{_start(group, incarnation, pod)}.json"

    def termination_file(self, group: int, incarnation: int, pod: int) -> Path:
        """Where the supervisor of this start's pod writes why it failed."""
        return self.run / f"{_start(group, incarnation, pod)}.termination"

    def owns(self, path: Path) -> bool:
        """Whether ``path`` is a file that a pool keeps here, if there is or was one."""
        files = (self.manifest, self.state, self.status, self.processes, self.lock_file)
        folders = (self.endpoints, self.log, self.run)
        return self.lock_file.exists() and (path in files or path.parent in folders)

    def create(self) -> None:
        """Make the folders, if need be. Raises LocalError where they cannot be made or written."""
        try:
            for folder in (self.root, self.endpoints, self.log, self.run):
                folder.mkdir(parents=True, exist_ok=True)
                check_writable(folder)
        except OSError as error:
            raise LocalError(
                f"cannot write the state directory {self.root}: {error.strerror}; choose another --state-dir"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory. Raises StateDirBusy, naming the holder's pid, if somebody else does.

        The lock is on the open file, so it ends with its holder however that dies.
        """
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StateDirBusy(self.root, _pid_in(fd)) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)

    def holder(self) -> int | None:
        """Pid of the process that holds the directory; 0 if it has not said yet; None if free."""
        try:
            fd = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid_in(fd)
        else:
            return None
        finally:
            os.close(fd)


def _start(group: int, incarnation: int, pod: int) -> str:
    return f"{group}.{incarnation}.{pod}" if pod else f"{group}.{incarnation}"


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0)
    return int(text) if text.isdigit() else 0


class StateDirBusy(LocalError):
    """Another process holds the state directory. ``pid`` is 0 where it is not known yet."""

    def __init__(self, root: Path, pid: int) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            f"{root} is in use by {who}; `encodepool local down --state-dir {root}` ends its pool"
        )
        self.pid = pid
