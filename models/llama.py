"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024), and what has its model_type: SmolLM2,
TinyLlama, Yi, and others."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Llama(Decoder):
    """Norm, attention, norm, SwiGLU; each with a residual."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return DecoderConfig.read(
            raw, attention_bias=False, mlp_bias=raw.get("mlp_bias", False, bool)
        )
