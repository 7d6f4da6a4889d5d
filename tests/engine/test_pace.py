"""How prefill is cut, on GPUs that are a formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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
    assert found == [256, 256, 256, 32, 256, 256, 64, 64, 256, 128, 256, 256, 256, 256]
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
        most = 1.1 if length > 512 else 1.3  # of one or two steps
        assert sorted(pauses)[len(pauses) // 2] <= most * max(PAUSE_SECONDS, tile)
        # What was learnt at other positions is not forgotten, nor wrong by much. One step in a
        # hundred is to show what attention of more rows takes.
        if length > 512:
            assert sorted(pauses)[len(pauses) * 98 // 100] <= 1.3 * max(PAUSE_SECONDS, tile)
            assert max(pauses) <= 2.2 * max(PAUSE_SECONDS, tile)


def test_the_beginning_of_a_prompt_is_as_fast_as_before() -> None:
    """A long prompt does not make the next ones slow."""
    pace, draw = Pace(32), random.Random(0)
    found = []
    for length in (20_000, 100_000, 100, 100_000, 100):
        prefill(pace, 0.004, 0.00008, 4e-9, length, draw)
        found.append(pace.rows_beside(0))
    assert min(found) >= 0.6 * max(found)
    assert pace.attention_seconds == pytest.approx(4e-9, rel=0.2)
    assert pace.seconds(512, 50_000) == pytest.approx(0.004 + 512 * (0.00008 + 0.0002), rel=0.15)


@dataclass(frozen=True)
class Machine:
    """A GPU whose steps take so many seconds, and for each row, and each row and position before
    it, as if there were as many rows at least as fill it. There are whole tiles of rows."""

    step: float
    row: float
    attention: float
    fills: int = TILE_ROWS

    def seconds(self, rows: int, position: int) -> float:
        tiles = -(-rows // TILE_ROWS) * TILE_ROWS
        attending = self.attention * max(tiles, self.fills)
        return self.step + self.row * tiles + position * attending

    def fixed(self, position: int) -> float:
        """The seconds that a step takes at a position, however few rows it has."""
        idle = self.fills if self.fills > TILE_ROWS else 0
        return self.step + self.attention * idle * position

    def at_zero(self, pace: Pace, draw: random.Random, steps: int = 300) -> None:
        """Measure steps of short prompts."""
        for _ in range(steps):
            rows = draw.choice([64, 128, 192, 448, 512])
            pace.measured(rows, self.seconds(rows, 0) * draw.uniform(0.9, 1.1))

    def climb(self, pace: Pace, draw: random.Random, start: int = 0) -> list[tuple[int, int]]:
        """Prefill a prompt beside answers, from one position to the end. Returns the position and
        rows of each step."""
        steps, position = [], start
        while position < 131_072:
            rows = min(pace.rows_beside(position), CHUNK)
            steps.append((position, rows))
            seconds = self.seconds(rows, position)
            pace.measured(rows, seconds * draw.uniform(0.9, 1.1), position)
            position += rows
        return steps

    def check(self, steps: list[tuple[int, int]]) -> None:
        """Check that no step is longer than it may be but for what nobody can know, the scatter of
        the times; and that few are shorter than they need be. One in a hundred may be twice as
        long: it is to show what attention of more rows takes."""
        small = long = 0
        for position, rows in steps:
            least = self.seconds(TILE_ROWS, position)
            pause = max(PAUSE_SECONDS, 1.5 * self.fixed(position))
            assert self.seconds(rows, position) < 2 * max(pause, least)
            long += rows > TILE_ROWS and self.seconds(rows, position) > 1.15 * pause
            more = self.seconds(rows + 2 * TILE_ROWS, position)
            small += rows < CHUNK and more < 0.9 * PAUSE_SECONDS
        assert long <= len(steps) / 100 + 1
        assert small < len(steps) / 20 + 5


MACHINES = [
    pytest.param(Machine(0.003, 2.1e-4, 8.4e-9), id="a large model"),
    pytest.param(Machine(0.001, 3e-5, 3.8e-9), id="a small model"),
    pytest.param(Machine(0.001, 1e-5, 2e-9), id="a very small model"),
    pytest.param(Machine(0.003, 7.2e-5, 2.4e-9, 256), id="attention of few rows takes as long"),
    pytest.param(Machine(0.001, 1.5e-5, 5e-10, 512), id="attention of all chunks takes as long"),
    pytest.param(Machine(0.003, 1e-4, 0.0), id="layers with a state alone"),
    pytest.param(Machine(0.010, 3e-3, 1.5e-7), id="a software adapter"),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("short", [0, 300])
def test_steps_beside_answers_are_short_at_every_position(machine: Machine, short: int) -> None:
    """Whatever was measured before: nothing, or short prompts alone."""
    pace, draw = Pace(32), random.Random(0)
    machine.at_zero(pace, draw, short)
    steps = machine.climb(pace, draw)
    machine.check(steps)
    rows = [rows for _, rows in steps]
    if machine.attention and machine.fills == TILE_ROWS:
        assert rows[-1] <= max(max(rows) / 3, TILE_ROWS)


@pytest.mark.parametrize("machine", MACHINES)
def test_one_step_far_on_says_what_attention_takes(machine: Machine) -> None:
    """The rest of a prompt most of which is cached, and then short prompts for a long time."""
    pace, draw = Pace(32), random.Random(0)
    machine.at_zero(pace, draw)
    machine.check(machine.climb(pace, draw, start=100_000)[1:])
    machine.at_zero(pace, draw, 2000)
    machine.check(machine.climb(pace, draw, start=100_000)[1:])
    machine.check(machine.climb(pace, draw))


def test_steps_are_not_small_where_that_saves_little() -> None:
    """Far on, where attention of few rows takes as long as that of many."""
    machine, pace, draw = Machine(0.003, 7.2e-5, 2.4e-9, 256), Pace(32), random.Random(0)
    machine.at_zero(pace, draw)
    steps = machine.climb(pace, draw)
    seconds = sum(machine.seconds(rows, position) for position, rows in steps)
    least = sum(machine.seconds(TILE_ROWS, i) for i in range(0, 131_072, TILE_ROWS))
    assert seconds < 0.6 * least


def test_steps_beside_answers_fill_a_kind_at_every_position() -> None:
    kinds = (16, 32, 64, 128, 256, 512)
    machine, pace, draw = Machine(0.001, 3e-5, 3.8e-9), Pace(32, kinds), random.Random(0)
    machine.at_zero(pace, draw)
    steps = machine.climb(pace, draw)
    assert {rows for _, rows in steps} == {64, 128, 256, 512}
    for position, rows in steps:
        assert rows == 128 or machine.seconds(rows, position) < 1.15 * PAUSE_SECONDS


def test_a_prompt_that_was_alone_until_an_answer_came() -> None:
    """All its steps had the most rows."""
    for fills in (TILE_ROWS, 256):
        machine, pace, draw = Machine(0.003, 7.2e-5, 2.4e-9, fills), Pace(32), random.Random(0)
        for position in range(0, 60_000, CHUNK):
            seconds = machine.seconds(CHUNK, position) * draw.uniform(0.9, 1.1)
            pace.measured(CHUNK, seconds, position)
        machine.check(machine.climb(pace, draw, start=60_000)[1:])


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_gpu_that_gets_faster_or_slower(factor: float) -> None:
    """After some steps at position 0, and two far on."""
    pace, draw = Pace(32), random.Random(0)
    before = Machine(0.001, 3e-5, 3.8e-9)
    before.climb(pace, draw)
    after = Machine(before.step * factor, before.row * factor, before.attention * factor)
    after.at_zero(pace, draw, 30)
    assert pace.seconds(256, 0) == pytest.approx(after.seconds(256, 0), rel=0.1)
    after.check(after.climb(pace, draw, start=50_000)[2:])


def test_a_step_that_took_long_for_another_reason_says_little() -> None:
    pace, draw, machine = Pace(32), random.Random(0), Machine(0.003, 2.1e-4, 8.4e-9)
    machine.climb(pace, draw)
    machine.at_zero(pace, draw)
    before = [pace.seconds(rows, position) for rows, position in ((64, 0), (512, 0), (64, 99_999))]
    pace.measured(128, 3.0)
    after = [pace.seconds(rows, position) for rows, position in ((64, 0), (512, 0), (64, 99_999))]
    assert after == pytest.approx(before, rel=0.15)


def test_first_steps_that_were_slow_are_forgotten() -> None:
    pace, draw, machine = Pace(32), random.Random(0), Machine(0.003, 1e-4, 4e-9)
    for _ in range(3):
        pace.measured(FIRST_ROWS, 2.0)
    machine.at_zero(pace, draw, 60)
    assert pace.seconds(256, 0) == pytest.approx(machine.seconds(256, 0), rel=0.15)
    machine.check(machine.climb(pace, draw))


def test_steps_of_one_size_at_position_0_say_nothing_wrong() -> None:
    """They may be of any cost of rows and of a step; all that is known is their sum."""
    pace = Pace(32)
    for _ in range(100):
        pace.measured(256, 0.04)
    assert pace.seconds(256, 0) == pytest.approx(0.04, rel=0.01)
    assert pace.position_seconds == pace.attention_seconds == 0.0
    assert pace.rows_beside(0) == 256
    assert pace.step_seconds >= 0
    assert pace.row_seconds > 0


def test_submissions_are_short_at_every_position() -> None:
    machine, pace, draw = Machine(0.01, 1e-3, 1e-7), Pace(32), random.Random(0)
    machine.at_zero(pace, draw)
    machine.climb(pace, draw)
    for position in (0, 30_000, 131_072):
        rows = min(pace.rows(position), CHUNK)
        pieces = pace.submissions(rows, position)
        assert machine.seconds(rows, position) / pieces < 1.1 * SUBMISSION_SECONDS
    assert pace.rows(0) > pace.rows(131_072) > TILE_ROWS
