"""The graph of a forward pass: activations, and the operations that make them.

A forward is traced, not run: constructing an operation notes what it computes from what, and
nothing else. Rules rewrite the graph, then each operation emits its kernels. An operation is a
subclass of Value in ops/, and stands for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ParamSpec

from infer.kernels.gpu.device import Buffer
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Intermediate, Target, stride

P = ParamSpec("P")
_COUNTER = count()


@dataclass(eq=False, repr=False)
class Value(Intermediate):
    """A symbolic activation, and the operation that makes it. Fields that are Values are its
    inputs. number: its place in the order of tracing."""

    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Raises ValueError for inputs that do not fit."""
        self.number = next(_COUNTER)
        self.of_logits = any(value.of_logits for value in self.inputs)
        self.width = self.checked_width()

    def checked_width(self) -> int:
        """The width of the result. Raises ValueError for inputs that do not fit."""
        raise NotImplementedError

    def choose(self, target: Target) -> None:
        """Choose the variants of its kernels, where it has several. Rules that change what it
        computes have run by then; `lower` reads what it chose."""

    def lower(self, low: Lowering) -> None:
        """Emit its kernels."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.width}]"

    @property
    def inputs(self) -> list[Value]:
        return [value for _, value in self.links()]

    def links(self) -> list[tuple[str, Value]]:
        """The inputs of an operation, with the names of the fields that they are in. A value that
        the operation `prepares` is left out: what it prepares reads that value."""
        named = vars(self).items()
        return [(n, v) for n, v in named if isinstance(v, Value) and n != "prepares"]

    def __add__(self, other: Value) -> Value:
        return Add(self, other)

    def __mul__(self, other: Value) -> Value:
        return Mul(self, other)


def operation(cls: Callable[P, Value]) -> Callable[P, Value]:
    """An operation's class as a function from Values to a Value, for forward passes."""
    return cls


def same_width(a: Value, b: Value) -> int:
    """The width that both have. Raises ValueError if they differ."""
    if a.width != b.width:
        raise ValueError(f"rows of {a.width} and {b.width} do not fit")
    return a.width


@dataclass(eq=False, repr=False)
class Input(Value):
    """An activation that exists before the step."""

    buffer: Buffer
    columns: int

    def checked_width(self) -> int:
        return self.columns

    def lower(self, low: Lowering) -> None:
        pass


@dataclass(eq=False, repr=False)
class Slice(Value):
    """Columns of x from `offset` on, as a view: nothing is copied."""

    x: Value
    offset: int
    columns: int

    def checked_width(self) -> int:
        if self.offset + self.columns > self.x.width:
            raise ValueError(f"{self.columns} columns from {self.offset} on are not in {self.x}")
        return self.columns

    def lower(self, low: Lowering) -> None:
        pass


def source(value: Value) -> tuple[Operand, int, int]:
    """Returns where a value lies: the activation, the distance between its rows, and the first
    column."""
    offset = 0
    while isinstance(value, Slice):
        offset += value.offset
        value = value.x
    operand = value.buffer if isinstance(value, Input) else value
    return operand, stride(value.width), offset


def split(x: Value, *widths: int) -> tuple[Value, ...]:
    """Slices of x, side by side."""
    if sum(widths) != x.width:
        raise ValueError(f"{widths} do not add up to {x.width}")
    return tuple(Slice(x, sum(widths[:i]), width) for i, width in enumerate(widths))


@dataclass(eq=False, repr=False)
class _Elementwise(Value):
    a: Value
    b: Value

    kernel = ""

    def checked_width(self) -> int:
        return same_width(self.a, self.b)

    def lower(self, low: Lowering) -> None:
        (a, a_stride, a_offset), (b, b_stride, b_offset) = source(self.a), source(self.b)
        low.emit(
            self.kernel,
            (a, b, self),
            low.row_grid(self, -(-self.width // 64)),
            {
                "WIDTH": self.width,
                "A_STRIDE": a_stride,
                "A_OFFSET": a_offset,
                "B_STRIDE": b_stride,
                "B_OFFSET": b_offset,
                "Y_STRIDE": stride(self.width),
            },
            moved=lambda rows, kv_len: 12 * rows * self.width,
        )


class Add(_Elementwise):
    """a + b."""

    kernel = "elementwise_add"


class Mul(_Elementwise):
    """a * b."""

    kernel = "elementwise_mul"


class Graph:
    """Everything that an output is made from, in the order of tracing. A copy, so that rules may
    change it. also: values that are computed besides, and leave their results elsewhere."""

    def __init__(self, output: Value, also: Iterable[Value] = ()) -> None:
        ends = [output, *also]
        found = sorted(reachable(ends), key=lambda value: value.number)
        copies = {value: copy(value) for value in found}
        for value in copies.values():
            for name, source in value.links():
                setattr(value, name, copies[source])
        self.values = list(copies.values())
        self.output, *self.also = (copies[value] for value in ends)
        self._users: dict[Value, list[Value]] = {value: [] for value in self.values}
        for value in self.values:
            self._link(value)

    def __contains__(self, value: Value) -> bool:
        return value in self._users

    def users(self, value: Value) -> list[Value]:
        """The operations that read it; one that reads it twice comes twice."""
        return self._users[value]

    def is_read_by(self, value: Value, user: Value) -> bool:
        """Whether a value is read by this operation alone, and only once."""
        return self._users[value] == [user]

    def update(self, value: Value, **changes: Any) -> None:
        """Set fields of an operation. What nobody reads any more is removed."""
        old = value.inputs
        for source in old:
            self._users[source].remove(value)
        for name, change in changes.items():
            setattr(value, name, change)
        self._link(value)
        for source in old:
            self._drop(source)

    def insert(self, value: Value, before: Value) -> None:
        """Insert a new value just before another."""
        self.values.insert(self.values.index(before), value)
        self._users[value] = []
        self._link(value)

    def move(self, value: Value, before: Value) -> None:
        """Move a value to just before another."""
        self.values.remove(value)
        self.values.insert(self.values.index(before), value)

    def replace(self, old: Value, new: Value, **changes: Any) -> None:
        """Put `new`, with these fields, in the place of `old`, which is removed."""
        new.of_logits = new.of_logits or old.of_logits
        if new in self._users:
            self.move(new, before=old)
        else:
            self.insert(new, before=old)
        self.update(new, **changes)
        self.redirect(old, new)

    def redirect(self, old: Value, new: Value) -> None:
        """Let all that read the one value read the other."""
        for user in dict.fromkeys(user for user in self._users[old] if user is not new):
            names = [name for name, source in user.links() if source is old]
            self.update(user, **dict.fromkeys(names, new))
        if self.output is old:
            self.output = new
        self._drop(old)

    def _link(self, value: Value) -> None:
        for source in value.inputs:
            self._users[source].append(value)

    def _drop(self, value: Value) -> None:
        is_end = value is self.output or value in self.also
        if value in self._users and not self._users[value] and not is_end:
            self.values.remove(value)
            del self._users[value]
            for source in value.inputs:
                if source in self._users:
                    self._users[source].remove(value)
                    self._drop(source)


def reachable(ends: Iterable[Value]) -> set[Value]:
    """These values, and everything that they are made from."""
    found: set[Value] = set()
    missing = [*ends]
    while missing:
        value = missing.pop()
        if value not in found:
            found.add(value)
            missing += value.inputs
    return found
