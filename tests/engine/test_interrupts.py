"""Ctrl-C at any place of the engine ends the answer whose token was waited for, and no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import CO_GENERATOR
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from marks import others_full
from reference_models import load
from test_structured import masked

import infer
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

ROOT = str(Path(infer.__file__).parent)


@contextmanager
def interrupted(at: int) -> Iterator[None]:
    """A KeyboardInterrupt at the place of that number. There CPython looks for signals: where a
    function of Python's begins, and where one of C's ends. Not in generators, of which Python only
    reports it where they are dropped."""
    left = at

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if code.co_flags & CO_GENERATOR or not code.co_filename.startswith(ROOT):
            return
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def begun(engine: Engine, case: str) -> list[Answer]:
    """Five on four slots: greedy, sampled, with penalties, under a mask, with a processor."""
    ids: list[int] = load(case).prompt_ids.tolist()

    def begin(length: int, logits_processor: Any = None, **sampling: Any) -> Answer:
        params = SamplingParams(max_tokens=20, **sampling).resolved({})
        return engine.generate(ids[:length], params, logits_processor=logits_processor)

    return [
        begin(30),
        masked(engine, ids[:11], 20),
        begin(9, temperature=0.9, seed=1),
        begin(20, lambda _, logits: logits, temperature=0.9, seed=2),
        begin(3, repetition_penalty=1.2, logprobs=1),
    ]


def taken(answers: Sequence[Answer], at: int) -> tuple[list[list[int]], int | None]:
    """The tokens of all of them, which take turns, but of the one that is interrupted there, and
    which that is."""
    tokens: list[list[int]] = [[] for _ in answers]
    left, hit = dict(enumerate(answers)), None
    with interrupted(at):
        while left:
            for i in list(left):
                try:
                    step = next(left[i], None)
                except KeyboardInterrupt:
                    hit = i
                    answers[i].close()
                    step = None
                if step is None:
                    del left[i]
                else:
                    tokens[i].append(step.token)
    return tokens, hit


@others_full("every", [1999, 199], [1999])  # places, of some 16,000
@others_full("case", ["llama", "lfm2", "phi3_longrope_switch"], ["llama"])
def test_an_interrupt_anywhere_ends_one_answer(
    engine_of: Callable[..., Engine], case: str, every: int
) -> None:
    """Out of pages, too. All others are what they are without."""
    options = {"max_batch": 4, "context": 3 * PAGE, "cache_positions": 4 * PAGE}
    engine = engine_of(case, speculate="lookup", **options)
    expected, _ = taken(begun(engine, case), 0)
    hits = set[int]()
    for at in count(1, every):
        engine.forget()
        tokens, hit = taken(begun(engine, case), at)
        if hit is None:  # there are no more places
            break
        hits.add(hit)
        assert [own for i, own in enumerate(tokens) if i != hit] == [
            own for i, own in enumerate(expected) if i != hit
        ], at
        engine.settle()
        assert engine.scheduler.idle
        stats = engine.pool.stats
        assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)
    assert len(hits) > 2
