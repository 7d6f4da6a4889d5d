"""How many answers may be asked for at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infer.server.errors import ApiError


class Admission:
    """Counts answers from their request to their end. For one thread."""

    def __init__(self, most: int) -> None:
        """most: the most answers that are generated or wait. A request with room for one of its
        answers is admitted with all of them."""
        self.most = most
        self.count = 0
        self.draining = False  # what runs may end, and nothing begins

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """A block in which these answers count. Raises ApiError (429, 503)."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.")
        if self.count >= self.most:
            raise ApiError(
                429,
                f"{self.count} answers are generated or wait, and no more are taken. Try again "
                "later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.count += answers
        try:
            yield
        finally:
            self.count -= answers
