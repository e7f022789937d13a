"""The ``encodepool-worker`` program. A subcommand's code is imported when it is called."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "serve": ("serve", "serve", "Run an encode worker: the pod's command."),
    "rows": ("rows", "rows", "Encode images with the tower directly, without any transfer."),
    "make-tiny-model": ("make_tiny_model", "make_tiny_model", "Write a complete small checkpoint."),
}
"""Command: (module beside this one, its click command, what the overview says)."""


class LazyGroup(click.Group):
    """Knows its subcommands by name only; torch and gRPC are slow to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


def version(ctx: click.Context, _: Any, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version as installed

        click.echo(f"encodepool-worker {installed('encodepool')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show it.")
def main() -> None:
    """Vision-encode workers for EPD serving."""


if __name__ == "__main__":
    main()
