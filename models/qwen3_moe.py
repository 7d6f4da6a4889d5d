"""Qwen3 with experts (Yang et al. 2025), as in Qwen3-30B-A3B."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, same_windows
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig


class Qwen3Moe(MixtureOfExperts):
    """The attention of Qwen3, whose sliding window, where it is used, is that of all layers."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=32768,
            num_key_value_heads=4,
            sliding_window=4096,
        )
        used = raw.get("use_sliding_window", False, bool)
        raw.expect("use_qk_norm", True)  # Qwen3-Coder says so
        return DecoderConfig.read(
            raw,
            windows=same_windows(raw, raw.size("sliding_window", 4096) if used else None),
            attention_bias=False,
            qk_norm=True,
            experts=read_experts(
                raw,
                "num_experts",
                "moe_intermediate_size",
                per_token=8,
                normalize=raw.get("norm_topk_prob", False, bool),
                sparse=True,
            ),
        )
