"""LFM2 (Liquid AI 2025): most layers have a short convolution between two gates where others have
attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import LayerState, StateShape
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 128_000,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}

_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "model.embedding_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "self_attn.o_proj": "self_attn.out_proj",
}


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    conv_bias: bool  # of the convolution, and of the projections around it


class Lfm2(Decoder):
    """The attention of Qwen3, in some layers."""

    config: Lfm2Config

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = with_older(raw.with_defaults(**_DEFAULTS), "block_ff_dim", "intermediate_size")
        attends = raw.items("full_attn_idxs", None, kind=int)
        convolves = layers.layers_with_state(
            raw, "conv", lambda layer: attends is not None and layer not in attends
        )
        return replace(read_lfm2(raw, convolves), intermediate_size=_inner(raw))

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention, or in_proj, conv and out_proj, with biases where the config has
        them."""
        c, hidden = self.config, self.config.hidden_size
        shape = c.states[layer]
        if shape is None:
            yield from super().mixer_weights(layer, name, prefix)
            return
        name, prefix = f"{name}.conv", f"{prefix}.conv"
        yield layers.stacked(f"{name}.in_proj", prefix, {"in_proj.weight": (3 * hidden, hidden)})
        yield layers.conv_weight(f"{name}.conv", f"{prefix}.conv.weight", shape)
        yield layers.stacked(f"{name}.out_proj", prefix, {"out_proj.weight": (hidden, hidden)})
        if c.conv_bias:
            for part, rows in (("in_proj", 3 * hidden), ("conv", hidden), ("out_proj", hidden)):
                yield layers.stacked(f"{name}.{part}.bias", prefix, {f"{part}.bias": (rows,)})

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        if not isinstance(cache, LayerState):
            return super().mixer(x, w, rope, cache, window)
        w = Scope(w, "conv")
        x = ops.linear(x, w["in_proj"], w.get("in_proj.bias"))
        y = ops.short_conv(x, w["conv"], w.get("conv.bias"), cache, gated=True)
        return ops.linear(y, w["out_proj"], w.get("out_proj.bias"))


def with_older(raw: RawConfig, old: str, new: str) -> RawConfig:
    """Returns the config with the value of an old key under its new name, even if both are
    there."""
    return raw.with_values(**{new: raw.values[old]}) if old in raw.values else raw


def read_lfm2(raw: RawConfig, convolves: Sequence[bool], **own: Any) -> DecoderConfig:
    """The keys that all of them have. convolves: which layers do. Raises UnsupportedError."""
    raw = with_older(raw, "tie_embedding", "tie_word_embeddings")
    raw = raw.with_values(hidden_act="silu")  # whatever a config says
    shape = StateShape(raw.size("hidden_size"), layers.conv_taps(raw, "conv_L_cache", 3))
    return Lfm2Config.read(
        raw,
        states=[shape if conv else None for conv in convolves],
        rope_layers=[not conv for conv in convolves],
        qk_norm=True,
        norm_names=("q_layernorm", "k_layernorm"),
        conv_bias=raw.get("conv_bias", False, bool),
        eps=1e-5,
        eps_key="norm_eps",
        theta=1e6,
        tied=True,
        **own,
    )


def _inner(raw: RawConfig) -> int:
    """The width of the MLP: two thirds of what the config says, times a factor, rounded up."""
    inner = raw.size("intermediate_size")
    if not raw.get("block_auto_adjust_ff_dim", True, bool):
        return inner
    inner = int(2 * inner / 3)
    if raw.values.get("block_ffn_dim_multiplier", 1.0) is not None:
        multiple = raw.size("block_multiple_of", 256)
        inner = max(1, int(raw.factor("block_ffn_dim_multiplier") * inner))
        inner = -(-inner // multiple) * multiple
    return inner
