"""What an engine computes sequences for: answers, and texts that are embedded or scored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.speculation import Guess
from infer.engine.token_engine import Request, Step, Timings, TokenAnswer, TokenEngine
from infer.kernels.errors import InferError
from infer.kernels.state.sampler import SamplerChain
from infer.kernels.state.step import NO_TOKEN
from infer.sampling import Logprobs, NumpySampler, logprobs


class Job:
    """What a sequence is computed for.

    cancelled: it ends before the next step. error: what ended it. guess: how an answer goes on, if
    tokens may be drafted. is_masked: whether the GPU chooses its tokens among those that the host
    allows. reads_logits: whether the logits of its tokens are read back.
    """

    prompt: Sequence[int]
    adapter: str | None
    sequence: scheduler.Sequence
    ended: bool
    cancelled: bool
    error: InferError | None
    guess: Guess | None = None
    is_masked: bool = False
    reads_logits: bool = False

    @property
    def table_length(self) -> int:
        """The length that selects its rotary table (`rope.table_length`)."""
        return int(self.sequence.group)

    def mend(self) -> None:
        """Complete what an interrupt may have cut in half."""


class Answer(Job, TokenAnswer):
    """An answer that this process generates.

    steps: those that nobody has taken yet. count: all tokens after the prompt, and newest: the last
    of them. limit: the most there can be. sampler: given if the host chooses the tokens. chain: the
    stages of its sampling on the GPU. begun: when it was asked for, of time.perf_counter().
    """

    def __init__(
        self,
        engine: TokenEngine,
        request: Request,
        sequence: scheduler.Sequence,
        limit: int,
        chain: SamplerChain,
        sampler: NumpySampler | None,
    ) -> None:
        self.engine, self.sequence = engine, sequence
        self.prompt, self.params, self.stop_ids = request.prompt, request.params, request.stop_ids
        self.adapter, self.cache_salt = request.adapter, request.cache_salt
        self.constraint, self.with_logits = request.constraint, request.with_logits
        self.limit, self.chain, self.sampler = limit, chain, sampler
        self.is_masked = self.constraint is not None and sampler is None
        self.reads_logits = self.with_logits or sampler is not None
        self.timings = Timings()
        self.steps: deque[Step] = deque()
        generated = request.generated
        self.count, self.newest = len(generated), generated[-1] if generated else -1
        self.ended = self.cancelled = False
        self.error: InferError | None = None
        self.begun = time.perf_counter()

    def give(self, step: Step) -> None:
        """Take in its next token. Its sequence is told afterwards."""
        # No interrupt comes between these two: it would come at the end of a call.
        self.count, self.newest = self.count + 1, step.token
        self.steps.append(step)

    def mend(self) -> None:
        tokens = self.sequence.tokens
        if len(tokens) - len(self.prompt) < self.count:
            tokens.append(self.newest)
        if self.sampler is not None:
            self.sampler.ids = np.array(tokens, np.int64)

    @property
    def is_over(self) -> bool:
        """Whether its last token has come."""
        return self.count >= self.limit or self.newest in self.stop_ids

    def time(self, now: float) -> None:
        """A token has come; which is not counted yet."""
        timings, sequence = self.timings, self.sequence
        if not self.count:
            timings.prefill_seconds = now - self.begun
            timings.queue_seconds = sequence.admitted - self.begun
            timings.reused_tokens = sequence.reused
            timings.prefilled_tokens = len(self.prompt) - sequence.reused
        else:
            timings.decode_seconds = now - self.begun - timings.prefill_seconds
            timings.decoded_tokens += 1

    def logprobs(
        self, token: int, logits: NDArray[np.float32] | None, records: NDArray[Any] | None
    ) -> Logprobs | None:
        """The log probabilities that it asks for: from the logits if the host chose the token, else
        from the LOGPROB records of its row."""
        n = self.params.logprobs
        if n is None:
            return None
        if self.sampler is not None:
            assert logits is not None  # asked for
            return logprobs(logits, token, n)
        assert records is not None  # a stage of its chain
        return ranked(records, n)


def ranked(records: NDArray[Any], n: int) -> Logprobs:
    """The log probabilities in the LOGPROB records of a row."""
    best = records[1 : 1 + n]
    return float(records["logprob"][0]), best[best["token"] != NO_TOKEN].tolist()
