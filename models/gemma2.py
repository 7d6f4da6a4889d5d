"""Gemma 2 (Gemma Team 2024): norms before and after each block, soft caps on scores and logits, and
a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
}


def read_gemma(raw: RawConfig, **own: Any) -> DecoderConfig:
    """The config of Gemma 2 and 3."""
    pattern = raw.size("sliding_window_pattern")
    return DecoderConfig.read(
        raw,
        windows=layer_windows(
            raw, raw.size("sliding_window", None), lambda layer: (layer + 1) % pattern != 0
        ),
        attention_bias=False,
        activation_key="hidden_activation",
        embedding_multiplier=raw.size("hidden_size") ** 0.5,
        attention_multiplier=raw.factor("query_pre_attn_scalar") ** -0.5,
        attn_logit_softcapping=softcap(raw, "attn_logit_softcapping"),
        final_logit_softcapping=softcap(raw, "final_logit_softcapping"),
        **own,
    )


def softcap(raw: RawConfig, key: str) -> float:
    """A soft cap, 0 for none."""
    return 0.0 if raw.get(key, None) is None else raw.factor(key)


class Gemma2(Decoder):
    """Norm, attention, norm; norm, MLP, norm; each with a residual."""

    norms: tuple[str | None, ...] = (
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
