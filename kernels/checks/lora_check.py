"""References and cases of changes that each row has its own of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import EPS, Bench, Case, Outcome
from infer.kernels.checks.by_hand import Dtype, by_hand
from infer.kernels.checks.forward import Floats, Ids, Options
from infer.kernels.checks.norm_check import rmsnorm
from infer.kernels.lowering.graph import Value
from infer.kernels.ops.lora import LoraDown, LoraUp
from infer.kernels.ops.norm import RMSNorm


def by_row(x: Array, weights: Array, adapters: Ids) -> Array:
    """x [rows, k], weights [adapters, n, k] -> x W^T, [rows, n], with the W of each row's adapter,
    of which the first is number 1; zeros for number 0."""
    own = np.concatenate([np.zeros_like(weights[:1]), weights])[np.asarray(adapters)]
    y: Array = np.einsum("rk,rnk->rn", x.astype(np.float64), own.astype(np.float64))
    return y


@by_hand
def run_lora_down(
    bench: Bench,
    x: Annotated[Array, "rows, width"],
    weights: Annotated[Array, "n_adapters, rank, width"],
    adapters: Annotated[Ids, "rows", "n_adapters + 1"],
    *,
    norm: Annotated[tuple[Array, float] | None, "width"] = None,
    dtype: Dtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, rank"]:
    """x A^T, [rows, rank], with the A of the adapter of each row; x [rows, width], weights
    [n_adapters, rank, width], of which the first is number 1; zeros for number 0. norm (weight
    [width], eps): of x, before."""
    value = bench.input(x)
    if norm is not None:
        value = RMSNorm(value, bench.weight(norm[0]), norm[1])
    _, rank, width = weights.shape
    stack = bench.weight(weights.reshape(-1, width), dtype)
    return bench.run(LoraDown(value, stack, rank), adapters=adapters)


@by_hand
def run_lora_up(
    bench: Bench,
    x: Annotated[Array, "rows, rank"],
    weights: Annotated[Array, "n_adapters, n, rank"],
    adapters: Annotated[Ids, "rows", "n_adapters + 1"],
    *,
    scale: float = 1.0,
    residual: Annotated[Array | None, "rows, n"] = None,
    dtype: Dtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, n"]:
    """scale * x B^T + residual, [rows, n], with the B of the adapter of each row; x [rows, rank],
    weights [n_adapters, n, rank], of which the first is number 1; the residual [rows, n] alone for
    number 0."""
    _, n, rank = weights.shape
    stack = bench.weight(weights.reshape(-1, rank), dtype)
    y: Value = LoraUp(bench.input(x), stack, n, scale)
    if residual is not None:
        y = bench.input(residual) + y
    return bench.run(y, adapters=adapters)


def adapters_of(rows: int) -> Array:
    """Returns the adapter of each row, 0 for none: rows differ from their neighbours or share
    one."""
    return np.resize([2, 0, 3, 3, 3, 1, 0, 0, 2, 2, 1], rows)


def cases() -> Iterator[Case]:
    for rows, form in product((1, 2, 8), ("", "norm")):
        yield Case("lora_down", f"{rows} rows{form and ', norm'}", partial(_down, rows, form))
    for rows, form in product((1, 2, 8), ("", "residual")):
        yield Case("lora_up", f"{rows} rows{form and ', residual'}", partial(_up, rows, form))
    yield Case("lora_down", "70 rows", partial(_down, 70, ""))
    yield Case("lora_up", "70 rows, residual", partial(_up, 70, "residual"))


def _down(rows: int, form: str, bench: Bench) -> Outcome:
    x, weights, adapters = bench.random(rows, 131), bench.random(3, 5, 131), adapters_of(rows)
    if not form:
        y = run_lora_down(bench, x, weights, adapters)
        return y, by_row(x, weights, adapters)
    norm = bench.random(131), EPS
    y = run_lora_down(bench, x, weights, adapters, norm=norm)
    return y, by_row(rmsnorm(x, *norm), weights, adapters)


def _up(rows: int, form: str, bench: Bench) -> Outcome:
    x, weights, adapters = bench.random(rows, 5), bench.random(3, 131, 5), adapters_of(rows)
    residual = bench.random(rows, 131) if form else None
    y = run_lora_up(bench, x, weights, adapters, scale=0.5, residual=residual)
    expected = by_row(x, weights, adapters) / 2
    return y, expected if residual is None else expected + residual
