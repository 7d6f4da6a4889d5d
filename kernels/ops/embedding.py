"""From the rows of a step to activations, and to those that get logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import stride


@dataclass(eq=False, repr=False)
class Embedding(Value):
    """The rows of `weight` [vocab, width] for the step's tokens, times scale. takes_given: for
    tokens behind the vocabulary, the rows that the step gives (`Target.given`)."""

    weight: GpuTensor
    scale: float = 1.0
    takes_given: bool = False

    def checked_width(self) -> int:
        return self.weight.shape[1]

    def lower(self, low: Lowering) -> None:
        _lower(low, self, self.weight, self.scale, by_position=False)
        given = low.given
        if given is None:
            return
        if not self.takes_given:
            raise UnsupportedError("This model takes no rows in place of tokens in its prompts.")
        (shard,) = given.shards
        behind = replace(shard, start=self.weight.shape[0])
        _lower(low, self, replace(given, shards=(behind,)), 1.0, by_position=False)


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


@dataclass(eq=False, repr=False)
class LogitsRows(Value):
    """The rows of x that get logits."""

    x: Value

    def checked_width(self) -> int:
        self.of_logits = True
        return self.x.width

    def lower(self, low: Lowering) -> None:
        x, x_stride, _ = source(self.x)
        assert low.kind.logits is not None
        low.emit(
            "take_rows",
            (low.step, x, self),
            (-(-x_stride // 64), low.kind.logits, 1),
            {"STRIDE": x_stride},
        )
