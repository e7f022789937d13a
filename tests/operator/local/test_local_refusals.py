"""What the commands refuse or say at once, beside a pool that runs: the real command, stand-in workers."""

import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from encodepool_operator.cli.main import main
from encodepool_operator.local.counter import UserCounter
from encodepool_operator.local.errors import LocalError
from encodepool_operator.local.statedir import StateDir


@pytest.fixture
def user():
    """``with user():`` as somebody who is not root."""

    @contextmanager
    def become():
        mine = os.geteuid()
        if mine == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(mine)

    return become


@pytest.fixture
def locked_folder():
    """A folder that others can enter and nobody but root can write."""
    folder = Path(tempfile.mkdtemp())
    for inner in ("", "endpoints", "log", "run"):
        (folder / inner).mkdir(exist_ok=True)
    for inner in ("endpoints", "log", "run", ""):
        (folder / inner).chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_model_that_cannot_be_loaded_costs_a_running_pool_nothing(standing, capsys):
    pool = standing
    pids, kept = pool.pids(), (pool.dir / "pool.yaml").read_text()
    for folder, text in (("bare", None), ("spoiled", "{"), ("words", '{"model_type": "llama"}')):
        file = pool.manifest.parent / folder / "config.json"
        file.parent.mkdir()
        if text:
            file.write_text(text)
        pool.write(model={"path": folder})
        assert main(["local", "up", "-f", str(pool.manifest), "--state-dir", str(pool.dir)]) == 2
        assert f"spec.model.path: {file} " in capsys.readouterr().err
    pool.write(model={"path": "model"})
    assert (pool.dir / "pool.yaml").read_text() == kept
    assert pool.pids() == pids


def test_what_cannot_be_written_is_said_by_the_command(pool, user, locked_folder):
    pool.write()
    pool.env["XDG_STATE_HOME"] = "/proc"
    said = pool.run("up", code=1).stderr
    assert "cannot write /proc/encodepool (No such file or directory); set XDG_STATE_HOME" in said
    assert not pool.dir.exists()

    for touch in (UserCounter(locked_folder).check, StateDir.at(locked_folder).create):
        with user(), pytest.raises(LocalError, match=f"cannot write .*{locked_folder}.* ?Permission denied"):
            touch()


def test_down_says_what_it_ended_and_ctrl_c_what_goes_on(pool):
    pool.tell("drain")
    pool.up()
    down = pool.start("down")
    pool.wait(lambda: pool.listed() == {}, "the withdrawal")
    down.send_signal(signal.SIGINT)
    said = pool.finish(down, code=130).stderr
    assert (
        f"the pool goes on draining and ends by itself; `encodepool local down --state-dir {pool.dir}`"
        in said
    )
    assert len(pool.pids()) == 2

    done = pool.run("down")
    assert done.stdout.startswith("pool pool is down: 2 groups, 5 processes ended in ")
    assert pool.processes() == {}
    assert pool.run("down").stdout == ""


def test_a_manifest_that_is_no_pools_copy_is_not_written_over(pool, tmp_path):
    pool.write()
    mine = pool.dir / "pool.yaml"
    mine.parent.mkdir()
    mine.write_text("# mine\n")
    assert f"{mine} is not of a pool's making" in pool.run("up", code=1).stderr
    assert mine.read_text() == "# mine\n"
    assert list(pool.dir.iterdir()) == [mine]
