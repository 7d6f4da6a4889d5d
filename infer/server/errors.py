"""Errors as clients get them, in the form of the API that was asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from infer.kernels.errors import (
    ClosedError,
    InferError,
    NoChatTemplateError,
    RequestError,
    TokenizerError,
)
from infer.server.wire import JSONResponse

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An error that a client gets in place of an answer: the HTTP status and what the body tells.
    param: the parameter of the request that is wrong. code: a word by which programs tell errors
    apart."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": kind if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class PromptTooLongError(ApiError):
    """A prompt leaves no room for an answer. tokens: how many tokens the prompt has, or at least
    has if not is_whole. most: how many it may have."""

    def __init__(
        self, tokens: int, most: int, context: int, *, is_whole: bool, param: str | None
    ) -> None:
        """context: the most positions of a prompt and its answer."""
        count = f"{tokens}" if is_whole else f"at least {tokens}"
        super().__init__(
            400,
            f"The prompt has {count} tokens, and this model's maximum context length is {context} "
            f"tokens{', the answer included' if most < context else ''}. Shorten the prompt, or "
            "start the server with a larger --context.",
            param=param,
            code="context_length_exceeded",
        )
        self.tokens, self.most = tokens, most


def anthropic_body(error: ApiError) -> dict[str, Any]:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, PromptTooLongError):  # Anthropic's own words, which clients look for
        message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def api_error(error: Exception) -> ApiError:
    """Returns the error that a client gets for an exception. An exception that is not meant for
    clients is logged."""
    match error:
        case ApiError():
            return error
        case NoChatTemplateError():
            return ApiError(400, str(error), code="no_chat_template")
        case RequestError() | TokenizerError():
            # A template that refuses messages raises TokenizerError.
            return ApiError(400, str(error))
        case ClosedError():
            return ApiError(503, "The server is shutting down.")
        case ClientDisconnect():  # the client has gone away in the middle of its request
            return ApiError(400, "The request has no end.")
        case HTTPException(status_code=404):
            return ApiError(404, "There is no such endpoint. /docs lists those there are.")
        case HTTPException(status_code=405, headers=headers):
            allowed = ", ".join(sorted((headers or {}).get("Allow", "").split(", ")))
            return ApiError(405, f"This endpoint takes other methods: {allowed}.", headers=headers)
        case HTTPException(status_code=status):
            return ApiError(status, f"{error.detail}.", headers=error.headers)
    log.error("A request failed: %s", error, exc_info=not isinstance(error, InferError))
    if isinstance(error, InferError):
        return ApiError(500, str(error))
    return ApiError(500, "The server failed at this request. Its log says more.")


async def respond(request: Request, error: Exception) -> Response:
    """Returns the response to a request that failed."""
    told, path = api_error(error), request.url.path
    body = told.body
    if path.startswith("/v1/messages"):
        body = anthropic_body(told)
    elif path.startswith("/api/"):
        body = ollama_body(told)
    return JSONResponse(body, told.status, told.headers)
