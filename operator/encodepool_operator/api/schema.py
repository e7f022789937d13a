"""Writes what is made from the tables: crds/encodepools.yaml and docs/api.md.

``python -m encodepool_operator.api.schema`` in the root of the checkout; with ``--check`` nothing is
written, and the exit code is 1 where a file is not up to date.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from .crd import GENERATIONS, crd, schema_hash
from .page import page

CRD_FILE = Path("crds/encodepools.yaml")
PAGE_FILE = Path("docs/api.md")
SIZE_LIMIT_BYTES = 200 * 1024
"""The API server takes more, but kubectl's last-applied annotation ends at 256 KiB."""


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, texts never folded, no anchors for what is said twice."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated() -> dict[Path, str]:
    """File below the root of the checkout -> its text."""
    text = yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=True)
    head = "# Made by `python -m encodepool_operator.api.schema`; change the tables in operator/ instead.\n"
    return {CRD_FILE: head + text, PAGE_FILE: page()}


def problems(root: Path) -> list[str]:
    """What is not up to date below ``root``, and what a release needs; empty if nothing."""
    out = []
    for path, text in generated().items():
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text:
            out.append(f"{path} is not up to date: run python -m encodepool_operator.api.schema")
        if path == CRD_FILE and len(text.encode()) > SIZE_LIMIT_BYTES:
            out.append(f"{path} has {len(text.encode())} bytes, more than {SIZE_LIMIT_BYTES}")
    found = schema_hash(crd()["spec"]["versions"][0])
    if GENERATIONS[-1] != found:
        out.append(
            f"the schema has changed: put {found!r} at the end of GENERATIONS in api/crd.py, "
            "in place of the last one if that was never released"
        )
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m encodepool_operator.api.schema", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--root", type=Path, default=Path(), help="root of the checkout")
    options = parser.parse_args(argv)
    if not options.check:
        for path, text in generated().items():
            (options.root / path).parent.mkdir(parents=True, exist_ok=True)
            (options.root / path).write_text(text, encoding="utf-8")
    found = problems(options.root)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
