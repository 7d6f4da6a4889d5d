"""FlexOlmo (Shi et al. 2025): OLMo 2 with experts, each trained on data of its own."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig
from infer.models.olmo2 import Olmo2


class FlexOlmo(MixtureOfExperts, Olmo2):
    """Experts are chosen as in OLMoE."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=4096)
        return DecoderConfig.read(
            raw,
            theta=5e5,
            attention_bias=False,
            wide_qk_norm=True,
            experts=read_experts(
                raw,
                "num_experts",
                "intermediate_size",
                per_token=5,
                normalize=raw.get("norm_topk_prob", False, bool),
            ),
        )
