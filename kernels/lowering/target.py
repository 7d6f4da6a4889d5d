"""The target of compilation: a device, a kind of step, and the rules for variants of kernels; and
how many workgroups activations take there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from infer.kernels.gpu.device import Device
from infer.kernels.gpu.native.library import Size
from infer.kernels.gpu.plan import Count, Grid, linear_grid
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.tuning import Tuning

MAX_VEC_ROWS = 8


@dataclass(eq=False, repr=False)
class Intermediate:
    """A value that kernels pass on: an activation [rows of the step][width] in f32, whose rows lie
    `stride(width)` values apart. of_logits: it has only the rows that get logits."""

    width: int = field(init=False, default=0)
    of_logits: bool = field(init=False, default=False)

    is_routing: ClassVar[bool] = False  # whether it says how much experts have to do


@dataclass(frozen=True)
class StepKind:
    """A kind of step: at most `rows` rows, of which `logits` get logits (None: all of them). They
    are consecutive positions of one sequence, or of up to `prompts`, one behind the other; or, in a
    batch, each the next of its own, and behind it at most so many `drafts` of tokens that may come
    then.

    Up to MAX_VEC_ROWS rows go through matmul_vec, more through matmul. invariant: whatever their
    number is, they are computed as in a step of a few rows, and each as if it were alone.
    """

    rows: int
    logits: int | None = None
    batch: bool = False
    invariant: bool = False
    prompts: int = 1
    drafts: int = 0

    @property
    def vec(self) -> bool:
        return self.rows <= MAX_VEC_ROWS or self.invariant

    @property
    def single(self) -> bool:
        """Whether kernels for a single row may be used."""
        return self.rows == 1 and not self.invariant

    @property
    def span(self) -> int:
        """The most rows of one sequence."""
        return 1 + self.drafts if self.batch else self.rows

    @property
    def few(self) -> bool:
        """Whether each row attends by itself, with its context split over workgroups."""
        return self.vec or self.batch


@dataclass
class Target:
    """A kind of step on a device. fuse: whether operations may share kernels. given: rows [count,
    hidden_size] that stand for tokens of the step behind the vocabulary, in f32; None: there are
    none."""

    device: Device
    kind: StepKind
    tuning: Tuning
    fuse: bool
    given: GpuTensor | None = None

    def rows(self, value: Intermediate) -> int:
        """The most rows of an activation in this kind of step."""
        if value.of_logits and self.kind.logits is not None:
            return self.kind.logits
        return self.kind.rows

    def vec(self, value: Intermediate) -> bool:
        """Whether the rows of an activation are few, or multiplied as if they were."""
        return self.rows(value) <= MAX_VEC_ROWS or self.kind.invariant

    def row_grid(self, value: Intermediate, x: int) -> Grid:
        """x workgroups for each row."""
        if value.of_logits and self.kind.logits is not None:
            return (x, self.kind.logits, 1)
        return lambda rows, kv_len: (x, rows, 1)

    def vec_grid(self, value: Intermediate, count: int, tile: int) -> Grid:
        """`count` workgroups for each tile of so many rows, or, 0, for all of them."""
        x, y, _ = linear_grid(count, self.device.limits.max_workgroups)
        if not tile:
            return (x, y, 1)
        if value.of_logits and self.kind.logits is not None:
            return (x, y, -(-self.kind.logits // tile))
        return lambda rows, kv_len: (x, y, -(-rows // tile))


class ContextGrid(ABC):
    """Workgroups that depend on the rows of a step and on the length of the cache."""

    @abstractmethod
    def __call__(self, rows: int, kv_len: int) -> Size:
        """The workgroups of a step of so many rows, whose longest sequence has so many
        positions."""


def stride(width: int) -> int:
    """The distance between rows of an activation, in values: kernels read eight at a time."""
    return -(-width // 8) * 8


def padded_rows(rows: int) -> int:
    """The rows of an activation's buffer: matmul reads and writes whole tiles."""
    return rows if rows <= MAX_VEC_ROWS else -(-rows // 128) * 128


def tile_grid(x: int, rows_per_tile: int, z: int = 1) -> Grid:
    return lambda rows, kv_len: (x, -(-rows // rows_per_tile), z)


def per_row(count: int) -> Count:
    """A count that grows with the rows."""
    return lambda rows, kv_len: count * rows


def constant(count: int) -> Count:
    """A count that does not depend on the step."""
    return lambda rows, kv_len: count
