"""Simulates drafts that are right with a given probability: the speed of speculation on a model of
random weights, whose tokens nothing could guess. The drafts are verified like real ones; then the
ids of the tokens are replaced."""

from __future__ import annotations

import random
from collections.abc import Sequence

from infer.engine.speculation import (
    MAX_DRAFT,
    Drafter,
    Guess,
    Held,
    ModelGuess,
    ModelSpeculation,
    Speculation,
)
from infer.kernels.state.step import NO_TOKEN


class Decreed(Speculation):
    """Drafts arbitrary tokens and decides at random whether each counts as right. accept: the
    probability of that. count: tokens drafted for each sequence in every step, as far as there is
    room; None: as many as are measured to pay."""

    def __init__(
        self, kinds: Sequence[int], accept: float, count: int | None, vocab_size: int
    ) -> None:
        super().__init__(kinds, measures=count is None)
        self._accept, self._count, self._vocab_size = accept, count, vocab_size
        self._random = random.Random(0)

    def guess(self, held: Held | None = None) -> Guess:
        return _Guess(self._accept, self._vocab_size)

    def counts(self, guesses: Sequence[Guess | None]) -> list[int]:
        n = len(guesses)
        if self._count is None or not n:
            return super().counts(guesses)
        each = max(0, min(self._count, self.kinds[-1] // n - 1))
        return [each if guess is not None and guess.ids else 0 for guess in guesses]

    def ids(self, ids: list[int], drafts: Sequence[int | None]) -> list[int]:
        decreed = list(ids)
        for i, drafted in enumerate(drafts):
            if drafted is not None:
                right = self._random.random() < self._accept
                decreed[i - 1] = drafted if right else (drafted + 1) % self._vocab_size
        return decreed


class DecreedModel(ModelSpeculation):
    """Decides at random which tokens of a draft model count as right. Only the GPU knows what was
    drafted, so if a wrong token counts as right, a token that was not drafted stands for it."""

    def __init__(
        self, kinds: Sequence[int], accept: float, count: int | None, vocab_size: int
    ) -> None:
        super().__init__(kinds, measures=count is None)
        self._accept, self._count, self._vocab_size = accept, count, vocab_size
        self._random = random.Random(0)

    def guess(self, held: Held | None = None) -> Guess:
        return _ModelGuess(self._accept)

    def depth(self, most: int) -> int:
        return min(most, self._count or most)

    def ids(self, ids: list[int], drafts: Sequence[int | None]) -> list[int]:
        decreed = list(ids)
        for i, drafted in enumerate(drafts):
            if drafted is None:
                continue
            if decreed[i - 1] == NO_TOKEN or self._random.random() >= self._accept:
                decreed[i] = NO_TOKEN
            elif decreed[i] == NO_TOKEN:
                decreed[i] = (decreed[i - 1] + 1) % self._vocab_size
        return decreed


class _ModelGuess(ModelGuess):
    """The place of a draft model's tokens, with the given chances of being right."""

    def __init__(self, accept: float) -> None:
        super().__init__([])
        self._accept = accept

    def take(self, tokens: Sequence[int]) -> None:
        """Does nothing: the chances are given."""

    def verified(self, drafted: int, right: int) -> None:
        """Does nothing: the chances are given."""

    @property
    def chances(self) -> list[float]:
        return [self._accept ** (i + 1) for i in range(len(self.ids))]


class _Guess(Guess):
    """Drafts of arbitrary ids, with the given chances of being right."""

    def __init__(self, accept: float, vocab_size: int) -> None:
        super().__init__(_Anything(vocab_size))
        self._accept = accept

    @property
    def chances(self) -> list[float]:
        return [self._accept ** (i + 1) for i in range(len(self.ids))]


class _Anything(Drafter):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        return [
            (tokens[-1] + 7919 * (i + 1)) % self._vocab_size for i in range(min(most, MAX_DRAFT))
        ]
