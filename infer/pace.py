"""How fast prefill goes, and how it is cut so that a display on the same GPU gets its turn."""

from __future__ import annotations

import math

SUBMISSION_SECONDS = 0.1  # of prefill at most
PAUSE_SECONDS = 0.03  # that a prompt may hold up other answers, step by step
FIRST_ROWS = 64  # of prefill, while it is not known how fast the GPU is


class Pace:
    """row_seconds: of prefill, as it went last; 0: not known."""

    def __init__(self, layers: int) -> None:
        self.layers, self.row_seconds = layers, 0.0

    @property
    def known(self) -> bool:
        return self.row_seconds > 0.0

    @property
    def rows(self) -> int:
        """Of a step at most: so many that a layer is done in SUBMISSION_SECONDS, or 16."""
        if not self.known:
            return FIRST_ROWS
        return max(16, int(SUBMISSION_SECONDS / (self.row_seconds / self.layers)) // 16 * 16)

    @property
    def rows_beside(self) -> int:
        """The same while other answers wait for their next tokens."""
        if not self.known:
            return self.rows
        return min(self.rows, max(16, int(PAUSE_SECONDS / self.row_seconds) // 16 * 16))

    def submissions(self, rows: int) -> int:
        """Into how many submissions a step of so many rows is cut."""
        if not self.known:
            return self.layers
        return min(self.layers, math.ceil(rows * self.row_seconds / SUBMISSION_SECONDS))
