"""A part of a tensor: some ranges along one dimension."""

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor of shape ``whole``: half-open ranges along dimension ``dim``, one after another."""

    whole: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.whole[: self.dim], length, *self.whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, in memory of its own."""
        return torch.cat(
            [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def runs(self) -> list[tuple[int, int]]:
        """(first element, elements) of each stretch that lies together in the whole, in the part's order."""
        inner = prod(self.whole[self.dim + 1 :])
        outer = prod(self.whole[: self.dim])
        step = self.whole[self.dim] * inner
        return [
            (row * step + start * inner, (stop - start) * inner)
            for row in range(outer)
            for start, stop in self.ranges
            if stop > start
        ]
