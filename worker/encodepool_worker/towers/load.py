"""From a model's name to a tower that is ready to be warmed up."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..types import TowerSpec
from .attention import segments_problem
from .base import TowerBase, VisionTower, torch_dtype
from .cut import Cut
from .hub import resolve_model
from .parallel import TensorParallel
from .shards import shard
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
    parallel: TensorParallel | None = None,
    graphs: bool = False,
) -> VisionTower:
    """The vision tower of a folder or hub name; the language model is never read.

    ``load_format`` dummy takes the shape from the model's ``config.json`` and makes the weights
    up from ``seed``: the same seed gives the same weights on every device. ``device`` auto is the
    GPU where there is one. With ``parallel`` the tower is this rank's part of one that all ranks
    compute together, and it is returned when all have theirs. ``graphs`` asks for CUDA graphs; the
    tower's ``graphs`` says whether they are in use. Raises ConfigError, and GroupLost for ranks
    that do not come.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError([f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}"])
    dummy = load_format == "dummy"
    folder = resolve_model(str(model), revision, weights=not dummy)
    spec = read_tower_spec(folder, dtype)
    target = pick_device(device)
    make, tower_class = _family(spec)
    vision = read_json(folder / "config.json", "a model folder has one")["vision_config"]
    if parallel is not None and parallel.size == 1:
        parallel = None
    cuts: Mapping[str, Cut] = {}
    try:
        with SkipInit():
            module = make(vision)
            if parallel is not None:
                cuts = shard(module, tower_class.mlp_names, parallel)
    except (ValueError, TypeError, KeyError) as bad:
        raise ConfigError([f"{folder}/config.json: transformers refuses its vision_config: {bad}"]) from bad
    row_dtype = torch_dtype(spec.dtype)
    if dummy:
        fill_seeded(module, seed, cuts)
    else:
        load_weights(module, folder, row_dtype, target, cuts)
    move(module, row_dtype, target)
    tower = tower_class(spec, module.eval(), target, parallel)
    if graphs:
        problem = graphs_problem(target, row_dtype, parallel)
        if problem is None:
            tower.use_graphs()
        tower.graphs = problem or "on"
    if parallel is not None:
        parallel.meet("loaded")
    return tower


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


def graphs_problem(device: torch.device, dtype: torch.dtype, parallel: TensorParallel | None) -> str | None:
    """Why CUDA graphs cannot be used although they are asked for; None if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if parallel is not None:
        return f"there are {parallel.size} ranks"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the attention kernel takes bfloat16 and float16, the tower is {dtype}"
    if importlib.util.find_spec("transformers.vision_utils") is None:
        return "this transformers takes no prepared positions; 5.24 does"
    return segments_problem()


Maker = Callable[[Mapping[str, Any]], torch.nn.Module]


def _family(spec: TowerSpec) -> tuple[Maker, type[TowerBase]]:
    """The adapter of a family, imported when it is needed: transformers is slow to import."""
    if spec.family == "qwen3_vl":
        from . import qwen3_vl

        return qwen3_vl.build, qwen3_vl.Qwen3VLTower
    from . import qwen2_5_vl

    return qwen2_5_vl.build, qwen2_5_vl.Qwen25VLTower
