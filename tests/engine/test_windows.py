"""Layers with a window keep their window alone, and answers are those of layers that keep all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Compiled, answer, build_engine, scores, sharing
from reference_models import TOLERANCE, relative_error, write_with_window

import infer
from infer.cli.report import ModelReport
from infer.cli.serve import cache_text
from infer.engine import host_tier
from infer.engine.engine import Engine
from infer.engine.host_tier import HostTier
from infer.engine.options import EngineOptions
from infer.engine.pages import Match
from infer.engine.scheduler import Scheduler, Sequence
from infer.engine.steps import Loaded
from infer.inspection import inspect_model
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import Buffer, Device, DryDevice, Limits
from infer.kernels.state.kv_cache import PAGE
from infer.memory import MemoryCount, cache_positions, kv_bytes_per_position, window_bytes
from infer.models import build_model, open_model
from infer.models.blocks.decoder import Decoder
from infer.models.loading.plan import plan_random
from infer.models.loading.shapes import shape_config
from infer.sampling import SamplingParams

Make = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"context": 1500, "prefill_chunk": 64, "invariant": True}
CASES = "gemma3_text", "mistral_sliding", "gpt_oss", "gemma4"


@pytest.fixture(scope="module")
def made(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes an engine that nothing has used, of a case with positions for its context."""

    def make(case: str, window: int = 100, apart: bool = True, **options: Any) -> Engine:
        """apart: layers with a window have pages of their own, as engines do by themselves."""
        folder = write_with_window(case, tmp_path_factory.mktemp(case) / case, window)
        with pytest.MonkeyPatch.context() as patch:
            if not apart:
                patch.setattr(infer.engine.caches, "window_pages", lambda *_: 0)
            if options.get("speculate") == "draft":
                options["draft"] = folder
            engine = build_engine(own_device, folder, **OPTIONS | options)
        assert (engine.runner.caches.windows is not None) == apart
        return engine

    return make


def text(engine: Engine, seed: int, length: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, engine.vocab_size, length)]


PARAMS = SamplingParams(max_tokens=180, ignore_eos=True).resolved({})


def together(engine: Engine, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Answers of so many tokens, at once, then cancelled."""
    running = [iter(engine.generate(prompt, PARAMS)) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    for turn in range(max(counts)):
        for own, steps, count in zip(found, running, counts, strict=True):
            if turn < count:
                own.append(next(steps).token)
    for steps in running:
        steps.close()
    return found


def reused(engine: Engine, prompt: list[int], count: int = 4) -> int:
    """How many tokens of a prompt were in the cache."""
    of = engine.generate(prompt, replace(PARAMS, max_tokens=count))
    list(of)
    return of.timings.reused_tokens


@pytest.mark.parametrize("case", CASES)
def test_one_sequence(made: Make, case: str) -> None:
    engine, whole = made(case), made(case, apart=False)
    prompt = text(engine, 1, 700)
    np.testing.assert_array_equal(scores(engine, prompt), scores(whole, prompt))
    found, expected = (answer(each, prompt, 300, ignore_eos=True) for each in (engine, whole))
    assert found.token_ids == expected.token_ids
    np.testing.assert_array_equal(found.logits, expected.logits)


@pytest.mark.live
@pytest.mark.parametrize("case", ["gemma3_text", "mistral_sliding", "gpt_oss"])
def test_one_sequence_is_that_of_transformers(made: Make, case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    engine = made(case)
    prompt = text(engine, 2, 700)
    answered = answer(engine, prompt, 100, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_with_window(case, tmp_path / case, 100),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *answered.token_ids]])
        expected = model(ids).logits[0].numpy()
    most = 5 * TOLERANCE  # as the positions are more than those of the stored references
    assert relative_error(scores(engine, prompt), expected[:700]) <= most
    assert relative_error(answered.logits, expected[699:-1]) <= most


LOADS: dict[str, dict[str, Any]] = {
    "alone": {},
    "grows": {"max_batch": 4, "first_positions": 64},
    "drafts": {"max_batch": 4, "speculate": "lookup"},
    "draft model": {"max_batch": 4, "speculate": "draft"},
    "q8": {"kv_dtype": "q8"},
    "host memory": {"max_batch": 2, "cache_positions": 24 * PAGE, "host_cache": 8 << 20},
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("case", CASES)
def test_a_load(made: Make, case: str, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that grow, begin alike, are cancelled, cut short and edited, while there is
    room for hardly any window but those in use."""
    monkeypatch.setattr(infer.engine.windows, "_LEAST_KEPT", 0)
    monkeypatch.setattr(host_tier, "_BATCH", 1)  # a page at a time, whatever it takes
    monkeypatch.setattr(HostTier, "_pays", lambda _, found, known: found.length > known + 8)
    options = LOADS[load]
    engine = made(case, **options)
    expected = made(case, apart=False, **options)
    rng = np.random.default_rng(len(case) + len(load))
    most = engine.context - 40
    talks = [text(engine, 7, 150)]
    remembered = 20 if "host_cache" in options else 6
    for turn in range(12):
        prompts: list[list[int]] = []
        for _ in range(engine.slots):
            talk = list(talks[rng.integers(len(talks))])
            if rng.random() < 0.4:  # an earlier message is edited
                del talk[rng.integers(len(talk)) :]
            talk += text(engine, int(rng.integers(1 << 30)), int(rng.choice([1, 30, 200])))
            prompts.append(talk[:most])
        counts = [int(rng.choice([1, 8, 20])) for _ in prompts]
        found = together(engine, prompts, counts)
        if turn % 4 == 0:
            expected.forget()
        assert found == together(expected, prompts, counts)
        talks += [[*prompt, *own] for prompt, own in zip(prompts, found, strict=True)]
        talks = talks[-remembered:]
    engine.settle()
    stats, windows = engine.stats(), engine.pool.windows
    assert windows is not None
    assert stats.cache.in_use == len(windows._count) == 0
    assert (stats.drafts > 0) == (options.get("speculate") is not None)
    assert stats.host_cache is not None
    assert (stats.host_cache.restored > 0) == ("host_cache" in options)
    assert windows.touched <= windows.pages < engine.options.pages
    assert engine.runner.room == (
        engine.runner.caches.kv.n_pages,
        engine.runner.caches.windows.n_pages,
    )


def test_too_few_pages(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that have to give theirs back, and are computed anew, are the same."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 1)
    options = {"context": 600, "window": 40, "max_batch": 4}
    engine = made("gemma3_text", cache_positions=28 * 64, **options)
    prompts = [text(engine, i, 300 + i) for i in range(4)]
    found = together(engine, prompts, [180] * 4)
    assert engine.stats().preemptions > 0
    assert found == together(made("gemma3_text", apart=False, **options), prompts, [180] * 4)


def forget_windows(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Let every page that a sequence has no more, or never had, be one that is not a number; and
    all of the cache that is not written."""
    windows, cache = engine.pool.windows, engine.runner.caches.windows
    assert windows is not None
    assert cache is not None
    engine.forget()
    for own in (engine.runner.caches.kv, cache):
        for layer in own.layers:
            for buffer in (layer.keys, layer.values):
                nan = np.full(buffer.nbytes // 4, np.nan, np.float32)
                engine.device.write(buffer, nan)
    windows.pages -= 1
    take, give = Scheduler._take_windows, Scheduler._give_windows

    def taken(self: Scheduler, sequence: Sequence, end: int) -> None:
        take(self, sequence, end)
        first = min(sequence.first_window, len(sequence.window_pages))
        sequence.window_pages[:first] = [windows.pages] * first

    def given(self: Scheduler, sequence: Sequence, match: Match) -> None:
        give(self, sequence, match)
        sequence.window_pages[: sequence.first_window] = [windows.pages] * sequence.first_window

    monkeypatch.setattr(Scheduler, "_take_windows", taken)
    monkeypatch.setattr(Scheduler, "_give_windows", given)


@pytest.mark.parametrize(
    "options",
    [
        {"invariant": False, "prefill_chunk": 256, "max_batch": 4},
        {},
        {"invariant": False, "speculate": "lookup", "max_batch": 4},
        {"invariant": False, "fuse": False},
    ],
    ids=["prefill", "invariant", "drafts", "unfused"],
)
@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_before_the_window_is_never_read(
    own_device: Device,
    least_device: Device,
    case: str,
    weak: bool,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By any kernel: what the page table has there is not a number."""
    device = least_device if weak else own_device
    with device.scope():
        engine = build_engine(
            device, write_with_window(case, tmp_path / case, 100), **OPTIONS | options
        )
        prompts = [text(engine, i, 450 + 30 * i) for i in range(engine.slots)]
        prompts[-1] = [*prompts[0][:400], *prompts[-1][:200]]
        expected = together(engine, prompts, [80] * len(prompts))
        of_all = scores(engine, prompts[0])
        forget_windows(monkeypatch, engine)
        assert together(engine, prompts, [80] * len(prompts)) == expected
        np.testing.assert_array_equal(scores(engine, prompts[0]), of_all)
        # And with what is cached.
        talks = [[*p, *own, 1, 2, 3] for p, own in zip(prompts, expected, strict=True)]
        assert np.isfinite(answer(engine, talks[0], 80).logits).all()


def test_no_memory_for_more_windows(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that needs it ends with the error, and one that fits is given."""
    with sharing(compiled), Device.open() as device:
        folder = write_with_window("gemma3_text", tmp_path / "gemma3", 100)
        engine = build_engine(device, folder, **OPTIONS, first_positions=256)
        assert engine.runner.caches.windows is not None
        short = text(engine, 1, 150)
        expected = answer(engine, short, 20)
        grow = Device.grow

        def full(self: Device, buffer: Buffer, nbytes: int, kept: Any) -> None:
            if any(buffer in (own.keys, own.values) for own in engine.runner.caches.windows.layers):
                raise OutOfMemoryError("There is no memory.")
            grow(self, buffer, nbytes, kept)

        monkeypatch.setattr(Device, "grow", full)
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match="There is no memory"):
                answer(engine, text(engine, 2, 700), 20)
            again = answer(engine, short, 20)
            assert again.token_ids == expected.token_ids
            np.testing.assert_array_equal(again.logits, expected.logits)


def test_what_is_found_again(made: Make) -> None:
    """As much as where all layers keep everything, but for what is cut to where a window is."""
    engine = made("gemma3_text")
    prompt = text(engine, 3, 900)
    assert reused(engine, prompt) == 0
    assert reused(engine, prompt) == 899
    assert reused(engine, [*prompt, *text(engine, 4, 300)]) == 900
    assert reused(engine, prompt) == 899  # the window before the answer
    assert reused(engine, [*prompt[:-20], *text(engine, 5, 300)]) == 880
    edited = [*prompt[:700], *text(engine, 6, 200)]
    found = reused(engine, edited)
    assert found in (0, *range(64, 701, 64), 700)
    assert reused(engine, edited) == 899


def test_memory_is_counted() -> None:
    """As engines allocate it, at first and when all pages have been used."""
    config = shape_config("gpt-oss-20b")
    model = build_model(config)
    limits = Limits(max_binding=1 << 32, max_buffer=1 << 32)
    count = MemoryCount(model, plan_random(model.weights(), "bf16"), limits)
    options = EngineOptions(context=131072, max_batch=8)
    need = count.needed(options)
    assert need.total == count.needed(replace(options, first_positions=1)).total
    position = 2 * 2 * 8 * 64  # bytes of keys and values of a layer
    windows = window_bytes(model, options)
    assert need.kv_cache == windows + 12 * position * options.pages * PAGE
    assert windows % (12 * position * PAGE) == 0
    assert 8 * 128 < windows // (12 * position) < 131072 / 8
    assert kv_bytes_per_position(model, "f16") == 24 * position
    device = DryDevice(limits, None)
    weights = {weight.name: weight.allocate(device) for weight in count.plan.weights}
    before = device.allocated
    engine = Engine(device, Loaded(model, weights), options)
    assert engine.runner.caches.windows is not None
    start = device.allocated
    engine.runner.grow((options.pages, engine.runner.caches.window_pages))
    assert device.allocated - before + count._weight_bytes <= need.total
    sizes = [
        b.nbytes
        for cache in (engine.runner.caches.kv, engine.runner.caches.windows)
        for b in cache.buffers
    ]
    tables = 2 * 4 * 8 * 131072 // PAGE
    assert sum(sizes) - tables == need.kv_cache
    assert device.allocated > start


@pytest.mark.parametrize(("shape", "layers"), [("gpt-oss-20b", 12), ("gemma-3-4b", 5)])
def test_a_cache_of_so_much_memory(shape: str, layers: int) -> None:
    """It holds no more than that, and as much as windows leave room for."""
    model = build_model(shape_config(shape))
    options = EngineOptions(context=131072, max_batch=4)
    each = kv_bytes_per_position(model, "f16")
    for nbytes in (100, 1 << 20, 1 << 28, 1 << 30, 5 << 30, 40 << 30):
        positions = cache_positions(nbytes, model, None, options)
        own = replace(options, context=min(positions, 131072), cache_positions=positions)
        windows = window_bytes(model, own)
        wide = kv_bytes_per_position(model, "f16", windows=False if windows else None)
        assert (positions * wide + windows <= nbytes) or positions == 1
        assert positions >= max(1, nbytes // each)
        if nbytes > 1 << 30:
            assert windows
            assert positions > 1.5 * nbytes / each


def test_memory_for_windows_alone() -> None:
    """Where all layers have a window, a cache holds all that answers can have."""
    model = build_model(shape_config("gpt-oss-20b"))
    model = type(model)(replace(model.config, windows=(128,) * 24))
    options = EngineOptions(context=131072, max_batch=4)
    # Those of four answers, and of four prompts whose windows are kept.
    assert cache_positions(4 << 30, model, None, options) == 8 * 131072
    assert cache_positions(1 << 20, model, None, options) == (1 << 20) // (24 * 2048)


def test_prompts_of_one_step(made: Make) -> None:
    """That begin alike, and share pages in the step that computes them."""
    engine, whole = (
        made("gemma3_text", apart=apart, max_batch=4, invariant=False, prefill_chunk=256)
        for apart in (True, False)
    )
    assert engine.runner.kinds.prompts > 1
    begin = text(engine, 1, 90)
    prompts = [[*begin, *text(engine, i, 10 + i)] for i in range(4)]
    params = replace(PARAMS, max_tokens=2)

    def logits(engine: Engine) -> np.ndarray[Any, Any]:
        running = [engine.generate(prompt, params, with_logits=True) for prompt in prompts]
        return np.stack([next(iter(each)).logits for each in running])

    for _ in range(2):
        np.testing.assert_allclose(logits(engine), logits(whole), rtol=1e-4, atol=1e-5)


def test_steps_by_hand(made: Make) -> None:
    """Sequence 0 has pages for its context."""
    engine = made("gemma3_text")
    with engine.alone():
        pages, windows = engine.runner.resident.pages[0], engine.runner.resident.windows[0]
        assert pages == list(range(24))
        assert len(windows) == 24
        count = engine.runner.caches.windows.n_pages
        assert max(windows) < count
        assert all(len({*windows[i : i + 4]}) == 4 for i in range(20))


def fitted(model: Decoder, options: EngineOptions) -> EngineOptions:
    """What loading makes of options, with as much memory as it takes."""
    limits = Limits(max_binding=1 << 32, max_buffer=1 << 32)
    gpu = AdapterInfo(0, "a GPU", "discrete", "Vulkan", "1", frozenset(), {})
    count = MemoryCount(model, plan_random(model.weights(), "bf16"), limits, gpu)
    found = count.fitting(options)
    assert count.needed(found).total == count.needed(options).total
    return found


def test_positions_that_take_no_memory_are_there_by_default() -> None:
    mixed = build_model(shape_config("gpt-oss-20b"))
    narrow = type(mixed)(replace(mixed.config, windows=(128,) * 24))
    wide = type(mixed)(replace(mixed.config, windows=(4096,) * 24))
    options = EngineOptions(context=16384, max_batch=8)
    assert fitted(narrow, options).pages == (8 + 8) * 16384 // PAGE
    assert fitted(narrow, replace(options, max_batch=1)).pages == (1 + 4) * 16384 // PAGE
    own = replace(options, cache_positions=20000)
    # Where others take memory, where windows would take more, and where it is asked for.
    for model, given in ((mixed, options), (wide, options), (narrow, own)):
        assert fitted(model, given) == given


def test_answers_have_room_for_whole_contexts(made: Make, tmp_path: Path) -> None:
    model, _ = open_model(write_with_window("mistral_sliding", tmp_path / "model", 100))
    options = fitted(model, EngineOptions(context=1500, max_batch=2, prefill_chunk=64))
    engine = made("mistral_sliding", max_batch=2, cache_positions=options.cache_positions)
    prompts = [text(engine, seed, 1300) for seed in (1, 2)]
    # Of two such answers at once, one waits without these positions.
    for own, count in ((engine, 2), (made("mistral_sliding", max_batch=2), 1)):
        running = [iter(own.generate(prompt, PARAMS)) for prompt in prompts]
        for _ in range(20):
            next(running[0])
        assert own.stats().running == count
        for steps in running:
            list(steps)
        assert own.stats().preemptions == 0
    assert reused(engine, prompts[0]) == 1299
    cache = engine.stats().cache
    assert (cache.tokens, cache.window) == (-(-6 * 1500 // PAGE) * PAGE, 100)
    assert 0 < cache.window_pages_used <= cache.window_pages < 1500 // PAGE + 18
    assert cache_text(cache) == (
        f"9,024 tokens of all answers; {cache.window_pages * PAGE:,} in layers that see the last "
        "100 of each"
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("mistral_sliding", "for 1,500 tokens (all layers see the last 40 alone, in f16)"),
        ("gemma3_text", "for layers that see the last 40, in f16)"),
    ],
)
def test_memory_of_windows_is_told(tmp_path: Path, case: str, told: str) -> None:
    inspection = inspect_model(str(write_with_window(case, tmp_path / "model", 40)), context=1500)
    assert (inspection.kv_window, inspection.kv_window_bytes > 0) == (40, True)
    assert told in " ".join(ModelReport(inspection).text().split())
