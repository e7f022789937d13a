"""The towers' attention without waiting for the device, as a CUDA graph needs it.

The class in ``transformers`` splits a batch into its images by lengths that it fetches from the device
in every layer. Here the boundaries stay on the device: one kernel takes all segments, empty ones
too, so that the same recorded work serves any batch of at most so many patches and segments.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import TowerError


class SegmentAttention(torch.nn.Module):
    """Takes the place of a layer's attention and keeps its parameters under their names."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.qkv = original.qkv
        self.proj = original.proj
        self.num_heads = int(original.num_heads)
        self.head_dim = int(original.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        max_seqlen: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``[patches, width]``; segment i is patches [cu_seqlens[i], cu_seqlens[i + 1])."""
        n_patches = hidden_states.shape[0]
        q, k, v = self.qkv(hidden_states).view(n_patches, 3, self.num_heads, self.head_dim).unbind(1)
        cos, sin = (angle.unsqueeze(-2).float() for angle in position_embeddings)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        together = _on_gpu if q.is_cuda else _on_cpu
        rows: torch.Tensor = self.proj(together(q, k, v, cu_seqlens, max_seqlen).reshape(n_patches, -1))
        return rows


def use_segments(module: torch.nn.Module) -> None:
    """Give every layer of a tower this attention."""
    blocks: Any = module.blocks
    for block in blocks:
        block.attn = SegmentAttention(block.attn)


def segments_problem() -> str | None:
    """Why this torch cannot attend by segments on a GPU; None if it can."""
    try:
        from torch.nn.attention import varlen  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None


def _on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if longest is None:
        raise TowerError("attention by segments needs the length of the longest one")
    rows = varlen_attn(q, k, v.contiguous(), bounds, bounds, longest, longest)
    assert isinstance(rows, torch.Tensor)  # a tuple only where more than the rows is asked for
    return rows


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int | None
) -> torch.Tensor:
    edges = bounds.tolist()
    out = torch.empty_like(q)
    for start, stop in pairwise(edges):
        if stop > start:
            query, key, value = (x[None, start:stop].transpose(1, 2) for x in (q, k, v))
            out[start:stop] = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)[0]
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, computed in float32 as the original does."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
