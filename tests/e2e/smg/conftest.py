"""Fixtures of the tests through the real gateway: one pool, one gateway, one prefill for all of them."""

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.e2e.pooling import LocalPool, manifest
from tests.e2e.receiving import Rows, tower_rows
from tests.e2e.smg.chain import Chain, Expected, ListWatch
from tests.peers.smg.gateway import Gateway, file_discovery
from tests.peers.tokenspeed.remote import Remote

from encodepool_operator.core.consumer import QUICK
from encodepool_worker.towers.spec import read_image_spec

RECEIVE_S = 8.0
"""How long prefill waits for rows. TokenSpeed's default is 300 s."""


SETTLE_S = 3
"""Less than the default of 10 s, so that what is seen here holds there all the more."""


@pytest.fixture(scope="session")
def smg_pool(
    program: Callable[[str], Path], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalPool]:
    """A pool of two groups; taken down whatever happens."""
    folder = tmp_path_factory.mktemp("smg-pool")
    file = folder / "pool.yaml"
    spec = manifest("seen", tiny_model, replicas=2, drain={"settleSeconds": SETTLE_S})
    file.write_text(yaml.safe_dump(spec))
    pool = LocalPool(program("encodepool"), file, folder / "state")
    try:
        yield pool.up()
    finally:
        pool.run("down")


@pytest.fixture(scope="session")
def language(tokenspeed: Callable[..., Remote], tiny_model: Path) -> Remote:
    """Prefill with real receivers, and decode."""
    return tokenspeed("language", model=str(tiny_model), served_name=tiny_model.name, timeout_s=RECEIVE_S)


@pytest.fixture(scope="session")
def start_gateway(
    spawn: Callable[..., object],
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Gateway]]:
    """``start_gateway(*flags)``: a gateway for the tiny model, not yet ready."""
    folder = tmp_path_factory.mktemp("gateways")
    started: list[Gateway] = []

    def start(*flags: str) -> Gateway:
        log = folder / f"smg.{len(started)}.log"
        started.append(Gateway(spawn, free_port, tiny_model, tiny_model.name, log, flags))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture(scope="session")
def followed(
    smg_pool: LocalPool,
    language: Remote,
    spawn: Callable[..., subprocess.Popen[bytes]],
    program: Callable[[str], Path],
    wait_for: Callable[..., object],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A file with the pool's workers and prefill and decode, kept by ``encodepool endpoints follow``."""
    folder = tmp_path_factory.mktemp("followed")
    others, merged = folder / "language.json", folder / "workers.json"
    others.write_text(json.dumps({"version": 1, "workers": language.call("workers")}))
    command = [program("encodepool"), "endpoints", "follow", "--state-dir", smg_pool.state_dir]
    spawn([*command, "--with", others, "--out", merged], folder / "follow.log")
    wait_for(merged.exists, 60, "the followed file")
    return merged


@pytest.fixture(scope="session")
def list_watch(smg_pool: LocalPool) -> Iterator[ListWatch]:
    watch = ListWatch(smg_pool)
    yield watch
    watch.close()


@pytest.fixture(scope="session")
def tower(tiny_model: Path) -> Callable[..., Rows]:
    """The tower called directly in this process."""
    return tower_rows(tiny_model)


@pytest.fixture(scope="session")
def chain(
    language: Remote,
    smg_pool: LocalPool,
    followed: Path,
    start_gateway: Callable[..., Gateway],
    tower: Callable[..., Rows],
    tiny_model: Path,
) -> Chain:
    """The gateway follows the pool; every worker of the list is ready."""
    gateway = start_gateway(*file_discovery(followed), *QUICK.split())
    gateway.wait_workers({(w["url"], w["bootstrap_port"]) for w in smg_pool.listed().values()})
    return Chain(smg_pool, language, gateway, Expected(tower, read_image_spec(tiny_model)))


@pytest.fixture(scope="session")
def new_seeds() -> Callable[[int], list[int]]:
    """``new_seeds(n)``: of n pictures that nobody has sent before."""
    seeds = itertools.count(1)
    return lambda n: list(itertools.islice(seeds, n))
