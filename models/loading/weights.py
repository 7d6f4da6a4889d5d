"""The weights that a model declares, and the tensors of a checkpoint that each is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from infer.kernels.errors import UnsupportedError

# Tensors that a checkpoint lacks, and parts of weights, before nobody looks for more: published
# models have a quarter of a million parts at most.
_LACKING, _PARTS = 1000, 1 << 20


@dataclass(frozen=True)
class View:
    """Rows and columns of a tensor as a matrix, in which those of a stack lie one below the other;
    then, perhaps, transposed; then each value times `factor`, plus `added`. columns: None of a
    vector, whose values are the rows."""

    rows: range
    columns: range | None = None
    transposed: bool = False
    factor: float = 1.0
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        if self.columns is None:
            return (len(self.rows),)
        shape = len(self.rows), len(self.columns)
        return shape[::-1] if self.transposed else shape

    @property
    def across(self) -> range:
        """The columns in the tensor; a vector's values are a column."""
        return range(1) if self.columns is None else self.columns

    def take_rows(self, own: range) -> View:
        """Returns the view of some of its rows. own: their indices in the view."""
        if self.transposed:
            return replace(self, columns=_chosen(self.across, own))
        return replace(self, rows=_chosen(self.rows, own))

    def take_columns(self, own: range) -> View:
        return self.transpose().take_rows(own).transpose()

    def transpose(self) -> View:
        return replace(self, transposed=not self.transposed)


def _chosen(whole: range, own: range) -> range:
    return whole[own.start : own.stop : own.step]


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, the shape that it must have, and what of it a weight is made of
    (None: all). The methods say that one after the other: `Source(…).rows(…).transpose()` are rows
    that become columns. transposed: where the tensor is of floats, each of its matrices has columns
    for rows in the file; then rows may only be of one of them."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: View | None = None

    @property
    def view(self) -> View:
        if self.part is not None:
            return self.part
        *rows, columns = self.shape or (1,)
        return View(range(prod(rows)), range(columns)) if rows else View(range(columns))

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file, if it is one of floats."""
        if not self.transposed:
            return self.shape
        *stack, rows, columns = self.shape
        return (*stack, columns, rows)

    def values(self) -> Source:
        """Returns the source as a vector: one value after the other, whatever the shape."""
        return replace(self, part=View(range(prod(self.shape))))

    def rows(self, own: range) -> Source:
        return replace(self, part=self.view.take_rows(own))

    def columns(self, own: range) -> Source:
        return replace(self, part=self.view.take_columns(own))

    def transpose(self) -> Source:
        return replace(self, part=self.view.transpose())

    def scale(self, factor: float) -> Source:
        return replace(self, part=replace(self.view, factor=factor * self.view.factor))


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the model: a matrix (rows, columns) or a vector (columns,). Several sources are
    stacked along their first axis, as q, k and v are into one projection. Some checkpoints may have
    `others` instead, with the same rows. No shard ends inside of `unit` rows. added: to every value
    of a vector, as some checkpoints hold a norm's weights less one. Without sources it is a vector
    of `ones`. heads: it is what `Ops.head_linear` multiplies by."""

    name: str
    sources: tuple[Source, ...]
    others: tuple[Source, ...] = ()
    unit: int = 1
    added: float = 0.0
    ones: int = 0
    heads: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.sources:
            return (self.ones,)
        shapes = [source.view.shape for source in self.sources]
        return (sum(rows for rows, *_ in shapes), *shapes[0][1:])


def asked_for(specs: Iterable[WeightSpec], has: Callable[[str], bool]) -> Iterator[WeightSpec]:
    """The weights, but no more of them than it takes to see that a checkpoint is of another model:
    a config may ask for any number, which nobody lists. has: whether it has a tensor, asked once
    the weight that is made of it has been used. Raises UnsupportedError."""
    parts = lacking = 0
    for spec in specs:
        yield spec
        sources = (*spec.sources, *spec.others)
        parts += len(sources)
        if not any(has(source.key) for source in sources):
            lacking += len(sources)
        if lacking > _LACKING:
            return
        if parts > _PARTS:
            raise UnsupportedError(
                f"config.json asks for weights of more than {_PARTS:,} parts, which no model has. "
                "Get the file that was published with the model."
            )
