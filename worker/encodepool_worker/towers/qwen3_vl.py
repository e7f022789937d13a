"""Qwen3-VL: the tower with deepstack levels, through the class of ``transformers``."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from ..errors import ConfigError
from ..types import TowerSpec
from .base import TowerBase


class Qwen3VLTower(TowerBase):
    """Levels come in the order of the layers that ``deepstack_visual_indexes`` names."""

    def __init__(self, spec: TowerSpec, module: torch.nn.Module, device: torch.device) -> None:
        super().__init__(spec, device)
        self.module = module

    def _forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        out = self.module(pixels, grid_thw=grid_thw, return_dict=True)
        return [out.pooler_output, *out.deepstack_features]


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
