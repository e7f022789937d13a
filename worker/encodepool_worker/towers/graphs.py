"""Forward passes recorded once per token budget, and replayed for whatever fits.

A small batch on a fast GPU is bound by the time it takes to launch some thousand kernels. A CUDA
graph launches them at once, but always on the same memory and of the same sizes: so each budget
has one graph, a batch is packed greedily into budgets, and what is left of one is filled with
padding that forms segments of its own and reaches no item's rows. Batches that fit no budget run as ever.

Off unless asked for, and then only where all of this holds (the reference's gate, in our terms): a
GPU, one rank, a 16-bit tower, an attention kernel that takes the segments' bounds from the device,
and a ``transformers`` whose towers take prepared positions. Whatever is missing is said in words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import TowerError

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens after merging; the range is the reference's."""

MAX_SEGMENTS = 128
"""Images and frames of one replay. Kernels start blocks for each, used or not."""

PAD_SEGMENT = 256
"""Patches of one segment of padding: attention over all of it at once would cost more than the items."""

Inputs = Mapping[str, torch.Tensor]
"""A pass's tensors by name: ``pixels``, and what the family's ``geometry`` makes of the grids."""

Forward = Callable[[Inputs, int], torch.Tensor]
"""(inputs, longest segment) -> rows ``[tokens, row width]``. Waits for nothing on the device."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Items [start, stop) of a batch in one pass; ``budget`` None: without a graph."""

    start: int
    stop: int
    budget: int | None


def pack(n_tokens: Sequence[int], n_segments: Sequence[int], budgets: Sequence[int] = BUDGETS) -> list[Pass]:
    """Items in their order, as many to a pass as the largest budget holds."""
    passes: list[Pass] = []
    start = tokens = segments = 0

    def close(stop: int) -> None:
        if stop > start:
            fits = (b for b in budgets if tokens <= b) if segments <= MAX_SEGMENTS else iter(())
            passes.append(Pass(start, stop, next(fits, None)))

    for place, (more, parts) in enumerate(zip(n_tokens, n_segments, strict=True)):
        if place > start and (tokens + more > budgets[-1] or segments + parts > MAX_SEGMENTS):
            close(place)
            start, tokens, segments = place, 0, 0
        tokens, segments = tokens + more, segments + parts
    close(len(n_tokens))
    return passes


class BudgetGraphs:
    """The recorded passes of one tower.

    On a CPU device nothing is recorded: the pass runs each time, on the same padded memory.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        patch_width: int,
        merge: int,
        geometry: Inputs,
        longest_window: int,
        budgets: Sequence[int] = BUDGETS,
    ) -> None:
        """``geometry`` of any grid: its names and dtypes are those of all. ``merge`` is patches per token."""
        self._forward = forward
        self._device = device
        self._merge = merge
        self._longest_window = longest_window
        self.budgets = tuple(budgets)
        most = self.budgets[-1] * merge
        self.pixels = torch.zeros(most, patch_width, dtype=dtype, device=device)
        self._inputs = {
            name: torch.zeros(
                self._length(name, self.budgets[-1]), *example.shape[1:], dtype=example.dtype, device=device
            )
            for name, example in geometry.items()
        }
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Record every budget, the largest first: the others use its memory. Raises TowerError."""
        if self._device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for budget in reversed(self.budgets):
            self._fill({}, budget, 0)
            inputs = self._views(budget)
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(side):
                    # Twice: the first pass chooses kernels and allocates their workspaces.
                    for _ in range(2):
                        self._forward(inputs, budget * self._merge)
                torch.cuda.current_stream(self._device).wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    rows = self._forward(inputs, budget * self._merge)
            except RuntimeError as failed:
                raise TowerError(f"a graph of {budget} tokens cannot be recorded: {failed}") from failed
            self._graphs[budget] = (graph, rows)

    def run(self, geometry: Inputs, n_patches: int, budget: int) -> torch.Tensor:
        """Rows of the first ``n_patches`` rows of ``pixels``, in memory that the next run does not touch."""
        self._fill(geometry, budget, n_patches)
        recorded = self._graphs.get(budget)
        if recorded is None:
            rows = self._forward(self._views(budget), budget * self._merge)
        else:
            recorded[0].replay()
            rows = recorded[1]
        return rows[: n_patches // self._merge].clone()

    def _length(self, name: str, budget: int) -> int:
        """Rows of one input: of bounds, one more than there may be segments."""
        patches = budget * self._merge
        if name == "cu_seqlens":
            return MAX_SEGMENTS + -(-patches // PAD_SEGMENT) + 1
        if name == "cu_window_seqlens":
            return budget + 1  # a window holds a token at least
        return budget if name == "window_index" else patches

    def _views(self, budget: int) -> dict[str, torch.Tensor]:
        views = {name: whole[: self._length(name, budget)] for name, whole in self._inputs.items()}
        return {"pixels": self.pixels[: budget * self._merge], **views}

    def _fill(self, geometry: Inputs, budget: int, n_patches: int) -> None:
        """Write one batch's inputs and their padding; all on the host first, one copy each."""
        end = budget * self._merge
        self.pixels[n_patches:end].zero_()
        for name, whole in self._inputs.items():
            target = whole[: self._length(name, budget)]
            values = torch.zeros(target.shape, dtype=target.dtype)
            given = geometry.get(name)
            if name == "window_index":
                values = torch.arange(budget, dtype=target.dtype)
            elif name in ("cu_seqlens", "cu_window_seqlens"):
                step = PAD_SEGMENT if name == "cu_seqlens" else self._longest_window
                values = pad_bounds(n_patches, end, step, target.shape[0], 1 if given is None else len(given))
            if given is not None:
                values[: len(given)] = given
            if target.is_cuda:
                values = values.pin_memory()
            target.copy_(values, non_blocking=True)


def pad_bounds(start: int, stop: int, step: int, length: int, taken: int) -> torch.Tensor:
    """``[length]`` int32: segments of ``step`` that cover [start, stop), after ``taken`` other bounds.

    The first ``taken`` are ``start``, to be overwritten; what is left over are empty segments.
    """
    edges = [min(edge, stop) for edge in range(start + step, stop + step, step)]
    if taken + len(edges) > length:
        raise TowerError(f"{taken + len(edges)} bounds of segments do not fit {length}")
    values = [start] * taken + edges
    return torch.tensor(values + [stop] * (length - len(values)), dtype=torch.int32)
