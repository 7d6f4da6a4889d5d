"""A draft model changes nothing but the speed: whatever it drafts, answers are those without."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from engines import build_engine
from marks import others_full
from numpy.typing import NDArray
from reference_models import DATA
from test_batch import Soak
from test_speculation import (
    STATES,
    STEPS,
    WAYS,
    Taken,
    assert_an_interrupt_changes_nothing,
    params_of,
    plainly,
    prompts_of,
    run,
)
from test_structured import Third, masked

import infer
import infer.engine.scheduler
from infer.engine.constraint import Constraint
from infer.engine.draft import DraftModel, check_draft
from infer.engine.engine import Engine
from infer.engine.speculation import (
    MAX_DRAFT,
    Guess,
    Held,
    ModelGuess,
    ModelSpeculation,
    NoSpeculation,
)
from infer.hub import resolve
from infer.inspection import inspect_model
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import StepQueue
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.step import NO_TOKEN, Tokens
from infer.models import open_model

DEPTH = 4  # of a round without measuring
CASES = "llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v2"  # draft for themselves, too
OTHER = "qwen3"  # knows as many tokens as all reference models


@pytest.fixture(scope="module")
def engine_of(engine_of: Callable[..., Engine]) -> Callable[..., Engine]:
    """One for which another model (or the same) drafts."""

    def build(case: str, draft: str = "", **options: Any) -> Engine:
        own = {"speculate": "draft", "max_batch": 4, "draft": DATA / (draft or case)} | options
        return engine_of(case, **own)

    return build


def drafts_of(found: Sequence[Taken]) -> tuple[int, int]:
    """Tokens drafted for these answers, and those of them that were right."""
    timings = [own.answer.timings for own in found if own.answer is not None]
    return sum(t.drafted_tokens for t in timings), sum(t.accepted_tokens for t in timings)


def same(found: Sequence[Taken], expected: Sequence[Taken]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.ids == other.ids
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize("draft", ["", OTHER])
@others_full("case", CASES, ["llama", "deepseek_v2"])
def test_answers_are_those_without_drafts(
    engine_of: Callable[..., Engine], case: str, draft: str
) -> None:
    """Six of them on four slots, greedy, sampled and with penalties, which a draft model does not
    count as it goes. What drafts for itself is nearly always right, another one hardly ever."""
    engine, prompts = engine_of(case, draft), prompts_of(case)
    params = [params_of(way, logprobs=2) for way in [*WAYS, *WAYS]]
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    same(found, expected)
    drafted, right = drafts_of([found[i] for i in (0, 1, 3, 4)])  # without penalties
    assert drafted > 20
    assert right < 0.2 * drafted if draft else right > 0.9 * drafted
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_alone(engine_of: Callable[..., Engine], case: str, way: str) -> None:
    prompts, params = prompts_of(case)[:1], params_of(way, max_tokens=60)
    for draft in ("", OTHER):
        engine = engine_of(case, draft, max_batch=1)
        expected = plainly(engine, prompts, params)
        found = run(engine, prompts, params)
        same(found, expected)
        drafted, right = drafts_of(found)
        if not draft and way != "penalized":  # none is lost, whether or not a round was all right
            assert right == drafted == 59 + -59 // (1 + DEPTH)
        rounds = 59 - right
        assert drafted <= DEPTH * rounds


@others_full("case", ["lfm2", "qwen3_next", "granitemoehybrid"], [])
def test_a_model_whose_layers_have_a_state(engine_of: Callable[..., Engine], case: str) -> None:
    engine, prompts = engine_of(case, "llama", max_batch=2), prompts_of(case)[:3]
    likely = {7: 40.0, 9: 40.0, 11: 40.0}  # both models choose among these, by the same noise
    params = [params_of("sampled", logit_bias=likely, seed=i) for i in range(3)]
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    same(found, expected)
    drafted, right = drafts_of(found)
    assert 5 < right < drafted - 5


@others_full("case", STATES, [])
def test_a_draft_model_whose_layers_have_a_state(
    engine_of: Callable[..., Engine], case: str
) -> None:
    """It drafts for itself, at last for prompts that the other has cached."""
    engine, prompts = engine_of(case), prompts_of(case)
    params = [params_of(way, logprobs=2) for way in [*WAYS, *WAYS]]
    expected = plainly(engine, prompts, params)
    for _ in range(2):
        found = run(engine, prompts, params)
        same(found, expected)
        drafted, right = drafts_of([found[i] for i in (0, 1, 3, 4)])
        assert right > 0.9 * drafted > 20


def test_what_is_cached_is_drafted_from(engine_of: Callable[..., Engine]) -> None:
    """The draft model has, or computes, positions that were generated without drafts, in shared
    pages and in pages of which a part is copied."""
    engine, ids = engine_of("llama", cache_positions=8 * PAGE), prompts_of("llama")[0]
    long = (ids * 3)[: PAGE - 10]
    params = params_of("greedy")
    alone = plainly(engine, [long], params_of("greedy", max_tokens=2 * STEPS))[0].ids
    speculation, engine.runner.speculation = engine.runner.speculation, NoSpeculation()
    (first,) = run(engine, [long], params)  # into the second page
    engine.runner.speculation = speculation
    follow, split = [*long, *first.ids[:-1]], [*long, *first.ids[:5], 7, 8]
    found = run(engine, [follow, [*long, *first.ids[:3]], split], params)
    reused = [own.answer.timings.reused_tokens for own in found if own.answer is not None]
    assert min(reused) >= PAGE - 10
    assert found[0].ids[: STEPS - 1] == alone[STEPS - 1 : 2 * STEPS - 2]
    assert found[1].ids == alone[3 : 3 + STEPS]
    assert found[2].ids == plainly(engine, [split], params)[0].ids
    drafted, right = drafts_of(found)
    assert right == drafted > 30


def test_prompts_are_computed_together(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads as many prompts as share a step of the other model; their common part once."""
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    begin = (ids * 3)[:PAGE]
    prompts = [[*begin, *ids[i : 2 * i + 3]] for i in range(4)]
    params = params_of("greedy")
    expected = plainly(engine, prompts, params)
    drafter = engine.runner.drafter
    assert isinstance(drafter, DraftModel)
    steps: list[list[int]] = []
    real = drafter._compute

    def compute(queue: StepQueue, chunks: Sequence[tuple[Tokens, int, int, int]]) -> None:
        steps.append([len(tokens) for tokens, *_ in chunks])
        real(queue, chunks)

    monkeypatch.setattr(drafter, "_compute", compute)
    answers = [engine.generate(prompt, params) for prompt in prompts]
    found = [[step.token for step in answer] for answer in answers]
    assert found == [own.ids for own in expected]
    assert max(map(len, steps)) > 1
    assert sum(map(sum, steps)) < PAGE + sum(len(prompt) - PAGE for prompt in prompts) + 8
    timings = [answer.timings for answer in answers]
    drafted, right = (
        sum(t.drafted_tokens for t in timings),
        sum(t.accepted_tokens for t in timings),
    )
    assert right > 0.9 * drafted > 20


def test_it_goes_on_drafting_after_a_while_without(engine_of: Callable[..., Engine]) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    params = params_of("greedy", max_tokens=60)
    (expected,) = plainly(engine, [ids], params)
    speculation = engine.runner.speculation

    class Sometimes(ModelSpeculation):
        steps = 0

        def counts(self, guesses: Sequence[Guess | None]) -> list[int]:
            self.steps += 1
            return [0 if self.steps % 20 < 10 else n for n in super().counts(guesses)]

    engine.runner.speculation = Sometimes(speculation.kinds, measures=False)
    try:
        (found,) = run(engine, [ids], params)
    finally:
        engine.runner.speculation = speculation
    same([found], [expected])
    drafted, right = drafts_of([found])
    assert right == drafted > 10


@others_full("case", ["llama", "gpt_oss"], [])
def test_an_invariant_answer_has_the_same_bits(engine_of: Callable[..., Engine], case: str) -> None:
    engine, prompts = engine_of(case, OTHER, invariant=True), prompts_of(case)[:3]
    params = params_of("sampled", logprobs=0)
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    assert [own.logprobs for own in found] == [own.logprobs for own in expected]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"ahead": 1}, {"kv_dtype": "q8"}, {"raw": False}, {"fuse": False}, {"ahead": 3}],
    ids=str,
)
def test_other_engines(engine_of: Callable[..., Engine], options: dict[str, Any]) -> None:
    engine, prompts = engine_of("llama", OTHER, **options), prompts_of("llama")[:3]
    expected = plainly(engine, prompts, params_of("sampled"))
    same(run(engine, prompts, params_of("sampled")), expected)


@pytest.mark.full
@pytest.mark.parametrize(("case", "draft"), [("llama", ""), ("llama", OTHER), ("lfm2", "")])
def test_few_pages(engine_of: Callable[..., Engine], case: str, draft: str) -> None:
    """Answers give their pages back, and begin again, in the middle of drafts."""
    own = {"max_batch": 3, "context": 3 * PAGE, "cache_positions": 5 * PAGE}
    engine, ids = engine_of(case, draft, **own), prompts_of(case)[0]
    prompts = [ids, ids[3:], ids[:20]]
    params = params_of("sampled", max_tokens=3 * PAGE - len(ids) - 1)
    expected = plainly(engine, prompts, params)
    before = engine.scheduler.preemptions
    found = run(engine, prompts, params)
    same(found, expected)
    assert engine.scheduler.preemptions > before
    if not draft:
        drafted, right = drafts_of(found)
        assert right > 0.9 * drafted


def test_neighbours_of_other_kinds(engine_of: Callable[..., Engine]) -> None:
    """With a constraint, a processor or logits an answer is decoded as ever, in the same steps."""
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    params = params_of("sampled")
    expected = plainly(engine, [ids], params)
    alone = [step.token for step in masked(engine, ids[:9], STEPS, **WAYS["sampled"])]
    constrained = masked(engine, ids[:9], STEPS, **WAYS["sampled"])
    chosen = engine.generate(ids[:9], params, logits_processor=lambda ids, scores: scores)
    with_logits = engine.generate(ids, params, with_logits=True)
    found = run(engine, [ids], params)
    same(found, expected)
    assert drafts_of(found)[0] > 0
    assert [step.token for step in constrained] == alone
    assert [step.token for step in with_logits] == expected[0].ids
    tokens = [step.token for step in chosen]
    engine.forget()
    again = engine.generate(ids[:9], params, logits_processor=lambda ids, scores: scores)
    assert [step.token for step in again] == tokens
    assert constrained.timings.drafted_tokens == with_logits.timings.drafted_tokens == 0


class Forcing(Third):
    """A matcher that leaves no choice at times, or nearly none."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        those = super().allowed(tokens)
        return those & (np.arange(self.vocab) < 3) if len(tokens) % 8 < 3 else those


@pytest.mark.parametrize("matcher", [Forcing, pytest.param(Third, marks=pytest.mark.full)])
@pytest.mark.parametrize("draft", ["", pytest.param(OTHER, marks=pytest.mark.full)])
@others_full("case", CASES, ["llama"])
def test_held_answers_are_those_without_drafts(
    engine_of: Callable[..., Engine], case: str, draft: str, matcher: type[Third]
) -> None:
    """Drafts are read back for the masks of answers that are held, beside others that are not."""
    engine, prompts = engine_of(case, draft), prompts_of(case)
    held = [params_of(way, logprobs=2, regex="of the test") for way in WAYS]
    params = [*held, *(params_of(way) for way in WAYS)]
    expected = plainly(engine, prompts, params, matcher=matcher)
    found = run(engine, prompts, params, matcher=matcher)
    same(found, expected)
    own, beside = (drafts_of(part) for part in (found[:3], found[3:]))
    if draft:
        return
    assert 5 < own[1] < own[0]  # it does not know what they are held to
    assert beside[1] > 0.8 * beside[0] > 20
    if matcher is Forcing:
        assert own[1] > 3 * 3 * 2


@others_full("case", ["llama", *STATES], ["llama"])
def test_drafts_are_what_the_draft_model_would_say(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """After what is there and what has to come, whatever was wrong before."""
    engine, prompts = engine_of(case), prompts_of(case)[:1]
    drafted: list[tuple[list[int], list[int]]] = []
    real = Constraint.count_allowed

    def count_allowed(
        self: Constraint, tokens: Sequence[int], start: int, ids: Sequence[int]
    ) -> int:
        forced = len(self.forced_after(tokens, start))
        drafted.append(([*tokens, *ids[:forced]], list(ids[forced:])))
        return real(self, tokens, start, ids)

    monkeypatch.setattr(Constraint, "count_allowed", count_allowed)
    (own,) = run(engine, prompts, params_of("greedy", regex="of the test"), matcher=Forcing)
    assert sum(len(ids) for _, ids in drafted) > 10
    for tokens, ids in drafted:
        (expected,) = plainly(engine, [tokens], params_of("greedy", max_tokens=len(ids)))
        assert ids == expected.ids
    assert 0 < drafts_of([own])[1] < drafts_of([own])[0]


def test_stop_ids_end_an_answer_in_the_middle_of_a_draft(engine_of: Callable[..., Engine]) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    (expected,) = plainly(engine, [ids], params_of("greedy"))
    stop = next(i for i in range(5, STEPS) if expected.ids[i] not in expected.ids[:i])
    for cut in range(DEPTH + 1):  # the end is at all places of a draft
        engine.forget()
        prompt = [*ids, *expected.ids[:cut]]
        answer = engine.generate(prompt, params_of("greedy"), stop_ids=[expected.ids[stop]])
        assert [step.token for step in answer] == expected.ids[cut : stop + 1]
    assert engine.pool.stats.in_use == 0


def test_a_cancelled_answer_leaves_nothing(engine_of: Callable[..., Engine]) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    (expected,) = plainly(engine, [ids], params_of("greedy"))
    answer = engine.generate(ids, params_of("greedy"))
    next(answer)
    next(answer)
    answer.close()
    engine.settle()
    assert engine.pool.stats.in_use == 0
    (again,) = run(engine, [ids], params_of("greedy"))
    assert again.ids == expected.ids


@others_full("case", ["llama", "qwen3_next"], ["llama"])
def test_many_answers_come_and_go(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Closed at any time, failing, left unread, out of pages: each that is compared is right."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)
    engine = engine_of(case, max_batch=4, context=3 * PAGE, cache_positions=7 * PAGE)
    speculation, engine.runner.speculation = engine.runner.speculation, NoSpeculation()
    soak = Soak(engine)
    engine.runner.speculation = speculation
    preemptions = engine.scheduler.preemptions
    assert soak.run(100, seed=3) > 4
    assert engine.scheduler.preemptions > preemptions
    engine.settle()  # takes in who was closed last
    assert engine.scheduler.idle
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


@pytest.mark.parametrize("where", ["record", "send", "submit", "read"])
def test_an_interrupt_changes_nothing(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine, ids = engine_of("llama"), prompts_of("llama")[0]
    params = params_of("greedy", max_tokens=16)
    (expected,) = plainly(engine, [ids], params)
    assert_an_interrupt_changes_nothing(engine, monkeypatch, where, ids, params, expected.ids)


def test_adapters_by_row(own_device: Device) -> None:
    """They are the model's alone: the draft model drafts without."""
    data = places.DATA
    engine = build_engine(
        own_device,
        data / "models" / "llama",
        adapters={"own": data / "adapters" / "llama"},
        draft=data / "models" / "llama",
        speculate="draft",
        max_batch=2,
    )
    ids, params = list(range(5, 25)), params_of("greedy")
    for adapter in (None, "own"):
        expected = plainly(engine, [ids, ids[3:]], params, adapter=adapter)
        same(run(engine, [ids, ids[3:]], params, adapter=adapter), expected)


# Models that cannot draft


def refusal(**options: Any) -> str:
    with pytest.raises((RequestError, UnsupportedError)) as refused:
        infer.load("demo", **options)
    return str(refused.value)


def altered(folder: Path, **config: Any) -> Path:
    """The demo model's files with another config.json."""
    shutil.copytree(resolve("demo").path, folder, ignore=shutil.ignore_patterns("draft"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_a_draft_model_has_the_same_tokenizer(tmp_path: Path) -> None:
    folder = altered(tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(text for text, i in vocab.items() if i == n) for n in (300, 301))
    vocab[first], vocab[second] = 301, 300
    file.write_text(json.dumps(content))
    told = refusal(draft=folder)
    assert told.startswith("other cannot draft for demo: its tokenizer is another one. Token 300")
    assert told.endswith("Give a smaller model of the same family.")


def test_a_draft_model_fits(tmp_path: Path) -> None:
    smaller = altered(tmp_path / "smaller", max_position_embeddings=100)
    told = refusal(draft=smaller, context=200)
    assert told.startswith("smaller has positions up to 100, and a context of 200 was asked for.")

    data = places.DATA / "models"
    demo, tiny = (open_model(path)[0] for path in (resolve("demo").path, data / "llama"))
    with pytest.raises(UnsupportedError, match="demo has a vocabulary of 2048 tokens, and tiny"):
        check_draft(demo, "demo", tiny, "tiny", 64)


def test_ways_that_do_not_go_together() -> None:
    for way in ("off", "lookup"):
        told = refusal(draft="demo-draft", speculate=way)
        assert told.startswith(f'speculate="{way}" is given, and a draft model (demo-draft), which')
    assert "no model to draft with" in refusal(speculate="draft")
    assert "draft_quantize must be one of q8, q4, not 'q2'" in refusal(
        draft="demo-draft", draft_quantize="q2"
    )
    assert 'draft_quantize="q4" is given, and there is no draft model' in refusal(
        draft_quantize="q4"
    )


# How many


class Sure(ModelGuess):
    def __init__(self, *rates: float) -> None:
        super().__init__([*rates, *[rates[-1]] * 8])


def measured(plain: float, rounds: dict[int, float], n: int = 1) -> ModelSpeculation:
    speculation = ModelSpeculation([2, 4, 8, 16, 32], measures=True)
    for _ in range(3):
        speculation.measured(n, 0, plain)
        for depth, seconds in rounds.items():
            speculation.measured(n, speculation.kind(n, 0, depth), seconds)
    return speculation


def test_as_many_are_drafted_as_pay() -> None:
    """Times are of steps of an 8B model and a 1B model on an H200 (docs/decisions.md), in ms."""
    speculation = measured(4.5, {1: 6.1, 2: 6.9, 3: 7.7, 4: 8.8, 7: 11.9})
    assert speculation.counts([Sure(0.7)]) == [3]
    assert speculation.counts([Sure(0.97)]) == [7]
    assert speculation.counts([Sure(0.3)]) == [0]
    assert speculation.counts([None]) == [0]
    # All answers get equally many drafts, except for those that take none.
    speculation = measured(5.1, {1: 6.5, 2: 8.0, 3: 9.4}, n=4)
    assert speculation.counts([Sure(0.8), Sure(0.9), None, Sure(0.2)]) == [2, 2, 0, 2]
    assert speculation.counts([Sure(0.2)] * 4) == [0] * 4
    # No more than there are rows for.
    many = measured(1.0, {1: 1.01}, n=12)
    assert many.counts([Sure(0.99)] * 12) == [1] * 12
    assert ModelSpeculation([2, 4], measures=False).counts([Sure(0.9)] * 4) == [0] * 4


def test_what_is_not_known_is_measured() -> None:
    assert ModelSpeculation([8], measures=True).counts([Sure(0.9)]) == [0]
    assert measured(1.0, {}).counts([Sure(0.9)]) == [MAX_DRAFT]
    assert measured(1.0, {7: 8.0}).counts([Sure(0.9)]) == [0]
    assert 1 <= measured(1.0, {7: 3.0}).counts([Sure(0.7)])[0] < 7  # on the line between


class Certain(Held):
    """Two tokens have to come."""

    def __init__(self) -> None:
        pass

    def forced(self, tokens: Sequence[int]) -> list[int]:
        return [5, 6]


def test_what_has_to_come_is_drafted_with_the_model_or_without() -> None:
    guess = ModelGuess([0.3] * MAX_DRAFT, Certain())
    guess.take([1])
    assert guess.ids == [5, 6] + [NO_TOKEN] * (MAX_DRAFT - 2)
    assert guess.chances[:3] == pytest.approx([1, 1, 0.3], abs=0.01)
    always = ModelSpeculation([8], measures=False)
    assert (always.counts([guess]), always.model_steps) == ([DEPTH], DEPTH)
    for times, count, model_steps in (
        ({0: 4.9, 3: 5.0}, 3, 3),
        ({0: 4.9, 3: 9.0}, 2, 0),
        ({0: 30.0, 3: 30.0}, 0, 0),
    ):
        speculation = measured(4.5, times)
        assert (speculation.counts([guess]), speculation.model_steps) == ([count], model_steps)
    assert ModelSpeculation([4], measures=False).counts([guess] * 3) == [
        1,
        0,
        0,
    ]
    before = guess.chances
    guess.verified(4, 2)  # the first that was not certain is wrong
    assert guess.chances[:2] == [1, 1]
    assert guess.chances[2] < before[2]


def test_rates_are_learnt_by_place_and_forgotten() -> None:
    speculation, draw = ModelSpeculation([8], measures=True), random.Random(0)
    guess, first = speculation.guess(), speculation.guess().chances
    for _ in range(300):
        right = 0 if draw.random() > 0.9 else 1 if draw.random() > 0.3 else 2
        guess.verified(2, right)
        for _ in range(right + 1):
            guess.take([0])
    one, both, *_ = speculation.guess().chances  # of all answers
    assert one == pytest.approx(0.9, abs=0.2)
    assert both / one == pytest.approx(0.3, abs=0.25)
    for _ in range(1000):
        guess.take([0])
    assert guess.chances == pytest.approx(first, abs=0.02)


def simulated(right: float, depth: int | None) -> float:
    """Tokens in a unit of time of one sequence. depth: None: what pays."""
    rng, speculation = random.Random(1), ModelSpeculation([2, 4, 8], measures=True)
    guess = speculation.guess()
    made, time, before = 0, 0.0, 0
    for _ in range(1000):
        (count,) = speculation.counts([guess])
        count = count if depth is None else depth
        seconds = 4.48 if not count else 4.78 + 0.15 * count + 0.48 + 0.7 * count
        seconds = (seconds + 1.5 * (count > before)) * rng.uniform(0.97, 1.05)  # to record it
        speculation.measured(1, speculation.kind(1, 0, count) if count else 0, seconds)
        accepted = next((i for i in range(count) if rng.random() >= right), count)
        if count:
            guess.verified(count, accepted)
        for _ in range(accepted + 1):
            guess.take([0])
        made, time, before = made + accepted + 1, time + seconds, count
    return made / time


def test_what_is_measured_loses_little() -> None:
    for right in (0.0, 0.4, 0.7, 0.95):
        speed, fixed = simulated(right, None), [simulated(right, n) for n in (0, 1, 3, 5, 7)]
        assert speed > 0.95 * fixed[0]
        assert speed > 0.93 * max(fixed)


class Timed(ModelSpeculation):
    """Steps take as long as those of an 8B model and a 1B model."""

    def measured(self, sequences: int, kind: Hashable, seconds: float) -> None:
        assert seconds > 0
        depth = kind[1] if isinstance(kind, tuple) else 0
        super().measured(sequences, kind, 5.3 + 0.85 * depth if depth else 4.5)


def test_drafts_end_where_they_are_wrong_and_come_back() -> None:
    rng, speculation = random.Random(1), Timed([2, 4, 8], measures=True)
    guess = speculation.guess()

    def share(right: float, steps: int) -> float:
        """Returns the share of so many steps that has drafts."""
        drafting = 0
        for _ in range(steps):
            (count,) = speculation.counts([guess])
            drafting += count > 0
            speculation.measured(1, speculation.kind(1, 0, count) if count else 0, 1.0)
            accepted = next((i for i in range(count) if rng.random() >= right), count)
            if count:
                guess.verified(count, accepted)
            for _ in range(accepted + 1):
                guess.take([0])
        return drafting / steps

    assert share(0.9, 300) > 0.9
    share(0.0, 50)
    assert 0 < share(0.0, 1000) < 0.1
    share(0.9, 400)
    assert share(0.9, 300) > 0.9


@pytest.mark.parametrize("draft", [OTHER, ""])
def test_an_engine_drafts_where_it_pays(engine_of: Callable[..., Engine], draft: str) -> None:
    engine, prompts = engine_of("llama", draft, speculate="auto"), prompts_of("llama")[:1]
    engine.runner.speculation = Timed(engine.runner.kinds.draft_rows, measures=True)
    params = params_of("greedy", max_tokens=60)
    drafts = [drafts_of(run(engine, prompts, params)) for _ in range(3)]
    drafted, right = drafts[-1]
    if draft:
        assert drafted < 59 / 4 < drafts[0][0]
    else:
        assert 59 - right < 59 / 4


# Draft models through the API


@pytest.mark.full
@pytest.mark.demo
def test_the_demo_model_has_a_draft_of_its_own() -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 1}
    with infer.load("demo", max_batch=2) as llm:
        expected = [llm.generate("Once upon a time", temperature=t, **options) for t in (0.0, 0.8)]
    own = {"draft": "demo-draft", "max_batch": 2, "context": 512}
    with infer.load("demo", speculate="draft", **own) as llm:
        found = [llm.generate("Once upon a time", temperature=t, **options) for t in (0.0, 0.8)]
        assert [each.text for each in found] == [each.text for each in expected]
        assert min(each.step_tokens for each in found) > 1.5
        stats, timings = llm.stats(), [each.timings for each in found]
        assert stats.drafted == sum(each.drafted_tokens for each in timings)
        assert stats.accepted == sum(each.accepted_tokens for each in timings)
        assert stats.drafts < stats.drafted
        counted = inspect_model("demo", draft="demo-draft", context=512)
        assert counted.draft == "demo-draft"
        weights = sum(t.nbytes for t in llm.engine.weights.values())
        assert counted.weight_bytes > weights
    with infer.load("demo", isolate=True, **own) as llm:
        assert llm.generate("Once upon a time", temperature=0.8, **options).text == found[1].text
