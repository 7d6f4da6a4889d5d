"""/v1/completions: what a request asks for, and how its answers are written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from infer.llm import Prompt
from infer.results import Chunk, Result, TokenLogprob
from infer.server.choices import ChoicesFormat
from infer.server.endpoint import Call
from infer.server.engine import EngineClient
from infer.server.errors import ApiError
from infer.server.generation import Job
from infer.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    sampling_params,
)


def read(call: Call[CompletionRequest]) -> Job:
    """Reads a request of /v1/completions as a job. Raises ApiError (400) for parameters that do not
    fit together."""
    request = call.request
    if request.best_of not in (None, request.n):
        raise ApiError(
            400,
            "best_of is not supported: ask for n answers, and take the best.",
            param="best_of",
            code="unsupported_parameter",
        )
    prompts = read_prompts(request.prompt, "prompt")
    choices = CompletionChoices(request.logprobs, request.n)
    if request.echo:
        if request.suffix is not None:
            raise ApiError(400, "With a suffix there is no echo.", param="echo")
        choices.prompts = prompts
    params = None
    if not (request.echo and request.max_tokens == 0):
        params = sampling_params(request, max_tokens=request.max_tokens, logprobs=request.logprobs)
    return Job(
        prompts,
        "prompt",
        params,
        partial(ChoicesFormat, choices, request.stream_options),
        n=request.n,
        stream=request.stream,
        suffix=request.suffix,
        before=choices.read_prompts if request.echo else None,
    )


def read_prompts(given: str | Sequence[str | int | list[int]], param: str) -> list[Prompt]:
    """Returns the prompts of a request: a single text or list of token ids gives one prompt, a list
    of texts or of lists of ids gives several. Raises ApiError (400) for a list that mixes kinds."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds <= {int}:
        return [cast(list[int], given)]
    if kinds in ({str}, {list}):
        return cast(list[Prompt], given)
    raise ApiError(
        400,
        f"{param} is a text, a list of token ids, or a list of texts or of those.",
        param=param,
    )


class CompletionChoices:
    prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def __init__(self, logprobs: int | None, n: int) -> None:
        self._top, self._n = logprobs, n
        self.prompts: list[Prompt] = []  # the prompts that answers begin with (`echo`)
        # Each prompt's text and log probabilities.
        self._echoes: list[tuple[str, CompletionLogprobs | None]] = []

    async def read_prompts(
        self, engine: EngineClient, encoded: list[list[int]], adapter: str | None
    ) -> None:
        """Reads the text of each prompt, and its log probabilities if the request asked for them,
        so that answers can begin with the prompt (`echo`)."""
        for prompt, ids in zip(self.prompts, encoded, strict=True):
            decoded = await engine.decode(ids)
            text = prompt if isinstance(prompt, str) else decoded
            logprobs = None
            if self._top is not None:
                # The first token has no probability: nothing stands before it.
                first = await engine.decode(ids[:1])
                # Characters of special tokens in front, such as BOS.
                added = max(len(decoded) - len(text), 0)
                rest = _logprobs(await engine.prompt_logprobs(ids, self._top, adapter), -added)
                logprobs = _joined(CompletionLogprobs([first], [None], [None], [0]), rest)
            self._echoes.append((text, logprobs))

    def whole(self, index: int, result: Result) -> CompletionChoice:
        text, echoed = self._echo(index)
        logprobs = None if result.logprobs is None else _logprobs(result.logprobs, len(text))
        if echoed is not None:
            logprobs = echoed if logprobs is None else _joined(echoed, logprobs)
        return CompletionChoice(index, text + result.text, logprobs, result.finish_reason)

    def begin(self, index: int) -> CompletionChoice | None:
        return CompletionChoice(index, *self._echo(index)) if self._echoes else None

    def piece(self, index: int, chunk: Chunk) -> CompletionChoice | None:
        if not chunk.text and chunk.logprob is None:
            return None
        logprobs = None
        if chunk.logprob is not None:
            logprobs = _logprobs([chunk.logprob], len(self._echo(index)[0]))
        return CompletionChoice(index, chunk.text, logprobs)

    def end(self, index: int, result: Result) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason=result.finish_reason)

    def _echo(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """Returns the echoed prompt that the answer at this index begins with, and the prompt's log
        probabilities: an empty text and None if nothing is echoed."""
        return self._echoes[index // self._n] if self._echoes else ("", None)


def _logprobs(tokens: Sequence[TokenLogprob], before: int) -> CompletionLogprobs:
    """The log probabilities of tokens in the form of this API. before: how many characters stand in
    front of the text in which the tokens' positions count."""
    written = CompletionLogprobs([], [], [], [])
    for token in tokens:
        best: dict[str, float] = {}
        # Where several tokens have one text, the most probable counts.
        for each in (*token.top, token):
            best.setdefault(each.text, each.logprob)
        written.tokens.append(token.text)
        written.token_logprobs.append(token.logprob)
        written.top_logprobs.append(best)
        written.text_offset.append(max(before + token.start, 0))
    return written


def _joined(a: CompletionLogprobs, b: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        a.tokens + b.tokens,
        a.token_logprobs + b.token_logprobs,
        a.top_logprobs + b.top_logprobs,
        a.text_offset + b.text_offset,
    )
