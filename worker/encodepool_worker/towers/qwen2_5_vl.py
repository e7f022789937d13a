"""Qwen2.5-VL: window attention, no deepstack, through the class of ``transformers``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from .base import TowerBase
from .shards import MlpNames

_PUBLISHED = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
"""Two names in the published files, and what the class calls them."""


class Qwen25VLTower(TowerBase):
    """Reorders patches into windows and the rows back again."""

    mlp_names = MlpNames(into=("gate_proj", "up_proj"), out_of="down_proj")

    def _forward(
        self, pixels: torch.Tensor, grid_thw: torch.Tensor, geometry: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        out = self.module(pixels, grid_thw=grid_thw, return_dict=True, **geometry)
        return [out.pooler_output]

    def _geometry(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers import vision_utils

        config, merge = self.module.config, self.spec.merge_size
        window_index, window_bounds = vision_utils.get_vision_window_index(
            grid_thw, spatial_merge_size=merge, window_size=config.window_size, patch_size=config.patch_size
        )
        return {
            "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
            "window_index": window_index,
            "cu_window_seqlens": window_bounds,
        }

    @property
    def _longest_window(self) -> int:
        config, merge = self.module.config, self.spec.merge_size
        return int(config.window_size // merge // config.patch_size * merge) ** 2


def build(vision: Mapping[str, Any]) -> torch.nn.Module:
    """The bare module of a ``vision_config``."""
    known = {k: v for k, v in vision.items() if k not in ("model_type", "dtype", *_PUBLISHED)}
    for theirs, ours in _PUBLISHED.items():
        if ours not in known and theirs in vision:
            known[ours] = vision[theirs]
    config = Qwen2_5_VLVisionConfig(**known)
    config._attn_implementation = "sdpa"
    return Qwen2_5_VisionTransformerPretrainedModel(config)  # type: ignore[no-any-return]
