"""Subcommands of other packages, found by entry point and imported only when they are used."""

from importlib.metadata import EntryPoint, entry_points

import click

from .pool_list import with_pool_option

GROUP = "encodepool.commands"

EXTRAS = {"encode": "worker"}
"""The extra that brings what a subcommand needs; asked only when its import fails."""

ADDITIONS = {"encode": with_pool_option}
"""What a subcommand gets from here beside what its own package knows."""


class PluginGroup(click.Group):
    """A command group that also has the commands of entry-point group ``encodepool.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in _points():
            if point.name == cmd_name:
                return _load(point)
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As usual; a foreign command that reports its own errors is told about --debug."""
        name, command, rest = super().resolve_command(ctx, args)
        foreign = command is not None and command not in self.commands.values()
        if foreign and ctx.params.get("debug"):
            assert command is not None
            rest = [*(["--debug"] if any("--debug" in p.opts for p in command.params) else []), *rest]
        return name, command, rest


def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _load(point: EntryPoint) -> click.Command:
    try:
        command = point.load()
    except ImportError as error:
        return _missing(point.name, error)
    if not isinstance(command, click.Command):
        raise click.ClickException(f"{point.value} is not a command; reinstall the package it belongs to")
    add = ADDITIONS.get(point.name)
    return add(command) if add is not None else command


def _missing(name: str, error: ImportError) -> click.Command:
    """Stands in for a command that cannot be imported, and says how to get it."""
    missing = error.name or str(error)
    extra = EXTRAS.get(name)
    advice = f"pip install 'encodepool[{extra}]'" if extra else "install the package that it belongs to"
    text = f"`encodepool {name}` needs {missing}, which is not installed; run: {advice}"

    def refuse(**_: object) -> None:
        raise click.ClickException(text) from error

    return click.Command(
        name,
        callback=refuse,
        help=f"Not installed: {advice}.",
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
    )
