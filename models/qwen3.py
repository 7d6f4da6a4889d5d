"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.qwen2 import qwen_windows


class Qwen3(Decoder):
    """q and k are normed head by head before they are rotated."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            head_dim=128,
            max_position_embeddings=32768,
            num_key_value_heads=32,
            sliding_window=4096,
        )
        return DecoderConfig.read(
            raw, windows=qwen_windows(raw), attention_bias=False, qk_norm=True
        )
