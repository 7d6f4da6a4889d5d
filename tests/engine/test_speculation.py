"""Drafts change nothing but the speed: answers are those without, whatever is drafted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import engines
import numpy as np
import places
import pytest
from engines import build_engine
from marks import others_full
from reference_models import load, relative_error
from test_batch import Soak
from test_structured import Third, constraint_of, masked

import infer
import infer.engine.scheduler
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.speculation import (
    MAX_DRAFT,
    Drafter,
    Guess,
    NoSpeculation,
    PromptLookup,
    Speculation,
)
from infer.kernels.errors import RequestError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import Recorded
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

STEPS = 24
# One architecture of each kind, without states and with.
KINDS = {
    "llama": "keys and values",
    "gemma2": "windows, soft caps",
    "gpt_oss": "sinks, experts",
    "qwen3_moe": "experts",
    "deepseek_v2": "latents",
}
STATES = {
    "lfm2": "a convolution",
    "granitemoehybrid_mamba": "Mamba 2",
    "qwen3_next": "the delta rule",
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    # Some tokens come often, and each time less likely.
    "penalized": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.5,
        "logit_bias": {7: 9.0, 9: 9.0, 11: 9.0},
    },
}


@dataclass
class Known(Drafter):
    """Drafts what answers go on with, if it is right, and something else if it is not. right: by
    the number of the draft, how many of its first tokens are; the next one is wrong; below 0:
    nothing is drafted."""

    answers: Sequence[Sequence[int]]  # with their prompts
    right: Callable[[int], int] = lambda number: MAX_DRAFT
    count: int = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self.count += 1
        right = self.right(self.count)
        for answer in self.answers if right >= 0 else ():
            if list(answer[: len(tokens)]) == list(tokens):
                ids = list(answer[len(tokens) : len(tokens) + most])
                for i in range(right, len(ids)):
                    ids[i] = (ids[i] + 1 + i) % 50
                return ids
        return []


PATTERNS: dict[str, Callable[[int], int]] = {
    "right": lambda number: MAX_DRAFT,
    "wrong": lambda number: 0,
    "mixed": lambda number: random.Random(number).randrange(-2, MAX_DRAFT + 1),
}


@pytest.fixture(scope="module")
def engine_of(engine_of: Callable[..., Engine]) -> Callable[..., Engine]:
    """One that drafts."""
    return partial(engine_of, speculate="lookup", max_batch=4)


@dataclass
class Taken:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answer: Answer | None = None


def prompts_of(case: str) -> list[list[int]]:
    ids: list[int] = load(case).prompt_ids.tolist()
    return [ids, ids[7:12], ids[:30] + ids[3:9], ids[9:10], ids, ids[20:]]


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    matcher: type[Third] = Third,
    **options: Any,
) -> list[Taken]:
    """All at once, each begun when the one before it has had two tokens. Those of a regex are held
    to what the matcher allows."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    taken: list[Taken] = []
    running: list[Answer] = []
    while len(running) < len(prompts) or not all(answer.ended for answer in running):
        if len(running) < len(prompts):
            i = len(running)
            vocab, held = engine.vocab_size, None
            if each[i].constrained:
                held = constraint_of(vocab, matcher(vocab))
            running.append(engine.generate(prompts[i], each[i], constraint=held, **options))
            taken.append(Taken(answer=running[-1]))
        for answer, own in zip(running, taken, strict=True):
            for _ in range(2):
                _take(answer, own)
    for answer, own in zip(running, taken, strict=True):
        while _take(answer, own):
            pass
    return taken


def _take(answer: Answer, own: Taken) -> bool:
    step = next(answer, None)
    if step is not None:
        own.ids.append(step.token)
        if step.logprobs is not None:
            own.logprobs.append(step.logprobs[0])
    return step is not None


def plainly(engine: Engine, *args: Any, **options: Any) -> list[Taken]:
    """Without drafts."""
    before, engine.runner.speculation = engine.runner.speculation, NoSpeculation()
    try:
        return run(engine, *args, **options)
    finally:
        engine.runner.speculation = before
        engine.forget()


def with_drafts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    expected: Sequence[Taken],
    pattern: str,
    **options: Any,
) -> list[Taken]:
    answers = ([*ids, *own.ids] for ids, own in zip(prompts, expected, strict=True))
    before = engine.runner.speculation
    assert before is not None
    engine.runner.speculation = Speculation(
        before.kinds, measures=False, drafter=lambda: Known([next(answers)], PATTERNS[pattern])
    )
    try:
        found = run(engine, prompts, params, **options)
    finally:
        engine.runner.speculation = before
    for own, other in zip(found, expected, strict=True):
        assert own.ids == other.ids
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    return found


def params_of(way: str, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS} | WAYS[way] | options).resolved({})


@pytest.mark.parametrize("pattern", PATTERNS)
@others_full("case", KINDS, ["llama", "deepseek_v2"])
def test_answers_are_those_without_drafts(
    engine_of: Callable[..., Engine], case: str, pattern: str
) -> None:
    assert_same_with_drafts(engine_of(case), case, pattern)


def test_a_step_may_be_two_submissions(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Dawn makes of a long step that is recorded ahead, here any library of any such step."""
    engine = engine_of("llama")
    native = engine.device.native
    submit, counts = native.submit, set[int]()

    def noted(commands: Sequence[Any]) -> Any:
        counts.add(len(commands))
        return submit(commands)

    monkeypatch.setattr(native, "submit", noted)
    monkeypatch.setattr(native, "submitted_first", 3)
    assert_same_with_drafts(engine, "llama", "mixed")
    assert counts == {1, 2}


@others_full("pattern", PATTERNS, ["mixed"])
@others_full("case", STATES, ["qwen3_next"])
def test_a_state_takes_in_what_was_right(
    engine_of: Callable[..., Engine], case: str, pattern: str
) -> None:
    assert_same_with_drafts(engine_of(case), case, pattern)


def assert_same_with_drafts(engine: Engine, case: str, pattern: str) -> None:
    """Six answers on four slots, greedy, sampled and with penalties."""
    prompts, ways = prompts_of(case), [*WAYS, *WAYS]
    params = [params_of(way, logprobs=2) for way in ways]
    expected = plainly(engine, prompts, params)
    found = with_drafts(engine, prompts, params, expected, pattern)
    timings = [own.answer.timings for own in found if own.answer is not None]
    drafted = sum(each.drafted_tokens for each in timings)
    accepted = sum(each.accepted_tokens for each in timings)
    assert drafted > 20
    assert {"right": accepted == drafted, "wrong": accepted == 0, "mixed": accepted > 10}[pattern]
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


@pytest.mark.parametrize("way", WAYS)
@others_full("case", [*KINDS, *STATES], ["llama"])
def test_an_answer_alone(engine_of: Callable[..., Engine], case: str, way: str) -> None:
    engine, prompts = engine_of(case, max_batch=1), prompts_of(case)[:1]
    params = params_of(way, max_tokens=60)
    expected = plainly(engine, prompts, params)
    for pattern in PATTERNS:
        engine.forget()
        (found,) = with_drafts(engine, prompts, params, expected, pattern)
        assert found.answer is not None
        timings = found.answer.timings
        assert timings.decoded_tokens == 59
        if way == "penalized":
            assert Counter(expected[0].ids).most_common(1)[0][1] > 5
        if pattern == "right":
            assert 50 <= timings.accepted_tokens <= 59 - 59 // (1 + MAX_DRAFT)


@others_full("case", ["llama", "gpt_oss", *STATES], ["llama", "gpt_oss"])
def test_an_invariant_answer_has_the_same_bits(engine_of: Callable[..., Engine], case: str) -> None:
    engine, prompts = engine_of(case, invariant=True), prompts_of(case)[:3]
    params = params_of("sampled", logprobs=0)
    expected = plainly(engine, prompts, params)
    found = with_drafts(engine, prompts, params, expected, "mixed")
    assert [own.logprobs for own in found] == [own.logprobs for own in expected]


@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "q8"}, {"ahead": 1}, {"raw": False}, {"fuse": False}, {"ahead": 3}],
    ids=str,
)
@others_full("case", ["llama", *STATES], ["llama"])
def test_other_engines(
    engine_of: Callable[..., Engine], case: str, options: dict[str, Any]
) -> None:
    engine, prompts = engine_of(case, **options), prompts_of(case)[:3]
    expected = plainly(engine, prompts, params_of("sampled"))
    with_drafts(engine, prompts, params_of("sampled"), expected, "mixed")


@pytest.mark.full
@pytest.mark.parametrize("case", ["llama", *STATES])
def test_few_pages(engine_of: Callable[..., Engine], case: str) -> None:
    """Answers give their pages back, and begin again, in the middle of drafts; and what is cached
    then is what another finds."""
    engine = engine_of(case, max_batch=3, context=3 * PAGE, cache_positions=5 * PAGE)
    ids = prompts_of(case)[0]
    prompts = [ids, ids[3:], ids[:20]]
    params = params_of("sampled", max_tokens=3 * PAGE - len(ids) - 1)
    expected = plainly(engine, prompts, params)
    before = engine.scheduler.preemptions
    with_drafts(engine, prompts, params, expected, "mixed")
    assert engine.scheduler.preemptions > before
    longer = [[*ids, *own.ids[:30]] for ids, own in zip(prompts, expected, strict=True)]
    (again,) = plainly(engine, longer[:1], params_of("sampled"))
    assert again.ids == expected[0].ids[30 : 30 + STEPS]


@pytest.mark.full
def test_neighbours_of_other_kinds(engine_of: Callable[..., Engine]) -> None:
    """And a penalty, a bias, of some alone: all in the same steps."""
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    others: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 2.0}}]
    params = [params_of("sampled", logprobs=1, **other) for other in others]
    expected = plainly(engine, [ids] * 3, params)
    found = with_drafts(engine, [ids] * 3, params, expected, "mixed")
    drafted = [own.answer.timings.drafted_tokens for own in found if own.answer is not None]
    assert min(drafted) > 0

    first = engine.generate(ids, params[0], with_logits=True)
    alone = plainly(engine, [ids], params[:1])
    (beside,) = with_drafts(engine, [ids], params[:1], alone, "right")
    assert [step.token for step in first] == beside.ids


@pytest.mark.full
def test_a_processor_beside_drafts(engine_of: Callable[..., Engine]) -> None:
    """An answer whose tokens the host chooses goes on while tokens of another are drafted."""
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    params = params_of("sampled")
    expected = plainly(engine, [ids], params)
    chosen = engine.generate(ids[:9], params, logits_processor=lambda ids, scores: scores)
    with_drafts(engine, [ids], params, expected, "mixed")
    tokens = [step.token for step in chosen]
    engine.forget()
    again = engine.generate(ids[:9], params, logits_processor=lambda ids, scores: scores)
    assert [step.token for step in again] == tokens


@pytest.mark.full
@pytest.mark.parametrize("case", {**KINDS, **STATES})
@pytest.mark.parametrize("pattern", ["right", "mixed"])
def test_held_answers_are_those_without_drafts(
    engine_of: Callable[..., Engine], case: str, pattern: str
) -> None:
    """Each row of theirs has a mask of its own, beside rows that have none."""
    engine, prompts = engine_of(case), prompts_of(case)
    held = [params_of(way, logprobs=2, regex="of the test") for way in WAYS]
    params = [*held, *(params_of(way) for way in WAYS)]
    expected = plainly(engine, prompts, params)
    found = with_drafts(engine, prompts, params, expected, pattern)
    timings = [own.answer.timings for own in found if own.answer is not None]
    for each in timings:
        assert each.accepted_tokens > 3
        assert (pattern == "mixed") or each.accepted_tokens == each.drafted_tokens


def test_a_constraint_beside_drafts(engine_of: Callable[..., Engine]) -> None:
    """Its mask is written when its own tokens are known."""
    engine, ids = engine_of("llama"), prompts_of("llama")[0]

    params = params_of("penalized")
    alone = [step.token for step in masked(engine, ids[:9], STEPS, **WAYS["sampled"])]
    expected = plainly(engine, [ids], params)
    beside = masked(engine, ids[:9], STEPS, **WAYS["sampled"])
    (found,) = with_drafts(engine, [ids], params, expected, "mixed")
    assert [step.token for step in beside] == alone
    assert found.answer is not None
    assert found.answer.timings.drafted_tokens > 0
    assert beside.timings.drafted_tokens == 0


def test_a_drafter_begins_while_the_prompt_is_computed(engine_of: Callable[..., Engine]) -> None:
    """Before the first token is known, with all of a prompt that is computed in parts."""
    calls: list[tuple[str, int]] = []

    class Noted(Drafter):
        def begin(self, prompt: Sequence[int]) -> None:
            calls.append(("begin", len(prompt)))

        def draft(self, tokens: Sequence[int], most: int) -> list[int]:
            calls.append(("draft", len(tokens)))
            return []

    engine = engine_of("llama", prefill_chunk=16)
    with pytest.MonkeyPatch.context() as patch:
        speculation = Speculation([8], measures=False, drafter=Noted)
        patch.setattr(engine.runner, "speculation", speculation)
        ids = prompts_of("llama")[0][:40]
        engines.answer(engine, ids, 1)
        params = SamplingParams(max_tokens=3, temperature=0.0).resolved({})
        list(engine.generate(ids, params))
    assert calls == [("begin", 40), ("draft", 41), ("draft", 42)]


def test_stop_ids_end_an_answer_in_the_middle_of_a_draft(engine_of: Callable[..., Engine]) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    (expected,) = plainly(engine, [ids], params_of("greedy"))
    stop = next(i for i in range(5, STEPS) if expected.ids[i] not in expected.ids[:i])
    ends = plainly(engine, [ids], params_of("greedy"), stop_ids=[expected.ids[stop]])
    assert ends[0].ids == expected.ids[: stop + 1]
    known = [Taken(expected.ids)]
    for cut in range(3):  # the end is at other places of a draft
        engine.forget()
        before, engine.runner.speculation = engine.runner.speculation, NoSpeculation()
        prompt = [*ids, *expected.ids[:cut]]
        engine.runner.speculation = Speculation(
            [8], measures=False, drafter=lambda: Known([[*ids, *known[0].ids]])
        )
        answer = engine.generate(prompt, params_of("greedy"), stop_ids=[expected.ids[stop]])
        assert [step.token for step in answer] == expected.ids[cut : stop + 1]
        assert answer.timings.accepted_tokens > 0
        engine.runner.speculation = before
    stats = engine.pool.stats
    assert stats.in_use == 0


def test_a_cancelled_answer_leaves_nothing(engine_of: Callable[..., Engine]) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    (expected,) = plainly(engine, [ids], params_of("greedy"))
    before = engine.runner.speculation
    known = Known([[*ids, *expected.ids]])
    engine.runner.speculation = Speculation([8], measures=False, drafter=lambda: known)
    answer = engine.generate(ids, params_of("greedy"))
    next(answer)
    next(answer)
    answer.close()
    engine.settle()
    assert engine.pool.stats.in_use == 0
    (again,) = run(engine, [ids], params_of("greedy"))
    assert again.ids == expected.ids
    engine.runner.speculation = before


@others_full("case", ["llama", *STATES], [])
def test_many_answers_come_and_go(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Closed at any time, failing, left unread, out of pages: each that is compared is right."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)
    engine = engine_of(case, max_batch=4, context=3 * PAGE, cache_positions=7 * PAGE)
    before, soak = engine.runner.speculation, Soak(engine)
    known = [[*ids, *answer] for ids, answer in soak.clear.items()]
    junk = random.Random(0)

    class Mixed(Known):
        def draft(self, tokens: Sequence[int], most: int) -> list[int]:
            return super().draft(tokens, most) or junk.choices(range(50), k=junk.randrange(most))

    engine.runner.speculation = Speculation(
        engine.runner.kinds.draft_rows,
        measures=False,
        drafter=lambda: Mixed(known, PATTERNS["mixed"]),
    )
    preemptions = engine.scheduler.preemptions
    assert soak.run(100, seed=3) > 4
    engine.runner.speculation = before
    assert engine.scheduler.preemptions > preemptions
    engine.settle()  # takes in who was closed last
    assert engine.scheduler.idle
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)
    assert sorted(engine.scheduler._slots) == list(range(engine.options.max_batch))


def test_what_is_finished_is_sent(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what is prepared for a next step, whoever comes and goes: nothing else frees it."""
    engine, prompts = engine_of("llama"), prompts_of("llama")
    held = params_of("greedy", regex="of the test")
    params = [held if i % 2 else params_of("greedy") for i in range(len(prompts))]
    expected = plainly(engine, prompts, params)
    known = [[*ids, *own.ids] for ids, own in zip(prompts, expected, strict=True)]
    before = engine.runner.speculation
    engine.runner.speculation = Speculation(
        [8], measures=False, drafter=lambda: Known(known, PATTERNS["mixed"])
    )
    record, send = engine.runner.queue.record, engine.runner.queue.send
    finished: set[Recorded] = set()

    def recorded(*args: Any, **options: Any) -> Recorded:
        made = record(*args, **options)
        if made.is_finished:
            finished.add(made)
        return made

    def sent(made: Recorded) -> Any:
        finished.discard(made)
        return send(made)

    monkeypatch.setattr(engine.runner.queue, "record", recorded)
    monkeypatch.setattr(engine.runner.queue, "send", sent)
    drops = 0
    discard = engine.runner.resident.discard

    def counted(*args: Any) -> None:
        nonlocal drops
        drops += 1
        discard(*args)

    monkeypatch.setattr(engine.runner.resident, "discard", counted)
    found = run(engine, prompts, params)
    engine.runner.speculation = before
    assert [own.ids for own in found] == [own.ids for own in expected]
    assert drops
    assert len(finished) <= 2  # a body and a head


def assert_an_interrupt_changes_nothing(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    ids: Sequence[int],
    params: SamplingParams,
    expected: Sequence[int],
) -> None:
    """Before or after the queue has done it, at each of the first times."""
    real, calls, stop_at, is_done = getattr(engine.runner.queue, where), 0, 0, False

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop_at and not is_done:
            raise KeyboardInterrupt
        value = real(*args, **options)
        if calls == stop_at:
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(engine.runner.queue, where, interrupted)
    for at, done in product(range(1, 4), (False, True)):
        calls, stop_at, is_done, found = 0, at, done, list[int]()
        answer = engine.generate(ids, params)
        while not answer.ended or answer.steps:
            with suppress(KeyboardInterrupt):
                found.extend(step.token for step in answer)
        assert found == expected
        assert calls >= stop_at


@pytest.mark.parametrize("where", ["record", "send", "submit", "read"])
@others_full("case", ["llama", "lfm2"], ["llama"])
def test_an_interrupt_changes_nothing(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str, where: str
) -> None:
    engine, ids = engine_of(case), prompts_of(case)[0]
    params = params_of("greedy")
    (expected,) = plainly(engine, [ids], params)
    before = engine.runner.speculation
    engine.runner.speculation = Speculation(
        [8], measures=False, drafter=lambda: Known([[*ids, *expected.ids]], PATTERNS["mixed"])
    )
    assert_an_interrupt_changes_nothing(engine, monkeypatch, where, ids, params, expected.ids)
    engine.runner.speculation = before


def test_adapters_by_row(own_device: Device) -> None:
    data = places.DATA
    engine = build_engine(
        own_device,
        data / "models" / "llama",
        adapters={"own": data / "adapters" / "llama"},
        speculate="lookup",
        max_batch=4,
    )
    ids, params = list(range(5, 25)), params_of("greedy")
    for adapter in (None, "own"):
        expected = plainly(engine, [ids, ids[3:]], params, adapter=adapter)
        with_drafts(engine, [ids, ids[3:]], params, expected, "mixed", adapter=adapter)


@others_full("case", STATES, ["qwen3_next"])
def test_a_chat_goes_on_from_an_answer_with_drafts(
    engine_of: Callable[..., Engine], case: str
) -> None:
    """The state saved at its end is that before the tokens drafted last, however many were right,
    and wherever in a draft the answer ends."""
    engine, ids = engine_of(case, max_batch=1), prompts_of(case)[0]
    (whole,) = plainly(engine, [ids], params_of("greedy"))
    before = engine.runner.speculation
    lost = set[int]()
    for last in range(1 + MAX_DRAFT):
        if whole.ids[last] in whole.ids[:last]:
            continue
        engine.forget()
        engine.runner.speculation = Speculation(
            [8], measures=False, drafter=lambda: Known([[*ids, *whole.ids]])
        )
        (found,) = run(engine, [ids], params_of("greedy"), stop_ids=[whole.ids[last]])
        assert found.ids == whole.ids[: last + 1]
        engine.runner.speculation = NoSpeculation()
        turn = [*ids, *found.ids, 5, 6, 7]
        second = engines.answer(engine, turn, 4)
        lost.add(len(ids) + last - engine.timings.reused_tokens)
        engine.forget()
        fresh = engines.answer(engine, turn, 4)
        assert second.token_ids == fresh.token_ids
        assert relative_error(second.logits, fresh.logits) <= 1e-5
    engine.runner.speculation = before
    assert min(lost) == 0 < max(lost) <= MAX_DRAFT


def test_only_these_ways() -> None:
    with pytest.raises(RequestError, match="is one of off, lookup, draft, mtp, auto, not 'on'"):
        EngineOptions(8, speculate="on")


# The draft


def simply(tokens: Sequence[int], most: int) -> list[int]:
    """Returns the draft of a PromptLookup that follows no place yet, by looking at all places."""
    for n in (3, 2):
        for place in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[place - n : place]) == list(tokens[-n:]):
                ids = list(tokens)
                for i in range(most):
                    ids.append(ids[place + i])
                return ids[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_a_lookup_finds_the_latest_of_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(3 + seed % 3) for _ in range(rng.randrange(1, 60))]
    for length in range(1, len(tokens) + 1):
        assert PromptLookup().draft(tokens[:length], 5) == simply(tokens[:length], 5)


def test_a_place_is_followed_while_it_is_right() -> None:
    """Also where the same tokens stood later, before others."""
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens = [*text, 0, 4, 5, 6, 9, 0, 1, 2, 3]
    lookup = PromptLookup()
    assert lookup.draft(tokens, 4) == [4, 5, 6, 7]
    tokens += [4, 5]
    assert lookup.draft(tokens, 4) == [6, 7, 8, 0]
    tokens += [6]
    assert lookup.draft(tokens, 2) == [7, 8]
    assert PromptLookup().draft(tokens, 2) == [9, 0]
    tokens += [9]
    assert lookup.draft(tokens, 3) == [0, 1, 2]


def files(rng: random.Random, count: int) -> list[list[list[int]]]:
    """Files of 200 lines of code, as tokens: indentation, names and operators that are in all of
    them, and lines that stand in many places."""
    words, common = range(100, 3000), [[1, 2, 3], [1, 4, 5, 3], [1, 1, 6, 3]]
    return [
        [
            rng.choice(common)
            if rng.random() < 0.2
            else [*[1] * rng.randrange(4), *rng.choices(words, k=rng.randrange(3, 15)), 3]
            for _ in range(200)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("begins", [True, False])
def test_an_edit_is_drafted_from_a_file_in_a_long_conversation(begins: bool) -> None:
    """The answer repeats a file with a line in 25 changed. What is drafted is what a search of the
    whole conversation finds."""
    rng = random.Random(5)
    read = files(rng, 55)
    prompt = [token for file in read for line in file for token in line]
    assert len(prompt) > 100_000
    edited = [line if i % 25 else [1, 7 + i, 8, 3] for i, line in enumerate(read[20], 1)]
    answer = [token for line in edited for token in line]
    lookup, tokens, right = PromptLookup(), list(prompt), 0
    if begins:
        lookup.begin(tokens)
    followed = False
    for token in answer:
        ids = lookup.draft(tokens, MAX_DRAFT)
        if not followed:
            assert ids == latest(tokens, MAX_DRAFT)
        followed = bool(ids) and ids[0] == token
        right += followed
        tokens.append(token)
    assert right > 0.9 * len(answer)


def latest(tokens: list[int], most: int) -> list[int]:
    """As `simply`, for long texts."""
    ids = np.array(tokens)
    for n in (3, 2):
        same = np.all([ids[i : len(ids) - n + i] == ids[i - n] for i in range(n)], axis=0)
        if same.any():
            place = int(np.flatnonzero(same)[-1]) + n
            again = tokens[place:] * most  # where the end is nearer
            return again[:most]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_a_lookup_goes_on_as_one_that_begins(seed: int) -> None:
    """Whatever of the tokens was the prompt, once no place is followed."""
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(60)]
    lookup = PromptLookup()
    lookup.begin(tokens[: rng.randrange(1, 60)])
    tokens += [100, *tokens[-3:]]
    assert lookup.draft(tokens, 5) == simply(tokens, 5)


def test_unlike_tokens_with_one_hash_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infer.engine.speculation, "_FACTORS", (0, 0, 0))
    assert PromptLookup().draft([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == []


class Fixed(Drafter):
    """Drafts the same always."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        return [7] * most


def test_chances_are_learnt() -> None:
    """Whether a token is right depends here on whether the one before it was."""
    guess, rng = Guess(Fixed()), random.Random(0)
    tokens = [7]
    guess.take(tokens)
    seen = Counter[tuple[bool, bool]]()
    for _ in range(2000):
        right = rng.random() < (0.9 if tokens[-1] == 7 else 0.2)
        seen[tokens[-1] == 7, right] += 1
        tokens.append(7 if right else 0)
        guess.take(tokens)
    tokens.append(0)
    guess.take(tokens)
    first, second, *_ = guess.chances
    assert first == pytest.approx(0.2, abs=0.25)
    assert second / first == pytest.approx(0.9, abs=0.25)


def guessing(*chances: float) -> Guess:
    class Sure(Guess):
        @property
        def chances(self) -> list[float]:
            return list(chances)

    return Sure(Fixed())


def measured(plain: dict[int, float], drafted: dict[int, float], **own: Any) -> Speculation:
    speculation = Speculation([2, 4, 8, 16], measures=True, **own)
    for n, seconds in plain.items():
        for _ in range(3):
            speculation.measured(n, 0, seconds)
    for rows, seconds in drafted.items():
        for _ in range(3):
            speculation.measured(1, rows, seconds)
    return speculation


def test_as_many_are_drafted_as_pay() -> None:
    """Times are of steps of an 8B model on an H200 (scripts/results/batch), in milliseconds."""
    speculation = measured({1: 1.9, 8: 3.2}, {2: 2.6, 4: 2.8, 8: 3.4, 16: 5.1})
    likely = guessing(*(0.9**i for i in range(1, 8)))
    assert speculation.counts([likely]) == [7]
    assert speculation.counts([guessing(0.7, 0.49, 0.34, 0.24, 0.1, 0.0, 0.0)]) == [3]
    assert speculation.counts([guessing(0.3, 0.1)]) == [0]
    assert speculation.counts([guessing()]) == [0]
    # At eight sequences the tokens that are most likely, whosever they are.
    counts = speculation.counts([likely, guessing(0.1), *[likely] * 3, None, guessing(0.2), likely])
    assert sum(counts) == 8
    assert counts[1] == counts[5] == counts[6] == 0
    assert speculation.counts([guessing(0.3)] * 8) == [0] * 8


def test_what_is_not_known_is_measured() -> None:
    likely = guessing(0.8, 0.7, 0.6)
    assert measured({}, {}).counts([likely]) == [0]  # how long a step takes without
    speculation = measured({1: 1.0}, {})
    assert speculation.counts([likely]) == [3]  # taken for no slower
    for _ in range(3):
        speculation.measured(1, 4, 9.0)
    assert speculation.counts([likely]) == [1]  # two rows may be fast
    for _ in range(3):
        speculation.measured(1, 2, 9.0)
    assert speculation.counts([likely]) == [0]
    for _ in range(5000):
        speculation.measured(1, 0, 1.0)
    assert speculation.counts([likely]) == [3]  # anew


STEP_TIMES = {1: 1.88, 2: 2.48, 4: 2.65, 8: 3.21, 16: 4.91}  # by rows, as above
READING, CHANGE = 0.15, 0.9  # what a step with drafts waits for; recording, where that shows


class Sometimes(Drafter):
    """Finds a place with some probability, and follows it while it is right."""

    def __init__(self, rng: random.Random, finds: float) -> None:
        self.rng, self.finds, self.follows = rng, finds, False

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self.follows = self.follows and tokens[-1] == 1
        self.follows = self.follows or self.rng.random() < self.finds
        return [1] * most if self.follows else []


def simulated(n: int, right: float, finds: float, most: int | None) -> float:
    """Tokens in a unit of time of n sequences. most: drafted for each; None: what pays."""
    rng = random.Random(1)
    speculation = Speculation([2, 4, 8, 16], measures=True)
    guesses = [Guess(Sometimes(rng, finds)) for _ in range(n)]
    made, time, before = 0, 0.0, False
    for _ in range(1000):
        counts = speculation.counts(guesses)
        if most is not None:
            counts = [min(most, len(guess.ids), 16 // n - 1) for guess in guesses]
        rows = next(rows for rows in STEP_TIMES if rows >= n + sum(counts))
        seconds = STEP_TIMES[rows] + READING * any(counts) + CHANGE * (any(counts) != before)
        seconds *= rng.uniform(0.97, 1.05)
        time, before = time + seconds, any(counts)
        speculation.measured(n, rows if any(counts) else 0, seconds)
        for guess, count in zip(guesses, counts, strict=True):
            for i in range(count + 1):
                made += 1
                is_right = bool(guess.ids) and rng.random() < right
                guess.take([int(is_right)])
                if not is_right or i == count:
                    break
    return made / time


@pytest.mark.parametrize("finds", [0.1, 1.0])
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_what_is_measured_loses_nothing(n: int, finds: float) -> None:
    for right in (0.0, 0.4, 0.7, 0.95):
        speed = simulated(n, right, finds, None)
        fixed = [simulated(n, right, finds, most) for most in (0, 1, 3, 7)]
        assert speed > 0.975 * fixed[0]
        assert speed > 0.87 * max(fixed)


# Speculation through the API


@pytest.mark.demo
def test_a_text_that_repeats_takes_fewer_steps() -> None:
    """And a stop string ends it in the middle of a draft."""
    begin = "Once upon a time"
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0}
    with infer.load("demo", max_batch=1) as llm:
        text = begin + llm.generate(begin, max_tokens=40, temperature=0.0).text + "\n\n" + begin
        whole = llm.generate(text, **options)
        stop = whole.text[60:66]
        stopped = llm.generate(text, stop=stop, **options)
        several = llm.generate(text, n=2, max_tokens=10, temperature=0.5, seed=1)
    with infer.load("demo", max_batch=1, speculate="lookup") as llm:
        found = llm.generate(text, **options)
        assert found.text == whole.text
        timings = found.timings
        assert 0 < timings.accepted_tokens < timings.drafted_tokens
        steps = timings.decoded_tokens - timings.accepted_tokens
        assert found.step_tokens == pytest.approx(timings.decoded_tokens / steps)
        assert llm.generate(text, stop=stop, **options).text == stopped.text
        again = llm.generate(text, n=2, max_tokens=10, temperature=0.5, seed=1)
        assert [each.text for each in again] == [each.text for each in several]
