"""``encodepool-worker serve`` of several ranks, one of which raises or stays in its tower on request.

Rank ``RAISING`` fails in the middle of the forward pass of every image of ``TRIGGER`` patches, and
never begins a batch with one of ``HELD``; all else is the worker's own code. ``COMMAND`` is the
command of a ``RunningWorker``.
"""

import sys
import threading
from dataclasses import replace
from typing import Any

RAISING = 1
TRIGGER = (12, 14)
HELD = (10, 18)
"""Rows and columns of patches; no other test has such images."""

MODULE = "tests.e2e.raising_rank"
WORDS = "made by the test"


COMMAND = (sys.executable, "-P", "-m", MODULE)


def serve(argv: list[str]) -> int:
    """The supervisor, with another module in place of one rank's."""
    from encodepool_worker import supervisor
    from encodepool_worker.cli.main import main
    from encodepool_worker.settings import Settings

    children_of = supervisor.children_of

    def spoiled(settings: Settings) -> list[supervisor.ChildSpec]:
        return [
            replace(child, command=(*child.command[:3], MODULE, *child.command[4:]))
            if child.rank == RAISING
            else child
            for child in children_of(settings)
        ]

    supervisor.children_of = spoiled
    return main(argv)


def rank(argv: list[str]) -> int:
    """One rank, as ``python -m encodepool_worker.shell``."""
    from encodepool_worker.shell.__main__ import main
    from encodepool_worker.towers import load

    load_tower = load.load_tower

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        tower: Any = load_tower(*args, **kwargs)
        encode = tower.encode

        def hold(items: Any, **rest: Any) -> Any:
            if any(item.pixels.shape[0] == HELD[0] * HELD[1] for item in items):
                threading.Event().wait()
            return encode(items, **rest)

        def fail(_module: Any, inputs: tuple[Any, ...]) -> None:
            if inputs[0].shape[0] == TRIGGER[0] * TRIGGER[1]:
                raise RuntimeError(WORDS)

        tower.module.get_submodule("blocks.1.mlp").register_forward_pre_hook(fail)
        tower.encode = hold
        return tower

    load.load_tower = spoiled
    return main(argv)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]) if sys.argv[1:2] == ["serve"] else rank(sys.argv[1:]))
