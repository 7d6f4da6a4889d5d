"""Gemma 4 12B (Gemma Team 2026), the text model: Gemma 4 with neither inputs of layers nor
experts."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.gemma4_text import Gemma4Text
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}


class Gemma4UnifiedText(Gemma4Text):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("enable_moe_block", False)
        raw.expect("hidden_size_per_layer_input", 0)
        return super().read_config(raw)
