"""The whole chain on one machine: client, SMG, a pool's workers, TokenSpeed's receivers.

``Chain`` holds the parts, ``Load`` keeps requests going, ``ListWatch`` remembers when a worker left the
list, and ``expected`` says which rows an image must become.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from tests.e2e.pooling import LocalPool
from tests.e2e.receiving import Rows
from tests.peers.smg.gateway import Answer, Gateway, picture
from tests.peers.tokenspeed.remote import Remote

from encodepool_worker.client.preprocess import pixel_rows
from encodepool_worker.towers.spec import ImageSpec

WATCH_S = 0.05
PAUSE_S = 0.2
"""Between the requests of one client: what starts beside the load needs processor time too."""


@dataclass(frozen=True)
class Pixels:
    """Pixel rows of one image, as a tower takes them: float32 ``[h * w, patch width]``."""

    h: int
    w: int
    float32: Any
    t: int = 1


def prepared(png: bytes, spec: ImageSpec) -> Pixels:
    """What SMG makes of a PNG that it need not scale; bit for bit, which a test shows.

    It normalises in double precision, our client in single, as ``transformers`` does.
    """
    [mean], [std] = set(spec.image_mean), set(spec.image_std)
    image = np.asarray(Image.open(BytesIO(png)).convert("RGB"))
    plain = replace(spec, image_mean=(0.0,) * 3, image_std=(1.0,) * 3, rescale_factor=1.0)
    levels = pixel_rows(image, plain).astype(np.float64)
    h, w = image.shape[0] // spec.patch_size, image.shape[1] // spec.patch_size
    return Pixels(h, w, ((levels / 255 - mean) / std).astype(np.float32))


@dataclass
class Expected:
    """``digest(seed)``: of the rows that the tower, called directly, makes of the picture with that seed."""

    tower: Callable[[Any], Rows]
    spec: ImageSpec

    def __post_init__(self) -> None:
        self.digest = lru_cache(maxsize=None)(self._digest)

    def _digest(self, seed: int) -> tuple[str, str]:
        digest = self.tower(prepared(picture(seed), self.spec)).digest
        return digest["main"], digest["deepstack"]


def rows_of(record: dict[str, Any]) -> tuple[str, str]:
    return record["main"], record["deepstack"]


@dataclass
class Chain:
    pool: LocalPool
    language: Remote
    gateway: Gateway
    expected: Expected

    def count(self) -> int:
        """Images that prefill has seen so far."""
        return int(self.language.call("count"))

    def records(self, since: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.language.call("records", since=since)
        return records

    def send(self, requests: Sequence[Sequence[int]], concurrency: int) -> list[Answer]:
        """Chat requests, each with the pictures of its seeds; answers in the same order."""
        with ThreadPoolExecutor(concurrency) as clients:
            return list(clients.map(self._chat, requests))

    def _chat(self, seeds: Sequence[int]) -> Answer:
        return self.gateway.chat([picture(seed) for seed in seeds])


def bootstrap_of(entry: dict[str, Any]) -> str:
    """The address under which prefill knows a worker, from its entry in endpoints.json."""
    return f"{entry['bootstrapHost']}:{entry['bootstrapPort']}"


@dataclass
class Load:
    """Requests of one new picture each, ``concurrency`` at a time, until `stop`."""

    chain: Chain
    seeds: Iterator[int]
    answers: list[Answer] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextmanager
    def running(cls, chain: Chain, concurrency: int, first_seed: int) -> Iterator["Load"]:
        load = cls(chain, itertools.count(first_seed))
        with ThreadPoolExecutor(concurrency) as clients:
            futures = [clients.submit(load._client) for _ in range(concurrency)]
            try:
                yield load
            finally:
                load._ended.set()
        for future in futures:
            future.result()

    def _client(self) -> None:
        while not self._ended.wait(PAUSE_S):
            seed = next(self.seeds)
            self.answers.append(self.chain.gateway.chat([picture(seed)]))


class ListWatch:
    """When each URL left the pool's list (monotonic): ``left``."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._listed: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.left: dict[str, float] = {}
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(WATCH_S):
            now = set(self._pool.listed())
            self.left |= dict.fromkeys(self._listed - now, time.monotonic())
            self._listed = now

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
