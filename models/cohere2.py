"""Command R7B and Command A (Cohere Team 2025): Command R with a window in most layers, and no
positions in the others."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.cohere import Cohere, read_cohere
from infer.models.loading.config import RawConfig


class Cohere2(Cohere):
    """Every fourth layer sees all positions, and does not know them."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        window = raw.size("sliding_window", 4096)
        pattern = raw.size("sliding_window_pattern", 4)
        windows = layer_windows(raw, window, lambda layer: (layer + 1) % pattern != 0)
        rotated = [size > 0 for size in windows]
        return read_cohere(raw, theta=1e4, windows=windows, rope_layers=rotated)
