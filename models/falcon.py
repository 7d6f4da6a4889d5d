"""Falcon (Almazrouei et al. 2023): attention and MLP side by side, layer norms, and few heads of
keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.compiler.graph import Value
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import LayerCache
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
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


class Falcon(Decoder):
    """Attention and MLP have a norm each (40B), or one together (7B, 11B)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.norms = self.norms[:1] if config.parallel else self.norms

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
        return DecoderConfig.read(
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
            parallel=raw.get("num_ln_in_parallel_attn", 1 + newer, int) == 1,
        )

    def weights(self) -> Iterator[WeightSpec]:
        """The projections of a head of keys, and of the queries that share it, are together."""
        c = self.config
        share = c.num_attention_heads // c.num_key_value_heads
        rows = (share * c.head_dim, c.head_dim, c.head_dim)
        names = _NAMES if c.parallel else _NAMES | _TWO_NORMS
        for spec in layers.renamed(super().weights(), names):
            if ".qkv_proj" in spec.name:
                first = spec.sources[0]
                whole = replace(first, shape=(spec.shape[0], *first.shape[1:]))
                parts = layers.regrouped(whole, c.num_key_value_heads, rows)
                spec = replace(spec, sources=tuple(parts))
            yield spec

    def layer(
        self, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        x = layers.norm(h, w, "input_layernorm", c)
        y = h + layers.attention(x, Scope(w, "self_attn"), c, rope, cache, window)
        if not c.parallel:
            x = layers.norm(h, w, "post_attention_layernorm", c)
        return y + layers.mlp(x, Scope(w, "mlp"), c)
