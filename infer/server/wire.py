"""Responses as they go over the wire: JSON, and server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEPALIVE = b": keepalive\n\n"  # a comment, which clients skip


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def event(data: object, name: str | None = None) -> bytes:
    """Returns the bytes of a server-sent event. data: what it holds as JSON. name: the event's
    name, None for an event without one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
