"""GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): layer norms, a rotary part of each
head, an MLP without a gate, and biases; attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Iterator

from infer.kernels.kv_cache import LayerCache
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers
from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig, Scope, Weights
from infer.models.llama import Llama
from infer.models.weights import Source, WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
}


class GPTNeoX(Llama):
    """Attention and MLP of the same activation, or, without use_parallel_residual, one after the
    other, as in Llama."""

    prefix = "gpt_neox"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("attention_bias", kind=bool)
        head_dim = raw.size("hidden_size") // raw.size("num_attention_heads")
        return DecoderConfig.read(
            raw,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            layer_norm=True,
            norm_bias=True,
            gated=False,
            eps_key="layer_norm_eps",
            rope=raw.rope(
                head_dim,
                default_partial=0.25,
                theta_key="rotary_emb_base",
                partial_key="rotary_pct",
            ),
            parallel=raw.get("use_parallel_residual", kind=bool),
        )

    def weights(self) -> Iterator[WeightSpec]:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        yield from layers.projection("embed_tokens", "gpt_neox.embed_in", c.vocab_size, hidden)
        for i in range(c.num_hidden_layers):
            name, key = f"layers.{i}", f"gpt_neox.layers.{i}"
            for norm in self.norms:
                yield from layers.norm_weights(c, f"{name}.{norm}", f"{key}.{norm}")
            yield self._qkv(f"{name}.self_attn.qkv_proj", f"{key}.attention.query_key_value.weight")
            if c.qkv_bias:
                yield self._qkv(
                    f"{name}.self_attn.qkv_proj.bias", f"{key}.attention.query_key_value.bias"
                )
            yield from layers.projection(
                f"{name}.self_attn.o_proj", f"{key}.attention.dense", hidden, hidden, c.output_bias
            )
            yield from layers.projection(
                f"{name}.mlp.up_proj", f"{key}.mlp.dense_h_to_4h", inner, hidden, bias=True
            )
            yield from layers.projection(
                f"{name}.mlp.down_proj", f"{key}.mlp.dense_4h_to_h", hidden, inner, bias=True
            )
        yield from layers.norm_weights(c, "norm", "gpt_neox.final_layer_norm")
        if not c.tie_word_embeddings:
            yield from layers.projection("lm_head", "embed_out", c.vocab_size, hidden)

    def _qkv(self, name: str, key: str) -> WeightSpec:
        """All queries, then all keys, then all values: in the checkpoint they are side by side for
        each head."""
        c, d = self.config, self.config.head_dim
        shape = (3 * c.hidden_size, c.hidden_size)[: 1 if key.endswith("bias") else 2]
        parts = [
            range(start, start + d)
            for part in range(3)
            for start in range(part * d, 3 * c.hidden_size, 3 * d)
        ]
        return WeightSpec(name, tuple(Source(key, shape, part) for part in parts))

    def ignorable(self, key: str) -> bool:
        """Older checkpoints hold the causal mask too."""
        tied = self.config.tie_word_embeddings and key == "embed_out.weight"
        buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
        return tied or key.endswith(buffers)

    def layer(
        self, ops: Ops, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        x = layers.norm(ops, h, w, "input_layernorm", c)
        y = h + layers.attention(ops, x, Scope(w, "self_attn"), c, rope, cache, window)
        x = layers.norm(ops, h if c.parallel else y, w, "post_attention_layernorm", c)
        return y + layers.mlp(ops, x, Scope(w, "mlp"), c)
