"""What the towers do on a CUDA device: rows, memory, speed. `make gpu-check`; at most 8 minutes.

Needs a GPU and nothing else: models are made up. docs/gpu.md says how to install for one. Prints one
line for each thing seen, as it is seen. Exit code 0: all as it should be; 1: some line says NO; 2:
there is no CUDA device. A section is skipped, and says so, when the time is up. `--rehearse` runs the
same steps on a CPU with tiny towers, to try the script itself.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 450.0
RANKS_S = 120.0
"""Time that the ranks' section may take: two processes that start, load and end."""

TINY = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 48}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""The towers of Qwen3-VL-8B and Qwen2.5-VL-7B, as published."""

LAYERS_OF_TINY = {
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1]},
    "qwen2_5_vl": {"fullatt_block_indexes": [1]},
}
EXACT = 1e-4
"""Largest difference of float32 rows."""
ROUNDED = 0.05
"""Mean difference of 16-bit rows over their mean size."""


@dataclass
class Check:
    """What is being checked, on what, and what has been seen."""

    device: Any
    rehearse: bool
    ends_s: float
    lines: list[tuple[str, str, str, bool]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def saw(self, section: str, what: str, value: str, fine: bool = True) -> None:
        self.lines.append((section, what, value, fine))
        print(f"{section:8} {what:56} {value:34} {'' if fine else 'NO'}", flush=True)

    def sync(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], budget_s: float = 2.0) -> float:
        """Median of some calls, after one that is not counted."""
        work()
        self.sync()
        times: list[float] = []
        began_s = time.monotonic()
        budget_s = 0.0 if self.rehearse else budget_s
        while not times or (len(times) < 20 and time.monotonic() - began_s < budget_s):
            start_s = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - start_s)
        return sorted(times)[len(times) // 2]

    @contextmanager
    def memory(self, section: str, what: str) -> Iterator[None]:
        """Device memory that the block added, and at its highest."""
        import torch

        if self.device.type != "cuda":
            yield
            return
        self.sync()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self.sync()
        stays = torch.cuda.memory_allocated(self.device) - before
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.saw(section, what, f"{stays / 2**20:.0f} MiB stay, {peak / 2**20:.0f} at most")


def write_shape(folder: Path, family: str, rehearse: bool) -> Path:
    """A folder with the config.json of a tower; its weights are made up as it is loaded."""
    vision = {**SHAPES[family], "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if rehearse:
        vision |= TINY | LAYERS_OF_TINY[family]
    made = folder / f"shape-{family}"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps({"model_type": family, "vision_config": vision}))
    return made


def make_items(spec: Any, sides: list[tuple[int, int]], seed: int = 0) -> list[Any]:
    import torch

    from encodepool_worker.towers.base import TowerItem
    from encodepool_worker.types import Grid

    generator = torch.Generator().manual_seed(seed)
    grids = [Grid(1, h, w) for h, w in sides]
    return [TowerItem(torch.randn(g.patches, spec.patch_width, generator=generator), (g,)) for g in grids]


def plain_rows(module: Any, items: list[Any], device: Any, dtype: Any) -> Any:
    """The class of transformers itself, called as its users do."""
    import torch

    with torch.inference_mode():
        pixels = torch.cat([item.pixels for item in items]).to(device, dtype)
        grids = torch.tensor([[g.t, g.h, g.w] for item in items for g in item.grids], device=device)
        out = module(pixels, grid_thw=grids, return_dict=True)
        return torch.cat([out.pooler_output, *getattr(out, "deepstack_features", [])], dim=-1)


def apart(rows: Any, wanted: Any) -> tuple[float, float]:
    """(largest difference, mean difference over the mean size)"""
    difference = (rows.float() - wanted.float().to(rows.device)).abs()
    return float(difference.max()), float(difference.mean() / wanted.float().abs().mean())


def check_rows(check: Check, folder: Path) -> None:
    """Small complete checkpoints, read from safetensors, against plain transformers on the same device."""
    import torch
    from transformers import AutoModelForImageTextToText

    from encodepool_worker.towers.base import finite_rows
    from encodepool_worker.towers.load import load_tower
    from encodepool_worker.towers.tiny import write_tiny_model

    for family in SHAPES:
        model = write_tiny_model(folder / f"tiny-{family}", family, seed=1)
        plain = AutoModelForImageTextToText.from_pretrained(model).eval().model.visual
        sides = [(16, 16), (8, 20), (10, 26), (2, 2)]
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            tower: Any = load_tower(model, dtype=name, device=str(check.device))
            items = make_items(tower.spec, sides)
            rows = tower.encode(items)
            plain = plain.to(check.device, dtype)
            most, mean = apart(rows, plain_rows(plain, items, check.device, dtype))
            fine = most <= EXACT if dtype is torch.float32 else mean <= ROUNDED
            check.saw(
                "rows", f"{family} {name}: largest and mean difference", f"{most:.1e}  {mean:.1e}", fine
            )
            alone = torch.cat([tower.encode([item]) for item in items])
            most, mean = apart(rows, alone)
            fine = most <= EXACT if dtype is torch.float32 else mean <= ROUNDED
            check.saw(
                "rows", f"{family} {name}: a batch, and its items alone", f"{most:.1e}  {mean:.1e}", fine
            )
            items[1].pixels[0, 0] = float("nan")
            seen = finite_rows(tower.encode(items), [tower.spec.token_count(i.grids[0]) for i in items])
            check.saw(
                "rows", f"{family} {name}: a NaN spoils its own item", str(seen), seen.count(False) == 1
            )


def check_towers(check: Check, folder: Path) -> None:
    """Full towers with made-up weights: memory, and speed beside plain transformers and with graphs."""
    import torch

    from encodepool_worker.towers.load import load_tower

    sides = [(8, 8)] if check.rehearse else [(16, 16), (32, 32), (64, 64), (128, 128)]
    batch = [sides[0]] * (3 if check.rehearse else 16)
    cases = [[side] for side in sides] + [batch]
    how = {"load_format": "dummy", "dtype": "bfloat16", "device": str(check.device)}
    for family in SHAPES:
        shape = write_shape(folder, family, check.rehearse)
        if check.left_s < 60:
            check.saw("tower", family, "skipped: the time is up")
            continue
        with check.memory("memory", f"{family}: a tower"):
            tower: Any = load_tower(shape, **how)
            tower.warm_up()
        with check.memory("memory", f"{family}: a batch of 8192 tokens"):
            tower.encode(make_items(tower.spec, [(16, 16)] * (2 if check.rehearse else 128)))
        graphed: Any = load_tower(shape, graphs=True, **how)
        check.saw("graphs", f"{family}: in use", graphed.graphs, check.rehearse or graphed.graphs == "on")
        if check.rehearse:
            graphed.use_graphs((16, 64))
        with check.memory("memory", f"{family}: graphs"):
            start_s = time.perf_counter()
            graphed.warm_up()
        check.saw("graphs", f"{family}: recorded in", f"{time.perf_counter() - start_s:.1f} s")
        for case in cases:
            check_case(check, family, tower, graphed, case)
        del tower, graphed
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def check_case(check: Check, family: str, tower: Any, graphed: Any, sides: list[tuple[int, int]]) -> None:
    """One batch: rows and time of plain transformers, of the tower, and of the tower with graphs."""
    import torch

    items = make_items(tower.spec, sides)
    tokens = sum(tower.spec.token_count(item.grids[0]) for item in items)
    what = f"{family}: {len(items)} x {tokens // len(items)} tokens"

    def plain() -> Any:
        return plain_rows(tower.module, items, check.device, torch.bfloat16)

    wanted = plain()
    for name, one in (("without", tower), ("with", graphed)):
        _, mean = apart(one.encode(items), wanted)
        check.saw("rows", f"{what}, {name} graphs: mean difference", f"{mean:.1e}", mean <= ROUNDED)
    kept = graphed.encode(items)
    copy = kept.clone()
    graphed.encode(items[::-1])
    same = torch.equal(kept, copy)
    check.saw("graphs", f"{what}: rows stay when the next batch runs", str(same), same)
    ways: dict[str, Callable[[], object]] = {
        "plain transformers": plain,
        "tower": lambda: tower.encode(items),
        "tower with graphs": lambda: graphed.encode(items),
    }
    for way, work in ways.items():
        if check.left_s < 20:
            check.saw("speed", f"{what}, {way}", "skipped: the time is up")
            continue
        took_s = check.seconds(work)
        check.saw("speed", f"{what}, {way}", f"{took_s * 1e3:8.2f} ms {tokens / took_s:10.0f} tokens/s")


def check_copies(check: Check, folder: Path) -> None:
    """Pixels to the device, and rows from it into pinned memory."""
    import torch

    from encodepool_worker.towers.staging import CHUNK_BYTES, PixelStager, copy_stream

    n_rows = 64 if check.rehearse else 32768
    pixels = torch.randn(n_rows, 1536)
    stager = PixelStager(check.device, torch.bfloat16, 1536)
    staged = stager.put([pixels])
    check.sync()
    same = torch.equal(staged.cpu(), pixels.to(torch.bfloat16))
    check.saw("copies", "staged pixels are the pixels, cast", str(same), same)
    took_s = check.seconds(lambda: stager.put([pixels]))
    mib = 2 * CHUNK_BYTES / 2**20
    check.saw("copies", f"pixels of 8192 tokens, two buffers, {mib:.0f} MiB", f"{took_s * 1e3:.1f} ms")
    took_s = check.seconds(lambda: pixels.to(check.device).to(torch.bfloat16))
    check.saw("copies", "the same without staging", f"{took_s * 1e3:.1f} ms")
    rows = torch.randn(n_rows // 4, 4096, device=check.device, dtype=torch.bfloat16)
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=check.device.type == "cuda")

    def out() -> None:
        with copy_stream(check.device):
            host.copy_(rows, non_blocking=True)

    took_s = check.seconds(out)
    same = torch.equal(host, rows.cpu())
    rate = rows.numel() * rows.element_size() / took_s / 1e9
    check.saw("copies", "8192 rows into pinned memory", f"{took_s * 1e3:.2f} ms, {rate:.1f} GB/s", same)


def check_ranks(check: Check, folder: Path) -> None:
    """Two ranks on two devices: rows beside one rank's, and speed."""
    import torch

    if not check.rehearse and torch.cuda.device_count() < 2:
        check.saw("ranks", "two ranks", "skipped: one device")
        return
    if check.left_s < RANKS_S:
        check.saw("ranks", "two ranks", "skipped: the time is up")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shape = write_shape(folder, "qwen3_vl", check.rehearse)
    argv = [sys.executable, __file__, *(["--rehearse"] if check.rehearse else []), "--shape", str(shape)]
    ranks = [
        subprocess.Popen(
            [*argv, "--rank", str(rank), "--port", str(port)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=RANKS_S)
        codes = [rank.wait(20) for rank in ranks]
    except subprocess.TimeoutExpired:
        check.saw("ranks", "two ranks", f"no answer within {RANKS_S:.0f} s", False)
        return
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if codes != [0, 0]:
        check.saw("ranks", "two ranks", f"exit codes {codes}", False)
        return
    for line in said.splitlines():
        check.saw("ranks", *json.loads(line))


def run_rank(rank: int, port: int, shape: str, rehearse: bool) -> None:
    """One of two: rank 0 prints what it saw, a JSON list a line."""
    import torch

    from encodepool_worker.towers.load import load_tower
    from encodepool_worker.towers.parallel import join

    device = torch.device("cpu" if rehearse else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check = Check(device, rehearse, time.monotonic() + RANKS_S)
    parallel = join(rank, 2, "127.0.0.1", port, device, join_timeout_s=RANKS_S)
    for dtype in ("float32", "bfloat16"):
        how = {"load_format": "dummy", "dtype": dtype, "device": str(device)}
        tower: Any = load_tower(shape, parallel=parallel, **how)
        tower.warm_up()
        items = make_items(tower.spec, [(8, 8), (8, 12)] if rehearse else [(64, 64), (32, 48)])
        rows = tower.encode(items)
        start_s = time.perf_counter()
        for _ in range(5):
            tower.encode(items)
        check.sync()
        took_s = (time.perf_counter() - start_s) / 5
        if rank == 0:
            wanted = load_tower(shape, **how).encode(items)  # type: ignore[arg-type]
            most, mean = apart(rows, wanted)
            # Rows of made-up towers have a size of about 1, through 27 layers of float32 sums.
            fine = mean <= (EXACT if dtype == "float32" else ROUNDED)
            seen = f"{most:.1e}  {mean:.1e}  {took_s * 1e3:.2f} ms"
            print(json.dumps([f"two ranks, {dtype}: beside one rank; time", seen, fine]), flush=True)
        parallel.meet(f"done with {dtype}", RANKS_S)
    parallel.leave()


SECTIONS = {"rows": check_rows, "copies": check_copies, "towers": check_towers, "ranks": check_ranks}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny towers")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    for name, kind in (("--rank", int), ("--port", int), ("--shape", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    began_s = time.monotonic()
    import torch

    if not args.rehearse and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no CUDA device here", file=sys.stderr)
        return 2
    if args.rank is not None:
        run_rank(args.rank, args.port, args.shape, args.rehearse)
        return 0
    device = torch.device("cpu" if args.rehearse else "cuda")
    check = Check(device, args.rehearse, began_s + LIMIT_S)
    name = "a rehearsal on the CPU" if args.rehearse else torch.cuda.get_device_name(device)
    check.saw("device", name, f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    with tempfile.TemporaryDirectory() as folder:
        for section in args.only.split(","):
            try:
                SECTIONS[section](check, Path(folder))
            except Exception as failed:  # noqa: BLE001 (a line of its own; the other sections go on)
                check.saw(section, f"{type(failed).__name__}: {failed}"[:200], "", False)
    bad = [f"{section}: {what}" for section, what, _, fine in check.lines if not fine]
    print(f"gpu-check: {len(check.lines)} lines in {time.monotonic() - began_s:.0f} s, {len(bad)} say NO")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
