"""References and cases of norms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import EPS, Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand
from infer.kernels.checks.elementwise_check import silu
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.ops.norm import LayerNorm, RMSNorm


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


@by_hand
def run_rmsnorm(
    bench: Bench,
    x: Annotated[Array, "rows, parts * width"],
    weight: Annotated[Array, "width"],
    eps: float,
    groups: int = 1,
    gate: Annotated[Array | None, "rows, parts * width"] = None,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, parts * width"]:
    """x / rms(x) * weight (Zhang & Sennrich 2019): x [rows, parts * width], weight [width], over
    each part of a row, which is one of `width` values, or of width / groups with weights of their
    own. gate, of the shape of x: times silu(gate)."""
    gates = None if gate is None else bench.input(gate)
    return bench.run(RMSNorm(bench.input(x), bench.weight(weight), eps, groups, gates))


@by_hand
def run_layernorm(
    bench: Bench,
    x: Annotated[Array, "rows, parts * width"],
    weight: Annotated[Array, "width"],
    bias: Annotated[Array | None, "width"] = None,
    eps: float = 1e-5,
    groups: int = 1,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, parts * width"]:
    """(x - mean(x)) / std(x) * weight + bias (Ba et al. 2016): x [rows, parts * width], weight and
    bias [width], over such parts as of `rmsnorm`."""
    inputs = bench.input(x), bench.weight(weight), bench.vector(bias)
    return bench.run(LayerNorm(*inputs, eps, groups))


def cases() -> Iterator[Case]:
    yield Case("rmsnorm", "one part", partial(_rmsnorm, rows=3, parts=1, width=331))
    yield Case("rmsnorm", "per head", partial(_rmsnorm, rows=3, parts=5, width=24))
    yield Case("rmsnorm", "per group", partial(_rmsnorm, rows=3, parts=1, width=66, groups=3))
    for bias in (False, True):
        yield Case("layernorm", "bias" if bias else "", partial(_layernorm, bias=bias))
    heads = partial(_layernorm, bias=True, parts=5, width=24, groups=2)
    yield Case("layernorm", "per head", heads)
    yield Case("gated_rmsnorm", "", _gated_rmsnorm)


def _rmsnorm(bench: Bench, rows: int, parts: int, width: int, groups: int = 1) -> Outcome:
    x, weight = bench.random(rows, parts * width), bench.random(width)
    return run_rmsnorm(bench, x, weight, EPS, groups), rmsnorm(x, weight, EPS, groups)


def _layernorm(
    bench: Bench, bias: bool, parts: int = 1, width: int = 331, groups: int = 1
) -> Outcome:
    x, weight = 3 + bench.random(3, parts * width), bench.random(width)
    added = bench.random(width) if bias else None
    y = run_layernorm(bench, x, weight, added, EPS, groups)
    return y, layernorm(x, weight, added, EPS, groups)


def _gated_rmsnorm(bench: Bench) -> Outcome:
    x, gate, weight = bench.random(3, 5 * 24), bench.random(3, 5 * 24), bench.random(24)
    y = run_rmsnorm(bench, x, weight, EPS, gate=gate)
    return y, rmsnorm(x, weight, EPS) * silu(gate)
