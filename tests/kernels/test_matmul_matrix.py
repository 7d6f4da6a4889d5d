"""matmul_matrix against float64, with emulated matrices: all types of weights, shapes and forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from engines import build_engine
from projections import FORMS, projection
from reference_models import load
from test_kernels import LIMIT, Case, Factors, normal, pairwise

import infer
from infer.engine.runner import Runner
from infer.kernels.checks.arrays import rounded, to_gpu
from infer.kernels.checks.bench import TILED, Bench
from infer.kernels.checks.inputs import FLOATS, PUBLISHED, grouped
from infer.kernels.checks.linear_check import (
    EMULATED,
    ByMatrix,
    head_linear,
    matmul,
    run_matmul_matrix,
)
from infer.kernels.checks.norm_check import rmsnorm
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.codes import TABLES
from infer.kernels.gpu.device import Device, Limits, Settings
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.pack import from_bf16, to_bf16
from infer.kernels.gpu.row_scales import scale_rows
from infer.kernels.gpu.shader import _WORKGROUP, Declared, KernelSpec, render
from infer.kernels.gpu.tensor import QUANTIZED, Grouping
from infer.kernels.lowering.graph import Add
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.head_linear import HeadLinear
from infer.kernels.ops.linear import Linear
from infer.kernels.ops.matmul_matrix import MatrixVariant, matmul_matrix_variant
from infer.kernels.ops.norm import RMSNorm
from infer.models.loading.checkpoint import Checkpoint
from infer.sampling import SamplingParams

CASES: Factors = {
    "rows": (9, 16, 33, 130),
    "stored": (*((dtype, None) for dtype in (*FLOATS, *QUANTIZED)), *PUBLISHED),
    "variant": (
        EMULATED,
        # The matrices of Intel's and Apple's GPUs, and tiles of several subgroups along both sides.
        MatrixVariant(MatrixShape(8, 16, 16), 8, 16, 32, 8, 16, 32, emulated=True),
        MatrixVariant(MatrixShape(8, 8, 8), 8, 32, 32, 16, 16, 32, emulated=True),
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
    """Values below 2^-39 of the largest of their row may become zero; all others are rounded."""
    x, weight = rounded(normal(rng, 9, 64), "f16"), rounded(normal(rng, 64, 64), "f16")
    x[:, 0] = 2.0**20
    weight[:, 0] = 0
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, EMULATED)
    assert nmse(y, matmul(x, weight)) <= 1e-9  # the others are 2^-20 of it: 2^-5 in f16 and below


@pytest.mark.parametrize("kept", [False, True])
def test_a_norm_writes_f16(device: Device, rng: np.random.Generator, kept: bool) -> None:
    """Each row with a scale of its own, whatever the norm's weights are; and in f32, too, where
    something else reads it."""
    bench = Bench(device, tuning=ByMatrix(device, EMULATED), plan_rows=TILED)
    x, weight = normal(rng, 19, 128), rounded(normal(rng, 128, 128), "f16")
    of_norm = normal(rng, 128) * 1e6
    with device.scope():
        normed = RMSNorm(bench.input(x), bench.weight(of_norm), 1e-5)
        product = Linear(normed, bench.weight(weight))
        output = Add(product, normed) if kept else product
        lowering, _ = bench.forward(19).lower(output)
        y = bench.run(output)
    assert [kernel.spec.name for kernel in lowering.kernels] == ["rmsnorm", "matmul_matrix"]
    expected = rmsnorm(x, of_norm, 1e-5)
    assert nmse(y, matmul(expected, weight) + expected * kept) <= 1e-6


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
    named |= {"ROW_SCALES": True}
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
    for dtype, most in (("q4", 24), ("bf16", 12)):
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


def choose_by_matrices(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Everything takes emulated matrices, few rows too."""
    choose = ByMatrix(device).choose

    def by_matrix(self: Tuning, rule: Any, *call: Any) -> Any:
        return choose(rule, *call)

    monkeypatch.setattr(Tuning, "choose", by_matrix)
    for module in ("linear", "experts", "matmul_rows"):
        monkeypatch.setattr(f"infer.kernels.ops.{module}.MOST_ROWS", 8, raising=False)


@pytest.mark.parametrize("case", ["llama", pytest.param("mixtral", marks=pytest.mark.full)])
def test_logits_are_much_nearer_than_those_of_bf16(
    own_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Logits of transformers in bf16 have an NMSE of 3e-4 and 5e-4 for these models. Greedy tokens
    are those of f32."""
    choose_by_matrices(monkeypatch, own_device)
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


# Weights beyond f16


@pytest.mark.parametrize("stored", ["bf16", "f32", "q8", "q4", "e4m3", "mxfp4"])
@pytest.mark.parametrize("variant", CASES["variant"][:3])
def test_rows_of_weights_of_any_size(
    device: Device, rng: np.random.Generator, stored: str, variant: MatrixVariant
) -> None:
    """Each row has a size of its own, to the ends of bf16; activations are large too. Whatever f32
    holds of the result is right, for its row of activations and of weights. Nothing is subnormal,
    as WGSL lets a GPU take such numbers for zeros."""
    powers = np.array([127, 100, 60, 20, 16, 0, -15, -30, -70, -100, -120, -126])
    dtypes = {
        "q8": Grouping(32, "f32"),
        "q4": Grouping(32, "bf16"),
        "e4m3": Grouping(128, "f32"),
        "mxfp4": Grouping(32, "e8m0"),
    }
    weight: Any
    if stored in dtypes:  # codes of 0 to 2^8 at the most
        powers = powers.clip(-100, 118)
        codes, _ = grouped(rng, (36, 130), stored, dtypes[stored])
        scales = rounded(np.ldexp(codes.scales, np.repeat(powers, 3)[:, None]), "f32")
        scales = rounded(scales, dtypes[stored].dtype)
        weight = replace(codes, scales=scales)
        table = TABLES[stored][codes.codes] if stored in TABLES else codes.codes
        values = np.repeat(scales, dtypes[stored].group, axis=1)[:, :130].astype(np.float64) * table
    else:
        values = np.clip(normal(rng, 36, 130), -1.9, 1.9)
        values = rounded(np.ldexp(values, np.repeat(powers, 3)[:, None]), stored)
        weight = values = np.where(np.abs(values) < 2.0**-126, np.float32(0), values)
        assert np.abs(values).max() > 3e38
    x = rounded(normal(rng, 12, 130), "f16")
    x = np.ldexp(x, np.array([20, 20, 0, 0, 60, -60, 110, -110, 126, -126, 16, -16])[:, None])
    x[np.abs(x) < 2.0**-126] = 0
    expected = matmul(x, values)
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, variant, dtype=stored)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(
        values.astype(np.float64), axis=1
    )
    # Partial sums near the largest f32 may overflow, and the smallest values may become zero.
    held = (norms < 1e37) & (norms > 1e-34)
    assert held[:2].sum() > 30
    assert np.isfinite(y[held]).all()
    assert (np.abs(y - expected)[held] <= 2e-3 * norms[held]).all()
    assert (np.abs(y[norms <= 1e-34]) < 1e-33).all()
    assert nmse(y[held] / norms[held], (expected / norms)[held]) < 1e-6


def test_only_weights_beyond_f16_have_scales(
    open_device: OpenDevice, rng: np.random.Generator
) -> None:
    """In every shard, of powers of two, by which the largest value of a row is from 2^14 on."""
    small = open_device(Settings(max_binding=160_000))
    with small.scope():
        values = normal(rng, 300, 300)
        usual = to_gpu(small, values), to_gpu(small, np.zeros((9, 64))), to_gpu(small, values[0])
        values[299, 299] = -7e4
        large = to_gpu(small, values)
        values[299] = 2.0**-15
        values[298] = 0
        tiny = to_gpu(small, values)
        scale_rows(small, [*usual, large, tiny])
        assert not any(weight.row_scales for weight in usual)
        for weight, last in ((large, 2.0**2), (tiny, 2.0**-29)):
            assert len(weight.shards) == 3
            scales = [small.read(weight.row_scales[s], np.float32, s.rows) for s in weight.shards]
            assert np.concatenate(scales)[299] == last
            assert set(weight.row_scales.values()) < set(weight.buffers)


def test_rows_of_weights_beyond_f16_in_pairs(device: Device, rng: np.random.Generator) -> None:
    x = rounded(normal(rng, 20, 64), "f16")
    weight = rounded(normal(rng, 42, 64), "bf16")
    weight[3::7] *= np.float32(2.0**40)
    weight[5::7] *= np.float32(2.0**-40)
    weight[21:] *= np.float32(2.0**-30)
    gate, up = np.split(matmul(x, weight), 2, axis=1)
    with device.scope():
        y = run_matmul_matrix(Bench(device), x, weight, EMULATED, dtype="bf16", gated=True)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    for column, exact in zip(y.T, expected.T, strict=True):
        assert nmse(column, exact) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "up", "down"), [("llama", "up_proj", "down_proj"), ("mixtral", "w3", "w2")]
)
def test_a_model_whose_weights_f16_does_not_hold(
    own_device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    up: str,
    down: str,
) -> None:
    """Kernels are compiled before the weights are read, so that it is once more done for these. Up
    times 2^20 or 2^-30, and down less by that, are the same model."""
    choose_by_matrices(monkeypatch, own_device)
    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / case)
    for name, info in Checkpoint.open(folder).tensors.items():
        if up not in name and down not in name:
            continue
        assert info.dtype == "bf16"
        own: Any = {"offset": info.offset, "shape": info.shape, "mode": "r+"}
        bits = np.memmap(info.file, np.uint16, **own)
        power = (20 if "layers.0" in name else -30) * (1 if up in name else -1)
        bits[:] = to_bf16(np.ldexp(from_bf16(bits), power))
        bits.flush()
    with own_device.scope():
        engine = build_engine(own_device, folder)
        engine.runner.compile()
        scale_rows(own_device, engine.weights.values())
        engine.runner.weights_are_read()
        logits = np.concatenate(list(engine.logits(reference.prompt_ids.tolist())))
    assert 0 < nmse(logits, reference.logits) < 5e-6
    made = [spec for spec in own_device._pipelines if spec.name == "matmul_matrix"]
    assert {dict(spec.params)["ROW_SCALES"] for spec in made} == {True, False}


def test_loading_ends_with_what_is_known_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Runner, "compile", lambda *_: done.append("compiled"))
    monkeypatch.setattr(Runner, "weights_are_read", lambda _: done.append("read"))
    infer.load("demo", context=64, max_batch=1).close()
    assert done == ["compiled", "read"]


def test_rows_of_weights_beyond_f16_of_heads(device: Device, rng: np.random.Generator) -> None:
    heads, n, k = 3, 21, 128
    x, weight = rounded(normal(rng, 20, heads * k), "f16"), rounded(normal(rng, 63, k), "f16")
    scales = np.exp2(np.resize([40, 0, -40], heads * n))
    with device.scope():
        bench = Bench(device, tuning=ByMatrix(device))
        stored = to_gpu(device, (weight * scales[:, None]).astype(np.float32))
        scale_rows(device, [stored])
        assert stored.row_scales
        y = bench.run(HeadLinear(bench.input(x), stored, heads), plan_rows=TILED)
    assert nmse(y / scales, head_linear(x, weight.reshape(heads, n, k))) <= LIMIT
