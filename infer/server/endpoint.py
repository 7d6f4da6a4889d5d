"""From an HTTP request to a call and back: what all endpoints that take JSON share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import Struct
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.server.admission import Body, read_body
from infer.server.engine import in_thread
from infer.server.errors import ApiError
from infer.server.protocol import RequestT, parse
from infer.server.service import Served, Service
from infer.server.wire import JSONResponse

T = TypeVar("T")

_LAST_SECONDS = 1.0  # time for streams to tell themselves that they end
_MOST_WARNED = 1000  # the most characters of the header with warnings


@dataclass
class Call(Generic[RequestT]):
    """A request that is being served. request: the parsed body, until the call `is_encoded`.
    warnings: sentences for the sender, in a header, and for the log."""

    served: Served
    service: Service
    request: RequestT
    body: Body
    scope: Scope
    send: Send
    warnings: list[str]

    @property
    def cache_salt(self) -> str | None:
        """The salt for the cache, made of the sender's API key and the request's own salt: see
        `LLM.stream`."""
        key: str | None = self.scope.get("state", {}).get("cache_salt")
        own: str | None = getattr(self.request, "cache_salt", None)
        return key if own is None else f"{key}/{own}"

    async def read(self, work: Callable[[], T]) -> T:
        """Calls work() and returns its result. Its time grows with the request, so for a large
        request it runs in a thread."""
        return await in_thread(work) if self.body.is_large else work()

    def is_encoded(self) -> None:
        """Takes note that the prompts are token ids: the rest of the request is dropped, which
        makes room for others."""
        del self.request
        self.body.release()

    async def reply(self, value: Struct) -> None:
        """Sends a whole response."""
        response = JSONResponse(value, headers=self._headers())
        await response(self.scope, _nothing, self.send)

    async def start(self, headers: Mapping[str, str]) -> None:
        """Begins a response that is sent in parts, by `part`."""
        given = Response(headers={**headers, **self._headers()}).raw_headers
        own = [(name, value) for name, value in given if name != b"content-length"]
        await self.send({"type": "http.response.start", "status": 200, "headers": own})

    def _headers(self) -> dict[str, str]:
        self.service.note(self.warnings)
        return _headers(self.warnings)

    def tell(self, text: str) -> None:
        """Sets the end of the log's line about this request."""
        self.scope.setdefault("state", {})["told"] = f": {text}"

    async def part(self, data: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


class Endpoint(Generic[RequestT]):
    """An ASGI application that serves one endpoint. Its work ends when the client goes away."""

    def __init__(
        self,
        served: Served,
        kind: type[RequestT],
        run: Callable[[Call[RequestT]], Coroutine[Any, Any, None]],
        without_model: Callable[[Served, RequestT], Coroutine[Any, Any, Struct | None]] | None,
    ) -> None:
        """kind: the type of the request's body. run: writes the response; until it has begun to, it
        may raise ApiError and InferErrors. without_model: returns the response to a request for
        which no model is to be loaded, None for any other."""
        self._served, self._kind, self._run = served, kind, run
        self._without_model = without_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(HttpRequest(scope, receive), self._served.bodies)
        try:
            with suppress(ClientDisconnect):
                work = self._work(body, scope, send)
                await _while_connected(receive, self._served.stopped, work)
        finally:
            body.release()

    async def _work(self, body: Body, scope: Scope, send: Send) -> None:
        served = self._served
        async with body.turn():
            read = partial(parse, body.take(), self._kind, strict=served.options.strict)
            request, warnings = await in_thread(read) if body.is_large else read()
            del read
        if self._without_model is not None:
            whole = await self._without_model(served, request)
            if whole is not None:
                response = JSONResponse(whole, headers=_headers(warnings))
                await response(scope, _nothing, send)
                return
        # The model may have to be loaded first. The request's body takes no turn meanwhile.
        async with served.using(request.model) as service, body.turn():
            call = Call(served, service, request, body, scope, send, warnings)
            del request
            await self._run(call)


def _headers(warnings: Sequence[str]) -> dict[str, str]:
    if not warnings:
        return {}
    text = " ".join(dict.fromkeys(warnings)).encode("ascii", "backslashreplace").decode()
    return {"X-Infer-Warning": " ".join(text.split())[:_MOST_WARNED]}


async def _nothing() -> Any:
    raise NotImplementedError  # a response never receives anything


async def _while_connected(
    receive: Receive, stopped: asyncio.Event, work: Coroutine[Any, Any, None]
) -> None:
    """Does the work of a request whose body has been read. Raises ClientDisconnect if the client
    goes away before the end, and ApiError (503) if the server stops."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def over() -> None:
        await stopped.wait()
        await asyncio.sleep(_LAST_SECONDS)

    tasks = [asyncio.create_task(each) for each in (work, gone(), over())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
        elif tasks[1].done():
            raise ClientDisconnect
        else:
            raise ApiError(503, "The server is shutting down.")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
