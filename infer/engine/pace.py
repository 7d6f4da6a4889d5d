"""How fast prefill goes, and how it is cut so that a display on the same GPU gets its turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

SUBMISSION_SECONDS = 0.1  # of prefill at most
PAUSE_SECONDS = 0.045  # that a prompt may hold up other answers, step by step
SUBMISSIONS = 8  # of a step at least: the GPU begins while the host records what comes after
FIRST_ROWS = 64  # of prefill, while it is not known how fast the GPU is
TILE_ROWS = 64  # fewer take kernels as long, if there are none for so few

_KEPT = 0.9  # of the weight of a measurement when the next one comes


class Pace:
    """A step of prefill takes step_seconds, and row_seconds more for each of its rows: the line
    through those that were measured, of which the last ones count most. 0: not known.

    kinds: for so many rows steps have kernels of their own, which take as long for fewer."""

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
        """Of a step at most: so many that a layer is done in SUBMISSION_SECONDS, or a tile's."""
        if not self.known:
            return FIRST_ROWS
        return self._rows_in(SUBMISSION_SECONDS * self.layers)

    @property
    def rows_beside(self) -> int:
        """The same while other answers wait for their next tokens: of a kind all rows. Not so few
        that most of a step's time is not for rows: then all would wait longer."""
        if not self.known:
            return self.rows
        rows = min(self.rows, self._rows_in(max(PAUSE_SECONDS, 2 * self.step_seconds)))
        return max((kind for kind in self.kinds if kind <= rows), default=rows)

    def _rows_in(self, seconds: float) -> int:
        rows = int((seconds - self.step_seconds) / self.row_seconds)
        return max(1, rows // TILE_ROWS) * TILE_ROWS

    def filled(self, most: int, rows: int) -> int:
        """Of so many rows of several prompts the most that the next step takes: all, or those that
        fill a smaller kind, where what is left takes less time than a larger one's empty rows."""
        kind = next((kind for kind in self.kinds if kind >= rows), 0)
        smaller = max((n for n in self.kinds if n < kind), default=0)
        if not (self.known and smaller and rows < most):
            return most
        left = next(n for n in self.kinds if n >= rows - smaller)
        apart = self.step_seconds + left * self.row_seconds
        return smaller if apart < (kind - smaller) * self.row_seconds else most

    def submissions(self, rows: int) -> int:
        """Into how many submissions a step of so many rows is cut."""
        if not self.known:
            return self.layers
        seconds = self.step_seconds + rows * self.row_seconds
        return min(self.layers, max(SUBMISSIONS, math.ceil(seconds / SUBMISSION_SECONDS)))
