"""HyperCLOVA X SEED Think (NAVER Cloud 2025): the factors of Granite, and the norms of
GLM-4-0414."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.glm4 import Glm4
from infer.models.granite import read_granite
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

_NAMES = {"post_self_attn_layernorm": "post_norm1", "post_mlp_layernorm": "post_norm2"}


class HyperClovaX(Glm4):
    """Logits are multiplied, where Granite divides them."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("use_post_norm", True)
        raw.expect("residual_multiplier", 1.0)
        head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
        factors = {
            "attention_multiplier": raw.get("attention_multiplier", head_dim**-0.5, float),
            "logits_scaling": 1 / raw.factor("logits_scaling"),
        }
        bias = raw.get("mlp_bias", False, bool)
        return read_granite(raw.with_values(**factors), mlp_bias=bias)

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)
