"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class SeedOss(Decoder):
    """The bias of the output projection has a key of its own."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(head_dim=128, max_position_embeddings=524288, num_key_value_heads=8)
        return DecoderConfig.read(
            raw,
            qkv_bias=raw.get("attention_bias", True, bool),
            output_bias=raw.get("attention_out_bias", False, bool),
            mlp_bias=raw.get("mlp_bias", False, bool),
        )
