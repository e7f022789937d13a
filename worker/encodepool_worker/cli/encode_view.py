"""What ``encodepool encode`` shows: a progress bar while it runs, a table when it is done."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..client.encode import EncodeClient, Encoded
from ..errors import ClientError, WorkerError

Outcome = Encoded | WorkerError


def run_with_progress(client: EncodeClient, images: Sequence[Path]) -> list[Outcome]:
    """Encode all images; their outcomes in the order given."""
    outcomes: dict[int, Outcome] = {}
    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Off a terminal there is nothing to redraw, and a bar would leave an empty line before an error.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("encoding", total=len(images))
        for index, outcome in client.encode_all(images):
            outcomes[index] = outcome
            progress.advance(bar)
    return [outcomes[index] for index in range(len(images))]


def table_of(images: Sequence[Path], outcomes: Sequence[Outcome], written: Sequence[Path]) -> None:
    """Print one line an image, and what was written. Raises ClientError when an image failed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("group")
    for name in ("tokens", "ms", "bytes"):
        table.add_column(name, justify="right")
    failed: list[str] = []
    for path, outcome in zip(images, outcomes, strict=True):
        if isinstance(outcome, WorkerError):
            failed.append(str(outcome))
            table.add_row(Text(str(path)), Text("failed", style="red"), "", "", "")
        else:
            table.add_row(
                Text(str(path)),
                Text(outcome.endpoint.label),
                str(outcome.n_tokens),
                f"{outcome.encode_s * 1000:.0f}",
                f"{outcome.nbytes:,}",
            )
    # Only a terminal has an edge to fold at; a file or a pipe gets whole lines.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    if len(failed) < len(outcomes):
        console.print(table)
        for path in written:
            console.print(Text(f"wrote {path}"))
    if len(failed) == 1 == len(outcomes):
        first = next(outcome for outcome in outcomes if isinstance(outcome, WorkerError))
        raise first
    if failed:
        several = f"{len(failed)} of {len(outcomes)} images failed: "
        raise ClientError(several + "; ".join(dict.fromkeys(failed)))
