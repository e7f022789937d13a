"""Writes what the chart takes from elsewhere: the copy of the CRD, and the table of values in README.md.

``python charts/encodepool/generate.py`` anywhere; with ``--check`` nothing is written, and the exit code
is 1 where a file is not up to date.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent
ROOT = CHART.parents[1]
BEGIN = "<!-- values: made by generate.py from values.yaml and values.schema.json -->\n"
END = "<!-- end of values -->\n"


def leaves(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values that a user sets one by one, with their schemas, in the schema's order."""
    for name, one in schema["properties"].items():
        if "properties" in one and "description" not in one:
            yield from leaves(one, (*path, name))
        else:
            yield (*path, name), one


def default_of(values: Any, path: tuple[str, ...]) -> Any:
    """The default in values.yaml; KeyError if there is none."""
    for name in path:
        values = values[name]
    return values


def table(schema: Mapping[str, Any], values: Any) -> str:
    """Raises KeyError for a value without default or description."""
    lines = ["| value | default | what |", "|---|---|---|"]
    for path, one in leaves(schema):
        if path[0] in ("global", "enabled"):
            continue
        name, what = ".".join(path), one["description"]
        if "enum" in one:
            choices = ", ".join(f"`{json.dumps(choice).strip(chr(34))}`" for choice in one["enum"])
            what = f"{what} One of {choices}."
        lines.append(f"| `{name}` | `{json.dumps(default_of(values, path))}` | {what} |")
    return "\n".join(lines) + "\n"


def generated() -> dict[Path, str]:
    """File -> its text."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    head, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return {
        CHART / "files" / "encodepools.yaml": (ROOT / "crds" / "encodepools.yaml").read_text(),
        CHART / "README.md": head + BEGIN + table(schema, values) + END + tail,
    }


def problems() -> list[str]:
    """What is not up to date; empty if nothing."""
    out = [
        f"{path.relative_to(ROOT)} is not up to date: run python charts/encodepool/generate.py"
        for path, text in generated().items()
        if not path.is_file() or path.read_text() != text
    ]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for key in ("version", "appVersion"):
        if chart[key] != version:
            out.append(f"Chart.yaml says {key} {chart[key]}, pyproject.toml {version}")
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    if not parser.parse_args(argv).check:
        for path, text in generated().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
