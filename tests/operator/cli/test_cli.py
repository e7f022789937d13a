"""The command line itself: exit codes, one-line errors, help, and commands of other packages."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import click
import pytest

from encodepool_operator.cli.errors import run_command
from encodepool_operator.cli.main import encodepool, main
from encodepool_operator.cli.plugins import PluginGroup
from encodepool_operator.local.command import worker_argv
from encodepool_operator.local.errors import LocalError, ManifestError


def failing(error):
    """A command that raises ``error``."""

    @click.group()
    @click.option("--debug", is_flag=True)
    def top(debug):
        pass

    @top.command()
    def fail():
        raise error

    return top


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (LocalError("no pool; make one", ("log line",)), 1, "x: no pool; make one\nlog line\n"),
        (ManifestError("spec.a: must be b"), 2, "x: spec.a: must be b\n"),
        (click.ClickException("is broken"), 1, "x: is broken\n"),
        (click.Abort(), 130, "x: interrupted\n"),
        (KeyboardInterrupt(), 130, "x: interrupted\n"),
        (OSError(28, "No space left"), 1, "x: OSError: [Errno 28] No space left"),
    ],
)
def test_every_error_is_one_line_and_an_exit_code(error, code, text, capsys):
    assert run_command(failing(error), ["fail"], "x") == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.lstrip("\n").startswith(text)
    assert "Traceback" not in shown.err


def test_debug_shows_where_an_error_came_from_wherever_it_stands(capsys):
    for argv in (["--debug", "fail"], ["fail", "--debug"]):
        assert run_command(failing(LocalError("no pool")), argv, "x") == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["lcal"], "No such command 'lcal'"),
        (["local", "up"], "see `encodepool local up --help`"),
        (["local", "status", "--state-dir", "/nowhere", "-o", "xml"], "'xml' is not one of"),
        (["local", "up", "-f", "/nowhere.yaml", "--state-dir", "/nowhere"], "/nowhere.yaml"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_help(argv, says, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1


def test_status_without_a_pool_says_how_to_make_one(tmp_path, capsys):
    assert main(["local", "status", "--state-dir", str(tmp_path)]) == 1
    assert "`encodepool local up -f FILE` makes one" in capsys.readouterr().err


def test_down_of_nothing_is_done_already(tmp_path, capsys):
    assert main(["local", "down", "--state-dir", str(tmp_path / "none")]) == 0
    assert "there is no pool" in capsys.readouterr().err


def test_every_command_explains_itself(capsys):
    def walk(command, path):
        yield path, command
        if isinstance(command, click.Group):
            with click.Context(command, info_name=path[-1] if path else "encodepool") as context:
                for name in command.list_commands(context):
                    yield from walk(command.get_command(context, name), [*path, name])

    for path, command in walk(encodepool, []):
        assert main([*path, "--help"]) == 0
        assert command.help, path
        for option in command.params if path[:1] == ["local"] else ():
            assert isinstance(option, click.Argument) or option.help, (path, option.name)
    shown = capsys.readouterr().out
    assert "encodepool local up -f pool.yaml --state-dir ./pool" in shown
    assert main(["--version"]) == 0


def test_commands_of_the_worker_are_found_by_entry_point():
    context = click.Context(encodepool)
    assert "encode" in {point.name for point in entry_points(group="encodepool.commands")}
    assert {"encode", "local"} <= set(encodepool.list_commands(context))


def test_a_command_whose_package_is_missing_says_which_extra_to_install(tmp_path):
    """`encodepool encode` in an installation without the worker's extra."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'encodepool_worker':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "encodepool_operator"]
    done = subprocess.run(
        [*command, "encode", "cat.jpg", "--out", "x.npz"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "encodepool: `encodepool encode` needs encodepool_worker, which is not installed; "
        "run: pip install 'encodepool[worker]'\n"
    )
    done = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Not installed: pip install 'encodepool[worker]'" in done.stdout


def test_up_without_the_workers_packages_refuses_at_once(tmp_path, monkeypatch):
    """The worker's script belongs to every installation, what it imports only to the extra."""
    (tmp_path / "encodepool-worker").write_text("#!/bin/sh\n")
    (tmp_path / "encodepool-worker").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert worker_argv("") == [str(tmp_path / "encodepool-worker"), "serve"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(LocalError, match=r"needs torch, grpc, zmq.*run: pip install 'encodepool\[worker\]'"):
        worker_argv("")

    assert worker_argv("my-worker serve") == ["my-worker", "serve"]


def test_a_foreign_command_with_its_own_debug_gets_it(capsys):
    @click.command()
    @click.option("--debug", is_flag=True)
    def other(debug):
        click.echo(f"debug={debug}")

    class Group(PluginGroup):
        def get_command(self, ctx, cmd_name):
            return other if cmd_name == "other" else super().get_command(ctx, cmd_name)

    @click.group(cls=Group)
    @click.option("--debug", is_flag=True)
    def top(debug):
        pass

    assert run_command(top, ["other", "--debug"], "x") == 0
    assert run_command(top, ["other"], "x") == 0
    assert capsys.readouterr().out == "debug=True\ndebug=False\n"
