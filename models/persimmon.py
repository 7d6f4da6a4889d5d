"""Persimmon 8B (Adept 2023): GPT-NeoX with layer norms on each query and key head, attention and
MLP one after the other, and squared ReLU."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.gpt_neox import GPTNeoX
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 16384, "qk_layernorm": True}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "self_attn.q_proj.": "self_attn.query_key_value.",
    "self_attn.o_proj.": "self_attn.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
}


class Persimmon(GPTNeoX):
    """q and k are normed head by head before they are rotated."""

    names = _NAMES

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        head_dim = raw.size("hidden_size") // raw.size("num_attention_heads")
        raw.expect("head_dim", head_dim)  # there is no other
        raw = raw.with_values(num_key_value_heads=None)  # which is not read
        return DecoderConfig.read(
            raw,
            partial=0.5,
            eps=1e-5,
            eps_key="layer_norm_eps",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            layer_norm=True,
            norm_bias=True,
            qk_norm=raw.get("qk_layernorm", kind=bool),
            norm_names=("q_layernorm", "k_layernorm"),
            gated=False,
        )
