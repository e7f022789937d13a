"""Native libraries write to file descriptor 2 whenever they like; a progress bar does not survive that."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


@contextmanager
def native_stderr_off() -> Iterator[None]:
    """What goes to file descriptor 2 is dropped meanwhile; Python's own ``sys.stderr`` still shows.

    For one thread at a time, and not around the start of another program: it would be silent too.
    """
    try:
        shown = os.dup(STDERR)
    except OSError:  # closed: nothing can be written there anyway
        yield
        return
    original = sys.stderr
    ours = None
    try:
        if original is not None and _descriptor(original) == STDERR:
            original.flush()
            ours = open(shown, "w", 1, original.encoding, original.errors, closefd=False)  # noqa: SIM115
            sys.stderr = ours
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, STDERR)
        os.close(nothing)
        yield
    finally:
        os.dup2(shown, STDERR)
        if ours is not None:
            sys.stderr = original
            ours.close()
        os.close(shown)


def _descriptor(stream: object) -> int | None:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # a stand-in without a file
        return None
