"""Qwen3-Next (Qwen team 2025): gated delta nets, and a mixture of many experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.state.layer_state import StateShape
from infer.models.blocks import layers
from infer.models.blocks.delta_net import DEFAULTS, GatedDeltaNet
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = DEFAULTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 512}


class Qwen3Next(GatedDeltaNet, MixtureOfExperts):
    """Checkpoints have the projections of a key head, and of the heads that share it, together; in
    GGUF files they may be apart, as in Qwen3.5."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        experts = read_experts(
            raw,
            "num_experts",
            "moe_intermediate_size",
            per_token=10,
            normalize=raw.get("norm_topk_prob", True, bool),
            shared_inner=raw.size("shared_expert_intermediate_size"),
            sparse=True,
        )
        return cls.read_delta(raw, experts=experts)

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        shape = self.config.states[layer]
        for spec in super().mixer_weights(layer, name, prefix):
            if shape is not None and spec.name.endswith(".in_proj"):
                apart = super().projections(f"{prefix}.linear_attn", shape)
                spec = replace(spec, others=tuple(apart))
            yield spec

    def projections(self, prefix: str, shape: StateShape) -> Iterator[Source]:
        values = shape.heads // shape.key_heads * shape.value_dim
        parts = (shape.key_dim, shape.key_dim, values, values)
        return self._regrouped(f"{prefix}.in_proj_qkvz.weight", shape, parts)

    def gates(self, prefix: str, shape: StateShape) -> Iterator[Source]:
        share = shape.heads // shape.key_heads
        return self._regrouped(f"{prefix}.in_proj_ba.weight", shape, (share, share))

    def _regrouped(self, key: str, shape: StateShape, parts: tuple[int, ...]) -> Iterator[Source]:
        whole = Source(key, (shape.key_heads * sum(parts), self.config.hidden_size))
        return layers.regrouped(whole, shape.key_heads, parts)
