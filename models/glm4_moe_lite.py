"""GLM-4.7-Flash (GLM team 2026): GLM-4.5's experts behind DeepSeek-V3's attention."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import read_sigmoid_experts
from infer.models.deepseek_v2 import read_latent
from infer.models.deepseek_v3 import DeepseekV3
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "max_position_embeddings": 202752,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "routed_scaling_factor": 1.8,
}


class Glm4MoeLite(DeepseekV3):
    """mlp_layer_types says which layers have experts, in older files first_k_dense_replace."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("head_dim", raw.size("qk_rope_head_dim"))  # another name for it
        experts = read_sigmoid_experts(raw, dense=1, normalize=True, typed=True)
        interleaved = raw.get("rope_interleave", True, bool)
        return read_latent(raw, experts, eps=1e-5, interleaved=interleaved)
