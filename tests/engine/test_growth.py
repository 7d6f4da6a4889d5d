"""A KV cache that grows as it is used gives the answers of one that has all of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import answer, build_engine, open_model, scores
from reference_models import load, relative_error

import infer
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.adapters import AdapterInfo, MemoryInfo
from infer.kernels.gpu.device import Buffer, Device, Limits
from infer.memory import MemoryCount, checked_context, default_context, kv_bytes_per_position
from infer.models import build_model
from infer.models.blocks.rope import rope_table
from infer.models.loading.plan import plan_random
from infer.models.loading.shapes import shape_config
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
    layer = next(iter(engine.runner.caches.kv.layers))
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
    assert pages_of(small) == small.runner.caches.kv.n_pages
    assert 6 <= small.runner.caches.kv.n_pages <= small.options.pages
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
        cache = sum(sum(layer.slot_bytes) * 2 for layer in engine.runner.caches.kv.layers)
        table = engine.runner.caches.rope.table.nbytes // engine.runner.caches.positions
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


@pytest.mark.parametrize("label", ["rope table", "keys of layer 0", "values of layer 1"])
def test_it_grows_once_there_is_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """Whichever buffer had no room before."""
    with Device.open() as device:
        folder = load("llama").write_checkpoint(tmp_path / "llama")
        small, large = (
            build_engine(device, folder, **SMALL | {"first_positions": n}) for n in (128, 512)
        )
        prompt = long_prompt(small, 300)
        grow = Device.grow

        def full(self: Device, buffer: Buffer, nbytes: int, kept: Any) -> None:
            if buffer.label == label:
                raise OutOfMemoryError("There is no memory.")
            grow(self, buffer, nbytes, kept)

        with monkeypatch.context() as patch:
            patch.setattr(Device, "grow", full)
            with pytest.raises(OutOfMemoryError, match="There is no memory"):
                answer(small, prompt, 20)
        found, expected = answer(small, prompt, 20), answer(large, prompt, 20)
        assert found.token_ids == expected.token_ids
        assert relative_error(found.logits, expected.logits) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "features", "own", "expected"),
    [
        ("discrete", {"subgroups"}, 262144, 131072),
        ("integrated", {"subgroups"}, 40960, 40960),
        ("discrete", set(), 262144, 8192),
        ("software", {"subgroups"}, 262144, 8192),
    ],
)
def test_the_context_that_nobody_asked_for(
    kind: str, features: set[str], own: int, expected: int
) -> None:
    model = build_model(shape_config("llama-3.2-1b"))
    model = type(model)(replace(model.config, max_position_embeddings=own))
    gpu = AdapterInfo(0, "a GPU", kind, "Vulkan", "", frozenset(features), {})
    assert default_context(model, gpu) == expected
    assert checked_context(model, "it", None, gpu, most=4000) == 4000


def test_a_context_gets_shorter_before_answers_get_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to 8,192 positions; what is counted is the cache with all of its memory."""
    model = build_model(shape_config("llama-3.2-1b"))
    gpu = AdapterInfo(0, "a GPU", "discrete", "Vulkan", "", frozenset({"subgroups"}), {})
    limits = Limits(max_binding=1 << 32, max_buffer=1 << 32)
    count = MemoryCount(model, plan_random(model.weights(), "bf16"), limits, gpu)
    asked = EngineOptions(context=131072, max_batch=8)
    need = {context: count.needed(replace(asked, context=context)) for context in (8192, 32768)}
    each = kv_bytes_per_position(model, "f16")
    assert need[32768].kv_cache - need[8192].kv_cache == (32768 - 8192) * each
    assert need[8192].total == count.needed(replace(asked, context=8192, first_positions=1)).total
    for free, context, most in (
        (need[32768].total, 32768, 8),
        (need[32768].total - 1, 16384, 8),
        (need[8192].total, 8192, 8),
        (need[8192].total - 1, 8192, 1),
    ):
        monkeypatch.setattr(infer.memory, "memory_info", lambda _, n=free: MemoryInfo(1 << 40, n))
        found = count.fitting(asked, may_shrink=("context", "max_batch"))
        assert (found.context, found.max_batch) == (context, most)
