"""ERNIE 4.5 with experts (Baidu 2025), as in ERNIE-4.5-21B-A3B."""

from __future__ import annotations

from dataclasses import replace

from infer.models.blocks.layers import DecoderConfig, ExpertsConfig
from infer.models.blocks.moe import MixtureOfExperts, no_experts, read_chosen
from infer.models.ernie4_5 import Ernie45
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec


class Ernie45Moe(MixtureOfExperts):
    """Experts are chosen by their part of the softmax and a correction; others serve all tokens.
    Where there are biases, the chosen ones have none, and the head has, even if it is tied."""

    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            head_dim=None,
            max_position_embeddings=131072,
            num_key_value_heads=4,
        )
        experts = _experts(raw)
        config = Ernie45.read_config(raw)
        return replace(config, experts=experts, head_bias=config.mlp.mlp_bias)

    def correction_weight(self, name: str, key: str) -> WeightSpec:
        return WeightSpec(name, (Source(key, (1, self.experts.count)).values(),))

    def ignorable(self, key: str) -> bool:
        """Layers that predict further tokens."""
        return super().ignorable(key) or "mtp" in key


def _experts(raw: RawConfig) -> ExpertsConfig:
    raw.expect("hidden_act", "silu", "swish")
    n_layers = raw.size("num_hidden_layers")
    first, last = raw.get("moe_layer_start_index", 1, int), raw.get("moe_layer_end_index", -1, int)
    step, last = raw.size("moe_layer_interval", 1), n_layers - 1 if last == -1 else last
    having = tuple((i + 1) % step == 0 and first <= i <= last for i in range(n_layers))
    if not any(having):
        return no_experts(raw, having)
    raw.expect("moe_norm_min", 1e-12)
    count, inner = raw.size("moe_num_experts", 64), raw.size("moe_intermediate_size")
    shared = raw.size("moe_num_shared_experts", 2, least=0)
    return ExpertsConfig(
        count,
        read_chosen(raw, "moe_k", count, 6),
        inner,
        normalize=True,
        shared_inner=shared * inner,
        layers=having,
        correction="moe_statics.e_score_correction_bias",
        gated=False,
    )
