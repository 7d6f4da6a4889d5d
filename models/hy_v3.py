"""Hy3 (Tencent 2026): Qwen3 with experts, which are chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, predicts_further, read_sigmoid_experts
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "num_experts": 192,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "router_scaling_factor": 2.826,
}
# Parts of transformers' names in memory, which it writes if told to -> those in checkpoints.
_NAMES = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}


class HyV3(MixtureOfExperts):
    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("qk_norm", True)
        raw.expect("mlp_bias", False)
        experts = read_sigmoid_experts(
            raw.with_values(n_group=1, topk_group=1),  # which are not read
            dense=1,
            normalize=True,
            routed="num_experts",
            shared="num_shared_experts",
            typed=True,
        )
        if any(experts.layers):
            raw.expect("route_norm", True)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            theta=11158840.0,
            attention_bias=False,
            qk_norm=True,
            experts=replace(
                experts,
                normalize=True,
                scale=raw.factor("router_scaling_factor"),
                correction="e_score_correction_bias",
            ),
        )

    def weights(self) -> Iterator[WeightSpec]:
        for spec in super().weights():
            (own,) = layers.renamed([spec], _NAMES)
            yield replace(own, others=spec.others or spec.sources)

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or predicts_further(self.config, key)
