"""The application: the routes of all endpoints, and the layers in front of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from infer import __version__
from infer.kernels.errors import InferError
from infer.server import (
    anthropic,
    caches,
    chat,
    completions,
    embeddings,
    metrics,
    ollama,
    openapi,
    responses,
    tokens,
)
from infer.server.access import AccessLog, Guard, Hosts
from infer.server.endpoint import Call, Endpoint
from infer.server.errors import ApiError, respond
from infer.server.generation import generate
from infer.server.openapi import Operation
from infer.server.page import page
from infer.server.protocol import (
    CachedTokens,
    ChatChoice,
    ChatRequest,
    CompletionChoice,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Embeddings,
    Health,
    LoadCacheRequest,
    Model,
    Models,
    Reply,
    RequestT,
    SaveCacheRequest,
    Text,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
    Version,
)
from infer.server.service import Served, find
from infer.server.wire import JSONResponse
from infer.versions import commit, versions

_HEALTH, _METRICS, _SCHEMA, _DOCS = "/health", "/metrics", "/openapi.json", "/docs"
# Paths without a key; the page asks its user for one if the server needs it.
_FREE = "/", _HEALTH, _SCHEMA, _DOCS
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


def create_app(served: Served) -> Starlette:
    """Returns the ASGI application that serves the models."""
    table = _Table(served)
    operations = [*_openai(table), *_anthropic(table), *_ollama(table), *_own(table)]
    described = openapi.document(operations)

    async def schema(request: Request) -> Response:
        return JSONResponse(described)

    async def docs(request: Request) -> Response:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(openapi.page(described), headers=headers)

    options = served.options
    return Starlette(
        routes=[
            Route("/", page),
            *(
                Route(path, op.endpoint, methods=[op.method])
                for op in operations
                for path in (op.path, *_without_version(op.path))
            ),
            Route(_SCHEMA, schema),
            Route(_DOCS, docs),
        ],
        middleware=[
            Middleware(AccessLog, quiet=(_HEALTH, _METRICS)),
            Middleware(Hosts, names=options.allowed_hosts),
            *_cors(options.cors_origins),
            Middleware(Guard, api_keys=options.api_keys, free=_FREE),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, InferError, HTTPException, ClientDisconnect, Exception), respond
        ),
    )


@dataclass(frozen=True)
class _Table:
    """Makes the rows of the table of endpoints."""

    served: Served

    def get(self, path: str, summary: str, gives: Any, endpoint: Any) -> Operation:
        """Adds an endpoint that takes no body. gives: the type of its response."""
        return Operation("GET", path, summary, endpoint, gives)

    def post(
        self,
        path: str,
        summary: str,
        takes: type[RequestT],
        gives: Any,
        run: Callable[[Call[RequestT]], Coroutine[Any, Any, None]],
        stream: str | None = None,
        without_model: Callable[[Served, RequestT], Coroutine[Any, Any, Any]] | None = None,
    ) -> Operation:
        """Adds an endpoint that takes a body. takes, gives: the types of the request and the
        response. stream: the media type of a response that is sent in parts. without_model: answers
        requests that need no loaded model; it returns None for all others."""
        endpoint = Endpoint(self.served, takes, run, without_model)
        return Operation("POST", path, summary, endpoint, gives, takes, stream)


def _openai(table: _Table) -> list[Operation]:
    served = table.served

    async def models(request: Request) -> Response:
        return JSONResponse(served.models())

    async def model(request: Request) -> Response:
        listed = {each.id: each for each in served.models().data}
        return JSONResponse(listed[find(request.path_params["name"], [*listed])])

    return [
        table.post(
            "/v1/chat/completions",
            "Answer a chat, as OpenAI does.",
            ChatRequest,
            Reply[ChatChoice],
            generate(chat.read),
            _EVENTS,
        ),
        table.post(
            "/v1/completions",
            "Continue texts, as OpenAI does.",
            CompletionRequest,
            Reply[CompletionChoice],
            generate(completions.read),
            _EVENTS,
        ),
        table.post(
            "/v1/responses",
            "Answer a chat, as OpenAI's Responses API does.",
            responses.ResponsesRequest,
            responses.Response,
            generate(responses.read),
            _EVENTS,
        ),
        table.post(
            "/v1/embeddings",
            "Embed texts, as OpenAI does.",
            EmbeddingRequest,
            Embeddings,
            embeddings.embed,
        ),
        table.get("/v1/models", "The models, and their adapters.", Models, models),
        table.get("/v1/models/{name:path}", "One of them.", Model, model),
    ]


def _anthropic(table: _Table) -> list[Operation]:
    return [
        table.post(
            "/v1/messages",
            "Answer a chat, as Anthropic does.",
            anthropic.MessagesRequest,
            anthropic.Answer,
            generate(anthropic.read),
            _EVENTS,
        ),
        table.post(
            "/v1/messages/count_tokens",
            "How many tokens a chat has, as Anthropic tells it.",
            anthropic.CountTokensRequest,
            anthropic.TokensCount,
            anthropic.count_tokens,
        ),
    ]


def _ollama(table: _Table) -> list[Operation]:
    served = table.served

    async def tags(request: Request) -> Response:
        return JSONResponse(await ollama.tags(served))

    async def running(request: Request) -> Response:
        return JSONResponse(await ollama.running(served))

    async def version(request: Request) -> Response:
        return JSONResponse(ollama.Version(ollama.VERSION))

    return [
        table.post(
            "/api/chat",
            "Answer a chat, as Ollama does.",
            ollama.ChatRequest,
            ollama.Reply,
            ollama.chat,
            _LINES,
            ollama.unload,
        ),
        table.post(
            "/api/generate",
            "Answer a prompt, as Ollama does.",
            ollama.GenerateRequest,
            ollama.Reply,
            ollama.complete,
            _LINES,
            ollama.unload,
        ),
        table.post(
            "/api/embed",
            "Embed texts, as Ollama does.",
            ollama.EmbedRequest,
            ollama.EmbedReply,
            ollama.embed,
        ),
        table.post(
            "/api/embeddings",
            "Embed a text, as Ollama did before.",
            ollama.OldEmbedRequest,
            ollama.OldEmbedReply,
            ollama.embed_one,
        ),
        table.post(
            "/api/show",
            "What a model is, as Ollama tells it.",
            ollama.ShowRequest,
            ollama.Shown,
            ollama.show,
        ),
        table.get("/api/tags", "The models, as Ollama lists them.", ollama.Tags, tags),
        table.get("/api/ps", "Those that are loaded, as Ollama lists them.", ollama.Tags, running),
        table.get("/api/version", "The version of Ollama's API.", ollama.Version, version),
    ]


def _own(table: _Table) -> list[Operation]:
    served = table.served
    # Read now, because the files of a checkout may change while the server runs.
    told = Version(__version__, versions(served.webgpu), commit())

    async def health(request: Request) -> Response:
        health = served.health()
        return JSONResponse(health, 200 if health.status == "ok" else 503)

    async def measured(request: Request) -> Response:
        stats = {}
        for each in served.services():
            with suppress(InferError):  # a failed engine has no statistics; /health tells of it
                stats[each.name] = await each.engine.stats()
        return Response(served.metrics.text(stats), media_type=metrics.CONTENT_TYPE)

    async def version(request: Request) -> Response:
        return JSONResponse(told)

    async def tokenizer(request: Request) -> Response:
        return JSONResponse(await tokens.about(served))

    return [
        table.post(
            "/tokenize", "The tokens of a text or a chat.", TokenizeRequest, Tokens, tokens.tokenize
        ),
        table.post(
            "/detokenize", "The text of tokens.", DetokenizeRequest, Text, tokens.detokenize
        ),
        table.post(
            "/v1/cache/save",
            "Save what the cache has of a prompt.",
            SaveCacheRequest,
            CachedTokens,
            caches.save,
        ),
        table.post(
            "/v1/cache/load",
            "Let prompts go on from what was saved.",
            LoadCacheRequest,
            CachedTokens,
            caches.load,
        ),
        table.get("/tokenizer_info", "The first model's tokenizer.", TokenizerInfo, tokenizer),
        table.get("/version", "Which code answers.", Version, version),
        table.get(_HEALTH, "Whether it can answer.", Health, health),
        table.get(_METRICS, "What it does and did, in Prometheus' format.", None, measured),
    ]


def _without_version(path: str) -> list[str]:
    """Returns the path of an OpenAI endpoint without /v1, for clients whose base URL lacks it."""
    is_openais = path.startswith("/v1/") and not path.startswith("/v1/messages")
    return [path.removeprefix("/v1")] if is_openais else []


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Returns the layer that lets web pages of these origins send requests (CORS)."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Infer-Warning", "Retry-After"],
        )
    ]
