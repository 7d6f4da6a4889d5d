"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig


def qwen_windows(raw: RawConfig) -> list[int]:
    """The layers from max_window_layers on have a sliding window, where it is used at all."""
    window = raw.size("sliding_window", None)
    used = raw.get("use_sliding_window", False, bool)
    first = raw.get("max_window_layers", 28, int)
    return layer_windows(raw, window if used else None, lambda layer: layer >= first)


class Qwen2(Decoder):
    """Biases on q, k and v; a sliding window in the upper layers where the config asks for it."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=32768,
            num_key_value_heads=32,
            sliding_window=4096,
        )
        return DecoderConfig.read(raw, windows=qwen_windows(raw), qkv_bias=True)
