"""MiniCPM3 (OpenBMB 2024): multi-head latent attention, the MLP of Llama, and factors as in Granite
(muP: Yang et al. 2022)."""

from __future__ import annotations

import math

from infer.models.blocks.layers import DecoderConfig
from infer.models.deepseek_v2 import read_latent
from infer.models.loading.config import RawConfig
from infer.models.youtu import Youtu

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "dim_model_base": 256,
    "max_position_embeddings": 32768,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
}


class MiniCPM3(Youtu):
    """scale_depth is of what all layers add, dim_model_base the width at which logits are as they
    are; without one of them there is no such factor."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("mlp_bias", False)
        hidden, n_layers = raw.size("hidden_size"), raw.size("num_hidden_layers")
        depth = math.sqrt(n_layers)
        value_dim = raw.size("v_head_dim", hidden // raw.size("num_attention_heads"))
        return read_latent(
            raw.with_values(v_head_dim=value_dim),
            None,
            eps=1e-5,
            interleaved=False,
            tied=True,
            embedding_multiplier=raw.factor("scale_emb"),
            residual_multiplier=raw.factor("scale_depth", depth) / depth,
            logits_scaling=hidden / raw.size("dim_model_base", hidden),
        )
