"""matmul_lanes against float64: all types of weights that it takes, rows, forms; awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import OpenDevice
from projections import FORMS, check_living_rows, projection
from test_kernels import INT8_LIMIT, LIMIT, Case, Factors, normal, pairwise

from infer.kernels import functions
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.inputs import FLOATS, PUBLISHED
from infer.kernels.checks.linear_check import ByLanes, matmul
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.tensor import INTEGERS, LOOKED_UP, QUANTIZED
from infer.kernels.ops.matmul_lanes import LanesShape, matmul_lanes_variant

CASES: Factors = {
    "rows": (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64, 130),
    "stored": (
        *((dtype, None) for dtype in (*FLOATS, *QUANTIZED)),
        *(stored for stored in PUBLISHED if stored[0] not in LOOKED_UP),
    ),
    **FORMS,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 6 else ())
        for i, case in enumerate(pairwise(CASES))
    ],
)
def test_matmul_lanes(device: Device, rng: np.random.Generator, case: Case) -> None:
    x, weight, options, expected = projection(rng, case, many=False)
    y = functions.matmul_lanes(device, x, weight, **options)
    assert nmse(y, expected) <= (INT8_LIMIT if case["stored"][0] in INTEGERS else LIMIT)


@pytest.mark.parametrize(("rows", "plan_rows"), [(5, 12), (1, 2), (3, 8), (17, 64), (9, 130)])
def test_only_living_rows_of_the_step_are_written(
    device: Device, rng: np.random.Generator, rows: int, plan_rows: int
) -> None:
    check_living_rows(device, rng, rows, plan_rows, "matmul_lanes", ByLanes(device))


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
