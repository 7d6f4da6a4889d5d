"""Rotary positions (Su et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import stride


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding: a table of (cos, sin), [positions][rotary_dim / 2], f32."""

    table: Buffer
    rotary_dim: int
    interleaved: bool = False


@dataclass(eq=False, repr=False)
class Rotate(Value):
    """The heads of x rotated by their position."""

    x: Value
    rope: Rope
    head_dim: int

    def checked_width(self) -> int:
        return self.x.width

    def lower(self, low: Lowering) -> None:
        lower_rotate(low, self.x, self, self.rope, self.head_dim, self.head_dim)


def lower_rotate(low: Lowering, x: Value, result: Value, rope: Rope, width: int, head: int) -> None:
    """The first `width` of the `head` values of each head of x rotated, to where the heads of the
    result begin."""
    heads = x.width // head
    root, x_stride, offset = source(x)
    low.emit(
        "rope",
        (low.step, rope.table, root, result),
        low.row_grid(result, heads),
        {
            "HEAD_DIM": width,
            "ROTARY_DIM": rope.rotary_dim,
            "INTERLEAVED": rope.interleaved,
            "X_HEAD": head,
            "X_STRIDE": x_stride,
            "X_OFFSET": offset,
            "Y_HEAD": result.width // heads,
            "Y_STRIDE": stride(result.width),
        },
    )
