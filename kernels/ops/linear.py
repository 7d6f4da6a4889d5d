"""Projections: matmul_vec for a few rows, tiles of matmul or matmul_int8 for many, head_linear for
a matrix for each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.kernels.compiler.arena import Operand, Scratch
from infer.kernels.compiler.graph import Value, source, stride
from infer.kernels.compiler.lowering import Lowering
from infer.kernels.compiler.target import MAX_VEC_ROWS, Target, padded_rows, per_row, tile_grid
from infer.kernels.compiler.tuning import MOST_SPLITS, VecShape
from infer.kernels.gpu.tensor import BLOCK, HALF, INTEGERS, GpuTensor, Shard
from infer.kernels.ops.latent import NO_KEY, LatentKey
from infer.kernels.ops.prepared import Form, Maker, Norm, Prepared
from infer.kernels.ops.rope import Rope, lower_rotate

# Rows of a tile are those of the step (tile_rows.wgsl).
_UNGROUPED = {"GROUPED": False, "X_SLOTS": 1, "FIRST_EXPERT": 0, "SHARD_EXPERTS": 0}


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change b a of a weight [out, in] that lies beside it: a [rank, in], b [out, rank]."""

    a: GpuTensor
    b: GpuTensor


# By the weights themselves, which no two names share unless they are one.
Changes = Mapping[GpuTensor, LowRank]


@dataclass(eq=False, repr=False)
class Projection(Maker):
    """Multiplies whole rows of x by a weight.

    Rules add: the norm of x that goes into it; prepared: x in the form in which it is read;
    residual: what is added to the result.
    """

    x: Value
    norm: Norm | None = field(default=None, kw_only=True)
    prepared: Prepared | None = field(default=None, kw_only=True)
    residual: Value | None = field(default=None, kw_only=True)

    weight: GpuTensor = field(init=False)

    @property
    def x_parts(self) -> int:
        """Rows that it multiplies which lie side by side in a row of x."""
        return 1

    @property
    def int8(self) -> bool:
        """Whether it multiplies integers."""
        return self.weight.dtype in INTEGERS

    def read(self, low: Lowering) -> tuple[list[Operand], dict[str, Any]]:
        """What it reads besides its weights: the activation and what belongs to that; and the
        parameters of the norm that goes into a kernel of few rows."""
        x, _, offset = low.source(self.x)
        if offset:
            raise ValueError("a projection reads whole rows")
        inputs: list[Operand] = [x]
        scaled = self.prepared is not None and not self.int8
        if self.prepared is not None:
            inputs = [*inputs, *self.prepared.operands] if scaled else self.prepared.operands
        elif self.norm is not None:
            inputs.append(self.norm.weight.buffer)
        eps = 0.0 if self.norm is None else float(self.norm.eps)
        return inputs, {"NORM": self.norm is not None, "SCALED": scaled, "EPS": eps}

    @property
    def bound(self) -> int:
        """How many buffers it binds for what it reads and the weights."""
        inputs = 1 if self.norm is None and not self.int8 else 2
        return len(self.weight.shards[0].buffers) + inputs


def multiplied(shard: Shard, inputs: Sequence[Operand]) -> list[Operand]:
    """What kernels of projections bind first: weights, an activation and what is beside each."""
    scales = [] if shard.scales is None else [shard.scales]
    return [shard.buffer, inputs[0], *scales, *inputs[1:]]


def whole_rows(low: Lowering, weight: GpuTensor) -> dict[str, int]:
    """What matmul, which f32 activations go through, has to know to read whole rows."""
    if weight.dtype in INTEGERS:
        return {}
    heads = {"X_OFFSET": 0, "X_HEAD": 0, "Y_HEAD": 0}
    return heads | {"X_STRIDE": stride(weight.shape[1]), "SOFTWARE": low.device.software}


@dataclass(eq=False, repr=False)
class Linear(Projection):
    """scale * (x W^T + bias); weight [out, in], bias [out].

    Rules add: activation: of the result. gated: activation(gate) * up of its halves. gate: one
    value for each row, whose sigmoid multiplies it; factors: as many as it has itself; residual.
    """

    weight: GpuTensor
    bias: GpuTensor | None = None
    scale: float = 1.0
    activation: str = field(default="none", kw_only=True)
    gated: bool = field(default=False, kw_only=True)
    gate: Value | None = field(default=None, kw_only=True)
    factors: Value | None = field(default=None, kw_only=True)

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

    def writes(self, form: Form, target: Target) -> bool:
        if target.rows(self) > MAX_VEC_ROWS:
            return False
        optional = (self.bias, self.residual, self.gate or self.factors)
        bound = self.bound + sum(item is not None for item in optional) + self._stops(target)
        whole_blocks = all(s.rows % ((1 + self.gated) * BLOCK) == 0 for s in self.weight.shards)
        int8 = whole_blocks and target.tuning.subgroup_size
        return form.fits(self, target, bound) and bool(int8 or not form.int8)

    def _stops(self, target: Target) -> bool:
        """Whether a row that has stopped writes nothing: where rows are those of the step."""
        return target.kind.rows == 1 or not (self.of_logits and target.kind.logits)

    def lower(self, low: Lowering) -> None:
        rows = low.rows(self)
        inputs, of_norm = self.read(low)
        added: list[Operand] = [] if self.bias is None else [self.bias.buffer]
        if self.residual is not None:
            added.append(low.source(self.residual)[0])
        params: dict[str, Any] = {
            "WEIGHT": self.weight.dtype,
            "K": self.weight.shape[1],
            "Y_STRIDE": stride(self.width),
            "SCALE": float(self.scale),
            "BIAS": self.bias is not None,
            "RESIDUAL": self.residual is not None,
            "ACTIVATION": self.activation,
        }
        if rows > MAX_VEC_ROWS:
            self._matmul(low, rows, inputs, [self, *added], params)
            return
        params |= of_norm
        params |= {"SIGMOID_GATE": self.gate is not None, "FACTORS": self.factors is not None}
        params |= {"GATE_STRIDE": 0, "GATE_OFFSET": 0, "STOPS": self._stops(low)}
        gates = self.gate or self.factors
        if gates is not None:
            x, gate_stride, offset = low.source(gates)
            added.append(x)
            params |= {"GATE_STRIDE": gate_stride, "GATE_OFFSET": offset}
        if params["STOPS"]:
            added.insert(0, low.step)
        self._matmul_vec(low, rows, inputs, added, params)

    def _matmul(
        self,
        low: Lowering,
        rows: int,
        inputs: Sequence[Operand],
        rest: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        weight, k = self.weight, self.weight.shape[1]
        for shard in weight.shards:
            n = shard.rows
            sums = 4 * padded_rows(rows) * stride(n)
            room = MOST_SPLITS * sums <= low.device.limits.max_binding
            sizes = rows, n, k, room and not self.gated
            tile = (
                low.tuning.matmul_int8(*sizes, weight.dtype)
                if self.int8
                else low.tuning.matmul(*sizes)
            )
            own = params | {"START": shard.start, "SPLIT_ROWS": 0}
            written = list(rest)
            if tile.splits > 1:
                own |= {"BIAS": False, "RESIDUAL": False, "ACTIVATION": "none", "SCALE": 1.0}
                own |= {"START": 0, "Y_STRIDE": stride(n), "SPLIT_ROWS": padded_rows(rows)}
                written = [Scratch(tile.splits * sums)]
            low.emit(
                "matmul_int8" if self.int8 else "matmul",
                [*multiplied(shard, inputs), *written],
                tile_grid(-(-n // tile.columns), tile.rows, tile.splits),
                own
                | weight.grouping.params
                | _UNGROUPED
                | whole_rows(low, weight)
                | {"N": n // 2 if self.gated else n, "GATED": self.gated}
                | tile.params,
                moved=shard.nbytes,
                flops=per_row(2 * n * k),
            )
            if tile.splits > 1:
                names = ("Y_STRIDE", "SCALE", "BIAS", "RESIDUAL", "ACTIVATION")
                low.emit(
                    "matmul_combine",
                    [*written, *rest],
                    tile_grid(-(-n // 64), 1),
                    {name: params[name] for name in names}
                    | {"N": n, "START": shard.start, "SUMS_STRIDE": stride(n)}
                    | {"SPLITS": tile.splits, "SPLIT_ROWS": padded_rows(rows)},
                    moved=per_row(4 * n * (tile.splits + 1)),
                )

    def _matmul_vec(
        self,
        low: Lowering,
        rows: int,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        weight, k, form = self.weight, self.weight.shape[1], self.prepares
        int8, keep = form is not None and form.int8, form is None or form.keep
        variant = low.tuning.matmul_vec(
            VecShape(k, self.width, rows, weight.dtype, self.gated, quantize=int8)
        )
        for shard in weight.shards:
            n = shard.rows // 2 if self.gated else shard.rows
            low.emit(
                "matmul_vec",
                [*multiplied(shard, inputs), *added, *self.outputs_bound],
                low.vec_grid(self, -(-n // variant.per_workgroup), variant.row_each),
                params
                | weight.grouping.params
                | {
                    "N": n,
                    "START": shard.start,
                    "WG": variant.workgroup,
                    "TEAM": variant.team,
                    "SUBGROUPS": low.device.subgroups,
                    "ROWS": 1 if variant.row_each else rows,
                    "ROW_EACH": variant.row_each,
                    "OUTPUTS": variant.outputs,
                    "UNROLL": variant.unroll,
                    "TABLE_COPIES": variant.copies,
                    "GATED": self.gated,
                    "KEEP": keep,
                    "QUANTIZE": int8,
                    "NEXT_NORM": form is not None and form.norm is not None,
                },
                moved=shard.nbytes,
                flops=2 * rows * shard.rows * k,
            )


@dataclass(eq=False, repr=False)
class HeadLinear(Maker):
    """W_h x_h^T for each of the heads that lie side by side in x, where x_h is as many of its last
    values as W_h has columns; weight [heads * out, in]. The values before them are left out or,
    with `keep`, go in front of the result.

    Rules add: rope: rotates what is kept. key: what is written into a latent cache beside it, from
    latent, the activation that has it.
    """

    x: Value
    weight: GpuTensor
    heads: int
    keep: bool = False
    rope: Rope | None = field(default=None, kw_only=True)
    key: LatentKey | None = field(default=None, kw_only=True)
    latent: Value | None = field(default=None, kw_only=True)

    def checked_width(self) -> int:
        rows, k = self.weight.shape
        own, n = self.x.width // self.heads, rows // self.heads
        if self.x.width % self.heads or rows % self.heads or own < k:
            raise ValueError(
                f"{self.heads} heads in rows of {self.x.width} do not fit {self.weight.shape}"
            )
        if any(shard.start % n or shard.rows % n for shard in self.weight.shards):
            raise ValueError("shards end inside of a head")
        return self.heads * (self.kept + n)

    @property
    def head(self) -> int:
        """Values of a head in x."""
        return self.x.width // self.heads

    @property
    def kept(self) -> int:
        """Values of a head that go in front of the result."""
        return self.head - self.weight.shape[1] if self.keep else 0

    @property
    def outputs(self) -> int:
        """Rows of a head's matrix."""
        return self.weight.shape[0] // self.heads

    def is_tiled(self, target: Target) -> bool:
        """Whether it is a product for each head by the tiles of prefill."""
        vectors = not any(n % 4 for n in (self.weight.shape[1], self.head, source(self.x)[2]))
        return not target.kind.vec and vectors and (self.rope is not None or not self.kept)

    def writes(self, form: Form, target: Target) -> bool:
        if self.is_tiled(target):
            return False
        variant = target.tuning.head_linear(target.kind.rows, self.weight.shape[1])
        whole_halves = variant.outputs % HALF == 0 and self.outputs % variant.outputs == 0
        only = form.norm is None and not form.keep
        return not self.kept and whole_halves and only and form.fits(self, target, 4)

    def has_room(self, key: LatentKey, target: Target) -> bool:
        """Whether its kernel can write a latent cache besides."""
        limits, k = target.device.limits, self.weight.shape[1]
        variant = target.tuning.head_linear(target.kind.rows, k)
        bindings = 4 + len(self.weight.shards[0].buffers) + 1 + len(key.operands)
        return (
            key.rope is self.rope
            and target.kind.rows == 1
            and len(self.weight.shards) == 1
            and bindings <= limits.storage_buffers
            and variant.storage(k) + key.storage <= limits.workgroup_storage
        )

    def lower(self, low: Lowering) -> None:
        if self.is_tiled(low):
            if self.rope is not None:
                lower_rotate(low, self.x, self, self.rope, self.kept, self.head)
            self._matmul(low)
            return
        weight, n, k = self.weight, self.outputs, self.weight.shape[1]
        x, x_stride, offset = low.source(self.x)
        variant = low.tuning.head_linear(low.kind.rows, k)
        outputs = [self] if self.prepares is None else self.prepares.operands
        last: list[Operand] = [] if self.rope is None else [self.rope.table]
        if self.key is not None and self.latent is not None:
            last += [low.source(self.latent)[0], *self.key.operands]
        tiles = -(-n // variant.outputs) + (self.kept > 0) + (self.key is not None)
        for shard in weight.shards:
            low.emit(
                "head_linear",
                (low.step, *shard.buffers, x, *outputs, *last),
                tile_grid(tiles, variant.rows, shard.rows // n),
                weight.grouping.params
                | {
                    "WEIGHT": weight.dtype,
                    "K": k,
                    "N": n,
                    "KEPT": self.kept,
                    "ROPE": self.rope is not None,
                    "ROTARY_DIM": self.kept if self.rope is not None else 0,
                    "INTERLEAVED": self.rope is not None and self.rope.interleaved,
                    "X_HEAD": self.head,
                    "X_STRIDE": x_stride,
                    "X_OFFSET": offset,
                    "Y_STRIDE": stride(self.width),
                    "FIRST_HEAD": shard.start // n,
                    "ROWS": variant.rows,
                    "WG": variant.workgroup,
                    "TEAM": variant.team,
                    "SUBGROUPS": low.device.subgroups,
                    "QUANTIZE": self.prepares is not None,
                    "LATENT": self.key is not None,
                }
                | (self.key.params if self.key is not None else NO_KEY),
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
            )

    def _matmul(self, low: Lowering) -> None:
        """For many rows, but for what is kept: a product of each head in one dispatch."""
        weight, n, k = self.weight, self.outputs, self.weight.shape[1]
        x_head, y_head = self.head, self.width // self.heads
        x, x_stride, offset = low.source(self.x)
        for shard in weight.shards:
            first, count = shard.start // n, shard.rows // n
            tile = low.tuning.matmul(low.kind.rows, n, k, False, count)
            low.emit(
                "matmul",
                [*multiplied(shard, [x]), self],
                tile_grid(-(-n // tile.columns), tile.rows, count),
                weight.grouping.params
                | {
                    "WEIGHT": weight.dtype,
                    "K": k,
                    "N": n,
                    "START": first * y_head + self.kept,
                    "X_STRIDE": x_stride,
                    "X_OFFSET": offset + first * x_head + x_head - k,
                    "X_HEAD": x_head,
                    "Y_HEAD": y_head,
                    "Y_STRIDE": stride(self.width),
                    "SCALE": 1.0,
                    "ACTIVATION": "none",
                    "GATED": False,
                    "BIAS": False,
                    "RESIDUAL": False,
                    "SPLIT_ROWS": 0,
                    "SOFTWARE": low.device.software,
                }
                | _UNGROUPED
                | tile.params,
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
            )
