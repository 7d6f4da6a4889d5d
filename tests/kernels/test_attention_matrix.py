"""attention_matrix against float64, with emulated matrices: caches, shapes, masks and forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels import Case, Factors, normal, pairwise
from test_matmul_matrix import tuning_of

from infer.kernels.checks.arrays import Array, rounded
from infer.kernels.checks.attention_check import (
    attention,
    run_attention_matrix,
    run_attention_prompts,
)
from infer.kernels.checks.bench import Bench
from infer.kernels.checks.linear_check import ByMatrix
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.device import Device, Limits
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.shader import _WORKGROUP, Declared, KernelSpec, render
from infer.kernels.ops.attention import AttentionMatrixVariant, attention_matrix_variant
from infer.kernels.state.kv_cache import kept

LIMIT = 1e-7  # exponentials are rounded to f16, by up to 2^-12 of each
Q8_LIMIT = 4e-7  # and so are keys and values that are integers times their scales
ONE = AttentionMatrixVariant(MatrixShape(16, 16, 16), 32, 16, 16, 16, 32, emulated=True)

CASES: Factors = {
    "rows": (9, 33, 70),
    "past": (0, 1, 130),
    "group": (1, 3),
    "kv_dtype": ("f16", "q8"),
    "variant": (
        ONE,
        replace(ONE, dims=16),  # a head in two subgroups
        replace(ONE, shape=MatrixShape(8, 16, 16), rows=32, keys=32),  # as of Intel's GPUs
        replace(ONE, shape=MatrixShape(8, 8, 8), sub_rows=8, keys=8, dims=8),  # Apple's
        replace(ONE, rows=64, keys=16),  # more keys than lanes of a row
    ),
    "window": (0, 21),
    "softcap": (0.0, 0.7),
    "sinks": (None, 0.0, 5.0),
    "latent": (0, 16),
}


def error(device: Device, rng: np.random.Generator, case: Case) -> float:
    """The NMSE of one case, with heads of 32 dimensions and queries that f16 holds."""
    rows, kv_len, n_kv_heads = case["rows"], case["rows"] + case["past"], 1 if case["latent"] else 2
    n_heads = n_kv_heads * case["group"]
    q = rounded(2 * normal(rng, rows, n_heads * 32), "f16")
    k, v = (kept(normal(rng, kv_len, n_kv_heads * 32), 32, case["kv_dtype"]) for _ in range(2))
    latent = case["latent"]
    sinks = None if case["sinks"] is None else case["sinks"] + normal(rng, n_heads)
    options: dict[str, Any] = {"window": case["window"], "softcap": case["softcap"]}
    parts = (k[:, :latent], k[:, latent:]) if latent else (k, v)
    y = run_attention_matrix(
        Bench(device),
        q,
        *parts,
        case["variant"],
        n_kv_heads=n_kv_heads,
        scale=32**-0.5,
        kv_dtype=case["kv_dtype"],
        latent=latent > 0,
        sinks=sinks,
        **options,
    )
    own = n_heads, 32**-0.5, case["window"], case["softcap"]
    return nmse(y, attention(q, k, k if latent else v, *own, sinks))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if i % 5 else ())
        for i, case in enumerate(pairwise(CASES))
    ],
)
def test_attention_matrix(device: Device, rng: np.random.Generator, case: Case) -> None:
    with device.scope():
        limit = Q8_LIMIT if case["kv_dtype"] == "q8" else LIMIT
        assert error(device, rng, case) <= limit


def test_scores_that_grow_from_tile_to_tile(device: Device, rng: np.random.Generator) -> None:
    """By much more than exponentials of f16 may: outputs are scaled again and again."""
    rows, kv_len = 20, 100
    q = np.ones((rows, 32), np.float32)
    k = np.linspace(-3, 40, kv_len, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    k, v = kept(k, 32, "f16"), kept(normal(rng, kv_len, 32), 32, "f16")
    for keys in (k, k[::-1]):
        with device.scope():
            y = run_attention_matrix(
                Bench(device), q, keys, v, ONE, n_kv_heads=1, scale=0.5, kv_dtype="f16"
            )
        assert nmse(y, attention(q, keys, v, 1, 0.5)) <= LIMIT


@pytest.mark.parametrize("size", [1e-30, 1e6, 1e30])
def test_queries_of_any_size(device: Device, rng: np.random.Generator, size: float) -> None:
    """Each row has a power of two of its own."""
    q = rounded(normal(rng, 20, 32), "f16") * np.float32(2.0 ** np.rint(np.log2(size)))
    q[3] = 0
    k, v = (kept(normal(rng, 30, 32), 32, "f16") for _ in range(2))
    with device.scope():
        y = run_attention_matrix(
            Bench(device), q, k, v, ONE, n_kv_heads=1, scale=1 / size, kv_dtype="f16"
        )
    assert nmse(y, attention(q, k, v, 1, 1 / size)) <= LIMIT


def test_a_cache_of_integers_beyond_f16(device: Device, rng: np.random.Generator) -> None:
    """q8 holds keys and values that f16 does not, up to 1e6."""
    q = rounded(normal(rng, 20, 32), "f16")
    k, v = (kept(1e5 * normal(rng, 30, 32), 32, "q8") for _ in range(2))
    v[:, 0] = 1e6
    v = kept(v, 32, "q8")
    with device.scope():
        y = run_attention_matrix(
            Bench(device), q, k, v, ONE, n_kv_heads=1, scale=1e-5, kv_dtype="q8"
        )
    assert nmse(y, attention(q, k, v, 1, 1e-5)) <= Q8_LIMIT


def test_several_prompts(device: Device, rng: np.random.Generator) -> None:
    """A tile has rows of one sequence."""
    prompts, expected = list[tuple[Array, Array, Array]](), list[Array]()
    for rows, kv_len in ((18, 50), (1, 40), (5, 5), (16, 66)):
        q = rounded(normal(rng, rows, 64), "f16")
        k, v = (kept(normal(rng, kv_len, 32), 32, "f16") for _ in range(2))
        prompts.append((q, k, v))
        expected.append(attention(q, k, v, 2, 0.2))
    with device.scope():
        bench = Bench(device, tuning=ByMatrix(device, attention=ONE))
        y = run_attention_prompts(bench, prompts, n_kv_heads=1, scale=0.2, kv_dtype="f16")
    assert nmse(y, np.concatenate(expected)) <= LIMIT


# The rule


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("latent", [False, True])
def test_the_rule_keeps_to_workgroup_memory(device: Device, head_dim: int, latent: bool) -> None:
    tuning = tuning_of(device, MatrixShape(16, 16, 16))
    variant = attention_matrix_variant(tuning, head_dim, latent, "f16")
    assert variant is not None
    assert variant.storage(head_dim, latent) <= 49152
    named: dict[str, Any] = {"KV": "f16", "KV_HEADS": 1, "PAGED": True, "PAGES_PER_SEQUENCE": 8}
    named |= {"PAGE": 64, "FIRST": 0, "WINDOW": 0, "GROUP": 1, "SCALE": 1.0}
    named |= {"SOFTCAP": 0.0, "LATENT": latent, "SINKS": False, "PROMPTS": 1, "Q_OFFSET": 0}
    named |= {"Q_STRIDE": head_dim, "Y_STRIDE": head_dim, "HEAD_DIM": head_dim}
    shader = render(KernelSpec.of("attention_matrix", **named | variant.params))
    assert shader.workgroup_storage <= variant.storage(head_dim, latent)
    sizes = [
        Declared.of(shader.code).layout(kind)[1] for kind in _WORKGROUP.findall(f"\n{shader.code}")
    ]
    assert sizes
    assert not any(size % 16 for size in sizes)  # as Dawn needs it


def test_it_is_for_adapters_with_matrices(device: Device) -> None:
    shape = MatrixShape(16, 16, 16)
    assert attention_matrix_variant(tuning_of(device), 128, False, "f16") is None
    tuning = tuning_of(device, shape)
    assert attention_matrix_variant(tuning, 128, False, "f16") is not None
    assert attention_matrix_variant(tuning, 128, False, "f32") is None  # which is not rounded
    assert attention_matrix_variant(tuning, 40, False, "f16") is None
    small = attention_matrix_variant(tuning_of(device, shape, storage=16384), 512, False, "f16")
    assert small is None
    tuning.limits = Limits(workgroup_storage=49152, max_invocations=128)
    few = attention_matrix_variant(tuning, 128, False, "f16")
    assert few is not None
    assert few.invocations(128) == 128
