"""InternLM3 (Shanghai AI Laboratory 2025): Llama with other names for biases."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class InternLM3(Decoder):
    """qkv_bias is of q, k and v, bias of all other matrices of a layer."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(head_dim=128, max_position_embeddings=32768, num_key_value_heads=2)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        bias = raw.get("bias", raw.get("mlp_bias", False, bool), bool)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            qkv_bias=raw.get("qkv_bias", raw.get("attention_bias", False, bool), bool),
            output_bias=bias,
            mlp_bias=bias,
        )
