"""Qwen2.5-VL: window attention, no deepstack, through the class of ``transformers``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from ..types import TowerSpec
from .base import TowerBase

_PUBLISHED = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
"""Two names in the published files, and what the class calls them."""


class Qwen25VLTower(TowerBase):
    """Reorders patches into windows and the rows back again."""

    def __init__(self, spec: TowerSpec, module: torch.nn.Module, device: torch.device) -> None:
        super().__init__(spec, device)
        self.module = module

    def _forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        out = self.module(pixels, grid_thw=grid_thw, return_dict=True)
        return [out.pooler_output]


def build(vision: Mapping[str, Any]) -> torch.nn.Module:
    """The bare module of a ``vision_config``."""
    known = {k: v for k, v in vision.items() if k not in ("model_type", "dtype", *_PUBLISHED)}
    for theirs, ours in _PUBLISHED.items():
        if ours not in known and theirs in vision:
            known[ours] = vision[theirs]
    config = Qwen2_5_VLVisionConfig(**known)
    config._attn_implementation = "sdpa"
    return Qwen2_5_VisionTransformerPretrainedModel(config)  # type: ignore[no-any-return]
