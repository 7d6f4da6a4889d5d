"""How prefill is cut, on GPUs that are a formula."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from infer.engine.pace import FIRST_ROWS, PAUSE_SECONDS, SUBMISSION_SECONDS, TILE_ROWS, Pace

CHUNK = 512  # rows of a step at most


def line(step: float, row: float) -> Callable[[int], float]:
    """Seconds of a step of so many rows, as its kernels have whole tiles."""
    return lambda rows: step + row * -(-rows // TILE_ROWS) * TILE_ROWS


def sizes(seconds: Callable[[int], float], steps: int = 300) -> tuple[Pace, list[int]]:
    """Returns the sizes of chunks of prompts beside answers. The last chunks have any size; times
    scatter by a tenth."""
    pace, draw, rows = Pace(32), random.Random(0), []
    for alone in (FIRST_ROWS, CHUNK):
        pace.measured(alone, seconds(alone))
    for i in range(steps):
        rows.append(min(pace.rows_beside, CHUNK))
        # The last hundred are of one size, which says nothing of the others.
        measured = draw.randint(1, rows[-1]) if i % 2 and i < steps - 100 else rows[-1]
        pace.measured(measured, seconds(measured) * draw.uniform(0.9, 1.1))
    return pace, rows


@pytest.mark.parametrize(
    ("step", "row", "least", "most"),
    [
        pytest.param(0.010, 0.00018, 128, 192, id="a large model"),
        pytest.param(0.002, 0.00003, 512, 512, id="a small model"),
        pytest.param(0.0, 0.003, 64, 64, id="a slow GPU: not less than a tile"),
        pytest.param(0.030, 0.0003, 64, 128, id="most of the pause is not for rows"),
        # A chunk of the least size would make all prompts and all answers wait longer.
        pytest.param(0.060, 0.0002, 192, 384, id="no chunk is short enough"),
    ],
)
def test_chunks_beside_answers(step: float, row: float, least: int, most: int) -> None:
    _, rows = sizes(line(step, row))
    assert least <= min(rows[20:]) <= max(rows[20:]) <= most


def test_chunks_beside_answers_fill_a_kind() -> None:
    """Seconds of an 8B model, which a step of some rows takes for those of its kind."""
    kinds = {16: 0.0061, 32: 0.0093, 64: 0.0157, 128: 0.0322, 256: 0.0565, 512: 0.1075}
    pace, draw, rows = Pace(32, list(kinds)), random.Random(0), []
    for alone in (FIRST_ROWS, CHUNK):
        pace.measured(alone, kinds[alone])
    for _ in range(200):
        rows.append(pace.rows_beside)
        last = draw.randint(1, rows[-1])  # of a prompt
        for step in (rows[-1], last):
            kind = min(kind for kind in kinds if kind >= step)
            pace.measured(step, kinds[kind] * draw.uniform(0.95, 1.05))
    assert set(rows) == {128}


def test_a_step_of_several_prompts_fills_a_kind() -> None:
    """Where a larger one's empty rows would take longer than a step more; of the times above."""
    kinds = {16: 0.0061, 32: 0.0093, 64: 0.0157, 128: 0.0322, 256: 0.0565, 512: 0.1075}
    pace = Pace(32, list(kinds))
    assert pace.filled(FIRST_ROWS, 40) == FIRST_ROWS  # nothing is known
    for rows, seconds in kinds.items():
        pace.measured(rows, seconds)
    rows = (0, 10, 20, 33, 60, 64, 70, 90, 110, 140, 250, 256, 300, 1000)
    found = [pace.filled(256, n) for n in rows]
    assert found == [256, 256, 256, 256, 256, 256, 64, 64, 256, 128, 256, 256, 256, 256]
    assert Pace(32, [512]).filled(512, 10) == 512


def test_small_chunks_do_not_make_smaller_ones() -> None:
    """A short last chunk takes as long as a tile: by its rows alone prefill would seem slow."""
    pace, seconds = Pace(32), line(0.008, 0.0002)
    for rows in (512, 256, *[3] * 20):
        pace.measured(rows, seconds(rows))
    assert pace.rows_beside >= 128


def test_a_layer_is_done_in_a_submission() -> None:
    seconds = line(0.0, 0.05)
    pace, _ = sizes(seconds)
    assert pace.rows == TILE_ROWS
    assert pace.submissions(TILE_ROWS) == 32  # no more than there are layers
    pace, _ = sizes(line(0.0, 0.004))
    assert pace.rows == pytest.approx(SUBMISSION_SECONDS * 32 / 0.004, rel=0.2)
    assert pace.submissions(512) == pytest.approx(512 * 0.004 / SUBMISSION_SECONDS, rel=0.2)


def test_the_first_step_is_small() -> None:
    pace = Pace(32)
    assert not pace.known
    assert pace.rows == pace.rows_beside == FIRST_ROWS
    assert pace.submissions(FIRST_ROWS) == 32
    pace.measured(FIRST_ROWS, FIRST_ROWS * PAUSE_SECONDS / 256)
    assert pace.known
    assert pace.rows_beside == 256
