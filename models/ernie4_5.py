"""ERNIE 4.5 (Baidu 2025), the dense models: Llama with interleaved rope."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Ernie45(Decoder):
    """Neighbouring dimensions are rotated together."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(head_dim=128, max_position_embeddings=131072, num_key_value_heads=2)
        bias = raw.get("use_bias", False, bool)
        return DecoderConfig.read(
            raw,
            tied=True,
            eps=1e-5,
            theta=5e5,
            interleaved=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )
