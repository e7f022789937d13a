"""``encodepool-worker serve``: the command of a worker's pod, made from the table of settings."""

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from ..errors import ConfigError
from ..settings import BY_NAME, GROUPS, TABLE, Settings, notes
from ..settings_table import Setting
from .report import not_installed

EXIT_FAILED, EXIT_USAGE = 1, 2

NEEDED = ("torch", "grpc", "zmq", "aiohttp", "smg_grpc_proto")
"""Looked for before any process starts: each of them would fail by itself, with a traceback."""

EPILOG = """\b
Example, on one machine:
  encodepool-worker make-tiny-model /tmp/model
  encodepool-worker serve --model /tmp/model --transfer-backend tcp \\
      --grpc-port 50051 --bootstrap-port 8998 --metrics-port 9100
  curl -f http://127.0.0.1:9100/readyz

\b
In a pod the host is the pod's own address:
  encodepool-worker serve --model /models/qwen3-vl --host "$POD_IP"
"""


class _Grouped(click.Command):
    """Lists the options under the titles of the table, each with its variable and default."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in [*GROUPS.values(), "Other"]}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                row = BY_NAME.get(param.name or "")
                records[GROUPS[row.group] if row else "Other"].append(record)
        for title, rows in records.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _metavar(row: Setting) -> str:
    if row.choices:
        return "|".join(row.choices)
    return row.metavar or {str: "TEXT", int: "N", float: "SECONDS"}[row.type]


def _help(row: Setting) -> str:
    default = f"; default {row.default:g}" if isinstance(row.default, float) else f"; default {row.default}"
    return f"{row.help} [{row.variable}{default if row.default != '' else ''}]"


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """One option for each row. All values come as text: the table checks them, all at once."""
    for row in reversed(TABLE):
        command = click.option(
            row.flag,
            row.name,
            default=None,
            metavar=_metavar(row),
            help=_help(row),
            hidden=row.group == "internal",
        )(command)
    return command


@click.command(cls=_Grouped, epilog=EPILOG, context_settings={"max_content_width": 100})
@_with_settings
def serve(**flags: Any) -> None:
    """Run one encode worker until it is told to stop.

    It accepts images and videos over gRPC, runs the model's vision tower on them and writes the
    rows into the memory of prefill workers.

    Every option can also be given as the variable named beside it; the option wins. SIGTERM drains:
    what was accepted is finished within --drain-seconds, the rest is failed by name. A second
    SIGTERM ends at once.

    Exit codes: 0 drained, 1 failed, 2 wrong usage.
    """
    try:
        settings = Settings.from_mapping(flags, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(f"encodepool-worker: {problem}", err=True)
        sys.exit(EXIT_USAGE)
    if problem := not_installed(NEEDED):
        click.echo(f"encodepool-worker: {problem}", err=True)
        sys.exit(EXIT_FAILED)
    # Imported here: --help and wrong usage need none of it.
    from ..logs import get_logger, setup_logs
    from ..supervisor import supervise

    setup_logs(settings.log_level, role="supervisor")
    for note in notes(flags, os.environ):
        get_logger().warning(note)
    sys.exit(supervise(settings))
