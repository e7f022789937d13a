"""``encodepool encode IMAGE...``: images through a running pool, rows back over its transfer engine."""

from contextlib import nullcontext
from pathlib import Path

import click

from .quiet import native_stderr_off
from .report import check_target, reported


@click.command("encode")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--endpoints",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The pool's endpoints.json.",
)
@click.option("--endpoint", "url", metavar="URL", help="One worker instead of a list: grpc://HOST:PORT.")
@click.option("--bootstrap", metavar="HOST:PORT", help="With --endpoint: the worker's bootstrap server.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="F.npz", help="Write the rows here."
)
@click.option(
    "--heatmap",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.png",
    help="Draw each token's norm over the pictures.",
)
@click.option(
    "--transfer-backend",
    type=click.Choice(["mooncake", "tcp"]),
    help="How rows travel; by default what the worker says.",
)
@click.option(
    "--model", metavar="DIR", help="Model folder, for workers that do not tell the shape of their tower."
)
@click.option("--host", metavar="ADDRESS", help="This machine's address as the workers see it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for one image.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Images under way at once.",
)
@click.option(
    "--receive-mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Memory for rows under way; used only as far as needed.",
)
@reported
def encode(
    images: tuple[Path, ...],
    endpoints: Path | None,
    url: str | None,
    bootstrap: str | None,
    out: Path | None,
    heatmap: Path | None,
    transfer_backend: str | None,
    model: str | None,
    host: str | None,
    timeout_s: float,
    concurrency: int,
    receive_mib: int,
) -> None:
    """Encode each IMAGE with a running pool and receive its rows, as a prefill worker would.

    --out gets the arrays IMAGE.main [tokens, hidden] and IMAGE.deepstack [tokens, levels * hidden],
    named by the file without its ending; bfloat16 as its bits (uint16).
    """
    from ..client.encode import ClientOptions, EncodeClient
    from ..client.endpoints import split_url
    from ..client.results import image_names, write_rows
    from ..errors import ClientError
    from .encode_view import run_with_progress, table_of

    if endpoints is not None and url is not None:
        raise click.UsageError("--endpoints and --endpoint both say where to send: leave one out")
    if endpoints is None and url is None:
        raise click.UsageError("name the pool with --endpoints FILE, or one worker with --endpoint URL")
    if (url is None) != (bootstrap is None):
        raise click.UsageError("--endpoint and --bootstrap go together")
    check_target(out, "--out", ".npz")
    check_target(heatmap, "--heatmap", ".png")
    if heatmap is not None and heatmap.resolve() in {image.resolve() for image in images}:
        raise click.UsageError("--heatmap names one of the pictures: choose another name")
    for option, form, given in (
        ("--endpoint", "grpc://HOST:PORT", url),
        ("--bootstrap", "HOST:PORT", bootstrap),
    ):
        try:
            if given is not None:
                split_url(given)
        except ClientError as error:
            raise click.UsageError(f"{option} must be {form}, is {given!r}") from error
    names = image_names(images)
    options = ClientOptions(
        transfer_backend=transfer_backend or "",
        model_dir=model or "",
        host=host or "",
        timeout_s=timeout_s,
        receive_bytes=receive_mib << 20,
        concurrency=min(concurrency, len(images)),
    )
    if endpoints is not None:
        client = EncodeClient.from_list(endpoints, options)
    else:
        client = EncodeClient.to_endpoint(url or "", *split_url(bootstrap or ""), options)
    debug = bool(click.get_current_context().params.get("debug"))
    # The transfer engine's library writes lines of its own even when all goes well.
    with nullcontext() if debug else native_stderr_off(), client:
        outcomes = run_with_progress(client, images)
    done = {
        name: outcome
        for name, outcome in zip(names, outcomes, strict=True)
        if not isinstance(outcome, Exception)
    }
    if out is not None and done:
        arrays = {}
        for name, encoded in done.items():
            arrays[f"{name}.main"] = encoded.main
            if encoded.deepstack is not None:
                arrays[f"{name}.deepstack"] = encoded.deepstack
        write_rows(out, arrays)
    if heatmap is not None and done:
        from ..client.heatmap import Tile, write_heatmap

        write_heatmap(
            heatmap, [Tile(n, e.shown, e.main_float32, e.grid, e.merge_size) for n, e in done.items()]
        )
    table_of(images, outcomes, [path for path in (out, heatmap) if path is not None and done])
