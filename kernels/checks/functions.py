"""The kernels by hand: numpy arrays in, numpy arrays out, one function for each kernel.

    >>> from infer.kernels import Device, functions
    >>> with Device.open() as device:
    ...     y = functions.rmsnorm(device, x, weight, eps=1e-6)
    ...     seconds = functions.profile(functions.rmsnorm, device, x, weight, eps=1e-6)

Every function traces its op and lowers it as a model's forward is lowered, so what runs is what the
engine runs. Arrays of activations are [rows, width], of any float type; results are float32.
Arguments that do not fit raise ShaderError or ValueError. The functions allocate, copy and wait, so
they are for trying and testing: `profile` says what a kernel itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Array, Codes, from_rows, to_gpu, to_rows
from infer.kernels.checks.forward import (
    Floats,
    Forward,
    Ids,
    Options,
    scoped_function,
    submit,
    unwritten,
)
from infer.kernels.compiler.graph import Value
from infer.kernels.compiler.target import MAX_VEC_ROWS
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.shader import Value as ParamValue
from infer.kernels.gpu.shader import render_text
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import KVCache, KVShape, from_kv, to_kv
from infer.kernels.state.layer_state import LayerState, StateShape
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.kernels.state.step import SAMPLING, pack_step

__all__ = [
    "activation",
    "attention",
    "attention_scores",
    "attention_tiled",
    "clip",
    "delta_rule",
    "elementwise_add",
    "elementwise_mul",
    "embedding",
    "expert_down",
    "expert_gate_up",
    "gated_rmsnorm",
    "head_linear",
    "kv_write",
    "latent_write",
    "layernorm",
    "matmul",
    "matmul_vec",
    "position_embedding",
    "position_scale",
    "profile",
    "rmsnorm",
    "rope",
    "rope_attention",
    "rope_kv_write",
    "rope_table",
    "route",
    "sample",
    "scale",
    "short_conv",
    "sigmoid_gate",
    "softcap",
    "softmax",
    "ssm_scan",
    "take_rows",
    "validate",
    "weighted_sum",
    "xielu",
]


def _few(rows: int, other: str) -> None:
    if rows > MAX_VEC_ROWS:
        raise ShaderError(f"this kernel takes 1 to {MAX_VEC_ROWS} rows, not {rows}: use {other}")


def profile(
    function: Callable[..., Any], device: Device, *args: Any, **kwargs: Any
) -> dict[str, float]:
    """The seconds that each kernel takes in a call of one of these functions, by its label.

    Raises DeviceError where the adapter has no timestamps.
    """
    timings: dict[str, float] = {}
    function(device, *args, timings=timings, **kwargs)
    return timings


def validate(
    wgsl: str, device: Device | None = None, *, name: str = "shader", **params: ParamValue
) -> list[str]:
    """The preprocessor's and the compiler's messages about WGSL text, `name:line:column: message`;
    none if it is valid. params: those that the text declares. device: by default the best there is.
    """
    try:
        shader = render_text(wgsl, name, **params)
    except ShaderError as error:
        return [str(error)]
    if device is not None:
        return device.validate(shader, name)
    with Device.open() as own:
        return own.validate(shader, name)


# Embedding, norms, projections, activations


@scoped_function
def embedding(
    device: Device,
    ids: Ids,
    weight: Array | Codes,
    *,
    dtype: str = "f32",
    scale: float = 1.0,
    **options: Unpack[Options],
) -> Floats:
    """ids [rows] -> scale * weight[ids], [rows, width]; the weight is stored as `dtype`."""
    forward = Forward(device, len(ids), **options)
    output = ops.embedding(to_gpu(device, weight, dtype), scale)
    return forward.run(output, tokens=ids)


@scoped_function
def position_embedding(
    device: Device,
    weight: Array | Codes,
    rows: int,
    *,
    dtype: str = "f32",
    position: int = 0,
    **options: Unpack[Options],
) -> Floats:
    """weight[position : position + rows], [rows, width]; the weight is stored as `dtype`."""
    forward = Forward(device, rows, **options)
    output = ops.position_embedding(to_gpu(device, weight, dtype))
    return forward.run(output, position=position)


@scoped_function
def rmsnorm(
    device: Device,
    x: Array,
    weight: Array,
    *,
    eps: float,
    groups: int = 1,
    **options: Unpack[Options],
) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over each part of x as wide as the weight, or over each of
    `groups` equal parts of that."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.rmsnorm(forward.input(x), to_gpu(device, weight), eps, groups))


@scoped_function
def gated_rmsnorm(
    device: Device, x: Array, gate: Array, weight: Array, *, eps: float, **options: Unpack[Options]
) -> Floats:
    """rmsnorm(x) * silu(gate), both [rows, n * width]; weight [width]."""
    forward = Forward(device, len(x), **options)
    inputs = forward.input(x), forward.input(gate)
    return forward.run(ops.rmsnorm(inputs[0], to_gpu(device, weight), eps, gate=inputs[1]))


@scoped_function
def layernorm(
    device: Device,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float,
    groups: int = 1,
    **options: Unpack[Options],
) -> Floats:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias over such parts as
    `rmsnorm`."""
    forward = Forward(device, len(x), **options)
    bias_gpu = None if bias is None else to_gpu(device, bias)
    weight_gpu = to_gpu(device, weight)
    value = ops.layernorm(forward.input(x), weight_gpu, bias_gpu, eps, groups)
    return forward.run(value)


@scoped_function
def activation(
    device: Device, x: Array, function: str, *, gated: bool = False, **options: Unpack[Options]
) -> Floats:
    """A function of `ops.activation`; gated: x is [rows, 2 n], and the function of its left
    half is multiplied by its right half."""
    forward = Forward(device, len(x), **options)
    value = forward.input(x)
    if not gated:
        return forward.run(ops.activation(value, function))
    gate, up = ops.split(value, value.width // 2, value.width // 2)
    return forward.run(ops.activation(gate, function) * up)


@scoped_function
def softcap(device: Device, x: Array, cap: float, **options: Unpack[Options]) -> Floats:
    """cap * tanh(x / cap)."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.softcap(forward.input(x), cap))


@scoped_function
def clip(device: Device, x: Array, limit: float, **options: Unpack[Options]) -> Floats:
    """x, no further from zero than limit."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.clip(forward.input(x), limit))


@scoped_function
def xielu(device: Device, x: Array, shape: Array, **options: Unpack[Options]) -> Floats:
    """xIELU of each value; shape [4]: alpha_p, alpha_n, beta, eps."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.xielu(forward.input(x), to_gpu(device, shape)))


@scoped_function
def scale(device: Device, x: Array, factor: float, **options: Unpack[Options]) -> Floats:
    """x times a factor that lies on the GPU."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.scale(forward.input(x), to_gpu(device, np.array([factor]))))


@scoped_function
def position_scale(
    device: Device,
    x: Array,
    beta: float,
    interval: int,
    *,
    position: int = 0,
    **options: Unpack[Options],
) -> Floats:
    """x times 1 + beta log(1 + floor(position / interval)); row i is at position + i."""
    forward = Forward(device, len(x), **options)
    value = ops.position_scale(forward.input(x), beta, interval)
    return forward.run(value, position=position)


@scoped_function
def elementwise_add(device: Device, a: Array, b: Array, **options: Unpack[Options]) -> Floats:
    """a + b."""
    forward = Forward(device, len(a), **options)
    return forward.run(forward.input(a) + forward.input(b))


@scoped_function
def elementwise_mul(device: Device, a: Array, b: Array, **options: Unpack[Options]) -> Floats:
    """a * b."""
    forward = Forward(device, len(a), **options)
    return forward.run(forward.input(a) * forward.input(b))


@scoped_function
def take_rows(device: Device, x: Array, rows: Sequence[int], **options: Unpack[Options]) -> Floats:
    """x[rows], of which there are 1 to 8, as before the logits of a prompt's last token."""
    forward = Forward(device, len(x), logits_rows=rows, **options)
    value = ops.logits_rows(forward.input(x))
    if forward.rows == 1:
        raise ShaderError("there is nothing to take from a single row")
    return forward.run(value)


@scoped_function
def matmul_vec(
    device: Device,
    x: Array,
    weight: Array | Codes,
    *,
    dtype: str = "f32",
    norm: tuple[Array, float] | None = None,
    bias: Array | None = None,
    scale: float = 1.0,
    activation: str | None = None,
    gated: bool = False,
    residual: Array | None = None,
    **options: Unpack[Options],
) -> Floats:
    """y = scale * (norm(x) W^T + bias) + residual for 1 to 8 rows of x; weight [n, k], stored as
    `dtype`; norm (weight [k], eps). activation: the function of what the residual is
    added to. gated: W is gate on top of up, and y = activation(gate) * up, by default silu.
    """
    _few(len(x), "matmul")
    forward = Forward(device, len(x), **options)
    return forward.run(
        _linear(forward, x, weight, dtype, norm, bias, scale, activation, gated, residual)
    )


@scoped_function
def matmul(
    device: Device,
    x: Array,
    weight: Array | Codes,
    *,
    dtype: str = "f32",
    norm: tuple[Array, float] | None = None,
    bias: Array | None = None,
    scale: float = 1.0,
    activation: str | None = None,
    gated: bool = False,
    residual: Array | None = None,
    **options: Unpack[Options],
) -> Floats:
    """What matmul_vec computes, by the tiled kernel of prefill, for any number of rows; the norm
    is a kernel beside it."""
    forward = Forward(device, len(x), plan_rows=MAX_VEC_ROWS + 1, **options)
    return forward.run(
        _linear(forward, x, weight, dtype, norm, bias, scale, activation, gated, residual)
    )


def _linear(
    forward: Forward,
    x: Array,
    weight: Array | Codes,
    dtype: str,
    norm: tuple[Array, float] | None,
    bias: Array | None,
    scale: float,
    activation: str | None,
    gated: bool,
    residual: Array | None,
) -> Value:
    device = forward.device
    value = forward.input(x)
    if norm is not None:
        value = ops.rmsnorm(value, to_gpu(device, norm[0]), norm[1])
    bias_gpu = None if bias is None else to_gpu(device, bias)
    y = ops.linear(value, to_gpu(device, weight, dtype), bias_gpu, scale)
    if gated:
        gate, up = ops.split(y, y.width // 2, y.width // 2)
        y = ops.activation(gate, activation or "silu") * up
    elif activation is not None:
        y = ops.activation(y, activation)
    return y if residual is None else forward.input(residual) + y


@scoped_function
def head_linear(
    device: Device,
    x: Array,
    weight: Array | Codes,
    heads: int,
    *,
    keep: bool = False,
    table: Array | None = None,
    position: int = 0,
    interleaved: bool = False,
    dtype: str = "f32",
    **options: Unpack[Options],
) -> Floats:
    """The last values of each of the heads in x [rows, heads * width], as many as weight [heads *
    n, k] has columns, times the head's matrix: [rows, heads * n]. keep: each behind the values of
    its head that are before those. table: of `rope`, by which the first of a head are turned."""
    forward = Forward(device, len(x), **options)
    own, value = to_gpu(device, weight, dtype), forward.input(x)
    if table is not None:
        rope = _rope(device, table, position + len(x), interleaved)
        value = ops.rope(value, rope, x.shape[1] // heads)
    y = ops.head_linear(value, own, heads, keep=keep)
    return forward.run(y, position=position)


# Experts


@scoped_function
def route(
    device: Device,
    logits: Array,
    *,
    slots: int,
    normalize: bool,
    sigmoid: bool = False,
    correction: Array | None = None,
    expert_scales: Array | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    groups: tuple[int, int] = (1, 1),
    shared: int = 0,
    shared_scale: float = 1.0,
    gated: bool = False,
    **options: Unpack[Options],
) -> tuple[NDArray[np.int64], Floats]:
    """Ids and weights [rows, slots] of the experts with the largest logits [rows, experts], best
    first: their softmax over all experts, normalize: over those chosen; times scale. sigmoid: in
    place of softmax; epsilon: is added to what they are divided by. correction [experts] is added
    to the scores for the choice alone; the weights are multiplied by expert_scales [experts].
    groups: as in `ops.route`, and so are shared (slots in the result), shared_scale and gated
    (logits [rows, experts + 1])."""
    forward = Forward(device, len(logits), **options)
    y = forward.run(
        ops.route(
            forward.input(logits),
            slots,
            normalize=normalize,
            sigmoid=sigmoid,
            correction=_flat(device, correction),
            expert_scales=_flat(device, expert_scales),
            scale=scale,
            epsilon=epsilon,
            groups=groups,
            shared=shared,
            shared_scale=shared_scale,
            gated=gated,
        )
    )
    ids, weights = np.split(y, 2, axis=1)
    return ids.astype(np.int64), weights


@scoped_function
def expert_gate_up(
    device: Device,
    x: Array,
    logits: Array,
    weight: Array,
    *,
    slots: int,
    dtype: str = "f32",
    bias: Array | None = None,
    function: str = "silu",
    gated: bool = True,
    norm: tuple[Array, float] | None = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Floats:
    """function(x gate^T) * (x up^T), or clamped_swiglu of both, by the experts that the logits
    choose for each row of x, [rows, slots, inner]; weight [experts, 2 * inner, width], gate on top
    of up, stored as `dtype`; bias [experts, 2 * inner]. Not gated: function(x up^T), without gates
    in weight and bias.

    Up to 8 rows go through expert_matmul_vec; more, and all if tiled, are sorted by their expert
    for matmul or matmul_int8.
    """
    forward = Forward(device, len(x), plan_rows=MAX_VEC_ROWS + 1 if tiled else 0, **options)
    inner = weight.shape[1] // (1 + gated)
    routing = ops.route(forward.input(logits), slots, normalize=False)
    value = forward.input(x)
    if norm is not None:
        value = ops.rmsnorm(value, to_gpu(device, norm[0]), norm[1])
    stored = to_gpu(device, weight.reshape(-1, weight.shape[2]), dtype, unit=weight.shape[1])
    added = _flat(device, bias)
    y = forward.run(ops.expert_gate_up(value, stored, routing, added, function, gated))
    return y.reshape(len(x), slots, -1)[..., :inner]


@scoped_function
def expert_down(
    device: Device,
    x: Array,
    logits: Array,
    weight: Array,
    *,
    normalize: bool = False,
    dtype: str = "f32",
    bias: Array | None = None,
    residual: Array | None = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Floats:
    """The sum of what its experts make of x [rows, slots, inner], each times its weight, plus
    residual: [rows, width]; weight [experts, width, inner], stored as `dtype`; bias [experts,
    width]. The logits, slots and kernels are those of `route` and `expert_gate_up`."""
    forward = Forward(device, len(x), plan_rows=MAX_VEC_ROWS + 1 if tiled else 0, **options)
    rows, slots, inner = x.shape
    routing = ops.route(forward.input(logits), slots, normalize=normalize)
    value = forward.input(to_rows(x.reshape(-1, inner), rows * slots).reshape(rows, -1))
    stored = to_gpu(device, weight.reshape(-1, inner), dtype, unit=weight.shape[1])
    y = ops.expert_down(value, stored, routing, _flat(device, bias))
    return forward.run(y if residual is None else forward.input(residual) + y)


def _flat(device: Device, bias: Array | None) -> GpuTensor | None:
    return None if bias is None else to_gpu(device, bias.reshape(-1))


@scoped_function
def sigmoid_gate(device: Device, x: Array, gate: Array, **options: Unpack[Options]) -> Floats:
    """x * sigmoid(gate); x [rows, width], gate [rows, 1] or as x."""
    forward = Forward(device, len(x), **options)
    return forward.run(ops.sigmoid_gate(forward.input(x), forward.input(gate)))


# Layers that keep a state


@scoped_function
def short_conv(
    device: Device,
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    gated: bool = False,
    activation: str = "none",
    state: Array | None = None,
    **options: Unpack[Options],
) -> tuple[Floats, Floats]:
    """The causal convolution of each channel, [rows, channels], and the last inputs of each,
    [taps - 1, channels]; weight [channels, taps]. `state` has the inputs before the first row, or
    there are none. gated: x is B, C and x, [rows, 3 * channels], and this is C * conv(B * x)."""
    channels, taps = weight.shape
    own = _state(device, StateShape(channels, taps), [state])
    forward = Forward(device, len(x), **options)
    y = ops.short_conv(
        forward.input(x),
        to_gpu(device, weight.reshape(-1)),
        None if bias is None else to_gpu(device, bias),
        own,
        gated=gated,
        activation=activation,
    )
    result = forward.run(y, position=0 if state is None else taps)
    last = device.read(own.inputs, np.float32, channels * (taps - 1))
    return result, last.reshape(taps - 1, channels)


@scoped_function
def delta_rule(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    a_log: Array,
    dt_bias: Array,
    *,
    state: Array | None = None,
    **options: Unpack[Options],
) -> tuple[Floats, Floats]:
    """The gated delta rule, [rows, heads, value_dim], and the matrices that it leaves, [heads,
    key_dim, value_dim]; q, k [rows, key_heads, key_dim], v [rows, heads, value_dim], gates [rows,
    2 * heads]: b, then a, of each head. It goes on from the matrices in `state`, or from zeros."""
    (rows, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    shape = StateShape(channels, 2, key_heads, heads, key_dim, value_dim)
    own = _state(device, shape, [None, state])
    forward = Forward(device, rows, **options)
    x = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1)
    inputs = forward.input(x), forward.input(gates)
    vectors = to_gpu(device, a_log), to_gpu(device, dt_bias)
    output = ops.delta_rule(*inputs, *vectors, own)
    y = forward.run(output, position=0 if state is None else 1).reshape(v.shape)
    left = device.read(own.matrices, np.float32, heads * key_dim * value_dim)
    return y, left.reshape(heads, key_dim, value_dim)


@scoped_function
def ssm_scan(
    device: Device,
    x: Array,
    b: Array,
    c: Array,
    z: Array,
    dt: Array,
    heads: Array,
    *,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Array | None = None,
    norm: tuple[Array, float] | None = None,
    projection: Array | None = None,
    dtype: str = "f32",
    **options: Unpack[Options],
) -> tuple[Floats, Floats]:
    """The state space model of Mamba 2, times silu(z), [rows, heads, head_dim], and the matrices
    that it leaves, [heads, state_dim, head_dim]; x, z [rows, heads, head_dim], b, c [rows, groups,
    state_dim], dt [rows, heads], heads [3, heads]: A_log, dt_bias and D. It goes on from the
    matrices in `state`, or from zeros. projection [n, heads * head_dim], stored as `dtype`: the
    first result, or its norm (weights, eps), goes through it, [rows, n]."""
    (rows, groups, state_dim), (_, n_heads, head_dim) = b.shape, x.shape
    channels = n_heads * head_dim + 2 * groups * state_dim
    shape = StateShape(channels, 2, groups, n_heads, state_dim, head_dim)
    own = _state(device, shape, [None, state])
    forward = Forward(device, rows, **options)
    inputs = np.concatenate([part.reshape(rows, -1) for part in (x, b, c)], axis=1)
    values = forward.input(inputs), forward.input(z.reshape(rows, -1)), forward.input(dt)
    output = ops.ssm_scan(*values, to_gpu(device, heads.reshape(-1)), own, dt_limit)
    if norm is not None:
        output = ops.rmsnorm(output, to_gpu(device, norm[0]), norm[1])
    if projection is not None:
        output = ops.linear(output, to_gpu(device, projection, dtype))
    y = forward.run(output, position=0 if state is None else 1)
    if projection is None:
        y = y.reshape(x.shape)
    left = device.read(own.matrices, np.float32, n_heads * state_dim * head_dim)
    return y, left.reshape(n_heads, state_dim, head_dim)


def _state(device: Device, shape: StateShape, values: Sequence[Array | None]) -> LayerState:
    """A state whose buffers hold the values, or NaN: nothing may read it."""
    state = LayerState.new(device, shape, 0)
    for buffer, value in zip(state.buffers, values, strict=True):
        unread = np.full(buffer.nbytes // 4, np.nan, np.float32)
        device.write(buffer, unread if value is None else value.astype(np.float32))
    return state


# Positions and attention


def rope_table(frequencies: Array, positions: int, scale: float = 1.0) -> Floats:
    """(cos, sin) of position * frequency, times scale: [positions, len(frequencies), 2]."""
    angle = np.arange(positions)[:, None] * np.asarray(frequencies, np.float64)
    return (scale * np.stack([np.cos(angle), np.sin(angle)], -1)).astype(np.float32)


@scoped_function
def rope(
    device: Device,
    x: Array,
    table: Array,
    *,
    head_dim: int,
    position: int = 0,
    interleaved: bool = False,
    **options: Unpack[Options],
) -> Floats:
    """The heads of x [rows, heads * head_dim] turned; row i is at position + i.

    table: (cos, sin) [positions, rotary_dim / 2, 2], as from `rope_table`. interleaved turns
    neighbouring dimensions together, otherwise those half the rotary_dim apart.
    """
    forward = Forward(device, len(x), **options)
    rotary = _rope(device, table, position + len(x), interleaved)
    return forward.run(ops.rope(forward.input(x), rotary, head_dim), position=position)


def _rope(device: Device, table: Array, positions: int, interleaved: bool) -> Rope:
    if table.ndim != 3 or table.shape[0] < positions or table.shape[2] != 2:
        raise ShaderError(
            f"table must be [{positions} or more, rotary_dim / 2, 2], not {list(table.shape)}"
        )
    stored = device.upload(table.astype(np.float32), label="rope table")
    return Rope(stored, 2 * table.shape[1], interleaved)


@scoped_function
def attention(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    *,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    kv_dtype: str = "f32",
    latent: bool = False,
    **options: Unpack[Options],
) -> Floats:
    """softmax(scale * q k^T) v for 1 to 8 rows, by the kernels of decode.

    q [rows, n_heads * head_dim] are the last rows of k and v [kv_len, n_kv_heads * head_dim], which
    are cached as kv_dtype. A row attends to all before it, or to the last `window` positions. A
    softcap c turns scores s into c tanh(s / c). sinks [n_heads] are scores without a value.
    latent: keys are k and v side by side, and so are values.
    """
    _few(len(q), "attention_tiled")
    forward = Forward(device, len(q), **options)
    return _attend(forward, q, k, v, n_kv_heads, scale, window, softcap, sinks, kv_dtype, latent)


@scoped_function
def attention_tiled(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    *,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    kv_dtype: str = "f32",
    latent: bool = False,
    **options: Unpack[Options],
) -> Floats:
    """What attention computes, by the kernel of prefill, for any number of rows."""
    forward = Forward(device, len(q), plan_rows=MAX_VEC_ROWS + 1, **options)
    return _attend(forward, q, k, v, n_kv_heads, scale, window, softcap, sinks, kv_dtype, latent)


def _attend(
    forward: Forward,
    q: Array,
    k: Array,
    v: Array,
    n_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Array | None,
    kv_dtype: str,
    latent: bool,
) -> Floats:
    past = len(k) - len(q)
    before = (np.concatenate([k, v], axis=1)[:past],) * 2 if latent else (k[:past], v[:past])
    cache = _cache(forward.device, *before, n_kv_heads, kv_dtype, len(k), latent=latent)
    inputs = forward.input(q), forward.input(k[past:]), forward.input(v[past:])
    output = ops.attention(
        *inputs,
        cache.layers[0],
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=_flat(forward.device, sinks),
    )
    return forward.run(output, position=past)


@scoped_function
def attention_scores(
    device: Device,
    q: Array,
    k: Array,
    *,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_dtype: str = "f32",
    **options: Unpack[Options],
) -> Floats:
    """scale * q k^T [rows, n_heads, kv_len] for what `attention` takes, and -inf where a row does
    not attend to a position."""
    cache = _cache(device, k, k, n_kv_heads, kv_dtype, len(k))
    n_heads = q.shape[1] // cache.layers[0].head_dim
    forward = Forward(device, len(q), **_alone(options))
    output = _traced(forward, q, cache, scale, window, softcap)
    scores = _scores(device, np.zeros((len(q), n_heads, 0)), -np.inf, cache)
    forward.run_alone("attention_scores", output, len(k) - len(q), scores=scores)
    return device.read(scores).reshape(len(q), n_heads, -1)[..., : len(k)].copy()


@scoped_function
def softmax(device: Device, x: Array, *, window: int = 0, **options: Unpack[Options]) -> Floats:
    """The softmax of attention scores x [rows, heads, kv_len] over the positions that each of the
    last rows of kv_len attends to, and 0 for the others."""
    rows, heads, kv_len = x.shape
    none = np.zeros((0, heads * 8))  # any keys and values: only the shape of the scores matters
    cache = _cache(device, none, none, heads, "f32", kv_len)
    forward = Forward(device, rows, **_alone(options))
    output = _traced(forward, np.zeros((rows, heads * 8)), cache, 1.0, window)
    scores, y = _scores(device, x, np.nan, cache), _scores(device, x[..., :0], 0.0, cache)
    forward.run_alone("softmax", output, kv_len - rows, x=scores, y=y)
    return device.read(y).reshape(rows, heads, -1)[..., :kv_len].copy()


@scoped_function
def weighted_sum(
    device: Device,
    p: Array,
    v: Array,
    *,
    n_kv_heads: int,
    window: int = 0,
    kv_dtype: str = "f32",
    **options: Unpack[Options],
) -> Floats:
    """sum of p [rows, n_heads, kv_len] times v [kv_len, n_kv_heads * head_dim] over the positions
    that each of the last rows attends to: [rows, n_heads * head_dim]."""
    rows, n_heads, kv_len = p.shape
    cache = _cache(device, v, v, n_kv_heads, kv_dtype, kv_len)
    width = n_heads * cache.layers[0].head_dim
    forward = Forward(device, rows, **_alone(options))
    output = _traced(forward, np.zeros((rows, width)), cache, 1.0, window)
    y = unwritten(device, rows, width)
    probabilities = _scores(device, p, np.nan, cache)
    position = kv_len - rows
    forward.run_alone("weighted_sum", output, position, probabilities=probabilities, y=y)
    return from_rows(device.read(y), rows, width).copy()


@scoped_function
def kv_write(
    device: Device,
    k: Array,
    v: Array,
    *,
    n_kv_heads: int,
    position: int = 0,
    kv_dtype: str = "f32",
    latent: bool = False,
    **options: Unpack[Options],
) -> tuple[Array, Array]:
    """The cache after k and v [rows, n_kv_heads * head_dim] were written from `position` on: keys
    and values [n_kv_heads, slots, head_dim] in float32 or float16, NaN where nothing was. latent:
    both are k and v side by side."""
    queries = np.concatenate([k, v], axis=1) if latent else k
    empty = queries[:0]
    cache = _cache(device, empty, empty, n_kv_heads, kv_dtype, position + len(k), latent=latent)
    forward = Forward(device, len(k), **_alone(options))
    inputs = forward.input(np.zeros(queries.shape)), forward.input(k), forward.input(v)
    output = ops.attention(*inputs, cache.layers[0], scale=1.0)
    forward.run_alone("kv_write", output, position)
    return _cached(device, cache)


@scoped_function
def latent_write(
    device: Device,
    x: Array,
    table: Array,
    weight: Array,
    eps: float,
    *,
    position: int = 0,
    interleaved: bool = False,
    kv_dtype: str = "f32",
    **options: Unpack[Options],
) -> Array:
    """A latent cache, [1, slots, width], after x [rows, width] was written from `position` on: as
    many of its values as the table turns are turned, and the others normed by the weight."""
    cache = _cache(device, x[:0], x[:0], 1, kv_dtype, position + len(x), latent=True)
    forward = Forward(device, len(x), **options)
    rope = _rope(device, table, position + len(x), interleaved)
    k, v = ops.split(forward.input(x), rope.rotary_dim, x.shape[1] - rope.rotary_dim)
    k, v = ops.rope(k, rope, rope.rotary_dim), ops.rmsnorm(v, to_gpu(device, weight), eps)
    output = ops.attention(forward.input(np.zeros(x.shape)), k, v, cache.layers[0], scale=1.0)
    forward.run_alone("latent_write", output, position)
    return _cached(device, cache)[0]


@scoped_function
def rope_kv_write(
    device: Device,
    x: Array,
    table: Array,
    *,
    n_heads: int,
    n_kv_heads: int,
    position: int = 0,
    interleaved: bool = False,
    norms: tuple[Array, Array, float] | None = None,
    kv_dtype: str = "f32",
    **options: Unpack[Options],
) -> tuple[Floats, Array, Array]:
    """All from a projection x [rows, (n_heads + 2 n_kv_heads) * head_dim] of queries, keys and
    values to attention, in one kernel: the queries normed and turned, and the cache (see kv_write)
    with keys likewise and values written. norms: (q weight, k weight, eps) of heads, where the
    device's limits allow nine storage buffers; table: as in `rope`."""
    if norms is not None and device.limits.storage_buffers < 9:
        raise ShaderError("rope_kv_write with norms needs nine storage buffers: use rope_attention")
    head_dim = x.shape[1] // (n_heads + 2 * n_kv_heads)
    empty = np.zeros((0, n_kv_heads * head_dim))
    cache = _cache(device, empty, empty, n_kv_heads, kv_dtype, position + len(x))
    rotary = _rope(device, table, position + len(x), interleaved)
    forward = Forward(device, len(x), plan_rows=2, **options)  # alone, one row has no such kernel
    output = _turned_attention(forward, x, rotary, cache, n_heads, norms)
    y = unwritten(device, len(x), n_heads * head_dim)
    forward.run_alone("rope_kv_write", output, position, y=y)
    return from_rows(device.read(y), len(x), n_heads * head_dim).copy(), *_cached(device, cache)


@scoped_function
def rope_attention(
    device: Device,
    x: Array,
    table: Array | None,
    k: Array,
    v: Array,
    *,
    n_heads: int,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    interleaved: bool = False,
    norms: tuple[Array, Array, float] | None = None,
    v_norm: Array | None = None,
    turn_first: bool = False,
    kv_dtype: str = "f32",
    **options: Unpack[Options],
) -> tuple[Floats, Array, Array]:
    """All from a projection x (see rope_kv_write) to the output of attention, [rows, n_heads *
    head_dim], and the cache after it. k and v [past, n_kv_heads * head_dim] are in the cache
    already, and x follows them. Without values in x they are the keys before their norm; without
    keys too, k and v have those of x's rows. norms: (q weight, k weight, eps), of heads, or of all
    heads of a row. v_norm: the weight of a norm of values, beside norms; turn_first: norms are of
    what was turned. One row is what attention does by itself; more rows go through rope_kv_write,
    or, where nothing turns (table None) or bindings are too few for that, through a kernel for each
    step."""
    kv_parts = (x.shape[1] * n_kv_heads // k.shape[1] - n_heads) // n_kv_heads
    past = len(k) if kv_parts else len(k) - len(x)
    cache = _cache(device, k, v, n_kv_heads, kv_dtype, past + len(x))
    rotary = None if table is None else _rope(device, table, past + len(x), interleaved)
    forward = Forward(device, len(x), **options)
    output = _turned_attention(
        forward, x, rotary, cache, n_heads, norms, scale, window, softcap, v_norm, turn_first
    )
    return forward.run(output, position=past), *_cached(device, cache)


def _turned_attention(
    forward: Forward,
    x: Array,
    rope: Rope | None,
    cache: KVCache,
    n_heads: int,
    norms: tuple[Array, Array, float] | None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    v_norm: Array | None = None,
    turn_first: bool = False,
) -> Value:
    """Attention on a projection x of queries, and perhaps keys, and perhaps values; heads perhaps
    normed, those of queries and keys perhaps turned, before that or after."""
    layer = cache.layers[0]
    q_width, kv_width = n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    parts = (x.shape[1] - q_width) // kv_width
    q, *kv = ops.split(forward.input(x), q_width, *[kv_width] * parts)
    k, v = (kv[0], kv[-1]) if kv else (None, None)
    for turns in (turn_first, not turn_first):
        if turns and rope is not None:
            q = ops.rope(q, rope, layer.head_dim)
            k = k and ops.rope(k, rope, layer.head_dim)
        if not turns and norms is not None:
            q = ops.rmsnorm(q, to_gpu(forward.device, norms[0]), norms[2])
            k = k and ops.rmsnorm(k, to_gpu(forward.device, norms[1]), norms[2])
    if v and norms is not None and v_norm is not None:
        v = ops.rmsnorm(v, to_gpu(forward.device, v_norm), norms[2])
    return ops.attention(q, k, v, layer, scale=scale, window=window, softcap=softcap)


def _alone(options: Options) -> Options:
    return {**options, "fuse": False}


def _traced(
    forward: Forward, q: Array, cache: KVCache, scale: float, window: int, softcap: float = 0.0
) -> Value:
    """Attention of which one kernel will run, with what it needs in the cache already."""
    layer = cache.layers[0]
    unused = np.zeros((len(q), layer.n_kv_heads * layer.head_dim))
    inputs = forward.input(q), forward.input(unused), forward.input(unused)
    return ops.attention(*inputs, layer, scale=scale, window=window, softcap=softcap)


def _scores(device: Device, values: Array, fill: float, cache: KVCache) -> Buffer:
    """The score matrix [rows, heads, positions of the cache], with `fill` beyond the values."""
    rows, heads, positions = values.shape
    padded = np.full((rows, heads, cache.layers[0].slots), fill, np.float32)
    padded[..., :positions] = values
    return device.upload(padded, label="scores")


def _cache(
    device: Device,
    k: Array,
    v: Array,
    n_kv_heads: int,
    dtype: str,
    positions: int,
    *,
    latent: bool = False,
) -> KVCache:
    """A cache that holds k and v [up to positions, n_kv_heads * head_dim], and NaN after them.
    latent: k is v."""
    if k.ndim != 2 or k.shape != v.shape or k.shape[1] % n_kv_heads:
        raise ShaderError(
            f"k and v must be [kv_len, {n_kv_heads} * head_dim], "
            f"not {list(k.shape)} and {list(v.shape)}"
        )
    head_dim = k.shape[1] // n_kv_heads
    shape = KVShape(n_kv_heads, head_dim, latent)
    cache = KVCache(device, [shape], positions, dtype=dtype)
    layer = cache.layers[0]
    for buffer, part in ((layer.keys, k), (layer.values, v)):
        stored = np.full((layer.slots, n_kv_heads, head_dim), np.nan)
        stored[: len(part)] = part.reshape(len(part), n_kv_heads, head_dim)
        device.write(buffer, to_kv(stored, dtype))
    return cache


def _cached(device: Device, cache: KVCache) -> tuple[Array, Array]:
    layer = cache.layers[0]
    keys, values = (
        from_kv(
            device.read(buffer, np.uint8), layer.n_kv_heads, layer.head_dim, layer.dtype
        ).swapaxes(0, 1)
        for buffer in (layer.keys, layer.values)
    )
    return keys, values


# Sampling


@scoped_function
def sample(
    device: Device,
    logits: Array,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    prompt_ids: Sequence[int] = (),
    seed: int = 0,
    position: int = 0,
    timings: dict[str, float] | None = None,
) -> NDArray[np.uint32]:
    """A token for each row of logits [rows, vocab], greedy at temperature 0; INVALID_TOKEN for a
    row that has NaN or nothing above -inf. The noise depends on the seed and the row's position,
    from `position` on. What the filters mean is in kernels/state/sampler.py."""
    rows, vocab = logits.shape
    noise = temperature > 0
    chain = SamplerChain(
        noise=noise,
        penalties=repetition_penalty != 1.0,
        bias=bool(logit_bias),
        top_k=noise and top_k > 0,
        top_p=noise and top_p < 1.0,
        min_p=noise and min_p > 0.0,
    )
    record = np.zeros(1, SAMPLING)
    record["temperature"], record["top_k"], record["top_p"] = temperature, top_k, top_p
    record["min_p"], record["repetition_penalty"] = min_p, repetition_penalty
    record["seed_low"], record["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
    record["max_position"] = 0xFFFFFFFF
    step = device.upload(pack_step(np.zeros(rows, np.int64), position))
    buffer = device.upload(to_rows(logits, rows))
    sampler = Sampler(device, vocab, buffer, step, max_rows=rows)
    sampler.begin(0, record[0], prompt_ids, logit_bias)
    submit(device, sampler.dispatches(chain, gather=False), rows, 0, timings)
    ids: NDArray[np.uint32] = device.read(sampler.sampled, np.uint32, rows)
    return ids
