"""GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): layer norms, a rotary part of each
head, an MLP without a gate, and biases; attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.norm.": "gpt_neox.final_layer_norm.",
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.layers.": "gpt_neox.layers.",
    "self_attn.q_proj.": "attention.query_key_value.",
    "self_attn.o_proj.": "attention.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
    "lm_head.": "embed_out.",
}


class GPTNeoX(Decoder):
    """Attention and MLP of the same activation, or, without use_parallel_residual, one after the
    other, as in Llama."""

    names: Mapping[str, str] = _NAMES

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("attention_bias", kind=bool)
        head_dim = raw.size("hidden_size") // raw.size("num_attention_heads")
        raw.expect("head_dim", head_dim)  # there is no other
        return DecoderConfig.read(
            raw.with_values(num_key_value_heads=None),  # which is not read
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
        for spec in layers.renamed(super().weights(), self.names):
            yield self._by_part(spec) if ".qkv_proj" in spec.name else spec

    def _by_part(self, spec: WeightSpec) -> WeightSpec:
        """All queries, then all keys, then all values: in the checkpoint they are side by side for
        each head."""
        d, rows = self.config.head_dim, 3 * self.config.hidden_size
        first = spec.sources[0]
        whole = Source(first.key, (rows, *first.shape[1:]))
        parts = layers.regrouped(whole, rows // (3 * d), (d, d, d))
        return replace(spec, sources=tuple(parts))

    def ignorable(self, key: str) -> bool:
        """Older checkpoints hold the causal mask too."""
        buffers = (".attention.bias", ".attention.masked_bias")
        return super().ignorable(key) or key.endswith(buffers)
