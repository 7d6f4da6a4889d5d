"""The interface of an engine, in this process or another: token ids in, token ids out."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import shown
from infer.engine.constraint import Constraint
from infer.engine.host_cache import HostCacheStats
from infer.engine.pages import PoolStats
from infer.engine.prompts import Prompt
from infer.kernels.errors import InferError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import MemoryStats
from infer.models.blocks.layers import DecoderConfig
from infer.sampling import LogitsProcessor, Logprobs, SamplingParams


@dataclass(frozen=True)
class Step:
    """A chosen token, and if asked for the logits [vocab] that it was chosen from, and log
    probabilities."""

    token: int
    logits: NDArray[np.float32] | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Request:
    """What is asked of an engine: an answer to a prompt.

    params: `resolved`. stop_ids: tokens that end the answer. with_logits: the logits of every step
    are read back, too. logits_processor: with it numpy chooses the tokens. constraint: the one that
    params ask for. adapter: one of the engine's `adapter_names`. cache_salt: what is cached is
    found only by requests with the same salt. priority: requests with lower ones begin first.
    generated: tokens after the prompt that are there already; the answer continues after them.
    """

    prompt: Prompt
    params: SamplingParams
    stop_ids: Sequence[int] = ()
    with_logits: bool = False
    logits_processor: LogitsProcessor | None = None
    constraint: Constraint | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    generated: Sequence[int] = ()


@dataclass
class Timings:
    """Times and counts of one answer: seconds to the first token, and from there to the last;
    prompt tokens that were computed, and that were cached; tokens after the first. queue_seconds:
    how long it waited until its prompt was begun, a part of prefill_seconds."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """memory: of the device. cache: the pages of the KV cache. running, waiting: answers.
    preemptions: how often an answer had to give its pages back. drafts: how often something was
    drafted for an answer. drafted: tokens in all. accepted: those that were right. kv_dtype: of
    the cache. host_cache: what is in host memory, if anything may be."""

    memory: MemoryStats
    cache: PoolStats
    running: int
    waiting: int
    preemptions: int
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    kv_dtype: str = ""
    host_cache: HostCacheStats | None = None

    def continuing(self, ended: EngineStats) -> EngineStats:
        """Returns these statistics with the counts of an earlier engine added, which this one has
        replaced."""
        cache = replace(
            self.cache,
            hits=self.cache.hits + ended.cache.hits,
            lookups=self.cache.lookups + ended.cache.lookups,
        )
        counts = ("preemptions", "drafts", "drafted", "accepted")
        sums = {name: getattr(self, name) + getattr(ended, name) for name in counts}
        host = self.host_cache
        if host is not None and ended.host_cache is not None:
            host = replace(host, restored=host.restored + ended.host_cache.restored)
        return replace(self, cache=cache, host_cache=host, **sums)


class TokenAnswer(Iterator[Step]):
    """The tokens after a prompt, one by one, a stop id included. Close it to end it early.

    steps: those that nobody has taken. cancelled: it ends before the next step. error: what ended
    it, until that is raised. deadline: of time.monotonic(), after which nobody waits for a step.
    timed_out: somebody had to stop waiting.
    """

    engine: TokenEngine
    stop_ids: Sequence[int]
    timings: Timings
    steps: deque[Step]
    ended: bool
    cancelled: bool
    error: InferError | None
    deadline = math.inf
    timed_out = False

    def __next__(self) -> Step:
        step = self.engine.next_step(self)
        if step is None:
            raise StopIteration
        return step

    def close(self) -> None:
        """End the answer early. It may be called at any time, in any thread, in a signal handler,
        and twice."""
        self.engine.cancel(self)

    @property
    def is_ready(self) -> bool:
        """Whether the next step of the answer, or its end, is there without waiting."""
        known = bool(self.steps) or self.error is not None or self.ended or self.cancelled
        return known or self.is_late

    @property
    def is_late(self) -> bool:
        return self.deadline < math.inf and time.monotonic() >= self.deadline


class TokenEngine(ABC):
    """One model on one GPU. Threads may share it.

    context: the most positions of a prompt and its answer. slots: the most answers at once.
    adapter_names: the adapters that a call can choose.
    """

    config: DecoderConfig
    context: int
    vocab_size: int
    slots: int
    adapter_names: tuple[str, ...]

    @property
    @abstractmethod
    def gpu(self) -> AdapterInfo:
        """The adapter that it runs on."""

    @property
    def silent(self) -> float:
        """Seconds since its process last showed that it lives, which it does every few seconds."""
        return 0.0

    @property
    def restarts(self) -> bool:
        """Whether the engine's process has ended and the next one is not ready yet."""
        return False

    def check_prompt(self, prompt_ids: Sequence[int], room: int = 1) -> None:
        """Raises RequestError for a prompt that is empty, not of this vocabulary, with rows of
        another width, or that leaves no room for so many more tokens."""
        if not prompt_ids:
            raise RequestError("The prompt is empty: give at least one token.")
        prompt = Prompt.of(prompt_ids)
        for each in prompt.attachments:
            if each.rows.ndim != 2 or each.rows.shape[1] != self.config.hidden_size:
                raise RequestError(
                    f"Rows of shape {each.rows.shape} cannot stand in a prompt of this model: it "
                    f"takes [rows, {self.config.hidden_size}]."
                )
        tokens = prompt.tokens
        if tokens and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
            wrong = next(i for i in tokens if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"Token {shown(wrong)} is not in the model's vocabulary of {self.vocab_size} "
                "tokens."
            )
        if len(prompt_ids) + room > self.context:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens, and the context holds {self.context}, "
                "the answer included. Shorten the prompt or take a larger `context`."
            )

    def check_adapter(self, adapter: str | None) -> None:
        """Raises RequestError for an adapter that is not loaded."""
        if adapter is not None and adapter not in self.adapter_names:
            names = ", ".join(sorted(self.adapter_names)) or "none"
            raise RequestError(
                f"No adapter is called {shown(adapter)}. Loaded by a name: {names}. Give load() a "
                "dictionary of adapters."
            )

    def next_step(self, answer: TokenAnswer) -> Step | None:
        """The next of an answer's steps; None at its end, and where it is late. Raises what ended
        it."""
        while True:
            if not answer.steps:
                self.wait(lambda: answer.is_ready)
            # Looked at first: another thread adds the last step, or the error, and then ends it.
            over = answer.ended or answer.cancelled
            if answer.steps:
                return answer.steps.popleft()
            if answer.error is not None:
                error, answer.error = answer.error, None
                raise error
            if over:
                return None
            if answer.is_late:
                answer.timed_out = True
                return None

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        with_logits: bool = False,
        logits_processor: LogitsProcessor | None = None,
        constraint: Constraint | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> TokenAnswer:
        """The tokens after the prompt, until a stop id, max_tokens or the end of the context. The
        arguments are those of `Request`."""
        return self.answer(
            Request(
                Prompt.of(prompt_ids),
                params,
                stop_ids=stop_ids,
                with_logits=with_logits,
                logits_processor=logits_processor,
                constraint=constraint,
                adapter=adapter,
                cache_salt=cache_salt,
                priority=priority,
            )
        )

    @abstractmethod
    def answer(self, request: Request) -> TokenAnswer:
        """Begin an answer. Raises RequestError for a prompt or an adapter that cannot be."""

    @abstractmethod
    def cancel(self, answer: Any) -> None:
        """End an answer early. It may be called at any time, in any thread, and twice."""

    @abstractmethod
    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is asked between steps."""

    # Calls, which yield parts

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> Generator[NDArray[np.float64], None, None]:
        """The pooled hidden states [hidden_size] of each text after the last norm, in their order.

        pooling: the "mean" of all tokens, or the "last" one.
        """
        for ids in texts:
            self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.call("embed", texts, pooling, adapter)

    def score(
        self, ids: Sequence[int], n: int, adapter: str | None = None
    ) -> Generator[list[Logprobs], None, None]:
        """In chunks, of all tokens but the first: its log probability, and the n most probable
        tokens in its place, at most MAX_LOGPROBS."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.call("score", ids, n, adapter)

    def logits(
        self, ids: Sequence[int], adapter: str | None = None
    ) -> Generator[NDArray[np.float32], None, None]:
        """The logits of every position, in chunks [rows, vocab_size]."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.call("logits", ids, adapter)

    def save_cache(
        self,
        path: str,
        ids: Sequence[int],
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Generator[int, None, None]:
        """Computes what is not cached of a prompt, saves it in a file, and yields how many
        positions that are. Raises RequestError."""
        self.check_prompt(ids)
        self.check_adapter(adapter)
        yield from self.call("save_cache", path, ids, adapter, cache_salt)

    def load_cache(
        self, path: str, adapter: str | None = None, cache_salt: str | None = None
    ) -> Generator[int, None, None]:
        """Lets prompts go on from the one of a file, and yields how many positions that are. Raises
        RequestError."""
        self.check_adapter(adapter)
        yield from self.call("load_cache", path, adapter, cache_salt)

    @abstractmethod
    def call(self, what: str, *arguments: Any) -> Generator[Any, None, None]:
        """The parts of what the method of that name yields. Its arguments are checked."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> None:
        """Free the GPU memory."""
