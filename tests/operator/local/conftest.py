"""A local pool run by the real command, with stand-in workers; at the end nothing of it is left."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from encodepool_operator.core.endpoints import manifest_problems

FAKE_WORKER = Path(__file__).parent / "fake_worker.py"
PORT_START, PORT_SIZE = 20000, 8000


def processes_naming(folder: Path) -> dict[int, str]:
    """Processes of this machine with ``folder`` as an argument: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder) in argv:
            found[int(entry.name)] = b" ".join(argv).decode(errors="replace")
    return found


class LocalPool:
    """One state directory, its manifest, and the commands on it."""

    def __init__(self, folder: Path, home: Path, wait_for: Callable[..., Any]) -> None:
        self.dir = folder / "state"
        self.control = folder / "control"
        self.control.mkdir(parents=True)
        self.manifest = folder / "pool.yaml"
        self.env = {"XDG_STATE_HOME": str(home)}
        self.wait_for = wait_for
        self.commands: list[subprocess.Popen[str]] = []
        (folder / "model").mkdir()
        self.spec: dict[str, Any] = {
            "replicas": 2,
            "model": {"path": "model"},
            "accelerator": {"perRank": 0},
            "transfer": {"backend": "tcp"},
            "network": {"portRange": {"start": PORT_START, "size": PORT_SIZE}},
            "drain": {"settleSeconds": 0, "timeoutSeconds": 5},
            "restart": {"backoff": {"baseSeconds": 3600, "maxSeconds": 3600}},
        }

    def write(self, **changes: Any) -> None:
        """The manifest with these keys of ``spec`` replaced."""
        self.spec |= changes
        document = {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodePool",
            "metadata": {"name": "pool"},
            "spec": self.spec,
        }
        self.manifest.write_text(yaml.safe_dump(document))

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "encodepool_operator", "local", command]
        argv += ["--state-dir", str(self.dir), *arguments]
        if command == "up":
            worker = [sys.executable, "-IS", str(FAKE_WORKER), "serve", "--control", str(self.control)]
            argv += ["-f", str(self.manifest), "--worker-command", shlex.join(worker)]
        process = subprocess.Popen(
            argv,
            env=os.environ | self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.commands.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> subprocess.CompletedProcess[str]:
        """Wait for a command, which must end with ``code``."""
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"{process.args} did not end: {out}{err}{self.run_log()}")
        assert process.returncode == code, f"{out}{err}{self.run_log()}"
        return subprocess.CompletedProcess(process.args, code, out, err)

    def run(self, command: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(command, *arguments), code)

    def up(self, **changes: Any) -> subprocess.CompletedProcess[str]:
        self.write(**changes)
        return self.run("up")

    def run_log(self) -> str:
        path = self.dir / "log" / "run.log"
        return path.read_text() if path.exists() else ""

    def tell(self, manner: str, text: str = "") -> Path:
        """Change the manners of the stand-in workers; see fake_worker.py."""
        path = self.control / manner
        path.write_text(text)
        return path

    # --- what others see

    def endpoints(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads((self.dir / "endpoints" / "endpoints.json").read_text())[
            "endpoints"
        ]
        return entries

    def listed(self) -> dict[int, dict[str, Any]]:
        """Routable groups of endpoints.json by index; the gateway's file must agree with itself."""
        text = (self.dir / "endpoints" / "workers.json").read_text()
        assert manifest_problems(text) == []
        return {entry["group"]: entry for entry in self.endpoints() if entry["ready"]}

    def pids(self, role: str = "supervisor") -> dict[int, int]:
        rows = json.loads((self.dir / "processes.json").read_text())
        return {row["group"]: row["pid"] for row in rows if row["role"] == role}

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.run("status", "-o", "json").stdout)
        return report

    def environment(self, pid: int) -> dict[str, str]:
        """The variables a process was started with."""
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().rstrip("\0").split("\0")
        return dict(pair.split("=", 1) for pair in pairs)

    def controller(self) -> int:
        return int((self.dir / "lock").read_text())

    def processes(self) -> dict[int, str]:
        return processes_naming(self.dir)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
        try:
            return self.wait_for(condition, timeout_s, what)
        except pytest.fail.Exception as failure:
            pytest.fail(f"{failure}\n{self.run_log()}")

    def close(self) -> None:
        """Take it down, whatever state a test left it in, and see that nothing is left."""
        for command in self.commands:
            if command.returncode is None:
                command.kill()
                command.communicate()
        for path in self.control.iterdir():
            path.unlink()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        if self.dir.exists():
            self.run("down")
        self.wait(lambda: not self.processes(), f"the end of {self.processes()}")


@pytest.fixture(scope="session")
def local_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the user who runs the pools."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def make_pool(
    tmp_path: Path, local_home: Path, wait_for: Callable[..., Any]
) -> Iterator[Callable[[], LocalPool]]:
    made: list[LocalPool] = []

    def make() -> LocalPool:
        made.append(LocalPool(tmp_path / f"pool{len(made)}", local_home, wait_for))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def pool(make_pool: Callable[[], LocalPool]) -> LocalPool:
    return make_pool()


@pytest.fixture(scope="module")
def shared_pool(
    tmp_path_factory: pytest.TempPathFactory, local_home: Path, wait_for: Callable[..., Any]
) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path_factory.mktemp("shared"), local_home, wait_for)
    yield pool
    pool.close()


@pytest.fixture
def standing(shared_pool: LocalPool) -> LocalPool:
    """A pool of two ready groups that several tests use one after the other; each leaves it ready."""
    if not shared_pool.dir.exists() or len(shared_pool.listed()) < 2:
        shared_pool.up(restart={"backoff": {"baseSeconds": 1, "maxSeconds": 1}})
    return shared_pool
