"""What the worker asks of a vision tower, and the checks that all towers share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import TowerError
from ..types import Grid, TowerSpec

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

    @property
    def row_width(self) -> int:
        """Columns of ``encode``'s result: (1 + levels) * hidden."""

    @abstractmethod
    def encode(self, items: Sequence[TowerItem]) -> torch.Tensor:
        """Rows ``[sum of tokens, (1 + levels) * hidden]`` of the items, in their order.

        Columns: main first, then each deepstack level in order. In the spec's dtype, on the
        tower's device. Raises TowerError.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Encode a made-up image, so that the first real one is not the slow one. Raises TowerError."""


class TowerBase(VisionTower):
    """The checks around one forward pass; a family adds ``_forward``."""

    def __init__(self, spec: TowerSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.dtype = torch_dtype(spec.dtype)

    @property
    def row_width(self) -> int:
        return (1 + self.spec.levels) * self.spec.hidden

    @abstractmethod
    def _forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        """Main rows, then each level's: ``[tokens, hidden]`` each. ``grid_thw`` is int64 ``[grids, 3]``."""

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> torch.Tensor:
        if not items:
            raise TowerError("a batch needs at least one item")
        for item in items:
            item_tokens(self.spec, item)
        # On a CPU each item goes alone: matrix products there sum in an order that depends on the
        # batch's size and on the threads, so that rows would differ in their last bits with the
        # company an item happens to be in. A GPU gains from the batch; a CPU hardly does.
        batches = [[item] for item in items] if self.device.type == "cpu" else [items]
        return torch.cat([self._encode_together(batch) for batch in batches])

    def _encode_together(self, items: Sequence[TowerItem]) -> torch.Tensor:
        n_tokens = sum(item_tokens(self.spec, item) for item in items)
        pixels = torch.cat([item.pixels.to(self.device, self.dtype, non_blocking=True) for item in items])
        grids = torch.tensor([[g.t, g.h, g.w] for item in items for g in item.grids], dtype=torch.int64)
        try:
            rows = torch.cat(list(self._forward(pixels, grids.to(self.device))), dim=-1)
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

    def warm_up(self) -> None:
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

    One reduction per item, and one wait for the device in all: a NaN or an infinity anywhere
    makes the largest magnitude NaN or infinite.
    """
    if sum(counts) != rows.shape[0]:
        raise TowerError(f"{sum(counts)} rows were asked about, there are {rows.shape[0]}")
    if not counts:
        return []
    flags = [
        part.abs().amax() if part.numel() else rows.new_zeros(()) for part in torch.split(rows, list(counts))
    ]
    answer: list[bool] = torch.isfinite(torch.stack(flags)).tolist()
    return answer
