"""Mellum 2 (JetBrains 2026): Qwen3 with experts, and a rope of their own for the layers with a
window."""

from __future__ import annotations

from dataclasses import replace

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_experts, read_sparse
from infer.models.gemma3_text import read_local_rope
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 131072, "num_key_value_heads": 4}


class Mellum(MixtureOfExperts):
    """Checkpoints have further tensors, of a layer that predicts further tokens."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias, head_dim = raw.get("attention_bias", False, bool), raw.size("head_dim")
        experts = read_experts(
            raw,
            "num_experts",
            "moe_intermediate_size",
            per_token=8,
            normalize=raw.get("norm_topk_prob", True, bool),
        )
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, raw.size("sliding_window", 1024), lambda layer: False),
            rope=raw.rope(head_dim, 5e5, 1.0, layer_type="full_attention"),
            local_rope=read_local_rope(raw, head_dim, partial=1.0),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            experts=replace(experts, layers=read_sparse(raw, 0)),
        )

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or key.startswith("mtp.")
