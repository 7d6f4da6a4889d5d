"""Rows that are given by hand in place of tokens: here those of the embedding, so that answers and
caches are those of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import answer, build_engine
from reference_models import load

from infer.engine.engine import Engine
from infer.engine.prompts import FIRST_GIVEN, Attachment, Prompt
from infer.engine.scheduler import Decode, Events, Prefill
from infer.engine.speculation import Drafter, Guess
from infer.engine.token_engine import Request
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.pack import from_bf16
from infer.sampling import SamplingParams

CASES = ["llama", *(pytest.param(c, marks=pytest.mark.full) for c in ("gemma2", "qwen3_next"))]
STEPS = 12
PARAMS = SamplingParams(max_tokens=STEPS, temperature=0.0).resolved({})

Make = Callable[..., Engine]


@pytest.fixture
def make(device: Device, tmp_path: Path) -> Iterator[Make]:
    folders = iter(range(9))

    def made(case: str, **options: Any) -> Engine:
        folder = load(case).write_checkpoint(tmp_path / f"{case}{next(folders)}")
        return build_engine(device, folder, **{"context": 256, "max_batch": 3} | options)

    with device.scope():
        yield made


def rows_of(ids: Sequence[int], engine: Engine) -> np.ndarray:
    """The embeddings of tokens, float32 [tokens, hidden_size]."""
    weight = engine.weights["embed_tokens"]
    assert weight.dtype == "bf16"
    vocab_size, width = weight.shape
    raw = engine.device.read(weight.buffer, np.uint16).reshape(vocab_size, -1)[:, :width]
    scale = np.float32(engine.config.embedding_multiplier)
    return from_bf16(raw)[np.asarray(ids)] * scale


def with_rows(ids: Sequence[int], engine: Engine, *parts: range) -> Prompt:
    """The prompt, with the embeddings of some parts given in place of the tokens."""
    return Prompt(
        ids,
        [Attachment(p.start, rows_of(ids[p.start : p.stop], engine)) for p in parts],
    )


def tokens_of(engine: Engine, prompt: Sequence[int], **own: Any) -> tuple[list[int], int]:
    """The tokens of its answer, and how many of the prompt were cached."""
    found = engine.answer(Request(Prompt.of(prompt), PARAMS, **own))
    return [step.token for step in found], found.timings.reused_tokens


@pytest.mark.parametrize("case", CASES)
def test_rows_in_place_of_tokens(make: Make, case: str) -> None:
    """At the beginning, in the middle over chunks and pages, and at the end."""
    ids = (load(case).prompt_ids.tolist() * 5)[:150]
    expected = answer(make(case, max_batch=1), ids, STEPS)
    for parts in (
        [range(0, 9)],
        [range(5, 140)],
        [range(0, 3), range(60, 70), range(120, 150)],
        [range(150)],
    ):
        engine = make(case, prefill_chunk=32)
        prompt = with_rows(ids, engine, *parts)
        assert min(prompt[i] for part in parts for i in part) >= FIRST_GIVEN
        assert answer(engine, prompt, STEPS).token_ids == expected.token_ids
        np.testing.assert_allclose(
            answer(engine, prompt, STEPS).logits, expected.logits, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("case", CASES)
def test_equal_rows_are_found_in_the_cache(make: Make, case: str) -> None:
    engine = make(case, prefill_chunk=32)
    ids = (load(case).prompt_ids.tolist() * 5)[:150]
    prompt = with_rows(ids, engine, range(20, 100))
    first, _ = tokens_of(engine, prompt)
    again, reused = tokens_of(engine, with_rows(ids, engine, range(20, 100)))
    assert (first, reused > 130) == (again, True)
    other = [*ids[:60], *(i - 1 for i in ids[60:])]
    changed, reused = tokens_of(engine, with_rows(other, engine, range(20, 100)))
    assert reused <= 60
    assert changed == tokens_of(make(case), other)[0]
    _, reused = tokens_of(engine, ids)  # the tokens themselves are others
    assert reused <= 20


def test_prompts_with_rows_and_without_share_steps(make: Make) -> None:
    ids = (load("llama").prompt_ids.tolist() * 3)[:60]
    prompts = [[*ids[i : i + 20 + 5 * i]] for i in range(3)]
    expected = [tokens_of(make("llama"), prompt)[0] for prompt in prompts]
    engine = make("llama")
    mixed = [
        with_rows(prompts[0], engine, range(2, 9)),
        Prompt(prompts[1]),
        with_rows(prompts[2], engine, range(0, 4), range(10, 30)),
    ]
    counts: list[int] = []

    class Counted(Events):
        def submits(self, work: Sequence[Prefill] | Decode) -> None:
            if not isinstance(work, Decode):
                counts.append(len(work))

    engine.events = Counted()
    answers = [engine.answer(Request(prompt, PARAMS)) for prompt in mixed]
    assert [[step.token for step in own] for own in answers] == expected
    assert max(counts) > 1


@pytest.mark.parametrize("case", CASES)
def test_what_gave_its_pages_back_is_computed_again(make: Make, case: str) -> None:
    ids = (load(case).prompt_ids.tolist() * 5)[:100]
    engine = make(case, prefill_chunk=32)
    prompt = with_rows(ids, engine, range(10, 80))
    expected, _ = tokens_of(engine, prompt)
    engine.forget()
    running = engine.answer(Request(prompt, PARAMS))
    tokens = [next(running).token for _ in range(4)]
    engine.forget()  # answers go on from their tokens
    tokens += [step.token for step in running]
    assert tokens == expected


def test_a_draft_model_follows(make: Make, tmp_path: Path) -> None:
    ids = load("llama").prompt_ids.tolist() * 2
    expected, _ = tokens_of(make("llama"), ids)
    folder = load("llama").write_checkpoint(tmp_path / "draft")
    engine = make("llama", speculate="draft", draft=folder)
    prompt = with_rows(ids, engine, range(5, 20), range(40, 70))
    assert tokens_of(engine, prompt)[0] == expected
    assert engine.stats().drafted > 0


def test_rows_are_not_drafted() -> None:
    class Given(Drafter):
        def draft(self, tokens: Sequence[int], most: int) -> list[int]:
            return [5, 6, FIRST_GIVEN + 9, 7]

    guess = Guess(Given())
    guess.take([1, 2, 3])
    assert guess.ids == [5, 6]


def test_penalties_count_tokens_alone(make: Make) -> None:
    engine = make("llama")
    ids = load("llama").prompt_ids.tolist()
    prompt = with_rows(ids, engine, range(2, 9))
    params = SamplingParams(
        max_tokens=STEPS, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2
    ).resolved({})
    assert len(list(engine.answer(Request(prompt, params)))) == STEPS


def test_what_does_not_fit_is_refused(make: Make) -> None:
    engine, rows = make("llama"), np.zeros((4, 9), np.float32)
    with pytest.raises(RequestError, match=r"Rows of shape \(4, 9\) cannot stand in a prompt"):
        tokens_of(engine, Prompt([1] * 9, [Attachment(2, rows)]))
    for start, count in ((8, 4), (3, 4)):
        with pytest.raises(RequestError, match="do not fit into a prompt of 9 tokens, or overlap"):
            Prompt([1] * 9, [Attachment(0, rows), Attachment(start, rows[:count])])
    with pytest.raises(RequestError, match="is not in the model's vocabulary"):
        tokens_of(engine, [1, FIRST_GIVEN, 2])
    engine = make("gemma4")
    rows = np.zeros((4, engine.config.hidden_size), np.float32)
    with pytest.raises(UnsupportedError, match="takes no rows in place of tokens"):
        tokens_of(engine, Prompt([1] * 9, [Attachment(2, rows)]))
