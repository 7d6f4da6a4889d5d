"""References and cases of layers that keep a state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Annotated, Any, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import EPS, Bench, Case, Outcome
from infer.kernels.checks.by_hand import Dtype, by_hand
from infer.kernels.checks.elementwise_check import ACTIVATIONS, silu
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.checks.inputs import exact_weight, int8_rows
from infer.kernels.checks.linear_check import matmul
from infer.kernels.lowering.graph import Value
from infer.kernels.ops.linear import Linear
from infer.kernels.ops.norm import RMSNorm
from infer.kernels.ops.recurrent import DeltaRule, ShortConv, SSMScan
from infer.kernels.state.layer_state import LayerState, StateShape
from infer.kernels.state.step import DRAFTED, StepRow


def short_conv(
    x: Array, weight: Array, bias: Array | None = None, state: Array | None = None
) -> tuple[Array, Array]:
    """The causal convolution of each channel of x [rows, channels] with weight [channels, taps],
    and its last taps - 1 inputs; `state`: those before x, or zeros."""
    taps = weight.shape[1]
    before = np.zeros((taps - 1, x.shape[1])) if state is None else state
    inputs = np.concatenate([before, x]).astype(np.float64)
    y = np.zeros(x.shape) if bias is None else np.tile(bias.astype(np.float64), (len(x), 1))
    for j in range(taps):
        y += weight[:, j] * inputs[j : j + len(x)]
    return y, inputs[len(x) :]


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule, row by row; shapes as in run_delta_rule."""
    heads, key_dim = v.shape[1], k.shape[2]
    q, k = (
        np.repeat(x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6), n, 1)
        for x, n in ((q, heads // q.shape[1]), (k, heads // k.shape[1]))
    )
    beta = 1 / (1 + np.exp(-gates[:, :heads].astype(np.float64)))
    rate = np.exp(a_log.astype(np.float64))
    decay = np.exp(-rate * np.logaddexp(0, gates[:, heads:].astype(np.float64) + dt_bias))
    left = np.zeros((heads, key_dim, v.shape[2])) if state is None else state.astype(np.float64)
    y = np.empty(v.shape)
    for row in range(len(v)):
        left = decay[row, :, None, None] * left
        delta = beta[row, :, None] * (v[row] - np.einsum("hk,hkv->hv", k[row], left))
        left = left + k[row, :, :, None] * delta[:, None]
        y[row] = np.einsum("hk,hkv->hv", q[row], left) / math.sqrt(key_dim)
    return y, left


def ssm_scan(
    x: Array,
    b: Array,
    c: Array,
    z: Array,
    dt: Array,
    heads: Array,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Array | None = None,
) -> tuple[Array, Array]:
    """The state space model of Mamba 2, row by row; shapes as in run_ssm_scan."""
    a_log, dt_bias, skip = heads.astype(np.float64)
    n_heads, (groups, state_dim) = x.shape[1], b.shape[1:]
    b, c = (np.repeat(part.astype(np.float64), n_heads // groups, 1) for part in (b, c))
    dt = np.clip(np.logaddexp(0, dt.astype(np.float64) + dt_bias), *dt_limit)
    decay = np.exp(-dt * np.exp(a_log))
    left = np.zeros((n_heads, state_dim, x.shape[2])) if state is None else state.astype(np.float64)
    y = np.empty(x.shape)
    for row in range(len(x)):
        left = decay[row, :, None, None] * left
        left = left + b[row, :, :, None] * (dt[row, :, None] * x[row])[:, None]
        y[row] = np.einsum("hk,hkv->hv", c[row], left) + skip[:, None] * x[row]
    return y * silu(z), left


@by_hand
def run_short_conv(
    bench: Bench,
    x: Annotated[Array, "rows, inputs"],
    weight: Annotated[Array, "channels, taps"],
    *,
    bias: Annotated[Array | None, "channels"] = None,
    gated: bool = False,
    activation: Annotated[str, ("none", *ACTIVATIONS)] = "none",
    state: Annotated[Array | None, "taps - 1, channels"] = None,
    **options: Unpack[Options],
) -> tuple[Annotated[Floats, "rows, channels"], Annotated[Floats, "taps - 1, channels"]]:
    """The causal convolution of each channel, [rows, channels], and the last inputs of each,
    [taps - 1, channels]; x [rows, channels], weight [channels, taps], bias [channels]. `state`
    [taps - 1, channels] has the inputs before the first row, or there are none. gated: x is B, C
    and x, [rows, 3 * channels], and this is C * conv(B * x)."""
    channels, taps = weight.shape
    own = _state(bench, StateShape(channels, taps), [state])
    y = ShortConv(
        bench.input(x),
        bench.weight(weight.reshape(-1)),
        bench.vector(bias),
        own,
        gated=gated,
        activation=activation,
    )
    result = bench.run(y, position=0 if state is None else taps)
    last = bench.device.read(own.inputs, np.float32, channels * (taps - 1))
    return result, last.reshape(taps - 1, channels)


@by_hand
def run_delta_rule(
    bench: Bench,
    q: Annotated[Array, "rows, key_heads, key_dim"],
    k: Annotated[Array, "rows, key_heads, key_dim"],
    v: Annotated[Array, "rows, heads, value_dim"],
    gates: Annotated[Array, "rows, 2 * heads"],
    a_log: Annotated[Array, "heads"],
    dt_bias: Annotated[Array, "heads"],
    *,
    state: Annotated[Array | None, "heads, key_dim, value_dim"] = None,
    **options: Unpack[Options],
) -> tuple[
    Annotated[Floats, "rows, heads, value_dim"], Annotated[Floats, "heads, key_dim, value_dim"]
]:
    """The gated delta rule, [rows, heads, value_dim], and the matrices that it leaves, [heads,
    key_dim, value_dim]; q, k [rows, key_heads, key_dim], v [rows, heads, value_dim], gates [rows,
    2 * heads]: b, then a, of each head; a_log and dt_bias [heads]. It goes on from the matrices in
    `state`, or from zeros. key_dim and value_dim are multiples of 4, heads of key_heads."""
    (rows, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    shape = StateShape(channels, 2, key_heads, heads, key_dim, value_dim)
    own = _state(bench, shape, [None, state])
    x = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1)
    inputs = bench.input(x), bench.input(gates)
    vectors = bench.weight(a_log), bench.weight(dt_bias)
    output = DeltaRule(*inputs, *vectors, own)
    y = bench.run(output, position=0 if state is None else 1).reshape(v.shape)
    left = bench.device.read(own.matrices, np.float32, heads * key_dim * value_dim)
    return y, left.reshape(heads, key_dim, value_dim)


@by_hand
def run_ssm_scan(
    bench: Bench,
    x: Annotated[Array, "rows, n_heads, head_dim"],
    b: Annotated[Array, "rows, groups, state_dim"],
    c: Annotated[Array, "rows, groups, state_dim"],
    z: Annotated[Array, "rows, n_heads, head_dim"],
    dt: Annotated[Array, "rows, n_heads"],
    heads: Annotated[Array, "3, n_heads"],
    *,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Annotated[Array | None, "n_heads, state_dim, head_dim"] = None,
    norm: Annotated[tuple[Array, float] | None, "n_heads * head_dim"] = None,
    projection: Annotated[Array | None, "n, n_heads * head_dim"] = None,
    dtype: Dtype = "f32",
    **options: Unpack[Options],
) -> tuple[
    Annotated[Floats, "rows, n_heads, head_dim"], Annotated[Floats, "n_heads, state_dim, head_dim"]
]:
    """The state space model of Mamba 2, times silu(z), [rows, n_heads, head_dim], and the matrices
    that it leaves, [n_heads, state_dim, head_dim]; x, z [rows, n_heads, head_dim], b, c [rows,
    groups, state_dim], dt [rows, n_heads], heads [3, n_heads]: A_log, dt_bias and D. It goes on
    from the matrices in `state`, or from zeros. projection [n, n_heads * head_dim], stored as
    `dtype`: the first result, or its norm (weight [n_heads * head_dim], eps), goes through it,
    [rows, n]. state_dim and head_dim are multiples of 4, n_heads of groups."""
    (rows, groups, state_dim), (_, n_heads, head_dim) = b.shape, x.shape
    channels = n_heads * head_dim + 2 * groups * state_dim
    shape = StateShape(channels, 2, groups, n_heads, state_dim, head_dim)
    own = _state(bench, shape, [None, state])
    inputs = np.concatenate([part.reshape(rows, -1) for part in (x, b, c)], axis=1)
    values = bench.input(inputs), bench.input(z.reshape(rows, -1)), bench.input(dt)
    output: Value = SSMScan(*values, bench.weight(heads.reshape(-1)), own, dt_limit)
    if norm is not None:
        output = RMSNorm(output, bench.weight(norm[0]), norm[1])
    if projection is not None:
        output = Linear(output, bench.weight(projection, dtype))
    y = bench.run(output, position=0 if state is None else 1)
    if projection is None:
        y = y.reshape(x.shape)
    left = bench.device.read(own.matrices, np.float32, n_heads * state_dim * head_dim)
    return y, left.reshape(n_heads, state_dim, head_dim)


def _state(bench: Bench, shape: StateShape, values: Sequence[Array | None]) -> LayerState:
    """A state whose buffers hold the values, or NaN: nothing may read it."""
    state = LayerState.new(bench.device, shape, 0)
    for buffer, value in zip(state.buffers, values, strict=True):
        unread = np.full(buffer.nbytes // 4, np.nan, np.float32)
        bench.device.write(buffer, unread if value is None else value.astype(np.float32))
    return state


def cases() -> Iterator[Case]:
    for rows, goes_on in product((1, 3, 40), (False, True)):
        name = f"{rows} rows, {'going on' if goes_on else 'from the start'}"
        for gated in (False, True):
            run = partial(_short_conv, rows=rows, goes_on=goes_on, gated=gated)
            yield Case("short_conv", f"{name}, {'gated' if gated else 'silu'}", run)
        yield Case("delta_rule", name, partial(_delta_rule, rows=rows, goes_on=goes_on))
        yield Case("ssm_scan", name, partial(_ssm_scan, rows=rows, goes_on=goes_on))
    yield Case("ssm_scan", "1 row, as int8 behind a norm", _ssm_scan_int8)
    drafted = "rows of three sequences, with drafts"
    for gated in (False, True):
        run = partial(drafted_short_conv, channels=67, taps=4, gated=gated)
        yield Case("short_conv", f"{drafted}, {'gated' if gated else 'silu'}", run)
    yield Case("delta_rule", drafted, partial(drafted_delta_rule, heads=(2, 4), dims=(24, 36)))
    yield Case("ssm_scan", drafted, partial(drafted_ssm_scan, heads=(2, 4), dims=(24, 36)))


def _joined(*parts: Array) -> Array:
    """The values of all: results and states."""
    return np.concatenate([part.ravel() for part in parts])


def _short_conv(bench: Bench, rows: int, goes_on: bool, gated: bool) -> Outcome:
    weight, state = bench.random(67, 4), bench.random(3, 67) if goes_on else None
    if not gated:
        x, bias = bench.random(rows, 67), bench.random(67)
        options: dict[str, Any] = {"bias": bias, "activation": "silu", "state": state}
        y, left = run_short_conv(bench, x, weight, **options)
        expected, expected_left = short_conv(x, weight, bias, state)
        return _joined(y, left), _joined(silu(expected), expected_left)
    x = bench.random(rows, 3 * 67)
    y, left = run_short_conv(bench, x, weight, gated=True, state=state)
    before, after, value = np.split(x.astype(np.float64), 3, axis=1)
    expected, expected_left = short_conv(before * value, weight, None, state)
    return _joined(y, left), _joined(after * expected, expected_left)


def _delta_rule(bench: Bench, rows: int, goes_on: bool) -> Outcome:
    q, k, v = bench.random(rows, 2, 24), bench.random(rows, 2, 24), bench.random(rows, 4, 36)
    own = bench.random(rows, 8), bench.random(4) - 1, bench.random(4)
    state = bench.random(4, 24, 36) if goes_on else None
    y, left = run_delta_rule(bench, q, k, v, *own, state=state)
    expected, expected_left = delta_rule(q, k, v, *own, state)
    return _joined(y, left), _joined(expected, expected_left)


def _ssm_scan(bench: Bench, rows: int, goes_on: bool) -> Outcome:
    b, c = bench.random(rows, 2, 24), bench.random(rows, 2, 24)
    x, z = bench.random(rows, 4, 36), bench.random(rows, 4, 36)
    own = x, b, c, z, bench.random(rows, 4), bench.random(3, 4) - 1
    state = bench.random(4, 24, 36) if goes_on else None
    y, left = run_ssm_scan(bench, *own, state=state)
    expected, expected_left = ssm_scan(*own, state=state)
    return _joined(y, left), _joined(expected, expected_left)


def _ssm_scan_int8(bench: Bench) -> Outcome:
    """The output of each head is a multiple of x, whose rounding to int8 is known."""
    x, exact = (part.reshape(1, 4, 48) for part in int8_rows(bench.rng, 1, 4 * 48))
    b, c, z = bench.random(1, 1, 24), bench.random(1, 1, 24), np.tile(bench.random(1, 4, 1), 48)
    own = b, c, z, bench.random(1, 4), bench.random(3, 4) - 1
    norm, weight = np.repeat(bench.random(12), 16), exact_weight(bench.rng, 37, 4 * 48, "q8")
    options: dict[str, Any] = {"norm": (norm, EPS), "projection": weight, "dtype": "q8"}
    y, left = run_ssm_scan(bench, x, *own, **options)
    (values, expected_left), (rounded_values, _) = (ssm_scan(part, *own) for part in (x, exact))
    scale = 1 / np.sqrt(np.mean(values**2) + EPS)
    expected = matmul(scale * rounded_values.reshape(1, -1) * norm, weight)
    return _joined(y, left), _joined(expected, expected_left)


# Steps of three sequences: the slot of each, its position in the first, and in each step its rows,
# how many of them are right, and whether its first row is one that was drafted before.
_DRAFTED = (
    (2, 13, ((8, 8, False), (8, 1, False), (1, 1, False), (1, 1, False))),
    (0, 0, ((1, 1, False), (3, 1, False), (1, 1, True), (2, 2, False))),
    (1, 40, ((3, 2, False), (1, 1, True), (1, 0, True), (1, 1, False))),
)
_DRAFTS = 7
_ROWS = 13  # of a step; the last is dead

Reference = Callable[[Sequence[Array], Array | None], tuple[Array, Array]]


def _drafted(
    bench: Bench,
    shape: StateShape,
    buffer: int,
    widths: Sequence[int],
    op: Callable[..., Value],
    reference: Reference,
) -> Outcome:
    """Returns the outputs of the steps and the states that the last one leaves. A sequence that
    begins has NaN for a state, and rows that were drafted wrong must not be read again. buffer:
    index of the op's buffer in the state. op: makes the op of inputs of these widths and a state;
    reference: computes it for one sequence."""
    state = LayerState.new(bench.device, shape, 0, sequences=len(_DRAFTED), drafts=_DRAFTS)
    own = state.buffers[buffer]
    states = bench.random(len(_DRAFTED), shape.sizes[buffer] // 4)
    states[0] = np.nan
    bench.device.write(own, states)
    bench.device.write(
        state.recent[buffer], np.full(state.recent[buffer].nbytes // 4, np.nan, np.float32)
    )
    right = {slot: [np.zeros((0, width), np.float32) for width in widths] for slot, *_ in _DRAFTED}
    taken_in = dict.fromkeys(right, 0)  # of these rows
    lefts: dict[int, Array] = {}
    found: list[Array] = []
    expected: list[Array] = []
    for i in range(len(_DRAFTED[0][-1])):
        inputs = [bench.random(_ROWS, width) for width in widths]
        rows: list[StepRow] = []
        for slot, position, steps in _DRAFTED:
            count, kept, drafted = steps[i]
            own_inputs = [values[len(rows) : len(rows) + count] for values in inputs]
            before, known = states[slot] if position else None, len(right[slot][0])
            both = [np.concatenate(two) for two in zip(right[slot], own_inputs, strict=True)]
            expected.append(reference(both, before)[0][known:])
            begin, behind = position + known, known - taken_in[slot]
            first = behind | (DRAFTED if drafted else 0)
            rows += [(0, begin + j, slot, 0, 0 if j else first) for j in range(count)]
            right[slot] = [values[: known + kept] for values in both]
            if not drafted:
                taken_in[slot] = known + 1
                lefts[slot] = reference([values[: known + 1] for values in both], before)[1]
        y = bench.run(op(*map(bench.input, inputs), state), batch=rows, drafts=_DRAFTS)
        found.append(y[: len(rows)])
    found.append(bench.device.read(own, np.float32, states.size))
    left = [lefts[slot] for slot in range(len(_DRAFTED))]
    return _joined(*found), _joined(*expected, *left)


def drafted_short_conv(bench: Bench, channels: int, taps: int, gated: bool) -> Outcome:
    weight, bias = bench.random(channels, taps), bench.random(channels)

    def op(x: Value, state: LayerState) -> Value:
        own = None if gated else bench.vector(bias)
        activation = "none" if gated else "silu"
        vector = bench.weight(weight.reshape(-1))
        return ShortConv(x, vector, own, state, gated=gated, activation=activation)

    def reference(inputs: Sequence[Array], state: Array | None) -> tuple[Array, Array]:
        before = None if state is None else state.reshape(taps - 1, channels)
        if not gated:
            y, left = short_conv(inputs[0], weight, bias, before)
            return silu(y), left
        gate, after, value = np.split(inputs[0].astype(np.float64), 3, axis=1)
        y, left = short_conv(gate * value, weight, None, before)
        return after * y, left

    shape = StateShape(channels, taps)
    return _drafted(bench, shape, 0, [channels * (3 if gated else 1)], op, reference)


def drafted_delta_rule(bench: Bench, heads: tuple[int, int], dims: tuple[int, int]) -> Outcome:
    """heads: with a key, and with a value; dims: of both."""
    (key_heads, n_heads), (key_dim, value_dim) = heads, dims
    vectors = bench.random(n_heads) - 1, bench.random(n_heads)
    keys, values = key_heads * key_dim, n_heads * value_dim
    shape = StateShape(2 * keys + values, 2, key_heads, n_heads, key_dim, value_dim)

    def op(x: Value, gates: Value, state: LayerState) -> Value:
        a_log, dt_bias = (bench.weight(vector) for vector in vectors)
        return DeltaRule(x, gates, a_log, dt_bias, state)

    def reference(inputs: Sequence[Array], state: Array | None) -> tuple[Array, Array]:
        q, k, v = np.split(inputs[0], (keys, 2 * keys), axis=1)
        before = None if state is None else state.reshape(n_heads, key_dim, value_dim)
        q, k = (part.reshape(-1, key_heads, key_dim) for part in (q, k))
        return delta_rule(q, k, v.reshape(-1, n_heads, value_dim), inputs[1], *vectors, before)

    return _drafted(bench, shape, 1, (shape.channels, 2 * n_heads), op, reference)


def drafted_ssm_scan(bench: Bench, heads: tuple[int, int], dims: tuple[int, int]) -> Outcome:
    """heads: groups, and those of values; dims: of a state and of a head."""
    (groups, n_heads), (state_dim, head_dim) = heads, dims
    own = bench.random(3, n_heads) - 1
    values, inputs_of = n_heads * head_dim, groups * state_dim
    shape = StateShape(values + 2 * inputs_of, 2, groups, n_heads, state_dim, head_dim)

    def op(x: Value, z: Value, dt: Value, state: LayerState) -> Value:
        return SSMScan(x, z, dt, bench.weight(own.reshape(-1)), state)

    def reference(inputs: Sequence[Array], state: Array | None) -> tuple[Array, Array]:
        xbc, z, dt = inputs
        x, b, c = np.split(xbc, (values, values + inputs_of), axis=1)
        x, z = (part.reshape(-1, n_heads, head_dim) for part in (x, z))
        b, c = (part.reshape(-1, groups, state_dim) for part in (b, c))
        before = None if state is None else state.reshape(n_heads, state_dim, head_dim)
        return ssm_scan(x, b, c, z, dt, own, state=before)

    return _drafted(bench, shape, 1, (shape.channels, values, n_heads), op, reference)
