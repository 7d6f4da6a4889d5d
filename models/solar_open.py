"""Solar Open (Upstage 2025): GLM-4.5 with experts in every layer, and all of each head rotated."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import read_sigmoid_experts
from infer.models.glm4_moe import Glm4Moe
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_routed_experts": 128,
    "num_key_value_heads": 8,
}


class SolarOpen(Glm4Moe):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("first_k_dense_replace", 0)
        raw.expect("use_qk_norm", False)
        experts = read_sigmoid_experts(raw, dense=0, normalize=True)
        return DecoderConfig.read(
            raw.with_values(intermediate_size=experts.inner),  # there is no other width
            eps=1e-5,
            theta=1e6,
            partial=1.0,
            qkv_bias=raw.get("attention_bias", False, bool),
            experts=experts,
        )
