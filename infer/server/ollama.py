"""Ollama's API: /api/chat, /api/generate, /api/embed, /api/show, and what lists the models."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from infer.boundaries import shown
from infer.llm import Prompt
from infer.results import Chunk, Result
from infer.sampling import SamplingParams
from infer.server.chat import arguments_of, logprobs_of, reasoning_args
from infer.server.embeddings import vectors_of
from infer.server.endpoint import Call
from infer.server.engine import EngineClient
from infer.server.errors import ApiError, ollama_body
from infer.server.generation import Answers, Job, generate
from infer.server.protocol import Request, TokenLogprob, params_of, rfc3339
from infer.server.service import Served
from infer.text.answer import answer_style
from infer.text.chat import not_text
from infer.text.tools import ToolOptions

VERSION = "0.12.11"  # the version of Ollama whose API this is: clients refuse older ones

# Requests


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]


class ToolCall(Struct):
    function: FunctionCall


class Message(Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    tool_name: str | UnsetType = UNSET
    images: list[str] | UnsetType = UNSET


class ModelRequest(Request, kw_only=True):
    """A request that names a model. keep_alive: 0 unloads the model after the answer; all other
    values are ignored, because the server decides how long it keeps a model."""

    labels: ClassVar = Request.labels | {"truncate", "verbose"}

    keep_alive: float | str | None = None

    @property
    def unloads(self) -> bool:
        return bool(re.fullmatch(r"0+(\.0+)?(ns|us|µs|ms|s|m|h)?", str(self.keep_alive)))


class ShowRequest(ModelRequest, kw_only=True):
    name: str | None = None

    def __post_init__(self) -> None:
        self.model = self.model or self.name


class AnswerRequest(ModelRequest, kw_only=True):
    """The parameters that requests for answers share. format: "json" or a JSON schema. options:
    sampling parameters, and settings by which Ollama runs models. think: whether the model thinks,
    or how much."""

    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class ChatRequest(AnswerRequest, kw_only=True):
    messages: list[Message] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


class GenerateRequest(AnswerRequest, kw_only=True):
    """A request of /api/generate. raw: the prompt is a text to be continued, and not a message of a
    user."""

    off: ClassVar = {"context": ([],), "template": ("",)}

    prompt: str = ""
    images: list[str] = msgspec.field(default_factory=list)
    suffix: str = ""
    system: str = ""
    raw: bool = False


class EmbedRequest(ModelRequest, kw_only=True):
    """A request of /api/embed. options: clients send all options that they know; none of them
    changes an embedding."""

    labels: ClassVar = ModelRequest.labels | {"options"}

    input: str | list[str]
    dimensions: int | None = None


class OldEmbedRequest(ModelRequest, kw_only=True):
    labels: ClassVar = ModelRequest.labels | {"options"}

    prompt: str = ""


async def chat(call: Call[ChatRequest]) -> None:
    if call.request.messages:
        await _leaving(generate(_read_chat), call)
    else:
        name, _ = call.service.model(call.request.model)
        await call.reply(_nothing(call.request, name, "load"))


async def complete(call: Call[GenerateRequest]) -> None:
    if call.request.prompt:
        await _leaving(generate(_read_prompt), call)
    else:
        name, _ = call.service.model(call.request.model)
        await call.reply(_nothing(call.request, name, "load"))


async def unload(served: Served, request: ChatRequest | GenerateRequest) -> Reply | None:
    """Returns the answer to a request that only unloads the model, which need not be loaded for it;
    None for any other request."""
    asks = request.messages if isinstance(request, ChatRequest) else request.prompt
    if asks or not request.unloads:
        return None
    return _nothing(request, await served.unload(request.model), "unload")


def _nothing(request: ChatRequest | GenerateRequest, model: str, reason: str) -> Reply:
    """Returns the answer to a request without a prompt: with such requests, clients of Ollama load
    or unload a model."""
    reply = Reply(model=model, created_at=_now(), done=True, done_reason=reason)
    if isinstance(request, ChatRequest):
        reply.message = Message(role="assistant", content="")
    else:
        reply.response = ""
    return reply


async def _leaving(run: Callable[[Call[Any]], Coroutine[Any, Any, None]], call: Call[Any]) -> None:
    """Runs the work of a request, after it has asked for the model to be unloaded once nobody uses
    it, if the request says so."""
    if call.request.unloads:
        try:
            await call.served.unload(call.request.model)
        except ApiError as error:
            call.warnings.append(error.message)
    await run(call)


def _read_chat(call: Call[ChatRequest]) -> Job:
    request = call.request
    format = partial(OllamaFormat, is_chat=True)
    args = _template_args(request)
    tools: ToolOptions = {"tools": request.tools}
    params = _params(call, request)
    messages = _messages(request.messages)
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:  # the answer is begun, and goes on
        args["continue_final_message"] = True
    return Job([messages], "messages", params, format, args, tools, stream=request.stream)


def _read_prompt(call: Call[GenerateRequest]) -> Job:
    request = call.request
    if request.images:
        raise ApiError(400, not_text("image"))
    prompt: Prompt = request.prompt
    chats = not (request.raw or request.suffix) and bool(call.service.engine.template)
    if chats:
        system = [{"role": "system", "content": request.system}] if request.system else []
        prompt = [*system, {"role": "user", "content": request.prompt}]
    elif request.system:
        raise ApiError(400, "There is no system prompt where the prompt is text to be continued.")
    return Job(
        [prompt],
        "prompt",
        _params(call, request),
        partial(OllamaFormat, is_chat=False),
        _template_args(request) if chats else {},
        {} if chats else None,
        stream=request.stream,
        suffix=request.suffix or None,
    )


_OWN = ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature")
_SAMPLING = {name: name for name in (*_OWN, "top_k", "top_p")}
_SAMPLING["repeat_penalty"] = "repetition_penalty"
# Options by which Ollama fits a model to a machine. They change no answer.
_MACHINE = {
    "f16_kv",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
}


def _params(call: Call[Any], request: AnswerRequest) -> SamplingParams:
    given = {name: value for name, value in (request.options or {}).items() if value is not None}
    for name in sorted(given.keys() - _SAMPLING.keys() - _MACHINE - {"num_predict", "num_ctx"}):
        message = f"There is no option {shown(name)} here."
        if call.service.options.strict:
            raise ApiError(400, message)
        call.warnings.append(f"{message} It was ignored.")
    context, asked = call.service.engine.context, given.get("num_ctx", 0)
    if not isinstance(asked, int) or asked > context:
        call.warnings.append(f"The context has {context} positions (infer serve --context).")
    options = {own: given[name] for name, own in _SAMPLING.items() if name in given}
    if isinstance(options.get("seed"), int):
        options["seed"] %= 2**64
    if (limit := given.get("num_predict")) is not None:
        # -2 asks for as many tokens as the context has room for.
        options["max_tokens"] = -1 if limit == -2 else limit
    if request.format == "json":
        options["schema"] = {"type": "object"}
    elif isinstance(request.format, dict):
        options["schema"] = request.format
    elif request.format:
        raise ApiError(400, f'format is "json" or a JSON schema, not {shown(request.format)}.')
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return params_of(**options, logprobs=logprobs)


def _template_args(request: AnswerRequest) -> dict[str, Any]:
    think = request.think
    if think is True:
        return reasoning_args("medium")
    return reasoning_args("none" if think is False else think)


def _messages(given: list[Message]) -> list[dict[str, Any]]:
    """Returns the messages in OpenAI's form, in which calls have ids, and each result names the id
    of its call."""
    messages = []
    calls = 0
    results = 0
    for message in given:
        if message.images:
            raise ApiError(400, not_text("image"))
        own: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            own["reasoning_content"] = message.thinking
        if message.tool_calls:
            own["tool_calls"] = [
                {
                    "id": f"call{calls + i:05}",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for i, call in enumerate(message.tool_calls)
            ]
            results, calls = calls, calls + len(message.tool_calls)
        if message.role == "tool":
            own["tool_call_id"] = f"call{results:05}"
            results += 1
            if message.tool_name:
                own["name"] = message.tool_name
        messages.append(own)
    return messages


# Responses


class Reply(Struct, kw_only=True):
    """A whole answer, or a line of a stream. message: for chats. response, thinking: for other
    prompts. Durations are in nanoseconds."""

    model: str
    created_at: str
    message: Message | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaFormat:
    """Writes an answer as one object, or as a stream of lines of JSON (a `generation.Format`).
    Calls of functions are only given whole."""

    media_type, keepalive = "application/x-ndjson", b""

    def __init__(self, answers: Answers, *, is_chat: bool) -> None:
        self._answers, self._is_chat = answers, is_chat

    def whole(self) -> Reply:
        (result,) = self._answers.results
        reply = self._reply(result.text, result.reasoning, result)
        if result.logprobs is not None:
            reply.logprobs = logprobs_of(*result.logprobs).content
        return self._ended(reply, result)

    def begin(self) -> bytes:
        return b""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        if not (chunk.text or chunk.reasoning or chunk.logprob):
            return b""
        reply = self._reply(chunk.text, chunk.reasoning)
        if chunk.logprob is not None:
            reply.logprobs = logprobs_of(chunk.logprob).content
        return _line(reply)

    def end(self, index: int, result: Result) -> bytes:
        calls = _line(self._reply("", "", result)) if result.tool_calls else b""
        return calls + _line(self._ended(self._reply("", ""), result))

    def finish(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _line(ollama_body(error))

    def _reply(self, text: str, reasoning: str, calls_of: Result | None = None) -> Reply:
        reply = Reply(model=self._answers.model, created_at=_now(), done=False)
        if not self._is_chat:
            reply.response = text
            reply.thinking = reasoning or UNSET
            return reply
        reply.message = Message(role="assistant", content=text, thinking=reasoning or UNSET)
        if calls_of is not None and calls_of.tool_calls:
            reply.message.tool_calls = [
                ToolCall(FunctionCall(name=call.name, arguments=arguments_of(call)))
                for call in calls_of.tool_calls
            ]
        return reply

    def _ended(self, reply: Reply, result: Result) -> Reply:
        timings = result.timings
        reply.done = True
        reply.done_reason = "length" if result.finish_reason == "length" else "stop"
        seconds = time.time() - self._answers.created
        reply.total_duration, reply.load_duration = _nanoseconds(seconds), 0
        reply.prompt_eval_count = result.prompt_tokens
        reply.prompt_eval_duration = _nanoseconds(timings.prefill_seconds)
        reply.eval_count = result.completion_tokens
        reply.eval_duration = _nanoseconds(timings.decode_seconds)
        return reply


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _now() -> str:
    return rfc3339(time.time())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class EmbedReply(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OldEmbedReply(Struct):
    embedding: list[float]


async def embed_one(call: Call[OldEmbedRequest]) -> None:
    async def run(call: Call[OldEmbedRequest]) -> None:
        (vector,), _ = await vectors_of(call, [call.request.prompt], None)
        await call.reply(OldEmbedReply(vector.tolist()))

    await _leaving(run, call)


async def embed(call: Call[EmbedRequest]) -> None:
    await _leaving(_embed, call)


async def _embed(call: Call[EmbedRequest]) -> None:
    request, begun = call.request, time.perf_counter()
    inputs: list[Prompt] = [request.input] if isinstance(request.input, str) else [*request.input]
    vectors, tokens = await vectors_of(call, inputs, request.dimensions)
    await call.reply(
        EmbedReply(
            model=call.service.model(request.model)[0],
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=_nanoseconds(time.perf_counter() - begun),
            prompt_eval_count=tokens,
        )
    )


class Details(Struct):
    """Properties of a model. family: its model_type. A property that is not known is empty, such as
    those of a model that is not loaded."""

    family: str = ""
    families: list[str] = []
    format: str = ""
    parent_model: str = ""
    parameter_size: str = ""
    quantization_level: str = ""


class Listed(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class Tags(Struct):
    models: list[Listed]


class Shown(Struct, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(Struct):
    version: str


async def tags(served: Served) -> Tags:
    """Lists all models, whether they are loaded or not."""
    loaded = {service.name: service.engine for service in served.services()}
    listed = []
    for model in served.models().data:
        engine = loaded.get(model.parent or model.root or model.id)
        listed.append(await _listed(model.id, model.created, engine))
    return Tags(listed)


async def running(served: Served) -> Tags:
    """Lists the models that are loaded."""
    listed = []
    for service in served.services():
        one = await _listed(service.name, service.created, service.engine)
        one.size_vram, one.context_length = one.size, service.engine.context
        one.expires_at = "9999-12-31T23:59:59Z"  # the model stays until its memory is needed
        listed.append(one)
    return Tags(listed)


async def _listed(name: str, created: int, engine: EngineClient | None) -> Listed:
    return Listed(
        name=name,
        model=name,
        modified_at=rfc3339(created),
        size=0 if engine is None else (await engine.stats()).memory.allocated,
        digest=hashlib.sha256(name.encode()).hexdigest(),
        details=_details(engine),
    )


def _details(engine: EngineClient | None) -> Details:
    if engine is None:
        return Details()
    kind, summary = engine.model_type, engine.summary
    count = _in_letters(summary.parameters)
    return Details(kind, [kind], summary.format, "", count, summary.type)


def _in_letters(count: int) -> str:
    """Returns a number of parameters in Ollama's form: 8.0B is written as 8B, 268098176 as
    268.10M."""
    for letter, unit, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= unit:
            return f"{count / unit:.{digits if count % unit else 0}f}{letter}"
    return str(count)


async def show(call: Call[ShowRequest]) -> None:
    service = call.service
    service.model(call.request.model)
    engine = service.engine
    able = {
        "completion": True,
        "embedding": engine.is_embedder,
        "insert": engine.infill is not None,
        "thinking": bool(engine.template) and answer_style(engine.template).thinks,
        "tools": bool(engine.template),  # a template that knows no tools gets them in a message
    }
    info = {
        "general.architecture": engine.model_type,
        "general.parameter_count": engine.summary.parameters,
        f"{engine.model_type}.context_length": engine.context,
        f"{engine.model_type}.embedding_length": engine.embedding_size,
    }
    await call.reply(
        Shown(
            template=engine.template,
            details=_details(engine),
            model_info=info,
            capabilities=[name for name, can in able.items() if can],
            modified_at=rfc3339(service.created),
        )
    )
