"""Runs the benchmarks, prints one table and writes it as JSON. `make bench`, `make bench-quick`.

Exit code 0: every line passed; 1: one was missed; 3: none was missed, but some rows are void.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import (
    cache_hit,
    intake,
    isolation,
    loop_overhead,
    overload,
    shipping,
)
from benchmarks.frame import REPEATS, Control, Pair, Row, Run, Watch, measure
from benchmarks.report import print_rows, write_json

FIRST_CONTROLS = 20
"""Taken before anything is measured, so that the first rows too know how fast this machine can be."""

ALL: dict[str, Callable[[Run], Iterator[Pair | Row]]] = {
    "B1": loop_overhead.pairs,
    "B2": shipping.pairs,
    "B3": cache_hit.pairs,
    "B4": intake.pairs,
    "B6": isolation.pairs,
    "B7": overload.pairs,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter measurements")
    parser.add_argument("--only", metavar="B1,B2", help=f"some of {', '.join(ALL)}")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="FILE")
    given = parser.parse_args(argv)
    wanted = given.only.split(",") if given.only else list(ALL)
    unknown = set(wanted) - set(ALL)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")

    rows: list[Row] = []
    remarks: list[str] = []
    began_s = time.monotonic()
    control = Control()
    watch = Watch(control)
    for _ in range(FIRST_CONTROLS):
        watch()
    try:
        for name in wanted:
            with ExitStack() as stack:
                for case in ALL[name](Run(stack, given.quick, remarks)):
                    print(f"{time.monotonic() - began_s:4.0f} s  {case.bench}: {case.what}", file=sys.stderr)
                    rows.append(case if isinstance(case, Row) else measure(case, watch, given.repeats))
    finally:
        control.close()
        took_s = time.monotonic() - began_s
        print_rows(rows, remarks)
        write_json(given.json, rows, remarks, quick=given.quick, took_s=took_s)
        print(f"{len(rows)} rows in {took_s:.0f} s, also in {given.json}")
    verdicts = {row.verdict for row in rows}
    return 1 if "miss" in verdicts else 3 if "void" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
