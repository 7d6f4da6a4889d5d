"""Gemma (Gemma Team 2024): Llama with scaled embeddings and a gated MLP of gelu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
}


class Gemma(Decoder):
    """Checkpoints hold the weights of norms less one."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        config = DecoderConfig.read(
            raw,
            attention_bias=False,
            embedding_multiplier=raw.size("hidden_size") ** 0.5,
        )
        # The first files say gelu, and mean what its authors call so.
        return config.changed(activation="gelu_tanh") if config.mlp.activation == "gelu" else config

    def weights(self) -> Iterator[WeightSpec]:
        for spec in super().weights():
            yield replace(spec, added=1.0) if spec.name.endswith("norm") else spec
