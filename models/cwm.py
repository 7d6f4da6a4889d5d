"""Code World Model (Meta FAIR 2025): Llama with a sliding window in three layers of four."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "sliding_window": 8192,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
_ROPE = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "rope_type": "llama3",
}


class Cwm(Decoder):
    """Without layer_types, every fourth layer from the first on sees everything."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        if not raw.section("rope_parameters").values:
            raw = raw.with_defaults(rope_scaling=_ROPE)  # rope_theta counts for no other
        windows = layer_windows(raw, raw.size("sliding_window", None), lambda layer: layer % 4 != 0)
        return DecoderConfig.read(
            raw,
            windows=windows,
            eps=1e-5,
            theta=1e6,
            mlp_bias=raw.get("mlp_bias", False, bool),
        )
