"""EXAONE 4.0 (LG AI Research 2025): OLMo 2 with norms of heads and layers without rope."""

from __future__ import annotations

from typing import Any

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig
from infer.models.olmo2 import Olmo2


class Exaone4(Olmo2):
    """In models with a sliding window, layers that see everything know no positions."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(num_key_value_heads=32, sliding_window=4096)
        return read_exaone(raw)


def read_exaone(raw: RawConfig, **own: Any) -> DecoderConfig:
    """The config of EXAONE 4.0 and later."""
    window = raw.size("sliding_window", None)
    given = raw.values.get("layer_types") is not None  # then the pattern may be a word
    pattern = 4 if given else raw.size("sliding_window_pattern", 4)
    windows = layer_windows(raw, window, lambda layer: (layer + 1) % pattern != 0)
    rotated = [window is None or size > 0 for size in windows]
    return DecoderConfig.read(
        raw, windows=windows, rope_layers=rotated, eps=1e-5, qk_norm=True, **own
    )
