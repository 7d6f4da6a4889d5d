"""How fast prefill is, and how it is cut so that a display on the same GPU stays responsive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SUBMISSION_SECONDS = 0.1  # the most that one submission of prefill may take
PAUSE_SECONDS = 0.045  # the most that one step of a prompt may hold up other answers
SUBMISSIONS = 8  # the fewest of a step: the GPU begins while the host records the rest
FIRST_ROWS = 64  # of a step, until the GPU's speed is known
TILE_ROWS = 64  # fewer rows take as long, unless there are kernels for so few

_KEPT = 0.9  # what remains of a measurement's weight when the next one comes
_STIFF = 0.01  # how much what was known before counts beside what was measured


class Pace:
    """A prefill step takes step_seconds, row_seconds more for each row, and position_seconds more
    for each row and each position before the step, as rows attend to these: fitted to the steps
    measured so far, the latest with most weight. All are 0 until that is known.

    kinds: row counts that have kernels of their own, which take as long for fewer rows."""

    def __init__(self, layers: int, kinds: Sequence[int] = ()) -> None:
        self.layers = layers
        self.step_seconds = self.row_seconds = self.position_seconds = 0.0
        self.kinds = sorted(kinds)
        # Sums of the products of what steps have: 1, rows, rows × positions, seconds.
        self._sums = np.zeros((4, 4))

    def measured(self, rows: int, seconds: float, position: int = 0) -> None:
        """Take a step of so many rows from that position on into account."""
        tiles = -(-rows // TILE_ROWS) * TILE_ROWS
        rows = next((kind for kind in self.kinds if rows <= kind <= TILE_ROWS), tiles)
        step = np.array([1.0, rows, rows * position, seconds])
        self._sums = _KEPT * self._sums + np.outer(step, step)
        before = np.array([self.step_seconds, self.row_seconds, self.position_seconds])
        if not self.known:
            before[1] = seconds / rows
        found = _fitted(self._sums, before).tolist()
        self.step_seconds, self.row_seconds, self.position_seconds = found

    @property
    def known(self) -> bool:
        return self.row_seconds > 0.0

    def seconds(self, rows: int, position: int = 0) -> float:
        """Returns how long a step of so many rows from that position on takes."""
        return self.step_seconds + rows * (self.row_seconds + self.position_seconds * position)

    def rows(self, position: int = 0) -> int:
        """Returns the most rows of a step from that position on: as many as a layer computes in
        SUBMISSION_SECONDS, at least a tile."""
        if not self.known:
            return FIRST_ROWS
        return self._rows_in(SUBMISSION_SECONDS * self.layers, position)

    def rows_beside(self, position: int = 0) -> int:
        """Returns the most rows of a step from that position on while other answers wait for their
        next tokens. A kind is filled to its last row. The rows are not so few that the fixed part
        of a step dominates: then all would wait longer."""
        if not self.known:
            return self.rows()
        seconds = max(PAUSE_SECONDS, 2 * self.step_seconds)
        rows = min(self.rows(position), self._rows_in(seconds, position))
        return max((kind for kind in self.kinds if kind <= rows), default=rows)

    def _rows_in(self, seconds: float, position: int) -> int:
        each = self.row_seconds + self.position_seconds * position
        rows = int((seconds - self.step_seconds) / each)
        return max(1, rows // TILE_ROWS) * TILE_ROWS

    def filled(self, most: int, rows: int) -> int:
        """Returns how many of these rows, of several prompts, the next step takes: all, or as many
        as fill a smaller kind, if the rest by itself takes less time than the larger kind's empty
        rows."""
        kind = next((kind for kind in self.kinds if kind >= rows), 0)
        smaller = max((n for n in self.kinds if n < kind), default=0)
        if not (self.known and smaller and rows < most):
            return most
        left = next(n for n in self.kinds if n >= rows - smaller)
        apart = self.step_seconds + left * self.row_seconds
        return smaller if apart < (kind - smaller) * self.row_seconds else most

    def submissions(self, rows: int, position: int = 0) -> int:
        """Returns how many submissions a step of so many rows from that position on is cut into."""
        if not self.known:
            return self.layers
        pieces = math.ceil(self.seconds(rows, position) / SUBMISSION_SECONDS)
        return min(self.layers, max(SUBMISSIONS, pieces))


def _fitted(sums: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the seconds of a step, of a row, and of a row for each position: those that fit best,
    and of these the ones nearest to what was known before, which counts where the latest steps were
    so much alike that they tell nothing. None are less than nothing, and rows take some time.

    Ridge regression (Hoerl and Kennard, 1970) towards the values before, by parts that are not 0.
    """
    scale = np.sqrt(np.diag(sums))[:3]
    seen = [part for part in range(3) if scale[part]]
    best, least = before, math.inf
    for zeros in ((), (0,), (2,), (0, 2)):
        parts = [part for part in seen if part not in zeros]
        own = sums[np.ix_(parts, parts)] / np.outer(scale[parts], scale[parts])
        right, old = sums[parts, 3] / scale[parts], before[parts] * scale[parts]
        found = np.linalg.solve(own + _STIFF * np.eye(len(parts)), right + _STIFF * old)
        error = found @ own @ found - 2 * right @ found + _STIFF * ((found - old) ** 2).sum()
        error += _STIFF * sum((before[part] * scale[part]) ** 2 for part in zeros)
        if (found >= 0).all() and found[parts.index(1)] > 0 and error < least:
            best, least = before.copy(), error
            best[seen] = 0.0
            best[parts] = found / scale[parts]
    return best
