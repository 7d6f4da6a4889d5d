"""The application: the routes of all endpoints, and the layers in front of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
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
_FREE = "/", _HEALTH, _SCHEMA, _DOCS  # the page asks for a key where it needs one


def create_app(served: Served) -> Starlette:
    """The ASGI application."""
    # Now: the files may change while it runs.
    told = Version(__version__, versions(served.webgpu), commit())

    async def health(request: Request) -> Response:
        health = served.health()
        return JSONResponse(health, 200 if health.status == "ok" else 503)

    async def measured(request: Request) -> Response:
        stats = {}
        for each in served.services():
            with suppress(InferError):  # an engine that failed, which /health tells
                stats[each.name] = await each.engine.stats()
        return Response(served.metrics.text(stats), media_type=metrics.CONTENT_TYPE)

    async def models(request: Request) -> Response:
        return JSONResponse(served.models())

    async def model(request: Request) -> Response:
        listed = {each.id: each for each in served.models().data}
        return JSONResponse(listed[find(request.path_params["name"], [*listed])])

    async def tags(request: Request) -> Response:
        return JSONResponse(await ollama.tags(served))

    async def running(request: Request) -> Response:
        return JSONResponse(await ollama.running(served))

    async def ollama_version(request: Request) -> Response:
        return JSONResponse(ollama.Version(ollama.VERSION))

    async def version(request: Request) -> Response:
        return JSONResponse(told)

    async def tokenizer(request: Request) -> Response:
        return JSONResponse(await tokens.about(served))

    def get(path: str, summary: str, gives: Any, endpoint: Any) -> Operation:
        return Operation("GET", path, summary, endpoint, gives)

    def post(
        path: str,
        summary: str,
        takes: type[RequestT],
        gives: Any,
        run: Callable[[Call[RequestT]], Coroutine[Any, Any, None]],
        stream: str | None = None,
        without_model: Callable[[Served, RequestT], Coroutine[Any, Any, Any]] | None = None,
    ) -> Operation:
        endpoint = Endpoint(served, takes, run, without_model)
        return Operation("POST", path, summary, endpoint, gives, takes, stream)

    events, lines = "text/event-stream", "application/x-ndjson"
    operations = [
        post(
            "/v1/chat/completions",
            "Answer a chat, as OpenAI does.",
            ChatRequest,
            Reply[ChatChoice],
            generate(chat.read),
            events,
        ),
        post(
            "/v1/completions",
            "Continue texts, as OpenAI does.",
            CompletionRequest,
            Reply[CompletionChoice],
            generate(completions.read),
            events,
        ),
        post(
            "/v1/responses",
            "Answer a chat, as OpenAI's Responses API does.",
            responses.ResponsesRequest,
            responses.Response,
            generate(responses.read),
            events,
        ),
        post(
            "/v1/embeddings",
            "Embed texts, as OpenAI does.",
            EmbeddingRequest,
            Embeddings,
            embeddings.embed,
        ),
        get("/v1/models", "The models, and their adapters.", Models, models),
        get("/v1/models/{name:path}", "One of them.", Model, model),
        post(
            "/v1/messages",
            "Answer a chat, as Anthropic does.",
            anthropic.MessagesRequest,
            anthropic.Answer,
            generate(anthropic.read),
            events,
        ),
        post(
            "/v1/messages/count_tokens",
            "How many tokens a chat has, as Anthropic tells it.",
            anthropic.CountTokensRequest,
            anthropic.TokensCount,
            anthropic.count_tokens,
        ),
        post(
            "/api/chat",
            "Answer a chat, as Ollama does.",
            ollama.ChatRequest,
            ollama.Reply,
            ollama.chat,
            lines,
            ollama.unload,
        ),
        post(
            "/api/generate",
            "Answer a prompt, as Ollama does.",
            ollama.GenerateRequest,
            ollama.Reply,
            ollama.complete,
            lines,
            ollama.unload,
        ),
        post(
            "/api/embed",
            "Embed texts, as Ollama does.",
            ollama.EmbedRequest,
            ollama.EmbedReply,
            ollama.embed,
        ),
        post(
            "/api/embeddings",
            "Embed a text, as Ollama did before.",
            ollama.OldEmbedRequest,
            ollama.OldEmbedReply,
            ollama.embed_one,
        ),
        post(
            "/api/show",
            "What a model is, as Ollama tells it.",
            ollama.ShowRequest,
            ollama.Shown,
            ollama.show,
        ),
        get("/api/tags", "The models, as Ollama lists them.", ollama.Tags, tags),
        get("/api/ps", "Those that are loaded, as Ollama lists them.", ollama.Tags, running),
        get("/api/version", "The version of Ollama's API.", ollama.Version, ollama_version),
        post(
            "/tokenize", "The tokens of a text or a chat.", TokenizeRequest, Tokens, tokens.tokenize
        ),
        post("/detokenize", "The text of tokens.", DetokenizeRequest, Text, tokens.detokenize),
        post(
            "/v1/cache/save",
            "Save what the cache has of a prompt.",
            SaveCacheRequest,
            CachedTokens,
            caches.save,
        ),
        post(
            "/v1/cache/load",
            "Let prompts go on from what was saved.",
            LoadCacheRequest,
            CachedTokens,
            caches.load,
        ),
        get("/tokenizer_info", "The first model's tokenizer.", TokenizerInfo, tokenizer),
        get("/version", "Which code answers.", Version, version),
        get(_HEALTH, "Whether it can answer.", Health, health),
        get(_METRICS, "What it does and did, in Prometheus' format.", None, measured),
    ]
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


def _without_version(path: str) -> list[str]:
    """The other path of an endpoint of OpenAI's, for clients whose base URL has no /v1."""
    is_openais = path.startswith("/v1/") and not path.startswith("/v1/messages")
    return [path.removeprefix("/v1")] if is_openais else []


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """The CORS layer for web pages of these origins."""
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
