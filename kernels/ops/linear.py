"""Projections: matmul_vec for a few rows, tiles of matmul or matmul_int8 for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, TypeVar

from infer.kernels.gpu.tensor import (
    BLOCK,
    CODED,
    HALF,
    INTEGERS,
    LOOKED_UP,
    PLANES,
    GpuTensor,
    Shard,
)
from infer.kernels.lowering.arena import Operand, Scratch
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, padded_rows, per_row, stride, tile_grid
from infer.kernels.lowering.tuning import Tuning, loop_passes, power_of_two
from infer.kernels.ops.matmul_lanes import LanesShape, LanesVariant, matmul_lanes_variant
from infer.kernels.ops.matmul_matrix import MatrixVariant, matmul_matrix_variant
from infer.kernels.ops.matmul_rows import RowsVariant, by_rows, chosen_variant, emit_rows
from infer.kernels.ops.prepared import HALVES, Form, Maker, Norm, Prepared

_SMALL = 1 << 25  # values of a matrix
_SMALL_SOFTWARE = 1 << 16  # the same for which compiling a large tile takes longer than it saves
_FEW = 256  # rows of a matrix, as of a router: each may have a workgroup of its own
_FEW_GATED = 2048  # outputs: of half blocks there are more workgroups
_FEW_PLAIN = 8192  # the same of those that are no pairs
_MOST_SPLITS = 8  # of a matrix' columns
_SPLIT_COLUMNS = 256  # at the least
_START = 64  # columns: what a workgroup waits for before its first product
_COMBINE = 6e5  # what a launch of matmul_combine costs, in products of a multiprocessor

AnyTile = TypeVar("AnyTile", bound="TileVariant")


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change b a of a weight [out, in] that lies beside it: a [rank, in], b [out, rank]. by_row:
    each row of a step has its own, and as many of both lie one below the other."""

    a: GpuTensor
    b: GpuTensor
    by_row: bool = False

    @property
    def rank(self) -> int:
        return self.b.shape[1]


# By the weights themselves, which no two names share unless they are one.
Changes = Mapping[GpuTensor, LowRank]


@dataclass(eq=False, repr=False)
class Projection(Maker):
    """Multiplies whole rows of x by a weight.

    Rules add: the norm of x that goes into it; prepared: x in the form in which it is read;
    residual: what is added to the result. Chosen: x_scales: the layout of the scales of x as int8
    (quantize_block.wgsl), HALVES, or "" where x is read as it is.
    """

    x: Value
    norm: Norm | None = field(default=None, kw_only=True)
    prepared: Prepared | None = field(default=None, kw_only=True)
    residual: Value | None = field(default=None, kw_only=True)

    weight: GpuTensor = field(init=False)
    x_scales: str = field(init=False)

    @property
    def x_parts(self) -> int:
        """Rows that it multiplies which lie side by side in a row of x."""
        return 1

    @property
    def int8(self) -> bool:
        """Whether it multiplies integers."""
        return self.weight.dtype in INTEGERS

    def choose(self, target: Target) -> None:
        self.x_scales = ("halves" if target.vec(self) else "blocks") if self.int8 else ""

    def read(self, low: Lowering) -> tuple[list[Operand], dict[str, Any]]:
        """Returns the operands besides the weights: the activation and, where they exist, its
        scales or norm weights; and the parameters of a norm that a kernel of few rows computes
        itself."""
        x, _, offset = source(self.x)
        if offset:
            raise ValueError("a projection reads whole rows")
        inputs: list[Operand] = [x]
        scaled = self.prepared is not None and not self.prepared.scales
        if self.prepared is not None:
            inputs = [*inputs, *self.prepared.operands] if scaled else self.prepared.operands
        elif self.norm is not None:
            inputs.append(self.norm.weight.buffer)
        eps = 0.0 if self.norm is None else float(self.norm.eps)
        return inputs, {"NORM": self.norm is not None, "SCALED": scaled, "EPS": eps}

    def takes_norm(self, target: Target) -> bool:
        """Whether a norm of x may go into it. A rule may ask before the kernel is chosen, as that
        depends on the rows and the weight alone."""
        return target.kind.vec and not by_rows(target, self)

    @property
    def bound(self) -> int:
        """How many buffers it binds for what it reads and the weights."""
        inputs = 1 if self.norm is None and not self.int8 else 2
        return len(self.weight.shards[0].buffers) + inputs


def multiplied(shard: Shard, inputs: Sequence[Operand]) -> list[Operand]:
    """Returns the operands that kernels of projections bind first: the weights with their scales,
    and the inputs."""
    scales = [] if shard.scales is None else [shard.scales]
    return [shard.buffer, inputs[0], *scales, *inputs[1:]]


def tile_operands(
    weight: GpuTensor, shard: Shard, tile: Tile, inputs: Sequence[Operand]
) -> list[Operand]:
    """Returns what `multiplied` does and, where matmul_matrix reads them, the scales of the
    weights' rows."""
    scaled = isinstance(tile, MatrixVariant) and shard in weight.row_scales
    return [*multiplied(shard, inputs), *([weight.row_scales[shard]] if scaled else [])]


def tile_params(low: Lowering, weight: GpuTensor, tile: Tile) -> dict[str, Any]:
    """Returns the parameters of matmul, matmul_int8 or matmul_matrix for whole rows of x, those of
    the step, and no epilogue."""
    k = weight.shape[1]
    common: dict[str, Any] = {
        "WEIGHT": weight.dtype,
        "K": k,
        "START": 0,
        "SCALE": 1.0,
        "ACTIVATION": "none",
        "GATED": False,
        "BIAS": False,
        "RESIDUAL": False,
        "SPLIT_ROWS": 0,
    }
    common |= {"GROUPED": False, "X_SLOTS": 1, "FIRST_EXPERT": 0, "SHARD_EXPERTS": 0}
    common |= weight.grouping.params | tile.params
    if isinstance(tile, Int8TileVariant):
        return common
    heads = {"X_OFFSET": 0, "X_HEAD": 0, "Y_HEAD": 0}
    if isinstance(tile, MatrixVariant):
        return common | heads | {"X_WIDTH": k, "ROW_SCALES": bool(weight.row_scales)}
    # Loops of 4 in one over tiles of 16 columns compile sooner, but allow no rows beyond 174,000.
    passes = loop_passes(-(-k // 16) + 1, loop_passes(4))
    rolled = low.device.software and passes <= low.tuning.loop_passes
    return common | heads | {"X_STRIDE": stride(k), "SOFTWARE": rolled}


@dataclass(eq=False, repr=False)
class Linear(Projection):
    """scale * (x W^T + bias); weight [out, in], bias [out].

    Rules add: activation: of the result. gated: activation(gate) * up of its halves. gate: one
    value for each row, whose sigmoid multiplies it; factors: as many as it has itself; residual.
    Chosen: variant, whose type says which kernel; tiles: one for each shard.
    """

    weight: GpuTensor
    bias: GpuTensor | None = None
    scale: float = 1.0
    activation: str = field(default="none", kw_only=True)
    gated: bool = field(default=False, kw_only=True)
    gate: Value | None = field(default=None, kw_only=True)
    factors: Value | None = field(default=None, kw_only=True)
    variant: VecVariant | RowsVariant | LanesVariant | tuple[Tile, ...] = field(init=False)

    def checked_width(self) -> int:
        n, k = self.weight.shape
        if self.x.width != k:
            raise ValueError(f"rows of {self.x.width} do not fit a weight of {self.weight.shape}")
        return n

    @property
    def is_plain(self) -> bool:
        """Whether nothing was done to the product yet."""
        later = (self.residual, self.gate, self.factors)
        return self.activation == "none" and all(item is None for item in later)

    def choose(self, target: Target) -> None:
        super().choose(target)
        matrix = self._matrix_variant(target)
        if matrix is not None:
            self.variant, self.x_scales = (matrix,) * len(self.weight.shards), HALVES
            return
        self.variant = (
            self._rows_variant(target)
            or self._lanes_variant(target)
            or (self._vec_variant(target) if target.vec(self) else self._tiles(target))
        )
        if self.int8 and isinstance(self.variant, RowsVariant):
            self.x_scales = "rows"
        elif self.int8 and isinstance(self.variant, LanesVariant):
            self.x_scales = "halves"

    def takes_norm(self, target: Target) -> bool:
        # matmul_lanes: of more rows each workgroup would take all of them again.
        once = target.kind.single or self._lanes_variant(target) is None
        return once and super().takes_norm(target)

    def writes(self, form: Form, target: Target) -> bool:
        if not target.vec(self) or isinstance(self.variant, RowsVariant):
            return False
        if form.int8 and isinstance(self.variant, LanesVariant):
            return False  # its outputs lie in no workgroup's memory
        optional = (self.bias, self.residual, self.gate or self.factors)
        bound = self.bound + sum(item is not None for item in optional) + self._stops(target)
        whole_blocks = all(s.rows % ((1 + self.gated) * BLOCK) == 0 for s in self.weight.shards)
        int8 = whole_blocks and target.tuning.subgroup_size
        return form.fits(self, target, bound) and bool(int8 or not form.int8)

    def _stops(self, target: Target) -> bool:
        """Whether a row that has stopped writes nothing: where rows are those of the step."""
        return target.kind.rows == 1 or not (self.of_logits and target.kind.logits)

    def _matrix_variant(self, target: Target) -> MatrixVariant | None:
        """The variant for the largest shard; None where it is not multiplied by matrices."""
        plain = self.gate is None and self.factors is None and self.norm is None
        if target.vec(self) or not plain or target.kind.invariant:
            return None
        rows, n, k, splits = self._tile_sizes(target, self.weight.shards[0])
        return target.tuning.choose(matmul_matrix_variant, rows, n, k, self.weight.dtype, splits)

    def _rows_variant(self, target: Target) -> RowsVariant | None:
        plain = self.gate is None and self.factors is None
        return chosen_variant(target, self, self.weight, self.gated, plain)

    def _lanes_variant(self, target: Target) -> LanesVariant | None:
        shape = LanesShape(target.rows(self), self.weight.dtype)
        return target.tuning.choose(matmul_lanes_variant, shape)

    def _vec_variant(self, target: Target) -> VecVariant:
        k, rows, int8 = self.weight.shape[1], target.rows(self), self.output_params["QUANTIZE"]
        shape = VecShape(k, self.width, rows, self.weight.dtype, self.gated, int8)
        return target.tuning.choose(matmul_vec_variant, shape)

    def _tiles(self, target: Target) -> tuple[Tile, ...]:
        def tile(shard: Shard) -> Tile:
            sizes = self._tile_sizes(target, shard)
            if self.int8:
                return target.tuning.choose(matmul_int8_variant, *sizes, self.weight.dtype)
            return target.tuning.choose(matmul_variant, *sizes, 1)

        return tuple(tile(shard) for shard in self.weight.shards)

    def _tile_sizes(self, target: Target, shard: Shard) -> tuple[int, int, int, bool]:
        """Returns rows, outputs and columns of a shard's product, and whether workgroups may share
        the columns: not of pairs, and if the sums of all of them fit in a binding."""
        rows, n = target.rows(self), shard.rows
        sums = _MOST_SPLITS * 4 * padded_rows(rows) * stride(n)
        fits = sums <= target.device.limits.max_binding
        return rows, n, self.weight.shape[1], fits and not self.gated

    def lower(self, low: Lowering) -> None:
        variant, (inputs, of_norm) = self.variant, self.read(low)
        added: list[Operand] = [] if self.bias is None else [self.bias.buffer]
        if self.residual is not None:
            added.append(source(self.residual)[0])
        params: dict[str, Any] = {
            "WEIGHT": self.weight.dtype,
            "K": self.weight.shape[1],
            "Y_STRIDE": stride(self.width),
            "SCALE": float(self.scale),
            "BIAS": self.bias is not None,
            "RESIDUAL": self.residual is not None,
            "ACTIVATION": self.activation,
        }
        if isinstance(variant, tuple):
            self._lower_tiles(low, variant, inputs, [self, *added], params)
            return
        params |= {"SIGMOID_GATE": self.gate is not None, "FACTORS": self.factors is not None}
        params |= {"GATE_STRIDE": 0, "GATE_OFFSET": 0, "STOPS": self._stops(low)}
        gates = self.gate or self.factors
        if gates is not None:
            x, gate_stride, offset = source(gates)
            added.append(x)
            params |= {"GATE_STRIDE": gate_stride, "GATE_OFFSET": offset}
        if params["STOPS"]:
            added.insert(0, low.step)
        if isinstance(variant, VecVariant):
            self._lower_vec(low, variant, inputs, added, params | of_norm)
        elif isinstance(variant, LanesVariant):
            self._lower_lanes(low, variant, inputs, added, params | of_norm)
        else:
            read = [multiplied(shard, inputs) for shard in self.weight.shards]
            scale_rows = 0 if self.prepared is None else self.prepared.scale_rows
            params |= {"GATED": self.gated}
            emit_rows(low, self, variant, self.weight, scale_rows, read, added, params)

    def _lower_tiles(
        self,
        low: Lowering,
        tiles: Sequence[Tile],
        inputs: Sequence[Operand],
        rest: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        weight, k, rows = self.weight, self.weight.shape[1], low.rows(self)
        for shard, tile in zip(weight.shards, tiles, strict=True):
            n = shard.rows
            own = tile_params(low, weight, tile) | params | {"START": shard.start}
            written = list(rest)
            if tile.splits > 1:
                own |= {"BIAS": False, "RESIDUAL": False, "ACTIVATION": "none", "SCALE": 1.0}
                own |= {"START": 0, "Y_STRIDE": stride(n), "SPLIT_ROWS": padded_rows(rows)}
                written = [Scratch(tile.splits * 4 * padded_rows(rows) * stride(n))]
            low.emit(
                tile.kernel,
                [*tile_operands(weight, shard, tile, inputs), *written],
                tile_grid(-(-n // tile.columns), tile.rows, tile.splits),
                own | {"N": n // 2 if self.gated else n, "GATED": self.gated},
                moved=shard.nbytes,
                flops=per_row(2 * n * k),
                variant=tile,
            )
            if tile.splits > 1:
                names = ("Y_STRIDE", "SCALE", "BIAS", "RESIDUAL", "ACTIVATION")
                low.emit(
                    "matmul_combine",
                    [*written, *rest],
                    tile_grid(-(-n // 256), 1),
                    {name: params[name] for name in names}
                    | {"N": n, "START": shard.start, "SUMS_STRIDE": stride(n)}
                    | {"SPLITS": tile.splits, "SPLIT_ROWS": padded_rows(rows)},
                    moved=per_row(4 * n * (tile.splits + 1)),
                )

    def _lower_vec(
        self,
        low: Lowering,
        variant: VecVariant,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        weight, k, rows = self.weight, self.weight.shape[1], low.rows(self)
        for shard in weight.shards:
            n = shard.rows // 2 if self.gated else shard.rows
            low.emit(
                "matmul_vec",
                [*multiplied(shard, inputs), *added, *self.outputs_bound],
                low.vec_grid(self, -(-n // variant.per_workgroup), int(variant.row_each)),
                params
                | weight.grouping.params
                | variant.params
                | self.output_params
                | {
                    "N": n,
                    "START": shard.start,
                    "SUBGROUPS": low.device.subgroups,
                    "ROWS": 1 if variant.row_each else rows,
                    "ROW_EACH": variant.row_each,
                    "GATED": self.gated,
                },
                moved=shard.nbytes,
                flops=2 * rows * shard.rows * k,
                variant=variant,
            )

    def _lower_lanes(
        self,
        low: Lowering,
        variant: LanesVariant,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        weight, k = self.weight, self.weight.shape[1]
        for shard in weight.shards:
            low.emit(
                "matmul_lanes",
                [*multiplied(shard, inputs), *added, *self.outputs_bound],
                low.vec_grid(self, -(-shard.rows // variant.w_rows), variant.m_tile),
                params
                | weight.grouping.params
                | variant.params
                | self.output_params
                | {
                    "SOFTWARE": low.device.software,
                    "N": shard.rows // 2 if self.gated else shard.rows,
                    "START": shard.start,
                    "GATED": self.gated,
                },
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
                variant=variant,
            )


# Variants of matmul_vec


@dataclass(frozen=True)
class VecShape:
    """A product for matmul_vec: columns and outputs, rows of activations, the weights' dtype,
    whether outputs are pairs of rows (gated), and whether they are written as int8 (quantize)."""

    k: int
    n: int
    rows: int
    dtype: str
    gated: bool
    quantize: bool


@dataclass(frozen=True)
class VecVariant:
    """matmul_vec: invocations of a workgroup and of each of its teams, outputs of a team, loads in
    flight per row of weights, copies of the table of codes that are looked up, and whether there
    are workgroups for each row of activations, instead of each taking all of them."""

    workgroup: int
    team: int
    outputs: int
    unroll: int
    copies: int = 1
    row_each: bool = False

    @property
    def per_workgroup(self) -> int:
        """Outputs of a workgroup."""
        return self.workgroup // self.team * self.outputs

    @property
    def params(self) -> dict[str, int]:
        """The parameters that matmul_vec and expert_matmul_vec share."""
        return {
            "WG": self.workgroup,
            "TEAM": self.team,
            "OUTPUTS": self.outputs,
            "UNROLL": self.unroll,
            "TABLE_COPIES": self.copies,
        }


def matmul_vec_variant(tuning: Tuning, shape: VecShape) -> VecVariant:
    """Returns the variant of matmul_vec. Workgroups of 1,024 invocations have 16 copies of a table
    of codes: with more, each invocation would have to store more values to fill them."""
    variant = _vec_variant(tuning, shape)
    many = shape.dtype in LOOKED_UP and variant.workgroup == 1024
    return replace(variant, copies=16) if many else variant


def _vec_variant(tuning: Tuning, shape: VecShape) -> VecVariant:
    """A CPU wants many rows for each subgroup, a GPU few, and in a large matrix many
    invocations for a row, so that what is read at one time lies close together in memory."""
    lanes = tuning.subgroup_size
    most = power_of_two(tuning.limits.max_invocations + 1) // 2  # some GPUs have 384
    if shape.dtype in LOOKED_UP and tuning.limits.workgroup_storage < 32768:
        most = min(most, 512)  # 1,024 have 16 copies of a table
    int8 = shape.dtype in INTEGERS
    columns = BLOCK if int8 else 128 // CODED.get(shape.dtype, 16)  # of a chunk
    chunks = -(-shape.k // columns)
    if not lanes:
        workgroup = max(32, min(128, most, power_of_two(chunks)))
        return VecVariant(workgroup, workgroup, 2, 1, row_each=tuning.software)
    if tuning.software:
        # Weights come out of a CPU's cache for every row; one kernel for all, which compiles
        # in a fifth of the time, leaves registers to more outputs.
        return VecVariant(BLOCK // 4 * lanes, lanes, 4, 1, row_each=True)
    least = max(32, tuning.largest_subgroup)  # a team is whole subgroups
    if shape.quantize:
        return _int8_variant(tuning, shape, chunks, most, least)
    rows_of_weights = shape.n * (1 + shape.gated)
    if shape.dtype in CODED and not int8:
        # Arithmetic bounds them: what is read of x serves many rows of W.
        workgroup = max(least, min(512, most))
        team = min(workgroup, max(least, 32 if rows_of_weights > 8192 else 128))
        return VecVariant(workgroup, team, max(1, 4 // shape.rows), 1)
    small = shape.gated and rows_of_weights * shape.k <= _SMALL
    if int8 or small or rows_of_weights <= _FEW:
        team, outputs = max(1, tuning.filling // rows_of_weights), 1
    else:
        team, outputs = chunks // 2, 1 if shape.gated else 2
    workgroup = min(256, most)
    team = min(workgroup, max(least, 1 << team.bit_length() >> 1))
    if tuning.overflows(rows_of_weights // outputs * team):
        team = max(least, team // 2)
    while team > max(least, chunks):
        team //= 2
    return VecVariant(workgroup, team, outputs, 1)


def _int8_variant(
    tuning: Tuning, shape: VecShape, chunks: int, most: int, least: int
) -> VecVariant:
    """Returns the variant for outputs that are written as int8: a workgroup has a block of them, or
    half a block where there are few or a product takes many registers."""
    workgroup, outputs, block = 1024, 1 if shape.dtype in INTEGERS else 2, HALF
    if shape.gated and shape.dtype == "mxfp4":
        workgroup, outputs, block = 256, 4, BLOCK
    elif shape.gated and shape.dtype in ("q4", "q5"):
        workgroup = 512
    elif shape.gated and shape.n > _FEW_GATED:
        block = BLOCK
    elif not shape.gated and shape.n > _FEW_PLAIN:
        workgroup, outputs, block = 512, 2, BLOCK
    if tuning.overflows(shape.n // block * workgroup):
        workgroup, outputs = workgroup // 2, 2 * outputs
    workgroup = min(workgroup * least // 32, most)  # the sweeps had subgroups of 32
    team = max(least, workgroup * outputs // block)
    outputs = block * team // workgroup
    ahead = shape.gated and outputs == 1
    if shape.dtype in LOOKED_UP:
        ahead = ahead and chunks >= 2 * team
    else:
        ahead = ahead and shape.dtype == "q4" and chunks == 2 * team  # all of a row at once
    return VecVariant(workgroup, team, outputs, 2 if ahead else 1)


# matmul and matmul_int8: their tiles


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


Tile = TileVariant | MatrixVariant


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
    most = min(_MOST_SPLITS, k // _SPLIT_COLUMNS) if splits and not tuning.software else 1
    speeds = {
        replace(tile, double=double, splits=count): speed * (1.0 if double else 0.88)
        for double, count in product((True, False), (1, 2, 4, _MOST_SPLITS))
        for tile, speed in tiles.items()
        if count <= max(1, most)
    }
    return min((tile for tile in speeds if tile.storage <= storage), key=cost)
