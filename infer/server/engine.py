"""The interface of an engine to the server, in this process or another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from infer.aio import AsyncStream
from infer.engine.token_engine import EngineStats
from infer.kernels.errors import DeviceError, OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.llm import LLM, Prompt
from infer.models.loading.plan import Summary
from infer.results import Chunk, Result, TokenLogprob
from infer.sampling import SamplingParams
from infer.text.infill import Infill
from infer.text.tools import ToolOptions

T = TypeVar("T")
# Tokens or characters of a prompt: a shorter one is encoded sooner than handed to a thread.
_SHORT = 1000


async def in_thread(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Calls work() in a thread and returns its result. If the task is cancelled, `stop` is called,
    and the task ends when the thread does: so there are never more threads than tasks that wait for
    one."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([running])
        running.exception()  # takes the error, which nobody else asks for
        raise


class LongPromptError(RequestError):
    """A prompt has more tokens than it may have. tokens: how many were counted. is_whole: whether
    all tokens of the prompt were counted."""

    def __init__(self, tokens: int, is_whole: bool) -> None:
        count = f"{tokens}" if is_whole else f"at least {tokens}"
        super().__init__(f"The prompt is too long: it has {count} tokens.")
        self.tokens, self.is_whole = tokens, is_whole

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokens, self.is_whole)


class Answer(Protocol):
    """An answer that is generated. It begins when it is first asked for a piece. `result` holds
    what has been generated so far."""

    @property
    def result(self) -> Result: ...

    def __aiter__(self) -> Answer: ...

    async def __anext__(self) -> Chunk: ...

    async def aclose(self) -> None:
        """Ends the answer, and frees its place for the next."""


class EngineClient(Protocol):
    """An engine with one model, as the server uses it. Its methods raise only InferErrors."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> int:
        """The most positions of a prompt and its answer."""

    @property
    def slots(self) -> int:
        """The most answers that are generated at once; others wait."""

    @property
    def gpu(self) -> AdapterInfo: ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the LoRA adapters that `open` takes."""

    @property
    def failure(self) -> str | None:
        """The reason why nothing can be generated any more, or None."""

    @property
    def model_type(self) -> str: ...

    @property
    def summary(self) -> Summary:
        """The number and format of the model's weights."""

    @property
    def template(self) -> str:
        """The source of the default chat template; "" if the model has none."""

    @property
    def templates(self) -> Mapping[str, str]:
        """The sources of all chat templates, by name."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens, by names such as `bos_token`."""

    @property
    def embedding_size(self) -> int: ...

    @property
    def is_embedder(self) -> bool:
        """Whether the model's files say how to pool embeddings."""

    @property
    def infill(self) -> Infill | None:
        """The tokens by which the model is asked to fill in text between two others; None if it
        cannot."""

    async def encode(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
        most: int | None = None,
        counts: bool = False,
    ) -> list[int]:
        """Returns the token ids of a prompt. add_special_tokens: whether a text gets the tokens
        that texts begin and end with; chat templates write their own. most: LongPromptError may be
        raised as soon as there are more tokens. counts: whether all tokens are counted before it is
        raised."""

    async def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, in which special tokens stand by their names."""

    async def open(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        tools: ToolOptions | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Answer:
        """Prepares an answer. tools: given for chats, even if it names no tools: the answer is then
        split into text, reasoning and calls."""

    async def save_cache(
        self, path: Path, ids: Sequence[int], adapter: str | None, cache_salt: str | None
    ) -> int:
        """Saves the cached part of a prompt in a file, as `LLM.save_cache` does. Returns how many
        tokens are saved."""

    async def load_cache(self, path: Path, adapter: str | None, cache_salt: str | None) -> int:
        """Loads a file of the cache, as `LLM.load_cache` does. Returns how many tokens it has."""

    async def embed(
        self, texts: Sequence[Sequence[int]], adapter: str | None
    ) -> NDArray[np.float32]:
        """Returns the embeddings of texts, [texts, embedding_size]."""

    async def prompt_logprobs(
        self, ids: Sequence[int], n: int, adapter: str | None
    ) -> list[TokenLogprob]:
        """Returns the log probabilities of all tokens of a prompt but the first, each with the n
        most probable tokens in its place."""

    async def stats(self) -> EngineStats: ...


class LLMClient:
    """The engine of an LLM that was loaded in this process; the engine itself may run in another.
    Work that grows with the prompt is done in threads."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name, self.context = llm.name, llm.context
        self.slots, self.gpu, self.adapters = llm.slots, llm.gpu, llm.adapters
        self.failure: str | None = None
        self.model_type, self.summary = llm.config.model_type, llm.summary
        self.templates = llm.tokenizer.templates
        self.template = self.templates.get("default", "")
        self.special_tokens = llm.tokenizer.special_tokens
        self.embedding_size = llm.config.hidden_size
        self.is_embedder, self.infill = llm.is_embedder, llm.tokenizer.infill
        # Calls that wait for the GPU have a thread of their own: they would keep other calls from
        # theirs.
        self._calls = ThreadPoolExecutor(1, "infer.server")
        # Grammars have threads of their own, because a large one takes seconds.
        self._grammars = ThreadPoolExecutor(2, "infer.grammar")

    async def encode(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
        most: int | None = None,
        counts: bool = False,
    ) -> list[int]:
        stopped = threading.Event()

        def encode() -> list[int]:
            ids: list[int] = []
            if stopped.is_set():  # the task was cancelled before this began
                return ids
            tokens = 0
            for piece in self._llm.encode_pieces(prompt, template_args, add_special_tokens):
                if stopped.is_set():
                    return ids
                if most is not None and tokens > most:
                    if not counts:
                        raise LongPromptError(tokens, False)
                    ids = []  # the ids of a prompt that is too long are not needed
                tokens += len(piece)
                ids += piece
            if most is not None and tokens > most:
                raise LongPromptError(tokens, True)
            return ids

        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        if len(prompt) <= _SHORT and not is_chat:
            return encode()
        return await in_thread(encode, stopped.set)

    async def decode(self, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self._llm.decode, ids, skip_special_tokens=False)

    async def open(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        tools: ToolOptions | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Answer:
        chat: ToolOptions = {} if tools is None else {"tools": [], **tools}
        own = partial(self._llm.astream, params=params, adapter=adapter)
        begin = partial(own, cache_salt=cache_salt, priority=priority)
        has_grammar = params.constrained or bool(chat.get("tools"))
        if len(ids) <= _SHORT and not (has_grammar or params.bad_words):
            return _Answer(self, begin(ids, **chat))
        threads = self._grammars if has_grammar else None
        loop = asyncio.get_running_loop()
        return _Answer(self, await loop.run_in_executor(threads, partial(begin, ids, **chat)))

    async def save_cache(
        self, path: Path, ids: Sequence[int], adapter: str | None, cache_salt: str | None
    ) -> int:
        save = partial(self._llm.save_cache, path, list(ids), adapter=adapter)
        return await self._call(partial(save, cache_salt=cache_salt))

    async def load_cache(self, path: Path, adapter: str | None, cache_salt: str | None) -> int:
        load = partial(self._llm.load_cache, path, adapter=adapter)
        return await self._call(partial(load, cache_salt=cache_salt))

    async def embed(
        self, texts: Sequence[Sequence[int]], adapter: str | None
    ) -> NDArray[np.float32]:
        return await self._call(partial(self._llm.embed, list(texts), adapter=adapter))

    async def prompt_logprobs(
        self, ids: Sequence[int], n: int, adapter: str | None
    ) -> list[TokenLogprob]:
        return await self._call(partial(self._llm.prompt_logprobs, ids, n, adapter=adapter))

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._calls, call)
        except DeviceError as error:
            self.notice(error)
            raise

    def notice(self, error: DeviceError) -> None:
        """Takes note of a lost device: it stays lost. Running out of memory is no such loss."""
        if not isinstance(error, OutOfMemoryError):
            self.failure = str(error)

    async def stats(self) -> EngineStats:
        return await asyncio.to_thread(self._llm.stats)


class _Answer:
    def __init__(self, engine: LLMClient, stream: AsyncStream[Chunk, Result]) -> None:
        self._engine, self._stream = engine, stream

    @property
    def result(self) -> Result:
        return self._stream.so_far

    def __aiter__(self) -> _Answer:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return await self._stream.__anext__()
        except DeviceError as error:
            self._engine.notice(error)
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()
