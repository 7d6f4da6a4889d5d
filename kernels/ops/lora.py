"""Low-rank changes of which each row of a step has its own (LoRA, Hu et al. 2021): b a x, where the
matrices of all adapters lie one below the other, and the step says which is a row's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infer.kernels.gpu.plan import Grid
from infer.kernels.gpu.tensor import GpuTensor, Shard
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, per_row, stride, tile_grid
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.linear import Projection, multiplied
from infer.kernels.ops.prepared import Form

_TILES = 8  # of rows, at the least, if there are so many
_ROWS = 8  # of a tile, at most
_UP = 64  # outputs of a workgroup of lora_up


@dataclass(eq=False, repr=False)
class LoraDown(Projection):
    """x A^T, [rows, rank], with the A of the row's adapter, or 0; weight [adapters * rank, in]."""

    weight: GpuTensor
    rank: int
    rows: int = field(init=False)  # of a workgroup
    outputs: int = field(init=False)  # of a workgroup

    def checked_width(self) -> int:
        _check(self.weight, self.rank, self.x)
        return self.rank

    def choose(self, target: Target) -> None:
        super().choose(target)
        rows = target.rows(self)
        self.rows = target.tuning.choose(lora_rows, rows)
        self.outputs = target.tuning.choose(lora_outputs, -(-rows // self.rows), self.rank)

    def writes(self, form: Form, target: Target) -> bool:
        return False

    def lower(self, low: Lowering) -> None:
        inputs, of_norm = self.read(low)
        k = self.weight.shape[1]
        workgroup = low.tuning.workgroup(k)
        for shard in self.weight.shards:
            low.emit(
                "lora_down",
                [*multiplied(shard, inputs), low.step, self],
                _grid(low, self, -(-self.rank // self.outputs)),
                _params(low, self, shard, self.rank)
                | of_norm
                | {
                    "OUTPUTS": self.outputs,
                    "WG": workgroup,
                    "TEAM": workgroup,
                    "SUBGROUPS": low.device.subgroups,
                },
                moved=4 * self.rank * k,
                flops=per_row(2 * self.rank * k),
            )


@dataclass(eq=False, repr=False)
class LoraUp(Value):
    """scale * x B^T, with the B of the row's adapter, or 0; x [rows, rank], weight [adapters * n,
    rank].

    Rules add: residual: what is added to the result.
    """

    x: Value
    weight: GpuTensor
    n: int
    scale: float = 1.0
    residual: Value | None = field(default=None, kw_only=True)
    rows: int = field(init=False)  # of a workgroup

    def checked_width(self) -> int:
        _check(self.weight, self.n, self.x)
        return self.n

    def choose(self, target: Target) -> None:
        self.rows = target.tuning.choose(lora_rows, target.rows(self))

    def lower(self, low: Lowering) -> None:
        x, _, offset = source(self.x)
        if offset:
            raise ValueError("a projection reads whole rows")
        added: list[Operand] = [] if self.residual is None else [source(self.residual)[0]]
        k = self.weight.shape[1]
        for shard in self.weight.shards:
            low.emit(
                "lora_up",
                [*multiplied(shard, [x]), low.step, *added, self],
                _grid(low, self, -(-self.n // _UP)),
                _params(low, self, shard, self.n)
                | {"NORM": False, "SCALED": False, "RESIDUAL": bool(added)}
                | {"WG": _UP, "SCALE": float(self.scale)},
                moved=4 * self.n * k,
                flops=per_row(2 * self.n * k),
            )


def lora_rows(tuning: Tuning, rows: int) -> int:
    """Rows of a workgroup. Those of one adapter share what is read of it; those of others wait for
    theirs one after the other, so that of few rows each has workgroups of its own."""
    return min(_ROWS, -(-rows // _TILES))


def lora_outputs(tuning: Tuning, tiles: int, rank: int) -> int:
    """Outputs of a workgroup of lora_down, which reads x for them: as many as leave each
    multiprocessor a workgroup; a CPU takes long to compile more than one."""
    outputs = 1 if tuning.software else 4
    while outputs > 1 and -(-rank // outputs) * tiles < tuning.multiprocessors:
        outputs //= 2
    return outputs


def _check(weight: GpuTensor, n: int, x: Value) -> None:
    """Raises ValueError for what is no stack of matrices [n, width of x]."""
    rows, columns = weight.shape
    if x.width != columns or rows % n:
        raise ValueError(f"{weight.shape} is no stack of matrices ({n}, {x.width})")


def _grid(low: Lowering, y: LoraDown | LoraUp, x: int) -> Grid:
    """x workgroups for so many rows as one has."""
    if y.of_logits and low.kind.logits is not None:
        return (x, -(-low.kind.logits // y.rows), 1)
    return tile_grid(x, y.rows)


def _params(low: Lowering, y: LoraDown | LoraUp, shard: Shard, n: int) -> dict[str, Any]:
    """Returns the parameters that both kernels have."""
    return {
        "WEIGHT": y.weight.dtype,
        **y.weight.grouping.params,
        "CHOSEN": y.of_logits and low.kind.prompts > 1,
        "K": y.weight.shape[1],
        "N": n,
        "START": shard.start,
        "SHARD_ROWS": shard.rows,
        "ROWS": y.rows,
        "Y_STRIDE": stride(n),
    }
