"""GPT-2 (Radford et al. 2019), DistilGPT2 (Sanh et al. 2019): layer norms, an MLP without a gate,
and biases; positions are learned, and added to the embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# The config's names of keys -> Llama's.
_KEYS = {
    "activation_function": "hidden_act",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "self_attn.qkv_proj.": "attn.c_attn.",
    "self_attn.o_proj.": "attn.c_proj.",
    "mlp.up_proj.": "mlp.c_fc.",
    "mlp.down_proj.": "mlp.c_proj.",
}


def read_gpt2(raw: RawConfig, kv_heads: int | None = None, **own: Any) -> DecoderConfig:
    """The keys of GPT-2 and of what has its config; kv_heads: of keys, if not one for each of
    queries. Raises UnsupportedError."""
    raw = raw.with_defaults(activation_function="gelu_new", n_positions=1024)
    inner = raw.size("n_inner", 4 * raw.size("n_embd"))
    values = {ours: raw.get(theirs) for theirs, ours in _KEYS.items()}
    unread = {"head_dim": None, "rope_parameters": None, "rope_scaling": None}  # nothing is rotated
    scaled = raw.get("scale_attn_weights", True, bool)
    return DecoderConfig.read(
        raw.with_values(**values | unread, intermediate_size=inner, num_key_value_heads=kv_heads),
        rope_layers=[False] * raw.size("n_layer"),
        tied=True,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        attention_multiplier=None if scaled else 1.0,
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        gated=False,
        **own,
    )


class GPT2(Decoder):
    """The matrices of layers are transposed in the checkpoint."""

    transposed = True
    prefix = "transformer."  # which the first files have not
    names: Mapping[str, str] = _NAMES
    masks: tuple[str, ...] = (".attn.bias", ".attn.masked_bias")

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_gpt2(raw)

    def weights(self) -> Iterator[WeightSpec]:
        specs = chain(super().weights(), [self.positions()])
        for spec in layers.renamed(specs, self.names):
            matrix = spec.name.startswith("layers.") and len(spec.shape) == 2
            sources = tuple(
                replace(source, transposed=matrix and self.transposed) for source in spec.sources
            )
            bare = (replace(s, key=s.key.removeprefix(self.prefix)) for s in sources)
            yield replace(spec, sources=sources, others=tuple(bare))

    def positions(self) -> WeightSpec:
        """Their embeddings, one below the other."""
        shape = (self.config.max_position_embeddings, self.config.hidden_size)
        return layers.stacked("embed_positions", "model", {"embed_positions.weight": shape})

    def ignorable(self, key: str) -> bool:
        """Older checkpoints hold the causal mask too."""
        return super().ignorable(key) or key.endswith(self.masks)

    def embed(self, w: Weights) -> Value:
        return super().embed(w) + ops.position_embedding(w["embed_positions"])
