"""The layers in front of all endpoints: API keys, and a log line for each request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.errors import ApiError, respond

log = logging.getLogger(__name__)


class Guard:
    """Admits requests with a valid key, and passes the key on: what is cached for a request is
    found only by requests with the same key."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], free: Sequence[str]) -> None:
        """free: paths that need no key."""
        self._app, self._free = app, free
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"] not in self._free:
            given = _given(Headers(scope=scope))
            # All of them are compared, so that the time tells nothing.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                error = ApiError(
                    401,
                    "The API key is missing or wrong: send the header Authorization: Bearer KEY.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await (await respond(Request(scope), error))(scope, receive, send)
                return
            salt = hashlib.sha256(given).hexdigest()
            scope.setdefault("state", {})["cache_salt"] = salt
        await self._app(scope, receive, send)


def _given(headers: Headers) -> bytes:
    """The key, from the header of OpenAI's and Ollama's clients, or from Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


class AccessLog:
    """Logs who asked for what, the status, and the time it took; nothing of its content."""

    def __init__(self, app: ASGIApp, quiet: Sequence[str]) -> None:
        """quiet: paths that are polled, and not logged."""
        self._app, self._quiet = app, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), "-"  # where the client goes away before

        async def noticed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        except asyncio.CancelledError:  # a second Ctrl-C, which is no error
            if status == "-":
                error = ApiError(503, "The server is shutting down.")
                await (await respond(Request(scope), error))(scope, receive, noticed)
        finally:
            level = logging.DEBUG if scope["path"] in self._quiet else logging.INFO
            host = scope["client"][0] if scope.get("client") else "-"
            path = scope["path"].encode("ascii", "backslashreplace").decode()
            path = "".join(c if c.isprintable() else "?" for c in path)[:200]
            seconds = time.monotonic() - begun
            log.log(level, "%s %s %s %s %.3fs", host, scope["method"], path, status, seconds)
