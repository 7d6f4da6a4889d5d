"""Arcee Foundation Models (Arcee AI 2025): Llama with an MLP of squared ReLU, without a gate."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Arcee(Decoder):
    """The MLP is down(relu(up(x))^2)."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(hidden_act="relu2", max_position_embeddings=4096)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            attention_bias=False,
            mlp_bias=raw.get("mlp_bias", False, bool),
            gated=False,
        )
