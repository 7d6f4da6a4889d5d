"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections and LongRoPE."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, same_windows
from infer.models.loading.config import RawConfig


class Phi3(Decoder):
    """q, k and v are one tensor, gate and up another; a sliding window where the config has one."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=4096, original_max_position_embeddings=4096)
        for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
            raw.expect(bias, False)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        window = raw.size("sliding_window", None)
        return DecoderConfig.read(
            raw,
            windows=same_windows(raw, window),
            eps=1e-5,
            partial=1.0,
            fused_qkv=True,
            fused_gate_up=True,
        )
