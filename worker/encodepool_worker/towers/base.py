"""What the worker asks of a vision tower, and the checks that all towers share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ..errors import TowerError
from ..types import Grid, TowerSpec
from .attention import use_segments
from .graphs import BUDGETS, BudgetGraphs, Pass, pack
from .parallel import TensorParallel
from .shards import MlpNames, sums
from .staging import PixelStager

WARM_UP_SIDE = 16
"""Patches along each side of the warm-up image: a multiple of any merge size in use."""


@dataclass(frozen=True, slots=True)
class TowerItem:
    """Pixels of one room: ``[patches, patch_width]``, the rows of its grids one after another.

    One image is one grid, one video one grid with ``t`` > 1; an item may hold several. The
    pixels may be of any floating dtype and on any device: the tower moves and casts them.
    """

    pixels: torch.Tensor
    grids: tuple[Grid, ...]


class VisionTower(Protocol):
    """Turns pixels into rows. Used by one thread at a time."""

    spec: TowerSpec
    graphs: str = "off"
    """Whether CUDA graphs are in use: ``on``, ``off``, or why not although they were asked for."""

    @property
    def row_width(self) -> int:
        """Columns of ``encode``'s result: (1 + levels) * hidden."""

    @abstractmethod
    def encode(self, items: Sequence[TowerItem], *, batch: int = 0) -> torch.Tensor:
        """Rows ``[sum of tokens, (1 + levels) * hidden]`` of the items, in their order.

        Columns: main first, then each deepstack level in order. In the spec's dtype, on the
        tower's device. Raises TowerError.

        A tower of several ranks is called on all of them for each batch, with equal items; they
        all get the rows or all raise. ``batch`` is a number that must be equal, too. It raises GroupLost
        when the ranks cannot go on.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Encode a made-up image, so that the first real one is not the slow one. Raises TowerError."""


class TowerBase(VisionTower):
    """What the families share: checks, staging, the ranks' lockstep, graphs.

    A family adds ``_forward`` and ``_geometry``, and says how its MLP is named.
    """

    mlp_names: ClassVar[MlpNames]

    def __init__(
        self, spec: TowerSpec, module: Any, device: torch.device, parallel: TensorParallel | None = None
    ) -> None:
        self.spec = spec
        self.module = module
        self.device = device
        self.dtype = torch_dtype(spec.dtype)
        self._parallel = parallel
        self._graphs: BudgetGraphs | None = None
        on_cpu = device.type == "cpu"
        self._stager = None if on_cpu else PixelStager(device, self.dtype, spec.patch_width)

    @property
    def row_width(self) -> int:
        return (1 + self.spec.levels) * self.spec.hidden

    @abstractmethod
    def _forward(
        self, pixels: torch.Tensor, grid_thw: torch.Tensor, geometry: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """Main rows, then each level's: ``[tokens, hidden]`` each. ``grid_thw`` is int64 ``[grids, 3]``.

        ``geometry`` is empty, or what ``_geometry`` returned and the longest segments: then the
        grids are not looked at.
        """

    @abstractmethod
    def _geometry(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Positions and bounds of segments, made from the grids on their device, by the class's names."""

    @property
    def _longest_window(self) -> int:
        """Patches of the longest window, for families that have windows."""
        return 1

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], *, batch: int = 0) -> torch.Tensor:
        if self._parallel is None:
            return self._rows(items, self._passes(items))
        # Found out before the vote: items that are wrong are told to the other ranks.
        passes: list[Pass] = []

        def plan() -> list[tuple[int, int]]:
            passes.extend(self._passes(items))
            patches = [sum(i.pixels.shape[0] for i in items[p.start : p.stop]) for p in passes]
            return sums(len(self.module.blocks), int(self.module.config.hidden_size), patches)

        return self._parallel.run(plan, self.dtype, lambda: self._rows(items, passes), batch)

    def _passes(self, items: Sequence[TowerItem]) -> list[Pass]:
        if not items:
            raise TowerError("a batch needs at least one item")
        n_tokens = [item_tokens(self.spec, item) for item in items]
        if self._graphs is not None:
            frames = [sum(grid.t for grid in item.grids) for item in items]
            return pack(n_tokens, frames, self._graphs.budgets)
        # On a CPU each item goes alone: matrix products there sum in an order that depends on the
        # batch's size and on the threads, so that rows would differ in their last bits with the
        # company an item happens to be in. A GPU gains from the batch; a CPU hardly does.
        if self.device.type == "cpu":
            return [Pass(place, place + 1, None) for place in range(len(items))]
        return [Pass(0, len(items), None)]

    def _rows(self, items: Sequence[TowerItem], passes: Sequence[Pass]) -> torch.Tensor:
        parts = [self._encode_together(items[p.start : p.stop], p.budget) for p in passes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encode_together(self, items: Sequence[TowerItem], budget: int | None) -> torch.Tensor:
        n_tokens = sum(item_tokens(self.spec, item) for item in items)
        grids = torch.tensor([[g.t, g.h, g.w] for item in items for g in item.grids], dtype=torch.int64)
        try:
            rows = self._eager(items, grids) if budget is None else self._replay(items, grids, budget)
        except RuntimeError as failed:
            raise TowerError(
                f"the tower failed on {len(items)} items, {n_tokens} tokens: {failed}"
            ) from failed
        if tuple(rows.shape) != (n_tokens, self.row_width) or rows.dtype != self.dtype:
            raise TowerError(
                f"the tower returned {rows.dtype} {tuple(rows.shape)}, "
                f"wanted {self.dtype} {(n_tokens, self.row_width)}"
            )
        return rows

    def _eager(self, items: Sequence[TowerItem], grids: torch.Tensor) -> torch.Tensor:
        if self._stager is None:
            pixels = torch.cat([item.pixels.to(self.device, self.dtype) for item in items])
        else:
            pixels = self._stager.put([item.pixels for item in items])
        geometry: dict[str, Any] = {}
        if self._graphs is not None:  # then the attention wants the longest segment, too
            geometry = {name: values.to(self.device) for name, values in self._geometry(grids).items()}
            geometry |= self._longest(int((grids[:, 1] * grids[:, 2]).max()))
        return torch.cat(list(self._forward(pixels, grids.to(self.device), geometry)), dim=-1)

    def _replay(self, items: Sequence[TowerItem], grids: torch.Tensor, budget: int) -> torch.Tensor:
        assert self._graphs is not None
        parts = [item.pixels for item in items]
        if self._stager is None:
            pixels = torch.cat([part.to(self.dtype) for part in parts])
            self._graphs.pixels[: pixels.shape[0]].copy_(pixels)
        else:
            self._stager.put(parts, self._graphs.pixels)
        n_patches = sum(part.shape[0] for part in parts)
        return self._graphs.run(self._geometry(grids), n_patches, budget)

    def use_graphs(self, budgets: Sequence[int] = BUDGETS) -> None:
        """Run batches by budget from now on; ``warm_up`` records the graphs. Raises TowerError."""
        if self._parallel is not None:
            raise TowerError("graphs are for towers of one rank")
        use_segments(self.module)
        placeholder = torch.zeros(1, 3, dtype=torch.int64)

        def forward(inputs: Mapping[str, torch.Tensor], longest: int) -> torch.Tensor:
            geometry: dict[str, Any] = {n: v for n, v in inputs.items() if n != "pixels"}
            parts = self._forward(inputs["pixels"], placeholder, geometry | self._longest(longest))
            return torch.cat(list(parts), dim=-1)

        side = self.spec.merge_size
        self._graphs = BudgetGraphs(
            forward,
            self.device,
            self.dtype,
            self.spec.patch_width,
            side**2,
            self._geometry(torch.tensor([[1, side, side]])),
            self._longest_window,
            budgets,
        )

    def _longest(self, segment: int) -> dict[str, int]:
        return {"max_seqlen": segment, "max_window_seqlen": self._longest_window}

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._graphs is not None:
            self._graphs.capture()
        side = max(WARM_UP_SIDE, self.spec.merge_size)
        grid = Grid(1, side, side)
        pixels = torch.zeros(grid.patches, self.spec.patch_width, dtype=self.dtype)
        rows = self.encode([TowerItem(pixels, (grid,))])
        if not finite_rows(rows, [self.spec.token_count(grid)])[0]:
            raise TowerError("the tower's rows of a black image are not finite: are its weights sound?")


def torch_dtype(name: str) -> torch.dtype:
    """``bfloat16`` to ``torch.bfloat16``. Raises TowerError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TowerError(f"{name!r} is not a dtype of torch")
    return dtype


def item_tokens(spec: TowerSpec, item: TowerItem) -> int:
    """Rows the tower returns for one item. Raises TowerError when pixels and grids disagree."""
    merge = spec.merge_size
    for grid in item.grids:
        if grid.t <= 0 or grid.h <= 0 or grid.w <= 0 or grid.h % merge or grid.w % merge:
            raise TowerError(
                f"grid {grid.t}x{grid.h}x{grid.w} is not positive with sides in steps of {merge}"
            )
    wanted = (sum(grid.patches for grid in item.grids), spec.patch_width)
    if not item.grids or tuple(item.pixels.shape) != wanted:
        raise TowerError(f"pixels are {tuple(item.pixels.shape)}, {len(item.grids)} grids want {wanted}")
    if not item.pixels.is_floating_point():
        raise TowerError(f"pixels are {item.pixels.dtype}, must be floating point")
    return sum(spec.token_count(grid) for grid in item.grids)


@torch.inference_mode()
def finite_rows(rows: torch.Tensor, counts: Sequence[int]) -> list[bool]:
    """For each item of ``counts`` rows: are all its values finite?

    One reduction and one wait for the device where all are; which items are not is then found one by
    one. Smallest and largest value are NaN where any value is, and infinite where one of them is.
    """
    if sum(counts) != rows.shape[0]:
        raise TowerError(f"{sum(counts)} rows were asked about, there are {rows.shape[0]}")
    if _is_finite(rows):
        return [True] * len(counts)
    return [_is_finite(part) for part in torch.split(rows, list(counts))]


def _is_finite(rows: torch.Tensor) -> bool:
    if not rows.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all())
