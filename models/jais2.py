"""Jais 2 (Inception, MBZUAI and Cerebras 2025): Llama with layer norms, an MLP of squared relu
without a gate, and biases."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Jais2(Decoder):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(hidden_act="relu2", max_position_embeddings=8192)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            eps_key="layer_norm_eps",
            attention_bias=True,
            mlp_bias=raw.get("mlp_bias", True, bool),
            layer_norm=True,
            norm_bias=True,
            gated=False,
        )
