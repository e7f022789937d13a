"""docs/contract.md is what users rely on: what it names exists, and its defaults are the code's."""

import re
from pathlib import Path

import click
import pytest

from encodepool_operator.api import labels
from encodepool_operator.api.parse import parse_spec
from encodepool_operator.cli.main import encodepool
from encodepool_worker.cli.main import COMMANDS as WORKER_COMMANDS
from encodepool_worker.metrics import TABLE as METRICS
from encodepool_worker.settings import BY_NAME

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "contract.md").read_text()
LATER = re.search(r"^Still to come: (.*)$", PAGE, re.MULTILINE)


def commands(section: str) -> set[str]:
    """The first cells of the section's table, without code marks."""
    rows = PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    cells = {re.split(r"(?<!\\)\| ", row[2:])[0] for row in rows if row.startswith("| `")}
    return {part for cell in cells for part in re.findall(r"`([^`]+)`", cell)}


def times() -> dict[str, str]:
    rows = PAGE.split("## Times (defaults)\n")[1].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    return {cell[0]: cell[1] for cell in cells if len(cell) > 1}


def default_of(start: str) -> float:
    """The first number of the row that starts so."""
    (text,) = [value for name, value in times().items() if name.startswith(start)]
    found = re.search(r"\d+", text)
    assert found, text
    return float(found[0])


def subcommands(group: click.Group) -> set[str]:
    return set(group.list_commands(click.Context(group)))


def test_every_make_target_is_there_or_said_to_come():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    promised = {name for text in commands("Commands") for name in re.findall(r"^make ([a-z-]+)", text)}
    assert {"demo", "test", "test-fast", "test-cluster", "check", "bench", "bench-quick"} <= promised
    to_come = set(re.findall(r"make ([a-z-]+)", LATER[1])) if LATER else set()
    assert promised - targets == to_come, "what is promised and missing must be said, and no more"


def test_every_command_is_there():
    known = subcommands(encodepool)
    assert {"local", "encode", "status", "plan", "endpoints"} <= known
    lists = encodepool.get_command(click.Context(encodepool), "endpoints")
    assert isinstance(lists, click.Group)
    assert subcommands(lists) == {"merge", "follow"}
    promised = {text for text in commands("Commands") if text.startswith("encodepool endpoints ")}
    for name in subcommands(lists):
        (text,) = [one for one in promised if one.startswith(f"encodepool endpoints {name} ")]
        given = {flag for param in lists.commands[name].params for flag in param.opts if flag[:2] == "--"}
        assert set(re.findall(r"--[a-z-]+", text)) <= given
    local = encodepool.get_command(click.Context(encodepool), "local")
    assert isinstance(local, click.Group)
    assert subcommands(local) == {"up", "run", "status", "down"}
    named = {
        re.match(r"[a-z-]+", rest)[0]
        for text in commands("Commands")
        for program, rest in re.findall(r"^(encodepool-worker) (.*)", text)
    }
    assert named == set(WORKER_COMMANDS)


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ("transfer timeout", "transfer_timeout_seconds"),
        ("quarantine", "quarantine_seconds"),
        ("park", "park_seconds"),
        ("announce", "announce_seconds"),
        ("tombstone", "tombstone_seconds"),
    ],
)
def test_the_workers_times_are_those_of_the_page(row, setting):
    assert BY_NAME[setting].default == default_of(row)


def test_the_pools_times_are_those_of_the_page():
    spec = parse_spec({"model": {"name": "m"}, "image": "i"})
    assert spec.drain.settle_seconds == default_of("settle")
    tombstones = next(value for name, value in times().items() if name.startswith("tombstone"))
    assert BY_NAME["max_tombstones"].default == int(re.search(r"([\d,]+) of", tombstones)[1].replace(",", ""))


def test_names_that_others_select_by_are_on_the_page():
    names = PAGE.split("## Names\n")[1].split("\n## ")[0]
    for name in (labels.API, labels.KIND, labels.POOL, labels.GROUP, labels.POD_INDEX, labels.ROUTABLE):
        assert f"{name}" in names
    for name in (labels.ROLE, labels.BOOTSTRAP_PORT, labels.WORKER_PORTS, labels.MODEL_ID, labels.ENV_PREFIX):
        assert f"{name}" in names
    assert all(metric.name.startswith("encodepool_") for metric in METRICS)
