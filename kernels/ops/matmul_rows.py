"""matmul_rows: projections of 2 to 64 rows, whose every weight is read once, in subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.kernels.compiler.arena import Operand, Scratch
from infer.kernels.compiler.graph import Value, stride
from infer.kernels.compiler.lowering import Lowering
from infer.kernels.compiler.target import Target, padded_rows, per_row
from infer.kernels.compiler.tuning import Tuning
from infer.kernels.gpu.plan import linear_grid
from infer.kernels.gpu.tensor import BLOCK, CODED, INTEGERS, LOOKED_UP, GpuTensor
from infer.kernels.ops.prepared import Maker

MOST_ROWS = 64
_MOST_FLOAT_ROWS = 16
LEAST_LANES = 4
_MOST_SPLITS = 8  # of a matrix' columns


@dataclass(frozen=True)
class RowsShape:
    """What matmul_rows is asked for: columns and outputs, rows of activations, the weights' dtype,
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


@dataclass(frozen=True)
class RowsVariant:
    """matmul_rows: rows of x and of W of a lane, lanes of a team along the columns and along W's
    rows, teams of a workgroup along W's rows and along the columns, steps that are on their way,
    and workgroups that share the columns.

    Lanes are powers of two, a team is a subgroup at most, and n_tile is even for gated outputs.
    """

    m_tile: int
    n_tile: int
    k_lanes: int
    n_lanes: int
    n_teams: int
    k_teams: int = 1
    ahead: int = 1
    splits: int = 1

    @property
    def w_rows(self) -> int:
        """Rows of W of a workgroup."""
        return self.n_lanes * self.n_teams * self.n_tile

    def invocations(self, rows: int) -> int:
        """Of a workgroup, for so many rows of x."""
        return self.k_lanes * self.n_lanes * self.n_teams * self.k_teams * -(-rows // self.m_tile)

    def storage(self, rows: int, dtype: str) -> int:
        """Bytes of workgroup memory, a table of codes among them."""
        padded = -(-rows // self.m_tile) * self.m_tile
        return 4 * self.k_teams * padded * self.w_rows + 1024 * (dtype in LOOKED_UP)

    def runs(self, tuning: Tuning, shape: RowsShape) -> bool:
        """Whether the kernel can be of that variant."""
        invocations, limits = self.invocations(shape.rows), tuning.limits
        return (
            self.k_lanes * self.n_lanes <= tuning.subgroup_size
            and invocations % max(1, tuning.largest_subgroup) == 0
            and invocations <= limits.max_invocations
            and self.storage(shape.rows, shape.dtype) <= limits.workgroup_storage
            and self.n_tile % (1 + shape.gated) == 0
            and (self.splits == 1 or shape.splits)
        )

    @property
    def params(self) -> dict[str, int]:
        """The kernel's."""
        return {
            "M_TILE": self.m_tile,
            "N_TILE": self.n_tile,
            "K_LANES": self.k_lanes,
            "N_LANES": self.n_lanes,
            "N_TEAMS": self.n_teams,
            "K_TEAMS": self.k_teams,
            "AHEAD": self.ahead,
            "SPLITS": self.splits,
        }


def few_rows(tuning: Tuning, rows: int) -> bool:
    """Whether products of so many rows are matmul_rows's."""
    lanes = tuning.subgroup_size >= LEAST_LANES
    return lanes and 2 <= rows <= MOST_ROWS and not tuning.software


def matmul_rows_variant(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
    """None, where other kernels stay: of many rows of floats, matmul's tiles."""
    many = shape.dtype not in INTEGERS and shape.rows > _MOST_FLOAT_ROWS
    return possible_variant(tuning, shape) if few_rows(tuning, shape.rows) and not many else None


def possible_variant(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
    """What was fastest on a large GPU whose subgroups have 32 lanes, for 4, 8, 16 and more rows;
    lanes of other subgroups that are left over have other rows of W."""
    lanes = tuning.subgroup_size
    if lanes < LEAST_LANES:
        return None
    m_tile, n_tile, k_lanes, n_teams, k_teams, ahead = _fastest(shape)
    if tuning.software:  # large kernels compile for seconds
        m_tile, n_tile, n_teams, k_teams, ahead = 4, 2, 2, 1, 1
    k_lanes = min(k_lanes, lanes)
    # As few rows of x too many as can be.
    m_tile = -(-shape.rows // -(-shape.rows // m_tile))
    variant = RowsVariant(
        m_tile, n_tile, k_lanes, lanes // k_lanes, n_teams, _fitting(shape, k_lanes, k_teams)
    )
    while not variant.runs(tuning, shape) and variant.k_teams > 1:
        variant = replace(variant, k_teams=variant.k_teams // 2)
    while not variant.runs(tuning, shape) and variant.n_teams > 1:
        variant = replace(variant, n_teams=variant.n_teams // 2)
    if not variant.runs(tuning, shape):
        variant = replace(variant, n_teams=max(1, tuning.largest_subgroup // lanes))
    variant = replace(_spread(tuning, shape, variant), ahead=ahead)
    return variant if variant.runs(tuning, shape) else None


def _fastest(shape: RowsShape) -> tuple[int, int, int, int, int, int]:
    """m_tile, n_tile, k_lanes, n_teams, k_teams and ahead."""
    rows = shape.rows
    if shape.dtype not in INTEGERS:
        if rows <= 4:
            return 4, 4, 16, 1, 8, 4
        return (8, 8, 16, 4, 1, 2) if rows <= 8 else (16, 4, 8, 4, 1, 2)
    if shape.dtype == "q8" and rows <= 16:
        if rows <= 4:
            return 4, 8, 32, 2, 2, 1
        return (8, 2, 16, 4, 1, 1) if rows <= 8 else (8, 4, 32, 1, 1, 2)
    if rows <= 4:
        return 4, 4, 16, 2, 2, 1
    if rows <= 8:
        return 8, 4, 32, 2, 1, 2
    return (16, 4, 32, 2, 1, 1) if rows <= 16 else (16, 4, 16, 1, 1, 2)


def _fitting(shape: RowsShape, k_lanes: int, k_teams: int) -> int:
    """No more teams along the columns than have a chunk."""
    while k_teams > 1 and k_lanes * k_teams > shape.chunks:
        k_teams //= 2
    return k_teams


def _spread(tuning: Tuning, shape: RowsShape, variant: RowsVariant) -> RowsVariant:
    """With more workgroups where outputs are too few for all multiprocessors: they share columns,
    or teams of a workgroup do instead of having outputs of their own."""

    def few(variant: RowsVariant) -> bool:
        count = -(-shape.n * (1 + shape.gated) // variant.w_rows) * variant.splits
        return not tuning.software and 2 * count < 3 * tuning.multiprocessors

    while few(variant):
        more = variant
        if shape.splits and variant.splits < _MOST_SPLITS:
            more = replace(variant, splits=2 * variant.splits)
        elif not shape.splits and variant.n_teams % 2 == 0:
            more = replace(variant, n_teams=variant.n_teams // 2, k_teams=2 * variant.k_teams)
        together = more.k_lanes * more.k_teams * more.splits
        if more == variant or together > shape.chunks or not more.runs(tuning, shape):
            break
        variant = more
    return variant


def by_rows(target: Target, x: Value) -> bool:
    """Whether products of x are matmul_rows's, where it has a variant for them."""
    return target.tuning.choose(few_rows, target.rows(x))


def chosen_variant(
    target: Target, y: Maker, weight: GpuTensor, gated: bool, plain: bool
) -> RowsVariant | None:
    """None: y takes matmul_vec or matmul. plain: no factor goes into it."""
    rows = target.rows(y)
    if not by_rows(target, y):
        return None
    sums = 4 * _MOST_SPLITS * padded_rows(rows) * stride(weight.shape[0])
    room = plain and not gated and sums <= target.device.limits.max_binding
    shape = RowsShape(weight.shape[1], y.width, rows, weight.dtype, gated, room)
    return target.tuning.choose(matmul_rows_variant, shape)


def emit_rows(
    low: Lowering,
    y: Maker,
    variant: RowsVariant,
    weight: GpuTensor,
    scale_rows: int,
    read: Sequence[Sequence[Operand]],
    added: Sequence[Operand],
    params: dict[str, Any],
) -> None:
    """The kernels of a projection, for each shard. scale_rows: of x in int8. read: what they bind
    first. added, params: as of matmul_vec."""
    k, rows, gated = weight.shape[1], low.rows(y), bool(params["GATED"])
    stops = 1 if params["STOPS"] else 0
    for shard, operands in zip(weight.shards, read, strict=True):
        n = shard.rows // 2 if gated else shard.rows
        own, written = params | {"START": shard.start, "SPLIT_ROWS": 0}, list[Operand]([y])
        rest = list(added)
        if variant.splits > 1:
            own |= {"BIAS": False, "RESIDUAL": False, "ACTIVATION": "none", "SCALE": 1.0}
            own |= {"START": 0, "Y_STRIDE": stride(n), "SPLIT_ROWS": rows}
            written = [Scratch(4 * variant.splits * rows * stride(n))]
            rest = rest[:stops]
        count = -(-n * (1 + gated) // variant.w_rows)
        grid = linear_grid(count, low.device.limits.max_workgroups)
        low.emit(
            "matmul_rows",
            [*operands, *rest, *written],
            (*grid[:2], variant.splits),
            own
            | weight.grouping.params
            | variant.params
            | {"N": n, "ROWS": rows, "SCALE_ROWS": scale_rows},
            moved=shard.nbytes,
            flops=2 * rows * shard.rows * k,
        )
        if variant.splits > 1:
            names = ("Y_STRIDE", "SCALE", "BIAS", "RESIDUAL", "ACTIVATION")
            low.emit(
                "matmul_combine",
                [*written, y, *added[stops:]],
                low.row_grid(y, -(-n // 64)),
                {name: params[name] for name in names}
                | {"N": n, "START": shard.start, "SUMS_STRIDE": stride(n)}
                | {"SPLITS": variant.splits, "SPLIT_ROWS": rows},
                moved=per_row(4 * n * (variant.splits + 1)),
            )
