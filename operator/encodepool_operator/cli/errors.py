"""How every command ends: exit codes, and errors in one line that says what to do."""

import os
import sys
import traceback
from collections.abc import Sequence

import click

from encodepool_operator.local.errors import LocalError, ManifestError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def run_command(command: click.Command, argv: Sequence[str] | None, program: str) -> int:
    """Run ``command`` and return its exit code; prints the error if there is one.

    ``--debug``, wherever it stands on the command line, adds the traceback.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--debug"]
    debug = len(arguments) < len(given)
    if debug:
        arguments.insert(0, "--debug")  # where the top command has it
    try:
        result = command.main(arguments, prog_name=program, standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        return _end(program, "interrupted", INTERRUPTED, debug)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else program
        return _end(program, f"{error.format_message()} (see `{where} --help`)", USAGE, debug)
    except BrokenPipeError:
        # Whoever read our output has enough (`| head`); the interpreter must not flush the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except click.ClickException as error:
        return _end(program, error.format_message(), FAILED, debug)
    except ManifestError as error:
        return _end(program, str(error), USAGE, debug, error.details)
    except LocalError as error:
        return _end(program, str(error), FAILED, debug, error.details)
    except Exception as error:  # noqa: BLE001 - the last resort; it is shown and the exit code is 1
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _end(program, f"{text} (this is a defect; --debug shows where)", FAILED, debug)
    # With standalone_mode off, click returns the code of ctx.exit() or what the command returned.
    return result if isinstance(result, int) else DONE


def _end(program: str, message: str, code: int, debug: bool, details: Sequence[str] = ()) -> int:
    if debug:
        traceback.print_exc()
    print(f"{program}: {message}", *details, sep="\n", file=sys.stderr)
    return code
