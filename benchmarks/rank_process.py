"""One rank in a process of its own, with a tower that computes nothing: what is left is the loop.

    python -m benchmarks.rank_process '{"tower": "none", "transport": "mooncake", ...}'

Everything but the tower is the worker's: sockets, loop, store, sender, status. Keys: ``tower`` none (the
rows are there already) or a model's folder; ``transport`` mooncake, tcp or none (a write is done at
once and moves nothing); ``tiers`` bytes of each tier of the store; ``hidden`` and ``max_rows`` of a
tower that computes nothing; ``settings``. It registers as ever, and ends when standard input does.
"""

import gc
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.no_tower import MERGE, spec_of

from encodepool_worker.logs import setup_logs
from encodepool_worker.settings import Settings
from encodepool_worker.shell.rank import Rank, engine_maker
from encodepool_worker.shell.threads import start_thread
from encodepool_worker.shell.tiers import TierPlan
from encodepool_worker.towers.base import TowerItem, VisionTower
from encodepool_worker.towers.load import load_tower
from encodepool_worker.transport.base import RawSlice


class NoTower(VisionTower):
    """Hands out rows of ones that it has had all along."""

    def __init__(self, hidden: int, max_rows: int) -> None:
        self.spec = spec_of(hidden)
        self._rows = torch.ones(max_rows, hidden)

    @property
    def row_width(self) -> int:
        return self.spec.hidden

    def encode(self, items: Sequence[TowerItem], *, batch: int = 0) -> torch.Tensor:
        return self._rows[: sum(item.pixels.shape[0] for item in items) // MERGE**2]

    def warm_up(self) -> None:
        pass


class NoTransport:
    """An engine whose writes are done at once."""

    session = "127.0.0.1:1"

    def register(self, ptr: int, nbytes: int, *, receives: bool = True) -> None:
        pass

    def unregister(self, ptr: int) -> None:
        pass

    def probe(self, session: str) -> bool:
        return True

    def write(self, session: str, slices: Sequence[RawSlice]) -> None:
        pass

    def close(self) -> None:
        pass


def main(argument: str) -> None:
    given: dict[str, Any] = json.loads(argument)
    setup_logs("warning", role="rank", rank=0)
    torch.set_num_threads(1)
    transport = given["transport"]
    settings = Settings(
        model="none",
        transfer_backend="tcp" if transport == "none" else transport,
        **given["settings"],
    )
    tower: VisionTower
    if given["tower"] == "none":
        tower = NoTower(given["hidden"], given["max_rows"])
    else:
        tower = load_tower(given["tower"], load_format="dummy", device="cpu")
    tower.warm_up()
    gc.collect()
    gc.freeze()
    names = ("device", "host")
    tiers = [
        TierPlan(name, nbytes, torch.device("cpu"))
        for name, nbytes in zip(names, given["tiers"], strict=False)
    ]
    crash = partial(_crash)
    rank = Rank(
        settings,
        tower,
        NoTransport if transport == "none" else engine_maker(settings),
        tiers=tiers,
        crash=crash,
    )
    start_thread("loop", rank.loop.run, crash)
    sys.stdin.read()
    os._exit(0)  # Mooncake's threads never end by themselves


def _crash(reason: str) -> None:
    print(f"the rank cannot go on: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
