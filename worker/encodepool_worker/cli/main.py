"""The ``encodepool-worker`` program. A subcommand's code is imported when it is called."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

PROGRAM = "encodepool-worker"

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "serve": ("serve", "serve", "Run an encode worker: the pod's command."),
    "rows": ("rows", "rows", "Encode images with the tower directly, without any transfer."),
    "make-tiny-model": ("make_tiny_model", "make_tiny_model", "Write a complete small checkpoint."),
}
"""Command: (module beside this one, its click command, what the overview says)."""


class WrongUsage(click.ClickException):
    """One line that says what to do, as all of our errors are; click itself prints three."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        where = error.ctx.command_path if error.ctx is not None else PROGRAM
        super().__init__(f"{' '.join(error.format_message().split())} (see `{where} --help`)")

    def show(self, file: Any = None) -> None:
        click.echo(f"{PROGRAM}: {self.message}", file=file, err=file is None)


@contextmanager
def in_one_line() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise WrongUsage(error) from error


class LazyGroup(click.Group):
    """Knows its subcommands by name only; torch and gRPC are slow to import."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with in_one_line():
            return super().invoke(ctx)

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

        click.echo(f"{PROGRAM} {installed('encodepool')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show it.")
def main() -> None:
    """Vision-encode workers for EPD serving."""


if __name__ == "__main__":
    main()
