"""``encodepool-worker rows IMAGE... --model DIR --out F.npz``: the tower directly."""

import time
from pathlib import Path

import click

from ..errors import ClientError
from .report import check_target, reported


@click.command("rows")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", required=True, metavar="DIR", help="Model folder, or a name in the hub.")
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where the rows go."
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy makes the weights up from --seed.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="For --load-format dummy.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Of weights and rows; auto is the checkpoint's own.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@reported
def rows(
    images: tuple[Path, ...], model: str, out: Path, load_format: str, seed: int, dtype: str, device: str
) -> None:
    """Encode each IMAGE with the model's vision tower and write the rows to --out.

    Arrays IMAGE.main [tokens, hidden] and IMAGE.deepstack [tokens, levels * hidden], named by the
    file without its ending; bfloat16 as its bits (uint16). These are the rows a pool sends.
    """
    # Told before torch is imported and the model loaded, which takes a while.
    check_target(out, "--out", ".npz")
    for path in images:
        if not path.exists():
            raise ClientError(f"{path} does not exist")
    import torch

    from ..client.numbers import STORED, from_float32
    from ..client.preprocess import prepare_image
    from ..client.results import image_names, write_rows
    from ..errors import TowerError
    from ..towers.base import TowerItem, finite_rows
    from ..towers.hub import resolve_model
    from ..towers.load import load_tower
    from ..towers.spec import read_image_spec

    names = image_names(images)
    folder = resolve_model(model, weights=load_format != "dummy")
    spec = read_image_spec(folder)
    tower = load_tower(folder, load_format=load_format, seed=seed, dtype=dtype, device=device)
    stored = STORED[tower.spec.dtype]
    arrays = {}
    for name, path in zip(names, images, strict=True):
        prepared = prepare_image(path, spec)
        began_s = time.monotonic()
        # Through the dtype in which a gateway would send them, as a pool gets them.
        pixels = torch.from_numpy(from_float32(prepared.pixels, tower.spec.dtype))
        if tower.spec.dtype == "bfloat16":
            pixels = pixels.view(torch.bfloat16)
        result = tower.encode([TowerItem(pixels, (prepared.grid,))]).cpu().contiguous()
        if not all(finite_rows(result, [result.shape[0]])):
            raise TowerError(f"{path}: the rows are not finite; are the weights sound?")
        raw = result.view(torch.uint8).numpy().view(stored).reshape(result.shape)
        hidden = tower.spec.hidden
        arrays[f"{name}.main"] = raw[:, :hidden]
        if tower.spec.levels:
            arrays[f"{name}.deepstack"] = raw[:, hidden:]
        took_ms = (time.monotonic() - began_s) * 1000
        click.echo(
            f"{path}: {result.shape[0]} tokens of {hidden} x {1 + tower.spec.levels}, {took_ms:.0f} ms"
        )
    write_rows(out, arrays)
