"""Cases of embeddings, and of the rows that get logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import Bench, Case, Outcome
from infer.kernels.checks.by_hand import Dtype, by_hand
from infer.kernels.checks.forward import Floats, Ids, Options
from infer.kernels.checks.inputs import FLOATS, exact_weight
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.ops.embedding import Embedding, LogitsRows, PositionEmbedding
from infer.kernels.state.step import MAX_LOGITS_ROWS


@by_hand
def run_embedding(
    bench: Bench,
    ids: Annotated[Ids, "rows", "vocab"],
    weight: Annotated[Array | Codes, "vocab, width"],
    *,
    dtype: Dtype = "f32",
    scale: float = 1.0,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, width"]:
    """scale * weight[ids], [rows, width]; ids [rows], weight [vocab, width], stored as `dtype`."""
    return bench.run(Embedding(bench.weight(weight, dtype), scale), rows=len(ids), tokens=ids)


@by_hand
def run_position_embedding(
    bench: Bench,
    weight: Annotated[Array | Codes, "positions, width"],
    rows: int,
    *,
    dtype: Dtype = "f32",
    position: int = 0,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, width"]:
    """weight[position : position + rows], [rows, width]; weight [positions, width], stored as
    `dtype`."""
    stored = len(weight.codes if isinstance(weight, Codes) else weight)
    if position + rows > stored:
        raise ShaderError(f"rows {position} to {position + rows - 1} are not among {stored}")
    output = PositionEmbedding(bench.weight(weight, dtype))
    return bench.run(output, rows=rows, position=position)


@by_hand
def run_take_rows(
    bench: Bench,
    x: Annotated[Array, "n, width"],
    rows: Annotated[Ids, "taken", "n"],
    **options: Unpack[Options],
) -> Annotated[Floats, "taken, width"]:
    """x[rows], [taken, width]; x [n, width] has two rows or more, of which 1 to 8 are taken, as
    before the logits of a prompt's last token."""
    if len(x) == 1:
        raise ShaderError("there is nothing to take from a single row")
    if len(rows) > MAX_LOGITS_ROWS:
        raise ShaderError(f"it takes 1 to {MAX_LOGITS_ROWS} rows, not {len(rows)}")
    return bench.run(LogitsRows(bench.input(x)), logits_rows=[int(row) for row in rows])


def cases() -> Iterator[Case]:
    for dtype in FLOATS + QUANTIZED:
        yield Case("embedding", dtype, partial(_embedding, dtype=dtype))
    yield Case("position_embedding", "", _position_embedding)
    yield Case("take_rows", "", _take_rows)


def _embedding(bench: Bench, dtype: str) -> Outcome:
    weight, ids = exact_weight(bench.rng, 37, 67, dtype), np.array([36, 0, 5, 5])
    return run_embedding(bench, ids, weight, dtype=dtype, scale=0.5), 0.5 * weight[ids]


def _position_embedding(bench: Bench) -> Outcome:
    weight = bench.random(37, 67)
    return run_position_embedding(bench, weight, 3, position=34), weight[34:]


def _take_rows(bench: Bench) -> Outcome:
    x, rows = bench.random(11, 67), [10, 0, 3]
    return run_take_rows(bench, x, rows), x[rows]
