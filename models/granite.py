"""Granite 3 (Granite team, IBM 2024): Llama with factors, as in muP (Yang et al. 2022)."""

from __future__ import annotations

from typing import Any

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


def read_granite(raw: RawConfig, **own: Any) -> DecoderConfig:
    """The config of Granite 3, with and without experts."""
    return DecoderConfig.read(
        raw,
        attention_bias=False,
        embedding_multiplier=raw.factor("embedding_multiplier"),
        attention_multiplier=raw.factor("attention_multiplier"),
        residual_multiplier=raw.factor("residual_multiplier"),
        logits_scaling=raw.factor("logits_scaling"),
        **own,
    )


class Granite(Decoder):
    """Embeddings, attention scores and what a layer adds are multiplied, logits divided."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_granite(raw, mlp_bias=raw.get("mlp_bias", False, bool))
