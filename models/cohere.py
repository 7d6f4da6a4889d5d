"""Command R (Cohere 2024): layer norms without a bias, and attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


def read_cohere(raw: RawConfig, theta: float, **own: Any) -> DecoderConfig:
    """The config of Command R and later; theta: of its rope where it does not say."""
    return DecoderConfig.read(
        raw.with_defaults(max_position_embeddings=8192),
        theta=theta,
        interleaved=True,
        tied=True,
        eps=1e-5,
        eps_key="layer_norm_eps",
        attention_bias=False,
        layer_norm=True,
        parallel=True,
        logits_scaling=1 / raw.factor("logit_scale", 0.0625),
        **own,
    )


class Cohere(Decoder):
    """One norm, then attention and MLP of the same activation."""

    norms = ("input_layernorm", None, None, None)

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_cohere(raw, theta=5e5)
