"""OPT (Zhang et al. 2022), but for its 350M model: GPT-2 with relu, and names of its own."""

from __future__ import annotations

from dataclasses import replace

from infer.models.blocks.layers import DecoderConfig
from infer.models.gpt2 import GPT2
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}

# Keys that OPT does not have, whatever a config says.
_UNREAD = {"head_dim": None, "num_key_value_heads": None, "rms_norm_eps": 1e-5}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.": "model.decoder.",
    "decoder.norm.": "decoder.final_layer_norm.",
    "input_layernorm.": "self_attn_layer_norm.",
    "post_attention_layernorm.": "final_layer_norm.",
    "self_attn.o_proj.": "self_attn.out_proj.",
    "mlp.up_proj.": "fc1.",
    "mlp.down_proj.": "fc2.",
}

_BEFORE = 2  # rows of the table that belong to no position


class OPT(GPT2):
    """As GPT-2, but with matrices that are not transposed in the files."""

    transposed = False
    prefix = "model."
    names = _NAMES

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("do_layer_norm_before", True)
        raw.expect("_remove_final_layer_norm", False)
        raw.expect("word_embed_proj_dim", raw.size("hidden_size"))
        bias = raw.get("enable_bias", kind=bool)
        affine = raw.get("layer_norm_elementwise_affine", kind=bool)
        return DecoderConfig.read(
            raw.with_values(intermediate_size=raw.size("ffn_dim"), **_UNREAD),
            activation_key="activation_function",
            rope_layers=[False] * raw.size("num_hidden_layers"),
            tied=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            layer_norm=True,
            norm_weight=affine,
            norm_bias=affine,
            gated=False,
        )

    def positions(self) -> WeightSpec:
        spec = super().positions()
        (source,) = spec.sources
        rows, width = source.shape
        whole = replace(source, shape=(rows + _BEFORE, width))
        return replace(spec, sources=(whole.rows(range(_BEFORE, rows + _BEFORE)),))
