"""Gemma 2 (Gemma Team 2024): norms before and after each block, soft caps on scores and logits, and
a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from infer.kernels.kv_cache import LayerCache
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers
from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig, Scope, Weights, layer_windows
from infer.models.llama import Llama
from infer.models.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}


def read_gemma(raw: RawConfig, **fields: Any) -> DecoderConfig:
    """The config of Gemma 2 and later."""
    bias = raw.get("attention_bias", False, bool)
    return DecoderConfig.read(
        raw,
        windows=layer_windows(
            raw, raw.size("sliding_window", None), pattern=raw.size("sliding_window_pattern")
        ),
        qkv_bias=bias,
        output_bias=bias,
        activation_key="hidden_activation",
        attention_scale=raw.get("query_pre_attn_scalar", kind=float) ** -0.5,
        attn_logit_softcapping=raw.get("attn_logit_softcapping", 0.0, float),
        final_logit_softcapping=raw.get("final_logit_softcapping", 0.0, float),
        **fields,
    )


class Gemma2(Llama):
    """Norm, attention, norm; norm, MLP, norm; each with a residual."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_gemma(raw.with_defaults(**_DEFAULTS))

    def weights(self) -> Iterator[WeightSpec]:
        """Checkpoints hold the weights of norms less one."""
        for spec in super().weights():
            yield replace(spec, added=1.0) if spec.name.endswith("norm") else spec

    def forward(
        self, ops: Ops, w: Weights, ropes: Sequence[Rope], cache: Sequence[LayerCache]
    ) -> Value:
        c = self.config
        eps = c.rms_norm_eps
        h = ops.embedding(w["embed_tokens"], scale=c.hidden_size**0.5)
        for i, (rope, layer_cache) in enumerate(zip(ropes, cache, strict=True)):
            layer = Scope(w, f"layers.{i}")
            x = ops.rmsnorm(h, layer["input_layernorm"], eps)
            x = layers.attention(
                ops, x, Scope(layer, "self_attn"), c, rope, layer_cache, c.windows[i]
            )
            h = h + ops.rmsnorm(x, layer["post_attention_layernorm"], eps)
            x = ops.rmsnorm(h, layer["pre_feedforward_layernorm"], eps)
            x = layers.mlp(ops, x, Scope(layer, "mlp"), c.activation)
            h = h + ops.rmsnorm(x, layer["post_feedforward_layernorm"], eps)
        h = ops.rmsnorm(ops.logits_rows(h), w["norm"], eps)
        logits = ops.linear(h, w["embed_tokens" if c.tie_word_embeddings else "lm_head"])
        cap = c.final_logit_softcapping
        return ops.softcap(logits, cap) if cap else logits
