"""Nemotron-4 (Parmar et al. 2024) and Minitron (Muralidharan et al. 2024): Llama with layer norms,
an MLP of squared relu without a gate, and half of each head rotated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec


class Nemotron(Decoder):
    """Checkpoints hold the weights of norms less one."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(hidden_act="relu2", max_position_embeddings=4096)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            eps_key="norm_eps",
            partial=0.5,
            attention_bias=False,
            mlp_bias=raw.get("mlp_bias", False, bool),
            layer_norm=True,
            norm_bias=True,
            gated=False,
        )

    def weights(self) -> Iterator[WeightSpec]:
        for spec in super().weights():
            yield replace(spec, added=1.0) if spec.name.endswith("norm") else spec
