"""How fast prefill is, and how it is cut so that a display on the same GPU stays responsive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

SUBMISSION_SECONDS = 0.1  # the most that one submission of prefill may take
PAUSE_SECONDS = 0.045  # the most that one step of a prompt may hold up other answers
SUBMISSIONS = 8  # the fewest of a step: the GPU begins while the host records the rest
FIRST_ROWS = 64  # of a step, until the GPU's speed is known
TILE_ROWS = 64  # fewer rows take as long, unless there are kernels for so few

_NOISE = 0.1  # how far measured times scatter, as a part of them
_DRIFT = 0.1  # how much faster or slower a GPU may be from one step to the next
_OWN_DRIFT = 0.03  # how much any one of the seconds below may change by itself meanwhile
_FAR = 10_000  # positions whose attention may take as long as the rest of a row, for all we know
_IDLE_ROWS = 256  # rows that may take as long there as fewer, for all we know
_LEAST = 0.01  # of the seconds of a step: as much at least is for its rows
_PROBE = 128  # steps far on, one of which has other rows than the others


class Pace:
    """How long a prefill step takes: step_seconds; row_seconds for each row; position_seconds for
    each position before its rows, however few they are, as attention of few rows leaves most of a
    GPU idle; and attention_seconds for each row and position before it. All are 0 until a step was
    measured.

    They are estimated from the steps measured so far by a Kalman filter, which keeps how well each
    of them is known: many steps near position 0 leave what is known of far positions as it is, and
    a single step that took long for another reason says little.

    kinds: row counts that have kernels of their own, which take as long for fewer rows."""

    def __init__(self, layers: int, kinds: Sequence[int] = ()) -> None:
        self.layers, self.kinds = layers, sorted(kinds)
        self.step_seconds = self.row_seconds = 0.0
        self.position_seconds = self.attention_seconds = 0.0
        self._covariance = np.zeros((4, 4))  # of the four
        self._far = 0  # steps that were

    def measured(self, rows: int, seconds: float, position: int = 0) -> None:
        """Take a step into account. position: at which its rows start, on average over the rows if
        they are of several prompts."""
        tiles = -(-rows // TILE_ROWS) * TILE_ROWS
        rows = next((kind for kind in self.kinds if rows <= kind <= TILE_ROWS), tiles)
        likely = np.array([TILE_ROWS, 1, _IDLE_ROWS / _FAR, 1 / _FAR])  # of row_seconds
        if not self.known:
            self.row_seconds = seconds / rows
            first = [seconds / 2, self.row_seconds / 2, *(self.row_seconds * likely[2:])]
            self._covariance = np.diag(first) ** 2
            return
        self._far += self._is_far(rows, position)
        parts = np.array([1, rows, position, rows * position])
        before = np.array(
            [self.step_seconds, self.row_seconds, self.position_seconds, self.attention_seconds]
        )
        own = _OWN_DRIFT * np.maximum(before, self.row_seconds * likely / 4)
        drift = _DRIFT**2 * np.outer(before, before) + np.diag(own) ** 2
        covariance = self._covariance + drift
        expected, shared = parts @ before, covariance @ parts
        # An outlier is long: what is measured scatters by a part of it.
        gain = shared / (parts @ shared + (_NOISE * max(seconds, expected)) ** 2)
        self._covariance = covariance - np.outer(gain, shared)
        least = np.array([0, _LEAST * seconds / rows, 0, 0])
        after = np.maximum(before + gain * (seconds - expected), least).tolist()
        self.step_seconds, self.row_seconds, *far = after
        self.position_seconds, self.attention_seconds = far

    @property
    def known(self) -> bool:
        return self.row_seconds > 0.0

    def seconds(self, rows: int, position: int = 0) -> float:
        """The time of a step of rows that start at a position."""
        return self._fixed(position) + rows * self._row(position)

    def _fixed(self, position: int) -> float:
        return self.step_seconds + position * self.position_seconds

    def _row(self, position: int) -> float:
        return self.row_seconds + position * self.attention_seconds

    def _is_far(self, rows: int, position: int) -> bool:
        """Whether a step takes half as long again because of the positions before its rows."""
        return self.seconds(rows, position) > 1.5 * self.seconds(rows, 0)

    def rows(self, position: int = 0) -> int:
        """The most rows of a step that start at a position: as many as a layer computes in
        SUBMISSION_SECONDS, at least a tile."""
        if not self.known:
            return FIRST_ROWS
        return self._rows_in(SUBMISSION_SECONDS * self.layers, position)

    def rows_beside(self, position: int = 0) -> int:
        """The most rows of a step that start at a position while other answers wait for their next
        tokens. A kind is filled to its last row. The rows are not so few that the fixed part of a
        step dominates: then all would wait longer. How much of what positions take is fixed is seen
        by a step with other rows, once in a while."""
        if not self.known:
            return FIRST_ROWS
        pause = max(PAUSE_SECONDS, 2 * self.step_seconds, 1.5 * self._fixed(position))
        rows = min(self.rows(position), self._rows_in(pause, position))
        rows = max((kind for kind in self.kinds if kind <= rows), default=rows)
        if self._far % _PROBE == _PROBE - 1 and self._is_far(rows, position):
            if rows > TILE_ROWS:
                return rows // (2 * TILE_ROWS) * TILE_ROWS
            if self.seconds(rows, position) < SUBMISSION_SECONDS:
                return 2 * TILE_ROWS
        return rows

    def _rows_in(self, seconds: float, position: int) -> int:
        rows = int((seconds - self._fixed(position)) / self._row(position))
        return max(1, rows // TILE_ROWS) * TILE_ROWS

    def filled(self, most: int, rows: int) -> int:
        """Returns how many rows of several prompts the next step takes: all of `rows`, or as many
        as fill a smaller kind of step, if computing the rest in a step of its own takes less time
        than the empty rows of the larger kind."""
        kind = next((kind for kind in self.kinds if kind >= rows), 0)
        smaller = max((n for n in self.kinds if n < kind), default=0)
        if not (self.known and smaller and rows < most):
            return most
        left = next(n for n in self.kinds if n >= rows - smaller)
        apart = self.step_seconds + left * self.row_seconds
        return smaller if apart < (kind - smaller) * self.row_seconds else most

    def most_rows(self, is_beside: bool, shared: int) -> Callable[[int], int]:
        """Returns what gives the most rows of a step that start at a position. is_beside: other
        answers wait for their next tokens. shared: rows of all prompts that may share the step; 0
        if there is only one."""
        most = self.rows_beside if is_beside else self.rows
        return lambda position: self.filled(most(position), shared)

    def submissions(self, rows: int, position: int = 0) -> int:
        """Returns into how many submissions a step is cut that has so many rows and starts at a
        position."""
        if not self.known:
            return self.layers
        pieces = math.ceil(self.seconds(rows, position) / SUBMISSION_SECONDS)
        return min(self.layers, max(SUBMISSIONS, pieces))
