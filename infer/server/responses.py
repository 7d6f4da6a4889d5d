"""/v1/responses, as OpenAI has it, without what it keeps: each request brings the whole input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from infer.boundaries import shown
from infer.kernels.state.step import MAX_LOGPROBS
from infer.results import Chunk, Result, TokenLogprob
from infer.server.chat import logprobs_of, reasoning_args
from infer.server.custom_tools import (
    InputFormat,
    InputReader,
    arguments_of,
    function_of,
    input_of,
)
from infer.server.endpoint import Call
from infer.server.errors import ApiError
from infer.server.generation import Answers, Job, unbilled
from infer.server.protocol import Request, params_of
from infer.server.protocol import TokenLogprob as WrittenLogprob
from infer.server.wire import EVENT_STREAM, KEEPALIVE, event
from infer.text.chat import not_text
from infer.text.tools import ToolChoice, ToolOptions

_CALLED = ("function", "custom")  # types of tools that a model can call
# Types of items that Codex sends: items that bring tools, which can be called from there on; items
# with settings or notes of the client; and summaries, which only OpenAI's servers can read.
_BRINGS_TOOLS = ("additional_tools", "tool_search_output")
_SAYS_NOTHING = ("compaction_trigger", "configuration_update", "ghost_snapshot")
_SUMMARIES = ("compaction", "compaction_summary", "context_compaction")

# Requests


class Part(Struct):
    """A part of the content of a message or of reasoning. type: input_text, output_text,
    summary_text or reasoning_text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """An item of a request's input. type: message, function_call, custom_tool_call, the output of
    either, or reasoning; Codex also sends agent_message, additional_tools and local_shell_call.
    namespace: the namespace of the function that is called."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: Any = None
    output: str | list[Part] | None = None
    summary: list[Part] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)


class Tool(Struct, kw_only=True, omit_defaults=True):
    """A tool of a request. type: function, custom, or namespace (a group of tools, which Codex
    sends); tools of all other types run on OpenAI's servers or belong to one client. format: the
    form of a custom tool's input."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: list[Tool] = field(default_factory=list)


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


TEXT = TextFormat(type="text")


class TextConfig(Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Request, kw_only=True):
    # max_tool_calls counts calls of tools that run on OpenAI's servers.
    labels: ClassVar = Request.labels | {
        "client_metadata",
        "max_tool_calls",
        "service_tier",
        "stream_options",
    }
    off: ClassVar = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "image": (),
        "moderation": (),
        "prompt": (),
    }

    input: str | list[InputItem]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: str = "disabled"
    store: bool = False
    previous_response_id: str | None = None
    conversation: Any = None
    include: list[str] = field(default_factory=list)
    # This parameter is vLLM's: OpenAI has none.
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0


def read(call: Call[ResponsesRequest]) -> Job:
    """Reads a request of /v1/responses as a job. Raises ApiError (400) for an input or a parameter
    that is not understood."""
    request = call.request
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise ApiError(
                400,
                f"{name} is not supported: this server keeps no responses. Send the whole input.",
                param=name,
                code="unsupported_parameter",
            )
    if request.store:
        call.warnings.append("The response was not stored.")
    if request.truncation != "disabled":
        call.warnings.append("The input is not truncated.")
    text = request.text or TextConfig()
    if text.verbosity is not None:
        call.warnings.append("text.verbosity is not obeyed.")
    logprobs = request.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in request.include:
        logprobs = 0
    params = params_of(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=logprobs,
        schema=_schema(text.format or TEXT),
    )
    return Job(
        [_messages(request, call.warnings)],
        "input",
        params,
        partial(ResponsesFormat, request),
        reasoning_args((request.reasoning or Reasoning()).effort),
        _tools(request, call.warnings),
        stream=request.stream,
        begins_first=True,
    )


def _schema(format: TextFormat) -> dict[str, Any] | None:
    if format.type == "json_schema" and format.schema is None:
        raise ApiError(400, "text.format needs a schema.", param="text.format.schema")
    return {"type": "object"} if format.type == "json_object" else format.schema


def _tools(request: ResponsesRequest, warnings: list[str]) -> ToolOptions:
    """Returns the request's tools, and the choice among them, in the form of chat completions.
    Tools that cannot run here are left out, each with a warning."""
    choice = request.tool_choice
    allowed: set[str] | None = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools", [])
        allowed = {
            _flat(each.get("namespace"), each.get("name"))
            for each in tools
            if isinstance(each, dict)
        }
        choice = choice.get("mode", "auto")
    named: ToolChoice = choice
    if isinstance(choice, dict):
        kind = "function" if choice.get("type") == "custom" else choice.get("type")
        name = _flat(choice.get("namespace"), choice.get("name"))
        named = {"type": kind, "function": {"name": name}}
    functions = []
    for name, (_, tool) in _by_name(request).items():
        if allowed is None or name in allowed:
            functions.append({"type": "function", "function": _function(name, tool)})
    warnings += [
        f"Tools of the type {shown(tool.type)} are not here. It was left out."
        for _, tool in _with_namespaces([*request.tools, *_brought(request)])
        if tool.type not in _CALLED
    ]
    warnings += map(_free, _names_of_free(request))
    return {
        "tools": functions,
        "tool_choice": named,
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def _by_name(request: ResponsesRequest) -> dict[str, tuple[str | None, Tool]]:
    """Returns the tools that a model may call, each with its namespace (None without one), by the
    names under which the model knows them. Raises ApiError (400) if two tools have one name; items
    of the input may bring a tool again."""
    found: dict[str, tuple[str | None, Tool]] = {}
    for namespace, tool in _with_namespaces(request.tools):
        name = _flat(namespace, tool.name)
        if tool.type not in _CALLED:
            continue
        if name in found:
            raise ApiError(400, f"There are two tools with the name {shown(name)}.", param="tools")
        found[name] = namespace, tool
    for namespace, tool in _with_namespaces(_brought(request)):
        if tool.type in _CALLED:
            found.setdefault(_flat(namespace, tool.name), (namespace, tool))
    return found


def _brought(request: ResponsesRequest) -> list[Tool]:
    """Returns the tools that items of the input bring."""
    items = [] if isinstance(request.input, str) else request.input
    return [tool for item in items if item.type in _BRINGS_TOOLS for tool in item.tools]


def _function(name: str, tool: Tool) -> dict[str, Any]:
    """Describes a tool as a function in the form of chat completions, under the name by which the
    model knows it."""
    if tool.type == "custom":
        return function_of(name, tool.description, tool.format or InputFormat())
    function: dict[str, Any] = msgspec.to_builtins(tool) | {"name": name}
    del function["type"]
    if encrypted := _encrypted(tool):
        properties = dict(function["parameters"]["properties"])
        for each in encrypted:
            properties[each] = {k: v for k, v in properties[each].items() if k != "encrypted"}
        function["parameters"] = function["parameters"] | {"properties": properties}
    return function


def _encrypted(tool: Tool) -> list[str]:
    """Returns the names of a function's arguments that Codex expects to be encrypted, so that only
    agents can read them."""
    properties = (tool.parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return []
    return [k for k, v in properties.items() if isinstance(v, dict) and "encrypted" in v]


def _names_of_free(request: ResponsesRequest) -> list[str]:
    """Returns the names of the custom tools whose inputs should have a form that is not
    enforced."""
    formats = ((name, tool.format) for name, (_, tool) in _by_name(request).items())
    return [name for name, format in formats if format is not None and not format.is_held]


def _free(name: str) -> str:
    return f"The model is told the format of the tool {shown(name)}, but not held to it."


def _with_namespaces(tools: Sequence[Tool]) -> Iterator[tuple[str | None, Tool]]:
    """Yields each tool with the namespace that it is in. The first tool of a namespace gets the
    namespace's description."""
    for tool in tools:
        if tool.type != "namespace":
            yield None, tool
            continue
        about = tool.description
        for each in tool.tools:
            description = "\n\n".join(filter(None, [about, each.description]))
            yield tool.name, replace(each, description=description or None)
            about = None


def _flat(namespace: str | None, name: Any) -> Any:
    """Returns the name by which the model knows a function: models know no namespaces, so it holds
    the namespace and the name."""
    return f"{namespace}__{name}" if namespace else name


def _messages(request: ResponsesRequest, warnings: list[str]) -> list[dict[str, Any]]:
    """Returns the request's input as messages in the form of chat completions. The items of one
    answer become one message. System messages become the first message; a system message that comes
    later is given as the user's, because templates expect none there."""
    system = [request.instructions] if request.instructions else []
    messages: list[dict[str, Any]] = []
    items = request.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    asked = (i for i, item in enumerate(items) if item.type in ("message", "agent_message"))
    last = max((i for i in asked if items[i].role != "assistant"), default=-1)
    for index, item in enumerate(items):
        match item.type:
            case "message" if item.role in ("system", "developer") and not messages:
                system.append(_text(item.content))
            case "message" if item.role == "assistant":
                own = _last_answer(messages)
                own["content"] = own.get("content", "") + _text(item.content)
            case "message":
                given = _text(item.content)
                text = given if item.role == "user" else unbilled(given)
                if text or not given:
                    messages.append({"role": "user", "content": text})
            case "reasoning":
                if thought := _text(item.content or item.summary):
                    own = _last_answer(messages, "content", "tool_calls")
                    own["reasoning_content"] = thought
            case "agent_message":
                content = item.content
                if index < last and isinstance(content, list):
                    hidden = [part.type for part in content if part.text is None]
                    warnings += [_left_out(kind) for kind in hidden]
                    content = [part for part in content if part.text is not None]
                messages.append({"role": "user", "content": _text(content)})
            case "function_call" | "custom_tool_call" | "local_shell_call":
                name = _flat(item.namespace, item.name or item.type.removesuffix("_call"))
                function = {"name": name, "arguments": _arguments(item)}
                call = {"id": item.call_id, "type": "function", "function": function}
                _last_answer(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" if item.call_id is None:
                # Codex hands over messages in this form.
                messages.append({"role": "user", "content": _text(item.output)})
            case "function_call_output" | "custom_tool_call_output":
                output = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**output, "content": _text(item.output)})
            case "item_reference":
                raise ApiError(
                    400,
                    "An item_reference is not supported: this server keeps no responses. Send the "
                    "item.",
                    param="input",
                )
            case kind if kind in _BRINGS_TOOLS:
                pass
            case kind if kind in _SAYS_NOTHING or kind.endswith("_call"):
                # These are calls of tools that OpenAI runs.
                warnings.append(_left_out(kind))
            case kind if kind not in _SUMMARIES and index < last:  # from an earlier turn
                warnings.append(_left_out(kind))
            case kind:
                raise ApiError(400, not_text(kind), param="input")
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return messages


def _arguments(item: InputItem) -> str:
    """Returns the arguments of an item that is a call, as JSON."""
    if item.type == "custom_tool_call":
        return arguments_of(item.input or "")
    given = item.action if item.type == "local_shell_call" else item.arguments
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


def _left_out(kind: str) -> str:
    return f"Content of the type {shown(kind)} was left out."


def _last_answer(messages: list[dict[str, Any]], *others: str) -> dict[str, Any]:
    """Returns the assistant's message to which an item belongs: the last message or, if that is not
    the assistant's or has one of the keys `others`, a new one, which is appended."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in others):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _text(content: str | Sequence[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None and part.refusal is None:
            raise ApiError(400, not_text(part.type), param="input")
    return "\n\n".join(part.text or part.refusal or "" for part in content)


# Responses


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[WrittenLogprob] = field(default_factory=list)


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]
    status: str


class FunctionCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    encrypted_function_args: list[str] | UnsetType = UNSET
    status: str


class CustomToolCall(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: str


ToolCall = FunctionCall | CustomToolCall
OutputItem = OutputMessage | ReasoningItem | ToolCall


_PREFIXES: dict[type[OutputItem], str] = {
    OutputMessage: "msg",
    ReasoningItem: "rs",
    FunctionCall: "fc",
    CustomToolCall: "ctc",
}


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Failure(Struct):
    code: str
    message: str


class Incomplete(Struct):
    reason: str


class Response(Struct, kw_only=True):
    """A whole response. status: in_progress, completed, incomplete or failed."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Reasoning
    store: bool = False
    temperature: float | None
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[Tool]
    top_p: float | None
    truncation: str = "disabled"
    usage: Usage | None = None
    metadata: dict[str, str] = field(default_factory=dict)


class ResponsesFormat:
    """Writes an answer as one response (a `generation.Format`). A stream of it goes item by
    item."""

    media_type, keepalive = EVENT_STREAM, KEEPALIVE

    def __init__(self, request: ResponsesRequest, answers: Answers) -> None:
        self._request, self._answers = request, answers
        self._number = 0  # the number of the next event
        self._output: list[OutputItem] = []
        self._open = False  # whether the last item of the output is not whole yet
        self._input = InputReader()  # reads the input while a call of a custom tool is open
        self._tools = _by_name(request)

    def whole(self) -> Response:
        (result,) = self._answers.results
        status = _status(result)
        if result.reasoning:
            self._add(ReasoningItem, status, content=[ReasoningText(result.reasoning)])
        if result.text or not result.tool_calls:
            text = OutputText(text=result.text, logprobs=_logprobs(result.logprobs or ()))
            self._add(OutputMessage, status, content=[text])
        for call in result.tool_calls:
            self._add_call("completed", call.id, call.name, call.arguments)
        return self._ended(result)

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, index: int, chunk: Chunk) -> bytes:
        data = b""
        if chunk.reasoning:
            data += self._begin_text(ReasoningItem, ReasoningText(""))
            data += self._text_delta("reasoning_text", chunk.reasoning)
        if chunk.text or (chunk.logprob is not None and not (chunk.reasoning or chunk.tool_calls)):
            logprobs = _logprobs(() if chunk.logprob is None else (chunk.logprob,))
            data += self._begin_text(OutputMessage, OutputText(text=""))
            data += self._text_delta("output_text", chunk.text, logprobs)
        for call in chunk.tool_calls:
            if call.id is not None and call.name is not None:
                data += self._end_item("completed")
                item = self._add_call("in_progress", call.id, call.name, "")
                self._input = InputReader()
                data += self._item_event("added", item)
            if call.arguments:
                data += self._call_delta(call.arguments)
        return data

    def end(self, index: int, result: Result) -> bytes:
        data = b""
        if all(isinstance(item, ReasoningItem) for item in self._output):
            data += self._begin_text(OutputMessage, OutputText(text=""))
        whole = {call.id for call in result.tool_calls}
        last = self._output[-1]
        is_whole = isinstance(last, ToolCall) and last.call_id in whole
        data += self._end_item("completed" if is_whole else _status(result))
        response = self._ended(result)
        return data + self._event(f"response.{response.status}", response=response)

    def finish(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response.error = Failure(error.code or "server_error", error.message)
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        return told + self._event("response.failed", response=response)

    # Items

    def _add_call(self, status: str, call_id: str, name: str, arguments: str) -> OutputItem:
        named: dict[str, Any] = {"name": name}
        if name not in self._tools:
            return self._add(FunctionCall, status, call_id=call_id, arguments=arguments, **named)
        namespace, tool = self._tools[name]
        if namespace is not None:
            named = {"namespace": namespace, "name": tool.name}
        if tool.type == "custom":
            text = input_of(arguments)
            return self._add(CustomToolCall, status, call_id=call_id, input=text, **named)
        if _encrypted(tool):  # else Codex would take the arguments for encrypted ones
            named["encrypted_function_args"] = []
        return self._add(FunctionCall, status, call_id=call_id, arguments=arguments, **named)

    def _call_delta(self, piece: str) -> bytes:
        """Returns the event about a piece of the arguments of the open call."""
        item = self._output[-1]
        if isinstance(item, CustomToolCall):
            return self._input_delta(item, self._input.add(piece))
        assert isinstance(item, FunctionCall)
        item.arguments += piece
        return self._call_event("response.function_call_arguments.delta", item, delta=piece)

    def _input_delta(self, item: CustomToolCall, text: str) -> bytes:
        item.input += text
        if not text:
            return b""
        return self._call_event("response.custom_tool_call_input.delta", item, delta=text)

    def _add(self, kind: type[Any], status: str, **fields: Any) -> OutputItem:
        name = f"{_PREFIXES[kind]}_{self._answers.id}_{len(self._output)}"
        item: OutputItem = kind(id=name, status=status, **fields)
        self._output.append(item)
        self._open = status == "in_progress"
        return item

    def _begin_text(self, kind: type[Any], part: OutputText | ReasoningText) -> bytes:
        """Returns the events that come before a text in an item of this kind: none if such an item
        is open, else the end of the open item and the beginning of a new one."""
        if self._open and isinstance(self._output[-1], kind):
            return b""
        data = self._end_item("completed")
        item = self._add(kind, "in_progress", content=[])
        data += self._item_event("added", item)
        assert not isinstance(item, ToolCall)
        item.content.append(part)  # type: ignore[arg-type]
        return data + self._part_event("response.content_part.added", part=part)

    def _text_delta(
        self, name: str, text: str, logprobs: list[WrittenLogprob] | None = None
    ) -> bytes:
        item = self._output[-1]
        assert not isinstance(item, ToolCall)
        part = item.content[0]
        part.text += text
        more: dict[str, Any] = {}
        if isinstance(part, OutputText):
            more["logprobs"] = logprobs or []
            part.logprobs += logprobs or []
        return self._part_event(f"response.{name}.delta", delta=text, **more)

    def _end_item(self, status: str) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._output[-1]
        item.status = status
        if isinstance(item, ToolCall):
            data = b""
            if status == "incomplete":
                pass  # the call was cut, so its arguments are not whole
            elif isinstance(item, CustomToolCall):
                data = self._input_delta(item, self._input.end())
                name = "response.custom_tool_call_input.done"
                data += self._call_event(name, item, input=item.input)
            else:
                name = "response.function_call_arguments.done"
                data = self._call_event(name, item, name=item.name, arguments=item.arguments)
            return data + self._item_event("done", item)
        part = item.content[0]
        if isinstance(part, OutputText):
            data = self._part_event(
                "response.output_text.done", text=part.text, logprobs=part.logprobs
            )
        else:
            data = self._part_event("response.reasoning_text.done", text=part.text)
        data += self._part_event("response.content_part.done", part=part)
        return data + self._item_event("done", item)

    # Events

    def _item_event(self, what: str, item: OutputItem) -> bytes:
        index = len(self._output) - 1
        return self._event(f"response.output_item.{what}", output_index=index, item=item)

    def _call_event(self, event_name: str, item: ToolCall, **data: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(event_name, item_id=item.id, output_index=index, **data)

    def _part_event(self, name: str, **data: Any) -> bytes:
        """Returns an event about the only part of the last item."""
        index, item = len(self._output) - 1, self._output[-1]
        return self._event(name, item_id=item.id, output_index=index, content_index=0, **data)

    def _event(self, name: str, /, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **data}, name)

    def _ended(self, result: Result) -> Response:
        response = self._response(_status(result))
        response.completed_at = int(time.time())
        if response.status == "incomplete":
            response.incomplete_details = Incomplete("max_output_tokens")
        prompt, made = result.prompt_tokens, result.completion_tokens
        response.usage = Usage(
            prompt,
            InputTokensDetails(result.timings.reused_tokens),
            made,
            OutputTokensDetails(result.reasoning_tokens),
            prompt + made,
        )
        return response

    def _response(self, status: str) -> Response:
        request = self._request
        text = request.text or TextConfig()
        free = _names_of_free(request)
        return Response(
            id=f"resp_{self._answers.id}",
            created_at=int(self._answers.created),
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=self._answers.model,
            output=self._output,
            parallel_tool_calls=request.parallel_tool_calls,
            reasoning=request.reasoning or Reasoning(),
            temperature=request.temperature,
            text=TextConfig(text.format or TEXT, text.verbosity),
            tool_choice=request.tool_choice,
            tools=request.tools,
            top_p=request.top_p,
            metadata={"infer_warning": " ".join(map(_free, free))} if free else {},
        )


def _status(result: Result) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[WrittenLogprob]:
    return logprobs_of(*tokens).content
