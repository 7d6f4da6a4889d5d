"""Mamba 2 (Dao & Gu 2024): a layer that has a short convolution and, for each head, a matrix that
decays as its input says, in place of attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import LayerState, StateShape
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.weights import Source, WeightSpec

# The kinds of layers by their names in configs, before and since transformers 5.
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}

# Defaults of transformers for keys that a config leaves out.
DEFAULTS = {
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}


class Mamba2(Decoder):
    """Some layers have it in place of attention."""

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention or, in a layer with a state, of Mamba."""
        shape = self.config.states[layer]
        if shape is None:
            return super().mixer_weights(layer, name, prefix)
        return weights(self.config, shape, f"{name}.mamba", f"{prefix}.mamba")

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        if not isinstance(cache, LayerState):
            return super().mixer(x, w, rope, cache, window)
        return mamba2(x, Scope(w, "mamba"), self.config, cache)


def read_mamba(raw: RawConfig, mamba: Sequence[bool]) -> dict[str, Any]:
    """The fields of the config that say what Mamba layers are; mamba: which layers. raw has the
    DEFAULTS. Raises UnsupportedError."""
    if not any(mamba):
        return {}
    raw.expect("hidden_act", "silu", "swish")
    heads, inner = raw.size("mamba_n_heads"), raw.size("mamba_expand") * raw.size("hidden_size")
    given = raw.values.get("mamba_d_head")
    head_dim = raw.size("mamba_d_head") if given not in (None, "auto") else inner // heads
    if heads * head_dim != inner:
        raise UnsupportedError(
            f"{raw.place}: {heads} Mamba heads of {head_dim} are not {inner} values (mamba_expand "
            "times hidden_size), which is not implemented."
        )
    state = read_shape(
        raw,
        heads=heads,
        head_dim=head_dim,
        groups=raw.size("mamba_n_groups"),
        state_dim=raw.size("mamba_d_state"),
        taps="mamba_d_conv",
    )
    return {
        "states": [state if has_state else None for has_state in mamba],
        "conv_bias": raw.get("mamba_conv_bias", True, bool),
        "mamba_proj_bias": raw.get("mamba_proj_bias", False, bool),
        "time_step_limit": read_time_step_limit(raw),
    }


def read_shape(
    raw: RawConfig, *, heads: int, head_dim: int, groups: int, state_dim: int, taps: str
) -> StateShape:
    """The state of a layer with so many heads; those of a group share B and C. taps: what the
    config calls them. Raises UnsupportedError."""
    if heads % groups or head_dim % 4 or state_dim % 4 or state_dim > 256:
        raise UnsupportedError(
            f"{raw.place}: Mamba layers of {heads} heads of {head_dim} in {groups} groups, with "
            f"{state_dim} states, are not implemented (only equal groups, a multiple of 4 states "
            "up to 256, and heads of a multiple of 4)."
        )
    return StateShape(
        channels=heads * head_dim + 2 * groups * state_dim,
        taps=layers.conv_taps(raw, taps, 4),
        key_heads=groups,
        heads=heads,
        key_dim=state_dim,
        value_dim=head_dim,
    )


_LONGEST = 1e6  # of a time step: beyond it there is no limit


def read_time_step_limit(raw: RawConfig) -> tuple[float, float]:
    """The least and the largest time step; transformers 5 has its own way of saying infinity.
    Raises UnsupportedError."""
    found = raw.get("time_step_limit", [0.0, math.inf], list)
    limit = [math.inf if value == {"__float__": "Infinity"} else value for value in found]
    numbers = all(type(value) in (int, float) for value in limit)
    if len(limit) != 2 or not numbers or not 0 <= limit[0] <= min(limit[1], _LONGEST):
        raise UnsupportedError(
            f"{raw.place}: time_step_limit must be the least and the largest time step; it is "
            f"{shown(found)}."
        )
    return float(limit[0]), float(limit[1]) if limit[1] <= _LONGEST else math.inf


def read_kinds(
    raw: RawConfig, found: Sequence[str], kinds: Mapping[str, str], key: str
) -> list[str]:
    """Returns the kind of each layer. found: the name of each layer's kind in the config, at `key`;
    kinds: the kinds by these names. Raises UnsupportedError for other names or another count."""
    n_layers = raw.size("num_hidden_layers")
    if len(found) != n_layers or any(name not in kinds for name in found):
        raise UnsupportedError(
            f"{raw.place}: {key} must name {', '.join(kinds)} for each of {n_layers} layers; it is "
            f"{shown(found)}."
        )
    return [kinds[name] for name in found]


def weights(
    config: DecoderConfig, shape: StateShape, name: str, prefix: str
) -> Iterator[WeightSpec]:
    """in_proj (the gate z, then x, B and C), gates (the time step of each head), conv1d, heads
    (A_log, dt_bias and D), norm and out_proj, with biases where the config has them."""
    hidden, values = config.hidden_size, shape.heads * shape.value_dim
    first = values + shape.channels
    rows = first + shape.heads
    sizes: dict[str, tuple[int, ...]] = {"weight": (rows, hidden)}
    if config.mamba.mamba_proj_bias:
        sizes["bias"] = (rows,)
    for part, size in sizes.items():
        whole = Source(f"{prefix}.in_proj.{part}", size)
        suffix = ".bias" if part == "bias" else ""
        yield WeightSpec(f"{name}.in_proj{suffix}", (whole.rows(range(first)),))
        yield WeightSpec(f"{name}.gates{suffix}", (whole.rows(range(first, rows)),))
    yield layers.conv_weight(f"{name}.conv1d", f"{prefix}.conv1d.weight", shape)
    if config.mamba.conv_bias:
        yield layers.stacked(f"{name}.conv1d.bias", prefix, {"conv1d.bias": (shape.channels,)})
    own = dict.fromkeys(("A_log", "dt_bias", "D"), (shape.heads,))
    yield layers.stacked(f"{name}.heads", prefix, own)
    yield layers.stacked(f"{name}.norm", prefix, {"norm.weight": (values,)})
    yield layers.stacked(f"{name}.out_proj", prefix, {"out_proj.weight": (hidden, values)})
    if config.mamba.mamba_proj_bias:
        yield layers.stacked(f"{name}.out_proj.bias", prefix, {"out_proj.bias": (hidden,)})


def mamba2(
    x: Value,
    w: Weights,
    config: DecoderConfig,
    state: LayerState,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Value:
    """Returns the layer's output for x [rows, hidden_size]. scales: factors on the projection of x
    and on the time steps."""
    shape, (scale, dt_scale) = state.shape, scales
    zxbc = ops.linear(x, w["in_proj"], w.get("in_proj.bias"), scale)
    dt = ops.linear(x, w["gates"], w.get("gates.bias"), dt_scale)
    z, xbc = ops.split(zxbc, shape.heads * shape.value_dim, shape.channels)
    xbc = ops.short_conv(xbc, w["conv1d"], w.get("conv1d.bias"), state, activation="silu")
    y = ops.ssm_scan(xbc, z, dt, w["heads"], state, config.mamba.time_step_limit)
    if "norm" in w:
        y = ops.rmsnorm(y, w["norm"], config.norm.rms_norm_eps, groups=shape.key_heads)
    return ops.linear(y, w["out_proj"], w.get("out_proj.bias"), config.residual_multiplier)
