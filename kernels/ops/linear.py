"""Projections: matmul_vec for a few rows, tiles of matmul or matmul_int8 for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.kernels.gpu.plan import Count, Grid, linear_grid
from infer.kernels.gpu.tensor import BLOCK, INTEGERS, GpuTensor, Shard
from infer.kernels.lowering.arena import Operand, Scratch
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, padded_rows, per_row, stride, tile_grid
from infer.kernels.lowering.tuning import loop_passes
from infer.kernels.ops.matmul_lanes import LanesShape, LanesVariant, matmul_lanes_variant
from infer.kernels.ops.matmul_matrix import MatrixVariant, matmul_matrix_variant
from infer.kernels.ops.matmul_rows import RowsShape, RowsVariant, few_rows, matmul_rows_variant
from infer.kernels.ops.matmul_tiles import (
    MOST_SPLITS,
    Int8TileVariant,
    TileVariant,
    matmul_int8_variant,
    matmul_variant,
)
from infer.kernels.ops.matmul_vec import VecShape, VecVariant, matmul_vec_variant
from infer.kernels.ops.prepared import HALVES, Form, Maker, Norm, Prepared


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


Tile = TileVariant | MatrixVariant
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
        """Whether this product multiplies integers."""
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
        """Whether a norm of x may become part of this product. A rule may ask before the kernel is
        chosen, because the answer depends on the rows and the weight alone."""
        return target.kind.vec and not target.tuning.choose(few_rows, target.rows(self))

    @property
    def bound(self) -> int:
        """The number of buffers that the kernel binds for what it reads and for the weights."""
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
        """Whether a row that has stopped writes nothing, which is so if the rows are those of the
        step."""
        return target.kind.rows == 1 or not (self.of_logits and target.kind.logits)

    def _matrix_variant(self, target: Target) -> MatrixVariant | None:
        """The variant for the largest shard; None where it is not multiplied by matrices."""
        plain = self.gate is None and self.factors is None and self.norm is None
        if target.vec(self) or not plain or target.kind.invariant:
            return None
        rows, n, k, splits = self._tile_sizes(target, self.weight.shards[0])
        return target.tuning.choose(matmul_matrix_variant, rows, n, k, self.weight.dtype, splits)

    def _rows_variant(self, target: Target) -> RowsVariant | None:
        rows, weight = target.rows(self), self.weight
        if not target.tuning.choose(few_rows, rows):
            return None
        sums = MOST_SPLITS * 4 * padded_rows(rows) * stride(weight.shape[0])
        plain = self.gate is None and self.factors is None and not self.gated
        splits = plain and sums <= target.device.limits.max_binding
        shape = RowsShape(weight.shape[1], self.width, rows, weight.dtype, self.gated, splits)
        return target.tuning.choose(matmul_rows_variant, shape)

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
        sums = MOST_SPLITS * 4 * padded_rows(rows) * stride(n)
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
        if isinstance(variant, RowsVariant):
            self._lower_rows(low, variant, inputs, added, params)
        else:
            self._lower_vec(low, variant, inputs, added, params | of_norm)

    def _lower_tiles(
        self,
        low: Lowering,
        tiles: Sequence[Tile],
        inputs: Sequence[Operand],
        rest: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        """matmul, matmul_int8 or matmul_matrix for each shard."""
        weight, k, rows = self.weight, self.weight.shape[1], padded_rows(low.rows(self))
        for shard, tile in zip(weight.shards, tiles, strict=True):
            n, own, written = shard.rows, params | {"START": shard.start}, list(rest)
            if tile.splits > 1:
                own = _of_sums(params, n, rows)
                written = [Scratch(4 * tile.splits * rows * stride(n))]
            low.emit(
                tile.kernel,
                [*tile_operands(weight, shard, tile, inputs), *written],
                tile_grid(-(-n // tile.columns), tile.rows, tile.splits),
                tile_params(low, weight, tile)
                | own
                | {"N": n // 2 if self.gated else n, "GATED": self.gated},
                moved=shard.nbytes,
                flops=per_row(2 * n * k),
                variant=tile,
            )
            if tile.splits > 1:
                grid = tile_grid(-(-n // 256), 1)
                _combine(low, [*written, *rest], grid, params, shard, (tile.splits, rows))

    def _lower_rows(
        self,
        low: Lowering,
        variant: RowsVariant,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        """matmul_rows for each shard."""
        weight, k, rows = self.weight, self.weight.shape[1], low.rows(self)
        stops = int(params["STOPS"])
        scale_rows = 0 if self.prepared is None else self.prepared.scale_rows
        for shard in weight.shards:
            n = shard.rows // 2 if self.gated else shard.rows
            own, written = params | {"START": shard.start, "SPLIT_ROWS": 0}, [*added, self]
            if variant.splits > 1:
                own = _of_sums(params, n, rows)
                sums = Scratch(4 * variant.splits * rows * stride(n))
                written = [*added[:stops], sums]
            grid = linear_grid(-(-shard.rows // variant.w_rows), low.device.limits.max_workgroups)
            low.emit(
                "matmul_rows",
                [*multiplied(shard, inputs), *written],
                (*grid[:2], variant.splits),
                own
                | weight.grouping.params
                | variant.params
                | {"N": n, "ROWS": rows, "SCALE_ROWS": scale_rows, "GATED": self.gated},
                moved=shard.nbytes,
                flops=2 * rows * shard.rows * k,
                variant=variant,
            )
            if variant.splits > 1:
                rest, across = [written[-1], self, *added[stops:]], low.row_grid(self, -(-n // 256))
                _combine(low, rest, across, params, shard, (variant.splits, rows))

    def _lower_vec(
        self,
        low: Lowering,
        variant: VecVariant | LanesVariant,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        """matmul_vec or matmul_lanes for each shard."""
        weight, rows = self.weight, low.rows(self)
        for shard in weight.shards:
            n = shard.rows // 2 if self.gated else shard.rows
            operations = 2 * shard.rows * weight.shape[1]
            flops: Count | int
            if isinstance(variant, VecVariant):
                kernel, each, flops = "matmul_vec", variant.row_each, rows * operations
                grid = low.vec_grid(self, -(-n // variant.per_workgroup), int(each))
                own = {"ROWS": 1 if each else rows, "ROW_EACH": each}
                own |= {"SUBGROUPS": low.device.subgroups}
            else:
                kernel, flops = "matmul_lanes", per_row(operations)
                grid = low.vec_grid(self, -(-shard.rows // variant.w_rows), variant.m_tile)
                own = {"SOFTWARE": low.device.software}
            low.emit(
                kernel,
                [*multiplied(shard, inputs), *added, *self.outputs_bound],
                grid,
                params
                | weight.grouping.params
                | variant.params
                | self.output_params
                | own
                | {"N": n, "START": shard.start, "GATED": self.gated},
                moved=shard.nbytes,
                flops=flops,
                variant=variant,
            )


def _of_sums(params: dict[str, Any], n: int, rows: int) -> dict[str, Any]:
    """The parameters of a kernel of n outputs whose workgroups share columns, and leave sums of so
    many rows each."""
    none = {"BIAS": False, "RESIDUAL": False, "ACTIVATION": "none", "SCALE": 1.0}
    return params | none | {"START": 0, "Y_STRIDE": stride(n), "SPLIT_ROWS": rows}


def _combine(
    low: Lowering,
    operands: Sequence[Operand],
    grid: Grid,
    params: dict[str, Any],
    shard: Shard,
    sums: tuple[int, int],
) -> None:
    """matmul_combine. operands: the sums, the result and what is added. params: of that. sums: how
    many there are of an output, and of how many rows."""
    n, (splits, rows) = shard.rows, sums
    low.emit(
        "matmul_combine",
        operands,
        grid,
        {name: params[name] for name in ("Y_STRIDE", "SCALE", "BIAS", "RESIDUAL", "ACTIVATION")}
        | {"N": n, "START": shard.start, "SUMS_STRIDE": stride(n)}
        | {"SPLITS": splits, "SPLIT_ROWS": rows},
        moved=per_row(4 * n * (splits + 1)),
    )
