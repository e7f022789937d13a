"""Rows on disk: one ``.npz`` with the arrays ``<image>.main`` and ``<image>.deepstack``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ClientError


def image_names(paths: Sequence[str | Path]) -> list[str]:
    """What the arrays of each image are called: the file's name without its ending. Raises ClientError."""
    names = [Path(path).stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ClientError(f"two images are called {name!r}: give them different file names")
    return names


def write_rows(path: str | Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays as they are (bfloat16 as its bits, uint16). Raises ClientError."""
    try:
        with open(path, "wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
    except OSError as failed:
        raise ClientError(f"{path} cannot be written: {failed.strerror or failed}") from failed
