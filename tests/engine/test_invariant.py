"""Invariant engines: an answer's tokens and logits are the same to the last bit in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Answer, EngineOf, answer, build_engine, scores
from marks import others_full
from reference_models import load, load_long
from test_batch import KINDS, SAMPLED, begin, of, prompts_of

import infer.engine.scheduler
from infer.engine.answers import Answer as Running
from infer.engine.engine import Engine
from infer.engine.token_engine import Step
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import FLOATS, PUBLISHED, grouped
from infer.kernels.checks.linear_check import EMULATED
from infer.kernels.compiler.invariant import InvariantTuning
from infer.kernels.gpu.device import Device, DryDevice, Limits
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.ops import functional as ops
from infer.kernels.ops.attention import AttentionMatrixVariant
from infer.kernels.ops.matmul_rows import LEAST_LANES, MOST_ROWS, RowsShape, matmul_rows_variant
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

# How long answers are: at nearly every step one comes or goes.
LENGTHS = [12, 3, 9, 7, 1, 12, 5, 2, 8, 4]
RULES = ["adapter", "gpu"]  # those for the adapter, and those for a GPU, on whatever adapter


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOf]:
    """An empty, invariant engine of a case by these rules with these options."""
    engines: dict[tuple[Any, ...], Engine] = {}
    with Device.open() as own, Device.open() as as_gpu:
        as_gpu.software = False
        of_rules = {"adapter": own, "gpu": as_gpu}

        def build(case: str, rules: str = "adapter", **options: Any) -> Engine:
            key = (case, rules, *sorted(options.items()))
            if key not in engines:
                folder = load(case).write_checkpoint(tmp_path_factory.mktemp(case) / case)
                options = {"invariant": True} | options
                engines[key] = build_engine(of_rules[rules], folder, **options)
            engines[key].forget()
            return engines[key]

        yield build


def requests(case: str) -> list[Callable[[Engine], Running]]:
    """Returns requests of unlike lengths; some prompts begin alike, some are the same."""
    prompts = [*prompts_of(case), *prompts_of(case)[:4]]
    return [partial(begin, ids=ids, steps=n) for ids, n in zip(prompts, LENGTHS, strict=True)]


def each_alone(engine: Engine, asked: Sequence[Callable[[Engine], Running]]) -> list[Answer]:
    answers = []
    for start in asked:
        engine.forget()
        answers.append(of(list(start(engine))))
    return answers


def coming_and_going(engine: Engine, asked: Sequence[Callable[[Engine], Running]]) -> list[Answer]:
    """One more begins after every token, while there are any."""
    running: list[tuple[Running, list[Step]]] = []
    waiting = list(asked)
    while waiting or not all(item.ended for item, _ in running):
        if waiting:
            running.append((waiting.pop(0)(engine), []))
        for item, steps in running:
            steps.extend(step for step in [next(item, None)] if step is not None)
    return [of([*steps, *item]) for item, steps in running]


def differing(found: Sequence[Answer], expected: Sequence[Answer]) -> list[int]:
    """Returns the indices of answers that differ in a token or in a bit of the logits."""
    assert len(found) == len(expected)
    return [
        i
        for i, (one, other) in enumerate(zip(found, expected, strict=True))
        if one.token_ids != other.token_ids or not np.array_equal(one.logits, other.logits)
    ]


@others_full("rules", RULES, ["adapter"])
@others_full("case", KINDS, ["llama", "qwen3_next"])
def test_no_bit_depends_on_the_company(engine_of: EngineOf, case: str, rules: str) -> None:
    """Nor on how many could be served at once, or on how a prompt is cut."""
    asked = requests(case)
    alone = each_alone(engine_of(case, rules), asked)
    assert alone[0].token_ids == load(case).greedy_ids[: LENGTHS[0]].tolist()  # of transformers
    many = engine_of(case, rules, max_batch=8, prefill_chunk=16)
    assert not differing(coming_and_going(many, asked), alone)
    assert not differing(each_alone(many, asked), alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ("gpu", {}),
        ("adapter", {"dtype": "q4", "kv_dtype": "q8"}),
        ("gpu", {"dtype": "q4", "kv_dtype": "f16"}),
        ("gpu", {"dtype": "q8"}),
        ("gpu", {"dtype": "bf16", "kv_dtype": "q8"}),
        ("gpu", {"fuse": False, "dtype": "q4"}),
    ],
)
def test_types_and_options(engine_of: EngineOf, rules: str, options: dict[str, Any]) -> None:
    asked = requests("llama")
    alone = each_alone(engine_of("llama", rules, **options), asked)
    many = engine_of("llama", rules, max_batch=4, **options)
    assert not differing(coming_and_going(many, asked), alone)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("case", ["qwen3_moe", "granitemoehybrid_mamba", "qwen3_next"])
def test_thirty_two_at_once(engine_of: EngineOf, case: str, dtype: str) -> None:
    """Through all sizes of batches, up and down again."""
    ids = load(case).prompt_ids.tolist()
    asked = [partial(begin, ids=ids[i % 20 : 25 + i % 7], steps=35 - i) for i in range(32)]
    engine = engine_of(case, "gpu", dtype=dtype, max_batch=32)
    alone = each_alone(engine, asked[::5])
    engine.forget()
    together = [of(list(item)) for item in [start(engine) for start in asked]]
    assert not differing(together[::5], alone)


@pytest.mark.full
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("case", ["llama", "deepseek_v3", "qwen3_5_text"])
def test_contexts_of_unlike_lengths(engine_of: EngineOf, case: str, rules: str) -> None:
    """Attention makes one split of some contexts and many of others, in one step."""
    ids = load_long(case).prompt_ids.tolist()
    prompts = [ids[:700], ids[:517], ids[300:700], ids[:40]]
    asked = [partial(begin, ids=prompt, steps=6) for prompt in prompts]
    alone = each_alone(engine_of(case, rules, context=1024, prefill_chunk=16), asked)
    many = engine_of(case, rules, context=1024, max_batch=4)
    assert not differing(coming_and_going(many, asked), alone)


@pytest.mark.parametrize(
    ("case", "rules", "options"),
    [
        ("llama", "adapter", {}),
        pytest.param("llama", "gpu", {"kv_dtype": "f16", "dtype": "q4"}, marks=pytest.mark.full),
        pytest.param("mixtral", "gpu", {"kv_dtype": "f16"}, marks=pytest.mark.full),
    ],
)
def test_an_adapter_with_matrices(
    engine_of: EngineOf,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    rules: str,
    options: dict[str, Any],
) -> None:
    """They have more rows than one, and sum in another order: no step of an invariant engine takes
    them, whatever its rows. The others do, as they would here."""
    attention = AttentionMatrixVariant(EMULATED.shape, 32, 16, 16, 16, 16, emulated=True)
    offered: dict[str, Callable[..., Any]] = {
        "linear.matmul_matrix_variant": lambda *call: EMULATED,
        "experts.expert_matrix_variant": lambda tuning, rows, gated: replace(EMULATED, rows=rows),
        "attention.attention_matrix_variant": lambda *call: attention,
    }
    for name, rule in offered.items():
        monkeypatch.setattr(f"infer.kernels.ops.{name}", rule)
    options = {"max_batch": 8, "prefill_chunk": 16, "cache_positions": 18 * PAGE} | options
    usual = engine_of(case, rules, **options, invariant=False)
    assert matrix_kernels(usual) >= {"matmul_matrix", "attention_matrix"}
    engine = engine_of(case, rules, **options)
    asked = requests(case)
    alone = each_alone(engine, asked)
    engine.forget()
    assert not differing(coming_and_going(engine, asked), alone)
    assert not matrix_kernels(engine)


def matrix_kernels(engine: Engine) -> set[str]:
    """Returns the names of the kernels by matrices in all steps that have been lowered."""
    kernels = [kernel for low in engine.runner.steps.lowered.values() for kernel in low.kernels]
    return {kernel.spec.name for kernel in kernels if "MATRIX" in dict(kernel.spec.params)}


def test_without_it_bits_do_differ(engine_of: EngineOf) -> None:
    """The tests of invariance can fail."""
    asked, engine = requests("llama"), engine_of("llama", max_batch=8, invariant=False)
    alone = each_alone(engine, asked)
    engine.forget()
    assert differing(coming_and_going(engine, asked), alone)


@pytest.mark.parametrize("case", ["llama", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_on_the_weakest_device(least_device: Device, case: str, tmp_path: Path) -> None:
    """No subgroups: rows are multiplied one by one."""
    asked = requests(case)[:4]
    with least_device.scope():
        folder = load(case).write_checkpoint(tmp_path / case)
        engine = build_engine(least_device, folder, max_batch=4, invariant=True)
        alone = each_alone(engine, asked)
        engine.forget()
        assert not differing(coming_and_going(engine, asked), alone)


@others_full("case", ["llama", "qwen3_next", "deepseek_v2"], ["llama"])
def test_what_is_cached_is_what_would_be_computed(engine_of: EngineOf, case: str) -> None:
    """A prompt shares a part with an answer that has ended, and one with an answer that runs."""
    ids = load(case).prompt_ids.tolist()
    engine = engine_of(case, max_batch=4)
    first = answer(engine, ids, 12)
    longer = [*ids, *first.token_ids[:9], 5, 6]
    (expected,) = each_alone(engine, [partial(begin, ids=longer, steps=6)])
    engine.forget()
    assert not differing([answer(engine, ids, 12)], [first])
    hit = begin(engine, longer, 6)
    next(hit)
    beside = begin(engine, longer, 6)
    assert not differing([of(list(beside))], [expected])
    assert hit.timings.reused_tokens >= len(ids) - 8
    assert beside.timings.reused_tokens >= len(ids) - 8
    list(hit)


@pytest.mark.parametrize("case", ["llama", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_what_is_computed_anew_is_the_same(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Three answers grow to three pages each, of which there are five."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)  # so that all of them begin
    engine = engine_of(case, max_batch=3, context=3 * PAGE, cache_positions=5 * PAGE)
    ids: list[int] = load(case).prompt_ids.tolist()
    steps = 2 * PAGE - len(ids) + 8
    asked = [partial(begin, ids=ids[i:], steps=steps) for i in range(3)]
    alone = each_alone(engine, asked)
    engine.forget()
    before = engine.scheduler.preemptions
    running = [start(engine) for start in asked]
    assert not differing([of(list(item)) for item in running], alone)
    assert engine.scheduler.preemptions > before


def test_scores_are_of_the_same_logits(engine_of: EngineOf) -> None:
    engine, ids = engine_of("llama", prefill_chunk=16), prompts_of("llama")[0]
    found = answer(engine, ids, 6)
    logits = scores(engine, [*ids, *found.token_ids])
    assert np.array_equal(logits[len(ids) - 1 : -1], found.logits)


def test_sampled_rows(engine_of: EngineOf) -> None:
    """Noise alone is drawn as beside an answer with filters, which goes through other kernels."""
    engine, prompts = engine_of("llama", max_batch=4), prompts_of("llama")
    options: list[dict[str, Any]] = [{"temperature": 0.8}, SAMPLED, {}, {"top_k": 20}]
    asked = [
        partial(begin, ids=ids, steps=12, seed=i, **own)
        for i, (ids, own) in enumerate(zip(prompts, options, strict=False))
    ]
    alone = each_alone(engine, asked)
    engine.forget()
    assert not differing(coming_and_going(engine, asked), alone)
    noise = SamplingParams(temperature=0.8).resolved({})
    chain = engine.runner.chain(noise)
    assert (noise.chain().filtered, chain.filtered) == (False, True)
    assert not engine.runner.chain(SamplingParams().resolved({})).filtered


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "stored", [*((dtype, None) for dtype in (*QUANTIZED, *FLOATS)), *PUBLISHED], ids=str
)
def test_products_of_a_row(
    device: Device, rng: np.random.Generator, stored: tuple[str, Any], gated: bool
) -> None:
    """Products of matmul_rows, whose lanes share rows of x otherwise for each number of rows."""
    if device.subgroup_size < LEAST_LANES:
        pytest.skip("matmul_rows needs subgroups")
    tuning = InvariantTuning(device)
    tuning.software = False
    dtype, grouping = stored
    x = rng.standard_normal((MOST_ROWS, 1300), np.float32)
    weight: Any = rng.standard_normal((22, 1300), np.float32)
    if grouping is not None:
        weight, _ = grouped(rng, (22, 1300), dtype, grouping)
    found = {}
    for rows in (1, 3, 8, 17, 64):
        with device.scope():
            forward = Forward(device, rows, tuning=tuning)
            y = ops.linear(forward.input(x[:rows]), to_gpu(device, weight, dtype))
            if gated:
                gate, up = ops.split(y, 11, 11)
                y = ops.activation(gate, "silu") * up
            lowering, _ = forward.lower(y)
            assert "matmul_rows" in {kernel.spec.name for kernel in lowering.kernels}
            found[rows] = forward.run(y)
    for rows, values in found.items():
        assert np.array_equal(values, found[MOST_ROWS][:rows]), rows


def test_the_order_of_sums_is_the_same_for_any_number_of_rows() -> None:
    """On any device, for any shape; or matmul_rows runs for none of them."""
    for lanes, largest in ((0, 0), (4, 4), (8, 8), (16, 32), (32, 32), (64, 64)):
        for limits in (Limits(), Limits(max_invocations=1024, workgroup_storage=49152)):
            device = DryDevice(limits=limits)
            device.subgroup_size, device.largest_subgroup = lanes, largest
            tuning = InvariantTuning(device)
            sizes = ((64, 16, False), (4096, 14336, True), (14336, 4096, False))
            for dtype, (k, n, gated) in product(("bf16", "q8", "q4", "nf4", "e4m3"), sizes):
                orders = set()
                for rows in range(1, MOST_ROWS + 1):
                    shape = RowsShape(k, n, rows, dtype, gated, splits=not gated)
                    variant = tuning.choose(matmul_rows_variant, shape)
                    assert variant is None or variant.runs(tuning, shape), (lanes, shape)
                    orders.add(variant and (variant.k_lanes, variant.k_teams, variant.splits))
                assert len(orders) == 1, (lanes, shape)
                assert (orders == {None}) == (lanes < LEAST_LANES), (lanes, limits, shape)
