"""Fixtures shared by all tests: waiting, programs that are reaped by handle, real peers, a model."""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.peers.tokenspeed.remote import ROOT, Remote, missing_packages, without_proxies
from tests.warm.client import WarmProcess, WarmPython

pytest_plugins = ["tests.seldom"]

POLL_S = 0.01


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """``wait_for(condition, timeout_s, what)``: the first true value of ``condition``, or a failure."""

    def wait(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "the condition") -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come true within {timeout_s} s")
            time.sleep(POLL_S)
        return value

    return wait


FREE_PORTS = {
    "": (61000, 65536),
    "nodes": (61000, 61500),
    "plane": (61500, 62000),
    "e2e": (62000, 64000),
    "parts": (64000, 65500),
    "pure": (65500, 65536),
}
"""By lane of `scripts/test.sh`: runs side by side do not take each other's ports."""


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port of 127.0.0.1 that was free just now and that this run has not handed out before.

    From above the ports that the kernel gives to outgoing connections: between its choice here and its use
    in a server no client of another test can come to sit on it.
    """
    given: set[int] = set()
    chance = random.SystemRandom()

    def take() -> int:
        while True:
            port = chance.randrange(*FREE_PORTS[os.environ.get("ENCODEPOOL_TEST_LANE", "")])
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in given:
                    given.add(port)
                    return port

    return take


@pytest.fixture(scope="session")
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``spawn(argv, log)``: a program writing to ``log``; whatever still runs at the end is killed.

    Each program leads its own process group, so that its children go with it.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(
        argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            process = subprocess.Popen(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                # Two cores: more threads per program only make them wait for each other.
                env=without_proxies(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
            )
        started.append(process)
        return process

    yield start
    for process in started:
        try:
            # Its group id is its pid, which is not reused before it has been waited for.
            if process.returncode is None:
                os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait(10)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """One process that has imported torch and transformers, to fork others from."""
    environ = without_proxies(os.environ) | {"OMP_NUM_THREADS": "1"}
    warm = WarmPython(tmp_path_factory.mktemp("warm") / "log", environ)
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def fork(warm_python: WarmPython) -> Callable[..., WarmProcess]:
    """As ``spawn``, for ``encodepool-worker ...`` and ``python -m MODULE ...``, without their imports."""

    def start(argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> WarmProcess:
        environ = without_proxies(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        with log.open("ab") as out:
            return warm_python.popen(argv, environ=environ, stdout=out, stderr=out)

    return start


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """``program(name)``: an installed command, beside the running Python or on PATH."""

    def find(name: str) -> Path:
        beside = Path(sys.executable).parent / name
        found = beside if beside.exists() else shutil.which(name)
        if not found:
            pytest.fail(f"{name} is not installed; install this project with its dev extra")
        return Path(found)

    return find


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, fork: Callable[..., WarmProcess]) -> Path:
    """A complete small Qwen3-VL checkpoint (float32, hidden 256, 3 deepstack levels)."""
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen3-vl"
    log = folder.parent / "log"
    if fork(["encodepool-worker", "make-tiny-model", folder], log).wait(120) != 0:
        pytest.fail(f"make-tiny-model: {log.read_text()}")
    return folder


@pytest.fixture(scope="session")
def peers_installed() -> None:
    """Skip, or fail in CI, when TokenSpeed is not installed."""
    missing = missing_packages()
    if not missing:
        return
    message = f"real peers missing: {', '.join(missing)} (pip install --no-deps -r requirements/peers.txt)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def tokenspeed(
    peers_installed: None, tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> Iterator[Callable[..., Remote]]:
    """``tokenspeed("prefill" | "encode", **params)``: a real endpoint, importing in the background."""
    folder = tmp_path_factory.mktemp("tokenspeed")
    started: list[Remote] = []

    def start(kind: str, **params: object) -> Remote:
        remote = Remote(warm_python, kind, folder / f"{kind}.{len(started)}.log", **params)
        started.append(remote)
        return remote

    yield start
    for remote in started:
        remote.close()


@pytest.fixture(scope="session")
def shared_prefill(tokenspeed: Callable[..., Remote]) -> Remote:
    """One process of real receivers for the whole run: groups of any size, healthy ones only."""
    return tokenspeed("prefill")


@pytest.fixture(scope="session")
def shared_encode(tokenspeed: Callable[..., Remote]) -> Remote:
    """One process of real senders for the whole run."""
    return tokenspeed("encode")
