"""What an engine keeps of an answer."""

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
    """One that this process generates."""

    engine: TokenEngine
    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: Sequence[int]
    with_logits: bool
    adapter: str | None
    cache_salt: str | None
    limit: int  # of tokens
    sampler: NumpySampler | None  # where the host chooses
    constraint: Constraint | None
    chain: SamplerChain
    guess: Guess | None  # where tokens may be drafted
    sequence: scheduler.Sequence  # of its group: by what length it is rotated
    timings: Timings = field(default_factory=Timings)
    steps: deque[Step] = field(default_factory=deque)  # those that nobody has taken
    count: int = 0  # of all tokens after the prompt
    ended: bool = False
    cancelled: bool = False  # it ends before the next step
    error: InferError | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def table_length(self) -> int:
        """By which the table of its positions is chosen (rope.table_length)."""
        return int(self.sequence.group)

    @property
    def reads_logits(self) -> bool:
        return self.with_logits or self.sampler is not None

    @property
    def is_masked(self) -> bool:
        """Whether the GPU chooses its tokens of those that the host allows."""
        return self.constraint is not None and self.sampler is None

    def logprobs(
        self, token: int, logits: NDArray[np.float32] | None, records: NDArray[Any] | None
    ) -> Logprobs | None:
        """What it asks for: from the logits where the host has chosen the token, else from the
        LOGPROB records of its row."""
        n = self.params.logprobs
        if n is None:
            return None
        if self.sampler is not None:
            assert logits is not None  # asked for
            return logprobs(logits, token, n)
        assert records is not None  # a stage of its chain
        return ranked(records, n)


def ranked(records: NDArray[Any], n: int) -> Logprobs:
    """LOGPROB records of a row."""
    best = records[1 : 1 + n]
    return float(records["logprob"][0]), best[best["token"] != NO_TOKEN].tolist()
