"""GLM-4 (GLM team 2024): Llama with biases on q, k and v, and half of each head rotated."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Glm(Decoder):
    """Neighbouring dimensions are rotated together; gate and up are one tensor."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(head_dim=128, max_position_embeddings=131072, num_key_value_heads=2)
        return DecoderConfig.read(
            raw,
            eps=1.5625e-07,
            partial=0.5,
            interleaved=True,
            qkv_bias=raw.get("attention_bias", True, bool),
            fused_gate_up=True,
        )
