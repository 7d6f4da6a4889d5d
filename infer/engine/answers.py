"""What an engine keeps of answers, and of the steps that make them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.constraint import Constraint
from infer.engine.scheduler import Prefill
from infer.engine.speculation import Guess
from infer.engine.token_engine import Step, Timings, TokenAnswer, TokenEngine
from infer.kernels.errors import InferError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Recording
from infer.kernels.state.sampler import LOGPROB, ROW_LOGPROBS, SamplerChain
from infer.sampling import NumpySampler, SamplingParams

NOTHING = Recording([])
LOGPROBS_BYTES = ROW_LOGPROBS * LOGPROB.itemsize  # of a row


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


@dataclass(eq=False)
class Text(ABC):
    """One that is computed for its own sake: nothing comes after it."""

    prompt: Sequence[int]
    adapter: str | None
    sequence: scheduler.Sequence
    ended: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)

    @property
    def table_length(self) -> int:
        """As that of an Answer."""
        return int(self.sequence.group)

    @abstractmethod
    def rows(self, work: Prefill) -> range:
        """Those of a step that are read back."""

    @abstractmethod
    def take(self, start: int, values: NDArray[np.float32]) -> None:
        """What was read back, [rows, values], of a step of tokens from `start` on. A text that is
        computed anew comes from 0 on again."""


@dataclass(eq=False)
class Embedding(Text):
    """Hidden states are pooled; `pooled` [hidden_size] is whole once it has `ended`.

    pooling: "mean" of all its tokens, or the "last" alone.
    """

    pooling: str
    pooled: NDArray[np.float64] | None = field(default=None, init=False)

    def rows(self, work: Prefill) -> range:
        first = 0 if self.pooling == "mean" else len(self.prompt) - 1 - work.start
        return range(first, work.count)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        count = len(self.prompt) if self.pooling == "mean" else 1
        part = values.sum(0, dtype=np.float64) / count
        before = self.pooled if start else None
        self.pooled = part if before is None else before + part


@dataclass(eq=False)
class Scored(Text):
    """What comes after each of its tokens: all logits, or where `given` says which token does, the
    log probabilities of that one and of the most probable ones, LOGPROB records as the bits of
    floats. parts: those that nobody has taken."""

    given: Sequence[int] | None
    parts: deque[NDArray[np.float32]] = field(default_factory=deque, init=False)
    count: int = field(default=0, init=False)  # of all rows that came

    def rows(self, work: Prefill) -> range:
        return range(work.count)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        new = values[max(0, self.count - start) :]
        if len(new):
            self.parts.append(new.copy())
            self.count += len(new)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A step's part of a text, from its token `start` on. rows: of the step, that are read back of
    `buffer`, in which each has so many `words` of 4 bytes, of which the first `width` count."""

    text: Text
    start: int
    last: bool
    rows: range
    buffer: Buffer
    words: int
    width: int


@dataclass(eq=False)
class InFlight:
    """A submitted step that has not been read. rows: of those that are sampled the sequences, and
    which of them have their logits read back. logprobs: whether the sampler's are. prefilled: rows
    of a prompt. chunk: of a text that is embedded. sequences: of a decode step. drafts: the token
    that each of its rows was drafted with, or None, if there are drafts; NO_TOKEN where only the
    GPU knows it. kind: what its time is measured by (`Speculation.measured`)."""

    submission: Any
    staging: Staging
    rows: tuple[scheduler.Sequence, ...]
    logits_of: tuple[int, ...]
    logprobs: bool
    prefilled: int
    chunk: Chunk | None
    sequences: int
    drafts: tuple[int | None, ...]
    kind: Hashable
    since: float


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that share decode steps, and what these dispatch: made once, while the same ones
    stay. joins: the same for a step that takes their rows from wherever they are. logits_of: which
    of them have their logits read back. logprobs: whether any has log probabilities. masked: those
    that have a mask. Where there are some the step is also there in two parts: the body, with joins
    or without, and the head, which samples."""

    sequences: tuple[scheduler.Sequence, ...]
    slots: tuple[int, ...]
    table_length: int
    chain: SamplerChain
    by_row: bool
    recording: Recording
    joins: Recording
    logits_of: tuple[int, ...]
    logprobs: bool
    masked: tuple[scheduler.Sequence, ...] = ()
    body: Recording = NOTHING
    body_joins: Recording = NOTHING
    head: Recording = NOTHING


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step of so many rows of a batch that is recorded, to be the one of that number. drafting:
    with what a draft model does before, for so many sequences, so many tokens each. body: of the
    step, where there are masks; None: it is one with the rest. first: the draft model's first step,
    which comes before, by whether any sequence is behind; one is to be sent."""

    batch: Batch
    rows: int
    drafting: tuple[int, int]
    number: int
    body: Any
    commands: Any
    first: tuple[Any, ...] = ()


class Staging:
    """Where the ids of a step in flight go, log probabilities, and the logits, or the hidden
    states, of some rows."""

    def __init__(self, device: Device, most_rows: int, nbytes: int) -> None:
        """nbytes: of `rows`, to begin with."""
        self._device = device
        self.ids = device.buffer(4 * most_rows, "read", "ids")
        self.logprobs = device.buffer(LOGPROBS_BYTES * most_rows, "read", "logprobs")
        self._rows = device.buffer(nbytes, "read", "rows")

    def rows(self, nbytes: int) -> Buffer:
        """Room for so many bytes; made anew where it is too small."""
        if self._rows.nbytes < nbytes:
            self._device.destroy([self._rows])
            self._rows = self._device.buffer(nbytes, "read", "rows")
        return self._rows

    def destroy(self) -> None:
        self._device.destroy([self.ids, self.logprobs, self._rows])
