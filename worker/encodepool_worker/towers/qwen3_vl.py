"""Qwen3-VL: the tower with deepstack levels, through the class of ``transformers``."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from ..errors import ConfigError
from .base import TowerBase
from .shards import MlpNames


class Qwen3VLTower(TowerBase):
    """Levels come in the order of the layers that ``deepstack_visual_indexes`` names."""

    mlp_names = MlpNames(into=("linear_fc1",), out_of="linear_fc2")

    def _forward(
        self, pixels: torch.Tensor, grid_thw: torch.Tensor, geometry: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        known = {name: value for name, value in geometry.items() if name != "max_window_seqlen"}
        out = self.module(pixels, grid_thw=grid_thw, return_dict=True, **known)
        return [out.pooler_output, *out.deepstack_features]

    def _geometry(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers import vision_utils

        merge = self.spec.merge_size
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=self.module.num_grid_per_side,
            mode=self.module.interpolation_mode,
            align_corners=self.module.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        return {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
        }


def build(vision: Mapping[str, Any]) -> torch.nn.Module:
    """The bare module of a ``vision_config``. Raises ConfigError."""
    # Published files say "qwen3_vl" where the class says "qwen3_vl_vision": it means the same.
    config = Qwen3VLVisionConfig(**{k: v for k, v in vision.items() if k not in ("model_type", "dtype")})
    positions = config.num_position_embeddings
    if isqrt(positions) ** 2 != positions:
        raise ConfigError([f"vision_config.num_position_embeddings is {positions}, must be a square"])
    # Splits attention by image without padding, so that a batch equals its images one by one.
    config._attn_implementation = "sdpa"
    return Qwen3VLVisionModel(config)  # type: ignore[no-any-return]
