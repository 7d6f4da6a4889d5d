"""Projections with all that they may have, and the same in float64: for kernels that take any."""

from __future__ import annotations

from typing import Any

import numpy as np
from test_kernels import LIMIT, Case, Factors, activated, activation_of, normal

from infer.kernels.checks.arrays import Array, rounded, to_gpu
from infer.kernels.checks.bench import EPS
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import activations, exact_weight, grouped, multiplied
from infer.kernels.checks.linear_check import matmul
from infer.kernels.checks.norm_check import rmsnorm
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import run
from infer.kernels.gpu.tensor import INTEGERS
from infer.kernels.lowering.arena import Arena
from infer.kernels.lowering.target import stride
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops

FORMS: Factors = {
    "shape": ((1, 7), (37, 130), (256, 40), (331, 61), (1024, 15)),
    "norm": (False, True),
    "bias": (False, True),
    "scale": (1.0, 0.37),
    "form": ("", "gelu", "gated", "gelu_tanh gated"),
    "residual": (False, True),
}


def projection(
    rng: np.random.Generator, case: Case, *, many: bool, halves: bool = False
) -> tuple[Array, Any, dict[str, Any], Array]:
    """Returns, for a case with `rows`, `stored` and FORMS, activations, the weight, options of the
    kernel, and the expected result. many: whether blocks of activations have one scale, not two.
    halves: the result is that of a kernel that rounds weights to f16, of activations that f16
    holds, without a norm."""
    (dtype, grouping), (k, n), rows, form = (case[c] for c in ("stored", "shape", "rows", "form"))
    x, expected = activations(rng, rows, k, dtype, many=many)
    if halves:
        x = expected = rounded(normal(rng, rows, k), "f16")
    gated = "gated" in form
    outputs = 2 * n if gated else n
    options: dict[str, Any] = {"gated": gated, "activation": activation_of(form)}
    weight: Any
    if grouping is None:
        weight = values = exact_weight(rng, outputs, k, dtype)
        options["dtype"] = dtype
    else:
        weight, values = grouped(rng, (outputs, k), dtype, grouping)
        values = values if halves else multiplied(weight, values)
    if halves:
        values = rounded(values.astype(np.float32), "f16")
    if (
        case["norm"] and not halves and dtype not in INTEGERS
    ):  # of which it is not known how they round
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
    return x, weight, options, expected


def check_living_rows(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    plan_rows: int,
    kernel: str,
    tuning: Tuning,
) -> None:
    """A plan of more rows than the step has, of which the last one is dead, writes the others."""
    x, weight = normal(rng, rows, 100), normal(rng, 21, 100)
    with device.scope():
        forward = Forward(device, rows, plan_rows=plan_rows, tuning=tuning)
        y = ops.linear(forward.input(x), to_gpu(device, weight))
        lowering, buffer = forward.lower(y)
        assert [each.spec.name for each in lowering.kernels] == [kernel]
        header = lowering.step.nbytes - 32 * plan_rows
        device.write(lowering.step, np.zeros(1, np.uint32), header + 32 * (rows - 1) + 16)
        plan = lowering.place(Arena(device))
        run(device, [*plan.body, *plan.head], rows, rows)
        values = device.read(buffer).view(np.float32).reshape(-1, stride(21))[:, :21]
    assert np.isnan(values[rows - 1 :]).all()
    if rows > 1:
        assert nmse(values[: rows - 1], matmul(x, weight)[: rows - 1]) <= LIMIT
