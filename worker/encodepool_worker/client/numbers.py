"""Rows and pixels in the dtypes of the wire. numpy has no bfloat16: it travels as uint16 bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

STORED: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""How numpy holds each dtype; bfloat16 as its bits."""


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Finite float32 values in ``dtype``, rounded to nearest even as torch rounds."""
    if dtype != "bfloat16":
        return values.astype(STORED[dtype])
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(STORED["bfloat16"])


def to_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """The same values as float32; exact for all three dtypes."""
    if dtype != "bfloat16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)
