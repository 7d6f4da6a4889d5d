"""matmul_rows: projections of 2 to 64 rows, whose every weight is read once, in subgroups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infer.kernels.gpu.tensor import BLOCK, CODED, INTEGERS, LOOKED_UP
from infer.kernels.lowering.tuning import Tuning

MOST_ROWS = 64
_MOST_FLOAT_ROWS = 32
LEAST_LANES = 4
# By the rows of x: rows of a tile, lanes and teams (at least) along the columns, where W has few
# rows and where it has many. What scripts/tune.py found, not a formula.
_INT8_TILES = {
    8: ((8, 32, 1), (8, 32, 1)),
    10: ((10, 16, 2), (10, 16, 2)),
    12: ((8, 32, 1), (12, 16, 2)),
    16: ((8, 32, 1), (8, 32, 1)),
    20: ((10, 32, 1), (10, 32, 1)),
    24: ((8, 16, 1), (8, 32, 1)),
    32: ((8, 32, 1), (16, 16, 1)),
    40: ((10, 16, 1), (10, 16, 1)),
    MOST_ROWS: ((16, 32, 1), (16, 16, 1)),
}


@dataclass(frozen=True)
class RowsShape:
    """A product for matmul_rows: columns and outputs, rows of activations, the weights' dtype,
    whether outputs are pairs of rows (gated), and whether workgroups may share columns (splits)."""

    k: int
    n: int
    rows: int
    dtype: str
    gated: bool
    splits: bool

    @property
    def chunks(self) -> int:
        """Chunks of columns, which a lane multiplies at once."""
        columns = BLOCK if self.dtype in INTEGERS else 128 // CODED.get(self.dtype, 16)
        return -(-self.k // columns)

    @property
    def w_rows(self) -> int:
        """Rows of W."""
        return self.n * (1 + self.gated)


@dataclass(frozen=True)
class RowsVariant:
    """matmul_rows: rows of x and of W of a lane, lanes of a team along the columns and along W's
    rows, teams of a workgroup along W's rows and along the columns, workgroups that share the
    columns; staged: x goes through workgroup memory (weights of floats only).

    Lanes are powers of two, a team is a subgroup at most, and n_tile is even for gated outputs.
    """

    m_tile: int
    n_tile: int
    k_lanes: int
    n_lanes: int
    n_teams: int
    k_teams: int = 1
    splits: int = 1
    staged: bool = False

    @property
    def w_rows(self) -> int:
        """Rows of W of a workgroup."""
        return self.n_lanes * self.n_teams * self.n_tile

    def workgroups(self, shape: RowsShape) -> int:
        """Along the outputs."""
        return -(-shape.w_rows // self.w_rows)

    def invocations(self, rows: int) -> int:
        """Returns how many invocations a workgroup has for so many rows of x."""
        return self.k_lanes * self.n_lanes * self.n_teams * self.k_teams * -(-rows // self.m_tile)

    def storage(self, rows: int, dtype: str) -> int:
        """Bytes of workgroup memory, a table of codes among them."""
        padded = -(-rows // self.m_tile) * self.m_tile
        columns = 128 // CODED.get(dtype, 16) * self.k_lanes * self.k_teams  # of a step
        staged = 8 * padded * columns * self.staged
        return 4 * self.k_teams * padded * self.w_rows + staged + 1024 * (dtype in LOOKED_UP)

    def runs(self, tuning: Tuning, shape: RowsShape) -> bool:
        """Whether the kernel can run a product of this shape as this variant."""
        invocations, limits = self.invocations(shape.rows), tuning.limits
        return (
            self.k_lanes * self.n_lanes <= tuning.subgroup_size
            and invocations % max(1, tuning.largest_subgroup) == 0
            and invocations <= limits.max_invocations
            and self.storage(shape.rows, shape.dtype) <= limits.workgroup_storage
            and self.n_tile % (1 + shape.gated) == 0
            and (self.splits == 1 or shape.splits)
            and not (self.staged and shape.dtype in INTEGERS)
        )

    @property
    def params(self) -> dict[str, int | bool]:
        """The kernel's."""
        return {
            "M_TILE": self.m_tile,
            "N_TILE": self.n_tile,
            "K_LANES": self.k_lanes,
            "N_LANES": self.n_lanes,
            "N_TEAMS": self.n_teams,
            "K_TEAMS": self.k_teams,
            "SPLITS": self.splits,
            "STAGED": self.staged,
        }


def few_rows(tuning: Tuning, rows: int) -> bool:
    """Whether matmul_rows computes products of so many rows."""
    lanes = tuning.subgroup_size >= LEAST_LANES
    return lanes and 2 <= rows <= MOST_ROWS and not tuning.software


def matmul_rows_variant(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
    """Returns the variant of matmul_rows for a product, or None where another kernel multiplies:
    many rows of floats go through matmul's tiles."""
    many = shape.dtype not in INTEGERS and shape.rows > _MOST_FLOAT_ROWS
    return possible_variant(tuning, shape) if few_rows(tuning, shape.rows) and not many else None


def possible_variant(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
    """Returns the variant that was fastest, or nearly, on a large GPU whose subgroups have 32
    lanes; lanes of larger ones have other rows of W. None without subgroups."""
    if tuning.subgroup_size < LEAST_LANES:
        return None
    if tuning.software:  # large kernels compile for seconds
        variant = _made(tuning, shape, 4, 2, 32, 2)
    elif shape.dtype in INTEGERS:
        variant = _int8_variant(tuning, shape)
    else:
        variant = _variant(tuning, shape)
    while not variant.runs(tuning, shape):
        if variant.k_teams > 1:
            variant = replace(variant, k_teams=variant.k_teams // 2)
        elif variant.staged:
            variant = replace(variant, staged=False)
        elif variant.n_teams > 1:
            variant = replace(variant, n_teams=variant.n_teams // 2)
        else:
            return None
    return variant


def _made(
    tuning: Tuning, shape: RowsShape, m_tile: int, n_tile: int, k_lanes: int, n_teams: int
) -> RowsVariant:
    """Returns a variant with as few surplus rows of x as possible, and whole subgroups."""
    lanes = tuning.subgroup_size
    m_tile = -(-shape.rows // -(-shape.rows // m_tile))
    k_lanes = min(k_lanes, lanes)
    n_teams = max(n_teams, tuning.largest_subgroup // lanes)
    return RowsVariant(m_tile, n_tile, k_lanes, lanes // k_lanes, n_teams)


def _int8_variant(tuning: Tuning, shape: RowsShape) -> RowsVariant:
    """Small workgroups, as nothing is shared in them: a subgroup along the columns, and more of
    them where there are too few outputs."""
    large = shape.w_rows >= 32 * tuning.multiprocessors
    tiles = next(tiles for rows, tiles in _INT8_TILES.items() if rows >= shape.rows)
    m_tile, k_lanes, k_teams = tiles[large]
    variant = _made(tuning, shape, m_tile, 4, k_lanes, 1)
    filled = _filled(shape, variant, 8 * tuning.multiprocessors)
    least = min(k_teams, _most_k_teams(shape, k_lanes))
    return replace(filled, k_teams=max(least, filled.k_teams))


def _variant(tuning: Tuning, shape: RowsShape) -> RowsVariant:
    """x, which is four bytes a value, goes through workgroup memory from five rows on, to be read
    by many subgroups."""
    if shape.rows <= 4:
        return replace(_made(tuning, shape, 4, 4, 32, 2), k_teams=_most_k_teams(shape, 32))
    if shape.rows <= 8:
        variant = replace(_made(tuning, shape, 8, 8, 16, 2), staged=True)
        return _filled(shape, variant, 3 * tuning.multiprocessors)
    variant = replace(_made(tuning, shape, 16, 4, 16, 4), staged=True)
    if 16 < shape.rows <= 24:  # ten rows a lane take longer than twelve
        variant = replace(variant, m_tile=12)
    few = 2 * variant.workgroups(shape) < 3 * tuning.multiprocessors
    return replace(variant, splits=2 if few and shape.splits and shape.rows <= 16 else 1)


def _filled(shape: RowsShape, variant: RowsVariant, workgroups: int) -> RowsVariant:
    """Returns the variant with more teams along the columns, as long as they fill no more than so
    many workgroups of one team."""
    most, together = _most_k_teams(shape, variant.k_lanes), 1
    m_teams = -(-shape.rows // variant.m_tile)
    while together < most and variant.workgroups(shape) * m_teams * together < workgroups:
        together *= 2
    return replace(variant, k_teams=together)


def _most_k_teams(shape: RowsShape, k_lanes: int) -> int:
    """Four, but no more than have a chunk."""
    most = 4
    while most > 1 and k_lanes * most > shape.chunks:
        most //= 2
    return most
