"""Falcon (Almazrouei et al. 2023): attention and MLP side by side, layer norms, and few heads of
keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.cohere import Cohere
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "activation": "gelu",
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    "self_attn.q_proj.": "self_attention.query_key_value.",
    "self_attn.o_proj.": "self_attention.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
}
_TWO_NORMS = {"input_layernorm.": "ln_attn.", "post_attention_layernorm.": "ln_mlp."}


@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    one_norm: bool  # before attention and MLP


class Falcon(Decoder):
    """Attention and MLP have a norm each (40B), or one together (7B, 11B)."""

    config: FalconConfig

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        self.norms = Cohere.norms if config.one_norm else self.norms

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("parallel_attn", True)
        raw.expect("apply_residual_connection_post_layernorm", False)
        newer = raw.get("new_decoder_architecture", False, bool)
        raw.expect("num_ln_in_parallel_attn", None, 1, *[2] * newer)
        one = raw.get("multi_query", kind=bool) and not newer
        kv_heads = raw.size("num_kv_heads", raw.size("num_attention_heads"))
        own = {
            "num_key_value_heads": 1 if one else kv_heads,
            "intermediate_size": raw.size("ffn_hidden_size", 4 * raw.size("hidden_size")),
        }
        bias = raw.get("bias", False, bool)
        return FalconConfig.read(
            raw.with_values(**own),
            activation_key="activation",
            eps=1e-5,
            eps_key="layer_norm_epsilon",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            layer_norm=True,
            norm_bias=True,
            gated=False,
            parallel=True,
            one_norm=raw.get("num_ln_in_parallel_attn", 1 + newer, int) == 1,
        )

    def weights(self) -> Iterator[WeightSpec]:
        """The projections of a head of keys, and of the queries that share it, are together."""
        c = self.config
        share = c.num_attention_heads // c.num_key_value_heads
        rows = (share * c.head_dim, c.head_dim, c.head_dim)
        names = _NAMES if c.one_norm else _NAMES | _TWO_NORMS
        for spec in layers.renamed(super().weights(), names):
            if ".qkv_proj" in spec.name:
                first = spec.sources[0]
                whole = replace(first, shape=(spec.shape[0], *first.shape[1:]))
                parts = layers.regrouped(whole, c.num_key_value_heads, rows)
                spec = replace(spec, sources=tuple(parts))
            yield spec
