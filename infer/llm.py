"""A loaded model, and the streams of text that it generates."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain, islice
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import checked, shown
from infer.calls import warn
from infer.chat_answers import Reading
from infer.embedding import POOLINGS, EmbeddingConfig
from infer.engine.constraint import Constraint, Constraints
from infer.engine.engine import Engine
from infer.engine.isolated import WorkerEngine
from infer.engine.token_engine import EngineStats, TokenAnswer, TokenEngine
from infer.kernels.errors import (
    ClosedError,
    InferError,
    RequestError,
    Uncopied,
    UnsupportedError,
)
from infer.kernels.gpu.adapters import AdapterInfo, check_process, is_forked
from infer.kernels.gpu.device import Device
from infer.kernels.state.step import MAX_LOGPROBS, MAX_STOP_IDS
from infer.keywords import LOAD_NAMES, AnswerOptions, show_options
from infer.progress import size
from infer.results import Chunk, Result, Results, Score, TokenLogprob, TopLogprob
from infer.sampling import LogitsProcessor, Logprobs, SamplingOptions, SamplingParams, logprobs
from infer.text.answer_reader import Pieces
from infer.text.chat import begins_answer
from infer.text.detokenizer import StopStrings, StreamingDetokenizer
from infer.text.tokenizer import Tokenizer
from infer.text.tools import Tool, ToolChoice, Tools, add_deltas, check_tools

if TYPE_CHECKING:
    from infer.aio import AsyncStream, Runner  # this module imports asyncio
    from infer.models.loading.plan import Summary

Message = Mapping[str, Any]
Chat = str | Sequence[Message]
Prompt = Chat | Sequence[int]
# Lists of chats, and of prompts. To type checkers a text is a list of texts, too; here it is one
# prompt.
Chats = Sequence[str] | Sequence[Sequence[Message]]
Prompts = Chats | Sequence[Sequence[int]] | Iterable[str] | Iterable[Sequence[int]]
# Sampling parameters of all prompts of a call, or a list with those of each prompt.
Params = SamplingParams | Sequence[SamplingParams]


_checked = partial(checked, AnswerOptions.__optional_keys__, LOAD_NAMES, "load()")


class _Lazy:
    """An answer that begins when it is first asked for."""

    def __init__(self, begin: Callable[[], TokenAnswer]) -> None:
        self._begin = begin
        self._answer: TokenAnswer | None = None

    def __call__(self) -> TokenAnswer:
        if self._answer is None:
            self._answer = self._begin()
        return self._answer

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()


class Stream(Uncopied, Iterator[Chunk]):
    """Text as it is generated. Iterate it to its end, close it, or drop it: each frees its place
    for the next answer. From then on `result` is the whole result. Threads may share a stream: each
    piece goes to one of them.

    so_far: what has been generated so far. Its finish_reason is "cancelled" until the end.
    """

    instead = "Take its result, which can."

    def __init__(
        self,
        llm: LLM,
        begin: Callable[[], TokenAnswer],
        params: SamplingParams,
        ids: list[int],
        reading: Callable[[], Reading] | None,
        schema: Mapping[str, Any] | None,
    ) -> None:
        self._llm, self._answer = llm, _Lazy(begin)
        self.so_far = Result(prompt_tokens=len(ids), seed=params.seed, schema=schema)
        self._chunks = llm._chunks(self._answer, params, ids, self.so_far, reading)
        llm._open_streams[id(self)] = weakref.ref(self)
        self._turn = threading.Lock()  # held by the thread that runs or closes `_chunks`
        # The thread that began the stream, or asked for a piece last.
        self._reader: int | None = None
        self._closed = False
        # Whether another thread reads the stream on behalf of its reader.
        self._is_elsewhere = False
        # What closed the stream, if its reader does not know yet.
        self._error: ClosedError | None = None
        self._keeps: object = None  # an object that lives as long as the stream is open

    def __next__(self) -> Chunk:
        if not self._closed:
            llm, thread = self._llm, threading.get_ident()
            llm._check_thread()
            try:
                llm._inside.add(thread)
                with self._turn:
                    self._reader = thread
                    if not self._closed:  # it may have been closed while this thread waited
                        return next(self._chunks)
            except StopIteration:
                self._closed = True
                # The answer was whole before it was closed.
                if self.so_far.finish_reason != "cancelled":
                    self._error = None
            except BaseException:
                self._closed = True
                raise
            finally:
                llm._inside.discard(thread)
                if self._closed:
                    self.close()
                if llm._closing:
                    llm.close()
        error, self._error = self._error, None
        raise error or StopIteration

    @property
    def result(self) -> Result:
        """The result. Raises InferError before the stream has ended or was closed."""
        if not self._closed:
            raise InferError(
                "This stream has not ended, so it has no result yet. Iterate it to its end, or "
                "close it; until then so_far is what has been generated."
            )
        return self.so_far

    def _begin(self) -> None:
        """Begins the answer: from then on it is generated whenever another answer is."""
        self._llm._check_open()
        self._reader = threading.get_ident()
        self._answer()

    def _is_ready(self) -> bool:
        """Whether the next piece, or the end, is there without another step of the model."""
        return self._answer().is_ready

    def begin_elsewhere(self) -> TokenAnswer:
        """Begins the answer, which the thread of event loops will read, and returns it."""
        self._begin()
        self._is_elsewhere = True
        return self._answer()

    def _finish(self) -> Result:
        """Generates the answer to its end, and returns the result."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Ends the stream. It may be called at any time, in any thread, in a signal handler, in a
        logits processor, and twice. A piece that is being made meanwhile is the last one."""
        self._closed = True
        self._answer.close()
        if not self._turn.locked():  # else the `__next__` that holds the lock comes here at its end
            with self._turn:
                self._chunks.close()
                self._keeps = None
                self._llm._open_streams.pop(id(self), None)

    def __repr__(self) -> str:
        ended = f"ended ({self.so_far.finish_reason})" if self._closed else "open"
        count = self.so_far.completion_tokens
        return f"<Stream of {self._llm.name}: {ended}, {count} token{'s' * (count != 1)}>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LLM(Uncopied):
    """A loaded model, from `load`. Use it in a `with` block, or close it.

    Any number of streams may be open, in any threads. As many as `max_batch` are generated
    together; the others wait. Several LLMs, on one device or several, can live side by side.

    Attributes:
        name: the model's name: its hub id, the name of its folder or file, or "demo".
        config: the values of its config.json: vocab_size, hidden_size, num_hidden_layers, ….
        tokenizer: turns text and chats into token ids and back (`infer.text.tokenizer.Tokenizer`).
        defaults: the sampling parameters in its generation_config.json.
        summary: how many parameters it has, and of which type.
    """

    instead = "Let threads share it as it is, or call infer.load() in the other process."

    @checked(hint='load() makes an LLM: llm = infer.load("demo").')
    def __init__(
        self,
        name: str,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any],
        embedding: EmbeddingConfig,
        summary: Summary,
    ) -> None:
        self.name, self.tokenizer, self.defaults = name, tokenizer, defaults
        self.summary = summary
        self._engine, self._embedding = engine, embedding
        self.config = engine.config
        self._open_streams: dict[int, weakref.ref[Stream]] = {}  # they end when this LLM is closed
        self._inside: set[int] = set()  # threads that are in the middle of a call
        self._closing = False
        self._pid = os.getpid()
        self._constraints = Constraints(tokenizer, engine.vocab_size)

    @property
    def engine(self) -> Engine:
        """The engine. Raises UnsupportedError if it is in another process (isolate)."""
        if not isinstance(self._engine, Engine):
            raise UnsupportedError(
                "The engine of this LLM is in a process of its own. Load it without isolate."
            )
        return self._engine

    @property
    def device(self) -> Device:
        """The engine's device. Raises UnsupportedError if the engine is in another process
        (isolate)."""
        return self.engine.device

    @property
    def gpu(self) -> AdapterInfo:
        """The GPU on which the model runs, as WebGPU's adapter describes it."""
        return self._engine.gpu

    @property
    def restarts(self) -> bool:
        """Whether the engine's process has ended, and the next one is not ready yet."""
        return self._engine.restarts

    @property
    def silent(self) -> float:
        """Seconds since the engine's process last showed that it lives, which it does every few
        seconds; 0 if the engine is in this process."""
        return self._engine.silent

    def watch(self, on_failure: Callable[[InferError], object]) -> None:
        """Has on_failure called, in another thread, if an engine in a process of its own cannot be
        started again."""
        if isinstance(self._engine, WorkerEngine):
            self._engine.on_failure = on_failure

    @property
    def slots(self) -> int:
        """The most answers that are generated at once; others wait."""
        return self._engine.slots

    @property
    def context(self) -> int:
        """The most positions of a prompt and its answer."""
        return self._engine.context

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that a call can choose."""
        return self._engine.adapter_names

    @property
    def is_embedder(self) -> bool:
        """Whether the model's files say how to pool embeddings."""
        return self._embedding.is_stated

    # Generating

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> Result: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompts,
        params: Params | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: Params | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[list[Result]]: ...

    @overload
    def generate(
        self, *, prompts: Prompts, params: Params | None = None, **options: Unpack[AnswerOptions]
    ) -> list[Result]: ...

    @_checked(renamed={"prompts": "prompt"})  # type: ignore[misc]
    def generate(
        self,
        prompt: Prompt | Prompts,
        params: Params | None = None,
        *,
        n: int = 1,
        **options: Unpack[AnswerOptions],
    ) -> Results:
        """The whole answer to a prompt; or the answers to a list of prompts, in their order, which
        are generated together.

        prompt: text to continue, token ids, or chat messages ({"role", "content"}), which go
            through the model's chat template. Several prompts may be a list, an array, a generator
            or a column of a table, also under the name prompts.
        params: the sampling parameters of all answers, or a list of them, one for each prompt.
        n: samples of each prompt, which is computed once; with more than one, each prompt has a
            list of results. If there is a seed, sample i has seed + i, so that the first sample is
            the answer with n=1. Without a temperature all samples are equal.
        options: as for `stream`.
        """
        prompt = listed(prompt)
        asked = samples(prompt, n, {**options, "params": params})
        streams = (self.stream(each, **own) for each, own in asked)
        return by_prompt(together(streams), prompt, n)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> Result: ...

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Chats,
        params: Params | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    def chat(
        self,
        messages: Chats,
        params: Params | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[list[Result]]: ...

    @_checked()
    def chat(
        self,
        messages: Chat | Chats,
        params: Params | None = None,
        *,
        n: int = 1,
        **options: Unpack[AnswerOptions],
    ) -> Results:
        """The answer to chat messages, or to one message of the user given as text; or the answers
        to a list of either, generated together. params, n, options: as for `generate`."""
        return self.generate(as_chats(messages), params, n=n, **options)

    @_checked()
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        logits_processor: LogitsProcessor | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The answer piece by piece.

        sampling: fields of SamplingParams (or give `params`). A field that is left out comes from
            the model's generation_config.json; if that is silent too, the answer is greedy.
        logits_processor: a numpy function of (ids so far, logits [vocab]) that returns the logits
            to choose from. It is slower, as the logits come to the host for every token.
        template_args: variables for the chat template (enable_thinking, …).
        continue_final_message: whether the last message is an answer that is begun and goes on. The
            stream has only the new text.
        add_generation_prompt: whether the prompt ends with the header of the answer. None: it does
            unless the final message is continued.
        adapter: the name of one of `adapters`.
        cache_salt: a text. The cache of prompt and answer is reused only by calls with an equal
            salt, so that nobody else can tell by the time taken what was asked.
        priority: an integer. Where answers wait for each other, an answer with a lower number
            begins first, and is the last to give its memory back. Each unit overtakes 64 earlier
            calls at most, so that no call waits for ever.
        timeout: seconds after the answer's beginning, its waiting for others included, at which it
            ends with the text that there is and the finish reason "timeout". The time is looked at
            between steps.
        tools: functions that the answer may call, in OpenAI's form, or Python functions, described
            by their signatures and docstrings; `ToolCall.parsed` returns arguments as the types
            that a Python function takes.
        tool_choice: "none", "auto", "required", or the name of the only function that may be
            called, also as {"type": "function", "function": {"name"}}.
        parallel_tool_calls: whether there may be several calls.

        In answers to messages, reasoning and calls are told apart from the text. In answers to
        token ids they are told apart only if tools are given, perhaps an empty list.

        Raises RequestError at once for a prompt or a value that cannot be served. An InferWarning
        names each part of the prompt that the chat template leaves out, and each argument that it
        does not read.
        """
        self._check_open()
        self._engine.check_adapter(adapter)
        _check_processor(logits_processor)
        _check_salt(cache_salt)
        _check_priority(priority)
        _check_timeout(timeout)
        params = _params(params, sampling)
        _check_template_args(template_args)
        template_args = dict(template_args or {})
        begins_answer(add_generation_prompt, continue_final_message)
        template_args |= _given(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        checked = Tools(None)
        if tools or tool_choice != "auto" or parallel_tool_calls is not True:
            checked = check_tools(tools, tool_choice, parallel_tool_calls)
        is_chat = _is_chat(prompt)
        if continue_final_message and not is_chat:
            raise RequestError("continue_final_message belongs to chat messages.")
        if is_chat and checked.offered is not None:
            template_args["tools"] = checked.offered
        elif checked.offered is not None and isinstance(prompt, str):
            raise RequestError("tools belong to chat messages, and the prompt is a text.")
        ids = [*chain.from_iterable(self.encode_pieces(prompt, template_args))]
        self._engine.check_prompt(ids)
        if is_chat:
            for text in self.tokenizer.left_out(cast(Sequence[Message], prompt), **template_args):
                warn(text)
        elif template_args:
            warn(
                f"{' and '.join(template_args)} belong to chat messages, and change nothing for "
                "another prompt."
            )
        reading = None
        if is_chat or (tools is not None and not isinstance(prompt, str)):
            own = self.tokenizer, checked, ids, template_args.get("template")
            # Most answers need it only when their text arrives.
            reading = cache(partial(Reading.of, *own))
        params = self._by_ids(params.resolved(self.defaults, len(ids)))
        stop_ids = self._stop_ids(params)
        schema = cast(Mapping[str, Any] | None, params.schema)
        if reading is not None and (checked.offered is not None or params.constrained):
            params, constraint = self._held(params, reading())
        else:
            constraint = self.constraint(params)
        generate = partial(
            self._engine.generate,
            ids,
            params,
            stop_ids=stop_ids,
            logits_processor=logits_processor,
            constraint=constraint,
            adapter=adapter,
            cache_salt=cache_salt,
            priority=priority,
        )

        def begin() -> TokenAnswer:
            answer = generate()
            if timeout is not None:
                answer.deadline = time.monotonic() + timeout
            return answer

        return Stream(self, begin, params, ids, reading, schema)

    def _by_ids(self, params: SamplingParams) -> SamplingParams:
        """Returns the sampling parameters with bad words as token ids; bad words of one token
        become biases. Raises RequestError for ids that are not in the vocabulary, and if no token
        is left to choose."""
        words: dict[Sequence[int], None] = {}
        for word in params.bad_words:
            if not isinstance(word, str):
                words[tuple(word)] = None
                continue
            for text in (word.lstrip(), f" {word.lstrip()}"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                words |= {tuple(ids): None} if ids else {}
        bias = dict(params.logit_bias or {})
        bias |= {word[0]: -math.inf for word in words if len(word) == 1}
        several = [word for word in words if len(word) > 1]
        if words:
            params = replace(params, bad_words=several, logit_bias=bias)
        params.check_tokens(self._engine.vocab_size)
        if params.allowed_token_ids is not None and params.constrained:
            raise RequestError(
                "`allowed_token_ids` leave no room for an answer by a schema, a regex, choices or "
                "a grammar: give one of them."
            )
        return params

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Returns the tokens that end an answer. Raises RequestError if they are too many, or if no
        other token may come before `min_tokens`."""
        ends = () if params.ignore_eos else self.tokenizer.eos_token_ids
        stop_ids = sorted({*ends, *params.stop_token_ids})
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"`stop_token_ids` must be at most {MAX_STOP_IDS - len(ends)} token ids, not "
                f"{len(params.stop_token_ids)}."
            )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed is not None and {*allowed} <= {*stop_ids}:
            raise RequestError(
                "`min_tokens` asks for tokens that end nothing, and `allowed_token_ids` have none."
            )
        return stop_ids

    def _held(
        self, params: SamplingParams, reading: Reading
    ) -> tuple[SamplingParams, Constraint | None]:
        """Returns the sampling parameters of an answer that may have calls or thoughts, and its
        constraint, or None."""
        held = reading.held(params)
        try:
            return held, self.constraint(held)
        except InferError as error:
            if held is params:
                raise
            if params.constrained or reading.is_strict:
                if isinstance(error, RequestError):
                    raise RequestError(f"tools: {error}") from error
                raise
        return params, None  # calls may come, and need not follow a grammar

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> Result: ...

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompts,
        params: Params | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    async def agenerate(
        self,
        prompt: Prompts,
        params: Params | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[list[Result]]: ...

    @overload
    async def agenerate(
        self, *, prompts: Prompts, params: Params | None = None, **options: Unpack[AnswerOptions]
    ) -> list[Result]: ...

    @_checked(renamed={"prompts": "prompt"})  # type: ignore[misc]
    async def agenerate(
        self,
        prompt: Prompt | Prompts,
        params: Params | None = None,
        *,
        n: int = 1,
        **options: Unpack[AnswerOptions],
    ) -> Results:
        """`generate` for event loops, which it never blocks. Answers that tasks wait for are
        generated together. Cancelling a task ends its answers."""
        import asyncio

        from infer.aio import AsyncStream, together

        prompts = listed(prompt)
        asked = samples(prompts, n, {**options, "params": params})

        def opened() -> list[Stream]:  # in a thread: long prompts take long
            return [self.stream(each, **own) for each, own in asked]

        streams = await asyncio.to_thread(opened)
        results = await together([AsyncStream(self._runner, each, True) for each in streams])
        return by_prompt(results, prompts, n)

    @overload
    async def achat(  # type: ignore[overload-overlap]
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> Result: ...

    @overload
    async def achat(  # type: ignore[overload-overlap]
        self,
        messages: Chats,
        params: Params | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    async def achat(  # type: ignore[overload-overlap]
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[Result]: ...

    @overload
    async def achat(
        self,
        messages: Chats,
        params: Params | None = None,
        *,
        n: int,
        **options: Unpack[AnswerOptions],
    ) -> list[list[Result]]: ...

    @_checked()
    async def achat(
        self,
        messages: Chat | Chats,
        params: Params | None = None,
        *,
        n: int = 1,
        **options: Unpack[AnswerOptions],
    ) -> Results:
        """`chat` for event loops, which it never blocks: see `agenerate`."""
        return await self.agenerate(as_chats(messages), params, n=n, **options)

    @_checked()
    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[AnswerOptions]
    ) -> AsyncStream[Chunk, Result]:
        """`stream` for event loops: `async for chunk in llm.astream(prompt)`. It raises
        RequestError at once, too."""
        from infer.aio import AsyncStream

        return AsyncStream(self._runner, self.stream(prompt, params, **options), False)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Returns the constraint that the parameters ask for, or None. Raises RequestError for a
        constraint that cannot be followed."""
        return self._constraints.of(params) if params.masked else None

    @cached_property
    def _runner(self) -> Runner:
        from infer.aio import Runner

        return Runner(self._engine, self._call)

    @checked()
    async def aembed(
        self,
        texts: Prompt | Prompts,
        *,
        pooling: Literal["mean", "last"] | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """`embed` for event loops, which it never blocks. It is computed to its end, whether a task
        waits for it or was cancelled."""
        import asyncio

        embed = partial(self.embed, pooling=pooling, normalize=normalize, adapter=adapter)
        return await asyncio.to_thread(embed, texts)

    @checked()
    async def ascore(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str | None = None,
    ) -> list[Score]:
        """`score` for event loops, which it never blocks. It is computed to its end, whether a task
        waits for it or was cancelled."""
        import asyncio

        return await asyncio.to_thread(self.score, prompt, continuations, adapter=adapter)

    @checked()
    def save_cache(
        self,
        path: str | Path,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> int:
        """Computes a prompt, unless the cache has it, and saves the prompt's cache in a file. With
        `load_cache`, prompts that begin alike can go on from it, also in another process.

        Returns how many tokens of the prompt are saved: all, or, with models whose layers have
        states, the tokens up to the last saved state. adapter, cache_salt: as for `stream`.
        template_args: variables for the chat template. Raises RequestError if the file cannot be
        written.
        """
        self._check_open()
        self._engine.check_adapter(adapter)
        _check_salt(cache_salt)
        _check_template_args(template_args)
        ids = self.encode(prompt, **(template_args or {}))
        self._engine.check_prompt(ids)
        of = str(Path(path).absolute()), ids, adapter, cache_salt
        with self._call():
            (length,) = self._engine.save_cache(*of)
        return length

    @checked()
    def load_cache(
        self, path: str | Path, *, adapter: str | None = None, cache_salt: str | None = None
    ) -> int:
        """Lets prompts go on from a cache that `save_cache` has saved in a file, as if it had just
        been computed. Returns how many tokens it has.

        adapter: as when it was saved. cache_salt: calls with this salt find the loaded cache.
        Raises RequestError for a file that cannot be read, is damaged or is no such file, and for
        one that was saved with another model, quantisation, `kv_dtype`, adapter or version of
        infer.
        """
        self._check_open()
        self._engine.check_adapter(adapter)
        _check_salt(cache_salt)
        with self._call():
            (length,) = self._engine.load_cache(str(Path(path).absolute()), adapter, cache_salt)
        return length

    @checked()
    def encode(self, prompt: Prompt, /, **template_args: Any) -> list[int]:
        """Returns the token ids of a prompt, as `generate` takes it. template_args: for a chat, the
        arguments of `Tokenizer.encode_chat` (add_generation_prompt, continue_final_message, …), and
        tools, as for `stream`."""
        if "tools" in template_args:
            template_args["tools"] = check_tools(template_args["tools"]).offered
        return [*chain.from_iterable(self.encode_pieces(prompt, template_args))]

    def encode_pieces(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
    ) -> Iterator[list[int]]:
        """Yields the ids of a prompt; the ids of a long prompt come a piece at a time, as from
        `Tokenizer.encode_pieces`.

        add_special_tokens: whether a text gets the special tokens that texts begin and end with.
        """
        if isinstance(prompt, str):
            yield from self.tokenizer.encode_pieces(prompt, add_special_tokens)
            return
        several = isinstance(prompt, Iterable) and getattr(prompt, "ndim", 1) > 0
        if several and not isinstance(prompt, Mapping | bytes | bytearray | memoryview):
            items: list[Any] = list(prompt)
            if set(map(type, items)) <= {int}:
                yield items
                return
            if items and all(isinstance(item, Mapping) for item in items):
                text = self.tokenizer.render_chat(items, **template_args)
                yield []  # rendering took time too, so the caller may stop here
                yield from self.tokenizer.encode_pieces(text, self.tokenizer.bos_before_chats)
                return
            if all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in items):
                yield [int(item) for item in items]
                return
        raise RequestError("A prompt is text, a list of token ids, or a list of chat messages.")

    @checked()
    def decode(self, ids: int | Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, or of one id. Bytes that are not UTF-8 become U+FFFD.
        Raises RequestError for ids that the model does not have."""
        listed = list(ids) if isinstance(ids, Iterable) else [ids]
        for i in listed:
            if not (isinstance(i, int | np.integer) and 0 <= i < self._engine.vocab_size):
                raise RequestError(
                    f"Token ids are integers from 0 to {self._engine.vocab_size - 1}, not {i!r}."
                )
        return self.tokenizer.decode(list(map(int, listed)), skip_special_tokens)

    @checked()
    def embed(
        self,
        texts: Prompt | Prompts,
        *,
        pooling: Literal["mean", "last"] | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """The embedding of a text, [hidden_size], or of each of a list of texts, [texts,
        hidden_size]: the hidden states of its tokens after the last norm, pooled. They are computed
        in steps beside those of answers.

        texts: one or several, as the prompts of `generate`. An instruction that a model expects
            before a text is not added.
        pooling: the "mean" of all tokens, or the "last" one. None: as the model's files for
            sentence-transformers say, else the mean.
        normalize: whether each embedding is scaled to length 1. None: as these files say, else
            true.
        adapter: the name of one of `adapters`.

        Raises RequestError for a text that cannot be served, and UnsupportedError if the files ask
        for a pooling that is not implemented, unless `pooling` is given.
        """
        self._check_open()
        self._engine.check_adapter(adapter)
        if pooling not in (None, *POOLINGS):
            raise RequestError(f"pooling must be mean or last, not {shown(pooling)}.")
        if not (normalize is None or isinstance(normalize, bool)):
            raise RequestError(f"normalize must be true or false, not {shown(normalize)}.")
        own = self._embedding
        if pooling is None and own.refused:
            raise UnsupportedError(f"{own.refused} Give embed() a pooling to do without.")
        prompts, several = self._encoded(texts)
        with self._call():
            pooled = list(self._engine.embed(prompts, pooling or own.pooling, adapter))
        vectors = np.array(pooled).reshape(len(pooled), self.config.hidden_size)
        if own.normalize if normalize is None else normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        embeddings = vectors.astype(np.float32)
        return embeddings if several else embeddings[0]

    @overload
    def logits(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, adapter: str | None = None
    ) -> NDArray[np.float32]: ...

    @overload
    def logits(
        self, prompt: Prompts, *, adapter: str | None = None
    ) -> list[NDArray[np.float32]]: ...

    @checked()
    def logits(
        self, prompt: Prompt | Prompts, *, adapter: str | None = None
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Returns the logits after every token of a prompt, [tokens, vocab_size], for scoring; for
        a list of prompts, a list of such arrays."""
        self._check_open()
        self._engine.check_adapter(adapter)

        encoded, several = self._encoded(prompt)
        with self._call():
            found = [np.concatenate([*self._engine.logits(ids, adapter)]) for ids in encoded]
        return found if several else found[0]

    def _encoded(self, prompt: Prompt | Prompts) -> tuple[list[list[int]], bool]:
        """Returns the ids of each prompt, and whether a list of prompts was given. Raises
        RequestError for a prompt that does not fit into the context."""
        prompt = listed(prompt)
        several = are_several(prompt)
        each = cast(Sequence[Prompt], prompt if several else [prompt])
        encoded = [*map(self.encode, each)]
        for ids in encoded:
            self._engine.check_prompt(ids, room=0)
        return encoded, several

    @checked()
    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str | None = None,
    ) -> list[Score]:
        """Returns how likely each continuation of a prompt is, in their order.

        If prompt and continuation are both text, they are tokenised together, and the tokens behind
        the prompt's tokens count; spaces at the prompt's end belong to the continuation. Otherwise
        the continuation's tokens follow the prompt's, without special tokens.

        Raises RequestError for a prompt that cannot be served, and for a continuation without
        tokens.
        """
        self._check_open()
        self._engine.check_adapter(adapter)
        if isinstance(continuations, str) or not isinstance(continuations, Iterable):
            raise RequestError(
                f"continuations must be a list of texts or of token ids, not "
                f"{shown(continuations)}."
            )
        pairs = [self._scored_ids(prompt, each) for each in continuations]
        with self._call():
            return [self._score(ids, begin, adapter) for ids, begin in pairs]

    @overload
    def prompt_logprobs(  # type: ignore[overload-overlap]
        self, prompt: Prompt, n: int = 0, *, adapter: str | None = None
    ) -> list[TokenLogprob]: ...

    @overload
    def prompt_logprobs(
        self, prompt: Prompts, n: int = 0, *, adapter: str | None = None
    ) -> list[list[TokenLogprob]]: ...

    @checked()
    def prompt_logprobs(
        self, prompt: Prompt | Prompts, n: int = 0, *, adapter: str | None = None
    ) -> list[TokenLogprob] | list[list[TokenLogprob]]:
        """Returns the log probability of each token of a prompt but the first, given the tokens
        before it, and of the n most probable tokens in its place; for a list of prompts, a list of
        such lists. The positions of tokens count in a text in which special tokens stand by their
        names."""
        self._check_open()
        self._engine.check_adapter(adapter)
        if type(n) is not int or not 0 <= n <= self._engine.vocab_size:
            raise RequestError(
                f"n must be an integer from 0 to {self._engine.vocab_size}, not {shown(n)}."
            )
        encoded, several = self._encoded(prompt)
        with self._call():
            found = [self._prompt_logprobs(ids, n, adapter) for ids in encoded]
        return found if several else found[0]

    def _prompt_logprobs(
        self, ids: Sequence[int], n: int, adapter: str | None
    ) -> list[TokenLogprob]:
        special = frozenset(self.tokenizer.special_names.values())
        detokenizer = StreamingDetokenizer(self.tokenizer, [], special)
        starts = []
        for i in ids:
            starts.append(detokenizer.length)
            detokenizer.add(i)
        return [*map(self._logprob, ids[1:], self._ranked(ids, n, adapter), starts[1:])]

    def _ranked(self, ids: Sequence[int], n: int, adapter: str | None) -> Iterator[Logprobs]:
        """Yields the log probabilities of all tokens but the first, each with the n most probable
        tokens in its place."""
        if n <= MAX_LOGPROBS:
            for part in self._engine.score(ids, n, adapter):
                yield from part
            return
        given = iter(ids[1:])  # the GPU finds fewer, so the host ranks all logits
        for rows in self._engine.logits(ids[:-1], adapter) if len(ids) > 1 else ():
            yield from (logprobs(row, next(given), n) for row in rows)

    def _logprob(self, token: int, chosen: Logprobs, start: int) -> TokenLogprob:
        own, best = chosen
        text, raw = self.tokenizer.token_text, self.tokenizer.token_bytes
        top = tuple(TopLogprob(i, value, text(i), raw(i)) for i, value in best)
        return TokenLogprob(token, own, text(token), raw(token), top, start)

    def _scored_ids(
        self, prompt: Prompt, continuation: str | Sequence[int]
    ) -> tuple[list[int], int]:
        """Returns the ids of prompt and continuation together, and the index at which the
        continuation begins."""
        if isinstance(prompt, str) and isinstance(continuation, str):
            stripped = prompt.rstrip() or prompt
            ids, begin = self.encode(prompt + continuation), len(self.encode(stripped))
        else:
            ids = self.encode(prompt)
            begin = len(ids)
            if isinstance(continuation, str):
                ids += self.tokenizer.encode(continuation, add_special_tokens=False)
            else:
                ids += self.encode(continuation)
        self._engine.check_prompt(ids[:begin], room=0)
        self._engine.check_prompt(ids, room=0)
        if len(ids) <= begin:
            raise RequestError(
                f"The continuation {shown(continuation)} has no token of its own after the prompt."
            )
        return ids, begin

    def _score(self, ids: Sequence[int], begin: int, adapter: str | None) -> Score:
        """Returns the score of the ids from index `begin` on."""
        values: list[float] = []
        is_greedy = True
        ranked = zip(ids[1:], self._ranked(ids, 1, adapter), strict=True)
        for token, (own, best) in islice(ranked, begin - 1, None):
            values.append(own)
            is_greedy &= best[0][0] == token
        return Score(math.fsum(values), values, is_greedy)

    def _chunks(
        self,
        begin: Callable[[], TokenAnswer],
        params: SamplingParams,
        ids: list[int],
        result: Result,
        how: Callable[[], Reading] | None,
    ) -> Generator[Chunk, None, None]:
        """Yields the pieces of an answer. how: returns the way in which the answer is read; None if
        it is only text."""
        self._check_open()
        reading = None if how is None else how()
        parser = None if reading is None else reading.parser()
        keep = None if reading is None else reading.keep
        detokenizer = StreamingDetokenizer(self.tokenizer, ids, keep)
        stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        shown_ends = params.stop_token_ids if params.include_stop_str_in_output else ()
        functions = None if reading is None else reading.tools.python

        def settled(text: str) -> str:
            """Returns the part of a text that may be shown. Stop strings may end the text once
            there are more than min_tokens tokens."""
            return stop.add(text, may_end=len(result.token_ids) > params.min_tokens)

        def chunk(text: str, token: int | None, logprob: TokenLogprob | None = None) -> Chunk:
            thinking = parser is not None and parser.is_thinking
            pieces = Pieces(text) if parser is None else parser.add(text)
            if parser is not None and token is None:
                pieces += parser.finish(cut=result.finish_reason in ("length", "timeout"))
            thinking |= parser is not None and parser.is_thinking
            result.text += pieces.text
            result.reasoning += pieces.reasoning
            result.reasoning_tokens += thinking and token is not None
            if pieces.tool_calls:
                add_deltas(result.tool_calls, pieces.tool_calls, functions)
            if parser is not None and parser.unfinished is not None:
                del result.tool_calls[parser.unfinished :]
            return Chunk(pieces.text, token, logprob, pieces.reasoning, tuple(pieces.tool_calls))

        result.logprobs = None if params.logprobs is None else []
        answer = begin()
        result.timings = answer.timings
        try:
            for step in answer:
                ends = step.token in answer.stop_ids
                if ends and step.token not in shown_ends:
                    result.finish_reason = "stop"
                    break
                logprob = None
                if step.logprobs is not None:
                    start = detokenizer.length
                    logprob = self._logprob(step.token, step.logprobs, start)
                    assert result.logprobs is not None
                    result.logprobs.append(logprob)
                result.token_ids.append(step.token)
                piece = chunk(settled(detokenizer.add(step.token)), step.token, logprob)
                if ends or stop.hit is not None or (parser is not None and parser.is_done):
                    result.finish_reason = "stop"
                    yield piece
                    break
                yield piece
            else:
                if answer.cancelled:
                    return
                result.finish_reason = "timeout" if answer.timed_out else "length"
            text = ""
            if stop.hit is None:
                text = settled(detokenizer.finish())
                text += stop.finish()
                if stop.hit is not None:
                    result.finish_reason = "stop"
            piece = chunk(text, None)
            if result.finish_reason == "stop" and result.tool_calls:
                result.finish_reason = "tool_calls"
            if piece.text or piece.reasoning or piece.tool_calls:
                yield piece
        finally:
            result.stop_string = stop.hit
            answer.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Opens a block in which this thread calls the LLM. If the LLM was told to close meanwhile,
        it is closed at the block's end."""
        self._check_thread()
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            yield
        finally:
            self._inside.discard(thread)
            if self._closing:
                self.close()

    def _check_thread(self) -> None:
        """Raises RequestError if this thread is in the middle of another call, and DeviceError in
        a process that was forked."""
        if os.getpid() != self._pid:
            check_process()
        if threading.get_ident() in self._inside:
            raise RequestError(
                "This LLM is in the middle of another call of this thread, which a logits "
                "processor or a signal handler has interrupted. Let that one return first, or "
                "load() the model a second time."
            )

    # End

    def stats(self) -> EngineStats:
        """Returns the GPU memory of this model's device, the pages of its KV cache, and how many
        answers run and wait."""
        return self._engine.stats()

    def close(self) -> None:
        """Frees the GPU memory. Open streams end; streams of other threads, and their calls of
        `generate`, raise ClosedError at the next token. It may be called at any time, in any
        thread, and twice. If a signal handler or a logits processor calls it in the middle of a
        call, the memory is freed when that call returns."""
        self._closing = True
        if is_forked():
            return
        thread = threading.get_ident()
        for reference in list(self._open_streams.values()):
            stream = reference()
            if stream is not None:
                if stream._is_elsewhere or stream._reader not in (None, thread):
                    stream._error = ClosedError("The LLM was closed in the middle of this stream.")
                stream.close()
        if thread in self._inside:  # the call that runs in this thread comes here at its end
            return
        try:
            self._inside.add(thread)
            self._engine.close()
        finally:
            self._inside.discard(thread)

    def __repr__(self) -> str:
        parts = [self.config.model_type, self.summary.type, f"context {self.context}"]
        if self._closing:
            parts.append("closed")
        elif isinstance(self._engine, Engine):
            used = self._engine.device.memory_stats().allocated
            parts.append(f"{size(used)} on {self.gpu}")
        else:
            parts.append(f"in a process of its own on {self.gpu}")
        return f"<LLM {self.name}: {', '.join(parts)}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            check_process()
        if self._closing:
            raise ClosedError("This LLM has been closed. Load the model again.")


def listed(prompt: Any) -> Any:
    """Returns prompts as a list if they are an array, a column of a table, a generator or anything
    else that can be iterated over; a single prompt unchanged."""
    if isinstance(prompt, str | bytes | bytearray | memoryview | Mapping | list | tuple):
        return prompt
    # Arrays and columns of numpy, torch, pandas and others.
    if callable(tolist := getattr(prompt, "tolist", None)):
        items = tolist()
        return items if isinstance(items, list) else prompt
    return list(prompt) if isinstance(prompt, Iterable) else prompt


show_options(
    AnswerOptions,
    LLM.generate,
    LLM.chat,
    LLM.stream,
    LLM.agenerate,
    LLM.achat,
    LLM.astream,
)


def are_several(prompt: Any) -> bool:
    """Whether the value is a list of prompts, each of them a text or a list, or an empty list."""
    if not isinstance(prompt, list | tuple):
        return False
    return all(isinstance(each, str | list | tuple | np.ndarray) for each in prompt)


def as_chats(messages: Chat | Chats) -> Any:
    """Returns chat messages, or a list of chats, in which each text has become a message of the
    user."""
    given = listed(messages)
    return [*map(_messages, given)] if are_several(given) else _messages(given)


def samples(
    prompt: Prompt | Prompts, n: int, options: Mapping[str, Any]
) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    """Yields each prompt n times in a row, with the options of each sample. Samples have different
    seeds. Raises RequestError if n is no number of samples, or if params are a list of another
    length."""
    if type(n) is not int or n < 1:
        raise RequestError(f"n must be a positive integer, not {shown(n)}.")
    seed, params = options.get("seed"), options.get("params")
    several = are_several(prompt)
    prompts = cast(Sequence[Prompt], prompt if several else [prompt])
    if not isinstance(params, list | tuple):
        params = [params] * len(prompts)
    elif not several or len(params) != len(prompts):
        count = f"{len(prompts)} prompts were" if several else "one prompt was"
        raise RequestError(
            f"params is a list of {len(params)}, and {count} given: give one for each of a list of "
            "prompts, or one for all."
        )
    for each, one in zip(prompts, params, strict=True):
        yield each, {**options, "params": one}  # the values of the options are not checked yet
        for i in range(1, n):
            own: dict[str, Any] = {"params": one}
            if isinstance(one, SamplingParams) and one.seed is not None:
                own["params"] = replace(one, seed=(one.seed + i) % 2**64)
            elif seed is not None:
                own["seed"] = (seed + i) % 2**64
            yield each, {**options, **own}


def by_prompt(results: list[Result], prompt: Prompt | Prompts, n: int) -> Results:
    """Returns the results of `samples` in the form that the caller expects: one, a list, or a list
    for each prompt."""
    if n > 1 and are_several(prompt):
        return [results[i : i + n] for i in range(0, len(results), n)]
    return results if n > 1 or are_several(prompt) else results[0]


def together(streams: Iterable[Stream]) -> list[Result]:
    """Generates all streams together, to their ends. Returns their results."""
    with ExitStack() as opened:
        listed = [opened.enter_context(stream) for stream in streams]
        for stream in listed:
            stream._begin()
        return [stream._finish() for stream in listed]


def _is_chat(prompt: object) -> bool:
    """Whether a prompt is chat messages."""
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _params(params: SamplingParams | None, sampling: SamplingOptions) -> SamplingParams:
    """Returns the sampling parameters of a call. sampling: the single options, if params is None;
    their names are known to be right. Raises RequestError for a value that is wrong, and if both
    are given."""
    if not (params is None or isinstance(params, SamplingParams)):
        raise RequestError(f"params must be SamplingParams, not {shown(params)}.")
    if params is not None and sampling:
        raise RequestError("Give either params or single sampling options, not both.")
    return params if params is not None else SamplingParams(**sampling)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_processor(logits_processor: LogitsProcessor | None) -> None:
    if not (logits_processor is None or callable(logits_processor)):
        raise RequestError(
            "logits_processor must be a function of (ids so far, logits) that returns logits, "
            f"not {shown(logits_processor)}."
        )


def _check_salt(cache_salt: object) -> None:
    if not (cache_salt is None or isinstance(cache_salt, str)):
        raise RequestError(f"cache_salt must be a text, not {shown(cache_salt)}.")


def _check_priority(priority: object) -> None:
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError(
            f"`priority` must be an integer of 32 bits, the lowest first, not {shown(priority)}."
        )


def _check_timeout(timeout: object) -> None:
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool | np.bool_)
    if not (timeout is None or (is_number and 0 < float(timeout) < math.inf)):  # type: ignore[arg-type]
        raise RequestError(f"`timeout` must be a positive number of seconds, not {shown(timeout)}.")


def _check_template_args(template_args: object) -> None:
    if template_args is not None and not (
        isinstance(template_args, Mapping) and all(isinstance(name, str) for name in template_args)
    ):
        raise RequestError(
            '`template_args` must be a dictionary, such as {"enable_thinking": False}, '
            f"not {shown(template_args)}."
        )


def check_options(
    params: SamplingParams | None = None,
    logits_processor: LogitsProcessor | None = None,
    template_args: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    adapter: str | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
    timeout: float | None = None,
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """Checks options without a model. Raises the error that `stream` would raise for options that
    no model takes."""
    begins_answer(add_generation_prompt, continue_final_message)
    check_tools(tools, tool_choice, parallel_tool_calls)
    _check_processor(logits_processor)
    _check_salt(cache_salt)
    _check_priority(priority)
    _check_timeout(timeout)
    _check_template_args(template_args)
    _params(params, sampling)
