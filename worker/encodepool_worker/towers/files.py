"""Which files of a checkpoint hold the tower, and which of their tensors are its own. No torch.

A checkpoint names them ``model.visual.*`` (as ``transformers`` saves) or ``visual.*`` (as
Qwen2.5-VL is published), beside the language model's. In a checkpoint of several files,
``model.safetensors.index.json`` says which file holds which tensor; files without vision tensors
are neither fetched nor opened.
"""

from pathlib import Path

from ..errors import ConfigError
from .spec import read_json

PREFIXES = ("model.visual.", "visual.")
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def vision_files(folder: Path) -> list[str]:
    """Names of the files that hold vision tensors, sorted. Raises ConfigError."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    weight_map = read_json(index, "it lists the tensors").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError([f"{index} has no weight_map"])
    files = {str(file) for name, file in weight_map.items() if tower_name(str(name)) is not None}
    for file in files:
        if Path(file).name != file:
            raise ConfigError([f"{index} names {file!r}, which is not a file beside it"])
    if not files:
        raise ConfigError([f"{index} lists no tensor named {' or '.join(p + '*' for p in PREFIXES)}"])
    return sorted(files)


def tower_name(full_name: str) -> str | None:
    """The tensor's name inside the tower; None for the language model's."""
    for prefix in PREFIXES:
        if full_name.startswith(prefix):
            return full_name.removeprefix(prefix)
    return None
