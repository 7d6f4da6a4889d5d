"""How many answers may be asked for at once, and how much of requests is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import Request

from infer.boundaries import shown
from infer.server.errors import ApiError


class Admission:
    """Counts the answers of a model from their request to their end. Only one thread may use it."""

    def __init__(self, most: int) -> None:
        """most: the most answers that are generated or wait. A request is admitted with all of its
        answers as long as there is room for one."""
        self.most = most
        self.count = 0
        self.draining = False  # answers that run may end, and none begins

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Opens a block in which these answers count. Raises ApiError: 429 if there are too many,
        503 if the server is shutting down."""
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


LARGE = 1 << 18  # bytes: a body with more takes turns
_TURNS = 2  # the most large bodies in work at the same time
# All bodies together may have as many bytes as _MOST of the largest size. Large bodies are refused
# from _MOST_LARGE on, so that small ones still come in.
_MOST, _MOST_LARGE = 16, 12


class Bodies:
    """The bodies of all requests, each from its first byte until it is token ids. Large bodies take
    turns, and leave room for others. Only one thread may use it."""

    def __init__(self, most: int) -> None:
        """most: the most bytes of one body."""
        self.most = most
        self.nbytes = 0
        self.turns = asyncio.Semaphore(_TURNS)


class Body:
    """The body of one request."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._data = bytearray()
        self._nbytes = 0
        self._has_turn = False

    @property
    def is_large(self) -> bool:
        return self._nbytes > LARGE

    def add(self, part: bytes) -> None:
        """Adds a part that has arrived. Raises ApiError: 413 if the body is too large, 503 if all
        bodies together take too much memory."""
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
        """Opens a block in which the body is worked on. A large body waits for its turn, which
        lasts until the body is released."""
        if self.is_large:
            await self._bodies.turns.acquire()
            self._has_turn = True
        try:
            yield
        finally:
            self._end_turn()

    def take(self) -> bytearray:
        """Returns the data, and keeps none of it."""
        data, self._data = self._data, bytearray()
        return data

    def release(self) -> None:
        """Takes note that the body is needed no more. It may be called twice."""
        self._bodies.nbytes -= self._nbytes
        self._nbytes = 0
        self._end_turn()

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._bodies.turns.release()


async def read_body(request: Request, bodies: Bodies) -> Body:
    """Reads the body of a request. Raises ApiError: 413 if it is too large; 415 if it is
    compressed, or if it comes from a web page and is not declared as JSON, because browsers send
    such requests for any page without asking first; 501 if its transfer coding is not chunked."""
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
