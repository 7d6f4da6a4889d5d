"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, same_windows
from infer.models.loading.config import RawConfig


class Mistral(Decoder):
    """Every layer sees the last sliding_window positions, or all where that is null."""

    windows = staticmethod(same_windows)

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=131072,
            num_key_value_heads=8,
            sliding_window=4096,
        )
        window = raw.size("sliding_window", None)
        return DecoderConfig.read(raw, windows=cls.windows(raw, window))
