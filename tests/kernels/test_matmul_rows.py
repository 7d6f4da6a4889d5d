"""matmul_rows against float64: all types of weights, rows, forms, variants; awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import OpenDevice
from projections import FORMS, check_living_rows, projection
from test_kernels import INT8_LIMIT, LIMIT, Case, Factors, chain_error, normal, pairwise

from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.bench import Bench
from infer.kernels.checks.inputs import FLOATS, PUBLISHED
from infer.kernels.checks.linear_check import ByRows, matmul, run_matmul_rows
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.tensor import INTEGERS, QUANTIZED
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.matmul_rows import RowsShape, RowsVariant, possible_variant

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
    "variant": VARIANTS,
    **FORMS,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 6 else ())
        for i, case in enumerate(pairwise(ROWS))
    ],
)
def test_matmul_rows(device: Device, rng: np.random.Generator, case: Case) -> None:
    x, weight, options, expected = projection(rng, case, many=True)
    with device.scope():
        y = run_matmul_rows(Bench(device), x, weight, case["variant"], **options)
    assert nmse(y, expected) <= (INT8_LIMIT if case["stored"][0] in INTEGERS else LIMIT)


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
    tuning = ByRows(device, VARIANTS[1])
    check_living_rows(device, rng, rows, plan_rows, "matmul_rows", tuning)


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
