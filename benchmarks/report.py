"""The table on the terminal and the JSON beside it."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.frame import Row
from rich.console import Console
from rich.table import Table

STYLES = {"pass": "green", "miss": "bold red", "void": "yellow"}
PACKAGES = ("encodepool", "mooncake-transfer-engine-non-cuda", "torch", "pyzmq", "grpcio")


def print_rows(rows: Sequence[Row], remarks: Sequence[str], console: Console | None = None) -> None:
    console = console or Console(width=None if os.isatty(1) else 200)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in COLUMNS.items():
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    last = ""
    for row in rows:
        style = STYLES.get(row.verdict, "")
        first, last = (row.bench if row.bench != last else ""), row.bench
        table.add_row(
            first,
            row.what,
            f"{figure(row.ours)} {row.unit}",
            row.against,
            f"{figure(row.theirs)} {row.unit}",
            f"{row.ratio:.3g}",
            f"{row.low:.3g}..{row.high:.3g}",
            row.line,
            f"[{style}]{row.verdict}[/]" if style else row.verdict,
            f"{row.repeats}/{row.measured}",
            f"{row.control_moved:.0%}",
        )
    console.print(table)
    for remark in remarks:
        console.print(remark, markup=False, highlight=False)


COLUMNS = {
    "": "left",
    "measured": "left",
    "ours": "right",
    "against": "left",
    "theirs": "right",
    "ratio": "right",
    "spread": "right",
    "line": "right",
    "verdict": "left",
    "repeats": "right",
    "control": "right",
}


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_json(
    path: Path, rows: Sequence[Row], remarks: Sequence[str], *, quick: bool, took_s: float
) -> None:
    document = {
        "machine": machine(),
        "quick": quick,
        "took_s": round(took_s, 1),
        "rows": [asdict(row) for row in rows],
        "remarks": list(remarks),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1_5_15": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
