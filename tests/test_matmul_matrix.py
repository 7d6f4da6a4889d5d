"""matmul_matrix against float64, with emulated matrices: all types of weights, shapes and forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from engines import build_engine
from projections import FORMS, projection
from reference_models import load
from test_kernels import LIMIT, Case, Factors, normal, pairwise

from infer.kernels.checks.arrays import rounded, to_gpu
from infer.kernels.checks.bench import Bench
from infer.kernels.checks.inputs import FLOATS, PUBLISHED
from infer.kernels.checks.reference import nmse
from infer.kernels.compiler.tuning import Tuning
from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.device import Device, Limits, Settings
from infer.kernels.gpu.half_range import check_half_range, largest
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.shader import _WORKGROUP, Declared, KernelSpec, render
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.ops.linear_check import EMULATED, ByMatrix, matmul, run_matmul_matrix
from infer.kernels.ops.matmul_matrix import MatrixVariant, matmul_matrix_variant
from infer.sampling import SamplingParams

CASES: Factors = {
    "rows": (9, 16, 33, 130),
    "stored": (*((dtype, None) for dtype in (*FLOATS, *QUANTIZED)), *PUBLISHED),
    "variant": (
        EMULATED,
        # As Intel's and Apple's GPUs have them, and of several subgroups along both sides.
        MatrixVariant(MatrixShape(8, 16, 16), 8, 16, 32, 8, 16, 32, emulated=True),
        MatrixVariant(MatrixShape(8, 8, 8), 8, 32, 32, 16, 16, 64, emulated=True),
        MatrixVariant(MatrixShape(16, 16, 16), 16, 16, 32, 16, 16, 64, 2, emulated=True),
    ),
    **FORMS,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 10 else ())
        for i, case in enumerate(pairwise(CASES))
    ],
)
def test_matmul_matrix(device: Device, rng: np.random.Generator, case: Case) -> None:
    x, weight, options, expected = projection(rng, case, many=True, halves=True)
    variant = case["variant"]
    if options["gated"] and variant.splits > 1:  # halves of an output lie in two workgroups' sums
        variant = EMULATED
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, variant, **options)
    assert nmse(y, expected) <= LIMIT


def test_whole_tiles(device: Device, rng: np.random.Generator) -> None:
    """Places are reckoned otherwise where neither columns nor outputs end inside of a tile."""
    x, weight = (rounded(normal(rng, rows, 64), "f16") for rows in (16, 64))
    for gated in (False, True):
        with device.scope():
            y = run_matmul_matrix(Bench(device), x, weight, EMULATED, gated=gated)
        expected = matmul(x, weight)
        if gated:
            gate, up = np.split(expected, 2, axis=1)
            expected = gate / (1 + np.exp(-gate)) * up
        assert nmse(y, expected) <= LIMIT


def test_activations_of_any_size(device: Device, rng: np.random.Generator) -> None:
    """Beyond f16, or far below it, in each row by itself; and rows of zeros."""
    x, weight = normal(rng, 12, 64), rounded(normal(rng, 64, 64), "f16")
    scales = np.array([1e6, 1e-6, 0, 1, 1e30, 1e-30, 1e4, 65504, 1e9, 1e-9, 1e20, 1e-20])
    x = (rounded(x, "f16") * 2.0 ** np.rint(np.log2(np.maximum(scales, 1e-38)))[:, None]).astype(
        np.float32
    )
    x[2] = 0
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, EMULATED)
    for row, expected in zip(y, matmul(x, weight), strict=True):
        assert nmse(row, expected) <= LIMIT if expected.any() else not row.any()


def test_one_value_far_above_the_others(device: Device, rng: np.random.Generator) -> None:
    """What is below 2^-39 of the largest of its row may become zero; all else is rounded."""
    x, weight = rounded(normal(rng, 9, 64), "f16"), rounded(normal(rng, 64, 64), "f16")
    x[:, 0] = 2.0**20
    weight[:, 0] = 0
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, EMULATED)
    assert nmse(y, matmul(x, weight)) <= 1e-9  # the others are 2^-20 of it: 2^-5 in f16 and below


@pytest.mark.parametrize("stored", ["f32", "bf16", "q8", "nf4", "iq4nl", "e4m3"])
@pytest.mark.parametrize("matrix", ["subgroup", "emulated"])
def test_matrices_lie_at_multiples_of_16_bytes(stored: str, matrix: str) -> None:
    """Dawn shifts workgroup variables behind one of another size, but not what it reads of them."""
    variant = MatrixVariant(MatrixShape(16, 16, 16), 32, 128, 128, 32, 64)
    named: dict[str, Any] = {"BIAS": True, "RESIDUAL": True, "ACTIVATION": "none", "SCALE": 1.0}
    named |= {"GROUP_SIZE": 32, "SCALES": "f16", "OFFSET": "none", "SHIFT": 0, "WEIGHT": stored}
    named |= {"K": 4096, "N": 4096, "START": 0, "Y_STRIDE": 4096, "SPLIT_ROWS": 0, "GATED": False}
    named |= {"X_WIDTH": 4096, "X_OFFSET": 0, "X_HEAD": 0, "Y_HEAD": 0}
    named |= {"GROUPED": False, "X_SLOTS": 1, "FIRST_EXPERT": 0, "SHARD_EXPERTS": 0}
    shader = render(KernelSpec.of("matmul_matrix", **named | variant.params | {"MATRIX": matrix}))
    kinds = _WORKGROUP.findall(f"\n{shader.code}")
    sizes = [Declared.of(shader.code).layout(kind)[1] for kind in kinds]
    assert sizes
    assert not any(size % 16 for size in sizes)
    assert shader.workgroup_storage <= variant.storage
    assert ("subgroup_matrix_left" in shader.code) == (matrix == "subgroup")


# The rule


def tuning_of(device: Device, *shapes: MatrixShape, storage: int = 49152) -> Tuning:
    """A large GPU's, with such matrices."""
    tuning = Tuning(device)
    tuning.matrices, tuning.multiprocessors = shapes, 132
    tuning.subgroup_size = tuning.largest_subgroup = 32
    tuning.limits = Limits(workgroup_storage=storage, max_invocations=1024)
    return tuning


def test_it_is_for_adapters_with_matrices(device: Device) -> None:
    shape = MatrixShape(16, 16, 16)
    call = 512, 4096, 4096, "q4", True
    assert matmul_matrix_variant(tuning_of(device), *call) is None
    assert matmul_matrix_variant(tuning_of(device, MatrixShape(16, 8, 8), shape), *call) is not None
    small = matmul_matrix_variant(tuning_of(device, shape, storage=16384), *call)
    assert small is None or small.storage <= 16384
    unknown = tuning_of(device, shape)
    unknown.largest_subgroup = 64
    assert matmul_matrix_variant(unknown, *call) is None


def test_a_few_rows_are_left_to_another_kernel(device: Device) -> None:
    tuning = tuning_of(device, MatrixShape(16, 16, 16))
    for dtype, most in (("q4", 32), ("bf16", 12)):
        assert matmul_matrix_variant(tuning, most, 4096, 4096, dtype, True) is None
        assert matmul_matrix_variant(tuning, most + 1, 4096, 4096, dtype, True) is not None


def test_columns_are_shared_where_tiles_are_few(device: Device) -> None:
    tuning = tuning_of(device, MatrixShape(16, 16, 16))
    few = matmul_matrix_variant(tuning, 128, 4096, 14336, "q4", True)
    many = matmul_matrix_variant(tuning, 512, 28672, 4096, "q4", True)
    alone = matmul_matrix_variant(tuning, 128, 4096, 14336, "bf16", False)
    assert few is not None
    assert many is not None
    assert alone is not None
    assert (few.splits > 1, many.splits, alone.splits) == (True, 1, 1)


# Models


@pytest.mark.parametrize("case", ["llama", pytest.param("mixtral", marks=pytest.mark.full)])
def test_logits_are_much_nearer_than_those_of_bf16(
    own_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """What transformers computes of these models in bf16 has an NMSE of 3e-4 and 5e-4. Greedy
    tokens are those of f32."""
    choose = ByMatrix(own_device).choose

    def by_matrix(self: Tuning, rule: Any, *call: Any) -> Any:
        return choose(rule, *call)

    monkeypatch.setattr(Tuning, "choose", by_matrix)
    # Few rows go through matrices too.
    for module in ("linear", "experts", "matmul_rows"):
        monkeypatch.setattr(f"infer.kernels.ops.{module}.MOST_ROWS", 8, raising=False)
    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / case)
    with own_device.scope():
        engine = build_engine(own_device, folder)
        ids = reference.prompt_ids.tolist()
        logits = np.concatenate([part for part in engine.logits(ids)])
        assert 0 < nmse(logits, reference.logits) < 5e-6
        params = SamplingParams(max_tokens=8).resolved({})
        tokens = [step.token for step in engine.generate(ids, params)]
        assert tokens == reference.greedy_ids.tolist()[:8]
    names = {spec.name for spec in own_device._pipelines}
    assert "matmul_matrix" in names


# Weights


def test_the_largest_value_of_a_weight_is_found(
    open_device: OpenDevice, rng: np.random.Generator
) -> None:
    small = open_device(Settings(max_binding=160_000))
    with small.scope():
        values = normal(rng, 300, 300)
        values[299, 299] = -7e4
        weight = to_gpu(small, values)
        assert len(weight.shards) == 3
        assert largest(small, {"w": weight})["w"] == np.float32(7e4)


def test_weights_beyond_f16_are_refused(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 holds more; without matrices nothing becomes f16."""
    values = normal(rng, 9, 64)
    values[3, 5] = 2.0**20
    monkeypatch.setattr(device, "matrices", ())
    with device.scope():
        weights = {
            "good": to_gpu(device, values[:3]),
            "layers.1.up": to_gpu(device, values, "bf16"),
        }
        check_half_range(device, weights)
        monkeypatch.setattr(device, "matrices", (MatrixShape(16, 16, 16),))
        check_half_range(device, {"good": weights["good"]})
        with pytest.raises(UnsupportedError, match=re.escape("up has values up to 1.05e+06")):
            check_half_range(device, weights)
