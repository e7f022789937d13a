"""Where a model's files are: a folder as it is, or a hub name from the cache or the hub."""

import re
from pathlib import Path

from ..errors import ConfigError
from .files import vision_files

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ("*.json",)


def resolve_model(model: str, revision: str = "", *, weights: bool = True) -> Path:
    """The folder that holds ``model``'s files.

    A hub name is looked up in the hub cache first and fetched only when something is missing
    there: the JSON files, and with ``weights`` those safetensors files that hold vision tensors.
    Raises ConfigError.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError([f"model {model!r} is not a folder"])
    problem: Exception | None = None
    for offline in (True, False):
        try:
            return _snapshot(model, revision, weights, offline)
        except (OSError, ValueError, ConfigError) as failed:  # HfHubHTTPError and its kin are OSErrors
            problem = failed
    raise ConfigError(
        [
            f"model {model!r} is neither a folder nor complete in the hub cache, and fetching it failed: "
            f"{_first_line(problem)}"
        ]
    ) from problem


def _snapshot(model: str, revision: str, weights: bool, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    def get(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                model, revision=revision or None, allow_patterns=patterns, local_files_only=offline
            )
        )

    folder = get(list(_SMALL_FILES))
    if not (folder / "config.json").exists():
        raise ConfigError([f"{model} has no config.json"])
    if weights:
        files = vision_files(folder)
        folder = get([*_SMALL_FILES, *files])
        absent = [file for file in files if not (folder / file).exists()]
        if absent:
            raise ConfigError([f"{model} lacks {', '.join(absent)}"])
    return folder


def _first_line(problem: Exception | None) -> str:
    return str(problem).strip().split("\n", 1)[0]
