"""How commands end: 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted."""

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from ..errors import WorkerError

ADVICE = "pip install 'encodepool[worker]'"

OURS = __name__.partition(".")[0]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--debug``, and turns the errors of this package into one line and exit code 1."""

    @click.option("--debug", is_flag=True, help="Print the traceback of an error as well.")
    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except WorkerError as failed:
            _end(str(failed), debug)
        except ImportError as failed:
            if (failed.name or "").partition(".")[0] == OURS:
                raise
            _end(_cannot_load(failed), debug)
        except KeyboardInterrupt:
            if debug:
                traceback.print_exc()
            click.echo("interrupted", err=True)
            sys.exit(130)

    return run


def check_target(path: Path | None, option: str, ending: str) -> None:
    """Told before the work that would fill it. Raises click.UsageError.

    A name without any ending is taken as it is.
    """
    if path is None:
        return
    if path.suffix.lower() not in (ending, ""):
        raise click.UsageError(f"{option} writes a {ending} file: call it {path.with_suffix(ending).name}")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"{path.parent} is not a folder")


def not_installed(names: Sequence[str]) -> str:
    """What to say when packages are missing; empty when all of ``names`` (top level) are there."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return _needs(", ".join(missing)) if missing else ""


def _needs(what: str) -> str:
    command = click.get_current_context().command_path
    return f"`{command}` needs {what}, which is not installed; run: {ADVICE}"


def _cannot_load(failed: ImportError) -> str:
    if isinstance(failed, ModuleNotFoundError) and failed.name:
        return _needs(failed.name.partition(".")[0])
    return f"a package cannot be loaded ({failed}); install it again: {ADVICE}"


def _end(message: str, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)
