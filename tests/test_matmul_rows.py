"""matmul_rows against float64: all types of weights, rows, forms, variants; awkward shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from test_kernels import (
    INT8_LIMIT,
    LIMIT,
    Case,
    Factors,
    activated,
    activation_of,
    chain_error,
    normal,
    pairwise,
)

from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.bench import EPS, Bench
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import (
    FLOATS,
    PUBLISHED,
    activations,
    exact_weight,
    grouped,
    multiplied,
)
from infer.kernels.checks.reference import nmse
from infer.kernels.compiler.arena import Arena
from infer.kernels.compiler.graph import stride
from infer.kernels.compiler.tuning import Tuning
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.record import run
from infer.kernels.gpu.tensor import INTEGERS, QUANTIZED
from infer.kernels.ops import functional as ops
from infer.kernels.ops.linear_check import ByRows, matmul, run_matmul_rows
from infer.kernels.ops.matmul_rows import RowsShape, RowsVariant, possible_variant
from infer.kernels.ops.norm_check import rmsnorm

# For subgroups of 8 lanes; with what does not fit the rule's are taken.
VARIANTS = (
    None,
    RowsVariant(8, 2, k_lanes=8, n_lanes=1, n_teams=2),
    RowsVariant(4, 4, k_lanes=4, n_lanes=2, n_teams=1, k_teams=2, staged=True),
    RowsVariant(4, 4, k_lanes=8, n_lanes=1, n_teams=1, k_teams=2),
    RowsVariant(3, 2, k_lanes=2, n_lanes=4, n_teams=2, k_teams=3),
    RowsVariant(16, 1, k_lanes=8, n_lanes=1, n_teams=3, splits=2),
    RowsVariant(2, 3, k_lanes=8, n_lanes=1, n_teams=1, k_teams=2, splits=3),
    RowsVariant(8, 2, k_lanes=4, n_lanes=2, n_teams=3, splits=2, staged=True),
    RowsVariant(4, 2, k_lanes=1, n_lanes=8, n_teams=1),
)
ROWS: Factors = {
    "rows": (2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64),
    "stored": (*((dtype, None) for dtype in (*FLOATS, *QUANTIZED)), *PUBLISHED),
    "shape": ((1, 7), (37, 130), (256, 40), (331, 61), (1024, 15)),
    "variant": VARIANTS,
    "norm": (False, True),
    "bias": (False, True),
    "scale": (1.0, 0.37),
    "form": ("", "gelu", "gated", "gelu_tanh gated"),
    "residual": (False, True),
}


def rows_error(device: Device, rng: np.random.Generator, case: Case) -> float:
    (dtype, grouping), (k, n), rows, form = (case[c] for c in ("stored", "shape", "rows", "form"))
    x, expected = activations(rng, rows, k, dtype, many=True)
    gated = "gated" in form
    outputs = 2 * n if gated else n
    options: dict[str, Any] = {"gated": gated, "activation": activation_of(form)}
    weight: Any
    if grouping is None:
        weight = values = exact_weight(rng, outputs, k, dtype)
        options["dtype"] = dtype
    else:
        weight, values = grouped(rng, (outputs, k), dtype, grouping)
        values = multiplied(weight, values)
    if case["norm"] and dtype not in INTEGERS:  # of which it is not known how they round
        options["norm"] = normal(rng, k), EPS
        expected = rmsnorm(x, *options["norm"])
    expected = matmul(expected, values)
    if case["bias"]:
        options["bias"] = normal(rng, outputs)
        expected = expected + options["bias"]
    if not gated:
        options["scale"] = case["scale"]
        expected = case["scale"] * expected
    expected = activated(expected, form, n)
    if case["residual"]:
        options["residual"] = normal(rng, rows, n)
        expected = expected + options["residual"]
    with device.scope():
        y = run_matmul_rows(Bench(device), x, weight, case["variant"], **options)
    return nmse(y, expected)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 6 else ())
        for i, case in enumerate(pairwise(ROWS))
    ],
)
def test_matmul_rows(device: Device, rng: np.random.Generator, case: Case) -> None:
    limit = INT8_LIMIT if case["stored"][0] in INTEGERS else LIMIT
    assert rows_error(device, rng, case) <= limit


@pytest.mark.parametrize(
    ("dtype", "kind", "rows"),
    [
        ("bf16", "normed", 3),
        ("q4", "normed", 8),
        ("q8", "product", 3),
        ("bf16", "product", 8),
        ("bf16", "gated", 9),
        ("q4", "added", 9),
    ],
)
def test_what_projections_pass_on(
    device: Device, rng: np.random.Generator, dtype: str, kind: str, rows: int
) -> None:
    """Factors go into them, and norms stay kernels of their own."""
    with device.scope():
        error = chain_error(device, rng, dtype, kind, rows, tuning=ByRows(device))
    assert error <= LIMIT


@pytest.mark.parametrize(("rows", "plan_rows"), [(5, 12), (1, 2), (3, 8), (17, 64)])
def test_only_living_rows_of_the_step_are_written(
    device: Device, rng: np.random.Generator, rows: int, plan_rows: int
) -> None:
    x, weight = normal(rng, rows, 100), normal(rng, 21, 100)
    with device.scope():
        forward = Forward(device, rows, plan_rows=plan_rows, tuning=ByRows(device, VARIANTS[1]))
        y = ops.linear(forward.input(x), to_gpu(device, weight))
        lowering, buffer = forward.lower(y)
        assert [kernel.spec.name for kernel in lowering.kernels] == ["matmul_rows"]
        header = lowering.step.nbytes - 32 * plan_rows
        device.write(lowering.step, np.zeros(1, np.uint32), header + 32 * (rows - 1) + 16)
        plan = lowering.place(Arena(device))
        run(device, [*plan.body, *plan.head], rows, rows)
        values = device.read(buffer).view(np.float32).reshape(-1, stride(21))[:, :21]
    assert np.isnan(values[rows - 1 :]).all()
    if rows > 1:
        assert nmse(values[: rows - 1], matmul(x, weight)[: rows - 1]) <= LIMIT


def test_shards(open_device: OpenDevice, rng: np.random.Generator) -> None:
    small = open_device(Settings(max_binding=160_000))
    x, weight, bias = normal(rng, 9, 300), normal(rng, 300, 300), normal(rng, 300)
    for variant in (None, VARIANTS[4]):
        with small.scope():
            assert len(to_gpu(small, weight).shards) == 3
            y = run_matmul_rows(Bench(small), x, weight, variant, bias=bias)
        assert nmse(y, matmul(x, weight) + bias) <= LIMIT


def test_the_rule_gives_what_runs() -> None:
    """On any device, for any shape: at most a subgroup, an even tile for gates, enough memory."""
    for lanes, largest in ((0, 0), (4, 4), (8, 8), (16, 32), (32, 32), (64, 64)):
        for limits in (Limits(), Limits(max_invocations=1024, workgroup_storage=49152)):
            device = DryDevice(limits=limits)
            device.subgroup_size, device.largest_subgroup = lanes, largest
            tuning = Tuning(device)
            for dtype in ("bf16", "q8", "q4", "nf4", "e4m3"):
                for rows in range(2, 65):
                    for k, n, gated in ((64, 16, False), (4096, 14336, True), (14336, 4096, False)):
                        shape = RowsShape(k, n, rows, dtype, gated, splits=not gated)
                        variant = possible_variant(tuning, shape)
                        assert variant is None or variant.runs(tuning, shape), (lanes, shape)
                        assert (variant is not None) == (lanes >= 4), (lanes, limits, shape)
