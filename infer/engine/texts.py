"""Texts that are embedded or scored, in steps beside those of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import ranked
from infer.engine.recordings import Recordings
from infer.engine.scheduler import Prefill
from infer.engine.steps import HIDDEN, SCORED, Steps
from infer.kernels.compiler.graph import stride
from infer.kernels.errors import InferError, ModelError
from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.record import Recording
from infer.kernels.state.sampler import LOGPROB, LOGPROBS_BYTES, Sampler
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.rope import table_length
from infer.sampling import Logprobs


@dataclass(eq=False)
class Text(ABC):
    """A text that is embedded or scored: nothing is generated after it."""

    prompt: Sequence[int]
    adapter: str | None
    sequence: scheduler.Sequence
    ended: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    error: InferError | None = field(default=None, init=False)

    @property
    def table_length(self) -> int:
        """How long the sequence gets, which chooses the rotary table, as for an Answer."""
        return int(self.sequence.group)

    @abstractmethod
    def rows(self, work: Prefill) -> range:
        """The rows of a step that are read back."""

    @abstractmethod
    def take(self, start: int, values: NDArray[np.float32]) -> None:
        """Take in what was read back, [rows, values], of a step of its tokens from `start` on. If
        the text is computed anew, it comes from 0 on again."""


@dataclass(eq=False)
class Embedding(Text):
    """A text whose hidden states are pooled: the "mean" of all tokens, or the "last" one. `pooled`
    [hidden_size] is complete once it has `ended`."""

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
    """A text that gives the logits after each of its tokens. Or, if `given` has the next token of
    each, the log probabilities of that one and of the most probable ones: LOGPROB records, as the
    bits of floats. parts: results that nobody has taken yet."""

    given: Sequence[int] | None
    parts: deque[NDArray[np.float32]] = field(default_factory=deque, init=False)
    count: int = field(default=0, init=False)  # of all rows that came

    def rows(self, work: Prefill) -> range:
        return range(work.count)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        new = values[max(0, self.count - start) :].copy()
        if len(new):
            self.count += len(new)
            self.parts.append(new)


@dataclass(frozen=True, eq=False)
class Chunk:
    """The part of a text in one step, from its token `start` on. rows: the rows of the step that
    are read back from `buffer`. Each row there takes `words` of 4 bytes; the first `width` count.
    """

    text: Text
    start: int
    last: bool
    rows: range
    buffer: Buffer
    words: int
    width: int


class TextEngine(Protocol):
    """The methods that texts call of the engine that computes them."""

    def begin(self, text: Text) -> None:
        """Queue it. Whoever waits computes it."""

    def cancel(self, text: Text) -> None:
        """Safe at any time, in any thread, and twice."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready`, which is asked between steps."""

    def turn(self) -> AbstractContextManager[None]:
        """In it, this thread alone makes steps."""


class Texts:
    """Steps of texts that are embedded or scored: their dispatches, and the results of each text.

    Each text is a sequence of its own, of which nothing is sampled. Its steps are made when the
    first text comes that needs them."""

    def __init__(self, steps: Steps, recordings: Recordings, config: DecoderConfig) -> None:
        self._steps, self._recordings, self._config = steps, recordings, config
        self._made: set[tuple[str, bool]] = set()  # kinds of step that are there, some by row
        self._scored: dict[tuple[bool, bool], Recording] = {}

    # Steps

    def chunk(self, text: Text, work: Prefill) -> Chunk:
        """Returns the rows to read back of a text's next step, and writes what computes them."""
        steps, rows = self._steps, text.rows(work)
        if isinstance(text, Embedding):
            width = self._config.hidden_size
            of = steps.hidden, stride(width), width
        elif isinstance(text, Scored) and text.given is not None:
            given = np.array(text.given[work.start : work.start + work.count], np.uint32)
            steps.device.write(self._ranker.sampled, given)
            of = self._ranker.logprobs, LOGPROBS_BYTES // 4, LOGPROBS_BYTES // 4
        else:
            vocab_size = self._config.vocab_size
            of = steps.scored, stride(vocab_size), vocab_size
        return Chunk(text, work.start, work.last, rows, *of)

    def forget_recordings(self) -> None:
        """Make them anew, when they are next needed."""
        self._scored.clear()

    def recording(self, text: Text, kind: str, head: bool, by_row: bool) -> Recording:
        """kind: of a step of prefill that has room for it. The others as for `Recordings.of`."""
        if isinstance(text, Embedding):
            return self._recordings.of(HIDDEN + kind, head, None, by_row)
        is_ranked = isinstance(text, Scored) and text.given is not None
        key = by_row, is_ranked
        if key not in self._scored:
            plan = self._steps.plan(SCORED, by_row)
            ranking = self._ranker.ranking if is_ranked else ()
            self._scored[key] = Recording((*plan.body, *plan.head, *ranking))
        return self._scored[key]

    @cached_property
    def _ranker(self) -> Sampler:
        """The sampler that ranks the logits of all rows and samples none."""
        steps, rows = self._steps, self._steps.scored_rows
        vocab_size = self._config.vocab_size
        return Sampler(steps.device, vocab_size, steps.scored, steps.step, max_rows=rows)

    def _make(self, kinds: Iterable[str], adapter: str | None, engine: TextEngine) -> None:
        """Beforehand: what fails here fails for nobody else."""
        missing = {(kind, adapter is not None) for kind in kinds} - self._made
        if missing:
            with engine.turn():
                for kind, by_row in missing:
                    self._steps.plan(kind, by_row)
                if (SCORED, adapter is not None) in missing:
                    _ = self._ranker.ranking, self._ranker.logprobs
            self._made |= missing

    def _sequence(
        self, ids: Sequence[int], adapter: str | None, chunk: int = 1 << 30
    ) -> scheduler.Sequence:
        """Nothing in the cache is reused, because a position in it has no hidden state any more,
        and nothing is left there."""
        length = table_length(self._config.rope, len(ids))
        key = adapter, length
        return scheduler.Sequence(ids, limit=0, key=key, group=length, shares=False, chunk=chunk)

    # Texts

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        pooling: str,
        adapter: str | None,
        engine: TextEngine,
        ahead: int,
    ) -> Generator[NDArray[np.float64], None, None]:
        """Yields an embedding for each text, as `TokenEngine.embed` does. So many texts are begun
        `ahead` of the one that is waited for; an answer that comes meanwhile need not wait for all
        of them."""
        self._make((HIDDEN + kind for kind in self._steps.rows), adapter, engine)
        running: deque[Embedding] = deque()
        try:
            for ids in texts:
                text = Embedding(ids, adapter, self._sequence(ids, adapter), pooling)
                engine.begin(text)
                running.append(text)
                if len(running) > ahead:
                    yield _pooled(running[0], engine)
                    running.popleft()
            while running:
                yield _pooled(running[0], engine)
                running.popleft()
        finally:
            for text in running:
                engine.cancel(text)

    def score(
        self, ids: Sequence[int], n: int, adapter: str | None, engine: TextEngine
    ) -> Generator[list[Logprobs], None, None]:
        """Yields the log probabilities of a text's tokens, as `TokenEngine.score` does."""
        for part in self._parts(ids[:-1], ids[1:], adapter, engine) if len(ids) > 1 else ():
            yield [ranked(row, n) for row in part.view(LOGPROB)]

    def logits(
        self, ids: Sequence[int], adapter: str | None, engine: TextEngine
    ) -> Iterator[NDArray[np.float32]]:
        """Yields the logits of a text's positions, as `TokenEngine.logits` does."""
        return self._parts(ids, None, adapter, engine)

    def _parts(
        self,
        ids: Sequence[int],
        given: Sequence[int] | None,
        adapter: str | None,
        engine: TextEngine,
    ) -> Iterator[NDArray[np.float32]]:
        self._make((SCORED,), adapter, engine)
        sequence = self._sequence(ids, adapter, self._steps.scored_rows)
        text = Scored(ids, adapter, sequence, given)
        engine.begin(text)
        try:
            while not (text.ended and not text.parts):
                engine.wait(lambda: bool(text.parts) or text.ended)
                if text.error is not None:
                    raise text.error
                while text.parts:
                    yield text.parts.popleft()
        finally:
            engine.cancel(text)


def _pooled(text: Embedding, engine: TextEngine) -> NDArray[np.float64]:
    """Waited for. Raises its error, and ModelError for what is not finite."""
    engine.wait(lambda: text.ended)
    if text.error is not None:
        raise text.error
    assert text.pooled is not None
    if not np.isfinite(text.pooled).all():
        raise ModelError(
            "The model's hidden states are not finite: its weights may be damaged, or its "
            'values too large for the KV cache\'s f16 (load it with `kv_dtype="f32"`).'
        )
    return text.pooled
