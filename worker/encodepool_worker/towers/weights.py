"""Fills a tower's module: with a checkpoint's vision tensors, or with made-up weights."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError
from .cut import Cut
from .files import tower_name, vision_files
from .tensor_file import FLOATS, TensorEntry, TensorFile


def load_weights(
    module: torch.nn.Module,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> None:
    """Fill ``module``'s parameters, cast to ``dtype`` on ``device``, one tensor at a time.

    Of the parameters in ``cuts`` the checkpoint holds the whole, and only the part is read. All
    tensors are matched by name, shape and kind first: ConfigError lists what is missing,
    unexpected or different, and then nothing has been loaded.
    """
    slots = dict(module.named_parameters())
    problems: list[str] = []
    unexpected: list[str] = []
    seen: set[str] = set()
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(folder / file)) for file in vision_files(folder)]
        plan: list[tuple[TensorFile, str, str]] = []
        for file in files:
            for full_name, entry in file.entries.items():
                name = tower_name(full_name)
                if name is None:
                    continue
                if name in seen:
                    problems.append(f"{full_name} is in the checkpoint twice")
                elif name not in slots:
                    unexpected.append(full_name)
                else:
                    problems += _differences(full_name, entry, _whole(slots[name], cuts.get(name)))
                    plan.append((file, full_name, name))
                seen.add(name)
        missing = sorted(slots.keys() - seen)
        if missing:
            problems.insert(0, f"{len(missing)} tensors of the tower are missing: {_some(missing)}")
        if unexpected:
            problems.append(
                f"{len(unexpected)} tensors do not belong to the tower: {_some(sorted(unexpected))}"
            )
        if problems:
            raise ConfigError(
                [f"{folder} does not hold the tower that its config.json describes", *problems[:8]]
            )
        for file, full_name, name in plan:
            slots[name].data = file.read(full_name, cuts.get(name)).to(device=device, dtype=dtype)


def fill_seeded(module: torch.nn.Module, seed: int, cuts: Mapping[str, Cut] = MappingProxyType({})) -> None:
    """Made-up weights, the same for the same seed on every machine and for any number of ranks.

    Matrices are scaled by their fan-in, so that activations keep their size from layer to layer
    and rows differ visibly between images; norms start at one; biases are small.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            cut = cuts.get(name)
            shape = _whole(parameter, cut)
            values = torch.randn(shape, generator=generator, dtype=torch.float32)
            if name.endswith("bias"):
                values *= 0.02
            elif parameter.dim() == 1:
                values = 1 + 0.02 * values
            elif "embed" in name and parameter.dim() == 2:
                values *= 0.2
            else:
                values /= (values.numel() / shape[0]) ** 0.5
            parameter.data = (values if cut is None else cut.of(values)).to(parameter.dtype)


def move(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Parameters to ``dtype`` and ``device``; buffers keep their dtype (rotary frequencies are float32)."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
        parameter.requires_grad_(False)
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device))


_INIT_MODULES = ("torch.nn.init", "transformers.initialization")


class SkipInit(TorchFunctionMode):
    """While active in this thread, parameters keep whatever memory they got: they are filled later.

    Saves drawing random numbers for a whole tower, and the memory of the float32 copy: pages
    nobody wrote to do not exist. Buffers are initialised as ever.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) in _INIT_MODULES:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
        return func(*args, **kwargs)


def _whole(parameter: torch.nn.Parameter, cut: Cut | None) -> tuple[int, ...]:
    return tuple(parameter.shape) if cut is None else cut.whole


def _differences(full_name: str, entry: TensorEntry, shape: tuple[int, ...]) -> Iterable[str]:
    if entry.shape != shape:
        yield f"{full_name} is {entry.shape}, the tower wants {shape}"
    if entry.kind not in FLOATS:
        yield f"{full_name} is {entry.kind}, a tower is read from {', '.join(FLOATS)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
