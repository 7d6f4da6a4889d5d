"""Gemma 3 (Gemma Team 2025), the text model: Gemma 2 with norms of heads instead of soft caps, and
five layers with a window, which have a rope of their own, to each without."""

from __future__ import annotations

from infer.kernels.errors import UnsupportedError
from infer.models.blocks.layers import DecoderConfig
from infer.models.gemma2 import Gemma2, read_gemma
from infer.models.loading.config import RawConfig, RopeConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


class Gemma3Text(Gemma2):
    """q and k are normed head by head before they are rotated."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        head_dim = raw.size("head_dim")
        raw.expect("attn_logit_softcapping", None)  # transformers reads it and does not use it
        rope = raw.rope(head_dim, 1e6, layer_type="full_attention")
        return read_gemma(raw, qk_norm=True, rope=rope, local_rope=read_local_rope(raw, head_dim))


def read_local_rope(
    raw: RawConfig, head_dim: int, theta: float = 1e4, partial: float | None = None
) -> RopeConfig:
    """The rope of the layers with a window. Raises UnsupportedError."""
    rope = raw.rope(
        head_dim,
        theta,
        partial,
        theta_key="rope_local_base_freq",
        scaling_key=None,
        layer_type="sliding_attention",
    )
    if rope.kind in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"{raw.place}: rope type {rope.kind!r} is not implemented for sliding layers."
        )
    return rope
