"""Texts that are embedded or scored, in steps beside those of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import Job, ranked
from infer.engine.kinds import Kind
from infer.engine.prompts import Prompt
from infer.engine.recordings import Recipe
from infer.engine.runner import Runner
from infer.engine.scheduler import Prefill
from infer.engine.submissions import Rows, Wanted
from infer.kernels.errors import InferError, ModelError
from infer.kernels.gpu.record import Recording
from infer.kernels.lowering.target import stride
from infer.kernels.state.sampler import LOGPROB, LOGPROBS_BYTES, Sampler
from infer.models.blocks.rope import table_length
from infer.sampling import Logprobs


class Text(Job, ABC):
    """A text that is embedded or scored: nothing is generated after it."""

    def __init__(
        self, prompt: Sequence[int], adapter: str | None, sequence: scheduler.Sequence
    ) -> None:
        self.prompt, self.adapter, self.sequence = Prompt.of(prompt), adapter, sequence
        self.ended = self.cancelled = False
        self.error: InferError | None = None

    @abstractmethod
    def rows(self, work: Prefill) -> range:
        """The rows of a step that are read back."""

    @abstractmethod
    def take(self, start: int, values: NDArray[np.float32]) -> None:
        """Take in what was read back, [rows, values], of a step of its tokens from `start` on. If
        the text is computed anew, it comes from 0 on again."""


class Embedding(Text):
    """A text whose hidden states are pooled: the "mean" of all tokens, or the "last" one. `pooled`
    [hidden_size] is complete once it has `ended`."""

    def __init__(
        self,
        prompt: Sequence[int],
        adapter: str | None,
        sequence: scheduler.Sequence,
        pooling: str,
    ) -> None:
        super().__init__(prompt, adapter, sequence)
        self.pooling = pooling
        self.pooled: NDArray[np.float64] | None = None

    def rows(self, work: Prefill) -> range:
        first = 0 if self.pooling == "mean" else len(self.prompt) - 1 - work.start
        return range(first, work.count)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        count = len(self.prompt) if self.pooling == "mean" else 1
        part = values.sum(0, dtype=np.float64) / count
        before = self.pooled if start else None
        self.pooled = part if before is None else before + part


class Scored(Text):
    """A text that gives the logits after each of its tokens. Or, if `given` has the next token of
    each, the log probabilities of that one and of the most probable ones: LOGPROB records, as the
    bits of floats. parts: results that nobody has taken yet. count: of all rows that came."""

    def __init__(
        self,
        prompt: Sequence[int],
        adapter: str | None,
        sequence: scheduler.Sequence,
        given: Sequence[int] | None,
    ) -> None:
        super().__init__(prompt, adapter, sequence)
        self.given, self.count = given, 0
        self.parts: deque[NDArray[np.float32]] = deque()

    def rows(self, work: Prefill) -> range:
        return range(work.count)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        new = values[max(0, self.count - start) :].copy()
        if len(new):
            self.count += len(new)
            self.parts.append(new)


class TextEngine(Protocol):
    """The methods that texts call of the engine that computes them."""

    def begin(self, text: Text) -> None:
        """Queue a text. The threads that wait compute it."""

    def cancel(self, text: Text) -> None:
        """End a text early. It may be called at any time, in any thread, and twice."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is asked between steps."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a block in which only this thread makes steps."""


class Texts:
    """Steps of texts that are embedded or scored: their dispatches, and the results of each text.

    Each text is a sequence of its own, of which nothing is sampled. Its steps are made when the
    first text comes that needs them."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._steps = runner, runner.steps
        self._made: set[Kind] = set()  # kinds of step that are there
        self._scored: dict[tuple[Kind, bool], Recording] = {}

    # Steps

    def step(self, text: Text, work: Prefill, kind: Kind) -> tuple[Wanted, Recording]:
        """Returns the rows to read back of a text's next step, and its recording. Writes what the
        step needs besides its rows. kind: of a step of its prompt."""
        steps, config, rows = self._steps, self._runner.config, text.rows(work)
        if isinstance(text, Embedding):
            width = config.hidden_size
            recipe = Recipe(kind.giving("hidden states"), head=bool(rows))
            recording = self._runner.recordings.of(recipe)
            return Wanted((), others=Rows(steps.hidden, rows, stride(width), width)), recording
        scored = steps.kinds.scored.with_adapters(kind.by_row)
        if isinstance(text, Scored) and text.given is not None:
            given = np.array(text.given[work.start : work.start + work.count], np.uint32)
            steps.device.write(self._ranker.sampled, given)
            words = LOGPROBS_BYTES // 4
            wanted = Wanted((), others=Rows(self._ranker.logprobs, rows, words, words))
            return wanted, self._recording(scored, is_ranked=True)
        width = config.vocab_size
        wanted = Wanted((), others=Rows(steps.scored, rows, stride(width), width))
        return wanted, self._recording(scored, is_ranked=False)

    def forget(self) -> None:
        """Do nothing: this object keeps no account of what the GPU has."""

    def drop(self) -> None:
        """Forget the recordings. Each is made anew when it is next needed."""
        self._scored.clear()

    def _recording(self, kind: Kind, *, is_ranked: bool) -> Recording:
        key = kind, is_ranked
        if key not in self._scored:
            plan = self._steps.plan(kind)
            ranking = self._ranker.ranking if is_ranked else ()
            self._scored[key] = Recording((*plan.body, *plan.head, *ranking))
        return self._scored[key]

    @cached_property
    def _ranker(self) -> Sampler:
        """The sampler that ranks the logits of all rows and samples none."""
        steps, rows = self._steps, self._steps.kinds.scored.rows
        vocab_size = self._runner.config.vocab_size
        return Sampler(steps.device, vocab_size, steps.scored, steps.step, max_rows=rows)

    def _make(self, kinds: Iterable[Kind], adapter: str | None, engine: TextEngine) -> None:
        """Make the plans of some kinds of step before a text needs them, so that a failure ends
        this call and no other."""
        missing = {kind.with_adapters(adapter is not None) for kind in kinds} - self._made
        if missing:
            with engine.turn():
                for kind in missing:
                    self._steps.plan(kind)
                    if kind.output == "all logits":
                        _ = self._ranker.ranking, self._ranker.logprobs
            self._made |= missing

    def _sequence(
        self, ids: Sequence[int], adapter: str | None, chunk: int = 1 << 30
    ) -> scheduler.Sequence:
        """Nothing in the cache is reused, because a position in it has no hidden state any more,
        and nothing is left there."""
        length = table_length(self._runner.config.rope, len(ids))
        key = adapter, length
        return scheduler.Sequence(ids, limit=0, key=key, group=length, shares=False, chunk=chunk)

    # Texts

    def embed(
        self,
        engine: TextEngine,
        texts: Sequence[Sequence[int]],
        pooling: str,
        adapter: str | None,
    ) -> Generator[NDArray[np.float64], None, None]:
        """Yields an embedding for each text, as `TokenEngine.embed` does. As many texts are begun
        before the one that is waited for as steps are in flight; an answer that comes meanwhile
        need not wait for all of them."""
        ahead = self._runner.options.ahead
        self._make(
            (kind.giving("hidden states") for kind in self._steps.kinds.alone), adapter, engine
        )
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
        self, engine: TextEngine, ids: Sequence[int], n: int, adapter: str | None
    ) -> Generator[list[Logprobs], None, None]:
        """Yields the log probabilities of a text's tokens, as `TokenEngine.score` does."""
        for part in self._parts(ids[:-1], ids[1:], adapter, engine) if len(ids) > 1 else ():
            yield [ranked(row, n) for row in part.view(LOGPROB)]

    def logits(
        self, engine: TextEngine, ids: Sequence[int], adapter: str | None
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
        self._make([self._steps.kinds.scored], adapter, engine)
        sequence = self._sequence(ids, adapter, self._steps.kinds.scored.rows)
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
    """Wait for a text that is embedded, and return its pooled hidden states. Raises the error that
    ended it, and ModelError for values that are not finite."""
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
