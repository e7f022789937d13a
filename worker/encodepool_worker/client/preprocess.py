"""An image file becomes pixel rows, as the gateway and ``transformers`` prepare it for Qwen towers.

Scaled so that both sides are multiples of patch * merge and the area lies in the allowed range,
normalised per channel, then cut into patches. Patches come in the order in which the tower merges
them: the four of one merged token lie next to each other. A still image fills every frame of a
temporal patch. Needs Pillow and numpy only.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import ImageError
from ..towers.spec import ImageSpec
from ..types import Grid

MAX_FILE_PIXELS = 1 << 27
"""Pixels a file may decode to (128 million): more is taken for a decompression bomb."""

MAX_ASPECT_RATIO = 200

CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image ready for a tower: ``pixels`` is float32 ``[grid.patches, patch_width]``.

    ``shown`` is the scaled picture, uint8 ``[height, width, 3]``, for whoever draws over it.
    """

    pixels: npt.NDArray[np.float32]
    grid: Grid
    shown: npt.NDArray[np.uint8]


def prepare_image(path: str | Path, spec: ImageSpec) -> Prepared:
    """Read and prepare one image file. Raises ImageError."""
    picture = read_image(path)
    height, width = scaled_size(picture.height, picture.width, spec, str(path))
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    shown = np.asarray(picture, dtype=np.uint8)
    return Prepared(
        pixel_rows(shown, spec), Grid(1, height // spec.patch_size, width // spec.patch_size), shown
    )


def read_image(path: str | Path) -> Image.Image:
    """The file's (first) picture, upright, as RGB. Raises ImageError before a bomb is decoded."""
    try:
        with warnings.catch_warnings():
            # Pillow warns from 89 million pixels on; the limit below is ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                if opened.width * opened.height > MAX_FILE_PIXELS:
                    raise ImageError(
                        f"{path} is {opened.width}x{opened.height}: "
                        f"images of more than {MAX_FILE_PIXELS} pixels are refused; scale it down first"
                    )
                return ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError as missing:
        raise ImageError(f"{path} does not exist") from missing
    except UnidentifiedImageError as unknown:
        raise ImageError(f"{path} is not an image that Pillow can read") from unknown
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as broken:
        # Pillow's decoders raise these for truncated and damaged files.
        raise ImageError(f"{path} cannot be read: {broken}") from broken


def scaled_size(height: int, width: int, spec: ImageSpec, name: str = "image") -> tuple[int, int]:
    """(height, width) after scaling: multiples of ``spec.factor``, area within the spec's bounds.

    The same arithmetic as the published processors, so that the tokens of an image are the same
    everywhere. Raises ImageError for a picture that is too long and thin.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"{name} is {width}x{height}: one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    factor = spec.factor
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > spec.max_pixels:
        shrink = math.sqrt(height * width / spec.max_pixels)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < spec.min_pixels:
        grow = math.sqrt(spec.min_pixels / (height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide


def pixel_rows(picture: npt.NDArray[np.uint8], spec: ImageSpec) -> npt.NDArray[np.float32]:
    """Patches ``[patches, 3 * temporal * patch * patch]`` of a scaled picture ``[height, width, 3]``."""
    height, width, _ = picture.shape
    patch, merge = spec.patch_size, spec.merge_size
    # 256 values a channel: a table gives each pixel the value that arithmetic on it would give.
    levels = (np.arange(256, dtype=np.float64) * spec.rescale_factor).astype(np.float32)
    mean = np.array(spec.image_mean, dtype=np.float32)
    std = np.array(spec.image_std, dtype=np.float32)
    table = (levels[None, :] - mean[:, None]) / std[:, None]
    channels = np.stack([table[c][picture[:, :, c]] for c in range(CHANNELS)])
    rows, columns = height // (patch * merge), width // (patch * merge)
    blocks = channels.reshape(CHANNELS, rows, merge, patch, columns, merge, patch)
    # (block row, block column, row in block, column in block, channel, pixel row, pixel column)
    ordered = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    frames = np.broadcast_to(ordered, (*ordered.shape[:5], spec.temporal_patch_size, patch, patch))
    return np.ascontiguousarray(frames.reshape(rows * columns * merge * merge, -1))
