"""Embeddings of tokens and of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer.kernels.compiler.graph import Value, stride
from infer.kernels.gpu.tensor import GpuTensor

if TYPE_CHECKING:
    from infer.kernels.compiler.lowering import Lowering


@dataclass(eq=False, repr=False)
class Embedding(Value):
    """The rows of `weight` [vocab, width] for the step's tokens, times scale."""

    weight: GpuTensor
    scale: float = 1.0

    def checked_width(self) -> int:
        return self.weight.shape[1]

    def lower(self, low: Lowering) -> None:
        _lower(low, self, self.weight, self.scale, by_position=False)


@dataclass(eq=False, repr=False)
class PositionEmbedding(Value):
    """The rows of `weight` [positions, width] for the step's positions."""

    weight: GpuTensor

    def checked_width(self) -> int:
        return self.weight.shape[1]

    def lower(self, low: Lowering) -> None:
        _lower(low, self, self.weight, 1.0, by_position=True)


def _lower(
    low: Lowering, value: Value, weight: GpuTensor, scale: float, *, by_position: bool
) -> None:
    groups = stride(value.width) // 8
    for shard in weight.shards:
        low.emit(
            "embedding",
            (low.step, *shard.buffers, value),
            low.row_grid(value, -(-groups // 64)),
            {
                "K": value.width,
                "WEIGHT": weight.dtype,
                **weight.grouping.params,
                "START": shard.start,
                "SHARD_ROWS": shard.rows,
                "SCALE": float(scale),
                "BY_POSITION": by_position,
            },
        )
