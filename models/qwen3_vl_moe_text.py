"""Qwen3-VL with experts (Qwen team 2025), the text model: Qwen3 with experts, which are stacked."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.qwen3_moe import Qwen3Moe

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 16,
}


class Qwen3VLMoeText(Qwen3Moe):
    """The weights of the experts that are chosen add up to one."""

    fused_transposed = True

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("norm_topk_prob", True)
        return super().read_config(raw)
