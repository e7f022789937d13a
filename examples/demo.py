"""What `make demo` runs: a pool on this machine, images through it and back, and everything away again.

    demo.py [MANIFEST]

Encode groups with a small made-up checkpoint are started by `encodepool local up`, two without a
manifest. Each picture is sent twice by the client library, which plays the prefill side: it
registers memory with the group, sends the pixels, and receives the rows by one-sided writes. The
rows are compared with those of the tower itself: byte for byte, and to within 1e-4 where several
ranks have summed them in another order. At the end no process, socket or shared memory is left.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from encodepool_worker.cli.quiet import native_stderr_off
from encodepool_worker.client.encode import ClientOptions, EncodeClient, Encoded
from encodepool_worker.client.heatmap import Tile, write_heatmap
from encodepool_worker.client.results import image_names, write_rows
from encodepool_worker.errors import WorkerError

ROOT = Path(__file__).resolve().parent.parent
TWO_GROUPS = ROOT / "examples" / "tiny.yaml"
IMAGES = sorted((ROOT / "examples" / "images").glob("*.png"))
FOLDER = ROOT / ".demo"
MODEL, STATE = FOLDER / "model", FOLDER / "state"
ROWS, HEATMAP, DIRECT = FOLDER / "rows.npz", FOLDER / "heatmap.png", FOLDER / "direct.npz"
BIN = Path(sys.executable).parent
SHM = Path("/dev/shm")

CLOSE = 1e-4
"""How far rows of several ranks may be from those of one: they are sums in another order."""

COUNTED_S = 5.0
"""A group's counters are at most about a second behind."""

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Loopback is never behind a proxy, whatever the environment says."""

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """What went wrong, in a sentence."""


def say(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Show a command and run it; its output is part of the demo."""
    words = [str(word) for word in command]
    shown = " ".join(word.removeprefix(f"{BIN}/").removeprefix(f"{ROOT}/") for word in words)
    console.print(f"$ {shown}", style="dim")
    done = subprocess.run(words, env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        raise DemoError(f"`{shown}` ended with {done.returncode}")


def main(manifest: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    take_down_leftovers()
    say("1. A small Qwen3-VL checkpoint with made-up weights (no download)")
    shutil.rmtree(MODEL, ignore_errors=True)
    run(BIN / "encodepool-worker", "make-tiny-model", MODEL)

    segments = shared_memory()
    with pool(manifest) as groups:
        say("3. Each picture twice through the pool: the second time its rows are in a group's store")
        first, second = send_all(groups, 2)
        say("4. The same rows from the tower itself, without a pool")
        compare([*first, *second], CLOSE if has_ranks() else 0.0)
        write_results(first)
        ports = [port for group in groups.values() for port in group.ports]
    say("6. Is anything left?")
    check_nothing_left(ports, segments)
    console.print("no process, no open port, no shared memory")


# --- the pool


@dataclass(frozen=True, slots=True)
class Group:
    """Where one group answers; ``metrics`` is the URL of its counters."""

    metrics: str
    ports: tuple[int, ...]


@contextmanager
def pool(manifest: Path) -> Iterator[dict[str, Group]]:
    """The pool of the manifest; taken down whatever happens."""
    try:
        say(f"2. The encode groups of {manifest.name} on this machine")
        run(BIN / "encodepool", "local", "up", "-f", manifest, "--state-dir", STATE)
        run(BIN / "encodepool", "local", "status", "--state-dir", STATE)
        yield groups_of(json.loads((STATE / "status.json").read_text()))
    finally:
        say("5. Everything down: off the list first, then the work in hand, then the processes")
        run(BIN / "encodepool", "local", "down", "--state-dir", STATE)


def groups_of(report: Mapping[str, list[dict[str, str]]]) -> dict[str, Group]:
    out = {}
    for row in report["groups"]:
        addresses = (row["url"], row["bootstrap"], row["metrics"].removesuffix("/metrics"))
        ports = tuple(int(address.rsplit(":", 1)[1]) for address in addresses)
        out[str(row["group"])] = Group(row["metrics"], ports)
    return out


def take_down_leftovers() -> None:
    """A demo that was killed may have left its pool behind."""
    if STATE.exists():
        subprocess.run(
            [BIN / "encodepool", "local", "down", "--state-dir", STATE], capture_output=True, check=True
        )


# --- images through the pool


def send_all(groups: Mapping[str, Group], rounds: int) -> list[list[Encoded]]:
    """Every picture, ``rounds`` times, one at a time; prints a line for each. Raises DemoError."""
    table = Table("picture", "tokens", "group", "hit", "ms", "bytes", box=None, pad_edge=False)
    for column in ("tokens", "ms", "bytes"):
        next(c for c in table.columns if c.header == column).justify = "right"
    results: list[list[Encoded]] = []
    listing = STATE / "endpoints" / "endpoints.json"
    # The transfer engine's library writes lines of its own even when all goes well.
    with (
        native_stderr_off(),
        EncodeClient.from_list(listing, ClientOptions(receive_bytes=64 << 20)) as client,
    ):
        for number in range(rounds):
            results.append([])
            for image in IMAGES:
                before = counters(groups)
                try:
                    encoded = client.encode(image)
                except WorkerError as error:
                    raise DemoError(f"{image.name}: {error}") from error
                hit = was_hit(groups, before)
                results[-1].append(encoded)
                table.add_row(
                    image.name,
                    str(encoded.n_tokens),
                    encoded.endpoint.label,
                    "yes" if hit else "no",
                    f"{encoded.encode_s * 1000:.1f}",
                    f"{encoded.nbytes:,}",
                )
                if hit != (number > 0):
                    raise DemoError(f"{image.name}, round {number + 1}: a hit was {hit}")
    console.print(table)
    return results


def counters(groups: Mapping[str, Group]) -> tuple[float, float]:
    """(items served from a store, items that a tower encoded), over all groups."""
    hits = encoded = 0.0
    for group in groups.values():
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            group.metrics, timeout=5
        ) as page:
            for line in page.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("encodepool_hits_total"):
                    hits += float(value)
                elif name == "encodepool_batch_items_total":
                    encoded += float(value)
    return hits, encoded


def was_hit(groups: Mapping[str, Group], before: tuple[float, float]) -> bool:
    """Which of the two counters moved. Nobody else uses the pool, so it was for our picture."""
    deadline_s = time.monotonic() + COUNTED_S
    while (now := counters(groups)) == before:
        if time.monotonic() > deadline_s:
            raise DemoError("the groups' counters did not move")
        time.sleep(0.05)
    return now[0] > before[0]


# --- what came back


def has_ranks() -> bool:
    """Whether a group's tower is computed by several ranks."""
    listed = json.loads((STATE / "endpoints" / "endpoints.json").read_text())
    return any(endpoint["tensorParallelSize"] > 1 for endpoint in listed["endpoints"])


def compare(received: Sequence[Encoded], allowed: float) -> None:
    """With a direct call of the tower, to within ``allowed``. Raises DemoError."""
    # As many threads as each group has: sums in another order round differently.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    run(
        BIN / "encodepool-worker", "rows", *IMAGES, "--model", MODEL, "--out", DIRECT,
        env={"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    n_bytes, furthest = 0, 0.0
    with np.load(DIRECT) as direct:
        for encoded in received:
            [name] = image_names([encoded.path])
            for part, got in ((f"{name}.main", encoded.main), (f"{name}.deepstack", encoded.deepstack)):
                wanted = direct[part]
                if got is None or got.dtype != wanted.dtype or got.shape != wanted.shape:
                    raise DemoError(f"{part}: the pool's rows are not the tower's")
                furthest = max(furthest, float(np.abs(got - wanted).max()))
                if not furthest <= allowed:
                    raise DemoError(f"{part}: a value is {furthest:g} away from the tower's")
                n_bytes += got.nbytes
    what = f"no value is more than {furthest:.1g} away" if furthest else "every byte is the same"
    console.print(f"{len(received)} results, {n_bytes:,} bytes: {what}")


def write_results(received: Sequence[Encoded]) -> None:
    names = image_names([encoded.path for encoded in received])
    arrays = {}
    for name, encoded in zip(names, received, strict=True):
        arrays[f"{name}.main"] = encoded.main
        if encoded.deepstack is not None:
            arrays[f"{name}.deepstack"] = encoded.deepstack
    write_rows(ROWS, arrays)
    write_heatmap(
        HEATMAP,
        [
            Tile(name, encoded.shown, encoded.main_float32, encoded.grid, encoded.merge_size)
            for name, encoded in zip(names, received, strict=True)
        ],
    )
    digest = hashlib.sha256(ROWS.read_bytes()).hexdigest()[:12]
    console.print(f"wrote {ROWS.relative_to(ROOT)} (sha256 {digest}...) and {HEATMAP.relative_to(ROOT)}")


# --- nothing stays


def shared_memory() -> set[str]:
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def check_nothing_left(ports: Sequence[int], segments_before: set[str]) -> None:
    """Raises DemoError naming what the pool left behind."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(STATE) in argv:
                left.append(f"process {entry.name}: {b' '.join(argv).decode(errors='replace')}")
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                left.append(f"somebody listens on port {port}")
    left += [f"/dev/shm/{name}" for name in shared_memory() - segments_before if "encodepool" in name]
    if left:
        raise DemoError("left behind: " + "; ".join(left))


if __name__ == "__main__":
    # Ended from outside, it still takes its pool down.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    try:
        main(Path(sys.argv[1]) if sys.argv[1:] else TWO_GROUPS)
    except DemoError as error:
        console.print(f"\ndemo: failed: {error}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("\ndemo: interrupted")
        sys.exit(130)
    console.print("\ndemo: ok")
