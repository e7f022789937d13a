"""Reads single tensors out of a safetensors file.

Plain reads at the tensor's place, no mapping: a file of a whole language model costs nothing but
its header, and a file that is cut short under us is an error and not a SIGBUS. The format: 8 bytes
little-endian length of the header, the header (JSON: name -> dtype, shape, [start, stop) in the
data), the data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import ConfigError
from .cut import Cut

MAX_HEADER_BYTES = 100_000_000
"""The limit that the format sets itself."""

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What a tower's tensors may be stored as."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header has it; bytes [start, stop) of the data."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """One file, open. Use it in a ``with`` block. Raises ConfigError naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except FileNotFoundError as missing:
            raise ConfigError(
                [f"{path} does not exist: weights are read from safetensors files"]
            ) from missing
        except OSError as failed:
            raise ConfigError([f"{path} cannot be opened: {failed.strerror}"]) from failed
        try:
            self.entries: Mapping[str, TensorEntry] = self._read_header()
        except (OSError, ValueError, KeyError, TypeError) as bad:
            self._file.close()
            raise ConfigError([f"{path} is not a sound safetensors file: {bad}"]) from bad

    def read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """A tensor, or a part of it, in memory of its own. Only the part is read."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape if cut is None else cut.shape, dtype=FLOATS[entry.kind])
        target = tensor.view(-1).view(torch.uint8).numpy().data
        size, start, done = tensor.element_size(), self._data_start + entry.start, 0
        try:
            for first, count in [(0, tensor.numel())] if cut is None else cut.runs():
                self._fill(target[done : done + count * size], start + first * size)
                done += count * size
        except (OSError, ValueError) as bad:
            raise ConfigError([f"{self.path}: {name} cannot be read: {bad}"]) from bad
        return tensor

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_header(self) -> dict[str, TensorEntry]:
        length = bytearray(8)
        self._fill(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {header_bytes} bytes")
        header = bytearray(header_bytes)
        self._fill(memoryview(header), 8)
        self._data_start = 8 + header_bytes
        data_bytes = self._file.seek(0, 2) - self._data_start
        found: dict[str, Any] = json.loads(header)
        entries = {}
        for name, fields in found.items():
            if name == "__metadata__":
                continue
            start, stop = fields["data_offsets"]
            entry = TensorEntry(str(fields["dtype"]), tuple(int(n) for n in fields["shape"]), start, stop)
            if not 0 <= start <= stop <= data_bytes:
                raise ValueError(f"{name} is said to end at {stop}, there are {data_bytes} bytes")
            dtype = FLOATS.get(entry.kind)
            if dtype is not None and math.prod(entry.shape) * dtype.itemsize != stop - start:
                raise ValueError(f"{name} of {entry.kind} {entry.shape} is said to take {stop - start} bytes")
            entries[name] = entry
        return entries

    def _fill(self, target: memoryview, position: int) -> None:
        self._file.seek(position)
        done = 0
        while done < len(target):
            count = self._file.readinto(target[done:])
            if not count:
                raise ValueError(f"the file ends at {position + done}")
            done += count
