"""What the kernels compute, in numpy and float64: the measure of `infer devices --check` and tests.

Arrays are [rows][width] as in the kernels; formulas as in the papers that ops.py names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of any float type; results are float64


def rmsnorm(x: Array, weight: Array, eps: float, groups: int = 1) -> Array:
    """x [..., n * width], weight [width]: each part of `width` values, or of width / groups, over
    its root mean square."""
    own = weight.reshape(groups, -1)
    parts = x.astype(np.float64).reshape(*x.shape[:-1], -1, *own.shape)
    scale = 1.0 / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    result: Array = (parts * scale * own).reshape(x.shape)
    return result


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float, groups: int = 1) -> Array:
    """x [..., n * width], weight [width]: each part as of `rmsnorm`, less its mean, over its
    standard deviation, times weight plus bias."""
    own = weight.reshape(groups, -1)
    parts = x.astype(np.float64).reshape(*x.shape[:-1], -1, *own.shape)
    centred = parts - parts.mean(-1, keepdims=True)
    scale = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    added = 0.0 if bias is None else bias.reshape(own.shape)
    result: Array = (centred * scale * own + added).reshape(x.shape)
    return result


def matmul(x: Array, weight: Array) -> Array:
    """x [rows, k], weight [n, k] -> x W^T [rows, n]."""
    return x.astype(np.float64) @ weight.astype(np.float64).T


def head_linear(x: Array, weight: Array, keep: bool = False) -> Array:
    """x [rows, heads * width], weight [heads, n, k] -> the last k of each head's values times its
    matrix, [rows, heads * n]; keep: behind the values before those."""
    heads, _, k = weight.shape
    parts = x.astype(np.float64).reshape(len(x), heads, -1)
    kept = parts[..., : parts.shape[-1] - k if keep else 0]
    y = np.einsum("rhk,hnk->rhn", parts[..., parts.shape[-1] - k :], weight.astype(np.float64))
    return np.concatenate([kept, y], axis=-1).reshape(len(x), -1)


def silu(x: Array) -> Array:
    x = x.astype(np.float64)
    return x / (1.0 + np.exp(-x))


def gelu(x: Array) -> Array:
    x = x.astype(np.float64)
    result: Array = x * (1.0 + _erf(x / math.sqrt(2.0))) / 2.0
    return result


def gelu_tanh(x: Array) -> Array:
    x = x.astype(np.float64)
    return x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))) / 2.0


def relu(x: Array) -> Array:
    result: Array = np.maximum(x.astype(np.float64), 0.0)
    return result


def relu2(x: Array) -> Array:
    return relu(x) ** 2


ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """The gated activation of gpt-oss."""
    gate, up = np.minimum(gate.astype(np.float64), 7.0), np.clip(up.astype(np.float64), -7.0, 7.0)
    result: Array = gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)
    return result


_erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has none


def softcap(x: Array, cap: float) -> Array:
    result: Array = cap * np.tanh(x.astype(np.float64) / cap)
    return result


def clip(x: Array, limit: float) -> Array:
    result: Array = np.clip(x.astype(np.float64), -limit, limit)
    return result


def xielu(x: Array, shape: Array) -> Array:
    """shape: alpha_p, alpha_n, beta, eps (Huang & Schlag 2024)."""
    x, (alpha_p, alpha_n, beta, eps) = x.astype(np.float64), shape.astype(np.float64)
    above = np.log1p(np.exp(alpha_p)) * x**2
    below = (beta + np.log1p(np.exp(alpha_n))) * (np.expm1(np.minimum(x, eps)) - x)
    result: Array = np.where(x > 0, above, below) + beta * x
    return result


def position_scale(x: Array, positions: Array, beta: float, interval: int) -> Array:
    """x [rows, width], positions [rows]: times 1 + beta log(1 + floor(position / interval))."""
    scale = 1.0 + beta * np.log1p(positions // interval)
    result: Array = x.astype(np.float64) * scale[:, None]
    return result


def route(
    logits: Array,
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
) -> tuple[NDArray[np.int64], Array]:
    """logits [rows, experts] -> ids and weights [rows, slots] of the largest, the first of equals:
    softmax over all experts, normalize: over those chosen; times scale. sigmoid: in place of
    softmax; epsilon: is added to what they are divided by. correction [experts] is added to the
    scores for the choice alone; expert_scales [experts]: the weights are multiplied by them.
    groups: how many there are, and of how many, those of the best or of the two best together
    (correction), experts are chosen. shared: so many more come last in each row, with the weight
    shared_scale, gated: times the sigmoid of one more logit."""
    factor = shared_scale * np.ones((len(logits), 1))
    if gated:
        logits, gate = logits[:, :-1], logits[:, -1:].astype(np.float64)
        factor = factor / (1.0 + np.exp(-gate))
    scores = 1.0 / (1.0 + np.exp(-logits.astype(np.float64))) if sigmoid else softmax(logits)
    preferences = logits if correction is None else scores + correction
    if groups[0] > 1:
        own = np.sort(preferences.reshape(len(logits), groups[0], -1), axis=-1)
        of_groups = own[..., -1 if correction is None else -2 :].sum(-1)
        best = np.argsort(-of_groups, axis=-1, kind="stable")[:, : groups[1]]
        open_ = (np.arange(groups[0]) == best[..., None]).any(1)
        open_ = np.repeat(open_, own.shape[-1], axis=1)
        preferences = np.where(open_, preferences, -np.inf)
    ids = np.argsort(-preferences, axis=-1, kind="stable")[:, :slots]
    chosen = np.take_along_axis(scores, ids, -1)
    if normalize:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + epsilon)
    if expert_scales is not None:
        chosen = chosen * expert_scales[ids]
    last = np.broadcast_to(logits.shape[1] + np.arange(shared), (len(ids), shared))
    weights = np.append(scale * chosen, np.repeat(factor, shared, axis=1), axis=1)
    return np.append(ids, last, axis=1), weights


def expert_gate_up(
    x: Array,
    ids: NDArray[np.int64],
    weight: Array,
    bias: Array | None = None,
    function: str = "silu",
    gated: bool = True,
) -> Array:
    """x [rows, width], ids [rows, slots], weight [experts, 2 * inner, width] and bias [experts, 2 *
    inner], gate on top of up -> function(x gate^T) * (x up^T), or clamped_swiglu of both, [rows,
    slots, inner]. Not gated: function(x up^T), without gates in weight and bias."""
    both = np.einsum("rw,rsnw->rsn", x.astype(np.float64), weight.astype(np.float64)[ids])
    both = both if bias is None else both + bias[ids]
    if not gated:
        return ACTIVATIONS[function](both)
    gate, up = np.split(both, 2, axis=-1)
    if function == "clamped_swiglu":
        return clamped_swiglu(gate, up)
    result: Array = ACTIVATIONS[function](gate) * up
    return result


def expert_down(
    x: Array, ids: NDArray[np.int64], weights: Array, weight: Array, bias: Array | None = None
) -> Array:
    """x [rows, slots, inner], ids and weights [rows, slots], weight [experts, width, inner], bias
    [experts, width] -> the weighted sum of the experts' projections, [rows, width]."""
    parts = np.einsum("rsi,rswi->rsw", x.astype(np.float64), weight.astype(np.float64)[ids])
    parts = parts if bias is None else parts + bias[ids]
    result: Array = np.einsum("rs,rsw->rw", weights.astype(np.float64), parts)
    return result


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
    """The gated delta rule, row by row; shapes as in functions.delta_rule."""
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
    """The state space model of Mamba 2, row by row; shapes as in functions.ssm_scan."""
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


def rope(
    x: Array, positions: Array, frequencies: Array, head_dim: int, interleaved: bool = False
) -> Array:
    """x [rows, heads * head_dim]; frequencies [rotary_dim / 2], radians per position."""
    rows, rotary = x.shape[0], 2 * frequencies.size
    heads = x.astype(np.float64).reshape(rows, -1, head_dim).copy()
    angle = positions[:, None, None] * frequencies.astype(np.float64)
    first, second = (
        (slice(0, rotary, 2), slice(1, rotary, 2))
        if interleaved
        else (slice(0, rotary // 2), slice(rotary // 2, rotary))
    )
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * np.cos(angle) - b * np.sin(angle)
    heads[..., second] = b * np.cos(angle) + a * np.sin(angle)
    return heads.reshape(x.shape)


def softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    result: Array = p / p.sum(-1, keepdims=True)
    return result


def visible(rows: int, kv_len: int, window: int = 0) -> NDArray[np.bool_]:
    """[rows, kv_len]: which positions the last `rows` of kv_len positions attend to."""
    own = np.arange(kv_len - rows, kv_len)[:, None]
    position = np.arange(kv_len)[None, :]
    seen = position <= own
    return seen & (position > own - window) if window else seen


def attention_scores(q: Array, k: Array, n_heads: int, scale: float, cap: float = 0.0) -> Array:
    """q [rows, n_heads * d], k [kv_len, n_kv_heads * d] -> [rows, n_heads, kv_len], unmasked."""
    rows, kv_len = q.shape[0], k.shape[0]
    queries = q.astype(np.float64).reshape(rows, n_heads, -1)
    keys = k.astype(np.float64).reshape(kv_len, -1, queries.shape[-1])
    keys = np.repeat(keys, n_heads // keys.shape[1], axis=1)
    result: Array = scale * np.einsum("rhd,phd->rhp", queries, keys)
    return softcap(result, cap) if cap else result


def weighted_sum(p: Array, v: Array) -> Array:
    """p [rows, n_heads, kv_len], v [kv_len, n_kv_heads, d] -> [rows, n_heads * d]."""
    values = np.repeat(v.astype(np.float64), p.shape[1] // v.shape[1], axis=1)
    result: Array = np.einsum("rhp,phd->rhd", p.astype(np.float64), values)
    return result.reshape(p.shape[0], -1)


def attention(
    q: Array,
    k: Array,
    v: Array,
    n_heads: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """q [rows, n_heads * d] are the last rows of k, v [kv_len, n_kv_heads * d]. sinks [n_heads]:
    of each head a score that has no value."""
    scores = attention_scores(q, k, n_heads, scale, cap)
    seen = visible(q.shape[0], k.shape[0], window)[:, None, :]
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        own = np.broadcast_to(sinks[:, None], (*scores.shape[:2], 1))
        p = softmax(np.concatenate([scores, own], axis=-1))[..., :-1]
    else:
        p = softmax(scores)
    return weighted_sum(p, v.reshape(v.shape[0], -1, q.shape[1] // n_heads))


def nmse(y: Array, reference: Array) -> float:
    """||y - reference||^2 / ||reference||^2, the normalised mean square error."""
    reference = reference.astype(np.float64)
    return float(((y - reference) ** 2).sum() / max((reference**2).sum(), 1e-300))
