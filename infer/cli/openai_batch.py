"""A file of requests in the form of OpenAI's Batch API, answered by the server's own endpoints,
without a socket between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

from infer.boundaries import shown
from infer.calls import check_names
from infer.cli.answer_file import Answers, Progress, Written
from infer.cli.serve import needs_extra
from infer.cli.terminal import note
from infer.kernels.errors import RequestError
from infer.llm import LLM
from infer.sampling import SamplingParams

with needs_extra("A file in the form of OpenAI's Batch API"):
    from infer.server import protocol
    from infer.server.app import create_app
    from infer.server.engine import LLMClient
    from infer.server.errors import ApiError
    from infer.server.responses import ResponsesRequest
    from infer.server.service import ServerOptions, Service

_KINDS: Mapping[str, type[protocol.Request]] = {
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": protocol.EmbeddingRequest,
}
_QUEUE = 1 << 30  # answers that may wait: as many as the lines ask for


@dataclass(frozen=True)
class BatchLine:
    """A request of OpenAI's Batch API. id: its custom_id. model: the model's name, which is taken
    out of the body."""

    id: str
    url: str
    body: dict[str, Any]
    model: str | None


def batch_line(
    value: dict[str, Any], params: SamplingParams, template_args: Mapping[str, Any]
) -> BatchLine:
    """Read a line of a file. params and template_args: defaults for what the body leaves out.
    Raises RequestError."""
    check_names(value, ("custom_id", "method", "url", "body"), (), "")
    custom_id, url, body = (value.get(name) for name in ("custom_id", "url", "body"))
    if not (isinstance(custom_id, str) and custom_id):
        raise RequestError(f"custom_id must be text that is not empty, not {shown(custom_id)}.")
    if value.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, not {shown(value['method'])}.")
    if not isinstance(url, str) or url not in _KINDS:
        raise RequestError(f"url must be one of {', '.join(_KINDS)}, not {shown(url)}.")
    if not isinstance(body, dict):
        raise RequestError(f"body must be an object, not {shown(body)}.")
    if body.get("stream"):
        raise RequestError("stream must be false: an answer is written when it is whole.")
    own = {name: x for name, x in body.items() if x is not None and name != "model"}
    try:
        own |= _left_out(own, url, params, template_args)
        request, _ = protocol.parse(json.dumps(own).encode(), _KINDS[url], strict=False)
        if isinstance(request, protocol.GenerationRequest):
            protocol.sampling_params(request, max_tokens=request.max_tokens, logprobs=None)
    except ApiError as error:
        raise RequestError(error.message) from None
    model = body.get("model")
    return BatchLine(custom_id, url, own, None if model is None else str(model))


def _left_out(
    body: Mapping[str, Any], url: str, params: SamplingParams, template_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options of the command line that the body leaves out, under the endpoint's
    names. Raises RequestError for an option that the endpoint does not have."""
    kind, found = _KINDS[url], dict[str, Any]()
    usual = SamplingParams()
    given = {f.name: getattr(params, f.name) for f in fields(params)}
    given = {name: x for name, x in given.items() if x != getattr(usual, name)}
    if template_args:
        given["chat_template_kwargs"] = {**template_args, **body.get("chat_template_kwargs", {})}
    if kind is protocol.ChatRequest and "logprobs" in given:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    if kind is ResponsesRequest and "max_tokens" in given:
        given["max_output_tokens"] = given.pop("max_tokens")
    held = {"schema", "regex", "grammar"}
    if held & given.keys() and issubclass(kind, protocol.GenerationRequest):
        request, _ = protocol.parse(json.dumps(body).encode(), kind, strict=False)
        if request.constraint is not None:
            given = {name: x for name, x in given.items() if name not in held}
    if "max_completion_tokens" in body:
        given.pop("max_tokens", None)
    for name, x in given.items():
        if name not in kind.__struct_fields__:
            raise RequestError(f"{name} is not an option of {url}. Leave it out.")
        if name not in body or name == "chat_template_kwargs":
            found[name] = x
    return found


def answer_lines(
    llm: LLM, lines: list[BatchLine], answers: Answers, *, tell: Callable[[Progress], None]
) -> Progress:
    """Answers all lines by the server's endpoints, in this process. tell: called with the progress
    made so far."""
    names = {line.model for line in lines} - {None, llm.name}
    if names:
        note(f"note: {llm.name} answers what was asked of {', '.join(sorted(map(str, names)))}")
    return asyncio.run(_answer(llm, lines, answers, tell))


async def _answer(
    llm: LLM, lines: list[BatchLine], answers: Answers, tell: Callable[[Progress], None]
) -> Progress:
    app = create_app(Service(LLMClient(llm), ServerOptions(queue=_QUEUE)))
    left = [line for line in lines if line.id not in answers.done]
    progress = Progress(len(left))
    written = Written(answers, [line.id for line in left], progress)
    most = 2 * llm.engine.options.max_batch
    opened: dict[asyncio.Task[_Response], int] = {}
    told: set[str] = set()
    begun = 0
    try:
        while written.count < len(left):
            while begun < len(left) and len(opened) < most:
                line = left[begun]
                opened[asyncio.create_task(_post(app, line.url, line.body))] = begun
                begun += 1
            done, _ = await asyncio.wait(opened, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, response = opened.pop(task), task.result()
                if response.warning and response.warning not in told:
                    told.add(response.warning)
                    note(f"note: {response.warning}")
                usage = response.body.get("usage") or {}
                for ours, theirs in _COUNTS:
                    tokens = getattr(progress, ours) + (usage.get(theirs) or 0)
                    setattr(progress, ours, tokens)
                answer = _line(left[place].id, response)
                written.put(place, answer, failed=response.status != 200)
            tell(progress)
    finally:
        written.put_rest()
        for task in opened:
            task.cancel()
    answers.sort()
    return progress


# Chats and completions have these names, responses the others.
_COUNTS = (
    ("tokens", "completion_tokens"),
    ("tokens", "output_tokens"),
    ("prompt_tokens", "prompt_tokens"),
    ("prompt_tokens", "input_tokens"),
)


@dataclass(frozen=True)
class _Response:
    status: int
    body: dict[str, Any]
    warning: str | None


def _line(custom_id: str, response: _Response) -> dict[str, Any]:
    """Returns a line as OpenAI's Batch API writes it into its files of answers and of errors."""
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": {
            "status_code": response.status,
            "request_id": uuid4().hex,
            "body": response.body,
        },
        "error": None,
    }


async def _post(app: Callable[..., Awaitable[None]], url: str, body: dict[str, Any]) -> _Response:
    """Sends a POST request to an ASGI application and returns its response."""
    status, warning, data = 500, None, bytearray()
    request = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if not request:  # the client does not go away
            await asyncio.Event().wait()
        return {"type": "http.request", "body": request.pop(), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, warning
        if message["type"] == "http.response.start":
            status = message["status"]
            warning = dict(message["headers"]).get(b"x-infer-warning", b"").decode() or None
        else:
            data.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return _Response(status, json.loads(data), warning)
