"""Helium (Kyutai 2025): Llama with interleaved rope."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Helium(Decoder):
    """Neighbouring dimensions are rotated together."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(head_dim=128, max_position_embeddings=4096, num_key_value_heads=20)
        return DecoderConfig.read(
            raw,
            eps=1e-8,
            theta=1e5,
            interleaved=True,
            qkv_bias=raw.get("attention_bias", False, bool),
            mlp_bias=raw.get("mlp_bias", False, bool),
        )
