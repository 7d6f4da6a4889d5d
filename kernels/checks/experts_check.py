"""References and cases of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Array, rounded, to_rows
from infer.kernels.checks.bench import TILED, Bench, Case, Outcome
from infer.kernels.checks.by_hand import Dtype, by_hand
from infer.kernels.checks.elementwise_check import ACTIVATIONS, clamped_swiglu
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.checks.inputs import FLOATS, activations, exact_weight
from infer.kernels.checks.linear_check import ByMatrix
from infer.kernels.checks.reference import softmax
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.lowering.graph import Value
from infer.kernels.lowering.target import MAX_VEC_ROWS
from infer.kernels.ops.experts import ExpertDown, ExpertGateUp, Route
from infer.kernels.ops.norm import RMSNorm


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


@by_hand
def run_route(
    bench: Bench,
    logits: Annotated[Array, "rows, n_logits"],
    *,
    slots: int,
    normalize: bool,
    correction: Annotated[Array | None, "experts"] = None,
    expert_scales: Annotated[Array | None, "experts"] = None,
    sigmoid: bool = False,
    scale: float = 1.0,
    epsilon: float = 0.0,
    groups: tuple[int, int] = (1, 1),
    shared: int = 0,
    shared_scale: float = 1.0,
    gated: bool = False,
    **options: Unpack[Options],
) -> tuple[
    Annotated[NDArray[np.int64], "rows, slots + shared"], Annotated[Floats, "rows, slots + shared"]
]:
    """Ids and weights, [rows, slots + shared], of the experts with the largest logits [rows,
    experts], best first: their softmax over all experts, normalize: over those chosen; times scale.

    sigmoid: in place of softmax; epsilon: is added to what they are divided by. correction
    [experts] is added to the scores for the choice alone; expert_scales [experts]: the weights are
    multiplied by them. groups: how many there are, and of how many of them experts are chosen.
    shared: so many more experts come last in each row, with the weight shared_scale; gated: times
    the sigmoid of one more logit, the last, [rows, experts + 1].
    """
    for own in (correction, expert_scales):
        if own is not None and len(own) != logits.shape[1] - gated:
            raise ValueError(f"{len(own)} experts do not fit logits {list(logits.shape)}")
    routing = Route(
        bench.input(logits),
        slots,
        normalize=normalize,
        correction=bench.vector(correction),
        expert_scales=bench.vector(expert_scales),
        sigmoid=sigmoid,
        scale=scale,
        epsilon=epsilon,
        groups=groups,
        shared=shared,
        shared_scale=shared_scale,
        gated=gated,
    )
    ids, weights = np.split(bench.run(routing), 2, axis=1)
    return ids.astype(np.int64), weights


@by_hand
def run_expert_gate_up(
    bench: Bench,
    x: Annotated[Array, "rows, width"],
    logits: Annotated[Array, "rows, experts"],
    weight: Annotated[Array, "experts, outputs, width"],
    *,
    slots: int,
    dtype: Dtype = "f32",
    bias: Annotated[Array | None, "experts, outputs"] = None,
    function: Annotated[str, (*ACTIVATIONS, "clamped_swiglu")] = "silu",
    gated: bool = True,
    norm: Annotated[tuple[Array, float] | None, "width"] = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, slots, inner"]:
    """function(x gate^T) * (x up^T), or clamped_swiglu of both, by the experts that the logits
    [rows, experts] choose for each row of x [rows, width]: [rows, slots, inner]; weight [experts,
    2 * inner, width], gate on top of up, stored as `dtype`; bias [experts, 2 * inner]. Not gated:
    function(x up^T), without gates in weight and bias. norm (weight [width], eps): of x, before.

    Up to 8 rows go through expert_matmul_vec; more, and all if tiled, are sorted by their expert
    for matmul or matmul_int8.
    """
    if gated and weight.shape[1] % 2:
        raise ValueError(f"gates and ups are as many, but {weight.shape[1]} is odd")
    inner = weight.shape[1] // (1 + gated)
    routing = Route(bench.input(logits), slots, normalize=False)
    value = bench.input(x)
    if norm is not None:
        value = RMSNorm(value, bench.weight(norm[0]), norm[1])
    stored = bench.weight(weight.reshape(-1, weight.shape[2]), dtype, unit=weight.shape[1])
    output = ExpertGateUp(value, stored, routing, bench.vector(bias), function, gated)
    y = bench.run(output, plan_rows=TILED if tiled else 0)
    return y.reshape(len(x), slots, -1)[..., :inner]


@by_hand
def run_expert_down(
    bench: Bench,
    x: Annotated[Array, "rows, slots, inner"],
    logits: Annotated[Array, "rows, experts"],
    weight: Annotated[Array, "experts, width, inner"],
    *,
    normalize: bool = False,
    dtype: Dtype = "f32",
    bias: Annotated[Array | None, "experts, width"] = None,
    residual: Annotated[Array | None, "rows, width"] = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, width"]:
    """The sum of what its experts make of x [rows, slots, inner], each times its weight, plus
    residual [rows, width]: [rows, width]; weight [experts, width, inner], stored as `dtype`; bias
    [experts, width]. The logits [rows, experts] choose experts as of `route`."""
    rows, slots, inner = x.shape
    routing = Route(bench.input(logits), slots, normalize=normalize)
    value = bench.input(to_rows(x.reshape(-1, inner), rows * slots).reshape(rows, -1))
    stored = bench.weight(weight.reshape(-1, inner), dtype, unit=weight.shape[1])
    y: Value = ExpertDown(value, stored, routing, bench.vector(bias))
    if residual is not None:
        y = bench.input(residual) + y
    return bench.run(y, plan_rows=TILED if tiled else 0)


def cases() -> Iterator[Case]:
    for normalize, sigmoid, corrected in product((False, True), repeat=3):
        name = f"{'sigmoid' if sigmoid else 'softmax'}, {'normalized' if normalize else 'plain'}"
        run = partial(_route, normalize=normalize, sigmoid=sigmoid, corrected=corrected)
        yield Case("route", f"{name}, corrected" if corrected else name, run)
    yield Case("route", "300 experts", partial(_route, experts=300))
    yield Case("route", "shared experts", partial(_route, shared=2))
    for sigmoid in (False, True):  # as DeepSeek-V2 and V3 do
        run = partial(_route, sigmoid=sigmoid, corrected=sigmoid, experts=48, groups=(8, 3))
        yield Case("route", f"{'sigmoid' if sigmoid else 'softmax'}, groups", run)
    for kernel, function in (("expert_gate_up", _gate_up), ("expert_down", _down)):
        for dtype, rows in product(FLOATS + QUANTIZED, (1, 3, 40)):
            yield Case(kernel, f"{dtype}, {rows} rows", partial(function, dtype=dtype, rows=rows))
        for dtype, rows in product(("bf16", "q4"), (3, 40)):
            run = partial(function, dtype=dtype, rows=rows, bias=True)
            yield Case(kernel, f"{dtype}, {rows} rows, bias", run)
    for dtype, rows in product(("bf16", "q4"), (3, 40)):
        run = partial(_gate_up, dtype=dtype, rows=rows, gated=False)
        yield Case("expert_gate_up", f"{dtype}, {rows} rows, no gates", run)
    for dtype in ("bf16", "q4"):
        for kernel, function in (("expert_gate_up", _gate_up), ("expert_down", _down)):
            run = partial(function, dtype=dtype, rows=9, bias=True, by_matrix=True)
            yield Case(kernel, f"{dtype}, by matrices of f16", run)


def _route(
    bench: Bench,
    normalize: bool = False,
    sigmoid: bool = False,
    corrected: bool = False,
    experts: int = 37,
    groups: tuple[int, int] = (1, 1),
    shared: int = 0,
) -> Outcome:
    """shared: behind a gate."""
    logits = bench.random(3, experts + (shared > 0))
    logits[1] = 0.0  # of equals the first
    options: dict[str, Any] = {"slots": 5, "normalize": normalize, "sigmoid": sigmoid, "scale": 2.5}
    options |= {"groups": groups, "shared": shared, "gated": shared > 0}
    if sigmoid and normalize:
        options["epsilon"] = 0.5
    if corrected:
        options |= {name: bench.random(experts) for name in ("correction", "expert_scales")}
    ids, weights = run_route(bench, logits, **options)
    expected_ids, expected = route(logits, **options)
    return np.concatenate([ids, weights], 1), np.concatenate([expected_ids, expected], 1)


def _gate_up(
    bench: Bench,
    dtype: str,
    rows: int,
    bias: bool = False,
    gated: bool = True,
    by_matrix: bool = False,
) -> Outcome:
    """bias: with the activation of gpt-oss too; not gated: with that of Nemotron."""
    x, exact = activations(bench.rng, rows, 67, dtype)
    logits = bench.random(rows, 7)
    n = (1 + gated) * 21
    weight = multiplier = exact_weight(bench.rng, 7 * n, 67, dtype).reshape(7, n, 67)
    if by_matrix:
        x = exact = rounded(bench.random(rows, 67), "f16")
        multiplier = rounded(weight, "f16")
        bench.options["tuning"] = ByMatrix(bench.device)
    added = 5 * bench.random(7, n) if bias else None
    function = "clamped_swiglu" if bias else "silu" if gated else "relu2"
    own: dict[str, Any] = {"bias": added, "function": function, "gated": gated}
    how: dict[str, Any] = {"slots": 3, "dtype": dtype, "tiled": by_matrix}
    y = run_expert_gate_up(bench, x, logits, weight, **how, **own)
    return y, expert_gate_up(exact, route(logits, 3, False)[0], multiplier, **own)


def _down(
    bench: Bench, dtype: str, rows: int, bias: bool = False, by_matrix: bool = False
) -> Outcome:
    both = activations(bench.rng, 3 * rows, 37, dtype, many=rows > MAX_VEC_ROWS)
    x, exact = (part.reshape(rows, 3, 37) for part in both)
    logits, residual = bench.random(rows, 7), bench.random(rows, 67)
    weight = multiplier = exact_weight(bench.rng, 7 * 67, 37, dtype).reshape(7, 67, 37)
    if by_matrix:
        x = exact = rounded(bench.random(rows, 3, 37), "f16")
        multiplier = rounded(weight, "f16")
        bench.options["tuning"] = ByMatrix(bench.device)
    added = bench.random(7, 67) if bias else None
    own: dict[str, Any] = {"dtype": dtype, "residual": residual, "bias": added}
    y = run_expert_down(bench, x, logits, weight, tiled=by_matrix, **own)
    ids, weights = route(logits, 3, False)
    return y, residual + expert_down(exact, ids, weights, multiplier, added)
