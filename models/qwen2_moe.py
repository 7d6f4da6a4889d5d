"""Qwen1.5-MoE and Qwen2 with experts (Qwen team 2024): besides those that are chosen, one expert
that all tokens share, behind a gate."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig


class Qwen2Moe(MixtureOfExperts):
    """The attention of Qwen2; where the sliding window is used, every other layer has it."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=32768,
            num_key_value_heads=16,
            sliding_window=4096,
        )
        used = raw.get("use_sliding_window", False, bool)
        windows = layer_windows(raw, raw.size("sliding_window", 4096) if used else None)
        if raw.get("layer_types", None, list) is None:
            first_without = raw.get("max_window_layers", 28, int)
            windows = [
                window if i % 2 == 0 and i < first_without else 0
                for i, window in enumerate(windows)
            ]
        return DecoderConfig.read(
            raw,
            windows=windows,
            qkv_bias=raw.get("qkv_bias", True, bool),
            experts=read_experts(
                raw,
                "num_experts",
                "moe_intermediate_size",
                per_token=4,
                normalize=raw.get("norm_topk_prob", False, bool),
                shared_inner=raw.size("shared_expert_intermediate_size"),
                sparse=True,
            ),
        )
