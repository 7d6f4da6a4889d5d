"""Reference and cases of rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from numbers import Integral
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.errors import ShaderError
from infer.kernels.ops.rope import Rope, Rotate


def rope(
    x: Array, positions: Array, frequencies: Array, head_dim: int, interleaved: bool = False
) -> Array:
    """x [rows, heads * head_dim]; frequencies [rotary_dim / 2], radians per position."""
    rows, rotary = x.shape[0], 2 * frequencies.size
    heads = x.astype(np.float64).reshape(rows, -1, head_dim).copy()
    angle = positions[:, None, None] * frequencies.astype(np.float64)
    first, second = (
        (slice(0, rotary, 2), slice(1, rotary, 2))
        if interleaved
        else (slice(0, rotary // 2), slice(rotary // 2, rotary))
    )
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * np.cos(angle) - b * np.sin(angle)
    heads[..., second] = b * np.cos(angle) + a * np.sin(angle)
    return heads.reshape(x.shape)


def frequencies(rotary_dim: int) -> Array:
    """Radians per position of each pair (Su et al. 2021)."""
    exponents: Array = np.arange(0, rotary_dim, 2) / rotary_dim
    return 10000.0**-exponents


def rope_table(frequencies: Array, positions: int, scale: float = 1.0) -> Floats:
    """(cos, sin) of position * frequency, times scale: [positions, pairs, 2] in float32, for
    frequencies [pairs] in radians per position. Raises ShaderError."""
    try:
        own = np.asarray(frequencies, np.float64)
    except (TypeError, ValueError) as error:
        raise ShaderError(f"rope_table: frequencies must be numbers: {error}") from None
    if own.ndim != 1 or not own.size:
        raise ShaderError(f"rope_table: frequencies must be [pairs], not {list(own.shape)}")
    if not isinstance(positions, Integral) or positions < 1:
        raise ShaderError(
            f"rope_table: positions must be a whole number from 1 on, not {positions}"
        )
    angle = np.arange(positions)[:, None] * own
    return (scale * np.stack([np.cos(angle), np.sin(angle)], -1)).astype(np.float32)


RopeTable = Annotated[Array, "positions, pairs, 2"]


def check_rotated(table: Array, width: int) -> None:
    """Raises ShaderError where the table rotates more than the `width` dimensions of a head."""
    if 2 * table.shape[1] > width:
        raise ShaderError(
            f"a table of {table.shape[1]} pairs rotates {2 * table.shape[1]} dimensions, more than "
            f"the {width} of a head"
        )


def stored_rope(bench: Bench, table: Array, positions: int, interleaved: bool) -> Rope:
    """A table of at least so many positions, on the GPU."""
    if table.ndim != 3 or table.shape[0] < positions or table.shape[2] != 2:
        raise ShaderError(
            f"table must be [{positions} or more positions, pairs, 2], not {list(table.shape)}"
        )
    stored = bench.device.upload(table.astype(np.float32), label="rope table")
    return Rope(stored, 2 * table.shape[1], interleaved)


@by_hand
def run_rope(
    bench: Bench,
    x: Annotated[Array, "rows, heads * head_dim"],
    table: RopeTable,
    *,
    head_dim: int,
    position: int = 0,
    interleaved: bool = False,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, heads * head_dim"]:
    """The heads of x [rows, heads * head_dim] rotated; row i is at position + i.

    table: (cos, sin) [positions, pairs, 2], as from `rope_table`: it rotates the first 2 * pairs
    dimensions of a head, of which the others stay. interleaved rotates neighbouring dimensions
    together, otherwise those that are `pairs` apart.
    """
    check_rotated(table, head_dim)
    rotary = stored_rope(bench, table, position + len(x), interleaved)
    return bench.run(Rotate(bench.input(x), rotary, head_dim), position=position)


def cases() -> Iterator[Case]:
    for layout, rotary_dim in product(("half-split", "interleaved"), (24, 16)):
        run = partial(_rope, interleaved=layout == "interleaved", rotary_dim=rotary_dim)
        yield Case("rope", f"{layout}, {rotary_dim} of 24", run)


def _rope(bench: Bench, interleaved: bool, rotary_dim: int) -> Outcome:
    x, own = bench.random(3, 2 * 24), frequencies(rotary_dim)
    y = run_rope(bench, x, rope_table(own, 300), head_dim=24, position=290, interleaved=interleaved)
    return y, rope(x, np.arange(290, 293), own, 24, interleaved)
