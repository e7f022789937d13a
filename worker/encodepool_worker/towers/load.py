"""From a model's name to a tower that is ready to be warmed up."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..types import TowerSpec
from .base import TowerBase, VisionTower, torch_dtype
from .hub import resolve_model
from .spec import read_json, read_tower_spec
from .weights import SkipInit, fill_seeded, load_weights, move

LOAD_FORMATS = ("auto", "dummy")


def load_tower(
    model: str | Path,
    *,
    load_format: str = "auto",
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    revision: str = "",
) -> VisionTower:
    """The vision tower of a folder or hub name; the language model is never read.

    ``load_format`` dummy takes the shape from the model's ``config.json`` and makes the weights
    up from ``seed``: the same seed gives the same weights on every device. ``device`` auto is the
    GPU where there is one. Raises ConfigError.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError([f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}"])
    dummy = load_format == "dummy"
    folder = resolve_model(str(model), revision, weights=not dummy)
    spec = read_tower_spec(folder, dtype)
    target = pick_device(device)
    make, tower_class = _family(spec)
    vision = read_json(folder / "config.json", "a model folder has one")["vision_config"]
    try:
        with SkipInit():
            module = make(vision)
    except (ValueError, TypeError, KeyError) as bad:
        raise ConfigError([f"{folder}/config.json: transformers refuses its vision_config: {bad}"]) from bad
    row_dtype = torch_dtype(spec.dtype)
    if dummy:
        fill_seeded(module, seed)
    else:
        load_weights(module, folder, row_dtype, target)
    move(module, row_dtype, target)
    return tower_class(spec, module.eval(), target)


def pick_device(device: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Raises ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as bad:
        raise ConfigError([f"device {device!r} is not auto, cpu or cuda"]) from bad
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["device is cuda, but torch finds no usable GPU here; set device to cpu or auto"])
    return target


Maker = Callable[[Mapping[str, Any]], torch.nn.Module]
TowerClass = Callable[[TowerSpec, torch.nn.Module, torch.device], TowerBase]


def _family(spec: TowerSpec) -> tuple[Maker, TowerClass]:
    """The adapter of a family, imported when it is needed: transformers is slow to import."""
    if spec.family == "qwen3_vl":
        from . import qwen3_vl

        return qwen3_vl.build, qwen3_vl.Qwen3VLTower
    from . import qwen2_5_vl

    return qwen2_5_vl.build, qwen2_5_vl.Qwen25VLTower
