"""References and cases of projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array, rounded
from infer.kernels.checks.bench import EPS, TILED, Bench, Case, Outcome, WithoutMatrices, never
from infer.kernels.checks.by_hand import Dtype, by_hand
from infer.kernels.checks.elementwise_check import ACTIVATIONS, halves
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.checks.inputs import (
    FLOATS,
    PUBLISHED,
    activations,
    exact_weight,
    grouped,
    multiplied,
)
from infer.kernels.checks.norm_check import rmsnorm
from infer.kernels.checks.rope_check import (
    check_rotated,
    frequencies,
    rope,
    rope_table,
    stored_rope,
)
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.row_scales import scale_rows
from infer.kernels.gpu.tensor import QUANTIZED, Grouping
from infer.kernels.lowering.graph import Value
from infer.kernels.lowering.target import MAX_VEC_ROWS
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import AttentionMatrixVariant, attention_matrix_variant
from infer.kernels.ops.elementwise import Activation
from infer.kernels.ops.head_linear import HeadLinear
from infer.kernels.ops.linear import Linear
from infer.kernels.ops.matmul_lanes import matmul_lanes_variant
from infer.kernels.ops.matmul_matrix import (
    MatrixVariant,
    expert_matrix_variant,
    matmul_matrix_variant,
)
from infer.kernels.ops.matmul_rows import (
    LEAST_LANES,
    MOST_ROWS,
    RowsShape,
    RowsVariant,
    few_rows,
    matmul_rows_variant,
    possible_variant,
)
from infer.kernels.ops.norm import RMSNorm
from infer.kernels.ops.rope import Rotate


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


X = Annotated[Array, "rows, k"]
Weight = Annotated[Array | Codes, "outputs, k"]


class ProjectionOptions(Options, total=False):
    """The keyword arguments of all projections, which `run_matmul_vec` describes."""

    dtype: Dtype
    norm: Annotated[tuple[Array, float] | None, "k"]
    bias: Annotated[Array | None, "outputs"]
    scale: float
    activation: Annotated[str | None, tuple(ACTIVATIONS)]
    gated: bool
    residual: Annotated[Array | None, "rows, n"]


@by_hand
def run_matmul(
    bench: Bench,
    a: Annotated[Array, "m, k"],
    b: Annotated[Array, "k, n"],
    **options: Unpack[Options],
) -> Annotated[Floats, "m, n"]:
    """The product of two matrices, a [m, k] times b [k, n]: [m, n], by the kernel of
    `matmul_tiled`, to which b^T is the weight."""
    return run_matmul_tiled(bench, a, b.T)


@by_hand
def run_matmul_vec(
    bench: Bench, x: X, weight: Weight, **options: Unpack[ProjectionOptions]
) -> Annotated[Floats, "rows, n"]:
    """scale * (norm(x) W^T + bias) + residual, [rows, n], for 1 to 8 rows of x [rows, k].

    weight [n, k], stored as `dtype` (f32 by default); norm (weight [k], eps); bias [n]; residual
    [rows, n]. activation: the function of what the residual is added to. gated: the weight [2 * n,
    k] and the bias [2 * n] are gate on top of up, and activation(gate) * up, by default silu, is
    what the residual is added to.
    """
    few(len(x), "matmul_tiled")
    bench.options.setdefault("tuning", ByVec(bench.device))
    return bench.run(_linear(bench, x, weight, **options))


@by_hand
def run_matmul_tiled(
    bench: Bench, x: X, weight: Weight, **options: Unpack[ProjectionOptions]
) -> Annotated[Floats, "rows, n"]:
    """The projection that `matmul_vec` computes, [rows, n], for any number of rows, by the tiled
    kernel of prefill; the norm is a kernel of its own."""
    bench.options.setdefault("tuning", ByVec(bench.device))
    return bench.run(_linear(bench, x, weight, **options), plan_rows=TILED)


@by_hand
def run_matmul_lanes(
    bench: Bench, x: X, weight: Weight, **options: Unpack[ProjectionOptions]
) -> Annotated[Floats, "rows, n"]:
    """The projection that `matmul_vec` computes, [rows, n], for any number of rows, by the kernel
    for CPUs, which needs subgroups of one fixed size; the norm of more than one row is a kernel of
    its own."""
    bench.options.setdefault("tuning", ByLanes(bench.device))
    return bench.run(_linear(bench, x, weight, **options))


@by_hand
def run_matmul_matrix(
    bench: Bench,
    x: X,
    weight: Weight,
    variant: MatrixVariant | None = None,
    **options: Unpack[ProjectionOptions],
) -> Annotated[Floats, "rows, n"]:
    """The projection that `matmul_vec` computes, [rows, n], for more than 8 rows, by matrices of
    f16: the adapter's own, or emulated ones where it has none or the variant says so."""
    if len(x) <= MAX_VEC_ROWS:
        raise ShaderError(f"it takes {MAX_VEC_ROWS + 1} rows or more, not {len(x)}: use matmul_vec")
    bench.options["tuning"] = ByMatrix(bench.device, variant)
    return bench.run(_linear(bench, x, weight, row_scales=True, **options), plan_rows=TILED)


# With 8 lanes, each of more values, it would compile six times as long in software.
EMULATED = MatrixVariant(MatrixShape(16, 16, 16), 32, 16, 32, 16, 16, 32, emulated=True)


class ByMatrix(Tuning):
    """Takes matmul_matrix for more than 8 rows, and attention_matrix for prefill: these variants
    where they are given, else the adapter's own matrices, or emulated ones."""

    def __init__(
        self,
        device: Device,
        variant: MatrixVariant | None = None,
        attention: AttentionMatrixVariant | None = None,
    ) -> None:
        super().__init__(device)
        self.instead = {
            few_rows: never,
            matmul_lanes_variant: never,
            matmul_matrix_variant: lambda *call: (
                variant or matmul_matrix_variant(*call) or EMULATED
            ),
            expert_matrix_variant: lambda tuning, rows, gated: (
                expert_matrix_variant(tuning, rows, gated) or replace(EMULATED, rows=rows)
            ),
            attention_matrix_variant: lambda *call: (
                attention or attention_matrix_variant(*call) or _emulated_attention(*call)
            ),
        }


def _emulated_attention(
    tuning: Tuning, head_dim: int, latent: bool, dtype: str
) -> AttentionMatrixVariant | None:
    """Returns a variant of attention_matrix with emulated matrices, where there are subgroups and a
    head is a whole number of matrices; otherwise None."""
    if not tuning.subgroup_size or dtype == "f32":
        return None
    parts = next(n for n in range(1, head_dim) if head_dim % n == 0 and head_dim // n <= 64)
    own = AttentionMatrixVariant(
        MatrixShape(16, 16, 16), 32, 16, 16, 16, head_dim // parts, emulated=True
    )
    return own if own.runs(tuning, head_dim, latent) else None


class ByVec(WithoutMatrices):
    """Takes matmul_vec for 2 to 8 rows, and tiles for more, everywhere."""

    instead: Mapping[Any, Any] = {
        **WithoutMatrices.instead,
        few_rows: never,
        matmul_lanes_variant: never,
    }


class ByLanes(WithoutMatrices):
    """The rules for software adapters."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.software = True


class ByRows(WithoutMatrices):
    """Takes matmul_rows wherever it can be, of this variant where that can."""

    def __init__(self, device: Device, variant: RowsVariant | None = None) -> None:
        super().__init__(device)

        def chosen(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
            fits = variant is not None and variant.runs(tuning, shape)
            return variant if fits else possible_variant(tuning, shape)

        self.instead = {
            **self.instead,
            few_rows: lambda tuning, rows: (
                2 <= rows <= MOST_ROWS and tuning.subgroup_size >= LEAST_LANES
            ),
            matmul_rows_variant: chosen,
        }


@by_hand
def run_matmul_rows(
    bench: Bench,
    x: X,
    weight: Weight,
    variant: RowsVariant | None = None,
    **options: Unpack[ProjectionOptions],
) -> Annotated[Floats, "rows, n"]:
    """The projection that `matmul_vec` computes, [rows, n], for 2 to 64 rows, by a kernel that
    reads each weight once and needs subgroups; the norm is a kernel of its own."""
    if not 2 <= len(x) <= MOST_ROWS:
        raise ShaderError(f"it takes 2 to {MOST_ROWS} rows, not {len(x)}: use matmul_tiled")
    bench.options["tuning"] = ByRows(bench.device, variant)
    return bench.run(_linear(bench, x, weight, **options))


def few(rows: int, other: str) -> None:
    """Raises ShaderError where there are too many rows for the kernels of decode."""
    if rows > MAX_VEC_ROWS:
        raise ShaderError(f"it takes 1 to {MAX_VEC_ROWS} rows, not {rows}: use {other}")


def _linear(
    bench: Bench,
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
    row_scales: bool = False,
    **options: Unpack[Options],
) -> Value:
    value = bench.input(x)
    if norm is not None:
        value = RMSNorm(value, bench.weight(norm[0]), norm[1])
    stored = bench.weight(weight, dtype)
    if row_scales:
        scale_rows(bench.device, [stored])
    y: Value = Linear(value, stored, bench.vector(bias), scale)
    if gated:
        gate, up = halves(y)
        y = Activation(gate, activation or "silu") * up
    elif activation is not None:
        y = Activation(y, activation)
    return y if residual is None else bench.input(residual) + y


@by_hand
def run_head_linear(
    bench: Bench,
    x: Annotated[Array, "rows, heads * width"],
    weight: Annotated[Array | Codes, "heads * n, k"],
    heads: int,
    *,
    keep: bool = False,
    table: Annotated[Array | None, "positions, pairs, 2"] = None,
    position: int = 0,
    interleaved: bool = False,
    dtype: Dtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, y_width"]:
    """The last k values of each of the heads in x [rows, heads * width] times the head's matrix,
    of weight [heads * n, k], stored as `dtype`: [rows, heads * n]. keep: each behind the values of
    its head that are before those. table [positions, pairs, 2]: of `rope`, by which the first of a
    head are rotated."""
    value = bench.input(x)
    if table is not None:
        check_rotated(table, x.shape[1] // heads)
        rotary = stored_rope(bench, table, position + len(x), interleaved)
        value = Rotate(value, rotary, x.shape[1] // heads)
    y = HeadLinear(value, bench.weight(weight, dtype), heads, keep=keep)
    return bench.run(y, position=position)


def cases() -> Iterator[Case]:
    forms = ("plain", "norm bias", "norm gated", "gelu gated", "gelu_tanh residual")
    int8_forms = ("plain", "bias gated", "gelu_tanh gated", "gelu residual")
    few_rows = [*product(FLOATS, (1, 3, 8), forms), *product(QUANTIZED, (1, 3, 8), int8_forms)]
    for dtype, rows, form in few_rows:
        run = partial(_projection, run_matmul_vec, dtype=dtype, rows=rows, k=131, n=37, form=form)
        yield Case("matmul_vec", f"{dtype}, {rows} rows, {form}", run)
    for dtype, (rows, k, n, form) in product(
        FLOATS + QUANTIZED, ((9, 37, 21, "gelu_tanh gated"), (130, 72, 134, "gelu bias residual"))
    ):
        run = partial(_projection, run_matmul_tiled, dtype=dtype, rows=rows, k=k, n=n, form=form)
        yield Case("matmul", f"{dtype}, {rows} rows, {form}", run)
    for dtype in ("bf16", "q4"):  # workgroups share so many columns
        form = "gelu bias residual"
        run = partial(_projection, run_matmul_tiled, dtype=dtype, rows=9, k=1024, n=37, form=form)
        yield Case("matmul_combine", f"{dtype}, {form}", run)
    for dtype, (rows, form) in product(
        FLOATS + QUANTIZED, ((4, "norm gelu gated"), (9, "gelu bias residual"), (33, "gated"))
    ):
        form = form.removeprefix("norm ") if dtype in QUANTIZED else form
        run = partial(_projection, run_matmul_rows, dtype=dtype, rows=rows, k=331, n=37, form=form)
        yield Case("matmul_rows", f"{dtype}, {rows} rows, {form}", run)
    for dtype, (rows, form) in product(
        FLOATS, ((1, "norm gated"), (3, "gelu bias residual"), (21, "gated"))
    ):
        run = partial(_projection, run_matmul_lanes, dtype=dtype, rows=rows, k=331, n=37, form=form)
        yield Case("matmul_lanes", f"{dtype}, {rows} rows, {form}", run)
    for dtype, (rows, form) in product(
        FLOATS + QUANTIZED, ((9, "bias gated"), (33, "plain"), (130, "gelu bias residual"))
    ):
        run = partial(
            _projection, run_matmul_matrix, dtype=dtype, rows=rows, k=331, n=37, form=form
        )
        yield Case("matmul_matrix", f"{dtype}, {rows} rows, {form}", run)
    for dtype, form in product(("bf16", "q4"), ("alone", "half-split")):
        run = partial(_head_matrix, dtype=dtype, form=form)
        yield Case("matmul_matrix", f"{dtype}, 40 rows, heads {form}", run)
    for dtype, grouping in PUBLISHED:
        run = partial(_grouped, dtype=dtype, grouping=grouping, rows=33, by_matrix=True)
        yield Case("matmul_matrix", f"{dtype}, 33 rows, {grouping}", run)
    for dtype in ("f32", "bf16"):
        run = partial(_beyond_f16, dtype=dtype)
        yield Case("matmul_matrix", f"{dtype}, rows of weights beyond f16", run)
    kept = product(("bf16",), (1, 3, 40), ("alone", "kept", "half-split", "interleaved"))
    for dtype, rows, form in [*kept, *product(QUANTIZED, (3, 40), ("alone",))]:
        run = partial(_head_linear, dtype=dtype, rows=rows, form=form)
        yield Case("head_linear", f"{dtype}, {rows} rows, {form}", run)
    for (dtype, grouping), rows in product(PUBLISHED, (1, 3, 40)):
        run = partial(_grouped, dtype=dtype, grouping=grouping, rows=rows)
        kernel = "matmul_vec" if rows <= 8 else "matmul"
        yield Case(kernel, f"{dtype}, {rows} rows, {grouping}", run)
    for (dtype, grouping), rows in product(PUBLISHED, (1, 9)):
        run = partial(_grouped_heads, dtype=dtype, grouping=grouping, rows=rows)
        yield Case("head_linear", f"{dtype}, {rows} rows, {grouping}", run)


def _projection(
    function: Callable[..., Array], bench: Bench, dtype: str, rows: int, k: int, n: int, form: str
) -> Outcome:
    """form: any of the words "norm" (of float weights), "bias", "gated", "residual", and an
    activation function, or silu for what is gated."""
    gated = "gated" in form
    activation = next((word for word in form.split() if word in ACTIVATIONS), None)
    activate = ACTIVATIONS[activation or "silu"]
    by_rows = function is run_matmul_rows
    x, expected = activations(bench.rng, rows, k, dtype, many=rows > MAX_VEC_ROWS or by_rows)
    weight = multiplier = exact_weight(bench.rng, 2 * n if gated else n, k, dtype)
    if function is run_matmul_matrix:  # of what is left of the values in f16
        x = expected = rounded(bench.random(rows, k), "f16")
        multiplier = rounded(weight, "f16")
    options: dict[str, Any] = {"dtype": dtype, "gated": gated, "activation": activation}
    if "norm" in form:
        options["norm"] = bench.random(k), EPS
        expected = rmsnorm(x, *options["norm"])
    expected = matmul(expected, multiplier)
    if "bias" in form:
        options["bias"] = bench.random(len(weight))
        expected = expected + options["bias"]
    if gated:
        expected = activate(expected[:, :n]) * expected[:, n:]
    elif activation is not None:
        expected = activate(expected)
    if "residual" in form:
        options["residual"] = bench.random(rows, n)
        expected = expected + options["residual"]
    return function(bench, x, weight, **options), expected


def _head_matrix(bench: Bench, dtype: str, form: str) -> Outcome:
    """Heads by matrices, of values that f16 holds."""
    bench.options["tuning"] = ByMatrix(bench.device)
    return _head_linear(bench, dtype, 40, form, k=128, apart=16, halves=True)


def _head_linear(
    bench: Bench,
    dtype: str,
    rows: int,
    form: str,
    *,
    k: int = 36,
    apart: int = 12,
    halves: bool = False,
) -> Outcome:
    """form: what becomes of the values of a head that are not multiplied; apart: their number.
    halves: x and the weights are values of f16."""
    (heads, n), keep = (3, 21), form != "alone"
    weight = exact_weight(bench.rng, heads * n, k, dtype)
    x = exact = bench.random(rows, heads * (k + apart))
    if halves:
        weight, x = rounded(weight, "f16"), rounded(x, "f16")
        exact = x
    options: dict[str, Any] = {"keep": keep, "dtype": dtype}
    if form in ("half-split", "interleaved"):
        own, interleaved = frequencies(apart), form == "interleaved"
        table = rope_table(own, 7 + rows)
        options |= {"table": table, "position": 7, "interleaved": interleaved}
        exact = rope(x, 7 + np.arange(rows), own, k + apart, interleaved)
    y = run_head_linear(bench, x, weight, heads, **options)
    return y, head_linear(exact, weight.reshape(heads, n, k), keep)


def _beyond_f16(bench: Bench, dtype: str) -> Outcome:
    """Rows of activations and of weights from 2^-40 to 2^40; each result over those of its rows."""
    x, powers = rounded(bench.random(33, 331), "f16"), np.arange(-40, 41, 10.0)
    weight = rounded(rounded(bench.random(37, 331), dtype), "f16")
    of_x, of_w = np.exp2(np.resize(powers, (33, 1))), np.exp2(np.resize(powers, (37, 1)))
    own_x, own_w = (x * of_x).astype(np.float32), (weight * of_w).astype(np.float32)
    y = run_matmul_matrix(bench, own_x, own_w, dtype=dtype)
    return y / (of_x * of_w.T), matmul(x, weight)


def _grouped(
    bench: Bench, dtype: str, grouping: Grouping, rows: int, by_matrix: bool = False
) -> Outcome:
    x, exact = activations(bench.rng, rows, 331, dtype)
    weight, values = grouped(bench.rng, (37, 331), dtype, grouping)
    if by_matrix:
        x = rounded(bench.random(rows, 331), "f16")
        near = rounded(values.astype(np.float32), "f16")
        return run_matmul_matrix(bench, x, weight), matmul(x, near)
    function = run_matmul_vec if rows <= 8 else run_matmul_tiled
    return function(bench, x, weight), matmul(exact, multiplied(weight, values))


def _grouped_heads(bench: Bench, dtype: str, grouping: Grouping, rows: int) -> Outcome:
    heads, n, k = 2, 18, 256
    codes, values = grouped(bench.rng, (heads * n, k), dtype, grouping)
    x = bench.random(rows, heads * k)
    y = run_head_linear(bench, x, codes, heads)
    return y, head_linear(x, values.reshape(heads, n, k))
