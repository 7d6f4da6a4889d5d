"""/v1/chat/completions: from a request to a job, and how its answers are written."""

from __future__ import annotations

from functools import partial
from typing import Any

from infer.results import Chunk, Result
from infer.results import TokenLogprob as Logprob
from infer.server.choices import ChoicesFormat
from infer.server.endpoint import Call
from infer.server.errors import ApiError
from infer.server.generation import Job
from infer.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    Delta,
    FunctionCall,
    Message,
    TokenizeRequest,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    sampling_params,
)
from infer.text.chat import THINKING_ARGS
from infer.text.tools import ToolCall as Called
from infer.text.tools import ToolCallDelta, ToolOptions

# Names that chat_template_kwargs must not have.
_RESERVED = {"documents", "messages", "template", "tools"}


def read(call: Call[ChatRequest]) -> Job:
    """Reads a request of /v1/chat/completions as a job. Raises ApiError (400) for parameters that
    do not fit together or are out of range."""
    request = call.request
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs belong to logprobs: true.", param="top_logprobs")
    own, other = request.max_completion_tokens, request.max_tokens
    if own is not None and other is not None and own != other:
        raise ApiError(
            400,
            "max_tokens is the old name of max_completion_tokens: give one.",
            param="max_tokens",
        )
    params = sampling_params(
        request,
        max_tokens=other if own is None else own,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    tools = ToolOptions()
    if request.tools or request.tool_choice != "auto" or not request.parallel_tool_calls:
        tools = ToolOptions(
            tools=request.tools or [],
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
        )
    return Job(
        [read_messages(request.messages, call.service.engine.template)],
        "messages",
        params,
        partial(ChoicesFormat, ChatChoices(), request.stream_options),
        reasoning_args(request.reasoning_effort) | template_args(request),
        tools,
        n=request.n,
        stream=request.stream,
    )


def read_messages(given: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns the messages in a form that the chat template can read. A developer's message becomes
    the system's if the template has no such role, and an assistant's refusal becomes text."""
    messages = [*map(_with_refusals, given)]
    if "developer" in template:
        return messages
    other = {"role": "system"}
    return [each | other if each.get("role") == "developer" else each for each in messages]


def _with_refusals(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message in which a refusal is text. OpenAI's messages have refusals beside the
    content, or as a part of it."""
    content, refusal = message.get("content"), message.get("refusal")
    if content is None and refusal is not None:
        return message | {"content": refusal}
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in content
    ]
    return message | {"content": parts}


def reasoning_args(effort: str | None) -> dict[str, Any]:
    """Returns how much the model should think, under each of the names that templates use. effort:
    "none", or how much; None: the model decides."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return dict(zip(THINKING_ARGS, (effort, thinks, thinks), strict=True))


def template_args(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns the variables for the chat template that a request gives. Raises ApiError (400) for a
    name that only the server may set."""
    args = dict(request.chat_template_kwargs or {})
    if reserved := _RESERVED & args.keys():
        raise ApiError(
            400,
            f"chat_template_kwargs cannot set {min(reserved)}.",
            param="chat_template_kwargs",
            code="unsupported_parameter",
        )
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(request, name)) is not None:
            args[name] = value
    return args


class ChatChoices:
    prefix = "chatcmpl"
    whole_object, event_object = "chat.completion", "chat.completion.chunk"

    def whole(self, index: int, result: Result) -> ChatChoice:
        logprobs = None if result.logprobs is None else logprobs_of(*result.logprobs)
        message = Message("assistant", result.text or (None if result.tool_calls else ""))
        if result.reasoning:
            message.reasoning_content = message.reasoning = result.reasoning
        if result.tool_calls:
            message.tool_calls = [
                ToolCall(FunctionCall(call.name, call.arguments), call.id, "function")
                for call in result.tool_calls
            ]
        return ChatChoice(index, message, logprobs, result.finish_reason)

    def begin(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, Delta(role="assistant", content=""))

    def piece(self, index: int, chunk: Chunk) -> ChatChunkChoice | None:
        delta = Delta()
        if chunk.reasoning:
            delta.reasoning_content = delta.reasoning = chunk.reasoning
        if chunk.text:
            delta.content = chunk.text
        if chunk.tool_calls:
            delta.tool_calls = [_delta(call) for call in chunk.tool_calls]
        if delta == Delta() and chunk.logprob is None:
            return None
        logprobs = None if chunk.logprob is None else logprobs_of(chunk.logprob)
        return ChatChunkChoice(index, delta, logprobs)

    def end(self, index: int, result: Result) -> ChatChunkChoice:
        return ChatChunkChoice(index, Delta(), finish_reason=result.finish_reason)


def _delta(call: ToolCallDelta) -> ToolCall:
    delta = ToolCall(FunctionCall(call.name, call.arguments), index=call.index)
    if call.id is not None:
        delta.id, delta.type = call.id, "function"
    return delta


def arguments_of(call: Called) -> dict[str, Any]:
    """Returns the arguments of a call; an empty dictionary if the model has not written a JSON
    object."""
    try:
        return call.parsed()
    except ValueError:
        return {}


def logprobs_of(*tokens: Logprob) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token.text,
                token.logprob,
                [*token.raw],
                [TopLogprob(top.text, top.logprob, [*top.raw]) for top in token.top],
            )
            for token in tokens
        ]
    )
