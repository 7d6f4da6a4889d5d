"""References and cases of hidden states from row to row, and from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array, to_rows
from infer.kernels.checks.bench import TILED, Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand, check_ids
from infer.kernels.checks.forward import Options
from infer.kernels.errors import ShaderError
from infer.kernels.ops.hidden import HiddenBefore, KeepHidden
from infer.kernels.state.hidden_states import RECENT, HiddenStates
from infer.kernels.state.step import StepRow

Kept = Annotated[Array, f"sequences, {RECENT}, width"]


@by_hand
def run_hidden_before(
    bench: Bench,
    kept: Kept,
    x: Annotated[Array | None, "rows, width"] = None,
    *,
    position: int = 0,
    batch: Sequence[StepRow] = (),
    **options: Unpack[Options],
) -> Annotated[Array, "rows, width"]:
    """Returns the hidden state of the position before each row, [rows, width]: that of the row
    before in x [rows, width], or the one in kept [sequences, 16, width], a position at its number
    modulo 16. Without x there is one row. batch: of each row (token, position, sequence, adapter,
    rows behind), where they are of several sequences."""
    _check_batch(batch, kept, x)
    value = HiddenBefore(None if x is None else bench.input(x), _states(bench, kept))
    return bench.run(value, rows=len(batch) or 1, position=position, batch=batch)


@by_hand
def run_keep_hidden(
    bench: Bench,
    x: Annotated[Array, "rows, width"],
    kept: Kept,
    *,
    position: int = 0,
    batch: Sequence[StepRow] = (),
    **options: Unpack[Options],
) -> Kept:
    """Returns the hidden states that are kept after a step with the rows x [rows, width]. kept:
    those before it. Both are [sequences, 16, width], a position at its number modulo 16. batch: of
    each row (token, position, sequence, adapter, rows behind), where they are of several
    sequences."""
    _check_batch(batch, kept, x)
    states = _states(bench, kept)
    forward = bench.forward(len(x), plan_rows=TILED)
    output = KeepHidden(forward.input(x), states)
    forward.run(output, position=position, batch=batch)
    raw = bench.device.read(states.buffer).view(np.float32)
    return raw.reshape(*kept.shape[:2], -1)[:, :, : kept.shape[2]].copy()


def _check_batch(batch: Sequence[StepRow], kept: Array, x: Array | None) -> None:
    """Raises ShaderError where it is not of all rows of x, or of a sequence that is not kept."""
    if batch and x is not None and len(batch) != len(x):
        raise ShaderError(f"batch must be of {len(x)} rows, not {len(batch)}")
    check_ids("sequences of batch", [row[2] for row in batch], len(kept))


def _states(bench: Bench, kept: Array) -> HiddenStates:
    sequences, _, width = kept.shape
    rows = to_rows(kept.reshape(-1, width), sequences * RECENT)
    return HiddenStates(width, bench.device.upload(rows))


def cases() -> Iterator[Case]:
    for rows in (1, 40):
        yield Case("hidden_before", f"{rows} rows", partial(_before, rows=rows))
        yield Case("keep_hidden", f"{rows} rows", partial(_keep, rows=rows))
    yield Case("hidden_before", "first", _before_first)
    yield Case("hidden_before", "batch", _before_batch)
    yield Case("keep_hidden", "batch", _keep_batch)


def _before(bench: Bench, rows: int) -> Outcome:
    x, kept = bench.random(rows, 67), bench.random(1, RECENT, 67)
    y = run_hidden_before(bench, kept, x, position=37)
    return y, np.vstack([kept[0, 36 % RECENT], x[:-1]])


def _before_first(bench: Bench) -> Outcome:
    x, kept = bench.random(3, 67), bench.random(1, RECENT, 67)
    return run_hidden_before(bench, kept, x), np.vstack([np.zeros(67), x[:-1]])


# Two rows of sequence 1 from position 20 on, and one of sequence 0, which follows none here.
_BATCH: tuple[StepRow, ...] = ((0, 20, 1, 0, 0), (0, 21, 1, 0, 0), (0, 22, 0, 0, 0))


def _before_batch(bench: Bench) -> Outcome:
    x, kept = bench.random(3, 67), bench.random(2, RECENT, 67)
    y = run_hidden_before(bench, kept, x, batch=_BATCH)
    return y, np.array([kept[1, 19 % RECENT], x[0], kept[0, 21 % RECENT]])


def _keep(bench: Bench, rows: int) -> Outcome:
    x, kept = bench.random(rows, 67), bench.random(1, RECENT, 67)
    y = run_keep_hidden(bench, x, kept, position=37)
    expected = kept.copy()
    for i in range(rows):
        expected[0, (37 + i) % RECENT] = x[i]
    return y, expected


def _keep_batch(bench: Bench) -> Outcome:
    x, kept = bench.random(3, 67), bench.random(2, RECENT, 67)
    y = run_keep_hidden(bench, x, kept, batch=_BATCH)
    expected = kept.copy()
    for row, (_, position, sequence, *_) in zip(x, _BATCH, strict=True):
        expected[sequence, position % RECENT] = row
    return y, expected
