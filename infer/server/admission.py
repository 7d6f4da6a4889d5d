"""How many answers may be asked for at once, and how much of requests is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import Request

from infer.foreign import shown
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


LARGE = 1 << 18  # bytes of a body, beyond which it takes turns
_TURNS = 2  # large bodies that are in work at the same time
# How many of the largest size all bodies together may reach. A large one is refused before that.
_MOST, _MOST_LARGE = 16, 12


class Bodies:
    """The bodies of requests, each from its first byte until it is token ids. Large ones take
    turns, and leave room for others. For one thread."""

    def __init__(self, most: int) -> None:
        """most: bytes of one."""
        self.most = most
        self.nbytes = 0
        self.turns = asyncio.Semaphore(_TURNS)


class Body:
    """The body of a request."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._data = bytearray()
        self._nbytes = 0
        self._has_turn = False

    @property
    def is_large(self) -> bool:
        return self._nbytes > LARGE

    def add(self, part: bytes) -> None:
        """Raises ApiError (413, 503)."""
        self._data += part
        self._nbytes += len(part)
        self._bodies.nbytes += len(part)
        most = self._bodies.most
        if self._nbytes > most:
            raise too_large(most)
        if self._bodies.nbytes > most * (_MOST_LARGE if self.is_large else _MOST):
            raise ApiError(
                503,
                "Too many large requests come at once. Try again later.",
                headers={"Retry-After": "1"},
            )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A block in which it is worked on, until it is released."""
        if self.is_large:
            await self._bodies.turns.acquire()
            self._has_turn = True
        try:
            yield
        finally:
            self._end_turn()

    def take(self) -> bytearray:
        """The data, which it has no more."""
        data, self._data = self._data, bytearray()
        return data

    def release(self) -> None:
        """It is needed no more. May be called twice."""
        self._bodies.nbytes -= self._nbytes
        self._nbytes = 0
        self._end_turn()

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._bodies.turns.release()


async def read_body(request: Request, bodies: Bodies) -> Body:
    """The body of a request. Raises ApiError if it is too large (413), if it is compressed
    (415), or if it comes from a web page and is not declared as JSON (415): browsers send such
    requests for any page, without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and "origin" in request.headers:
        raise ApiError(415, "Send JSON, with the header Content-Type: application/json.")
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"The body is compressed (Content-Encoding: {shown(coding)[1:-1]}), which is not "
            "supported: send it as it is.",
            headers={"Accept-Encoding": "identity"},
        )
    transfer = request.headers.get("transfer-encoding", "chunked").strip().lower()
    if transfer != "chunked":
        raise ApiError(501, f"The transfer coding {shown(transfer)} is not supported: chunked is.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > bodies.most:
        raise too_large(bodies.most)
    body = Body(bodies)
    try:
        async for part in request.stream():
            body.add(part)
    except BaseException:
        body.release()
        raise
    return body


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The body of a request has at most {most} bytes.")
