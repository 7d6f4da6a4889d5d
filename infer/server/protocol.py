"""Requests and responses as types, in OpenAI's names. Nothing that a request asks for is dropped
in silence: what is not implemented is refused by its name, what is not known is warned of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import msgspec.inspect
from msgspec import UNSET, Meta, Struct, UnsetType

from infer.engine.constraint import lark_of
from infer.foreign import foreign, shown
from infer.kernels.errors import RequestError
from infer.kernels.state.step import MAX_LOGPROBS
from infer.sampling import CONSTRAINTS, SamplingParams
from infer.server.errors import ApiError
from infer.text.tools import ToolOptions

MAX_ANSWERS = 256  # of one request
MAX_INPUTS = 2048  # texts to embed, in one request

# Requests


class Request(Struct, kw_only=True):
    """labels: parameters that say who asks and for what, or how fast, and change no answer. off:
    parameters that are not implemented, and the values with which they ask for what is done
    anyway."""

    labels: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    )
    off: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in all events, as vLLM's
    include_obfuscation: bool | None = None  # padding, of which there is none


class JsonSchema(Struct, forbid_unknown_fields=True):
    """strict: answers are valid in either case."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """schema: as llama.cpp has it, also of a json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None

    @property
    def held_to(self) -> dict[str, Any] | None:
        """Returns the schema that an answer has to be valid under. Raises ApiError (400) where type
        and json_schema do not fit together."""
        named, given = self.json_schema, self.schema
        wrong = named is not None and (self.type != "json_schema" or given is not None)
        if named is not None:
            given = named.schema
        if (
            wrong
            or (self.type == "json_schema" and given is None)
            or (self.type == "text" and given)
        ):
            raise ApiError(
                400,
                "response_format has json_schema if its type is json_schema, and only then.",
                param="response_format",
            )
        return {"type": "object"} if given is None and self.type == "json_object" else given


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's. json: a schema, or its text. disable_fallback: to another library."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_fallback: bool = False


class GenerationRequest(Request, kw_only=True):
    """The parameters that chat and text completions share. Those that are None are left to the
    model. OpenAI has none from min_tokens to ignore_eos but stop, nor bad_words, allowed_token_ids,
    schema, regex, choices, grammar, cache_salt nor priority; structured_outputs and those that are
    guided are vLLM's names of schema, regex, choices and grammar, json_schema llama.cpp's. A
    grammar is Lark, or GBNF as llama.cpp has it."""

    labels: ClassVar = Request.labels | {"prediction", "service_tier", "store"}

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Annotated[list[str], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Annotated[list[str | list[int]], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[int] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    schema: dict[str, Any] | None = None
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options belong to stream: true.", param="stream_options")

    @property
    def constraint(self) -> tuple[str, str, Any] | None:
        """Returns the constraint of the answer: its name in this request, its kind ("schema",
        "regex", "choices" or "grammar") and its value; None without one. Raises ApiError (400) for
        two."""
        of_vllm = self.structured_outputs or StructuredOutputs()
        given = [
            ("response_format", "schema", self.response_format and self.response_format.held_to),
            ("schema", "schema", self.schema),
            ("json_schema", "schema", self.json_schema),
            ("guided_json", "schema", self.guided_json),
            ("structured_outputs", "schema", of_vllm.json),
            ("structured_outputs", "schema", {"type": "object"} if of_vllm.json_object else None),
            ("regex", "regex", self.regex),
            ("guided_regex", "regex", self.guided_regex),
            ("structured_outputs", "regex", of_vllm.regex),
            ("choices", "choices", self.choices),
            ("guided_choice", "choices", self.guided_choice),
            ("structured_outputs", "choices", of_vllm.choice),
            ("grammar", "grammar", self.grammar),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs", "grammar", of_vllm.grammar),
        ]
        found = [each for each in given if each[2] is not None]
        if len(found) > 1:
            (first, one, _), (second, other, _), *_ = found
            names = f"{first} and {second}" if first != second else f"{one} and {other} of {first}"
            raise ApiError(400, f"{names} were given: an answer can follow one.", param=first)
        return found[0] if found else None


class ChatRequest(GenerationRequest, kw_only=True):
    off: ClassVar = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool = False
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class EmbeddingRequest(Request, kw_only=True):
    """input: as a completion's prompt. dimensions: of an embedding."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class TokenizeRequest(Request, kw_only=True):
    """A request for the tokens of a text, or of a chat as its template writes it."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Request, kw_only=True):
    tokens: list[int]


RequestT = TypeVar("RequestT", bound=Request)
StructT = TypeVar("StructT", bound=Struct)


def parse(
    body: bytes | bytearray, kind: type[RequestT], *, strict: bool
) -> tuple[RequestT, list[str]]:
    """A request out of JSON, and what its sender should know. null counts as left out. strict: what
    is not known is refused. Raises ApiError (400)."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body must be a JSON object.")
    given = {name: value for name, value in decoded.items() if value is not None}
    warnings = []
    for name in sorted(given.keys() - set(kind.__struct_encode_fields__) - kind.labels):
        if name not in kind.off:
            message = f"There is no parameter {shown(name)} here."
            if strict:
                raise ApiError(400, message, param=name, code="unknown_parameter")
            warnings.append(f"{message} It was ignored.")
        elif given[name] not in kind.off[name]:
            raise ApiError(
                400,
                f"{name} is not supported with this value. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
        del given[name]
    return convert(given, kind), warnings


def convert(value: dict[str, Any], kind: type[StructT]) -> StructT:
    """A struct out of JSON, where what is null counts as left out. Raises ApiError (400)."""
    try:
        return msgspec.convert(_without_nulls(value, _type_info(kind)), kind, str_keys=True)
    except msgspec.ValidationError as error:
        text = str(error)
        names = re.findall(r"\$\.(\w+)", text) + re.findall(r"field `(\w+)`", text)
        param = ".".join(names) or None
        raise ApiError(400, f"The request is malformed: {text}.", param=param) from None


_type_info = lru_cache(msgspec.inspect.type_info)


def _without_nulls(value: Any, kind: msgspec.inspect.Type) -> Any:
    """A value without what is null in structs; schemas, arguments and messages that are no structs
    keep it."""
    if isinstance(kind, msgspec.inspect.UnionType):
        for each in kind.types:
            value = _without_nulls(value, each)
    elif isinstance(kind, msgspec.inspect.ListType) and isinstance(value, list):
        return [_without_nulls(each, kind.item_type) for each in value]
    elif isinstance(kind, msgspec.inspect.StructType) and isinstance(value, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        return {
            name: _without_nulls(each, types[name]) if name in types else each
            for name, each in value.items()
            if each is not None
        }
    return value


def sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Raises ApiError (400) for a value that is out of range."""
    given = {name: getattr(request, name, None) for name in _SAMPLING}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    given |= dict.fromkeys(CONSTRAINTS)
    if request.seed is not None:
        given["seed"] = request.seed % 2**64  # OpenAI's are signed
    constraint = request.constraint
    try:
        if constraint is not None:
            given |= _constrained(*constraint[1:])
        return params_of(**given)
    except RequestError as error:
        raise ApiError(400, str(error), param=named_in(str(error), request)) from None


def _constrained(kind: str, value: Any) -> dict[str, Any]:
    """The option of SamplingParams that holds answers to a `GenerationRequest.constraint`. Raises
    RequestError."""
    if kind == "schema" and isinstance(value, str):
        with foreign("schema is not valid JSON", RequestError):
            return {kind: json.loads(value)}
    if kind == "grammar" and "::=" in value:
        return {kind: lark_of(value)}
    return {kind: value}


def params_of(**given: Any) -> SamplingParams:
    """Returns sampling parameters without those that are None; -1 is no limit, where a parameter is
    one. Raises RequestError for a value that is out of range."""
    for name, unlimited in _UNLIMITED.items():
        if given.get(name) == -1:
            given[name] = unlimited
    return SamplingParams(**{name: each for name, each in given.items() if each is not None})


_SAMPLING = tuple(option.name for option in fields(SamplingParams))
_UNLIMITED = {"max_tokens": 2**32 - 1, "top_k": 0}


def named_in(message: str, request: Request) -> str | None:
    """The parameter that an error's message is about, as the request has it."""
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    if name in CONSTRAINTS and isinstance(request, GenerationRequest):
        return None if request.constraint is None else request.constraint[0]
    known = *_SAMPLING, *ToolOptions.__optional_keys__, *request.__struct_fields__
    return name if name in known else None


# Responses

ChoiceT = TypeVar("ChoiceT")


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Reply(Struct, Generic[ChoiceT], kw_only=True):
    """A whole answer, or an event of a stream. choices: of the endpoint's own kind."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """bytes: of a part of a character, which has no text of its own, that part."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call of a tool or, in a stream, a piece of one: see `infer.text.tools.ToolCallDelta`."""

    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Message(Struct):
    """Reasoning has two names, of which each client knows one."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionLogprobs(Struct):
    """Log probabilities of tokens; that of an echoed prompt's first token is None. text_offset: the
    place in the text where each token begins, in characters; of a part of a character, where that
    begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Embedding(Struct):
    """embedding: of numbers, or the bytes of float32, little-endian, in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct):
    prompt: str


class TokenizerInfo(Struct):
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Gpu(Struct):
    name: str
    type: str
    backend: str
    driver: str
    webgpu: str


class Model(Struct, kw_only=True):
    """A model, in the form of OpenAI and Anthropic. context: positions for a prompt and its answer.
    gpu: what computes it, where the model is loaded. parent: the model, where this is a LoRA
    adapter. root: the model, where this is another name of it."""

    id: str
    object: str = "model"
    type: str = "model"
    display_name: str = ""
    created: int
    created_at: str = ""
    lifecycle: str = "active"
    owned_by: str = "infer"
    parent: str | None = None
    root: str | UnsetType = UNSET
    context: int | UnsetType = msgspec.field(name="max_model_len", default=UNSET)
    gpu: Gpu | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.display_name, self.created_at = self.id, rfc3339(self.created)


def rfc3339(seconds: float) -> str:
    """A time since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Version(Struct):
    """version: of this program. versions: of what it runs on, too. commit: where it runs in a
    checkout."""

    version: str
    versions: dict[str, str]
    commit: str | None


class Health(Struct, omit_defaults=True):
    """status: "ok", "loading", "restarting", "draining", "stalled" or "failed". progress: of
    loading, from 0 to 1. webgpu: the library that runs the kernels, where a model is loaded."""

    status: str
    message: str = ""
    progress: float | None = None
    webgpu: str | None = None


class Models(Struct):
    """All of them: there is no next page."""

    data: list[Model]
    object: str = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    def __post_init__(self) -> None:
        if self.data:
            self.first_id, self.last_id = self.data[0].id, self.data[-1].id
