"""/v1/messages and /v1/messages/count_tokens, as Anthropic's Messages API has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from infer.boundaries import shown
from infer.results import Chunk, Result
from infer.server.chat import arguments_of, reasoning_args
from infer.server.endpoint import Call
from infer.server.errors import ApiError, PromptTooLongError, anthropic_body
from infer.server.generation import Answers, Job, encode, unbilled
from infer.server.protocol import Request, convert, params_of
from infer.server.wire import EVENT_STREAM, event
from infer.text.chat import not_text
from infer.text.tools import ToolChoice as ToolChoiceOption
from infer.text.tools import ToolOptions

# Requests


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """A block of reasoning. signature: empty in our answers, since this server signs nothing."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    data: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """The name of a tool that a client's search has found. The tool is described to the model where
    this block stands: see `_Reader`."""

    tool_name: str


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
)
_KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(Block)}
# Types of blocks that are left out of old messages, with a warning: they tell of tools that
# Anthropic's server has run.
_HARMLESS = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result")


class Message(Struct):
    """A message of a chat. content: a text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(Struct):
    """A tool of a request. type: None or "custom" for functions; tools of other types run on
    Anthropic's servers. defer_loading: the tool is not described, and cannot be called, until a
    ToolReferenceBlock names it."""

    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] = {}
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool = False

    @property
    def runs_here(self) -> bool:
        return self.type in (None, "custom")


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct):
    type: str
    budget_tokens: int | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(Request, kw_only=True):
    labels: ClassVar = Request.labels | {"cache_control", "service_tier", "speed", "inference_geo"}
    off: ClassVar = {"container": (), "mcp_servers": ([],)}

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[dict[str, Any]] = ""
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool = False
    stop_sequences: Annotated[list[str], Meta(max_length=64)] = field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def read(call: Call[MessagesRequest]) -> Job:
    """Reads a request of /v1/messages as a job. Raises ApiError (400) for messages or parameters
    that are not understood."""
    request = call.request
    config = request.output_config or OutputConfig()
    params = params_of(
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        schema=None if config.format is None else config.format.schema,
    )
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    format = partial(MessagesFormat, thinks=thinks, max_tokens=params.max_tokens)
    return replace(_read_chat(call), params=params, format=format, stream=request.stream)


async def count_tokens(call: Call[CountTokensRequest]) -> None:
    call.service.model(call.request.model)
    job = await call.read(partial(_read_chat, call))
    try:
        (ids,) = await encode(call, job)
        count = len(ids)
    except PromptTooLongError as error:
        count = error.tokens
    await call.reply(TokensCount(count))


def _read_chat(call: Call[Any]) -> Job:
    """Reads a request's messages and tools as a job that generates nothing."""
    request: CountTokensRequest = call.request
    reader = _Reader(request.tools, call.warnings)
    system = reader.text(request.system)
    messages = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        reader.is_old = message is not request.messages[-1]
        messages += reader.messages(message)
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        call.warnings.append("thinking.budget_tokens is not obeyed.")
    effort = "none"
    if thinking is not None and thinking.type != "disabled":
        effort = (request.output_config or OutputConfig()).effort or "medium"
    args = reasoning_args("high" if effort in ("xhigh", "max") else effort)
    if messages and messages[-1]["role"] == "assistant":  # the answer is begun, and goes on
        args["continue_final_message"] = True
    tools, unlisted = _tools(request, reader.found, call.warnings)
    return Job([messages], "messages", None, MessagesFormat, args, tools, unlisted, counts=True)


class _Reader:
    """Turns a request's messages into messages in OpenAI's form, in which a tool's result is a
    message of its own. is_old: whether other messages follow. found: the names of the tools that
    blocks refer to. Raises ApiError (400) for blocks that are not understood.

    A tool is described where a block refers to it, as in Anthropic's API: the prompt up to there
    stays what it was, and is found in the cache.
    """

    def __init__(self, tools: Sequence[Tool], warnings: list[str]) -> None:
        self._tools = {tool.name: tool for tool in tools if tool.runs_here}
        self._warnings = warnings
        self.is_old = False
        self.found: set[str] = set()

    def messages(self, message: Message) -> Iterator[dict[str, Any]]:
        role, content = message.role, message.content
        if role == "system":  # a system message in the middle of a chat
            role, content = "user", unbilled(content)
            if message.content and not content:
                return
        if isinstance(content, str):
            yield {"role": role, "content": content}
            return
        own: dict[str, Any] = {"role": role}
        texts = []
        calls = []
        for block in self._blocks(content):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolReferenceBlock():
                    texts.append(self._described([block.tool_name]))
                case ThinkingBlock():
                    own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": _json(block.input)}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResultBlock():
                    text = self.text(block.content)
                    yield {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": f"Error: {text}" if block.is_error else text,
                    }
        if calls:
            own["tool_calls"] = calls
        if texts or not calls:
            own["content"] = "\n\n".join(texts)
        only_results = not texts and content and role == "user"
        if not only_results:
            yield own

    def text(self, content: str | list[dict[str, Any]]) -> str:
        """Returns the text of a message's content: the string itself, or the strings of the blocks,
        joined."""
        if isinstance(content, str):
            return content
        texts = []
        found = []
        for block in self._blocks(content):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolReferenceBlock():
                    found.append(block.tool_name)
                case _:
                    raise ApiError(400, not_text(block.__struct_config__.tag))
        return "\n\n".join(filter(None, [*texts, self._described(found)]))

    def _described(self, names: Sequence[str]) -> str:
        """Describes tools to the model, in the words in which Claude Code announces tools."""
        lines = []
        for name in names:
            if (tool := self._tools.get(name)) is None:
                self._warnings.append(
                    f"A tool_reference names {shown(name)}, which is not among the tools. It was "
                    "left out."
                )
                continue
            self.found.add(name)
            about = {"description": tool.description, "name": name, "parameters": tool.input_schema}
            lines.append(f"<function>{_json(about)}</function>")
        return "\n".join(["<functions>", *lines, "</functions>"]) if lines else ""

    def _blocks(self, given: list[dict[str, Any]]) -> Iterator[Block]:
        for block in given:
            name = block.get("type")
            if isinstance(name, str) and name in _KINDS:
                yield convert(block, _KINDS[name])
            elif self.is_old and _HARMLESS.fullmatch(str(name)):
                self._warnings.append(f"Content of the type {shown(name)} was left out.")
            else:
                raise ApiError(400, not_text(name))


def _tools(
    request: CountTokensRequest, found: Collection[str], warnings: list[str]
) -> tuple[ToolOptions, frozenset[str]]:
    """Returns the functions that an answer may call, and the names of the functions among them that
    messages describe. found: the names of the tools that messages refer to."""
    others = [tool.type for tool in request.tools if not tool.runs_here]
    warnings += [f"The tool {shown(kind)} is not here. It was left out." for kind in others]
    deferred = {tool.name for tool in request.tools if tool.runs_here and tool.defer_loading}
    if deferred and any(str(kind).startswith("tool_search_tool") for kind in others):
        warnings.append(
            "defer_loading is not obeyed, because the tool that would search is not here."
        )
        deferred = set()
    tools = []
    for tool in request.tools:
        if not tool.runs_here or (tool.name in deferred and tool.name not in found):
            continue
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
    options: ToolOptions = {"tools": tools or None}
    choice = request.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        choices: dict[str, ToolChoiceOption] = {"any": "required", "tool": named}
        options["tool_choice"] = choices.get(choice.type, choice.type)
        options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return options, frozenset(deferred & set(found))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# Responses


class TokensCount(Struct):
    input_tokens: int


class Usage(Struct):
    """How many tokens an answer took. input_tokens: tokens of the prompt that were not in the
    cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Answer(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class MessagesFormat:
    """Writes an answer as one message (a `generation.Format`). A stream of it goes block by
    block."""

    media_type = EVENT_STREAM
    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, answers: Answers, thinks: bool = False, max_tokens: int | None = None
    ) -> None:
        """thinks: whether the client asked for reasoning; else reasoning is left out. max_tokens:
        the limit of the answer that the client gave; the context may have had room for less."""
        self._answers, self._thinks, self._max_tokens = answers, thinks, max_tokens
        self._begun = False
        self._index = -1  # the index of the last block
        self._open = ""  # the type of the open block, empty if none is open

    def whole(self) -> Answer:
        (result,) = self._answers.results
        content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        if result.reasoning and self._thinks:
            content.append(ThinkingBlock(result.reasoning))
        if result.text or not result.tool_calls:
            content.append(TextBlock(result.text))
        content += [
            ToolUseBlock(each.id, each.name, arguments_of(each)) for each in result.tool_calls
        ]
        return self._message(content, *self._stop(result), _usage(result))

    def begin(self) -> bytes:
        return b""  # sent with the first piece: only then it is known how much the cache had

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        (result,) = self._answers.results
        usage = _usage(result)
        usage.output_tokens = 0
        return _event("message_start", message=self._message([], None, None, usage))

    def piece(self, index: int, chunk: Chunk) -> bytes:
        data = self._begin()
        if chunk.reasoning and self._thinks:
            data += self._in_block(ThinkingBlock(""))
            data += self._delta(type="thinking_delta", thinking=chunk.reasoning)
        if chunk.text:
            data += self._in_block(TextBlock(""))
            data += self._delta(type="text_delta", text=chunk.text)
        for call in chunk.tool_calls:
            if call.id is not None and call.name is not None:
                data += self._stop_block() + self._in_block(ToolUseBlock(call.id, call.name, {}))
            if call.arguments:
                data += self._delta(type="input_json_delta", partial_json=call.arguments)
        return data

    def end(self, index: int, result: Result) -> bytes:
        data = self._begin()
        if self._index < 0:
            data += self._in_block(TextBlock(""))
        reason, sequence = self._stop(result)
        return (
            data
            + self._stop_block()
            + _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(result),
            )
        )

    def finish(self) -> bytes:
        return _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return _event("error", **anthropic_body(error))

    def _in_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> bytes:
        """Returns the events that come before a piece of a block of this type: none if such a block
        is open, else the end of the open block and the beginning of a new one."""
        kind = str(block.__struct_config__.tag)
        if kind == self._open:
            return b""
        before = self._stop_block()
        self._index += 1
        self._open = kind
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._index)

    def _stop(self, result: Result) -> tuple[str, str | None]:
        """Returns the reason for which the answer ended, and the stop sequence that ended it, or
        None."""
        if result.finish_reason == "stop" and result.stop_string is not None:
            return "stop_sequence", result.stop_string
        if result.finish_reason == "length" and result.completion_tokens < (self._max_tokens or 0):
            return "model_context_window_exceeded", None
        names = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return names[result.finish_reason], None

    def _message(
        self,
        content: Sequence[TextBlock | ThinkingBlock | ToolUseBlock],
        reason: str | None,
        sequence: str | None,
        usage: Usage,
    ) -> Answer:
        return Answer(
            id=f"msg_{self._answers.id}",
            model=self._answers.model,
            content=list(content),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


def _event(name: str, /, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _usage(result: Result) -> Usage:
    cached = result.timings.reused_tokens
    return Usage(result.prompt_tokens - cached, result.completion_tokens, cached)
