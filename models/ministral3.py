"""Ministral 3 (Mistral AI 2025): Mistral with queries that grow with their position."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.mistral import Mistral

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "type": "yarn",
    },
    "num_key_value_heads": 8,
    "sliding_window": None,
}


class Ministral3(Mistral):
    """By a step for every original_max_position_embeddings positions (Llama 4)."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw, scaling = read_position_scaling(raw.with_defaults(**_DEFAULTS))
        return super().read_config(raw).changed(position_scaling=scaling)


def read_position_scaling(raw: RawConfig) -> tuple[RawConfig, tuple[float, int]]:
    """The config with the rope alone in rope_parameters, and how queries grow."""
    rope = raw.section("rope_parameters")
    rope.get("llama_4_scaling_beta")  # there must be one
    beta = rope.factor("llama_4_scaling_beta", within=(0.0, 1.0))
    interval = rope.size("original_max_position_embeddings")
    own = {"llama_4_scaling_beta", "max_position_embeddings"}
    known = {key: value for key, value in rope.values.items() if key not in own}
    return raw.with_values(rope_parameters=known), (beta, interval)
