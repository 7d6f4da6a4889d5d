"""The layers in front of all endpoints: names of the server, API keys, and a log line for each
request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import socket
import time
from collections.abc import Collection, Sequence
from ipaddress import ip_address, ip_network

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.boundaries import shown
from infer.server.errors import ApiError, respond

log = logging.getLogger(__name__)


# Networks in which no page of the public web lies (RFC 1918 and RFC 4193), and endings of names
# that the public DNS never has.
_PRIVATE = [
    ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
]
_HOST = re.compile(r"(\[[\w:.%]+]|[\w.-]*)(?::[0-9]*)?", re.ASCII)
_LOCAL = ".internal", ".local", ".localhost"


class Hosts:
    """Admits requests that call the server by one of its own names.

    A page of the web can have its name resolve to this machine (DNS rebinding). To a browser the
    server is then of the page's own origin, and the page reads what it asks for; but its requests
    still carry the page's name. Admitted are the names that Ollama admits since CVE-2024-28224.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        """names: names of the server beside this machine's own. None, or "*" among them: any
        name."""
        self._app = app
        self._names: frozenset[str] | None = None
        if names is not None and "*" not in names:
            own = socket.gethostname().lower()
            named = (each.lower().removesuffix(".") for each in names)
            self._names = frozenset({"localhost", own, own.partition(".")[0], *named})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is not None:
            await (await respond(Request(scope), error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        hosts = Headers(scope=scope).getlist("host")
        if not hosts and scope["http_version"] in ("0.9", "1.0"):  # no browser sends such a request
            return None
        called = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if called is None:
            return ApiError(400, "A request has one header Host, with a name and perhaps a port.")
        name = called[1].lower().removesuffix(".")
        if self._names is None or name in self._names or _is_local(name):
            return None
        return ApiError(
            403,
            f"This server is not called {shown(name)}. If that is a name of yours, start it with "
            f"--allowed-host {name}.",
            code="host_not_allowed",
        )


def _is_local(name: str) -> bool:
    """Whether a name or an address always means this machine or its network."""
    try:
        address = ip_address(name.strip("[]"))
    except ValueError:
        return name.endswith(_LOCAL)
    address = getattr(address, "ipv4_mapped", None) or address
    private = any(address in network for network in _PRIVATE)
    return private or address.is_loopback or address.is_unspecified


class Guard:
    """Admits requests with a valid API key. The key's hash becomes the salt of the cache, so that
    only requests with this key find what was cached for it."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], free: Sequence[str]) -> None:
        """free: paths that need no key."""
        self._app, self._free = app, free
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"] not in self._free:
            given = _given(Headers(scope=scope))
            # All keys are compared, so that the time tells nothing about them.
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
    """Returns the API key of a request, from the header of OpenAI's and Ollama's clients, or from
    the header of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


class AccessLog:
    """Logs for each request who asked for what, the status and the time it took, and for answers
    how many tokens they have and where the time went. Nothing of their content is logged."""

    def __init__(self, app: ASGIApp, quiet: Sequence[str]) -> None:
        """quiet: paths that are polled; they are logged at the level DEBUG."""
        self._app, self._quiet = app, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The status stays "-" if the client goes away before there is one.
        begun, status = time.monotonic(), "-"

        async def noticed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        except asyncio.CancelledError:  # after a second Ctrl-C, which is no error
            if status == "-":
                error = ApiError(503, "The server is shutting down.")
                await (await respond(Request(scope), error))(scope, receive, noticed)
        finally:
            level = logging.DEBUG if scope["path"] in self._quiet else logging.INFO
            host = scope["client"][0] if scope.get("client") else "-"
            path = scope["path"].encode("ascii", "backslashreplace").decode()
            path = "".join(c if c.isprintable() else "?" for c in path)[:200]
            seconds = time.monotonic() - begun
            told = scope.get("state", {}).get("told", "")
            line = host, scope["method"], path, status, seconds, told
            log.log(level, "%s %s %s %s %.3fs%s", *line)
