"""``encode --pool``: the option that this package adds to the worker's command."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from encodepool_operator.cli import pool_list
from encodepool_operator.cli.main import main
from encodepool_operator.cli.pool_list import with_pool_option


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(pool_list, "published_list", lambda pool, context: f"list of {pool} in {context}")

    @click.command("encode")
    @click.argument("images", nargs=-1)
    @click.option("--endpoints", type=click.Path(path_type=Path))
    @click.option("--endpoint", "url")
    def encode(images, endpoints, url):
        """Encode."""
        click.echo(f"{images} {endpoints.read_text() if endpoints else None}")

    return with_pool_option(encode)


def run(command, *argv):
    done = CliRunner().invoke(command, argv)
    return done.exit_code, done.output


def test_the_list_of_the_pool_becomes_the_file_that_the_command_reads(command):
    assert run(command, "a.png", "--pool", "team/x", "--context", "c") == (
        0,
        "('a.png',) list of team/x in c\n",
    )


def test_without_it_the_command_is_as_it_was(command, tmp_path):
    file = tmp_path / "endpoints.json"
    file.write_text("own")
    assert run(command, "a.png", "--endpoints", str(file)) == (0, "('a.png',) own\n")
    assert run(command) == (0, "() None\n")


@pytest.mark.parametrize("other", ["--endpoints", "--endpoint"])
def test_both_at_once_is_wrong_usage(command, tmp_path, other):
    code, output = run(command, "--pool", "x", other, str(tmp_path))
    assert code == 2
    assert f"--pool and {other} both say where to send: leave one out" in output


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ("a/b/c", "'a/b/c' is neither NAME nor NAMESPACE/NAME"),
        ("/b", "'/b' is neither NAME nor NAMESPACE/NAME"),
        ("a/", "'a/': a pool's name is required"),
        ("a/B", "'a/B': a pool's name must be lower case letters"),
    ],
)
def test_what_can_name_no_pool_is_wrong_usage(command, pool, says, tmp_path, capsys):
    code, output = run(command, "--pool", pool)
    assert code == 2
    assert says in output
    assert main(["endpoints", "follow", "--pool", pool, "--out", str(tmp_path / "out.json")]) == 2
    assert says in capsys.readouterr().err


def test_it_is_in_the_help(command):
    code, output = run(command, "--help")
    assert code == 0
    assert "--pool" in output
    assert "[NS/]NAME" in output


def test_a_command_that_could_not_be_imported_stays_what_it_is():
    stand_in = click.Command("encode", callback=lambda: None)
    assert with_pool_option(stand_in) is stand_in
