"""matmul and matmul_int8: projections of many rows by tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, TypeVar

from infer.kernels.gpu.tensor import PLANES
from infer.kernels.lowering.tuning import Tuning

MOST_SPLITS = 8  # of a matrix' columns
_SMALL_SOFTWARE = 1 << 16  # values of a matrix for which a large tile compiles for too long
_SPLIT_COLUMNS = 256  # at the least
_START = 64  # columns: what a workgroup waits for before its first product
_COMBINE = 6e5  # what a launch of matmul_combine costs, in products of a multiprocessor

AnyTile = TypeVar("AnyTile", bound="TileVariant")


@dataclass(frozen=True)
class TileVariant:
    """matmul: rows and outputs per invocation, double buffer, invocations of a workgroup along the
    rows and along the outputs, workgroups that share the columns."""

    kernel: ClassVar[str] = "matmul"
    m_tile: int
    n_tile: int
    double: bool
    m_size: int = 16
    n_size: int = 16
    splits: int = 1

    @property
    def rows(self) -> int:
        """Rows of a workgroup."""
        return self.m_size * self.m_tile

    @property
    def columns(self) -> int:
        """Outputs of a row in a workgroup."""
        return self.n_size * self.n_tile

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory."""
        return (1 + self.double) * (self.rows + self.columns) * 5 * 16

    @property
    def params(self) -> dict[str, int | bool]:
        """The kernel's."""
        return {
            "M_SIZE": self.m_size,
            "N_SIZE": self.n_size,
            "M_TILE": self.m_tile,
            "N_TILE": self.n_tile,
            "DOUBLE": self.double,
            "SPLITS": self.splits,
        }


@dataclass(frozen=True)
class Int8TileVariant(TileVariant):
    """The tile of matmul_int8, for weights of any grouping. planes: how many int8 numbers make each
    of their integers."""

    kernel = "matmul_int8"
    planes: int = 1

    @property
    def storage(self) -> int:
        rows = 3 * 16 + 4 + 8  # integers of a block, their scale, and offsets or a table
        columns = (1 + 2 * self.planes) * 16 + 2 * 8  # two scales, each with an offset
        return (1 + self.double) * (self.rows * rows + self.columns * columns)


def matmul_variant(
    tuning: Tuning, rows: int, n: int, k: int, splits: bool, heads: int = 1
) -> TileVariant:
    """128x128, 128x96, 64x128, 64x64, or, of few rows, 64x256: the tiles that take a large GPU the
    least time, for so many products at once; with splits, columns may be shared where there are too
    few."""
    tiles = {(8, 8): 1.0, (8, 6): 0.97, (4, 8): 0.87, (4, 4): 0.62}
    choice = {TileVariant(*tile, double=True): speed for tile, speed in tiles.items()}
    if rows <= 64:
        choice[TileVariant(8, 8, True, 8, 32)] = 1.09
    if tuning.software:
        tile = (4, 4) if n * k <= _SMALL_SOFTWARE else (8, 8)
        choice = {TileVariant(*tile, True, 8, 8): 1.0}
    return _fastest(tuning, choice, heads * rows, n, k, splits, least_rounds=1.0)


def matmul_int8_variant(
    tuning: Tuning, rows: int, n: int, k: int, splits: bool, dtype: str
) -> Int8TileVariant:
    """64x128, 64x64 or 32x64, the same way: workgroups of 128 invocations, so that more of them
    share a multiprocessor, which one alone does not keep busy. 128x128 too for two planes."""
    planes = PLANES.get(dtype, 1)
    tiles = {(8, 8, True, 8, 16): 1.9}
    if not tuning.software:
        tiles |= {(4, 8, True, 16, 8): 1.7, (4, 4, True, 8, 16): 1.4}
        if planes > 1:
            tiles[8, 8, True, 16, 16] = 2.1  # what is read of x serves twice as many products
    elif n * k <= _SMALL_SOFTWARE:
        tiles = {(2, 4, True, 8, 8): 1.4}
    choice = {Int8TileVariant(*tile, planes=planes): speed for tile, speed in tiles.items()}
    return _fastest(tuning, choice, rows, n, k, splits, least_rounds=1.4)


def _fastest(
    tuning: Tuning,
    tiles: dict[AnyTile, float],
    rows: int,
    n: int,
    k: int,
    splits: bool,
    least_rounds: float,
) -> AnyTile:
    """Returns the tile that takes the least time. tiles: their speeds where there are many of them.
    They run in rounds of one for each multiprocessor, at least `least_rounds` of them."""

    def cost(tile: AnyTile) -> float:
        count = -(-rows // tile.rows) * -(-n // tile.columns) * tile.splits
        rounds = max(least_rounds, -(-count // tuning.multiprocessors))
        columns = k / tile.splits + _START
        time = rounds * tile.rows * tile.columns * columns / speeds[tile]
        return time + (_COMBINE + rows * n * (tile.splits + 1) / 4) * (tile.splits > 1)

    storage = tuning.limits.workgroup_storage
    most = min(MOST_SPLITS, k // _SPLIT_COLUMNS) if splits and not tuning.software else 1
    speeds = {
        replace(tile, double=double, splits=count): speed * (1.0 if double else 0.88)
        for double, count in product((True, False), (1, 2, 4, MOST_SPLITS))
        for tile, speed in tiles.items()
        if count <= max(1, most)
    }
    return min((tile for tile in speeds if tile.storage <= storage), key=cost)
