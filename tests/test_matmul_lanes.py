"""matmul_lanes against float64: all types of weights that it takes, rows, forms; awkward shapes."""

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
    normal,
    pairwise,
)

from infer.kernels import functions
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.bench import EPS
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
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.record import run
from infer.kernels.gpu.tensor import INTEGERS, LOOKED_UP, QUANTIZED
from infer.kernels.ops import functional as ops
from infer.kernels.ops.linear_check import ByLanes, matmul
from infer.kernels.ops.matmul_lanes import LanesShape, matmul_lanes_variant
from infer.kernels.ops.norm_check import rmsnorm

CASES: Factors = {
    "rows": (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64, 130),
    "stored": (
        *((dtype, None) for dtype in (*FLOATS, *QUANTIZED)),
        *(stored for stored in PUBLISHED if stored[0] not in LOOKED_UP),
    ),
    "shape": ((1, 7), (37, 130), (256, 40), (331, 61), (1024, 15)),
    "norm": (False, True),
    "bias": (False, True),
    "scale": (1.0, 0.37),
    "form": ("", "gelu", "gated", "gelu_tanh gated"),
    "residual": (False, True),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 6 else ())
        for i, case in enumerate(pairwise(CASES))
    ],
)
def test_matmul_lanes(device: Device, rng: np.random.Generator, case: Case) -> None:
    (dtype, grouping), (k, n), rows, form = (case[c] for c in ("stored", "shape", "rows", "form"))
    x, expected = activations(rng, rows, k, dtype, many=False)
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
    y = functions.matmul_lanes(device, x, weight, **options)
    assert nmse(y, expected) <= (INT8_LIMIT if dtype in INTEGERS else LIMIT)


@pytest.mark.parametrize(("rows", "plan_rows"), [(5, 12), (1, 2), (3, 8), (17, 64), (9, 130)])
def test_only_living_rows_of_the_step_are_written(
    device: Device, rng: np.random.Generator, rows: int, plan_rows: int
) -> None:
    x, weight = normal(rng, rows, 100), normal(rng, 21, 100)
    with device.scope():
        forward = Forward(device, rows, plan_rows=plan_rows, tuning=ByLanes(device))
        y = ops.linear(forward.input(x), to_gpu(device, weight))
        lowering, buffer = forward.lower(y)
        assert [kernel.spec.name for kernel in lowering.kernels] == ["matmul_lanes"]
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
    with small.scope():
        assert len(to_gpu(small, weight).shards) == 3
    y = functions.matmul_lanes(small, x, weight, bias=bias)
    assert nmse(y, matmul(x, weight) + bias) <= LIMIT


def test_a_row_has_the_same_bits_among_others(device: Device, rng: np.random.Generator) -> None:
    """However many there are."""
    x, weight = normal(rng, 40, 331), normal(rng, 61, 331)
    whole = functions.matmul_lanes(device, x, weight)
    for rows in (1, 2, 5, 8, 13):
        assert (functions.matmul_lanes(device, x[:rows], weight) == whole[:rows]).all()


def test_it_is_for_adapters_that_compute_on_a_cpu(device: Device) -> None:
    """Whose subgroups have a known number of lanes; a GPU never takes it."""
    tuning, shape = ByLanes(device), LanesShape(4, "bf16")
    tuning.software, tuning.subgroup_size, tuning.largest_subgroup = True, 8, 8
    assert matmul_lanes_variant(tuning, shape) is not None
    for software, least, most in ((False, 8, 8), (True, 8, 32), (True, 0, 0)):
        tuning.software, tuning.subgroup_size, tuning.largest_subgroup = software, least, most
        assert matmul_lanes_variant(tuning, shape) is None
