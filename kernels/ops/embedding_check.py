"""Cases of embeddings, and of the rows that get logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import Bench, Case, Outcome
from infer.kernels.checks.forward import Floats, Ids
from infer.kernels.checks.inputs import FLOATS, exact_weight
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.ops.embedding import Embedding, LogitsRows, PositionEmbedding


def run_embedding(
    bench: Bench, ids: Ids, weight: Array | Codes, *, dtype: str = "f32", scale: float = 1.0
) -> Floats:
    """ids [rows] -> scale * weight[ids], [rows, width]; the weight is stored as `dtype`."""
    return bench.run(Embedding(bench.weight(weight, dtype), scale), rows=len(ids), tokens=ids)


def run_position_embedding(
    bench: Bench, weight: Array | Codes, rows: int, *, dtype: str = "f32", position: int = 0
) -> Floats:
    """weight[position : position + rows], [rows, width]; the weight is stored as `dtype`."""
    output = PositionEmbedding(bench.weight(weight, dtype))
    return bench.run(output, rows=rows, position=position)


def run_take_rows(bench: Bench, x: Array, rows: Sequence[int]) -> Floats:
    """x[rows], of which there are 1 to 8, as before the logits of a prompt's last token."""
    if len(x) == 1:
        raise ShaderError("there is nothing to take from a single row")
    return bench.run(LogitsRows(bench.input(x)), logits_rows=rows)


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
