"""A KV cache that grows as it is used gives the answers of one that has all of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import answer, build_engine, open_model, scores
from reference_models import load

from infer.engine.engine import Engine
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.device import Buffer, Device
from infer.models.blocks.rope import rope_table
from infer.sampling import SamplingParams

Make = Callable[..., Engine]
SMALL: dict[str, Any] = {"context": 600, "first_positions": 64}


@pytest.fixture(scope="module")
def made(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes an engine that nothing has used."""

    def make(case: str, **options: Any) -> Engine:
        folder = load(case).write_checkpoint(tmp_path_factory.mktemp(case) / case)
        return build_engine(own_device, folder, **{"context": 600} | options)

    return make


def long_prompt(engine: Engine, length: int = 150) -> list[int]:
    rng = np.random.default_rng(length)
    return [int(token) for token in rng.integers(0, engine.vocab_size, length)]


def pages_of(engine: Engine) -> int:
    layer = next(iter(engine.steps.cache.layers))
    return layer.slots // 64


@pytest.mark.dawn
@pytest.mark.parametrize(
    ("case", "kv_dtype"),
    [
        ("llama", "f32"),
        ("llama", "q8"),
        pytest.param("mistral_sliding", "f16", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "q8", marks=pytest.mark.full),
        ("qwen3_5_text", "f32"),
    ],
)
def test_an_answer_outgrows_the_first_pages(made: Make, case: str, kv_dtype: str) -> None:
    """While its prompt is read, and then several times while it is generated."""
    whole, small = made(case, kv_dtype=kv_dtype), made(case, kv_dtype=kv_dtype, **SMALL)
    prompt = long_prompt(whole)
    expected = answer(whole, prompt, 200)
    found = answer(small, prompt, 200)
    assert found.token_ids == expected.token_ids
    np.testing.assert_array_equal(found.logits, expected.logits)
    assert pages_of(small) == small.steps.cache.n_pages
    assert 6 <= small.steps.cache.n_pages <= small.options.pages
    # And what it has left in the cache is found.
    both = [*prompt, *found.token_ids]
    assert answer(small, both, 5).token_ids == answer(whole, both, 5).token_ids


def test_it_begins_small(tmp_path: Path) -> None:
    with Device.open() as device:
        engine = build_engine(device, load("llama").write_checkpoint(tmp_path / "llama"), **SMALL)
        assert (engine.options.first_pages, pages_of(engine)) == (2, 2)
        answer(engine, long_prompt(engine, 20), 20)
        assert pages_of(engine) == 2
        before = device.memory_stats().allocated
        answer(engine, long_prompt(engine, 150), 2)
        assert pages_of(engine) > 2
        grown = (pages_of(engine) - 2) * 64
        cache = sum(sum(layer.slot_bytes) * 2 for layer in engine.steps.cache.layers)
        table = engine.steps.rope.table.nbytes // engine.steps.positions
        assert device.memory_stats().allocated - before == grown * (cache + table)


@pytest.mark.parametrize("case", ["llama", pytest.param("lfm2", marks=pytest.mark.full)])
def test_answers_in_company(made: Make, case: str) -> None:
    """With drafts, masks and texts between."""
    options: dict[str, Any] = {"max_batch": 4, "speculate": "lookup"}
    whole, small = made(case, **options), made(case, **SMALL, **options)
    prompts = [long_prompt(whole, length) for length in (40, 90, 130, 200)]
    params = SamplingParams(max_tokens=90, ignore_eos=True).resolved({})

    def together(engine: Engine) -> list[list[int]]:
        running = [iter(engine.generate(prompt, params)) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        scored: list[np.ndarray[Any, Any]] = []
        for turn in range(90):
            for own, steps in zip(found, running, strict=True):
                own.append(next(steps).token)
            if turn == 45:
                scored.append(scores(engine, long_prompt(engine, 99)))
        return [*found, [int(x) for x in scored[0].argmax(-1)]]

    assert together(small) == together(whole)
    assert pages_of(small) >= 12


@pytest.mark.parametrize(
    "case", ["llama", "llama_rope_yarn", "llama_rope_dynamic", "phi3_longrope", "gemma3_text"]
)
def test_tables_of_positions_are_one(tmp_path: Path, case: str) -> None:
    """The part behind some positions is that of the whole table."""
    model, _ = open_model(load(case).write_checkpoint(tmp_path / case))
    for rope in filter(None, (model.config.rope, model.config.local_rope)):
        for length in (0, 100):
            whole = rope_table(rope, 9000, length)
            np.testing.assert_array_equal(rope_table(rope, 9000, length, 130), whole[130:])


def test_no_memory_to_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that needs it ends with the error. One beside it goes on, and others that fit are
    given afterwards."""
    with Device.open() as device:
        folder = load("llama").write_checkpoint(tmp_path / "llama")
        engine = build_engine(device, folder, **SMALL | {"first_positions": 128}, max_batch=2)
        short = long_prompt(engine, 30)
        expected = answer(engine, short, 20)
        params = SamplingParams(max_tokens=20, ignore_eos=True).resolved({})

        def full(self: Device, buffer: Buffer, nbytes: int, kept: Any) -> None:
            raise OutOfMemoryError("There is no memory.")

        monkeypatch.setattr(Device, "grow", full)
        beside = engine.generate(short, params)
        tokens = [next(beside).token]
        with pytest.raises(OutOfMemoryError, match="There is no memory"):
            answer(engine, long_prompt(engine, 250), 20)
        assert [*tokens, *(step.token for step in beside)] == expected.token_ids
        with pytest.raises(OutOfMemoryError, match="There is no memory"):
            scores(engine, long_prompt(engine, 300))
        assert answer(engine, short, 20).token_ids == expected.token_ids
