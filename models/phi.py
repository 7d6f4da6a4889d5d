"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): attention and MLP side by side, layer norms, a rotary
part of each head, an MLP without a gate, and biases, the output's included."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.cohere import Cohere
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "self_attn.o_proj.": "self_attn.dense.",
    "mlp.up_proj.": "mlp.fc1.",
    "mlp.down_proj.": "mlp.fc2.",
}


class Phi(Cohere):
    """One norm, then attention and MLP of the same activation."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(hidden_act="gelu_new")
        heads = raw.size("num_attention_heads")
        head_dim = raw.size("head_dim", raw.size("hidden_size") // heads)
        return DecoderConfig.read(
            raw,
            rope=raw.rope(head_dim, default_partial=0.5),
            eps=1e-5,
            eps_key="layer_norm_eps",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            layer_norm=True,
            norm_bias=True,
            qk_norm=raw.get("qk_layernorm", False, bool),
            norm_names=("q_layernorm", "k_layernorm"),
            gated=False,
            parallel=True,
        )

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)
