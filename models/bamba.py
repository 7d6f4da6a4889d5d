"""Bamba (IBM, Princeton, CMU and UIUC 2024): Llama with Mamba 2 in most layers; half of each head
is rotated in the others."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers, mamba2
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = mamba2.DEFAULTS | {"max_position_embeddings": 262144, "num_key_value_heads": 8}
_NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
    ".mlp.": ".feed_forward.",
}


class Bamba(mamba2.Mamba2):
    """The config says which layers have attention."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        attends = raw.items("attn_layer_indices", [], kind=int)
        mamba = [layer not in attends for layer in range(raw.size("num_hidden_layers"))]
        head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
        raw.expect("attn_rotary_emb", head_dim // 2)
        raw.expect("partial_rotary_factor", 0.5)
        return DecoderConfig.read(
            raw,
            rope_layers=[not has_state for has_state in mamba],
            partial=0.5,
            eps=1e-5,
            attention_bias=False,
            mlp_bias=raw.get("mlp_bias", False, bool),
            **mamba2.read_mamba(raw, mamba),
        )

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)
