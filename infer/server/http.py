"""Limits of a connection, in memory and in time, whatever its client does."""

from __future__ import annotations

import asyncio
import sys
from asyncio import TimerHandle
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from infer.server.errors import ApiError

HEAD_BYTES = 64 << 10  # the most bytes of a request's headers, and of its trailers
REQUEST_SECONDS = 60.0  # the most time from a request's first byte to its last
WRITE_SECONDS = 60.0  # the most time that a client may leave unread what is written to it
_HEAD_TOO_LARGE = f"The head of a request has at most {HEAD_BYTES} bytes."
IDLE_SECONDS = 65  # between two requests: longer than load balancers keep connections, mostly 60
# Connections that are accepted at once, and that may wait to be accepted.
ACCEPTED, BACKLOG = 64, 2048
# The most connections; open files for all else, such as connections that are being closed.
_MOST, _RESERVED = 8192, 2 * ACCEPTED + 128


def most_connections() -> int:
    """Returns the most connections that the limit of open files allows."""
    if sys.platform == "win32":
        return _MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return _MOST if unlimited else max(1, min(_MOST, soft - _RESERVED))


class State(ServerState):
    """The state that all connections of a server share. waiting: connections whose next request has
    not arrived completely, the one that has waited longest first."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[Connection, None] = {}


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, with limits. A client that exceeds a limit is told so if possible,
    and cut off. If there are too many connections, the one whose request has been waited for
    longest is closed."""

    most = most_connections()

    def __init__(self, config: Config, server_state: State, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self._waiting = server_state.waiting
        self._head = 0  # bytes since the end of a head, or since the last bytes of a body
        self._fields = 0  # bytes of the request's URL, headers and trailers
        self._is_whole = True  # whether no request has arrived in part
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            longest = next(iter(self._waiting), None)
            (longest or self)._displace()
            if longest is None:  # every connection's request is being answered
                return
        self._waiting[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._waiting.pop(self, None)
        self._unset_keepalive_if_required()
        self._stop_reading()
        self._stop_writing()

    def _displace(self) -> None:
        self._waiting.pop(self, None)
        if self._is_whole and self.cycle is not None:  # between two requests
            self.timeout_keep_alive_handler()
        else:
            self._refuse(503, "The server has too many connections.")

    # Reading

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_whole, self._head = False, self._head + len(data)
        super().data_received(data)
        if self._head > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, _HEAD_TOO_LARGE)
        if self._is_whole or self.transport.is_closing():
            self._stop_reading()
        elif self._reading is None:
            self._reading = self.loop.call_later(REQUEST_SECONDS, self._late)

    def on_message_begin(self) -> None:
        self._fields = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, nbytes: int) -> None:
        """Counts bytes of a request's head, and refuses a head that is too large. The head is
        counted by its fields, because it may arrive in one piece with all that follows."""
        self._fields += nbytes
        if self._fields > HEAD_BYTES:
            self._refuse(431, _HEAD_TOO_LARGE)
            raise ValueError(_HEAD_TOO_LARGE)  # so that the parser reads no further

    def on_headers_complete(self) -> None:
        self._head = 0
        super().on_headers_complete()
        if self.scope["http_version"] in ("0.9", "1.0"):
            _send_unchunked(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head, self._is_whole = 0, True
        self._waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The connection waits from here on, unless another request has arrived.
        if self.cycle.response_complete and not self.transport.is_closing():
            self._waiting[self] = None

    def _late(self) -> None:
        cycle = self.cycle
        answers = cycle is not None and not cycle.response_complete
        if self.flow.read_paused or (answers and not cycle.more_body):
            # The client is not late: the server reads nothing now, or answers the request before.
            self._reading = self.loop.call_later(REQUEST_SECONDS, self._late)
        else:
            self._refuse(408, f"The request has not come within {REQUEST_SECONDS:.0f} seconds.")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # Writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()  # uvicorn closes the connection once all is written

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # the request was refused already
            self._refuse(400, "This is not HTTP/1.1.")

    def _refuse(self, status: int, message: str) -> None:
        """Refuses a request, before it has arrived or in the middle of it. In the middle of a
        response nothing can be told: the connection is cut."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        body = msgspec.json.encode(ApiError(status, message).body)
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Has a response sent without chunks, for HTTP/1.0 and older, which have none: a body of
    unknown length ends there when the connection does."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]
