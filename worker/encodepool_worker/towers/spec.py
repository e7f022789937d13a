"""What a checkpoint folder says of its tower and of its image preprocessing. No torch.

Two layouts of ``config.json`` are published: language fields nested in ``text_config``
(Qwen3-VL), and language fields at the top level (Qwen2.5-VL). ``vision_config`` is the same
in both but for two names that Qwen2.5-VL uses (``in_chans``, ``spatial_patch_size``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, WireError
from ..types import ROW_DTYPES, TowerSpec

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of towers: where its defaults are, as its ``transformers`` class has them."""

    name: str
    patch_size: int
    deepstack_indexes: tuple[int, ...]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int


QWEN3_VL = Family("qwen3_vl", 16, (8, 16, 24), _HALF, _HALF, 65536, 16777216)
QWEN2_5_VL = Family("qwen2_5_vl", 14, (), _CLIP_MEAN, _CLIP_STD, 3136, 12845056)

FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,  # the same tower under another language model
    "qwen2_5_vl": QWEN2_5_VL,
}
"""By the ``model_type`` of ``config.json``."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How an image file becomes pixel rows.

    Pixels are ``(value * rescale_factor - mean) / std`` per channel; an image is scaled until
    its area lies in [min_pixels, max_pixels] and both sides are multiples of
    ``patch_size * merge_size``.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        for name in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "rescale_factor"):
            if not getattr(self, name) > 0:
                raise WireError(name, getattr(self, name), "> 0")
        if self.max_pixels < self.min_pixels:
            raise WireError("max_pixels", self.max_pixels, f"at least min_pixels ({self.min_pixels})")
        if not all(value > 0 for value in self.image_std):
            raise WireError("image_std", self.image_std, "three numbers > 0")

    @property
    def factor(self) -> int:
        """Both sides of a scaled image are multiples of this many pixels."""
        return self.patch_size * self.merge_size


def read_tower_spec(model_dir: str | Path, dtype: str = "auto") -> TowerSpec:
    """The tower of a checkpoint folder, from ``config.json`` alone.

    ``dtype`` auto is the checkpoint's own (float32 where it names none). Raises ConfigError
    with every problem found.
    """
    config = read_json(Path(model_dir) / "config.json", "a model folder has one")
    where = str(Path(model_dir) / "config.json")
    family = family_of(config, where)
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ConfigError([f"{where} has no vision_config: {family.name} checkpoints carry one"])

    problems: list[str] = []

    def size(names: Sequence[str], default: int | None = None) -> int:
        value = next((vision[name] for name in names if vision.get(name) is not None), default)
        if value is None:
            problems.append(f"{where}: vision_config.{names[0]} is missing")
        elif not _is_int(value) or value <= 0:
            problems.append(f"{where}: vision_config.{names[0]} is {value!r}, must be an integer > 0")
        else:
            return int(value)
        return 1

    hidden = size(["out_hidden_size"])
    width = size(["hidden_size"])
    heads = size(["num_heads"])
    depth = size(["depth"])
    patch_size = size(["patch_size", "spatial_patch_size"], family.patch_size)
    temporal_patch_size = size(["temporal_patch_size"], 2)
    merge_size = size(["spatial_merge_size"], 2)
    channels = size(["in_channels", "in_chans"], 3)
    if width % heads:
        problems.append(f"{where}: vision_config.hidden_size {width} is not a multiple of num_heads {heads}")
    levels = 0
    if family.deepstack_indexes:
        indexes = vision.get("deepstack_visual_indexes", list(family.deepstack_indexes))
        if not isinstance(indexes, list) or not all(_is_int(i) and 0 <= i < depth for i in indexes):
            problems.append(
                f"{where}: vision_config.deepstack_visual_indexes is {indexes!r}, "
                f"must be a list of layers in [0, {depth})"
            )
        else:
            levels = len(set(indexes))
            if levels != len(indexes):
                problems.append(f"{where}: vision_config.deepstack_visual_indexes repeats a layer: {indexes}")
    chosen = _checkpoint_dtype(config) if dtype == "auto" else dtype
    if chosen not in ROW_DTYPES:
        problems.append(f"dtype {chosen!r} is not one of {', '.join(ROW_DTYPES)}; set --dtype")
    if problems:
        raise ConfigError(problems)
    return TowerSpec(
        family=family.name,
        hidden=hidden,
        levels=levels,
        dtype=chosen,
        patch_width=channels * temporal_patch_size * patch_size * patch_size,
        patch_size=patch_size,
        temporal_patch_size=temporal_patch_size,
        merge_size=merge_size,
        image_token_id=_token_id(config, "image_token_id"),
        video_token_id=_token_id(config, "video_token_id"),
    )


def read_image_spec(model_dir: str | Path) -> ImageSpec:
    """How the checkpoint wants its images, from ``preprocessor_config.json``.

    Without that file the family's published values hold. The bounds on the area are
    ``size.shortest_edge`` and ``size.longest_edge`` (pixels in spite of their names), in older
    files ``min_pixels`` and ``max_pixels``. Raises ConfigError.
    """
    folder = Path(model_dir)
    spec = read_tower_spec(folder)
    family = next(f for f in FAMILIES.values() if f.name == spec.family)
    path = folder / "preprocessor_config.json"
    found = read_json(path, "it describes the images") if path.exists() else {}
    size = found.get("size")
    size = size if isinstance(size, dict) else {}
    problems: list[str] = []

    def pick(default: Any, check: Callable[[Any], bool], wanted: str, *values: tuple[str, Any]) -> Any:
        for name, value in values:
            if value is not None:
                if check(value):
                    return value
                problems.append(f"{path}: {name} is {value!r}, must be {wanted}")
        return default

    def whole(value: Any) -> bool:
        return _is_int(value) and value > 0

    def triple(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 3 and all(_is_number(v) for v in value)

    patch = {
        name: pick(getattr(spec, name), whole, "an integer > 0", (name, found.get(name)))
        for name in ("patch_size", "temporal_patch_size", "merge_size")
    }
    for name, value in patch.items():
        if value != getattr(spec, name):
            problems.append(f"{path}: {name} is {value}, the tower's is {getattr(spec, name)}")
    low = pick(
        family.min_pixels,
        whole,
        "an integer > 0",
        ("min_pixels", found.get("min_pixels")),
        ("size.shortest_edge", size.get("shortest_edge")),
    )
    high = pick(
        family.max_pixels,
        whole,
        "an integer > 0",
        ("max_pixels", found.get("max_pixels")),
        ("size.longest_edge", size.get("longest_edge")),
    )
    mean = pick(family.image_mean, triple, "three numbers", ("image_mean", found.get("image_mean")))
    std = pick(family.image_std, triple, "three numbers", ("image_std", found.get("image_std")))
    scale = pick(1 / 255, _is_number, "a number", ("rescale_factor", found.get("rescale_factor")))
    if problems:
        raise ConfigError(problems)
    try:
        return ImageSpec(
            **patch,
            min_pixels=low,
            max_pixels=high,
            image_mean=_three(mean),
            image_std=_three(std),
            rescale_factor=float(scale),
        )
    except WireError as bad:
        raise ConfigError([f"{path}: {bad}"]) from bad


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that ``model_type`` names. Raises ConfigError."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            [f"{where}: model_type is {model_type!r}; towers exist for {', '.join(sorted(FAMILIES))}"]
        )
    return family


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """One JSON object from a file. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise ConfigError([f"{path} does not exist: {purpose}"]) from missing
    except (OSError, ValueError) as bad:
        raise ConfigError([f"{path} cannot be read as JSON: {bad}"]) from bad
    if not isinstance(value, dict):
        raise ConfigError([f"{path} must hold a JSON object, holds {type(value).__name__}"])
    return value


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """``dtype`` (older files: ``torch_dtype``) of the vision part, the whole, or the text part."""
    for part in (config.get("vision_config"), config, config.get("text_config")):
        if isinstance(part, dict):
            for name in ("dtype", "torch_dtype"):
                if part.get(name) is not None:
                    return str(part[name]).removeprefix("torch.")
    return "float32"


def _token_id(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if _is_int(value) else None


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
