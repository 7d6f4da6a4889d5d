"""Rules under which a row's result does not depend, to the last bit, on how many rows a step has.

A sum of floats depends on its order. So each rule that asks for the number of rows is replaced
here by one that gives the same order for any number: over a product's columns, a context's splits,
a state's matrix. Rows may still differ in what no sum sees: how many of them a lane has, and what
goes through workgroup memory. `StepKind.invariant` fuses the same operations for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import (
    AttentionVariant,
    attention_joined_variant,
    attention_variant,
)
from infer.kernels.ops.matmul_rows import (
    LEAST_LANES,
    MOST_ROWS,
    RowsShape,
    RowsVariant,
    few_rows,
    matmul_rows_variant,
    possible_variant,
)
from infer.kernels.ops.matmul_vec import VecShape, VecVariant, matmul_vec_variant
from infer.kernels.ops.recurrent import DeltaVariant, delta_rule_variant

_ATTENTION_ROWS = 4  # whose splits are taken for all: more would leave one row too few
_STAGED_ROWS = 5  # from which on x goes through workgroup memory


def _few_rows(tuning: Tuning, rows: int) -> bool:
    """On a GPU with subgroups one row too."""
    return tuning.subgroup_size >= LEAST_LANES and not tuning.software


def _matmul_rows(tuning: Tuning, shape: RowsShape) -> RowsVariant | None:
    """Lanes and teams along the columns as the most rows have them, and no splits: these decide in
    what order sums are made. None where that does not run, of whatever number of rows."""
    most = possible_variant(tuning, replace(shape, rows=MOST_ROWS, splits=False))
    if most is None or not replace(most, m_tile=1).runs(tuning, replace(shape, rows=1)):
        return None
    m_tile = -(-shape.rows // -(-shape.rows // most.m_tile))
    staged = replace(most, m_tile=m_tile, staged=shape.rows >= _STAGED_ROWS)
    return staged if staged.runs(tuning, shape) else replace(staged, staged=False)


def _matmul_vec(tuning: Tuning, shape: VecShape) -> VecVariant:
    """Returns the variant of matmul_vec for one row, with workgroups of its own for each row, for
    shapes that matmul_rows does not run."""
    return replace(matmul_vec_variant(tuning, replace(shape, rows=1)), row_each=True)


def _attention(
    tuning: Tuning, group: int, n_kv_heads: int, head_dim: int, rows: int = 1
) -> AttentionVariant | None:
    """A row's splits depend on its own position alone."""
    return attention_variant(tuning, group, n_kv_heads, head_dim, _ATTENTION_ROWS)


def _joined(tuning: Tuning, variant: AttentionVariant, rows: int, n_heads: int, group: int) -> None:
    """Returns None, so that no kernel is joined: which kernel a row took would depend on the
    longest context of its step."""


def _delta_rule(tuning: Tuning, rows: int, key_dim: int) -> DeltaVariant:
    """Sums as of one row: behind a barrier, not over lanes."""
    variant = replace(delta_rule_variant(tuning, rows, key_dim), subgroups=False)
    return variant if variant.runs(tuning, key_dim) else delta_rule_variant(tuning, 1, key_dim)


class InvariantTuning(Tuning):
    """The rules of steps whose rows do not depend on their number."""

    instead = MappingProxyType(
        {
            few_rows: _few_rows,
            matmul_rows_variant: _matmul_rows,
            matmul_vec_variant: _matmul_vec,
            attention_variant: _attention,
            attention_joined_variant: _joined,
            delta_rule_variant: _delta_rule,
        }
    )
