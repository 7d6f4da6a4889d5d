"""Requests and responses as types, in OpenAI's names. A parameter is never dropped in silence: one
that is not implemented is refused by its name, and the sender is warned of one that is unknown."""

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

from infer.boundaries import foreign, shown
from infer.engine.constraint import lark_of
from infer.kernels.errors import RequestError
from infer.kernels.state.step import MAX_LOGPROBS
from infer.sampling import CONSTRAINTS, SamplingParams
from infer.server.errors import ApiError
from infer.text.tools import ToolOptions

MAX_ANSWERS = 256  # the most answers to one request
MAX_INPUTS = 2048  # the most texts to embed in one request

# Requests


class Request(Struct, kw_only=True):
    """The parameters that all requests share. labels: parameters that tell who asks, what for or
    how fast, and that change no answer. off: parameters that are not implemented, each with the
    values that ask for what is done anyway."""

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
    continuous_usage_stats: bool | None = None  # whether each event has the usage, as in vLLM
    include_obfuscation: bool | None = None  # asks for padding; nothing is padded here


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema for answers, in OpenAI's form. strict: answers are valid under the schema
    whether it is set or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of an answer. schema: llama.cpp's name for the JSON schema, which may also stand
    beside the type json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None

    @property
    def held_to(self) -> dict[str, Any] | None:
        """Returns the schema under which the answer must be valid; None for any text. Raises
        ApiError (400) if type and json_schema do not fit together."""
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
    """What an answer must be, in vLLM's form. json: a schema, or its text. disable_fallback:
    whether vLLM may take another library, which changes nothing here."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_fallback: bool = False


class GenerationRequest(Request, kw_only=True):
    """The parameters that chat and text completions share. A parameter that is None is left to the
    model. OpenAI's API has none of min_tokens, stop_token_ids, include_stop_str_in_output,
    ignore_eos, bad_words, allowed_token_ids, schema, regex, choices, grammar, cache_salt and
    priority. structured_outputs and the parameters that begin with guided_ are vLLM's names of
    schema, regex, choices and grammar; json_schema is llama.cpp's name of schema. A grammar is
    Lark, or GBNF as llama.cpp reads it."""

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
        """Returns the constraint of the answer: the name of the parameter that has it, its kind
        ("schema", "regex", "choices" or "grammar") and its value; None without one. Raises ApiError
        (400) if there are two."""
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
    """A request for embeddings. input: a text or token ids, or a list of either, as for the prompt
    of a completion. dimensions: how many numbers each embedding should have."""

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


class SaveCacheRequest(TokenizeRequest, kw_only=True):
    """A request to save the cached part of a text or a chat in a file. name: the file's name.
    cache_salt: as for GenerationRequest."""

    name: str
    cache_salt: str | None = None


class LoadCacheRequest(Request, kw_only=True):
    """A request to load a file of the cache that was saved under this name. cache_salt: requests
    with this salt find the loaded cache."""

    name: str
    cache_salt: str | None = None


class CachedTokens(Struct):
    """The answer to a request that saved or loaded a cache. tokens: how many tokens of the prompt
    the file has."""

    model: str
    name: str
    tokens: int


class DetokenizeRequest(Request, kw_only=True):
    tokens: list[int]


RequestT = TypeVar("RequestT", bound=Request)
StructT = TypeVar("StructT", bound=Struct)


def parse(
    body: bytes | bytearray, kind: type[RequestT], *, strict: bool
) -> tuple[RequestT, list[str]]:
    """Reads a request out of JSON. Returns it with warnings for its sender. A parameter that is
    null counts as left out. strict: an unknown parameter is an error, not a warning. Raises
    ApiError (400) for invalid JSON and for parameters that are unknown, not implemented or of the
    wrong type."""
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
    """Makes a struct out of a JSON object. A field that is null counts as left out. Raises ApiError
    (400) for values of the wrong type."""
    try:
        return msgspec.convert(_without_nulls(value, _type_info(kind)), kind, str_keys=True)
    except msgspec.ValidationError as error:
        text = str(error)
        names = re.findall(r"\$\.(\w+)", text) + re.findall(r"field `(\w+)`", text)
        param = ".".join(names) or None
        raise ApiError(400, f"The request is malformed: {text}.", param=param) from None


_type_info = lru_cache(msgspec.inspect.type_info)


def _without_nulls(value: Any, kind: msgspec.inspect.Type) -> Any:
    """Returns a JSON value without the null fields of structs. Dictionaries that are no structs,
    such as schemas, arguments and messages, keep their nulls."""
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
    """Returns the sampling parameters of a request. Raises ApiError (400) for a value that is out
    of range."""
    given = {name: getattr(request, name, None) for name in _SAMPLING}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    given |= dict.fromkeys(CONSTRAINTS)
    if request.seed is not None:
        # OpenAI's seeds are signed, and SamplingParams takes no negative ones.
        given["seed"] = request.seed % 2**64
    constraint = request.constraint
    try:
        if constraint is not None:
            given |= _constrained(*constraint[1:])
        return params_of(**given)
    except RequestError as error:
        raise ApiError(400, str(error), param=named_in(str(error), request)) from None


def _constrained(kind: str, value: Any) -> dict[str, Any]:
    """Returns the option of SamplingParams that makes answers follow a constraint of this kind.
    Raises RequestError for a schema that is not JSON or a grammar that cannot be read."""
    if kind == "schema" and isinstance(value, str):
        with foreign("schema is not valid JSON", RequestError):
            return {kind: json.loads(value)}
    if kind == "grammar" and "::=" in value:
        return {kind: lark_of(value)}
    return {kind: value}


def params_of(**given: Any) -> SamplingParams:
    """Returns sampling parameters from these values. A value of None is left to the model; -1 means
    no limit for max_tokens and top_k. Raises RequestError for a value that is out of range."""
    for name, unlimited in _UNLIMITED.items():
        if given.get(name) == -1:
            given[name] = unlimited
    return SamplingParams(**{name: each for name, each in given.items() if each is not None})


_SAMPLING = tuple(option.name for option in fields(SamplingParams))
_UNLIMITED = {"max_tokens": 2**32 - 1, "top_k": 0}


def named_in(message: str, request: Request) -> str | None:
    """Returns the name, in the request, of the parameter that an error's message is about; None if
    the message names none."""
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
    """A whole answer, or an event of a stream, in the form of OpenAI's completions. choices: the
    answers, each of the endpoint's own type."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token that could have come, with its log probability. bytes: the token's UTF-8 bytes; a
    token that is a part of a character has only these, and no text."""

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
    """A message of an answer. Reasoning stands under two names, because each client knows only one
    of them."""

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
    """The log probabilities of tokens. The first token of an echoed prompt has None. text_offset:
    the place in the text where each token begins, in characters; for a token that is a part of a
    character, the place where that character begins."""

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
    """An embedding of a text. embedding: a list of numbers, or float32 numbers in little-endian
    order as base64."""

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
    """A model, in a form that suits clients of OpenAI and of Anthropic. context: the most positions
    of a prompt and its answer. gpu: the GPU that computes it, if the model is loaded. parent: the
    model that a LoRA adapter belongs to. root: the model's first name, if this entry is another
    name of it."""

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
    """Returns a time in seconds since the epoch as text in UTC, in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Version(Struct):
    """The versions of the server's code. version: of infer. versions: of infer and the libraries
    that it runs on. commit: the git commit, if the server runs in a checkout."""

    version: str
    versions: dict[str, str]
    commit: str | None


class Health(Struct, omit_defaults=True):
    """The state of the server. status: "ok", "loading", "restarting", "draining", "stalled" or
    "failed". progress: the part of loading that is done, from 0 to 1. webgpu: the library that runs
    the kernels, if a model is loaded."""

    status: str
    message: str = ""
    progress: float | None = None
    webgpu: str | None = None


class Models(Struct):
    """All models in one list: there is never a next page."""

    data: list[Model]
    object: str = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    def __post_init__(self) -> None:
        if self.data:
            self.first_id, self.last_id = self.data[0].id, self.data[-1].id
