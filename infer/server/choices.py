"""The form of answers that OpenAI's two older endpoints share: replies with choices."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from infer.results import Chunk, Result
from infer.server.errors import ApiError
from infer.server.generation import Answers
from infer.server.protocol import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Reply,
    StreamOptions,
    Usage,
)
from infer.server.wire import EVENT_STREAM, KEEPALIVE, event


class Choices(Protocol):
    """The way in which an endpoint writes the answers to one request, each by its index."""

    prefix: str  # the beginning of replies' ids
    whole_object: str
    event_object: str

    def whole(self, index: int, result: Result) -> msgspec.Struct: ...

    def begin(self, index: int) -> msgspec.Struct | None:
        """Returns the choice of the first event of an answer in a stream, or None if there is
        none."""

    def piece(self, index: int, chunk: Chunk) -> msgspec.Struct | None: ...

    def end(self, index: int, result: Result) -> msgspec.Struct: ...


class ChoicesFormat:
    """Writes answers as replies with choices, in the form of OpenAI's endpoints (a
    `generation.Format`)."""

    media_type, keepalive = EVENT_STREAM, KEEPALIVE

    def __init__(self, choices: Choices, asked: StreamOptions | None, answers: Answers) -> None:
        asked = asked or StreamOptions()
        self._choices, self._answers = choices, answers
        self._with_usage, self._always = asked.include_usage, asked.continuous_usage_stats

    def whole(self) -> Reply[Any]:
        results = enumerate(self._answers.results)
        choices = [self._choices.whole(i, result) for i, result in results]
        return self._reply(self._choices.whole_object, choices, self._usage())

    def begin(self) -> bytes:
        count = len(self._answers.each)
        return b"".join(self._event(self._choices.begin(i)) for i in range(count))

    def piece(self, index: int, chunk: Chunk) -> bytes:
        return self._event(self._choices.piece(index, chunk))

    def end(self, index: int, result: Result) -> bytes:
        return self._event(self._choices.end(index, result))

    def finish(self) -> bytes:
        usage = b""
        if self._with_usage:
            usage = event(self._reply(self._choices.event_object, [], self._usage()))
        return usage + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return event(error.body)

    def _event(self, choice: msgspec.Struct | None) -> bytes:
        """Returns the bytes of an event with one choice; none without a choice."""
        if choice is None:
            return b""
        usage: Usage | msgspec.UnsetType | None = None if self._with_usage else msgspec.UNSET
        if self._always:
            usage = self._usage()
        return event(self._reply(self._choices.event_object, [choice], usage))

    def _reply(self, kind: str, choices: list[Any], usage: Any) -> Reply[Any]:
        answers = self._answers
        return Reply(
            id=f"{self._choices.prefix}-{answers.id}",
            object=kind,
            created=int(answers.created),
            model=answers.model,
            choices=choices,
            usage=usage,
        )

    def _usage(self) -> Usage:
        results, firsts = self._answers.results, self._answers.of_prompts
        prompt = sum(result.prompt_tokens for result in firsts)
        completion = sum(result.completion_tokens for result in results)
        cached = sum(result.timings.reused_tokens for result in firsts)
        reasoning = sum(result.reasoning_tokens for result in results)
        return Usage(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(cached),
            CompletionTokensDetails(reasoning),
        )
