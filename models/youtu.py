"""Youtu-LLM (Tencent 2025): DeepSeek-V3's attention, and the MLP of Llama."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.deepseek_v2 import DeepseekV2, read_latent
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec


class Youtu(DeepseekV2):
    """No layer has experts."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=131072,
            num_key_value_heads=16,
            q_lora_rank=1536,
        )
        raw.expect("mlp_bias", False)
        interleaved = raw.get("rope_interleave", True, bool)
        return read_latent(raw, None, interleaved=interleaved, tied=True)

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        return layers.mlp_weights(self.config, name, f"{prefix}.mlp")
