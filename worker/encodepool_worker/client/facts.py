"""What a client has to know of a worker before it can send pixels and receive rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ClientError, WireError
from ..towers.spec import FAMILIES, ImageSpec, read_image_spec, read_tower_spec
from ..types import ROW_DTYPES, TowerSpec

DEFAULT_PIXEL_DTYPE = "bfloat16"
"""What a gateway sends to a worker that names no dtype."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The tower behind an endpoint; ``pixel_dtype`` is how it wants its pixels.

    ``transfer_backend`` is empty where the worker does not tell.
    """

    spec: TowerSpec
    images: ImageSpec
    pixel_dtype: str
    transfer_backend: str = ""
    transfer_protocol: str = "tcp"


def facts_from_server(info: Mapping[str, Any], pixel_dtype: str, where: str) -> ModelFacts | None:
    """From ``scheduler_info`` of GetServerInfo; None where the worker tells nothing of its tower.

    Struct values are floats whatever they were; what is not told of the images is as the family is
    published. Raises ClientError for half an answer.
    """
    nested = info.get("encodepool")
    told = nested if isinstance(nested, Mapping) else info
    if "hidden" not in told or "levels" not in told:
        return None

    def number(name: str, default: int | None = None) -> int:
        value = told.get(name, default)
        if not isinstance(value, int | float) or value != int(value):
            raise ClientError(f"{where} reports {name} {value!r}: not a worker this client can use")
        return int(value)

    def three(name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        value = told.get(name)
        if value is None:
            return default
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise ClientError(f"{where} reports {name} {value!r}: three numbers were expected")
        return float(value[0]), float(value[1]), float(value[2])

    family = next((f for f in FAMILIES.values() if f.name == told.get("family")), None)
    dtype = str(told.get("dtype", ""))
    if family is None or dtype not in ROW_DTYPES:
        raise ClientError(
            f"{where} reports family {told.get('family')!r} and dtype {dtype!r}: "
            "not a worker this client can use"
        )
    patch, temporal, merge = number("patch_size"), number("temporal_patch_size"), number("merge_size")
    try:
        images = ImageSpec(
            patch_size=patch,
            temporal_patch_size=temporal,
            merge_size=merge,
            min_pixels=number("min_pixels", family.min_pixels),
            max_pixels=number("max_pixels", family.max_pixels),
            image_mean=three("image_mean", family.image_mean),
            image_std=three("image_std", family.image_std),
            rescale_factor=float(told.get("rescale_factor", 1 / 255)),
        )
    except WireError as bad:
        raise ClientError(f"{where} reports an impossible value: {bad}") from bad
    spec = TowerSpec(
        family=family.name,
        hidden=number("hidden"),
        levels=number("levels"),
        dtype=dtype,
        patch_width=3 * temporal * patch * patch,
        patch_size=patch,
        temporal_patch_size=temporal,
        merge_size=merge,
        image_token_id=number("image_token_id") if "image_token_id" in told else None,
        video_token_id=None,
    )
    return ModelFacts(
        spec,
        images,
        pixel_dtype or DEFAULT_PIXEL_DTYPE,
        transfer_backend=str(told.get("transfer_backend", "")),
        transfer_protocol=str(told.get("transfer_protocol", "tcp")),
    )


def facts_from_folder(folder: str | Path, pixel_dtype: str) -> ModelFacts:
    """For a worker that tells nothing of its tower. Raises ConfigError.

    The rows' dtype is then the one in which the worker wants its pixels, as in the reference.
    """
    dtype = pixel_dtype or DEFAULT_PIXEL_DTYPE
    return ModelFacts(read_tower_spec(folder, dtype), read_image_spec(folder), dtype)
