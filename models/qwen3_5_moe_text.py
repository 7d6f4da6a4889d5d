"""Qwen3.5 with experts (Qwen team 2026), the text model: gated delta nets, and a mixture of experts
in every layer."""

from __future__ import annotations

from infer.models.blocks.delta_net import DEFAULTS, GatedDeltaNet
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig
from infer.models.qwen3_5_text import of_text

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = DEFAULTS | {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}


class Qwen35MoeText(GatedDeltaNet, MixtureOfExperts):
    """The weights of the experts that are chosen add up to one. The one that all tokens share is
    the only MLP, so that there is no other width than its own."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = of_text(raw).with_defaults(**_DEFAULTS)
        # Keys of Qwen3-Next, which transformers does not have here.
        raw.expect("norm_topk_prob", True)
        raw.expect("decoder_sparse_step", 1)
        raw.expect("mlp_only_layers", [])
        shared = raw.size("shared_expert_intermediate_size")
        experts = read_experts(
            raw,
            "num_experts",
            "moe_intermediate_size",
            per_token=8,
            normalize=True,
            shared_inner=shared,
        )
        return cls.read_delta(raw.with_values(intermediate_size=shared), experts=experts)
