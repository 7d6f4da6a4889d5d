"""Command R (Cohere 2024): layer norms without a bias, and attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from infer.kernels.compiler.graph import Value
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import LayerCache
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig


def read_cohere(raw: RawConfig, theta: float, **own: Any) -> DecoderConfig:
    """The config of Command R and later; theta: of its rope where it does not say."""
    bias = raw.get("attention_bias", False, bool)
    return DecoderConfig.read(
        raw.with_defaults(max_position_embeddings=8192),
        theta=theta,
        interleaved=True,
        tied=True,
        eps=1e-5,
        eps_key="layer_norm_eps",
        qkv_bias=bias,
        output_bias=bias,
        layer_norm=True,
        logits_scaling=1 / raw.factor("logit_scale", 0.0625),
        **own,
    )


class Cohere(Decoder):
    """One norm, then attention and MLP of the same activation."""

    norms = ("input_layernorm",)

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_cohere(raw, theta=5e5)

    def layer(
        self, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        x = layers.norm(h, w, "input_layernorm", c)
        h = h + layers.attention(x, Scope(w, "self_attn"), c, rope, cache, window)
        return h + layers.mlp(x, Scope(w, "mlp"), c)
