"""MiniMax-M2 (MiniMax 2025): Mixtral with experts that are chosen as in DeepSeek-V3, and norms on
all of q and of k."""

from __future__ import annotations

from dataclasses import replace

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import read_experts
from infer.models.loading.config import RawConfig
from infer.models.mixtral import Mixtral

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 196608, "num_key_value_heads": 8}
# The kinds of norms, experts and layers that there are in the files' own code, or were planned.
_ONE_KIND = {
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


class MiniMaxM2(Mixtral):
    """The first rotary_dim dimensions of each head are rotated."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        for key, value in _ONE_KIND.items():
            raw.expect(key, value)
        full = [1] * raw.size("num_hidden_layers")
        raw.expect("attn_type_list", full)
        head_dim = raw.size("head_dim")
        experts = read_experts(
            raw, "num_local_experts", "intermediate_size", per_token=8, normalize=True
        )
        return DecoderConfig.read(
            raw,
            theta=5e6,
            partial=raw.size("rotary_dim", head_dim) / head_dim,
            wide_qk_norm=True,
            experts=replace(experts, sigmoid=True, correction="e_score_correction_bias"),
        )
