"""Layers that keep a state: their kernels against float64, and what an engine reuses of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LEAST, OpenDevice
from engines import Answer, answer, build_engine, scores
from numpy.typing import NDArray
from reference_models import load, relative_error
from test_kernels import (
    EPS,
    INT8_LIMIT,
    LIMIT,
    SETTINGS,
    Case,
    Factors,
    covering,
    prepared,
    settings_of,
)

from infer.engine.engine import Engine
from infer.kernels.checks import (
    elementwise_check,
    functions,
    linear_check,
    norm_check,
    recurrent_check,
)
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.bench import Bench
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import exact_weight
from infer.kernels.checks.reference import nmse
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.kernels.ops.matmul_rows import few_rows
from infer.kernels.ops.recurrent import (
    DeltaVariant,
    ScanVariant,
    delta_rule_variant,
    ssm_scan_variant,
)
from infer.kernels.state.layer_state import LayerState
from infer.sampling import SamplingParams

TOLERANCE = 1e-5
STEPS = 8
LAST = 8  # tokens of a prompt that come after the state was saved

# Kernels

ROWS: Factors = SETTINGS | {
    "rows": (1, 2, 17, 40),
    "goes_on": (False, True),
}


@covering(
    ROWS | {"shape": ((1, 2), (64, 3), (67, 4), (130, 16)), "form": ("gated", "silu", "bias")}
)
def test_short_conv(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        rows, (channels, taps), form = case["rows"], case["shape"], case["form"]
        x = rng.standard_normal((rows, channels * (3 if form == "gated" else 1)), np.float32)
        weight, bias = rng.standard_normal((channels, taps)), rng.standard_normal(channels)
        state = rng.standard_normal((taps - 1, channels)) if case["goes_on"] else None
        y, left = functions.short_conv(
            open_device(settings_of(case)),
            x,
            weight,
            bias=bias if form == "bias" else None,
            gated=form == "gated",
            activation="silu" if form == "silu" else "none",
            state=state,
        )
        before, after, value = (
            np.split(x.astype(np.float64), 3, 1) if form == "gated" else (1, 1, x)
        )
        expected, inputs = recurrent_check.short_conv(
            before * value, weight, bias if form == "bias" else None, state
        )
        expected = elementwise_check.silu(expected) if form == "silu" else expected * after
        assert nmse(y, expected) <= LIMIT, case
        assert nmse(left, inputs) <= LIMIT, case


def delta_rule_error(
    device: Device, rng: np.random.Generator, case: Case, tuning: Tuning | None = None
) -> float:
    """The larger error of what comes out and of what is left."""
    rows, (key_heads, heads), (key_dim, value_dim) = case["rows"], case["heads"], case["dims"]
    q, k = rng.standard_normal((2, rows, key_heads, key_dim), np.float32)
    v = rng.standard_normal((rows, heads, value_dim), np.float32)
    gates = 5 * rng.standard_normal((rows, 2 * heads), np.float32)
    a_log, dt_bias = rng.uniform(-4, 2, heads), rng.standard_normal(heads)
    state = rng.standard_normal((heads, key_dim, value_dim)) if case["goes_on"] else None
    inputs = q, k, v, gates, a_log.astype(np.float32), dt_bias.astype(np.float32)
    results = functions.delta_rule(device, *inputs, state=state, tuning=tuning or Tuning(device))
    return max(map(nmse, results, recurrent_check.delta_rule(*inputs, state)))


@covering(
    ROWS | {"heads": ((1, 1), (2, 6), (3, 3)), "dims": ((4, 4), (40, 36), (128, 40))},
    rows=(1, 2, 17),
)
def test_delta_rule(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        assert delta_rule_error(open_device(settings_of(case)), rng, case) <= LIMIT, case


def ssm_scan_error(
    device: Device, rng: np.random.Generator, case: Case, tuning: Tuning | None = None
) -> float:
    """The same."""
    rows, (groups, heads), (state_dim, head_dim) = case["rows"], case["heads"], case["dims"]
    x, z = rng.standard_normal((2, rows, heads, head_dim), np.float32)
    b, c = rng.standard_normal((2, rows, groups, state_dim), np.float32)
    dt = 5 * rng.standard_normal((rows, heads), np.float32)
    own = rng.uniform(-4, 2, (3, heads)).astype(np.float32)
    state = rng.standard_normal((heads, state_dim, head_dim)) if case["goes_on"] else None
    inputs, options = (x, b, c, 20 * z, dt, own), {"dt_limit": case["dt_limit"], "state": state}
    results = functions.ssm_scan(device, *inputs, **options, tuning=tuning or Tuning(device))
    return max(map(nmse, results, recurrent_check.ssm_scan(*inputs, **options)))


@covering(
    ROWS
    | {"heads": ((1, 1), (2, 6), (3, 3)), "dims": ((4, 4), (40, 36), (128, 64), (256, 40))}
    | {"dt_limit": ((0.0, np.inf), (0.5, 1.5))},
    rows=(1, 2, 17),
    dims=((4, 4), (40, 36), (128, 64)),
)
def test_ssm_scan(open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    for case in cases:
        assert ssm_scan_error(open_device(settings_of(case)), rng, case) <= LIMIT, case


def test_small_steps_of_time_are_exact(device: Device, rng: np.random.Generator) -> None:
    """softplus(dt) is nearly exp(dt) then, which 1 + exp(dt) would have lost."""
    x, z = rng.standard_normal((2, 1, 2, 8), np.float32)
    b, c = rng.standard_normal((2, 1, 1, 4), np.float32)
    for dt in (-4, -5, -9, -14, -30):
        inputs = x, b, c, z, np.full((1, 2), dt, np.float32), np.zeros((3, 2), np.float32)
        results = functions.ssm_scan(device, *inputs)
        assert max(map(nmse, results, recurrent_check.ssm_scan(*inputs))) <= LIMIT, dt


@pytest.mark.parametrize("settings", [Settings(), Settings(storage_buffers=8), LEAST])
@pytest.mark.parametrize("head_dim", [48, 24])  # halves of blocks, or not
@pytest.mark.parametrize(("dtype", "rows"), [("q8", 1), ("q8", 3), ("bf16", 1), ("bf16", 3)])
def test_ssm_scan_before_a_norm_and_a_projection(
    open_device: OpenDevice,
    rng: np.random.Generator,
    dtype: str,
    rows: int,
    head_dim: int,
    settings: Settings,
) -> None:
    x, z = rng.standard_normal((2, rows, 4, head_dim), np.float32)
    b, c = rng.standard_normal((2, rows, 1, 24), np.float32)
    dt, own = rng.standard_normal((rows, 4), np.float32), rng.uniform(-4, 2, (3, 4))
    inputs = x, b, c, z, dt, own.astype(np.float32)
    norm = rng.standard_normal(4 * head_dim, np.float32)
    weight = exact_weight(rng, 40, 4 * head_dim, dtype)
    device = open_device(settings)
    y, _ = functions.ssm_scan(device, *inputs, norm=(norm, EPS), projection=weight, dtype=dtype)
    values = recurrent_check.ssm_scan(*inputs)[0].reshape(rows, -1)
    scale = 1 / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + EPS)
    whole = few_rows(Tuning(device), rows)  # blocks have one scale
    expected = scale * linear_check.matmul(prepared(values * norm, dtype, whole), weight)
    assert nmse(y, expected) <= LIMIT


DRAFTED = {
    "short_conv": lambda bench, heads, dims: recurrent_check.drafted_short_conv(
        bench, channels=dims[0] + heads[1], taps=1 + heads[1], gated=heads[0] > 1
    ),
    "delta_rule": recurrent_check.drafted_delta_rule,
    "ssm_scan": recurrent_check.drafted_ssm_scan,
}


@covering(
    SETTINGS
    | {
        "kernel": tuple(DRAFTED),
        "heads": ((1, 1), (2, 6), (3, 3)),
        "dims": ((4, 4), (40, 36), (128, 64)),
    }
)
def test_drafted_rows(open_device: OpenDevice, cases: Iterable[Case]) -> None:
    """Some of the drafted rows are right, and go into the state with the next step."""
    for case in cases:
        device = open_device(settings_of(case))
        with device.scope():
            outcome = DRAFTED[case["kernel"]](Bench(device), case["heads"], case["dims"])
        assert nmse(*outcome) <= LIMIT, case


class Forced(Tuning):
    """Always the same variant of scans."""

    def __init__(self, device: Device, variant: DeltaVariant) -> None:
        super().__init__(device)
        sizes = variant.rows, variant.unroll, variant.columns, variant.split, variant.tile
        self.instead = {
            delta_rule_variant: lambda *call: variant,
            ssm_scan_variant: lambda *call: ScanVariant(*sizes),
        }


VARIANTS = [
    DeltaVariant(4, 2, 16, 4, 4, 2, subgroups=True),
    DeltaVariant(2, 2, 8, 8, 2, 16, subgroups=False),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_scans(device: Device, rng: np.random.Generator, variant: DeltaVariant) -> None:
    """More than one block of rows, and a part of one."""
    case = {"rows": 19, "goes_on": True, "heads": (1, 2), "dims": (32, 20), "dt_limit": (0, np.inf)}
    assert delta_rule_error(device, rng, case, Forced(device, variant)) <= LIMIT
    assert ssm_scan_error(device, rng, case, Forced(device, variant)) <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["delta_rule", "ssm_scan"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_scans_with_drafts(device: Device, variant: DeltaVariant, kernel: str) -> None:
    with device.scope():
        bench = Bench(device, tuning=Forced(device, variant))
        assert nmse(*DRAFTED[kernel](bench, (1, 2), (32, 20))) <= LIMIT


@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 331), (3, 5, 24), (9, 4, 128)])
def test_gated_rmsnorm(
    least_device: Device, rng: np.random.Generator, rows: int, heads: int, width: int
) -> None:
    x, gate = rng.standard_normal((2, rows, heads * width), np.float32)
    weight = rng.standard_normal(width, np.float32)
    y = functions.rmsnorm(least_device, x, weight, EPS, gate=20 * gate)
    assert nmse(y, norm_check.rmsnorm(x, weight, EPS) * elementwise_check.silu(20 * gate)) <= LIMIT


@pytest.mark.parametrize("settings", [Settings(), Settings(subgroups=False), LEAST])
@pytest.mark.parametrize(("heads", "width"), [(3, 128), (2, 48), (4, 24)])
def test_gated_rmsnorm_that_goes_out_as_int8(
    open_device: OpenDevice, rng: np.random.Generator, heads: int, width: int, settings: Settings
) -> None:
    device = open_device(settings)
    x, gate = rng.standard_normal((2, 1, heads * width), np.float32)
    weight, matrix = rng.standard_normal(width), rng.standard_normal((40, heads * width))
    results = []
    with device.scope():
        for fuse in (True, False):
            forward = Forward(device, 1, fuse=fuse)
            own = to_gpu(device, weight)
            y = ops.rmsnorm(forward.input(x), own, EPS, gate=forward.input(gate))
            y = ops.linear(y, to_gpu(device, matrix, "q8"))
            *kernels, product = [kernel.spec.name for kernel in forward.lower(y)[0].kernels]
            whole_halves = fuse and width % 16 == 0 and device.subgroup_size >= 8
            assert kernels == ["rmsnorm"] + ["quantize"] * (not whole_halves)
            assert product in ("matmul_vec", "matmul_lanes")
            results.append(forward.run(y))
    assert nmse(*results) <= INT8_LIMIT


def test_a_gate_for_every_value(device: Device, rng: np.random.Generator) -> None:
    x, gate = rng.standard_normal((2, 9, 67), np.float32)
    y = functions.sigmoid_gate(device, x, gate)
    assert nmse(y, x / (1 + np.exp(-gate.astype(np.float64)))) <= LIMIT


# States that an engine reuses. test_engine.py compares the ways of running these models.


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next", "granitemoehybrid_mamba"])
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shared_engine(case: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Device.open() as device:
        folder = load(case).write_checkpoint(tmp_path_factory.mktemp(case) / case)
        yield build_engine(device, folder)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """With nothing in the cache."""
    shared_engine.forget()
    return shared_engine


@pytest.fixture
def prompt_ids(case: str) -> list[int]:
    ids: list[int] = load(case).prompt_ids.tolist()
    return ids


def fresh(engine: Engine, prompt_ids: list[int]) -> Answer:
    """The answer of an engine whose cache is empty."""
    engine.forget()
    return answer(engine, prompt_ids, STEPS)


def assert_same(actual: Answer, expected: Answer) -> None:
    assert actual.token_ids == expected.token_ids
    assert relative_error(actual.logits, expected.logits) <= TOLERANCE


def layer_states(engine: Engine) -> list[LayerState]:
    return [cache for cache in engine.runner.caches.layers if isinstance(cache, LayerState)]


def states_of(engine: Engine) -> NDArray[np.float32]:
    buffers = [buffer for state in layer_states(engine) for buffer in state.buffers]
    return np.concatenate([engine.device.read(buffer, np.float32) for buffer in buffers])


@pytest.mark.full
@pytest.mark.parametrize("shared", [0, 1, 36, 37, 40, 45])
def test_a_state_goes_back_to_where_it_was_saved(
    engine: Engine, prompt_ids: list[int], shared: int
) -> None:
    """A prompt that differs before that starts anew."""
    other_ids = [*prompt_ids[:shared], *(i - 1 for i in prompt_ids[shared:])]
    expected, other = fresh(engine, prompt_ids), fresh(engine, other_ids)
    engine.forget()
    assert_same(answer(engine, prompt_ids, STEPS), expected)
    saved = len(prompt_ids) - LAST
    assert_same(answer(engine, other_ids, STEPS), other)
    assert engine.timings.reused_tokens == (saved if shared >= saved else 0)


def test_a_chat_goes_on_from_its_own_answer(engine: Engine, prompt_ids: list[int]) -> None:
    turn_ids = [*prompt_ids, *answer(engine, prompt_ids, 9).token_ids, 5, 6, 7]
    second = answer(engine, turn_ids, STEPS)
    assert engine.timings.reused_tokens == len(prompt_ids) + 8
    assert_same(second, fresh(engine, turn_ids))


@pytest.mark.parametrize("left", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 6))])
def test_what_was_submitted_ahead_is_in_the_state(
    engine: Engine, prompt_ids: list[int], left: int
) -> None:
    """The reader went away, and the next prompt goes on from what was generated for nobody."""
    expected = answer(engine, prompt_ids, STEPS).token_ids
    engine.forget()
    steps = engine.generate(prompt_ids, SamplingParams(max_tokens=STEPS).resolved({}))
    for _ in range(left):
        next(steps)
    steps.close()
    turn_ids = [*prompt_ids, *expected[: left + 1], 5]
    second = answer(engine, turn_ids, STEPS)
    assert engine.timings.reused_tokens == len(prompt_ids) + left
    assert_same(second, fresh(engine, turn_ids))


def test_a_row_that_has_stopped_changes_no_state(engine: Engine, prompt_ids: list[int]) -> None:
    stop = answer(engine, prompt_ids, 1).token_ids[0]
    before = states_of(engine)
    engine.forget()
    steps = engine.generate(
        prompt_ids, SamplingParams(max_tokens=STEPS).resolved({}), stop_ids=[stop]
    )
    assert [step.token for step in steps] == [stop]
    assert relative_error(states_of(engine), before) <= TOLERANCE
    longer_ids = [*prompt_ids, stop, 5]
    second = answer(engine, longer_ids, STEPS)
    assert engine.timings.reused_tokens == len(prompt_ids)
    assert_same(second, fresh(engine, longer_ids))


@pytest.mark.parametrize(
    ("count", "before"),
    [
        *((1, True), (2, False), (3, True), (5, False)),
        *(
            pytest.param(n, before, marks=pytest.mark.full)
            for n, before in ((1, False), (2, True), (3, False), (5, True))
        ),
    ],
)
@pytest.mark.parametrize("shared", [20, pytest.param(45, marks=pytest.mark.full)])
def test_an_interrupt_leaves_no_wrong_state(
    engine: Engine,
    prompt_ids: list[int],
    shared: int,
    count: int,
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever submission it comes in, of those that go back to a state, prefill, save, prefill
    and decode: nothing goes on from a state that nobody knows."""
    next_ids = [*prompt_ids[:shared], 5, 6, 7]
    expected = fresh(engine, next_ids)
    answer(engine, prompt_ids[:20], 2)
    submit, calls = engine.runner.queue.submit, iter(range(count))

    def interrupted(*args: Any) -> Any:
        last = next(calls) == count - 1
        if last and before:
            raise KeyboardInterrupt
        submission = submit(*args)
        if last:
            raise KeyboardInterrupt
        return submission

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.queue, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(engine, prompt_ids, STEPS)
    assert_same(answer(engine, next_ids, STEPS), expected)


def test_scores_start_anew(engine: Engine, case: str, prompt_ids: list[int]) -> None:
    """And leave what others have in the cache, and nothing else."""
    expected = answer(engine, prompt_ids, STEPS)
    cached = engine.pool.stats.cached
    next(engine.logits(prompt_ids))
    assert relative_error(scores(engine, prompt_ids), load(case).logits) <= TOLERANCE
    assert_same(answer(engine, prompt_ids, STEPS), expected)
    assert engine.timings.reused_tokens > 0
    assert relative_error(scores(engine, [9, *prompt_ids])[0], load(case).logits[0]) > TOLERANCE
    assert engine.pool.stats.cached == cached


def test_a_state_costs_the_same_in_any_context(device: Device, tmp_path: Path) -> None:
    """Only keys and values grow with it, and only of the layers that have them."""
    folder = load("lfm2").write_checkpoint(tmp_path / "lfm2")
    with device.scope():
        short, long = (build_engine(device, folder, context=n) for n in (256, 512))
        sizes = [[b.nbytes for s in layer_states(e) for b in s.buffers] for e in (short, long)]
        assert sizes[0] == sizes[1] == 2 * [4 * 2 * 64]
        assert len(long.runner.caches.kv.layers) == 1
