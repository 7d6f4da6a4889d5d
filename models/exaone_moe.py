"""K-EXAONE (LG AI Research 2025): the attention of EXAONE 4.0, behind its norm as in Llama, and
experts, which are chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, read_sigmoid_experts
from infer.models.exaone4 import read_exaone
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "sliding_window": 4096,
    "num_key_value_heads": 32,
}


class ExaoneMoe(MixtureOfExperts):
    """Checkpoints have further tensors, of a layer that predicts further tokens."""

    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("scoring_func", "sigmoid")
        raw.expect("topk_method", "noaux_tc")
        experts = read_sigmoid_experts(
            raw,
            dense=1,
            normalize=True,
            routed="num_experts",
            shared="num_shared_experts",
            typed=True,
        )
        return read_exaone(raw, experts=experts)

    def weights(self) -> Iterator[WeightSpec]:
        names = {".gate.e_score_correction_bias": ".e_score_correction_bias"}
        return layers.renamed(super().weights(), names)

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or key.startswith("mtp.")
