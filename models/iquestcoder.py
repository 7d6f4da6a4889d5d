"""IQuest-Coder (IQuest Lab 2026): Llama, by another name."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.llama import Llama
from infer.models.loading.config import RawConfig


class IQuestCoder(Llama):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            head_dim=128,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
        )
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("clip_qkv", None)
        raw.expect("use_sliding_window", False)
        return super().read_config(raw)
