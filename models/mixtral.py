"""Mixtral (Jiang et al. 2024): Mistral with experts in each layer, of which two are chosen."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, same_windows
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig


class Mixtral(MixtureOfExperts):
    """The weights of the experts that are chosen add up to one."""

    block = "block_sparse_moe"
    gate, up, down = "w1", "w3", "w2"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=131072,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
        )
        return DecoderConfig.read(
            raw,
            windows=same_windows(raw, raw.size("sliding_window", None)),
            theta=1e6,
            experts=read_experts(
                raw, "num_local_experts", "intermediate_size", per_token=2, normalize=True
            ),
        )
