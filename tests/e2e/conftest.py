"""Fixtures of the end-to-end tests: real workers, and the tower called directly."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.gateway import Picture
from tests.e2e.receiving import Receivers, Rows, tower_rows
from tests.e2e.running import RunningWorker
from tests.peers.tokenspeed.remote import Remote
from tests.warm.client import WarmProcess


@pytest.fixture(scope="session")
def new_room() -> Callable[[], int]:
    """Rooms as the gateway draws them: 63 random bits, none twice."""
    draw = random.SystemRandom()
    return lambda: draw.randrange(2**63 - 1)


@pytest.fixture(scope="session")
def new_picture() -> Callable[..., Picture]:
    """``new_picture(h, w)``: an image that no worker has seen yet."""
    seeds = itertools.count(1)
    return lambda h=8, w=8, **rest: Picture(h, w, next(seeds), **rest)


@pytest.fixture(scope="session")
def direct(tiny_model: Path) -> Callable[[Picture], Rows]:
    """The tower called directly in this process: what every receiver must get, byte for byte."""
    return tower_rows(tiny_model)


@pytest.fixture(scope="session")
def start_worker(
    fork: Callable[..., WarmProcess],
    tiny_model: Path,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., RunningWorker]:
    """``start_worker(drain_seconds=5, ...)``: a worker with these settings, not yet ready."""
    folder = tmp_path_factory.mktemp("workers")
    numbers = itertools.count()

    def start(**settings: Any) -> RunningWorker:
        flags = {name.replace("_", "-"): value for name, value in settings.items()}
        log = folder / f"worker.{next(numbers)}.log"
        return RunningWorker(fork, ["encodepool-worker"], tiny_model, log, free_port, flags)

    return start


@pytest.fixture(scope="module")
def worker(
    request: pytest.FixtureRequest, start_worker: Callable[..., RunningWorker], shared_prefill: Remote
) -> Iterator[RunningWorker]:
    """The module's worker, with the settings in its ``WORKER``; it must end well."""
    running = start_worker(**getattr(request.module, "WORKER", {}))
    yield running.ready()
    assert running.stop(60) == 0, running.log_tail()


@pytest.fixture
def receivers(worker: RunningWorker, shared_prefill: Remote) -> Receivers:
    return Receivers(shared_prefill, worker.bootstrap)


@pytest.fixture(scope="session")
def clock() -> Callable[[], float]:
    """Monotonic seconds: the same clock in every process of this machine."""
    return time.monotonic


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a module waits for processes that import torch, on two cores perhaps."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))
