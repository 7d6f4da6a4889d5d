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
        rows.append(min(pace.rows_beside(), CHUNK))
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
        rows.append(pace.rows_beside())
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
    assert pace.rows_beside() >= 128


def test_a_layer_is_done_in_a_submission() -> None:
    seconds = line(0.0, 0.05)
    pace, _ = sizes(seconds)
    assert pace.rows() == TILE_ROWS
    assert pace.submissions(TILE_ROWS) == 32  # no more than there are layers
    pace, _ = sizes(line(0.0, 0.004))
    assert pace.rows() == pytest.approx(SUBMISSION_SECONDS * 32 / 0.004, rel=0.2)
    assert pace.submissions(512) == pytest.approx(512 * 0.004 / SUBMISSION_SECONDS, rel=0.2)


def test_the_first_step_is_small() -> None:
    pace = Pace(32)
    assert not pace.known
    assert pace.rows() == pace.rows_beside() == FIRST_ROWS
    assert pace.submissions(FIRST_ROWS) == 32
    pace.measured(FIRST_ROWS, FIRST_ROWS * PAUSE_SECONDS / 256)
    assert pace.known
    assert pace.rows_beside() == 256


def prefill(
    pace: Pace, step: float, row: float, position: float, length: int, draw: random.Random
) -> list[float]:
    """Returns the pauses of answers beside a prompt of that length, where a row takes `position`
    more for each position that it attends to. Times scatter by a tenth."""
    pauses, start = list[float](), 0
    while start < length:
        rows = min(pace.rows_beside(start), CHUNK, length - start)
        tiles = -(-rows // TILE_ROWS) * TILE_ROWS
        seconds = step + tiles * (row + position * (start + rows / 2))
        pauses.append(seconds * draw.uniform(0.9, 1.1))
        pace.measured(rows, pauses[-1], start)
        start += rows
    return pauses


@pytest.mark.parametrize(
    ("step", "row", "position"),
    [
        pytest.param(0.004, 0.00008, 4e-9, id="a large GPU"),
        pytest.param(0.010, 0.0002, 4e-9, id="a row takes as long as 50,000 positions"),
        pytest.param(0.002, 0.0001, 0.0, id="states alone"),
        pytest.param(0.002, 0.00002, 5e-9, id="a small model"),
    ],
)
def test_pauses_beside_a_long_prompt(step: float, row: float, position: float) -> None:
    """At all positions, whatever prompts came before. A tile is the least."""
    pace, draw = Pace(32, [64, 128, 256, 512]), random.Random(0)
    lengths = [64, 512, 40, 100_000, 300, 2000, 131_072, 90, 30_000]
    for length in lengths:
        pauses = prefill(pace, step, row, position, length, draw)
        tile = step + TILE_ROWS * (row + position * length)
        assert sorted(pauses)[len(pauses) // 2] <= 1.1 * max(PAUSE_SECONDS, tile)
        # What was learnt at other positions is not forgotten, nor wrong by much.
        if length > 512:
            assert max(pauses) <= 1.6 * max(PAUSE_SECONDS, tile)


def test_the_beginning_of_a_prompt_is_as_fast_as_before() -> None:
    """A long prompt does not make the next ones slow."""
    pace, draw = Pace(32), random.Random(0)
    found = []
    for length in (20_000, 100_000, 100, 100_000, 100):
        prefill(pace, 0.004, 0.00008, 4e-9, length, draw)
        found.append(pace.rows_beside(0))
    assert min(found) > 0.6 * max(found)
    assert pace.position_seconds == pytest.approx(4e-9, rel=0.2)
    assert pace.seconds(512, 50_000) == pytest.approx(0.004 + 512 * (0.00008 + 0.0002), rel=0.15)
