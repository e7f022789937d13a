"""Long tests of few files run when those files have changed since they passed, and are never lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.kit.programs import PROGRAMS
from tests.seldom import GROUPS, files_of

ROOT = Path(__file__).resolve().parent.parent
COLD_BUILDS_S = 35 * 60


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one seldom test, which covers one source, and another that always fails; ``run`` is
    what its run printed."""
    root = tmp_path / "checkout"
    source, test = root / "worker/encodepool_worker/loop.py", root / "tests/e2e/test_soak.py"
    other = root / "tests/test_other.py"
    for path, text in ((source, "GOOD = True\n"), (test, TEST), (other, "def test_other():\n    assert 0\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)

    def run(when):
        command = [sys.executable, "-m", "pytest", "-p", "tests.seldom", f"--seldom={when}"]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--rootdir", root, "tests"],
            cwd=root,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()[-1].strip("= ").partition(" in ")[0]

    return source, run


TEST = """
from pathlib import Path
def test_soak():
    assert "GOOD = True" in Path("worker/encodepool_worker/loop.py").read_text()
"""


def test_a_seldom_test_runs_until_it_has_passed_with_the_files_as_they_are(checkout):
    source, run = checkout
    assert run("changed") == "1 failed, 1 passed", "nothing is stored yet"
    assert run("changed") == "1 failed, 1 deselected", "whatever else has failed"

    source.write_text("GOOD = False\n")
    assert run("changed") == "2 failed"
    assert run("changed") == "2 failed", "a failure is not stored"

    source.write_text("GOOD = True\nMORE = 1\n")
    assert run("changed") == "1 failed, 1 passed"
    (source.parent / "new.py").touch()
    assert run("changed") == "1 failed, 1 passed", "a new file counts, before it is committed"
    assert run("all") == "1 failed, 1 passed"
    assert run("changed") == "1 failed, 1 deselected"


@pytest.mark.parametrize("name", GROUPS)
def test_every_path_of_a_group_has_files(name):
    for path in (*GROUPS[name].tests, *GROUPS[name].covers):
        assert files_of(ROOT, [path]), path


def test_cold_builds_take_35_minutes_at_most():
    """With the environments, which take three (tests/README.md)."""
    assert sum(program.build_s for program in PROGRAMS.values()) + 180 <= COLD_BUILDS_S
