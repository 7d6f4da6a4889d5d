"""Attention of prefill, in every variant that the rules can choose and in some that they do not."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from marks import others_full

from infer.kernels.checks import attention_check, functions
from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import Bench
from infer.kernels.checks.reference import nmse
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.lowering.graph import Input
from infer.kernels.lowering.target import StepKind
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import (
    Attention,
    TiledVariant,
    attention_long_variant,
    attention_tiled_variant,
)
from infer.kernels.state.kv_cache import KVCache, kept

LIMIT = 1e-10  # of f32 arithmetic
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 256, 512, 576)

Shape = tuple[int, int, int, int, int, str]
"""Query heads per KV head, head_dim, rows, positions before them, window, dtype of the cache."""


class Forced(Tuning):
    """Always the same variant of tiles."""

    def __init__(self, device: Device, variant: TiledVariant) -> None:
        super().__init__(device)
        self.loop_passes = sys.maxsize
        self.instead = {attention_tiled_variant: lambda *call: variant}


def error(
    device: Device, rng: np.random.Generator, variant: TiledVariant | None, shape: Shape
) -> float:
    """Two KV heads, so that their places in the cache differ. variant: None for what rules take."""
    group, d, rows, past, window, dtype = shape

    def normal(*size: int) -> Array:
        return rng.standard_normal(size, np.float32)

    q = 2 * normal(rows, 2 * group * d)
    k, v = (kept(normal(past + rows, 2 * d), d, dtype) for _ in range(2))  # not rounded again
    y = functions.attention_tiled(
        device,
        q,
        k,
        v,
        n_kv_heads=2,
        scale=d**-0.5,
        window=window,
        kv_dtype=dtype,
        tuning=Tuning(device) if variant is None else Forced(device, variant),
    )
    return nmse(y, attention_check.attention(q, k, v, 2 * group, d**-0.5, window))


def chosen(
    device: Device, head_dim: int, storage: int, *, software: bool, n_heads: int = 32
) -> TiledVariant:
    """Returns the tiles that the rule chooses on an adapter with so much workgroup memory in
    bytes."""
    tuning = Tuning(device)
    tuning.limits, tuning.software = Limits(workgroup_storage=storage), software
    return attention_tiled_variant(tuning, head_dim, n_heads)


@pytest.mark.parametrize(
    ("d", "storage"),
    [
        pytest.param(d, storage, marks=pytest.mark.full if (i + j) % 2 else [])
        for (i, d), (j, storage) in product(enumerate(HEAD_DIMS), enumerate((16384, 32768)))
    ],
)
def test_the_variants_of_the_rules(
    device: Device, rng: np.random.Generator, d: int, storage: int
) -> None:
    """Tiles of GPUs give right results; other tests run the tiles of a software adapter."""
    variant = chosen(device, d, storage, software=False)
    # From the start, ending inside a tile; or later, with a window that begins inside one.
    shapes: list[Shape] = [(1, d, 37, 0, 0, "f32"), (3, d, 70, 213, 50, "f16")]
    shape = shapes[HEAD_DIMS.index(d) // 2 % 2]
    assert error(device, rng, variant, shape) <= LIMIT, variant


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("storage", [16384, 32768, 49152])
def test_the_rules_keep_to_workgroup_memory(device: Device, storage: int, d: int) -> None:
    for software, n_heads in product((True, False), (1, 32)):
        variant = chosen(device, d, storage, software=software, n_heads=n_heads)
        assert variant.storage(d) <= storage
        assert d % variant.depth == 0
        assert variant.columns % variant.v_depth(d) == 0
        assert variant.m_size * variant.n_size <= Limits().max_invocations


def test_heads_that_no_variant_has_room_for(device: Device) -> None:
    with pytest.raises(ShaderError, match="heads of 4096 dimensions"):
        chosen(device, 4096, 16384, software=False)


# For head_dim 16: more invocations than a slice has elements, slices of all dimensions, eight
# positions per invocation, rows that are not a power of two.
VARIANTS = [
    TiledVariant(16, 16, 1, 4, 8, True),
    TiledVariant(4, 8, 3, 8, 16, False),
    TiledVariant(8, 8, 4, 8, 16, True),
    TiledVariant(32, 8, 2, 4, 16, True),
    TiledVariant(4, 32, 2, 4, 8, False),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_any_variant(device: Device, rng: np.random.Generator, variant: TiledVariant) -> None:
    assert variant.storage(16) <= device.limits.workgroup_storage
    for shape in ((1, 16, 130, 1, 0, "f16"), (4, 16, 40, 300, 200, "f32")):
        assert error(device, rng, variant, shape) <= LIMIT, shape


@pytest.mark.parametrize("group", [1, 3])
def test_rows_after_a_long_cache(device: Device, rng: np.random.Generator, group: int) -> None:
    variant = chosen(device, 64, device.limits.workgroup_storage, software=False)
    shape = (group, 64, 12, 4100, 0, "f16")
    assert error(device, rng, variant, shape) <= LIMIT


# Shapes of each head_dim with more positions than Mesa's software adapter runs loops for.
LONG: list[Shape] = [
    (1, 32, 9, 60_000, 0, "f16"),
    (1, 32, 9, 140_000, 0, "f32"),  # more than two splits
    (1, 32, 9, 60_000, 59_000, "f16"),
    (2, 128, 9, 33_000, 0, "q8"),
    (1, 256, 9, 17_000, 0, "f16"),
    (1, 576, 9, 13_000, 0, "f16"),
]


@others_full("shape", LONG, LONG[:1])
def test_a_context_beyond_the_loops_of_a_software_adapter(
    device: Device, rng: np.random.Generator, shape: Shape
) -> None:
    """A software adapter ends long loops in silence: the last positions would be missing."""
    assert error(device, rng, None, shape) <= LIMIT


@others_full("d", (32, 128, 256, 576), (32,))
def test_tiles_come_to_the_end_where_they_are_taken(
    device: Device, rng: np.random.Generator, d: int
) -> None:
    variant = attention_tiled_variant(Tuning(device), d, 2)
    positions = variant.most_positions(d, 65_535)
    assert error(device, rng, variant, (1, d, 9, positions - 9, 0, "f16")) <= LIMIT


class Short(Tuning):
    """Rules for which any context is a very long one on a software adapter: splits have 32
    positions."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.loop_passes = 64
        self.chosen = set[Any]()

    def choose(self, rule: Any, *call: Any) -> Any:
        self.chosen.add(rule)
        return super().choose(rule, *call)


MANY_ROWS = {
    f"{case.kernel}, {case.name}": case
    for case in attention_check.cases()
    if case.kernel in ("attention_tiled", "attention_prompts")
}


@others_full(
    "name",
    MANY_ROWS,
    ("attention_prompts, f16, 47 rows, 3/1 heads of 64, context 301, window 33, sinks",),
)
def test_many_rows_in_splits(device: Device, name: str) -> None:
    tuning = Short(device)
    with device.scope():
        assert nmse(*MANY_ROWS[name].run(Bench(device, tuning=tuning))) <= LIMIT
    assert attention_long_variant in tuning.chosen


def kernels(software: bool, positions: int, *, rows: int = 512, window: int = 0) -> set[str]:
    """Returns the kernels of attention with 8 heads of 64 dimensions, on an adapter with
    subgroups."""
    dry = DryDevice(Limits(workgroup_storage=32768))
    dry.software = software
    layer = KVCache(dry, [(2, 64)], positions).layers[0]
    q, k, v = (Input(dry.buffer(4 * rows * width), width) for width in (512, 128, 128))
    output = Attention(q, k, v, layer, 1.0, window)
    low = lower(target_of(dry, StepKind(rows)), output, dry.buffer(16), dry.buffer(4 * rows * 512))
    for kernel in low.kernels:
        longest = dict(kernel.spec.params).get("MAX_SPLIT", 0)
        assert isinstance(longest, int)
        assert longest < 65_535 * 3 // 4
    return {kernel.spec.name for kernel in low.kernels} - {"kv_write"}


def test_only_software_adapters_leave_tiles() -> None:
    """And only where a row may attend to more positions than those have loops for."""
    tiled, split = {"attention_tiled"}, {"attention", "attention_combine"}
    assert kernels(True, 8192) == kernels(False, 8192) == tiled
    assert (kernels(True, 60_000), kernels(False, 60_000)) == (split, tiled)
    assert kernels(True, 60_000, window=4096) == tiled
    assert kernels(True, 60_000, window=50_000) == split
    assert kernels(True, 60_000, rows=8) == kernels(True, 8192, rows=8) == split


@pytest.mark.parametrize(
    "settings", [Settings(subgroups=False), Settings(bounds_checks=True)], ids=str
)
def test_with_other_settings(
    open_device: OpenDevice, rng: np.random.Generator, settings: Settings
) -> None:
    device = open_device(settings)
    variant = chosen(device, 128, device.limits.workgroup_storage, software=False)
    assert error(device, rng, variant, (3, 128, 70, 30, 0, "f16")) <= LIMIT


def test_scores_that_no_exponential_holds(device: Device, rng: np.random.Generator) -> None:
    """Scores of thousands, the largest of them in a later tile or an earlier one."""
    q = np.abs(rng.standard_normal((40, 16), np.float32)) * 300
    v = rng.standard_normal((240, 16), np.float32)
    for best in (3, 190):
        k = -np.abs(rng.standard_normal((240, 16), np.float32))
        k[best] *= -1
        y = functions.attention_tiled(device, q, k, v, n_kv_heads=1, scale=1.0)
        assert nmse(y, np.repeat(v[best : best + 1], 40, axis=0)) <= LIMIT
