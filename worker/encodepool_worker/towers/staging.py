"""Bytes on their way to and from a GPU, beside its computing and not in its way.

Pixels arrive in ordinary memory, in float32, and are wanted on the device in the tower's dtype. They
are cast into one of two small pinned buffers, and copied from there by a stream of their own: while
one buffer's copy is under way the other is being filled. So a batch costs a bounded amount of
pinned memory, half the traffic for 16-bit towers, and no wait but the last one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CHUNK_BYTES = 16 * 1024 * 1024
"""Size of each of the two buffers: long enough that a copy is not all overhead."""


@dataclass(slots=True)
class _Chunk:
    """``[rows, width]`` in host memory, and the copy from it that may still be under way."""

    rows: torch.Tensor
    copied: torch.cuda.Event | None


class PixelStager:
    """Moves pixel rows of ``width`` values to ``device``, cast to ``dtype``.

    On a CPU device the same steps run without pinning and streams.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, width: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._width = width
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        n_rows = max(1, chunk_bytes // (width * dtype.itemsize))
        self._chunks = [
            _Chunk(
                torch.empty(n_rows, width, dtype=dtype, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(2)
        ]

    def put(self, parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """All rows of ``parts`` (``[rows, width]`` each), one after another: ``[rows, width]``.

        They lie in ``out`` if it is given, from its first row on. What is computed on the current
        stream afterwards sees them; the parts may be freed once this returns.
        """
        n_rows = sum(part.shape[0] for part in parts)
        if out is None:
            out = torch.empty(n_rows, self._width, dtype=self._dtype, device=self._device)
        if self._stream is None:
            self._copy(parts, out)
            return out[:n_rows]
        # The memory of ``out`` may have been used by what the current stream has not finished.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(parts, out)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return out[:n_rows]

    def _copy(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        done = 0
        for part in parts:
            if part.is_cuda:
                out[done : done + part.shape[0]].copy_(part)
                done += part.shape[0]
                continue
            for rows in torch.split(part, self._chunks[0].rows.shape[0]):
                chunk = self._chunks[0]
                self._chunks.reverse()
                if chunk.copied is not None:
                    chunk.copied.synchronize()
                staged = chunk.rows[: rows.shape[0]]
                staged.copy_(rows)
                out[done : done + rows.shape[0]].copy_(staged, non_blocking=True)
                if chunk.copied is not None:
                    chunk.copied.record()
                done += rows.shape[0]


@contextmanager
def copy_stream(device: torch.device) -> Iterator[None]:
    """Copies begun in the block follow what was computed before it, on a stream of their own.

    They have ended when the block is left, and only they are waited for. On a CPU nothing is needed.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:  # what failed may have begun copies, and their target is about to be given to others
            stream.synchronize()
