"""The results of a model: answers, pieces of them, scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from infer.engine.token_engine import Timings
from infer.kernels.errors import InferError
from infer.text.tools import ToolCall, ToolCallDelta
from infer.typed import parsed


@dataclass(frozen=True)
class TopLogprob:
    """A token that may come next, and its log probability: the model's own, before any filter or
    penalty. text: as the token stands within a text; a special token by its name; U+FFFD for a part
    of a character. raw: the same as bytes of UTF-8; of a part of a character, that part."""

    token_id: int
    logprob: float
    text: str
    raw: bytes


@dataclass(frozen=True)
class TokenLogprob(TopLogprob):
    """The token that was chosen, and its log probability. top: the most probable tokens in its
    place, the best first. start: how many characters of the text stand before it; of a part of a
    character, before that character."""

    top: tuple[TopLogprob, ...]
    start: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream, which prints as its text. text: what has become certain, perhaps
    nothing. token: the one that led to it; None in the last piece, if text had been held back.
    logprob: there if asked for. reasoning, tool_calls: pieces of those, in answers to chats."""

    text: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass
class Result:
    """A whole generation, which prints as its text. Two are equal if they say the same, whatever
    their timings, seeds and the ids of their calls.

    token_ids: without the id that ended it. finish_reason: "stop" (an end-of-turn id or a stop
    string), "tool_calls" (the same, of an answer with calls), "length" (max_tokens, or the context
    is full), "timeout" or "cancelled" (closed before its end). reasoning, tool_calls: the parts of
    an answer to a chat that are not its text; a call that a limit cut is not there.
    reasoning_tokens: how many of token_ids are reasoning. stop_string: the one that ended it. seed:
    of the sampler, which with the same options samples the same again; one was chosen if none was
    given. schema: what the answer was held to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    logprobs: list[TokenLogprob] | None = None
    prompt_tokens: int = 0
    timings: Timings = field(default_factory=Timings, compare=False)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    stop_string: str | None = None
    seed: int | None = field(default=None, compare=False)
    schema: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the next chat. If it has calls, their results follow it: one
        {"role": "tool", "tool_call_id", "content"} each."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    @cached_property
    def parsed(self) -> Any:
        """The answer as what `schema=` named: an object of the pydantic model or the dataclass, a
        TypedDict, a list; or as what json.loads gives, of a JSON schema given as a dictionary.
        Raises InferError without a schema, and for an answer that was cut."""
        if self.schema is None:
            raise InferError("This answer was held to no schema, by which it could be parsed.")
        if self.finish_reason != "stop":
            raise InferError(
                f"This answer is not the whole of what its schema asks for, as its finish_reason "
                f'is "{self.finish_reason}".'
                + (" Give it more max_tokens." if self.finish_reason == "length" else "")
            )
        return parsed(self.text, self.schema)

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens computed per second, until the first token was generated."""
        t = self.timings
        return t.prefilled_tokens / t.prefill_seconds if t.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first one."""
        t = self.timings
        return t.decoded_tokens / t.decode_seconds if t.decode_seconds else 0.0

    @property
    def step_tokens(self) -> float:
        """Tokens per step after the first token; more than one if drafts were right."""
        steps = self.timings.decoded_tokens - self.timings.accepted_tokens
        return self.timings.decoded_tokens / steps if steps else 0.0


Results = Result | list[Result] | list[list[Result]]  # by what was asked for


@dataclass(frozen=True)
class Score:
    """How likely a continuation is. logprob: of all its tokens together, the sum of token_logprobs.
    is_greedy: whether each token is the most probable one in its place. tokens: how many."""

    logprob: float
    token_logprobs: list[float]
    is_greedy: bool

    @property
    def tokens(self) -> int:
        return len(self.token_logprobs)
