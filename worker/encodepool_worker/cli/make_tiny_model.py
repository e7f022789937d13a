"""``encodepool-worker make-tiny-model DIR``."""

from pathlib import Path

import click

from .report import reported


@click.command("make-tiny-model")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--family",
    type=click.Choice(["qwen3_vl", "qwen2_5_vl"]),
    default="qwen3_vl",
    show_default=True,
    help="Which model it is a small one of.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Makes other weights.")
@reported
def make_tiny_model(folder: Path, family: str, seed: int) -> None:
    """Write a complete small checkpoint to the new or empty folder DIR.

    Made-up weights (about 20 MB), tokenizer and configuration, in the layout of the published
    models: transformers, a gateway and this worker load it without any download.
    """
    from ..towers.tiny import write_tiny_model

    write_tiny_model(folder, family, seed)
    click.echo(f"{folder}: a {family} checkpoint with seed {seed}")
