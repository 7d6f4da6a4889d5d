"""Mistral Small 4 (Mistral AI 2026): DeepSeek-V2 with queries that grow with their position, as in
Ministral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import read_sigmoid_experts
from infer.models.deepseek_v2 import DeepseekV2, read_latent
from infer.models.loading.config import RawConfig
from infer.models.ministral3 import read_position_scaling

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1048576,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
}


class Mistral4(DeepseekV2):
    """partial_rotary_factor is what part of a whole head is rotated."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw, scaling = read_position_scaling(raw.with_defaults(**_DEFAULTS))
        rotary, rest = raw.size("qk_rope_head_dim"), raw.size("qk_nope_head_dim")
        rope = raw.section("rope_parameters")
        rope.expect("partial_rotary_factor", rotary / (rotary + rest))
        known = rope.values | {"partial_rotary_factor": 1.0}  # read_latent means what is rotated
        experts = read_sigmoid_experts(raw, dense=0, normalize=True)
        if any(experts.layers):
            raw.expect("n_group", 1)
        return read_latent(
            raw.with_values(rope_parameters=known),
            replace(experts, sigmoid=False, correction=None),
            interleaved=raw.get("rope_interleave", True, bool),
            position_scaling=scaling,
        )
