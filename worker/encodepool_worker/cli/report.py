"""How commands end: 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted."""

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from ..errors import WorkerError


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--debug``, and turns the errors of this package into one line and exit code 1."""

    @click.option("--debug", is_flag=True, help="Print the traceback of an error as well.")
    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except WorkerError as failed:
            if debug:
                traceback.print_exc()
            click.echo(f"error: {' '.join(str(failed).split())}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            if debug:
                traceback.print_exc()
            click.echo("interrupted", err=True)
            sys.exit(130)

    return run
