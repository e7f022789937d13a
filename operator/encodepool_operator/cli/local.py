"""``encodepool local``: a pool on this machine."""

import os
from pathlib import Path

import click

from encodepool_operator.local.errors import LocalError
from encodepool_operator.local.statedir import StateDir, read_text

# Commands import what they need when they run, so that --help and completion are quick.

STATE_DIR = click.option(
    "--state-dir",
    "state_dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of the pool: its endpoints, logs and state.",
)
WORKER_COMMAND = click.option(
    "--worker-command",
    default="",
    metavar="COMMAND",
    help="Program to run instead of `encodepool-worker serve`; it gets the same flags.",
)


@click.group()
def local() -> None:
    """A pool on this machine, without Kubernetes.

    The groups of the manifest run as processes; the published list is kept in DIR/endpoints:
    endpoints.json for prefill workers and clients, workers.json for the SMG gateway.
    """


@local.command()
@click.option(
    "-f",
    "--file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Manifest of the pool, the same as for a cluster. A relative model.path is taken from its folder.",
)
@STATE_DIR
@WORKER_COMMAND
def up(file: Path, state_dir: Path, worker_command: str) -> None:
    """Start the pool of FILE, or change a running one into it, and wait until it is ready.

    The pool goes on in the background. A change of FILE reaches one group at a time, and the others
    go on serving. If a group fails twice in a row the command shows its last log lines and ends with
    exit code 1; the pool goes on trying until `encodepool local down`.
    """
    from encodepool_operator.local.up import up as bring_up

    from .progress import Progress

    where = StateDir.at(state_dir)
    with Progress() as progress:
        try:
            report = bring_up(
                file, where, os.environ, worker=worker_command, note=progress.note, progress=progress.show
            )
        except KeyboardInterrupt:
            progress.note(f"the pool goes on; `encodepool local down --state-dir {where.root}` ends it")
            raise
    click.echo(f"pool {report.pool} is ready: {where.endpoints / 'endpoints.json'}")


@local.command()
@STATE_DIR
@WORKER_COMMAND
def run(state_dir: Path, worker_command: str) -> None:
    """Run the pool of DIR in the foreground until SIGTERM or Ctrl-C (what `up` starts)."""
    from encodepool_operator.local.command import worker_argv
    from encodepool_operator.local.logs import setup_logs
    from encodepool_operator.local.run import run_controller, surroundings

    setup_logs()
    where = StateDir.at(state_dir)
    where.create()
    run_controller(where, surroundings(worker_argv(worker_command), os.environ))


@local.command()
@STATE_DIR
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "smg"]),
    default="table",
    show_default=True,
    help="smg prints the arguments that tell the SMG gateway about the pool.",
)
def status(state_dir: Path, output: str) -> None:
    """Show the groups of the pool in DIR."""
    from encodepool_operator.local.report import read_report

    where = StateDir.at(state_dir)
    report, text = read_report(where.status), read_text(where.status)
    if report is None or text is None:
        raise LocalError(f"there is no pool in {where.root}; `encodepool local up -f FILE` makes one")
    if output == "json":
        click.echo(text, nl=False)
    elif output == "smg":
        click.echo((read_text(where.endpoints / "smg-args") or "").rstrip("\n"))
    else:
        from .progress import status_table

        status_table(report, running=where.holder() is not None)


@local.command()
@STATE_DIR
def down(state_dir: Path) -> None:
    """Drain the pool in DIR and end all of its processes.

    Groups are taken off the list first, then finish what they have accepted; Ctrl-C does not stop that,
    and a second `down` does without it. Logs stay in DIR/log.
    """
    from encodepool_operator.local.down import down as take_down

    from .progress import Progress

    with Progress() as progress:
        ended = take_down(StateDir.at(state_dir), os.environ, note=progress.note, progress=progress.show)
    if ended:
        click.echo(ended)
