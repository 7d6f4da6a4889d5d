"""Gated delta net (Yang et al. 2024) as Qwen has it: most layers have a short convolution and, for
each head, a matrix that the delta rule changes; the others have attention and a gate behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import LayerState, StateShape
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.blocks.mtp import QWEN, Predictor
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
DEFAULTS = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
}


class GatedDeltaNet(Decoder):
    """Checkpoints hold the weights of norms less one, but not that behind the delta rule. What they
    have besides predicts more tokens at once."""

    @classmethod
    def read_delta(cls, raw: RawConfig, **own: Any) -> DecoderConfig:
        """The config, with fields of the model's own; raw has the DEFAULTS."""
        interval = raw.size("full_attention_interval", 4)
        delta = layers.layers_with_state(
            raw, "linear_attention", lambda layer: (layer + 1) % interval > 0
        )
        raw.get("linear_conv_kernel_dim", None)  # of no layer, perhaps
        shape = _read_shape(raw) if any(delta) else None
        return DecoderConfig.read(
            raw,
            states=[shape if has_state else None for has_state in delta],
            rope_layers=[not has_state for has_state in delta],
            partial=0.25,
            attention_bias=False,
            qk_norm=True,
            gated_attention=True,
            **own,
        )

    def weights(self) -> Iterator[WeightSpec]:
        for spec in super().weights():
            less_one = spec.name.endswith("norm") and ".linear_attn." not in spec.name
            yield replace(spec, added=1.0) if less_one else spec

    @property
    def predictor(self) -> Predictor:
        return Predictor(self, QWEN, added=1.0)

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or key.startswith("mtp.")

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention or, in a layer with a state, in_proj (queries, keys, values and
        the gate behind), gates (b and a of each head), conv1d, A_log, dt_bias, norm and
        out_proj."""
        hidden, shape = self.config.hidden_size, self.config.states[layer]
        if shape is None:
            yield from super().mixer_weights(layer, name, prefix)
            return
        name, prefix = f"{name}.linear_attn", f"{prefix}.linear_attn"
        yield WeightSpec(f"{name}.in_proj", tuple(self.projections(prefix, shape)))
        yield WeightSpec(f"{name}.gates", tuple(self.gates(prefix, shape)))
        yield layers.conv_weight(f"{name}.conv1d", f"{prefix}.conv1d.weight", shape)
        for part in ("A_log", "dt_bias"):
            yield layers.stacked(f"{name}.{part}", prefix, {part: (shape.heads,)})
        yield layers.stacked(f"{name}.norm", prefix, {"norm.weight": (shape.value_dim,)})
        values = shape.heads * shape.value_dim
        yield layers.stacked(f"{name}.out_proj", prefix, {"out_proj.weight": (hidden, values)})

    def projections(self, prefix: str, shape: StateShape) -> Iterator[Source]:
        """The tensors that in_proj is made of."""
        values = shape.heads * shape.value_dim
        for part, rows in (("qkv", shape.channels), ("z", values)):
            yield Source(f"{prefix}.in_proj_{part}.weight", (rows, self.config.hidden_size))

    def gates(self, prefix: str, shape: StateShape) -> Iterator[Source]:
        """The tensors that gates is made of."""
        for part in "ba":
            yield Source(f"{prefix}.in_proj_{part}.weight", (shape.heads, self.config.hidden_size))

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        if not isinstance(cache, LayerState):
            return super().mixer(x, w, rope, cache, window)
        w, c, shape = Scope(w, "linear_attn"), self.config, cache.shape
        qkvz, gates = ops.linear(x, w["in_proj"]), ops.linear(x, w["gates"])
        qkv, z = ops.split(qkvz, shape.channels, shape.heads * shape.value_dim)
        qkv = ops.short_conv(qkv, w["conv1d"], None, cache, activation=c.mlp.activation)
        y = ops.delta_rule(qkv, gates, w["A_log"], w["dt_bias"], cache)
        y = ops.rmsnorm(y, w["norm"], c.norm.rms_norm_eps, gate=z)
        return ops.linear(y, w["out_proj"])


def _read_shape(raw: RawConfig) -> StateShape:
    """Raises UnsupportedError."""
    key_heads, heads = raw.size("linear_num_key_heads"), raw.size("linear_num_value_heads")
    key_dim, value_dim = raw.size("linear_key_head_dim"), raw.size("linear_value_head_dim")
    if heads % key_heads or key_dim % 4 or key_dim > 256 or value_dim % 4:
        raise UnsupportedError(
            f"{raw.place}: linear attention of {heads} heads, {key_heads} keys, {key_dim} "
            f"dimensions, and values of {value_dim}, is not implemented (only as many heads "
            "for each key, and multiples of 4 dimensions, up to 256 of keys)."
        )
    return StateShape(
        channels=2 * key_heads * key_dim + heads * value_dim,
        taps=layers.conv_taps(raw, "linear_conv_kernel_dim", 4),
        key_heads=key_heads,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
