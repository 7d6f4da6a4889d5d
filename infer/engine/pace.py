"""How fast prefill is, and how it is cut so that a display on the same GPU stays responsive."""

from __future__ import annotations

import math
from collections.abc import Sequence

SUBMISSION_SECONDS = 0.1  # the most that one submission of prefill may take
PAUSE_SECONDS = 0.045  # the most that one step of a prompt may hold up other answers
SUBMISSIONS = 8  # the fewest of a step: the GPU begins while the host records the rest
FIRST_ROWS = 64  # of a step, until the GPU's speed is known
TILE_ROWS = 64  # fewer rows take as long, unless there are kernels for so few

_KEPT = 0.9  # what remains of a measurement's weight when the next one comes


class Pace:
    """A prefill step takes step_seconds, and row_seconds more for each row: a line fitted to the
    steps measured so far, the latest with most weight. Both are 0 until that is known.

    kinds: row counts that have kernels of their own, which take as long for fewer rows."""

    def __init__(self, layers: int, kinds: Sequence[int] = ()) -> None:
        self.layers, self.step_seconds, self.row_seconds = layers, 0.0, 0.0
        self.kinds = sorted(kinds)
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, rows, seconds, rows², rows × seconds

    def measured(self, rows: int, seconds: float) -> None:
        """Take a step into account."""
        tiles = -(-rows // TILE_ROWS) * TILE_ROWS
        rows = next((kind for kind in self.kinds if rows <= kind <= TILE_ROWS), tiles)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(_KEPT * old + own for old, own in zip(self._sums, new, strict=True))
        count, r, s, rr, rs = self._sums
        spread = count * rr - r * r
        if spread > 0.01 * r * r:
            self.step_seconds = max(0.0, (s * rr - r * rs) / spread)
        self.row_seconds = (s - count * self.step_seconds) / r  # the line goes through the mean
        if self.row_seconds <= 0.0:  # noise
            self.step_seconds, self.row_seconds = 0.0, rs / rr

    @property
    def known(self) -> bool:
        return self.row_seconds > 0.0

    @property
    def rows(self) -> int:
        """The most rows of a step: as many as a layer computes in SUBMISSION_SECONDS, at least a
        tile."""
        if not self.known:
            return FIRST_ROWS
        return self._rows_in(SUBMISSION_SECONDS * self.layers)

    @property
    def rows_beside(self) -> int:
        """The most rows of a step while other answers wait for their next tokens. A kind is filled
        to its last row. The rows are not so few that the fixed part of a step dominates: then all
        would wait longer."""
        if not self.known:
            return self.rows
        rows = min(self.rows, self._rows_in(max(PAUSE_SECONDS, 2 * self.step_seconds)))
        return max((kind for kind in self.kinds if kind <= rows), default=rows)

    def _rows_in(self, seconds: float) -> int:
        rows = int((seconds - self.step_seconds) / self.row_seconds)
        return max(1, rows // TILE_ROWS) * TILE_ROWS

    def filled(self, most: int, rows: int) -> int:
        """How many of these rows, of several prompts, the next step takes: all, or as many as fill
        a smaller kind, if the rest by itself takes less time than the larger kind's empty rows."""
        kind = next((kind for kind in self.kinds if kind >= rows), 0)
        smaller = max((n for n in self.kinds if n < kind), default=0)
        if not (self.known and smaller and rows < most):
            return most
        left = next(n for n in self.kinds if n >= rows - smaller)
        apart = self.step_seconds + left * self.row_seconds
        return smaller if apart < (kind - smaller) * self.row_seconds else most

    def submissions(self, rows: int) -> int:
        """How many submissions a step of so many rows is cut into."""
        if not self.known:
            return self.layers
        seconds = self.step_seconds + rows * self.row_seconds
        return min(self.layers, max(SUBMISSIONS, math.ceil(seconds / SUBMISSION_SECONDS)))
