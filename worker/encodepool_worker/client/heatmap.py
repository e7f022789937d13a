"""Where in a picture the rows are strong: each token's norm, laid over the picture.

One column per picture: the picture, the same picture in grey under the norms, and a legend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from ..errors import ClientError
from ..types import Grid

PANEL_HEIGHT = 300
MAX_PANEL_WIDTH = 520
MIN_PANEL_WIDTH = 190
MARGIN = 28
GAP = 12
CAPTION = 26
LEGEND = 12
LABELS = 24
COLUMNS = 4

_PAPER, _INK, _FAINT = (250, 249, 246), (34, 34, 40), (110, 110, 120)

_SCALE = np.array(
    # Viridis at eleven even steps (public domain, CC0): equal steps look equally far apart, also
    # in grey and to most who do not see all colours.
    [
        (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
        (34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
    ],
    dtype=np.float64,
)  # fmt: skip

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Tile:
    """One picture and its rows: ``main`` float32 ``[tokens, hidden]`` in the order of the tower.

    ``shown`` is uint8 ``[height, width, 3]``; ``grid`` counts patches, ``merge_size`` of which to
    each side make a token.
    """

    name: str
    shown: npt.NDArray[np.uint8]
    main: npt.NDArray[np.float32]
    grid: Grid
    merge_size: int


def token_norms(tile: Tile) -> Floats:
    """Euclidean norm of each token's main row, ``[rows, columns]`` as the tokens lie in the picture."""
    rows, columns = tile.grid.h // tile.merge_size, tile.grid.w // tile.merge_size
    if tile.main.shape[0] != rows * columns:
        raise ClientError(f"{tile.name}: {tile.main.shape[0]} rows do not cover {rows}x{columns} tokens")
    norms: Floats = np.linalg.norm(tile.main.astype(np.float64), axis=1)
    return norms.reshape(rows, columns)


def colours(values: Floats) -> npt.NDArray[np.uint8]:
    """Values in [0, 1] as RGB of the scale, uint8 ``[..., 3]``."""
    steps = np.linspace(0, 1, len(_SCALE))
    return np.stack([np.interp(values, steps, _SCALE[:, c]) for c in range(3)], axis=-1).astype(np.uint8)


def draw_heatmap(tiles: Sequence[Tile]) -> Image.Image:
    """The sheet. Up to four pictures in a row. Raises ClientError."""
    if not tiles:
        raise ClientError("a heat map needs at least one image")
    columns = [_column(tile) for tile in tiles]
    lines = [columns[i : i + COLUMNS] for i in range(0, len(columns), COLUMNS)]
    widths = [sum(c.width for c in line) + MARGIN * (len(line) - 1) for line in lines]
    heights = [max(c.height for c in line) for line in lines]
    sheet = Image.new("RGB", (max(widths) + 2 * MARGIN, sum(heights) + MARGIN * (len(lines) + 1)), _PAPER)
    top = MARGIN
    for line, height in zip(lines, heights, strict=True):
        left = MARGIN
        for column in line:
            sheet.paste(column, (left, top))
            left += column.width + MARGIN
        top += height + MARGIN
    return sheet


def write_heatmap(path: str | Path, tiles: Sequence[Tile]) -> None:
    """Draw and write a PNG. Raises ClientError."""
    sheet = draw_heatmap(tiles)
    try:
        sheet.save(path, format="PNG", optimize=True)
    except OSError as failed:
        raise ClientError(f"{path} cannot be written: {failed.strerror or failed}") from failed


def _column(tile: Tile) -> Image.Image:
    norms = token_norms(tile)
    low, high = float(norms.min()), float(norms.max())
    level = (norms - low) / (high - low) if high > low else np.zeros_like(norms)
    picture = Image.fromarray(tile.shown)
    zoom = min(PANEL_HEIGHT / picture.height, MAX_PANEL_WIDTH / picture.width)
    size = max(1, round(picture.width * zoom)), max(1, round(picture.height * zoom))
    width = max(size[0], MIN_PANEL_WIDTH)
    column = Image.new("RGB", (width, CAPTION + 2 * PANEL_HEIGHT + 2 * GAP + LEGEND + LABELS), _PAPER)
    draw = ImageDraw.Draw(column)
    name_font, small = ImageFont.load_default(16), ImageFont.load_default(12)
    note = f"{norms.shape[1]} x {norms.shape[0]} tokens"
    note_width = draw.textlength(note, font=small)
    draw.text(
        (0, 0), _shortened(draw, tile.name, width - note_width - 12, name_font), font=name_font, fill=_INK
    )
    draw.text((width, 4), note, font=small, fill=_FAINT, anchor="ra")
    small_picture = picture.resize(size, Image.Resampling.LANCZOS)
    top = CAPTION
    column.paste(small_picture, (0, top))
    top += size[1] + GAP
    column.paste(_overlay(small_picture, level), (0, top))
    top += size[1] + GAP
    bar = colours(np.broadcast_to(np.linspace(0, 1, size[0]), (LEGEND, size[0])))
    column.paste(Image.fromarray(bar), (0, top))
    top += LEGEND + 5
    draw.text((0, top), f"{low:.3g}", font=small, fill=_INK)
    draw.text((size[0], top), f"{high:.3g}", font=small, fill=_INK, anchor="ra")
    draw.text((size[0] / 2, top), "norm of each row", font=small, fill=_FAINT, anchor="ma")
    return column.crop((0, 0, width, top + LABELS - 5))


def _overlay(picture: Image.Image, level: Floats) -> Image.Image:
    """Grey picture under the colours; strong tokens cover more of it. One cell is one token."""
    heat = Image.fromarray(colours(level)).resize(picture.size, Image.Resampling.NEAREST)
    cover = Image.fromarray((135 + 85 * level).astype(np.uint8)).resize(
        picture.size, Image.Resampling.NEAREST
    )
    grey = picture.convert("L").convert("RGB")
    return Image.composite(heat, grey, cover)


def _shortened(
    draw: ImageDraw.ImageDraw, text: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> str:
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "...", font=font) > width:
        text = text[:-1]
    return text + "..."
