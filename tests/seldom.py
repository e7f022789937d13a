"""Tests that ``make test`` runs only when the files they cover have changed since they last passed.

A pytest plugin. With ``--seldom=changed`` a group whose files have the hash that is stored beside the cached
builds is deselected, and the summary says so; without a stored hash it runs. With ``--seldom=all`` every
group runs. With either, the hash is stored when all tests of its group have passed; the run must then
collect whole groups. Without the option everything runs and nothing is stored.
"""

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.kit.programs import cache_folder


@dataclass(frozen=True, slots=True)
class Group:
    """``tests`` and what they cover: files, or folders with all that git knows below them."""

    tests: tuple[str, ...]
    covers: tuple[str, ...]


GROUPS = {
    "soak": Group(
        tests=("tests/e2e/test_soak.py",),
        covers=(
            "worker/encodepool_worker",
            "requirements/run.txt",
            "tests/conftest.py",
            "tests/e2e",
            "tests/warm",
        ),
    ),
    "images": Group(
        tests=("tests/operator/images",),
        covers=(
            *("images", "pyproject.toml", "requirements", "scripts/setup.sh", ".dockerignore"),
            *("README.md", "LICENSE"),
        ),
    ),
    "cluster kit": Group(
        tests=("tests/cluster/test_cluster_itself.py", "tests/cluster/test_cluster_teardown.py"),
        covers=(
            *("tests/cluster/kit", "tests/cluster/tools", "tests/cluster/conftest.py"),
            "operator/encodepool_operator/local/processes.py",
        ),
    ),
}


def files_of(root: Path, paths: Iterable[str]) -> list[str]:
    """Tracked files and new ones that are not ignored, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in sorted(set(listed.stdout.split("\0")) - {""}) if (root / name).is_file()]


def hash_of(root: Path, name: str) -> str:
    group, content = GROUPS[name], hashlib.sha256()
    for file in files_of(root, (*group.tests, *group.covers)):
        content.update(f"{file}\0".encode() + hashlib.sha256((root / file).read_bytes()).digest())
    return content.hexdigest()


def stamp(name: str) -> Path:
    return cache_folder().parent / "tests" / name.replace(" ", "-")


def group_of(item: pytest.Item) -> str | None:
    where = item.path.relative_to(item.config.rootpath)
    for name, group in GROUPS.items():
        if any(where.is_relative_to(path) for path in group.tests):
            return name
    return None


class Seldom:
    """One run of pytest: which groups take part in it, and which of them are stored at its end."""

    def __init__(self, root: Path, when: str) -> None:
        self._root = root
        self._when = when
        self._left_out: dict[str, int] = {}
        self._hashes: dict[str, str] = {}  # of what runs, as it was when the run began
        self._groups: dict[str, str] = {}  # node id -> group
        self._waiting: dict[str, set[str]] = {}  # node ids of each group that have not passed

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            if name := group_of(item):
                groups.setdefault(name, []).append(item)
        for name, members in groups.items():
            if self._when == "changed" and self._is_unchanged(name):
                self._left_out[name] = len(members)
                config.hook.pytest_deselected(items=members)
            else:
                self._hashes[name] = hash_of(self._root, name)
                self._waiting[name] = {item.nodeid for item in members}
                self._groups |= dict.fromkeys(self._waiting[name], name)
        items[:] = [item for item in items if group_of(item) not in self._left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if name := self._groups.get(report.nodeid):
            if report.when == "call" and report.passed:
                self._waiting[name].discard(report.nodeid)
            elif report.failed:  # its teardown, perhaps
                self._waiting[name].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        for name, waiting in self._waiting.items():
            if not waiting and hash_of(self._root, name) == self._hashes[name]:
                stamp(name).parent.mkdir(parents=True, exist_ok=True)
                stamp(name).write_text(self._hashes[name] + "\n")

    def _is_unchanged(self, name: str) -> bool:
        try:
            return stamp(name).read_text().strip() == hash_of(self._root, name)
        except FileNotFoundError:
            return False

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, count in self._left_out.items():
            terminalreporter.write_line(
                f"{name}: {count} tests left out, for nothing that they cover has changed since they passed "
                "(make test-all runs them)"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seldom", choices=("changed", "all"), help="see tests/seldom.py")


def pytest_configure(config: pytest.Config) -> None:
    if when := config.getoption("--seldom"):
        config.pluginmanager.register(Seldom(config.rootpath, when))
