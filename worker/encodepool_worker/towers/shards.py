"""Which part of a tower each rank computes, and of which tensors it therefore needs which part.

In every layer the heads are divided: queries, keys and values lie one after another in one fused
matrix, so a rank takes its heads' rows from each of the three. The MLP's middle is divided, evenly or
nearly so. Both are followed by a projection of which a rank has the columns that meet its part; the
ranks' results are summed and the bias is added to the sum. Embeddings, norms and mergers are the
same on all ranks: they are a tenth of the work and need no further sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ConfigError
from .cut import Cut
from .parallel import TensorParallel

SUMS_PER_LAYER = 2
"""After the attention's projection and after the MLP's."""


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Of one family: the linears into the MLP's middle, and the one out of it."""

    into: tuple[str, ...]
    out_of: str


class SummedLinear(torch.nn.Module):
    """A linear layer of which this rank has some columns: ``[tokens, some] -> [tokens, out]``."""

    def __init__(
        self, weight: torch.nn.Parameter, bias: torch.nn.Parameter, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = F.linear(x, self.weight)
        self._parallel.all_reduce(total)
        return total.add_(self.bias)


def check_size(size: int, heads: int) -> None:
    """Can ``size`` ranks divide the heads among them? Raises ConfigError with the sizes that can."""
    if size < 1 or heads % size:
        sizes = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            [
                f"tensor_parallel_size is {size}, but the tower has {heads} heads: "
                f"choose one of {', '.join(sizes)}"
            ]
        )


def shard(module: torch.nn.Module, names: MlpNames, parallel: TensorParallel) -> Mapping[str, Cut]:
    """Make ``module`` this rank's part. Returns the cut of each parameter that is not whole, by name.

    The parameters are new and hold nothing yet. Raises ConfigError.
    """
    blocks: Any = module.blocks
    cuts: dict[str, Cut] = {}
    for number, block in enumerate(blocks):
        heads = int(block.attn.num_heads)
        check_size(parallel.size, heads)
        head_dim = int(block.attn.head_dim)
        width = heads * head_dim
        start, stop = _share(heads, parallel)
        ranges = [(part * width + start * head_dim, part * width + stop * head_dim) for part in range(3)]
        where = f"blocks.{number}."
        cuts |= _cut_rows(block.attn.qkv, where + "attn.qkv", ranges)
        cuts |= _cut_columns(
            block.attn, "proj", where + "attn.proj", [(start * head_dim, stop * head_dim)], parallel
        )
        block.attn.num_heads = stop - start
        middle = _share(int(getattr(block.mlp, names.out_of).in_features), parallel)
        for name in names.into:
            cuts |= _cut_rows(getattr(block.mlp, name), f"{where}mlp.{name}", [middle])
        cuts |= _cut_columns(block.mlp, names.out_of, f"{where}mlp.{names.out_of}", [middle], parallel)
    return cuts


def sums(blocks: int, width: int, patches: Sequence[int]) -> list[tuple[int, int]]:
    """Shapes of all sums of a batch whose forward passes are of so many patches each."""
    return [(n, width) for n in patches for _ in range(SUMS_PER_LAYER * blocks)]


def _share(n: int, parallel: TensorParallel) -> tuple[int, int]:
    """This rank's part of [0, n); parts differ by at most one."""
    return n * parallel.rank // parallel.size, n * (parallel.rank + 1) // parallel.size


def _cut_rows(linear: Any, name: str, ranges: Sequence[tuple[int, int]]) -> dict[str, Cut]:
    cuts = {}
    for kind in ("weight", "bias"):
        cut = Cut(tuple(getattr(linear, kind).shape), 0, tuple(ranges))
        setattr(linear, kind, _empty(cut))
        cuts[f"{name}.{kind}"] = cut
    linear.out_features = cut.shape[0]
    return cuts


def _cut_columns(
    parent: Any, attribute: str, name: str, ranges: Sequence[tuple[int, int]], parallel: TensorParallel
) -> dict[str, Cut]:
    linear = getattr(parent, attribute)
    cut = Cut(tuple(linear.weight.shape), 1, tuple(ranges))
    setattr(parent, attribute, SummedLinear(_empty(cut), linear.bias, parallel))
    return {f"{name}.weight": cut}


def _empty(cut: Cut) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(cut.shape), requires_grad=False)
