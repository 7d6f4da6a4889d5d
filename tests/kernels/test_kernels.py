"""Every kernel against float64, on awkward shapes, in every setting of the adapter.

By default the settings are covered pairwise: any two values of two factors meet in some case, of
values that take all ways through a kernel. With `-m full` there are more values and cases, with
`-m exhaustive` hundreds of times as many.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from conftest import LEAST, OpenDevice

from infer.kernels.checks import (
    attention_check,
    elementwise_check,
    functions,
    linear_check,
    lora_check,
    norm_check,
    reference,
    rope_check,
)
from infer.kernels.checks.arrays import Array, rounded, to_gpu
from infer.kernels.checks.bench import never
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import exact_weight, grouped, int8_rows, multiplied
from infer.kernels.checks.linear_check import ByRows, ByVec
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import DeviceError, ShaderError
from infer.kernels.gpu.codes import TABLES
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.plan import dispatch
from infer.kernels.gpu.profile import profile_dispatches
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import BLOCK, CODED, HALF, LOOKED_UP, Grouping
from infer.kernels.lowering.target import MAX_VEC_ROWS
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.kernels.ops.attention import (
    AttentionVariant,
    attention_joined_variant,
    attention_variant,
)
from infer.kernels.ops.lora import LoraDown, lora_outputs, lora_rows
from infer.kernels.ops.matmul_lanes import matmul_lanes_variant
from infer.kernels.ops.matmul_rows import few_rows
from infer.kernels.ops.matmul_tiles import (
    Int8TileVariant,
    TileVariant,
    matmul_int8_variant,
    matmul_variant,
)
from infer.kernels.ops.matmul_vec import VecShape, VecVariant, matmul_vec_variant
from infer.kernels.state.sampler import INVALID_TOKEN
from infer.models.blocks.rope import rope_table
from infer.models.loading.config import RawConfig, RopeConfig

LIMIT = 1e-10  # of f32 arithmetic, whatever the storage
EPS = 1e-6

Factors = dict[str, Sequence[Any]]
Case = dict[str, Any]

SETTINGS: Factors = {
    "subgroups": (True, False),
    "f16": (True, False),
    "least": (False, True),  # the limits that every device has
    "bounds_checks": (False, True),
}


def settings_of(case: Case) -> Settings:
    own = {name: case[name] for name in ("subgroups", "f16", "bounds_checks")}
    return replace(LEAST if case["least"] else Settings(), **own)


def pairwise(factors: Factors) -> list[Case]:
    """Cases in which any two values of two factors meet, greedily few."""
    names = list(factors)
    columns = list(combinations(range(len(names)), 2))
    values = [range(len(factors[name])) for name in names]
    missing = {(a, i, b, j) for a, b in columns for i in values[a] for j in values[b]}
    cases = []
    while missing:
        a, i, b, j = min(missing)
        chosen = {a: i, b: j}
        for c in range(len(names)):
            if c not in chosen:
                gains = [
                    sum(
                        (min((c, k), (d, m)) + max((c, k), (d, m))) in missing
                        for d, m in chosen.items()
                    )
                    for k in values[c]
                ]
                # The next one of equally good values, so that all come equally often.
                most = max(gains)
                best = [k for k in values[c] if gains[k] == most]
                chosen[c] = best[len(cases) % len(best)]
        missing -= {(*x, *y) for x, y in combinations(sorted(chosen.items()), 2)}
        cases.append({name: factors[name][chosen[c]] for c, name in enumerate(names)})
    return cases


FULL = 1  # cases for each of the settings in the full run
EXHAUSTIVE = 200  # and in the exhaustive one


def drawn(own: Case, rest: Factors, count: int, seed: int) -> Iterator[Case]:
    """So many cases at random, which are drawn where a test of them runs."""
    rng = random.Random(seed)
    for _ in range(count):
        yield own | {name: rng.choice(values) for name, values in rest.items()}


def covering(factors: Factors, **fewer: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes `cases`: pairwise as single tests, of `fewer` values of some factors, and many
    at random in the full and the exhaustive run."""
    few = [
        pytest.param([case], id="-".join(map(str, case.values())))
        for case in pairwise(factors | fewer)
    ]
    rest = {name: values for name, values in factors.items() if name not in SETTINGS}
    many = []
    for i, settings in enumerate(product(*SETTINGS.values())):
        own = dict(zip(SETTINGS, settings, strict=True))
        for mark, count in ((pytest.mark.full, FULL), (pytest.mark.exhaustive, EXHAUSTIVE)):
            cases = drawn(own, rest, count, seed=i)
            many.append(pytest.param(cases, id=f"{mark.name}-{i}", marks=mark))
    return pytest.mark.parametrize("cases", [*few, *many])


def meeting(factors: Factors, **fewer: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes `case`: any two values of two factors meet, of `fewer` values of some, and in
    the exhaustive run all of them."""
    few = pairwise(factors | fewer)
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    rest = [pytest.param(case, marks=pytest.mark.exhaustive) for case in every if case not in few]
    return pytest.mark.parametrize(
        "case", [*few, *rest], ids=lambda case: "-".join(map(str, case.values()))
    )


def test_pairwise_is_pairwise() -> None:
    factors: Factors = {"a": (1, 2, 3), "b": "xy", "c": (True, False), "d": range(5)}
    cases = pairwise(factors)
    for (a, values), (b, others) in combinations(factors.items(), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(values, others))
    assert len(cases) <= 1.5 * 3 * 5


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def error_of_sums(y: Array, expected: Array) -> float:
    """The NMSE of sums of standard normal values. A single output may be nearly zero where large
    terms cancel: its error is then that of values of a hundredth of their mean square."""
    square = float(np.mean(np.square(expected, dtype=np.float64)))
    return nmse(y, expected) * min(1.0, square / 0.01)


# Projections

LINEAR: Factors = SETTINGS | {
    "rows": (1, 2, 5, 8, 9, 40, 130),
    "shape": ((1, 1), (7, 3), (8, 40), (37, 130), (131, 250), (520, 61), (2056, 15)),
    "dtype": ("f32", "f16", "bf16"),
    "form": (
        *("", "norm bias", "norm gated", "residual", "norm bias gated residual"),
        *("scale", "norm bias scale residual", "bias scale gated"),
        *("gelu", "gelu_tanh bias scale residual", "gelu_tanh norm gated"),
    ),
}


def activation_of(form: str) -> str | None:
    """The activation function among the words of a form."""
    return next((word for word in form.split() if word in elementwise_check.ACTIVATIONS), None)


def activated(y: Array, form: str, n: int) -> Array:
    """Returns the activation of n outputs, or of n gates times as many other outputs."""
    function = activation_of(form)
    if "gated" in form:
        return elementwise_check.ACTIVATIONS[function or "silu"](y[:, :n]) * y[:, n:]
    return y if function is None else elementwise_check.ACTIVATIONS[function](y)


def linear_error(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    shape: tuple[int, int],
    dtype: str,
    form: str,
    **options: Any,
) -> float:
    k, n = shape
    x, weight = normal(rng, rows, k), normal(rng, 2 * n if "gated" in form else n, k)
    values: dict[str, Any] = {}
    expected = x.astype(np.float64)
    if "norm" in form:
        values["norm"] = normal(rng, k), EPS
        expected = norm_check.rmsnorm(x, *values["norm"])
    expected = linear_check.matmul(expected, rounded(weight, dtype))
    if "bias" in form:
        values["bias"] = normal(rng, len(weight))
        expected += values["bias"]
    if "scale" in form:
        values["scale"] = 0.37
        expected = 0.37 * expected
    expected = activated(expected, form, n)
    if "residual" in form:
        values["residual"] = normal(rng, rows, n)
        expected = expected + values["residual"]
    function = functions.matmul_vec if rows <= 8 else functions.matmul_tiled
    values |= {"dtype": dtype, "gated": "gated" in form, "activation": activation_of(form)}
    return nmse(function(device, x, weight, **values, **options), expected)


@covering(
    LINEAR,
    rows=(1, 3, 8, 9, 130),
    shape=((1, 1), (37, 130), (131, 250), (520, 61), (2056, 15)),
    form=(
        *("", "residual", "norm bias gated residual", "norm bias scale residual"),
        *("gelu bias scale", "gelu_tanh norm gated"),
    ),
)
def test_linear(open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    for case in cases:
        own = {name: value for name, value in case.items() if name not in SETTINGS}
        assert linear_error(open_device(settings_of(case)), rng, **own) <= LIMIT, case


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_the_tiled_kernel_takes_any_number_of_rows(
    device: Device, rng: np.random.Generator, rows: int
) -> None:
    x, weight = normal(rng, rows, 37), normal(rng, 21, 37)
    assert nmse(functions.matmul_tiled(device, x, weight), linear_check.matmul(x, weight)) <= LIMIT


@pytest.mark.parametrize(("rows", "plan_rows"), [(1, 8), (3, 8), (2, 5), (9, 130), (40, 300)])
def test_a_plan_serves_fewer_rows(
    device: Device, rng: np.random.Generator, rows: int, plan_rows: int
) -> None:
    x, norm, weight = normal(rng, rows, 37), normal(rng, 37), normal(rng, 42, 37)
    with device.scope():
        forward = Forward(device, rows, plan_rows=plan_rows)
        value = ops.rmsnorm(forward.input(x), to_gpu(device, norm), EPS)
        both = ops.linear(value, to_gpu(device, weight, "bf16"))
        gate, up = ops.split(both, 21, 21)
        y = forward.run(ops.activation(gate, "silu") * up)
    both = linear_check.matmul(norm_check.rmsnorm(x, norm, EPS), rounded(weight, "bf16"))
    assert nmse(y, elementwise_check.silu(both[:, :21]) * both[:, 21:]) <= LIMIT


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize(("form", "n"), [("bias residual", 301), ("norm bias gated", 150)])
def test_weights_larger_than_a_binding(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, form: str, n: int
) -> None:
    small = open_device(Settings(max_binding=160_000))
    with small.scope():
        assert len(to_gpu(small, np.zeros((300, 300))).shards) == 3
    assert linear_error(small, rng, rows, (300, n), "f32", form) <= LIMIT


# Quantised projections. Weights are such that their blocks hold them exactly, and activations such
# that it is known how they round.

QUANTIZED_LINEAR: Factors = SETTINGS | {
    "rows": (1, 7, 9, 40, 130),
    "shape": ((1, 1), (8, 40), (37, 130), (131, 250), (520, 61), (2056, 15)),
    "dtype": ("q8", "q4"),
    "form": (
        *("", "bias", "residual", "bias gated", "bias scale residual"),
        *("gelu_tanh gated", "gelu bias scale residual"),
    ),
}
INT8_LIMIT = 1e-12  # dot products are exact: only scales, and sums of blocks, round


def quantized_error(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    shape: tuple[int, int],
    dtype: str,
    form: str,
    **options: Any,
) -> float:
    k, n = shape
    x, exact = int8_rows(rng, rows, k)
    weight = exact_weight(rng, 2 * n if "gated" in form else n, k, dtype)
    values: dict[str, Any] = {"dtype": dtype, "gated": "gated" in form}
    values["activation"] = activation_of(form)
    expected = linear_check.matmul(exact, weight)
    if "bias" in form:
        values["bias"] = normal(rng, len(weight))
        expected = expected + values["bias"]
    if "scale" in form:
        values["scale"] = 0.37
        expected = 0.37 * expected
    expected = activated(expected, form, n)
    if "residual" in form:
        values["residual"] = normal(rng, rows, n)
        expected = expected + values["residual"]
    function = functions.matmul_vec if rows <= 8 else functions.matmul_tiled
    return error_of_sums(function(device, x, weight, **values, **options), expected)


@covering(
    QUANTIZED_LINEAR,
    rows=(1, 7, 9, 130),
    shape=((1, 1), (37, 130), (131, 250), (520, 61), (2056, 15)),
    form=("", "bias gated", "gelu_tanh gated", "gelu bias scale residual"),
)
def test_quantized_linear(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        own = {name: value for name, value in case.items() if name not in SETTINGS}
        assert quantized_error(open_device(settings_of(case)), rng, **own) <= INT8_LIMIT, case


GROUPINGS: Factors = SETTINGS | {
    "rows": (1, 3, 8, 9, 40),
    "shape": ((37, 21), (100, 70), (331, 40), (512, 33)),
    "dtype": ("q8", "q4", "iq4nl", "nf4"),
    "group": (16, 32, 64, 128, 512),
    "scales": ("f16", "bf16", "f32"),
    "offset": ("none", "zero", "bias"),
    "shift": (0, 8),
    "gated": (False, True),
}


@covering(GROUPINGS, rows=(1, 3, 9), shape=((37, 21), (331, 40), (512, 33)))
def test_groups_of_quantized_weights(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        device, gated, (k, n) = open_device(settings_of(case)), case["gated"], case["shape"]
        offset = ("none", 0) if case["dtype"] in CODED else (case["offset"], case["shift"])
        grouping = Grouping(case["group"], case["scales"], *offset)
        weight, values = grouped(rng, (2 * n if gated else n, k), case["dtype"], grouping)
        x, exact = int8_rows(rng, case["rows"], k)
        expected = linear_check.matmul(exact, multiplied(weight, values))
        if gated:
            expected = elementwise_check.silu(expected[:, :n]) * expected[:, n:]
        function = functions.matmul_vec if len(x) <= 8 else functions.matmul_tiled
        assert nmse(function(device, x, weight, gated=gated), expected) <= INT8_LIMIT, case
        ids = np.array([n - 1, 0, 5])
        assert nmse(functions.embedding(device, ids, weight), values[ids]) <= LIMIT, case


@pytest.mark.parametrize("settings", [Settings(), LEAST])
@pytest.mark.parametrize("rows", [1, 9])
def test_what_products_round_of_nf4(open_device: OpenDevice, rows: int, settings: Settings) -> None:
    """Each of its values, times one. Read as they are, values are exact."""
    device = open_device(settings)
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 64, axis=1)
    weight = Codes("nf4", Grouping(64, "f32"), codes, np.ones((16, 1), np.float32))
    x = np.eye(rows, 64, 21, dtype=np.float32)
    function = functions.matmul_vec if rows <= 8 else functions.matmul_tiled
    assert abs(function(device, x, weight) - TABLES["nf4"]).max() <= 8e-6
    values = functions.embedding(device, np.arange(16), weight)
    np.testing.assert_array_equal(values, TABLES["nf4"][codes])


@pytest.mark.parametrize("dtype", LOOKED_UP)
def test_copies_of_a_table(device: Device, rng: np.random.Generator, dtype: str) -> None:
    weight, values = grouped(rng, (37, 331), dtype, Grouping(32, "f16"))
    x, exact = int8_rows(rng, 3, 331)
    expected = linear_check.matmul(exact, multiplied(weight, values))
    for copies in (1, 4):
        tuning = Forced(device, VecVariant(64, 64, 2, 2, copies))
        assert nmse(functions.matmul_vec(device, x, weight, tuning=tuning), expected) <= INT8_LIMIT


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_both_kernels_of_quantized_weights_agree(
    device: Device, rng: np.random.Generator, dtype: str
) -> None:
    x, _ = int8_rows(rng, 40, 331)  # rounds alike in blocks and in halves of blocks
    weight, bias, added = (normal(rng, *shape) for shape in ((70, 331), (70,), (40, 70)))
    options: dict[str, Any] = {"dtype": dtype, "bias": bias}
    y = functions.matmul_tiled(device, x, weight, residual=added, **options)
    for few in np.split(np.arange(40), 5):
        z = functions.matmul_vec(device, x[few], weight, residual=added[few], **options)
        assert nmse(y[few], z) <= INT8_LIMIT


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "size", "rows"), [("q8", 700, 9), ("q4", 1100, 5)])
def test_quantized_weights_larger_than_a_binding(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, dtype: str, size: int
) -> None:
    small = open_device(Settings(max_binding=568 * size))
    with small.scope():
        assert len(to_gpu(small, np.zeros((size, size)), dtype).shards) == 2
    assert quantized_error(small, rng, rows, (size, size), dtype, "bias residual") <= INT8_LIMIT


def chain_error(
    device: Device,
    rng: np.random.Generator,
    dtype: str,
    kind: str,
    rows: int,
    *,
    tuning: Tuning | None = None,
    **options: Any,
) -> float:
    """Returns the error of two projections. The kernel between them prepares its result for the
    second: times the weights of a norm, or as int8. tuning: without one, few rows take
    matmul_vec."""
    k, n = 96, 64
    whole = rows > MAX_VEC_ROWS or isinstance(tuning, ByRows)  # blocks have one scale, not two
    options["tuning"] = tuning or ByVec(device)
    x, exact = int8_rows(rng, rows, k, many=whole)
    shapes = ((2 * n, k), (n, n)) if kind == "gated" else ((n, k), (n, n))
    if dtype in ("q8", "q4"):
        first, second = (exact_weight(rng, *shape, dtype) for shape in shapes)
    else:
        exact = x.astype(np.float64)
        first, second = (rounded(normal(rng, *shape), dtype) for shape in shapes)
    added, norm, behind = normal(rng, rows, n), normal(rng, n), normal(rng, n)
    forward = Forward(device, rows, **options)
    y = linear_check.matmul(exact, first)
    value = ops.linear(forward.input(x), to_gpu(device, first, dtype))
    if kind in ("gated", "product"):
        gate, up = ops.split(value, n, n) if kind == "gated" else (value, forward.input(added))
        value = ops.activation(gate, "silu") * up
        y = elementwise_check.silu(y[:, :n]) * (y[:, n:] if kind == "gated" else added)
        expected = linear_check.matmul(prepared(y, dtype, whole), second)
        output = ops.linear(value, to_gpu(device, second, dtype))
    else:
        if kind != "added":  # with a norm behind the first
            value = ops.rmsnorm(value, to_gpu(device, behind), EPS)
            y = norm_check.rmsnorm(y, behind, EPS)
        value = forward.input(added) + value
        y = y + added
        if kind == "scaled":
            value, y = ops.scale(value, to_gpu(device, np.full(1, 0.4))), np.float32(0.4) * y
        if kind == "bare":  # no norm before the second
            normed, normed_y = value, prepared(y, dtype, whole)
        else:
            scale = 1 / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + EPS)
            normed = ops.rmsnorm(value, to_gpu(device, norm), EPS)
            normed_y = scale * prepared(y * norm, dtype, whole)
        expected = y + linear_check.matmul(normed_y, second)
        output = value + ops.linear(normed, to_gpu(device, second, dtype))
    return nmse(forward.run(output), expected)


def prepared(y: Array, dtype: str, whole: bool | None = None) -> Array:
    """Returns y as a projection reads it: in int8, in whole blocks or halves of them (None: by the
    number of rows, as where few take matmul_vec), when the projection's weights are quantised."""
    if dtype not in ("q8", "q4"):
        return y
    whole = len(y) > MAX_VEC_ROWS if whole is None else whole
    blocks = y.reshape(len(y), -1, 32 if whole else 16)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
    return (np.rint(blocks / scale) * scale).reshape(y.shape)


@meeting(
    {
        "kind": (
            *((kind, True) for kind in ("gated", "product", "added", "normed", "scaled", "bare")),
            *(("gated", False), ("added", False)),
        ),
        "dtype": tuple(product(("bf16", "q8", "q4"), (1, 3, 9))),
        "settings": (
            *(Settings(), Settings(bounds_checks=True), Settings(storage_buffers=8)),
            *(Settings(subgroups=False), LEAST),
        ),
    },
    dtype=(("bf16", 1), ("bf16", 9), ("q8", 1), ("q4", 3), ("q4", 9)),
)
def test_projections_in_a_row(
    open_device: OpenDevice, rng: np.random.Generator, case: Case
) -> None:
    """case: what lies between them, and whether kernels are fused; the weights, and the rows."""
    device, (kind, fuse), (dtype, rows) = open_device(case["settings"]), case["kind"], case["dtype"]
    with device.scope():
        assert chain_error(device, rng, dtype, kind, rows, fuse=fuse) <= LIMIT


@pytest.mark.parametrize("order", [("bf16", "q8"), ("q8", "bf16")])
def test_a_norm_before_projections_of_both_kinds(
    device: Device, rng: np.random.Generator, order: tuple[str, str]
) -> None:
    x, norm, first = normal(rng, 1, 64), normal(rng, 64), rounded(normal(rng, 64, 64), "bf16")
    y = x.astype(np.float64) + linear_check.matmul(x, first)
    scale = 1 / np.sqrt(np.mean(y * y) + EPS)
    with device.scope():
        forward = Forward(device, 1)
        value = forward.input(x)
        value = value + ops.linear(value, to_gpu(device, first, "bf16"))
        normed = ops.rmsnorm(value, to_gpu(device, norm), EPS)
        outputs, expected = [], np.zeros((1, 64))
        for dtype in order:
            weight = exact_weight(rng, 64, 64, "q8")  # in bf16 too
            outputs.append(ops.linear(normed, to_gpu(device, weight, dtype)))
            expected += scale * linear_check.matmul(
                prepared(y * norm, dtype), rounded(weight, dtype)
            )
        assert nmse(forward.run(outputs[0] + outputs[1]), expected) <= LIMIT


# Heads

HEADS: Factors = SETTINGS | {
    "rows": (1, 3, 8, 9, 40),
    "shape": ((1, 1, 1), (3, 7, 36), (2, 20, 130), (2, 512, 128), (2, 256, 512)),
    "before": (0, 6, 64),  # many rows of whole vectors go through matmul
    "form": ("alone", "kept", "half-split", "interleaved"),
    "dtype": ("f32", "f16", "bf16", "q8", "q4"),
}


@covering(HEADS, rows=(1, 3, 9, 40), dtype=("f32", "bf16", "q8", "q4"))
def test_head_linear(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        (heads, n, k), before, form = case["shape"], case["before"], case["form"]
        weight = exact_weight(rng, heads * n, k, case["dtype"])
        x = exact = normal(rng, case["rows"], heads * (k + before))
        options: dict[str, Any] = {"keep": form != "alone", "dtype": case["dtype"]}
        if form in ("half-split", "interleaved") and before:
            frequencies, interleaved = 10.0 ** -np.linspace(0, 2, before // 2), form != "half-split"
            table = functions.rope_table(frequencies, 9 + len(x))
            options |= {"table": table, "position": 9, "interleaved": interleaved}
            positions = 9 + np.arange(len(x))
            exact = rope_check.rope(x, positions, frequencies, k + before, interleaved)
        y = functions.head_linear(open_device(settings_of(case)), x, weight, heads, **options)
        expected = linear_check.head_linear(exact, weight.reshape(heads, n, k), form != "alone")
        assert nmse(y, expected) <= LIMIT, case


@pytest.mark.parametrize(("rows", "keep"), [(5, True), (20, False)])
def test_heads_in_several_shards(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, keep: bool
) -> None:
    """Shards have two heads and one."""
    device = open_device(Settings(max_binding=320_000))
    x, weight = normal(rng, rows, 3 * 204), normal(rng, 3 * 200, 200)
    y = functions.head_linear(device, x, weight, 3, keep=keep)
    assert nmse(y, linear_check.head_linear(x, weight.reshape(3, 200, 200), keep)) <= LIMIT
    with pytest.raises(ShaderError, match="inside of a head"):
        functions.head_linear(device, x, weight[:570], 3)


# Changes of which each row has its own

LORA: Factors = SETTINGS | {
    "rows": (1, 2, 7, 8, 9, 70, 130),
    "shape": ((1, 1), (5, 130), (8, 61), (16, 300), (67, 2056)),  # rank and width
    "adapters": (1, 4),
    "mixed": (True, False),  # else all rows have the last
    "form": ("", "norm", "residual"),
}


@covering(LORA, rows=(1, 2, 8, 70), shape=((1, 1), (5, 130), (67, 300)))
def test_lora(open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    for case in cases:
        rows, (rank, width), count = case["rows"], case["shape"], case["adapters"]
        device = open_device(settings_of(case))
        adapters = rng.integers(0, count + 1, rows) if case["mixed"] else np.full(rows, count)
        x, a = normal(rng, rows, width), normal(rng, count, rank, width)
        norm = (normal(rng, width), EPS) if case["form"] == "norm" else None
        low = functions.lora_down(device, x, a, adapters, norm=norm)
        normed = x if norm is None else norm_check.rmsnorm(x, *norm)
        assert nmse(low, lora_check.by_row(normed, a, adapters)) <= LIMIT, case
        b, low = normal(rng, count, width, rank), normal(rng, rows, rank)
        own = normal(rng, rows, width) if case["form"] == "residual" else None
        y = functions.lora_up(device, low, b, adapters, scale=0.37, residual=own)
        expected = 0.37 * lora_check.by_row(low, b, adapters)
        assert nmse(y, expected if own is None else expected + own) <= LIMIT, case


@pytest.mark.parametrize("variant", [(8, 4), (4, 2), (2, 1), (1, 4)])
def test_every_variant_of_lora(
    device: Device, rng: np.random.Generator, variant: tuple[int, int]
) -> None:
    """Rows and outputs of a workgroup, the last of which has fewer outputs."""
    tuning = Forced(device, variant)
    for rows, settled in ((8, True), (70, True), (70, False)):
        adapters = rng.integers(0, 4, rows)
        adapters = np.sort(adapters) if settled else adapters
        x, a, norm = normal(rng, rows, 61), normal(rng, 3, 6, 61), (normal(rng, 61), EPS)
        y = functions.lora_down(device, x, a, adapters, norm=norm, tuning=tuning)
        expected = lora_check.by_row(norm_check.rmsnorm(x, *norm), a, adapters)
        assert nmse(y, expected) <= LIMIT
        b, low = normal(rng, 3, 61, 6), normal(rng, rows, 6)
        y = functions.lora_up(device, low, b, adapters, tuning=tuning)
        assert nmse(y, lora_check.by_row(low, b, adapters)) <= LIMIT


def test_workgroups_of_lora(device: Device) -> None:
    """Rows of prefill share weights, and their outputs what is read of them."""
    tuning = Tuning(device)
    tuning.software, tuning.multiprocessors = False, 128
    assert [lora_rows(tuning, rows) for rows in (1, 8, 16, 64, 128, 512)] == [1, 1, 2, 8, 8, 8]
    shapes = [(1, 16), (8, 16), (16, 16), (64, 4), (64, 16)]
    assert [lora_outputs(tuning, *shape) for shape in shapes] == [1, 1, 2, 2, 4]


def test_lora_in_several_shards(open_device: OpenDevice, rng: np.random.Generator) -> None:
    """That end inside of an adapter's rows."""
    device = open_device(Settings(max_binding=160_000))
    with device.scope():
        assert len(to_gpu(device, np.zeros((4 * 150, 100))).shards) == 2
    x, adapters = normal(rng, 9, 100), np.array([0, 1, 2, 3, 4, 4, 3, 3, 0])
    weights = normal(rng, 4, 150, 100)
    expected = lora_check.by_row(x, weights, adapters)
    assert nmse(functions.lora_down(device, x, weights, adapters), expected) <= LIMIT
    own = normal(rng, 9, 150)
    y = functions.lora_up(device, x, weights, adapters, residual=own)
    assert nmse(y, own + expected) <= LIMIT


@pytest.mark.parametrize(("rows", "plan_rows"), [(3, 8), (9, 130)])
def test_lora_of_logits(
    device: Device, rng: np.random.Generator, rows: int, plan_rows: int
) -> None:
    """Rows that get logits have the adapter of their sequence, which may be one of other rows."""
    x, a = normal(rng, rows, 40), normal(rng, 2, 5, 40)
    with device.scope():
        forward = Forward(device, rows, plan_rows=plan_rows, logits_rows=[rows - 1])
        low = LoraDown(ops.logits_rows(forward.input(x)), to_gpu(device, a.reshape(10, 40)), 5)
        y = forward.run(low, adapters=[2])
    assert nmse(y, lora_check.by_row(x[-1:], a, [2])) <= LIMIT


def test_lora_of_logits_of_several_prompts(device: Device, rng: np.random.Generator) -> None:
    x, a, adapters = (
        normal(rng, 9, 40),
        normal(rng, 3, 5, 40),
        np.array([1, 1, 0, 2, 2, 2, 3, 0, 3]),
    )
    chosen = [1, 2, 5, 8]
    with device.scope():
        prompts = [(2, 4), (1, 0), (3, 9), (3, 1)]
        forward = Forward(device, 9, plan_rows=130, logits_rows=chosen, prompts=prompts)
        low = LoraDown(ops.logits_rows(forward.input(x)), to_gpu(device, a.reshape(15, 40)), 5)
        y = forward.run(low, adapters=adapters)
    assert nmse(y, lora_check.by_row(x[chosen], a, adapters[chosen])) <= LIMIT


@pytest.mark.parametrize("settings", [Settings(), LEAST])
@pytest.mark.parametrize(("rows", "n"), [(1, 48), (1, 24), (2, 48)])  # halves of blocks, or not
def test_heads_before_a_quantized_projection(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, n: int, settings: Settings
) -> None:
    device, x, first = open_device(settings), normal(rng, rows, 4 * 44), normal(rng, 4 * n, 40)
    second = exact_weight(rng, 40, 4 * n, "q8")
    with device.scope():
        forward = Forward(device, rows)
        y = ops.head_linear(forward.input(x), to_gpu(device, first), 4)
        output = ops.linear(y, to_gpu(device, second, "q8"))
        kernels = {kernel.spec.name for kernel in forward.lower(output)[0].kernels}
        assert ("quantize" in kernels) == ((rows, n) != (1, 48))
        y = forward.run(output)
    whole = few_rows(Tuning(device), rows)
    expected = prepared(linear_check.head_linear(x, first.reshape(4, n, 40)), "q8", whole)
    assert nmse(y, linear_check.matmul(expected, second)) <= LIMIT


# Embedding, norms, activations


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (37, 67), (500, 250)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_embedding(
    open_device: OpenDevice,
    rng: np.random.Generator,
    dtype: str,
    vocab: int,
    width: int,
    rows: int,
) -> None:
    weight, ids = normal(rng, vocab, width), rng.integers(0, vocab, rows)
    for settings in (LEAST, Settings(max_binding=160_000)):  # the last is in shards
        y = functions.embedding(open_device(settings), ids, weight, dtype=dtype, scale=1.5)
        assert nmse(y, 1.5 * rounded(weight, dtype)[ids].astype(np.float64)) <= LIMIT


def test_position_embedding(open_device: OpenDevice, rng: np.random.Generator) -> None:
    weight = normal(rng, 500, 250)
    for settings in (LEAST, Settings(max_binding=160_000)):  # the last is in shards
        y = functions.position_embedding(open_device(settings), weight, 40, position=300)
        assert (y == weight[300:340]).all()


@covering(
    SETTINGS
    | {"rows": (1, 5, 9), "parts": (1, 3), "width": (1, 7, 24, 128, 331, 1024, 4100)}
    | {"groups": (1, 2)}
)
def test_rmsnorm(open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    for case in cases:
        groups = case["groups"]
        x = normal(rng, case["rows"], case["parts"] * groups * case["width"])
        weight = normal(rng, groups * case["width"])
        device = open_device(settings_of(case))
        y = functions.rmsnorm(device, x, weight, eps=1e-3, groups=groups)
        assert nmse(y, norm_check.rmsnorm(x, weight, 1e-3, groups)) <= LIMIT, case


@covering(
    SETTINGS
    | {"rows": (1, 5, 9), "parts": (1, 3), "width": (1, 7, 128, 331, 1024, 4100)}
    | {"groups": (1, 2), "bias": (True, False)}
)
def test_layernorm(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        groups = case["groups"]
        width = groups * case["width"]
        x = 2 + normal(rng, case["rows"], case["parts"] * width)  # a mean that is not zero
        weight, bias = normal(rng, width), normal(rng, width) if case["bias"] else None
        device = open_device(settings_of(case))
        y = functions.layernorm(device, x, weight, bias, eps=1e-3, groups=groups)
        assert nmse(y, norm_check.layernorm(x, weight, bias, 1e-3, groups)) <= LIMIT, case


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_rmsnorm_of_extreme_values(device: Device, rng: np.random.Generator, size: float) -> None:
    x, weight = np.float32(size) * normal(rng, 3, 40), normal(rng, 40)
    y = functions.rmsnorm(device, x, weight, eps=EPS)
    assert nmse(y, norm_check.rmsnorm(x, weight, EPS)) <= LIMIT
    assert not functions.rmsnorm(device, np.zeros((2, 40)), weight, eps=EPS).any()


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("width", [1, 8, 67, 1000])
def test_elementwise(least_device: Device, rng: np.random.Generator, rows: int, width: int) -> None:
    a, b = normal(rng, rows, width), normal(rng, rows, width)
    both, exact = np.concatenate([a, b], axis=1), a.astype(np.float64)
    add = functions.elementwise_add(least_device, a, b)
    mul = functions.elementwise_mul(least_device, a, b)
    assert nmse(add, exact + b) <= LIMIT
    assert nmse(mul, exact * b) <= LIMIT
    for cap in (0.3, 50.0):  # of values like it: small ones are differences, of what exp leaves
        y = functions.softcap(least_device, cap * a, cap)
        assert nmse(y, elementwise_check.softcap(cap * a, cap)) <= LIMIT
    assert (functions.clip(least_device, a, 0.7) == np.clip(a, -0.7, 0.7)).all()
    for shape in np.array([[0.3, -0.8, 0.5, -1e-6], [-30, 90, 0.2, -0.7]], np.float32):
        bent = functions.xielu(least_device, a, shape)
        assert nmse(bent, elementwise_check.xielu(a, shape)) <= LIMIT
    assert (functions.scale(least_device, a, 0.7) == np.float32(0.7) * a).all()
    scaled = functions.position_scale(least_device, a, 0.3, 4, position=6)
    expected = elementwise_check.position_scale(a, np.arange(6, 6 + rows), 0.3, 4)
    assert nmse(scaled, expected) <= LIMIT
    for name, function in elementwise_check.ACTIVATIONS.items():
        assert nmse(functions.activation(least_device, a, name), function(a)) <= LIMIT
        gated = functions.activation(least_device, both, name, gated=True)
        assert nmse(gated, function(a) * b) <= LIMIT


@pytest.mark.parametrize("function", elementwise_check.ACTIVATIONS)
def test_activations_of_all_values(device: Device, function: str) -> None:
    x = np.linspace(-12, 12, 4001, dtype=np.float32)[None]
    y = functions.activation(device, x, function)
    assert np.allclose(y, elementwise_check.ACTIVATIONS[function](x), rtol=1e-6, atol=5e-7)
    x = np.array([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30]])
    y = functions.activation(device, x, function)
    expected = np.where(x > 0, x, 0)
    if function == "relu2":
        expected[0, -1] = np.inf
        expected[0, :-1] **= 2
    assert np.allclose(y, expected, rtol=1e-6, atol=1e-7)


def test_softcap_of_large_values(device: Device) -> None:
    x = np.array([[-1e30, -2000.0, 0.0, 2000.0, 1e30]])
    assert np.allclose(functions.softcap(device, x, 30.0), [[-30, -30, 0, 30, 30]], rtol=1e-6)


def test_take_rows(least_device: Device, rng: np.random.Generator) -> None:
    x = normal(rng, 40, 67)
    for rows in ([39], [0, 39, 7, 7], list(range(8))):
        assert (functions.take_rows(least_device, x, rows) == x[rows]).all()


# Rotary positions


def rope_of(kind: str, **scaling: Any) -> RopeConfig:
    config = {
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": kind} | scaling,
    }
    return RawConfig(config).rope(head_dim=32)


def frequencies_of(rope: RopeConfig, length: int) -> tuple[Array, float]:
    """Radians per position and the factor on cos and sin, from the papers, in float64.

    length: of the sequence, on which "dynamic" and "longrope" depend.
    """
    dim, theta, s = rope.rotary_dim, rope.theta, rope.scaling
    pair = np.arange(dim // 2)
    base = theta ** (-2 * pair / dim)
    own = rope.max_position_embeddings
    if rope.kind == "linear":  # Chen et al. 2023
        return base / s["factor"], 1.0
    if rope.kind == "dynamic":  # NTK-aware, for the length so far
        growth = s["factor"] * max(length, own) / own - (s["factor"] - 1)
        return (theta * growth ** (dim / (dim - 2))) ** (-2 * pair / dim), 1.0
    if rope.kind == "ntk_alpha":
        return (theta * s["alpha"] ** (dim / (dim - 2))) ** (-2 * pair / dim), 1.0
    if rope.kind == "longrope":  # Ding et al. 2024
        original = s["original_max_position_embeddings"]
        factors = s["long_factor" if length > original else "short_factor"]
        grown = math.log(own / original) / math.log(original)
        return base / np.array(factors), math.sqrt(1 + grown)
    if rope.kind == "llama3":
        turns = s["original_max_position_embeddings"] * base / (2 * math.pi)
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return base * (kept + (1 - kept) / s["factor"]), 1.0
    if rope.kind == "yarn":  # Peng et al. 2023
        original, factor = s["original_max_position_embeddings"], s["factor"]

        def pair_of(turns: float) -> float:
            """The pair that turns so often over the original context."""
            return dim / 2 * math.log(original / (2 * math.pi * turns)) / math.log(theta)

        first, last = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
        slowed = np.clip((pair - first) / (last - first), 0, 1)
        # DeepSeek-R1-0528-Qwen3-8B's own factor takes YaRN's back.
        magnitude = 1.0 if "attn_factor" in s else 0.1 * math.log(factor) + 1
        return base * (1 - slowed + slowed / factor), magnitude
    return base, 1.0


ROPES = {
    "default": rope_of("default"),
    "linear": rope_of("linear", factor=4.0),
    "dynamic": rope_of("dynamic", factor=4.0),
    "llama3": rope_of(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": rope_of("yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn_deepseek": rope_of(
        "yarn", factor=4.0, original_max_position_embeddings=64, attn_factor=0.8782488562869419
    ),
    "ntk_alpha": rope_of("dynamic", alpha=40.0, factor=1.0),
    "longrope": rope_of(
        "longrope",
        short_factor=[1 + i / 16 for i in range(16)],
        long_factor=[1 + i / 2 for i in range(16)],
        original_max_position_embeddings=16,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [0, 16, 17])
def test_rope_tables_are_the_papers(kind: str, length: int) -> None:
    table = rope_table(ROPES[kind], 300, length)
    for position in (0, 1, 63, 64, 65, 299):
        so_far = position + 1 if kind == "dynamic" else length
        frequencies, factor = frequencies_of(ROPES[kind], so_far)
        angle = position * frequencies
        expected = factor * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        # Models compute angles in f32.
        assert np.all(abs(table[position] - expected) <= 2**-21 * (1 + angle[:, None]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ROPES)
def test_rope(least_device: Device, rng: np.random.Generator, kind: str, interleaved: bool) -> None:
    """Against complex numbers: a pair of dimensions times cos + i sin."""
    table = rope_table(ROPES[kind], 300)
    turn = table.astype(np.float64) @ [1, 1j]
    for rows, head_dim, position in ((1, 32, 0), (3, 40, 62), (9, 32, 290)):
        x = normal(rng, rows, 3 * head_dim)
        y = functions.rope(
            least_device, x, table, head_dim=head_dim, position=position, interleaved=interleaved
        )
        heads = x.reshape(rows, 3, head_dim).astype(np.float64)
        turned, rest = heads[..., :32], heads[..., 32:]
        axes = (rows, 3, 16, 2) if interleaved else (rows, 3, 2, 16)
        pairs = turned.reshape(axes) if interleaved else turned.reshape(axes).swapaxes(-1, -2)
        z = (pairs @ [1, 1j]) * turn[position : position + rows, None]
        pairs = np.stack([z.real, z.imag], axis=-1)
        turned = (pairs if interleaved else pairs.swapaxes(-1, -2)).reshape(rows, 3, 32)
        expected = np.concatenate([turned, rest], axis=-1).reshape(x.shape)
        assert nmse(y, expected) <= LIMIT


# Variants that the rules can choose


def rules(device: Device) -> Iterator[Tuning]:
    """Yields the rules of this device, of the least one, and of a GPU with these limits."""
    for software, limits in product((True, False), (device.limits, Limits())):
        tuning = Tuning(device)
        tuning.software, tuning.limits = software, limits
        yield tuning


class Forced(Tuning):
    """Always the same variant; for attention, one that joins what it can, or none."""

    def __init__(
        self,
        device: Device,
        variant: VecVariant | TileVariant | AttentionVariant | tuple[int, int],
        joined: AttentionVariant | None = None,
    ):
        super().__init__(device)
        self.instead = {
            **dict.fromkeys(
                (matmul_vec_variant, matmul_variant, matmul_int8_variant, attention_variant),
                lambda *call: variant,
            ),
            **dict.fromkeys((few_rows, matmul_lanes_variant), never),
            attention_joined_variant: lambda *call: joined,
            lora_rows: lambda *call: variant[0],
            lora_outputs: lambda *call: variant[1],
        }


# Every third of them, so that all numbers of each kind come; the others in the full run.
thirds = pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2))]
)


@pytest.mark.full
@thirds
def test_every_variant_of_matmul_vec(device: Device, rng: np.random.Generator, part: int) -> None:
    widths = [8 << i for i in range(12)] + [100, 576, 896, 1536, 4864, 8960, 14336, 18944]
    sizes = list(product(widths, (16, 1000, 30000, 130000), (1, 8), (False, True)))
    shapes = [
        VecShape(k, n, rows, dtype, gated, quantize)
        for k, n, rows, gated in sizes
        for dtype, quantize in (("bf16", False), ("q4", False), ("q4", True))
        if not quantize or rows == 1
    ]
    variants = {
        (matmul_vec_variant(tuning, shape), shape.rows, shape.gated, shape.dtype, shape.quantize)
        for tuning in rules(device)
        for shape in shapes
        if not shape.quantize or tuning.subgroup_size
    }
    assert len(variants) > 1
    for variant, rows, gated, dtype, quantize in sorted(variants, key=repr)[part::3]:
        form = "norm gated" if gated else "norm residual"
        k = variant.team * variant.unroll * 8 + 61  # more than one round, and a rest
        tuning = Forced(device, variant)
        if dtype == "bf16":
            error = linear_error(device, rng, rows, (k, 37), dtype, form, tuning=tuning)
            assert error <= LIMIT, variant
        elif quantize:
            same = np.random.default_rng(0)  # values that no adapter rounds to other int8
            with device.scope():
                error = chain_error(device, same, dtype, gated, 1, tuning=tuning)
            assert error <= LIMIT, variant
        else:
            shape = (min(4 * k, 700), 37)
            form = "bias gated" if gated else "residual"
            error = quantized_error(device, rng, rows, shape, dtype, form, tuning=tuning)
            assert error <= INT8_LIMIT, variant


def test_workgroups_have_whole_scales_of_what_goes_out_as_int8() -> None:
    """Whatever limits an adapter has: some allow 384 invocations. Teams are whole subgroups of any
    size, of which Intel's compiler chooses 8 to 32 lanes, and AMD's 32 or 64."""
    dtypes, outputs = ("bf16", "q4", "q5", "mxfp4", "iq4nl", "nf4"), (False, True)
    sizes = [(lanes, lanes) for lanes in (4, 8, 16, 32, 64, 128)] + [(8, 32), (32, 64)]
    for (lanes, largest), most in product(sizes, (256, 384, 512, 896, 1024)):
        device = DryDevice(Limits(max_invocations=most))
        device.subgroup_size, device.largest_subgroup = lanes, largest
        for k, dtype, gated in product((64, 14336), dtypes, outputs):
            shape = VecShape(k, 4096, 1, dtype, gated, quantize=True)
            variant = matmul_vec_variant(Tuning(device), shape)
            assert variant.per_workgroup in (HALF, BLOCK), (lanes, most, variant)
            assert variant.per_workgroup <= variant.workgroup <= most, (lanes, variant)
            assert variant.team % max(32, largest) == 0, (lanes, variant)
            assert variant.workgroup % variant.team == 0, (lanes, variant)


@pytest.mark.full
@thirds
def test_every_variant_of_matmul(device: Device, rng: np.random.Generator, part: int) -> None:
    variants = {
        matmul_variant(tuning, rows, n, k, splits=True)
        for tuning in rules(device)
        for rows, n, k in product((9, 33, 65, 512, 2048), (16, 1024, 30000), (128, 2048))
    }
    assert len(variants) > 1
    for index, variant in enumerate(sorted(variants, key=repr)[part::3]):
        shape, tuning = ((37, 150), (64, 16))[index % 2], Forced(device, variant)
        error = linear_error(device, rng, 140, shape, "f16", "bias residual", tuning=tuning)
        assert error <= LIMIT, (variant, shape)


@pytest.mark.full
def test_rows_beyond_the_loops_of_a_software_adapter(
    device: Device, rng: np.random.Generator
) -> None:
    """Mesa's ends them in silence, and the last columns would be missing."""
    assert linear_error(device, rng, 9, (176_000, 8), "f32", "") <= LIMIT


def test_workgroups_that_share_columns(open_device: OpenDevice, rng: np.random.Generator) -> None:
    """Workgroups share columns of a matrix in one shard, or in two."""
    form = "bias scale gelu residual"
    for settings, rows, shape, splits in (
        (Settings(), 140, (100, 70), 3),
        (Settings(max_binding=160_000), 9, (300, 200), 2),
    ):
        device = open_device(settings)
        tuning = Forced(device, TileVariant(4, 4, True, 8, 8, splits=splits))
        assert linear_error(device, rng, rows, shape, "f32", form, tuning=tuning) <= LIMIT


@pytest.mark.full
@thirds
def test_every_variant_of_matmul_int8(device: Device, rng: np.random.Generator, part: int) -> None:
    variants = {
        matmul_int8_variant(tuning, rows, n, k, dtype == "q8", dtype)
        for tuning, dtype in product(rules(device), ("q8", "nf4"))
        for rows, n, k in product((9, 33, 65, 512, 2048), (16, 1024, 30000), (128, 2048))
    }
    assert len(variants) > 1
    variants.add(Int8TileVariant(4, 4, double=True, m_size=8, n_size=8, splits=2))
    # With two buffers it needs more memory than software adapters have.
    variants.add(Int8TileVariant(8, 8, double=False, m_size=16, n_size=16, planes=2))
    for index, variant in enumerate(sorted(variants, key=repr)[part::3]):
        tuning = Forced(device, variant)
        if variant.planes == 2:
            weight, values = grouped(rng, (150, 37), "nf4", Grouping(64, "f32"))
            x, exact = int8_rows(rng, 140, 37, many=True)
            y = functions.matmul_tiled(device, x, weight, tuning=tuning)
            error = nmse(y, linear_check.matmul(exact, multiplied(weight, values)))
            assert error <= INT8_LIMIT, variant
            continue
        dtype, shape = (("q8", (37, 150)), ("q4", (328, 16)))[index % 2]
        error = quantized_error(device, rng, 140, shape, dtype, "", tuning=tuning)
        assert error <= INT8_LIMIT, (variant, dtype)


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
def test_workgroups_of_any_size(
    device: Device, rng: np.random.Generator, sizes: tuple[int, int]
) -> None:
    tiles = Forced(device, TileVariant(4, 4, False, *sizes))
    assert linear_error(device, rng, 9, (37, 70), "f16", "", tuning=tiles) <= LIMIT
    for dtype in ("q8", "q4"):
        tiles = Forced(device, Int8TileVariant(4, 4, False, *sizes))
        assert quantized_error(device, rng, 9, (37, 70), dtype, "", tuning=tiles) <= INT8_LIMIT


# By hand


def test_wrong_arrays_are_refused(device: Device, least_device: Device) -> None:
    x = np.zeros((3, 16))
    with pytest.raises(ShaderError, match="1 to 8 rows, not 9: use matmul_tiled"):
        functions.matmul_vec(device, np.zeros((9, 16)), x)
    with pytest.raises(ShaderError, match="use attention_tiled"):
        functions.attention(device, np.zeros((9, 16)), x, x, n_kv_heads=1, scale=1.0)
    with pytest.raises(ShaderError, match=r"\[rows, width\] with rows = 3, not \[2, 16\]"):
        functions.elementwise_add(device, x, x[:2])
    with pytest.raises(ShaderError, match="x has no values"):
        functions.activation(device, x[:0], "silu")
    with pytest.raises(ShaderError, match=r"\[kv_len, 3 \* head_dim\]"):
        functions.attention(device, x, x, x, n_kv_heads=3, scale=1.0)
    with pytest.raises(ShaderError, match="nine storage buffers: use rope_attention"):
        functions.rope_kv_write(
            least_device,
            np.zeros((3, 48)),
            np.zeros((3, 2, 2)),
            n_heads=1,
            n_kv_heads=1,
            norms=(x[0], x[0], EPS),
        )
    with pytest.raises(ShaderError, match=r"table must be \[8 or more positions, pairs, 2\]"):
        functions.rope(device, x, np.zeros((7, 8, 2)), head_dim=16, position=5)
    with pytest.raises(ShaderError, match=r"\[outputs, k\] with k = 16, not \[4, 15\]"):
        functions.matmul_tiled(device, x, np.zeros((4, 15)))
    with pytest.raises(ShaderError, match=r"rank, width\] with width = 16, not \[2, 4, 15\]"):
        functions.lora_down(device, x, np.zeros((2, 4, 15)), [0, 1, 2])


def test_sample(device: Device, rng: np.random.Generator) -> None:
    logits = normal(rng, 5, 1300)
    logits[3, 7] = np.nan
    best = logits.argmax(1)
    best[3] = INVALID_TOKEN
    assert (functions.sample(device, logits) == best).all()
    hot = [functions.sample(device, logits, temperature=9.0, seed=seed) for seed in (1, 1, 2**40)]
    assert (hot[0] == hot[1]).all()
    assert (hot[0] != hot[2]).any()
    assert (functions.sample(device, logits, temperature=9.0, top_k=1) == best).all()


def test_profile_times_every_kernel(device: Device, rng: np.random.Generator) -> None:
    """Times are of the GPU's clock: a matrix of 64 times the size takes longer."""
    x, small, large = normal(rng, 1, 512), normal(rng, 32, 512), normal(rng, 2048, 512)
    seconds = [
        functions.profile(functions.matmul_vec, device, x, weight) for weight in (small, large)
    ]
    assert [[label.split()[0] for label in times] for times in seconds] == [["matmul_vec"]] * 2
    (few,), (many,) = (times.values() for times in seconds)
    assert 0 < few < many < 10
    norms = functions.profile(
        functions.matmul_tiled, device, x, small, norm=(x[0], EPS), residual=small[:1, :32]
    )
    assert [label.split()[0] for label in norms][:2] == ["rmsnorm", "matmul"]  # perhaps in splits


def test_profile_keeps_the_order_of_dispatches(device: Device) -> None:
    with device.scope():
        source, target = device.buffer(1 << 24), device.buffer(1 << 24)
        spec = KernelSpec.of("copy", VECTORS=1 << 20)
        items = [
            dispatch(device, spec, [source, target], (count, 1, 1)) for count in (1024, 1, 1024, 1)
        ]
        assert profile_dispatches(device, []) == []
        times = profile_dispatches(device, items, repeats=3)
    assert min(times[0], times[2]) > max(times[1], times[3])


def test_profile_needs_timestamps(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "timestamps", False)
    with pytest.raises(DeviceError, match="no timestamp queries"):
        profile_dispatches(device, [])


# The reference itself


@pytest.mark.live
def test_the_reference_is_torchs(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    def tensor(values: Array) -> Any:
        return torch.from_numpy(np.asarray(values, np.float64))

    def close(ours: Array, theirs: Any) -> bool:
        return nmse(ours, theirs.numpy()) < 1e-28

    x, weight = rng.standard_normal((5, 48)), rng.standard_normal(48)
    norm = torch.nn.functional.rms_norm(tensor(x), [48], tensor(weight), 1e-3)
    assert close(norm_check.rmsnorm(x, weight, 1e-3), norm)
    assert close(elementwise_check.silu(x), torch.nn.functional.silu(tensor(x)))
    assert close(elementwise_check.gelu(x), torch.nn.functional.gelu(tensor(x)))
    gelu_tanh = torch.nn.functional.gelu(tensor(x), approximate="tanh")
    assert close(elementwise_check.gelu_tanh(x), gelu_tanh)
    activations = pytest.importorskip("transformers.activations")
    assert close(elementwise_check.relu(x), torch.relu(tensor(x)))
    assert close(elementwise_check.relu2(x), activations.ACT2FN["relu2"](tensor(x)))
    ministral = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    scale = ministral.get_llama_4_attn_scale(torch.arange(5, 10)[None], 0.3, 4)[0, 0]
    scaled = elementwise_check.position_scale(x, np.arange(5, 10), 0.3, 4)
    assert nmse(scaled, (tensor(x) * scale).numpy()) < 1e-12  # which is float32
    norm = torch.nn.functional.layer_norm(tensor(x), [48], tensor(weight), tensor(-weight), 1e-3)
    assert close(norm_check.layernorm(x, weight, -weight, 1e-3), norm)
    assert close(reference.softmax(x), torch.softmax(tensor(x), -1))
    assert close(linear_check.matmul(x, x), torch.nn.functional.linear(tensor(x), tensor(x)))

    frequencies, positions = 100.0 ** -(np.arange(4) / 4), np.arange(7, 12)
    angle = tensor(np.concatenate([positions[:, None] * frequencies] * 2, axis=1))[None]
    heads = tensor(x).reshape(1, 5, 6, 8).transpose(1, 2)
    turned, _ = modeling.apply_rotary_pos_emb(heads, heads, angle.cos(), angle.sin())
    expected = turned.transpose(1, 2).reshape(5, 48)
    assert close(rope_check.rope(x, positions, frequencies, 8), expected)

    q, k, v = (rng.standard_normal((n, w)) for n, w in ((5, 48), (12, 16), (12, 16)))
    for window in (0, 4):
        heads = [tensor(p).reshape(1, len(p), -1, 8).transpose(1, 2) for p in (q, k, v)]
        mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
        mask &= torch.ones(5, 12, dtype=torch.bool).triu(8 - window) | (window == 0)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        expected = attended.transpose(1, 2).reshape(5, 48)
        assert close(attention_check.attention(q, k, v, 6, 0.3, window), expected)
