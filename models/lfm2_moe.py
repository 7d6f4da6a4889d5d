"""LFM2 with experts (Liquid AI 2025), as in LFM2-8B-A1B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig
from infer.models.blocks.moe import MixtureOfExperts, read_chosen
from infer.models.lfm2 import Lfm2, read_lfm2
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "max_position_embeddings": 128_000,
    "moe_intermediate_size": 1792,
    "num_attention_heads": 32,
    "num_experts": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}


class Lfm2Moe(MixtureOfExperts, Lfm2):
    """All layers but the first have experts, which are chosen as in DeepSeek-V3."""

    block = fused_block = "feed_forward"
    gate, up, down = "w1", "w3", "w2"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("layer_types", kind=list)  # there must be some
        convolves = layers.layers_with_state(raw, "conv", lambda layer: False)
        return read_lfm2(raw, convolves, experts=_experts(raw))

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """MLX calls the projections of the first layers as Llama does."""
        for spec in super().mlp_weights(layer, name, prefix):
            others = spec.others
            if not self.experts.layers[layer]:
                named = ((s, s.key.replace(".mlp.", ".feed_forward.")) for s in spec.sources)
                others = tuple(replace(source, key=key) for source, key in named)
            yield replace(spec, others=others)


def _experts(raw: RawConfig) -> ExpertsConfig:
    raw.expect("hidden_act", "silu", "swish")
    count, dense = raw.size("num_experts"), raw.get("num_dense_layers", 2, int)
    normalize = raw.get("norm_topk_prob", True, bool)
    return ExpertsConfig(
        count,
        read_chosen(raw, "num_experts_per_tok", count, 4),
        raw.size("moe_intermediate_size"),
        normalize,
        shared_inner=0,
        layers=tuple(layer >= dense for layer in range(raw.size("num_hidden_layers"))),
        scale=raw.factor("routed_scaling_factor"),
        sigmoid=True,
        epsilon=1e-6 if normalize else 0.0,
        correction="expert_bias" if raw.get("use_expert_bias", True, bool) else None,
    )
