"""Pixels between their arrival and the tower, by handle: the pipeline only knows the numbers."""

import itertools
import threading
from dataclasses import dataclass

import torch

from ..types import DTYPE_BYTES, Grid

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "uint32": torch.uint32,
}


@dataclass(frozen=True, slots=True)
class Pixels:
    """One item's pixels as they came: ``payload`` is row-major ``dtype[shape]``, little-endian."""

    payload: memoryview
    dtype: str
    shape: tuple[int, ...]
    grids: tuple[Grid, ...]

    def tensor(self) -> torch.Tensor:
        """The pixels where they lie, without a copy; the tensor keeps the message alive.

        A small message may lie at an odd address inside a receive buffer: only that is copied.
        """
        if self.payload.nbytes == 0:
            return torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])
        flat = torch.frombuffer(self.payload, dtype=torch.uint8)
        if flat.data_ptr() % DTYPE_BYTES[self.dtype]:
            flat = flat.clone()
        return flat.view(TORCH_DTYPES[self.dtype]).view(self.shape)


class PixelTable:
    """Handle -> pixels. The intake adds, the owner thread drops, the tower's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pixels: dict[int, Pixels] = {}
        self._handles = itertools.count(1)

    def add(self, pixels: Pixels) -> int:
        with self._lock:
            handle = next(self._handles)
            self._pixels[handle] = pixels
            return handle

    def get(self, handle: int) -> Pixels:
        """Raises KeyError for a handle that was dropped or never given."""
        with self._lock:
            return self._pixels[handle]

    def drop(self, handle: int) -> None:
        """Raises KeyError when it is dropped twice: that would hide a wrong count elsewhere."""
        with self._lock:
            del self._pixels[handle]

    def __len__(self) -> int:
        with self._lock:
            return len(self._pixels)
