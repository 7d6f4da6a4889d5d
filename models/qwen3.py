"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head."""

from __future__ import annotations

from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig
from infer.models.llama import Llama
from infer.models.qwen2 import qwen_windows


class Qwen3(Llama):
    """q and k are normed head by head before they are turned."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        bias = raw.get("attention_bias", False, bool)
        return DecoderConfig.read(
            raw, windows=qwen_windows(raw), qkv_bias=bias, output_bias=bias, qk_norm=True
        )
