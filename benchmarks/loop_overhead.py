"""B1: what the loop adds around the tower, from the frontend's hand-over to the receiver's Success.

The transport is one that is done at once, so that no bytes are moved: admission, batching, storing and
telling are left, each item with its receiver. First with a tower that computes nothing, against the
150 us an item may cost, and against the reference's own loop around such a tower and transport; then with
a real one, against the same tower called directly.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.frame import Line, Pair, Run
from benchmarks.rank import NoPeer, Rank, Rooms
from benchmarks.reference_programs import ReferenceLoop

ALLOWED_US = 150.0
HIDDEN = 64
"""Of the rows of the tower that computes nothing."""

ROUND_S = 0.3
"""About how long one figure of the empty tower is measured."""

VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "out_hidden_size": 256,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 576,
    "deepstack_visual_indexes": [0, 1, 2],
}
"""A small Qwen3-VL tower: some 30 ms for 196 tokens on one core. A larger one hides the loop better."""


def write_model(folder: Path, **changes: Any) -> Path:
    """The configuration of a tower whose weights are made up."""
    vision = VISION | changes
    config = {
        "model_type": "qwen3_vl",
        "dtype": "float32",
        "vision_config": {"model_type": "qwen3_vl", **vision},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pairs(run: Run) -> Iterator[Pair]:
    yield from _empty(run.stack, [16] if run.quick else [16, 196], [1, 8] if run.quick else [1, 8, 64])
    yield from _real(run.stack, [8] if run.quick else [1, 8])


def _empty(stack: ExitStack, sizes: Sequence[int], batches: Sequence[int]) -> Iterator[Pair]:
    max_rows = max(batches) * max(sizes)
    rank = stack.enter_context(Rank(transport="none", hidden=HIDDEN, max_rows=max_rows))
    reference = ReferenceLoop(stack, transport="none", hidden=HIDDEN, max_rows=max_rows)
    for n_tokens in sizes:
        pixels = rank.pixels(n_tokens)
        for batch in batches:
            ours = partial(us_per_item, rank, n_tokens, batch, pixels)
            theirs = partial(reference.ask, "us_per_item", n_tokens=n_tokens, batch=batch)
            # One at a time is a way there and back over four threads and two processes, whose waking
            # up is no work: the limit is for items that come together.
            line = Line() if batch == 1 else Line(at_most=1.0)
            what = f"an item of {n_tokens} tokens, {batch} at once, no tower"
            yield Pair("B1 loop", what, "us", ours, "allowed", lambda: ALLOWED_US, line, is_fixed=True)
            yield Pair("B1 loop", what, "us", ours, "reference's loop", theirs, Line(at_most=1.0))


def us_per_item(rank: Rooms, n_tokens: int, batch: int, pixels: Any) -> float:
    """Over as many batches as fill the time of a round."""
    rounds, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < ROUND_S:
        items(rank, n_tokens, batch, pixels, (1, 2, 2 * n_tokens))
        rounds += 1
    return 1e6 * (time.perf_counter() - began_s) / rounds / batch


def _real(stack: ExitStack, batches: Sequence[int]) -> Iterator[Pair]:
    import torch

    from encodepool_worker.towers.base import TowerItem
    from encodepool_worker.towers.load import load_tower
    from encodepool_worker.types import Grid

    torch.set_num_threads(1)
    model = write_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="encodepool-bench-"))))
    tower = load_tower(model, load_format="dummy", device="cpu")
    rank = stack.enter_context(Rank(transport="none", tower=str(model), spec=tower.spec))
    side, n_tokens = 28, 196
    pixels = np.full((side * side, tower.spec.patch_width), 0x3F80, dtype=np.uint16)
    same = TowerItem(torch.from_numpy(pixels.view(np.int16)).view(torch.bfloat16), (Grid(1, side, side),))
    for batch in batches:

        def ours(batch: int = batch) -> float:
            began_s = time.perf_counter()
            items(rank, n_tokens, batch, pixels, (1, side, side))
            return 1e3 * (time.perf_counter() - began_s)

        def bare(batch: int = batch) -> float:
            began_s = time.perf_counter()
            tower.encode([same] * batch)
            return 1e3 * (time.perf_counter() - began_s)

        what = f"{batch} x 196 tokens, small tower"
        yield Pair("B1 loop", what, "ms", ours, "bare tower", bare, Line(at_most=1.05))


def items(rank: Rooms, n_tokens: int, count: int, pixels: Any, grid: tuple[int, int, int]) -> None:
    """So many items of new contents with their receivers, from the hand-over until all are told."""
    peer = NoPeer()
    rooms = [rank.new_room() for _ in range(count)]
    for room in rooms:
        rank.announce(room, n_tokens, peer)
    for room in rooms:
        rank.submit(room, room.to_bytes(16, "little"), pixels, grid)
    rank.landed(count)
