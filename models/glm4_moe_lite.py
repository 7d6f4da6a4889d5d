"""GLM-4.7-Flash (GLM team 2026): GLM-4.5's experts behind DeepSeek-V3's attention."""

from __future__ import annotations

from infer.models.config import RawConfig
from infer.models.deepseek_v2 import read_latent
from infer.models.deepseek_v3 import DeepseekV3
from infer.models.layers import DecoderConfig
from infer.models.moe import read_sigmoid_experts


class Glm4MoeLite(DeepseekV3):
    """mlp_layer_types says which layers have experts, in older files first_k_dense_replace."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        experts = read_sigmoid_experts(raw, dense=1, normalize=True)
        interleaved = raw.get("rope_interleave", True, bool)
        return read_latent(raw, experts, eps=1e-5, interleaved=interleaved)
