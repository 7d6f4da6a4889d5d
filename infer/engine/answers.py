"""The state that an engine keeps of each answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.constraint import Constraint
from infer.engine.speculation import Guess
from infer.engine.token_engine import Step, Timings, TokenAnswer, TokenEngine
from infer.kernels.errors import InferError
from infer.kernels.state.sampler import SamplerChain
from infer.kernels.state.step import NO_TOKEN
from infer.sampling import Logprobs, NumpySampler, SamplingParams, logprobs


@dataclass(eq=False)
class Answer(TokenAnswer):
    """An answer that this process generates."""

    engine: TokenEngine
    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: Sequence[int]
    with_logits: bool
    adapter: str | None
    cache_salt: str | None
    limit: int  # the most tokens after the prompt
    sampler: NumpySampler | None  # if the host chooses the tokens
    constraint: Constraint | None
    chain: SamplerChain
    guess: Guess | None  # if tokens may be drafted
    sequence: scheduler.Sequence  # its group is the length that selects the rotary table
    timings: Timings = field(default_factory=Timings)
    steps: deque[Step] = field(default_factory=deque)  # that nobody has taken yet
    count: int = 0  # all tokens after the prompt
    newest: int = -1  # the last of them
    ended: bool = False
    cancelled: bool = False  # it ends before the next step
    error: InferError | None = None
    begun: float = field(default_factory=time.perf_counter)

    def give(self, step: Step) -> None:
        """Take in its next token. Its sequence is told afterwards."""
        # No interrupt comes between these two: it would come at the end of a call.
        self.count, self.newest = self.count + 1, step.token
        self.steps.append(step)

    def mend(self) -> None:
        """Complete what an interrupt may have cut in half."""
        tokens = self.sequence.tokens
        if len(tokens) - len(self.prompt) < self.count:
            tokens.append(self.newest)
        if self.sampler is not None:
            self.sampler.ids = np.array(tokens, np.int64)

    @property
    def is_over(self) -> bool:
        """Whether its last token has come."""
        return self.count >= self.limit or self.newest in self.stop_ids

    @property
    def table_length(self) -> int:
        """The length that selects its rotary table (rope.table_length)."""
        return int(self.sequence.group)

    @property
    def reads_logits(self) -> bool:
        return self.with_logits or self.sampler is not None

    @property
    def is_masked(self) -> bool:
        """Whether the GPU chooses its tokens among those that the host allows."""
        return self.constraint is not None and self.sampler is None

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
