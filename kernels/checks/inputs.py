"""Random activations and weights of which the exact values are known, whatever stores them."""

from __future__ import annotations

from functools import partial

import numpy as np

from infer.kernels.checks.arrays import Array, rounded
from infer.kernels.gpu.codes import NF4_PRODUCTS, TABLES
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import BLOCK, CODED, HALF, INTEGERS, QUANTIZED, SUPERBLOCK, Grouping
from infer.kernels.lowering.target import MAX_VEC_ROWS

FLOATS = ("f32", "f16", "bf16")  # dtypes of weights

# Formats of published checkpoints: other sizes of groups, zero points and biases, codes of floats.
PUBLISHED = (
    ("q4", Grouping(128, "f16", "zero", 8)),
    ("q4", Grouping(64, "bf16", "bias", 8)),
    ("q4", Grouping(32, "int8", "bias")),
    ("q5", Grouping(32, "int8", "bias", 16)),
    ("q6", Grouping(16, "int8")),
    ("q8", Grouping(32, "f32", "bias", 128)),
    ("e4m3", Grouping(128, "f32")),
    ("mxfp4", Grouping(32, "e8m0")),
    ("nf4", Grouping(64, "f32")),
    ("iq4nl", Grouping(32, "f16")),
)


def int8_rows(
    rng: np.random.Generator, rows: int, columns: int, *, many: bool | None = None
) -> tuple[Array, Array]:
    """Activations of which it is known how they round to int8, and what they are then. many: for
    the kernels of many rows, where both halves of a block share a scale (None: if there are)."""
    q = _integers(rng, rows, columns, -127, HALF)
    near = q + np.where(q > -127, rng.uniform(-0.4, 0.4, q.shape), 0)
    scales = rng.lognormal(-6, 0.5, (*q.shape[:2], 1)) * rng.choice([-1, 1], (*q.shape[:2], 1))
    if many or (many is None and rows > MAX_VEC_ROWS):
        scales = scales[:, np.arange(q.shape[1]) // 2 * 2]
    x, exact = ((scales * blocks).reshape(rows, -1)[:, :columns] for blocks in (near, q))
    return x.astype(np.float32), exact


def activations(
    rng: np.random.Generator, rows: int, columns: int, dtype: str, *, many: bool | None = None
) -> tuple[Array, Array]:
    """Returns activations [rows, columns] in f32 for weights of that dtype, and the values that
    products take them for (`int8_rows`)."""
    x = rng.standard_normal((rows, columns), np.float32)
    return int8_rows(rng, rows, columns, many=many) if dtype in INTEGERS else (x, x)


def exact_weight(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> Array:
    """An f32 matrix that a weight of that dtype holds exactly."""
    if dtype not in QUANTIZED:
        return rounded(rng.standard_normal((rows, columns), np.float32), dtype)
    q = _integers(rng, rows, columns, {"q8": -127, "q4": -8}[dtype], BLOCK)
    scales = rng.lognormal(-4, 0.5, (*q.shape[:2], 1)).astype(np.float16).astype(np.float32)
    weight: Array = (scales * q).astype(np.float32).reshape(rows, -1)[:, :columns]
    return weight


def _integers(rng: np.random.Generator, rows: int, columns: int, least: int, block: int) -> Array:
    """[rows, blocks, block] from `least` to -1 - least; the first of a block, which is never
    padding, is the least."""
    q = rng.integers(least, -least, (rows, -(-columns // block), block))
    q[..., 0] = least
    return q


def grouped(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, grouping: Grouping
) -> tuple[Codes, Array]:
    """A random quantised matrix [rows, columns], and its values in float64."""
    n, k = shape
    groups = (n, grouping.groups(k))
    units = None
    if grouping.dtype == "int8":
        units = rng.lognormal(-7, 0.5, (n, -(-k // SUPERBLOCK), 2)).astype(np.float16)

    def exact(values: Array, unit: int) -> tuple[Array, Array]:
        """Scales or offsets near such values that the dtype holds, as it does; and their values."""
        if units is None:
            return (near := rounded(values, grouping.dtype)), near
        each = np.repeat(units[:, :, unit], SUPERBLOCK // grouping.group, axis=1)[:, : groups[1]]
        multiples = np.rint(values / each).clip(-128, 127).astype(np.int8)
        return multiples, each.astype(np.float32) * multiples

    scales, scaling = exact(rng.lognormal(-4, 0.5, groups), 0)
    spread = partial(np.repeat, repeats=grouping.group, axis=1)
    if dtype in CODED:
        codes = rng.integers(0, 1 << CODED[dtype], shape, np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # which is no number in e4m3
        values = TABLES[dtype][codes].astype(np.float64)
    else:
        least = {"q4": -8, "q5": -16, "q6": -32}.get(dtype, -127)  # as int8 activations are
        codes = rng.integers(least, -least, shape, np.int8)
        values = codes.astype(np.float64) + grouping.shift
    offsets = None
    if grouping.offset == "zero":
        offsets = rng.integers(0, 17, scales.shape).astype(np.float32)
        values -= spread(offsets)[:, :k]
    values *= spread(scaling.astype(np.float64))[:, :k]
    if grouping.offset == "bias":
        offsets, biases = exact(rng.standard_normal(groups, np.float32) / 8, 1)
        values += spread(biases)[:, :k]
    return Codes(dtype, grouping, codes, scales, offsets, units), values


def multiplied(weight: Codes, values: Array) -> Array:
    """Returns the values that products take a quantised matrix to have."""
    if weight.dtype != "nf4":
        return values
    scales = np.repeat(weight.scales.astype(np.float64), weight.grouping.group, axis=1)
    products: Array = scales[:, : values.shape[1]] * NF4_PRODUCTS[weight.codes]
    return products
