"""Speculative decoding: several tokens are guessed, and verified in one step.

A step can have several rows of a sequence: its next token, and the tokens drafted after it
(Leviathan et al. 2023). A drafted token is right if the row before it samples that very token.
What a row samples is a function of its logits, the seed, the position and the token. So the text is
the same as without drafts, greedy or not: only the time changes.

Whether drafting pays is measured: how often drafts are right, and how long a step of so many rows
takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import median

import numpy as np
from numpy.typing import NDArray

from infer.engine.constraint import Constraint
from infer.engine.prompts import FIRST_GIVEN
from infer.kernels.state.step import NO_TOKEN

MAX_DRAFT = 7  # tokens: with the one before them as many rows as matmul_vec takes
WAYS = ("off", "lookup", "draft", "mtp", "auto")

_NGRAMS = 3, 2  # how many tokens before a place must agree; the longest first
_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # odd, of many bits
_PLACE = (1 << 24) - 1  # the bits of a place: no context is longer
_KEPT = 0.85  # what remains of the rate of right drafts when the next one is known
_FIRST_RATE = 0.5  # the rate before anything is known
_RUNS = 8  # rates are kept for so many lengths of a run of right tokens
_DEPTH = 4  # tokens that a draft model drafts if nothing is measured
_HOPED = 0.8  # the rate of a draft model before anything is known
_RELAXED = 0.003  # how far its rates go back to that for each token without drafts
_KEPT_OF_MODEL = 0.9  # as _KEPT, of a draft model
_GAINS = 1.12, 1.0  # the speedup that drafts must promise to begin, as switching costs; to go on
_TIMES = 2, 5  # the median of the last 5 steps counts, as soon as there are 2
_PLAIN_MEMORY, _MEMORY = 256, 4096  # steps after which times without, with drafts are forgotten


class Drafter(ABC):
    """Proposes what may come next in one answer."""

    def begin(self, prompt: Sequence[int]) -> None:  # noqa: B027
        """Called while the prompt is computed, perhaps again with tokens of the answer behind it:
        the time for what is slow. A drafter works without it."""

    @abstractmethod
    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` ids that may come next, or none. tokens: the prompt and the answer so far;
        from call to call they only grow."""


class PromptLookup(Drafter):
    """Drafts what followed the last tokens where they occurred before, in prompt or answer (Saxena
    2023).

    A place is followed as long as it is right. Then the next one is the latest place after the
    longest n-gram that agrees.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[int, _Places] = {}  # by the length of n-grams
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> the latest place behind those
        self._indexed = 0  # places up to here are in one of the two
        self._place: int | None = None  # the one that is followed
        self._seen = 0  # tokens at the last call

    def begin(self, prompt: Sequence[int]) -> None:
        if not self._seen:
            ids = np.fromiter(prompt, np.uint64, len(prompt))
            self._of_prompt = {n: _Places(ids, n) for n in _NGRAMS if n < len(ids)}
            self._seen, self._indexed = len(ids), len(ids) - 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self.begin(tokens)
        for token in tokens[self._seen :]:
            if self._place is None or tokens[self._place] != token:
                self._place = None
                break
            self._place += 1
        length = self._seen = len(tokens)
        for place in range(self._indexed + 1, length):  # not the end
            for n in _NGRAMS:
                if n <= place:
                    self._places[tuple(tokens[place - n : place])] = place
        self._indexed = length - 1
        if self._place is None:
            self._place = self._find(tokens)
        if self._place is None:
            return []
        ids = list(tokens[self._place : self._place + most])
        while len(ids) < most:  # the place reached the end: the repetition goes on
            ids.append(ids[len(ids) - (length - self._place)])
        return ids

    def _find(self, tokens: Sequence[int]) -> int | None:
        for n in _NGRAMS:
            place = self._places.get(tuple(tokens[-n:]))
            if place is None and n in self._of_prompt:
                place = self._of_prompt[n].find(tokens)
            if place is not None:
                return place
        return None


class _Places:
    """The places after all n-grams of a prompt. It takes a twentieth of the time and of the memory
    of a dictionary: with 100,000 tokens 2 ms and 0.8 MB."""

    def __init__(self, ids: NDArray[np.uint64], n: int) -> None:
        """ids: of the prompt, more than n."""
        self._n, count = n, len(ids) - n
        hashes = np.zeros(count, np.uint64)
        for i, factor in enumerate(_FACTORS[:n]):
            hashes += ids[i : i + count] * np.uint64(factor)
        hashes &= np.uint64(~_PLACE & (1 << 64) - 1)
        # Upper bits of the hash of each n-gram, then its place. A memoryview has ints of Python.
        self._sorted = np.sort(hashes | np.arange(n, len(ids), dtype=np.uint64)).data

    def find(self, tokens: Sequence[int]) -> int | None:
        """The latest place after the n-gram at the end of these tokens, which begin with the
        prompt; None if there is none."""
        last = tokens[-self._n :]
        hashed = sum(map(mul, last, _FACTORS)) & (1 << 64) - 1
        at = bisect_right(self._sorted, hashed | _PLACE) - 1
        place = self._sorted[max(0, at)] & _PLACE
        # Two n-grams may have the same upper bits.
        return place if tokens[place - self._n : place] == last else None


class Held:
    """The tokens that a constraint forces or allows in one answer."""

    def __init__(self, constraint: Constraint, start: int) -> None:
        """start: of the answer in its tokens."""
        self._constraint, self._start = constraint, start
        self._forced: list[int] = []
        self._after = 0  # they come after so many tokens

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that must come next."""
        count = len(tokens) - self._after
        if not 0 <= count < len(self._forced) or tokens[self._after :] != self._forced[:count]:
            self._forced = self._constraint.forced_after(tokens, self._start)
            self._after, count = len(tokens), 0
        return self._forced[count:]

    def allowed(self, tokens: Sequence[int], ids: list[int]) -> list[int]:
        """The first of these ids, as many as may come next."""
        return ids[: self._constraint.count_allowed(tokens, self._start, ids)]


class Guess:
    """A guess of how one answer goes on. ids: what may come after the tokens known so far; the
    first `certain` of them must.

    How likely a token is right depends on how many before it were right, so rates are kept by the
    length of that run. They are learnt from every token, whether it was drafted or only guessed.
    """

    def __init__(self, drafter: Drafter | None, held: Held | None = None) -> None:
        """drafter: None in subclasses that override `take`. held: given if a constraint holds the
        answer; it is only asked when its answer matters."""
        self.certain = 0
        self._drafter, self._held = drafter, held
        self._ids: list[int] = []  # from the drafter, until `ids` asks the constraint
        self._tokens: Sequence[int] | None = None  # for which the constraint was not asked yet
        self._run = 0  # how many tokens in a row were guessed right
        self._rates = [_FIRST_RATE] * _RUNS

    def begin(self, prompt: Sequence[int]) -> None:
        """Called while the prompt is computed: see `Drafter.begin`."""
        if self._drafter is not None:
            self._drafter.begin(prompt)

    def take(self, tokens: Sequence[int]) -> None:
        """Take in another token, or the prompt."""
        if self._ids and not self.certain:
            right = self._ids[0] == tokens[-1]
            run = min(self._run, _RUNS - 1)
            self._rates[run] = _KEPT * self._rates[run] + (1 - _KEPT) * right
            self._run = self._run + 1 if right else 0
        assert self._drafter is not None
        ids = self._drafter.draft(tokens, MAX_DRAFT)
        if ids and max(ids) >= FIRST_GIVEN:  # no model generates what stands for rows
            ids = ids[: next(i for i, token in enumerate(ids) if token >= FIRST_GIVEN)]
        self._ids = ids
        self.certain, self._tokens = 0, None if self._held is None else tokens

    @property
    def ids(self) -> list[int]:
        if self._held is not None and self._tokens is not None:
            tokens, self._tokens = self._tokens, None
            forced = self._held.forced(tokens)[:MAX_DRAFT]
            self.certain = len(forced)
            self._ids = self._beginning_with(forced, tokens, self._held)
        return self._ids

    def _beginning_with(self, forced: list[int], tokens: Sequence[int], held: Held) -> list[int]:
        if self._ids[: self.certain] != forced:
            return forced
        return held.allowed(tokens, self._ids) if len(self._ids) > self.certain else self._ids

    def verified(self, drafted: int, right: int) -> None:
        """Note how many of the drafted tokens were right. These tokens are taken next."""

    @property
    def chances(self) -> list[float]:
        """For each of its ids, the probability that it and all before it are right."""
        run, rates = self._run, self._rates
        others = range(len(self.ids) - self.certain)  # ids first: it finds out what is certain
        own = [1.0] * self.certain + [rates[min(run + i, _RUNS - 1)] for i in others]
        return list(accumulate(own, mul))


class ModelGuess(Guess):
    """The tokens that must come next, then those of a draft model, which only the GPU knows. rates,
    shared by all such answers: how likely the i-th token of a draft is right if all before it are.
    While nothing is drafted nothing is learnt; then the rates go back to what was hoped at first,
    so that drafting is tried again."""

    def __init__(
        self, rates: list[float], held: Held | None = None, *, goes_on: bool = True
    ) -> None:
        """goes_on: the model can draft after tokens that must come."""
        super().__init__(None, held)
        self._ids, self._rates, self._goes_on = [NO_TOKEN] * MAX_DRAFT, rates, goes_on
        self._known = 0  # tokens still to be taken that were verified as drafts

    def take(self, tokens: Sequence[int]) -> None:
        self._tokens = None if self._held is None else tokens
        self._known -= 1
        if self._known < 0:
            self._rates[:] = [rate + _RELAXED * (_HOPED - rate) for rate in self._rates]

    def _beginning_with(self, forced: list[int], tokens: Sequence[int], held: Held) -> list[int]:
        if forced and not self._goes_on:
            return forced
        return forced + [NO_TOKEN] * (MAX_DRAFT - len(forced))

    def verified(self, drafted: int, right: int) -> None:
        of_model = right - self.certain
        for i in range(min(of_model + 1, drafted - self.certain)):
            new = (1 - _KEPT_OF_MODEL) * (i < of_model)
            self._rates[i] = _KEPT_OF_MODEL * self._rates[i] + new
        self._known = right + 1


class Speculation:
    """Decides how many tokens to draft for each of some sequences. kinds: the row counts that steps
    with drafts can have, the smallest first. measures: draft only if that promises more tokens a
    second than decoding without; else always. is_on: whether anything may be drafted."""

    is_on = True

    def __init__(
        self,
        kinds: Sequence[int],
        *,
        measures: bool,
        drafter: Callable[[], Drafter] = PromptLookup,
    ) -> None:
        """drafter: makes that of an answer."""
        self.kinds, self._measures, self._drafter = tuple(kinds), measures, drafter
        self._plain: dict[int, _Seconds] = {}  # by sequences, of steps submitted ahead
        # By kind, of steps submitted after the one before was read.
        self._drafted: dict[Hashable, _Seconds] = {}
        self._step = 0
        self._drafts = False  # whether the last step had drafts
        self.model_steps = 0  # steps that a draft model makes for the latest counts

    def guess(self, held: Held | None = None) -> Guess | None:
        """Returns the guess of an answer that begins; None if nothing will be drafted for it."""
        return Guess(self._drafter(), held)

    def counts(self, guesses: Sequence[Guess | None]) -> list[int]:
        """Returns how many ids of each guess the next step verifies. guesses: one for each sequence
        of the step, None for a sequence without drafts. The tokens most likely right come first,
        whichever sequence they are of."""
        n = len(guesses)
        counts = [0] * n
        most = self.kinds[-1]
        if n >= most or (self._measures and self._best(n, [1.0] * most) == n):
            self._drafts = False  # no draft could pay
            return counts
        chances = [
            (chance, i)
            for i, guess in enumerate(guesses)
            if guess is not None
            for chance in guess.chances
        ]
        if not chances:
            self._drafts = False
            return counts
        chances.sort(key=lambda each: -each[0])
        rows = self.kinds[-1]
        if self._measures:
            rows = self._best(n, [chance for chance, _ in chances])
        for _, i in chances[: rows - n]:
            counts[i] += 1
        self._drafts = rows > n
        return counts

    def _best(self, n: int, chances: Sequence[float]) -> int:
        """The row count that promises most tokens a second; n if that is without drafts."""
        seconds = self._plain.get(n)
        plain = None if seconds is None else seconds.at(self._step)
        if plain is None:
            return n  # find out
        best, most = n, _GAINS[self._drafts] * n / plain
        known = plain  # an unmeasured kind counts as no slower, so that it will be measured
        for rows in self.kinds:
            if rows <= n:
                continue
            if (seconds := self._drafted.get(rows)) is not None:
                known = seconds.at(self._step) or known
            tokens = n + sum(chances[: rows - n])
            if tokens > most * known:
                best, most = rows, tokens / known
        return best

    def kind(self, sequences: int, rows: int, depth: int) -> Hashable:
        """Returns the key of steps that take equally long. rows: of the kind of step. depth: steps
        of a draft model before it."""
        return rows

    def measured(self, sequences: int, kind: Hashable, seconds: float) -> None:
        """A step took so long, since the one before it was read. kind: 0 if it had no drafts."""
        self._step += 1
        if kind:
            self._drafted.setdefault(kind, _Seconds(_MEMORY)).add(seconds, self._step)
        else:
            self._plain.setdefault(sequences, _Seconds(_PLAIN_MEMORY)).add(seconds, self._step)

    def ids(self, ids: list[int], drafts: Sequence[int | None]) -> list[int]:
        """The ids that the rows of a step are taken to have sampled; a benchmark decrees others.
        drafts: the drafted token of each row; None for the row of a known token."""
        return ids


class NoSpeculation(Speculation):
    """Nothing is ever drafted."""

    is_on = False

    def __init__(self) -> None:
        super().__init__((), measures=False)

    def guess(self, held: Held | None = None) -> Guess | None:
        return None

    def measured(self, sequences: int, kind: Hashable, seconds: float) -> None:
        pass


class ModelSpeculation(Speculation):
    """Speculation with a draft model. It drafts equally many tokens for all sequences, those that a
    constraint forces included. Or only forced tokens are drafted, and the model does nothing."""

    def __init__(self, kinds: Sequence[int], *, measures: bool, goes_on: bool = True) -> None:
        """goes_on: whether the model can draft after tokens that must come."""
        super().__init__(kinds, measures=measures)
        self._goes_on = goes_on
        self.rates = [_HOPED] * MAX_DRAFT
        self.held_rates = list(self.rates)  # it does not know what they are held to

    def guess(self, held: Held | None = None) -> Guess | None:
        rates = self.rates if held is None else self.held_rates
        return ModelGuess(rates, held, goes_on=self._goes_on)

    def kind(self, sequences: int, rows: int, depth: int) -> Hashable:
        return sequences, depth

    def counts(self, guesses: Sequence[Guess | None]) -> list[int]:
        n, drafting = len(guesses), [guess for guess in guesses if guess is not None]
        room = self.kinds[-1] - n
        most = min(MAX_DRAFT, room // max(1, len(drafting)))
        forced: list[int] = []
        for guess in guesses:
            certain = guess.certain if guess is not None and guess.ids else 0  # which find it out
            forced.append(max(0, min(certain, room - sum(forced))))
        depth: int | None = None
        if drafting and self._measures:
            depth = self._best_depth(n, [guess.chances for guess in drafting], most, sum(forced))
        elif drafting:
            depth = self.depth(max(0, most))
        if depth:
            counts = [0 if guess is None else depth for guess in guesses]
        else:
            counts = [0] * n if depth is None else forced
        self.model_steps, self._drafts = depth or 0, any(counts)
        return counts

    def depth(self, most: int) -> int:
        """Returns how many tokens are drafted if nothing is measured. most: there is room for."""
        return min(_DEPTH, most)

    def _best_depth(
        self, n: int, chances: Sequence[Sequence[float]], most: int, forced: int
    ) -> int | None:
        """The depth that promises most tokens a second; 0: forced tokens alone; None: no drafts."""
        seconds = self._plain.get(n)
        plain = None if seconds is None else seconds.at(self._step)
        if plain is None:
            return None  # find out
        times = {
            depth: known
            for depth in range(MAX_DRAFT + 1)
            if (measured := self._drafted.get((n, depth))) is not None
            and (known := measured.at(self._step)) is not None
        }
        best, rate = None, _GAINS[self._drafts] * n / plain
        for depth in range(0 if forced else 1, most + 1):
            drafted = sum(sum(own[:depth]) for own in chances) if depth else forced
            seconds_of = self._seconds(depth, plain, times)
            if n + drafted > rate * seconds_of:
                best, rate = depth, (n + drafted) / seconds_of
        return best

    def _seconds(self, depth: int, plain: float, times: Mapping[int, float]) -> float:
        """Returns the seconds of a step with drafts of this depth: measured, or interpolated
        between no drafts and the nearest depth that was measured. If none was, it is the time
        without drafts, so that this depth will be measured."""
        if depth in times:
            return times[depth]
        nearest = min(filter(None, times), key=lambda other: abs(other - depth), default=None)
        return plain if nearest is None else plain + (times[nearest] - plain) * depth / nearest


class _Seconds:
    """The time that a kind of step takes, in seconds: the median of the last few steps. The very
    first step is left out, as it may have compiled something."""

    def __init__(self, memory: int) -> None:
        """memory: after so many steps of all kinds it is forgotten."""
        self._memory = memory
        self._last = deque[float](maxlen=_TIMES[1])
        self._value: float | None = None
        self._step: int | None = None  # when it was measured last

    def add(self, seconds: float, step: int) -> None:
        is_first = self._step is None
        if self.at(step) is None and len(self._last) >= _TIMES[0]:
            self._last.clear()
        self._step = step
        if not is_first:
            self._last.append(seconds)
            self._value = median(self._last) if len(self._last) >= _TIMES[0] else None

    def at(self, step: int) -> float | None:
        """The seconds known at that step; None if they are not."""
        known = self._step is not None and step - self._step < self._memory
        return self._value if known else None
