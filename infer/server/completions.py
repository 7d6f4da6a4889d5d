"""/v1/completions: what a request asks for, and how its answers are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from infer.llm import Chunk, Prompt, Result, TokenLogprob
from infer.server.errors import ApiError
from infer.server.generation import Job
from infer.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    sampling_params,
)


def read(request: CompletionRequest) -> Job:
    """Raises ApiError (400)."""
    params = sampling_params(request, max_tokens=request.max_tokens, logprobs=request.logprobs)
    return Job(_prompts(request.prompt), "prompt", params, CompletionFormat())


def _prompts(given: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """Of a text, token ids, or a list of either. Raises ApiError (400) for a mixed one."""
    if isinstance(given, str):
        return [given]
    if not given or all(isinstance(each, int) for each in given):
        return [cast(list[int], given)]
    if all(isinstance(each, str) for each in given) or all(isinstance(e, list) for e in given):
        return cast(list[Prompt], given)
    raise ApiError(
        400,
        "prompt is a text, a list of token ids, or a list of texts or of those.",
        param="prompt",
    )


class CompletionFormat:
    prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def __init__(self) -> None:
        self._offsets = defaultdict[int, int](int)  # characters of each answer's tokens so far

    def whole(self, index: int, result: Result) -> CompletionChoice:
        logprobs = None if result.logprobs is None else self._logprobs(index, result.logprobs)
        return CompletionChoice(index, result.text, logprobs, result.finish_reason)

    def begin(self, index: int) -> None:
        return None

    def piece(self, index: int, chunk: Chunk) -> CompletionChoice | None:
        if not chunk.text and chunk.logprob is None:
            return None
        logprobs = None if chunk.logprob is None else self._logprobs(index, [chunk.logprob])
        return CompletionChoice(index, chunk.text, logprobs)

    def end(self, index: int, result: Result) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason=result.finish_reason)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        for token in tokens:
            best: dict[str, float] = {}
            for each in (*token.top, token):  # of tokens that read alike, the best
                best.setdefault(each.text, each.logprob)
            written.tokens.append(token.text)
            written.token_logprobs.append(token.logprob)
            written.top_logprobs.append(best)
            written.text_offset.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return written
