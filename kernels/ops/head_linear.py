"""head_linear: a matrix for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.kernels.errors import ShaderError
from infer.kernels.gpu.tensor import HALF, GpuTensor
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, padded_rows, per_row, stride, tile_grid
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.kv_write import NO_KEY, LatentKey
from infer.kernels.ops.linear import Tile, tile_operands, tile_params
from infer.kernels.ops.matmul_matrix import MatrixVariant, matmul_matrix_variant
from infer.kernels.ops.matmul_tiles import matmul_variant
from infer.kernels.ops.prepared import Form, Maker, half_operands, lower_half_rows
from infer.kernels.ops.rope import Rope, lower_rotate


@dataclass(eq=False, repr=False)
class HeadLinear(Maker):
    """W_h x_h^T for each of the heads that lie side by side in x, where x_h is as many of its last
    values as W_h has columns; weight [heads * out, in]. The values before them are left out or,
    with `keep`, go in front of the result.

    Rules add: rope: rotates what is kept. key: what is written into a latent cache beside it, from
    latent, the activation that has it. Chosen: variant: of head_linear or, where many rows make it
    a product for each head, the tile for each shard.
    """

    x: Value
    weight: GpuTensor
    heads: int
    keep: bool = False
    rope: Rope | None = field(default=None, kw_only=True)
    key: LatentKey | None = field(default=None, kw_only=True)
    latent: Value | None = field(default=None, kw_only=True)
    variant: HeadVariant | tuple[Tile, ...] = field(init=False)

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

    def choose(self, target: Target) -> None:
        rows, n, k = target.kind.rows, self.outputs, self.weight.shape[1]
        vectors = not any(size % 4 for size in (k, self.head, source(self.x)[2]))
        tiled = not target.kind.vec and vectors and (self.rope is not None or not self.kept)
        if not tiled:
            self.variant = target.tuning.choose(head_linear_variant, rows, k)
            return
        matrix = self._matrix_variant(target)
        self.variant = tuple(
            matrix or target.tuning.choose(matmul_variant, rows, n, k, False, shard.rows // n)
            for shard in self.weight.shards
        )

    def writes(self, form: Form, target: Target) -> bool:
        variant = self.variant
        if not isinstance(variant, HeadVariant):
            return False
        whole_halves = variant.outputs % HALF == 0 and self.outputs % variant.outputs == 0
        only = form.norm is None and not form.keep
        return not self.kept and whole_halves and only and form.fits(self, target, 4)

    def has_room(self, key: LatentKey, target: Target) -> bool:
        """Whether the kernel of this product can write a latent cache as well."""
        limits, k, variant = target.device.limits, self.weight.shape[1], self.variant
        bindings = 4 + len(self.weight.shards[0].buffers) + 1 + len(key.operands)
        return (
            isinstance(variant, HeadVariant)
            and key.rope is self.rope
            and target.kind.single
            and len(self.weight.shards) == 1
            and bindings <= limits.storage_buffers
            and variant.storage(k) + key.storage <= limits.workgroup_storage
        )

    def lower(self, low: Lowering) -> None:
        weight, n, k, variant = self.weight, self.outputs, self.weight.shape[1], self.variant
        if isinstance(variant, tuple):
            if self.rope is not None:
                lower_rotate(low, self.x, self, self.rope, self.kept, self.head)
            self._lower_tiles(low, variant)
            return
        x, x_stride, offset = source(self.x)
        outputs = [self] if self.prepares is None else self.prepares.operands
        last: list[Operand] = [] if self.rope is None else [self.rope.table]
        if self.key is not None and self.latent is not None:
            last += [source(self.latent)[0], *self.key.operands]
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
                variant=variant,
            )

    def _lower_tiles(self, low: Lowering, tiles: Sequence[Tile]) -> None:
        """For many rows, but for what is kept: a product of each head in one dispatch."""
        weight, n, k = self.weight, self.outputs, self.weight.shape[1]
        x_head, y_head = self.head, self.width // self.heads
        x, x_stride, offset = source(self.x)
        inputs: list[Operand] = [x]
        width = offset + self.x.width
        own: dict[str, Any] = {"X_STRIDE": x_stride}
        if isinstance(tiles[0], MatrixVariant):
            own = {"X_WIDTH": width}
            halves = half_operands(padded_rows(low.kind.rows), width)
            lower_half_rows(low, [x, *halves], low.row_grid(self, 1), width, x_stride)
            inputs = halves
        for shard, tile in zip(weight.shards, tiles, strict=True):
            first, count = shard.start // n, shard.rows // n
            low.emit(
                tile.kernel,
                [*tile_operands(weight, shard, tile, inputs), self],
                tile_grid(-(-n // tile.columns), tile.rows, count),
                tile_params(low, weight, tile)
                | own
                | {
                    "N": n,
                    "START": first * y_head + self.kept,
                    "X_OFFSET": offset + first * x_head + x_head - k,
                    "X_HEAD": x_head,
                    "Y_HEAD": y_head,
                    "Y_STRIDE": stride(self.width),
                },
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
                variant=tile,
            )

    def _matrix_variant(self, target: Target) -> MatrixVariant | None:
        """Returns the sizes of matmul_matrix for this projection; None where it does not fit: its
        input must be a multiple of 64 wide, its heads and their offset multiples of 8."""
        k, offset = self.weight.shape[1], source(self.x)[2]
        if k % 64 or self.head % 8 or offset % 8:
            return None
        rows, n = target.kind.rows, self.weight.shape[0]
        return target.tuning.choose(matmul_matrix_variant, rows, n, k, self.weight.dtype, False)


@dataclass(frozen=True)
class HeadVariant:
    """head_linear: rows and outputs of a workgroup, invocations that share an output."""

    rows: int
    team: int
    outputs: int

    @property
    def workgroup(self) -> int:
        """Invocations."""
        return self.team * self.outputs

    def storage(self, k: int) -> int:
        """Bytes of workgroup memory, a table of codes and another sum's values among them."""
        sums = (self.team + 1) * self.outputs
        own = self.rows * (-(-k // 8) * 8 + sums) + self.outputs
        return 4 * (own + self.workgroup) + 1024


def head_linear_variant(tuning: Tuning, rows: int, k: int) -> HeadVariant:
    """Returns the variant with as many rows as there are, up to 8, and as workgroup memory
    holds."""
    for count in (8, 4, 2, 1):
        variant = HeadVariant(count, 16, HALF)
        fits = variant.storage(k) <= tuning.limits.workgroup_storage
        if count < 2 * rows and fits:
            return variant
    raise ShaderError(f"head_linear has no variant for {k} columns.")
