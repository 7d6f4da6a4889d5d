"""matmul_matrix: projections of many rows by small matrices, on tensor cores if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.tensor import CODED, INTEGERS
from infer.kernels.lowering.tuning import Tuning

_PADDING = 16  # bytes between the rows of a tile, against bank conflicts
_FEW_ROWS, _FEW_INT8_ROWS = 12, 24  # that matmul_rows multiplies faster, by floats and integers
_MOST_SPLITS = 8  # of a matrix' columns
_SPLIT_COLUMNS = 512  # at the least
_START = 384  # columns: what a workgroup waits for before its first product, and its end
_COMBINE = 3e6  # what a launch of matmul_combine costs, in products of a multiprocessor
_COMBINED = 2.0  # and each sum that it reads or writes
# Rows and columns of a tile and of a subgroup's part of it -> how fast it is where there are many.
# A tile of 128 x 128 needs eight subgroups: four have too few registers for its sums.
_TILES = {
    (128, 128, 32, 64): 1.0,
    (64, 128, 32, 32): 0.7,
    (64, 64, 32, 32): 0.55,
}
# Tiles of so few rows that reading W takes the time.
_FEW_TILES = {
    16: ((16, 64, 16, 16),),
    32: ((32, 64, 32, 16), (32, 128, 32, 32)),
    64: ((64, 64, 32, 32),),
}
_FEW_START = 512  # columns: what a workgroup of such a tile waits for before and after its products
_FEW_STEP = 64  # rows of W whose part of a step takes as long as the part that all tiles have
_LEAST_ROUNDS = 1.6  # workgroups of a multiprocessor, of which one waits for the other
_FEW_COMBINED = 0.13  # a sum that matmul_combine reads or writes, in columns times rows of W


@dataclass(frozen=True)
class MatrixVariant:
    """matmul_matrix: the small matrices, the lanes of a subgroup, rows and columns of a workgroup's
    tile and of a subgroup's part of it, columns of x that are multiplied at a time, workgroups that
    share the columns, and how many tiles are on their way from memory while one is multiplied.
    emulated: without the adapter's own matrices."""

    kernel: ClassVar[str] = "matmul_matrix"
    shape: MatrixShape
    lanes: int
    rows: int
    columns: int
    sub_rows: int
    sub_columns: int
    depth: int = 64
    splits: int = 1
    ahead: int = 2
    emulated: bool = False

    @property
    def invocations(self) -> int:
        """Invocations of a workgroup."""
        return self.rows // self.sub_rows * (self.columns // self.sub_columns) * self.lanes

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory: tiles of x and W, or later sums; and a table of codes."""
        tiles = (self.rows + self.columns) * (2 * self.depth + _PADDING)
        sums = self.rows // self.sub_rows * self.shape.m * (4 * self.columns + _PADDING)
        return max(tiles, sums) + 1024

    def runs(self, tuning: Tuning) -> bool:
        """Whether a device has room for this variant."""
        limits = tuning.limits
        return (
            self.invocations <= limits.max_invocations
            and self.storage <= limits.workgroup_storage
            and (self.emulated or self.invocations % max(1, tuning.largest_subgroup) == 0)
        )

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's."""
        return {
            **matrix_params(self.shape, self.lanes, self.emulated),
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "SUB_ROWS": self.sub_rows,
            "SUB_COLUMNS": self.sub_columns,
            "SPLITS": self.splits,
            "AHEAD": self.ahead,
        }


def matmul_matrix_variant(
    tuning: Tuning, rows: int, n: int, k: int, dtype: str, splits: bool
) -> MatrixVariant | None:
    """Returns the tile that takes a large GPU the least time, where workgroups run in rounds of one
    for each multiprocessor. None where the adapter has no such matrices, or rows are so few that
    matmul_rows is faster. splits: whether workgroups may share columns."""
    shape = matrix_shape(tuning)
    if shape is None or rows <= (_FEW_INT8_ROWS if dtype in INTEGERS else _FEW_ROWS):
        return None
    most = max(1, min(_MOST_SPLITS, k // _SPLIT_COLUMNS)) if splits else 1
    counts = [count for count in (1, 2, 4, _MOST_SPLITS) if count <= most]
    if rows <= max(_FEW_TILES):
        return _few_rows_variant(tuning, shape, rows, n, k, counts)
    # Weights as they are would take too many registers for two of these tiles.
    ahead = 2 if dtype in (*INTEGERS, *CODED) else 1
    speeds = {
        MatrixVariant(shape, tuning.subgroup_size, *tile, splits=count, ahead=ahead): speed
        for tile, speed in _TILES.items()
        for count in counts
    }

    def cost(variant: MatrixVariant) -> float:
        count = -(-rows // variant.rows) * -(-n // variant.columns) * variant.splits
        rounds = -(-count // tuning.multiprocessors)
        columns = k / variant.splits + _START
        time = rounds * variant.rows * variant.columns * columns / speeds[variant]
        combine = _COMBINE + _COMBINED * rows * n * (variant.splits + 1)
        return time + combine if variant.splits > 1 else time

    return min((each for each in speeds if each.runs(tuning)), key=cost, default=None)


def _few_rows_variant(
    tuning: Tuning, shape: MatrixShape, rows: int, n: int, k: int, counts: Sequence[int]
) -> MatrixVariant | None:
    """Returns the tile of few rows, and how many workgroups share columns, that take the least
    time; fitted to what scripts/tune.py measured on a large GPU."""
    tiles = _FEW_TILES[min(size for size in _FEW_TILES if size >= rows)]
    lanes = tuning.subgroup_size
    variants = [
        MatrixVariant(shape, lanes, *tile, splits=count) for tile in tiles for count in counts
    ]

    def cost(variant: MatrixVariant) -> float:
        count = -(-n // variant.columns) * variant.splits
        rounds = max(_LEAST_ROUNDS, -(-count // tuning.multiprocessors))
        time = rounds * (k / variant.splits + _FEW_START) * (variant.columns + _FEW_STEP)
        combine = _FEW_COMBINED * rows * n * (variant.splits + 1)
        return time + combine if variant.splits > 1 else time

    return min((each for each in variants if each.runs(tuning)), key=cost, default=None)


def expert_matrix_variant(tuning: Tuning, rows: int, gated: bool) -> MatrixVariant | None:
    """For tiles of so many rows, each of an expert; gated: outputs are pairs of rows of W, and W
    is large. None where the adapter has no matrices."""
    shape = matrix_shape(tuning)
    if shape is None:
        return None
    sub_rows = min(rows, 32) if gated or rows > 32 else 16
    columns = 64 if rows > 32 else 128
    variant = MatrixVariant(shape, tuning.subgroup_size, rows, columns, sub_rows, 32)
    return variant if variant.runs(tuning) and rows % shape.m == 0 else None


def matrix_params(shape: MatrixShape, lanes: int, emulated: bool) -> dict[str, Any]:
    """The parameters of matrix.wgsl: of such matrices, and subgroups of so many lanes."""
    return {
        "MATRIX": "emulated" if emulated else "subgroup",
        "MATRIX_M": shape.m,
        "MATRIX_N": shape.n,
        "MATRIX_K": shape.k,
        "LANES": lanes,
    }


def matrix_shape(tuning: Tuning) -> MatrixShape | None:
    """Returns the largest of the adapter's matrices of f16 with sums in f32, up to 16 x 16 x 16;
    None where there is none, or subgroups have several sizes."""
    size = tuning.subgroup_size
    if not size or size != tuning.largest_subgroup:
        return None
    shapes = [each for each in tuning.matrices if each.m <= 16 and each.n <= 16 and each.k <= 16]
    return max(shapes, key=lambda each: each.m * each.n * each.k, default=None)
