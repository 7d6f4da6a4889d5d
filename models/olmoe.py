"""OLMoE (Muennighoff et al. 2024): Llama with experts, and norms on all of q and of k."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig
from infer.models.olmo import read_clip


class Olmoe(MixtureOfExperts):
    """q and k are normed before they are taken apart into heads."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
        return DecoderConfig.read(
            raw,
            attention_bias=False,
            wide_qk_norm=True,
            clip_qkv=read_clip(raw),
            experts=read_experts(
                raw,
                "num_experts",
                "intermediate_size",
                per_token=8,
                normalize=raw.get("norm_topk_prob", False, bool),
            ),
        )
