"""The benchmark: that it runs what it says, and that its arithmetic is right."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import places
import pytest
from commands import invoke, refused
from engines import Compiled, sharing
from marks import others_full
from plans import random_weights
from test_llm import report_free

from infer.bench import measure as measure
from infer.bench import run as bench
from infer.bench.options import BenchTests, Subject
from infer.bench.report import (
    BenchReport,
    KernelTime,
    Load,
    Profile,
    Row,
    format_report,
    loads_table,
    profile_table,
    results_table,
)
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.engine.token_engine import Request
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.linear_check import EMULATED
from infer.kernels.errors import InferError, ModelNotFoundError, OutOfMemoryError, RequestError
from infer.kernels.gpu.bandwidth import COPIED, copy, copy_bandwidth
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.profile import profile_passes
from infer.kernels.gpu.record import Copy, run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.kernels.ops.matmul_matrix import MatrixVariant
from infer.models import build_model
from infer.models.loading.config import RawConfig
from infer.models.loading.plan import plan_random
from infer.models.loading.shapes import PUBLISHED, SHAPES, shape_config
from infer.models.loading.weights import Source, WeightSpec
from infer.sampling import SamplingParams

pytestmark = pytest.mark.demo

SCRIPTS = places.ROOT / "scripts"

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# Values of TINY's matrices: q, k, v; o; gate, up; down, of both layers. The head has 64 * 32.
LAYERS = 2 * ((4 + 2 + 2) * 8 * 32 + 32 * 32 + 2 * 48 * 32 + 32 * 48)
# Bytes of its keys and values of a position in f16.
KV_BYTES = 2 * 2 * 2 * 8 * 2

REPORT = BenchReport(
    model="org/Tiny Model",
    random_weights=False,
    architecture="llama",
    dtype="bf16",
    kv_dtype="f16",
    parameters=1_235_814_400,
    weight_bytes=3 * 2**29,
    context=8192,
    adapter="A GPU (x)",
    adapter_kind="discrete",
    backend="Vulkan",
    driver="1.2",
    versions={"infer": "0.1.0", "wgpu": "0.32.0"},
    commit="abc",
    date="2026-01-02T03:04:05+00:00",
    copy_bandwidth=4e12,
    rows=(
        Row("pp512", 512, (0.01, 0.03), 34133.33, 24135.71, flops=10**12, flops_per_second=5e13),
        Row("tg128", 128, (0.1,), 1280.0, 0.0, 1.25e9, 1.6e12, 0.4),
    ),
    ttft_seconds=(0.02, 0.014142),
    sampled_share=0.975,
    host_seconds=0.0005,
    peak_bytes=3 * 2**30,
    load_seconds=1.5,
    dispatches=100,
    submit_seconds=0.0004,
    gpu_seconds=0.00065,
    profiles=(
        Profile(
            "decode",
            1,
            65,
            (
                KernelTime("matmul_vec", 2, 0.0005, 10**9, 10**9),
                KernelTime("embedding", 1, 0.0001, 0, 0),
            ),
            gpu_seconds=0.00065,
            step_seconds=0.001,
            host_seconds=0.0005,
        ),
    ),
)


@pytest.fixture(scope="module")
def device(compiled: Compiled) -> Iterator[Device]:
    with sharing(compiled):
        device = Device.open()
    with device:
        yield device


def make_engine(device: Device, config: dict[str, Any], context: int = 256) -> Engine:
    model = build_model(RawConfig(config))
    weights = random_weights(device, list(model.weights()), "bf16")
    return Engine(device, Loaded(model, weights), EngineOptions(context=context))


@pytest.fixture
def engine(device: Device) -> Iterator[Engine]:
    with device.scope():
        yield make_engine(device, TINY)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The yardstick


@pytest.mark.parametrize("blocks", [1, 3, 70])
def test_copy_copies_every_byte(device: Device, blocks: int) -> None:
    values = np.random.default_rng(blocks).integers(0, 2**32, blocks * COPIED // 4, np.uint32)
    with device.scope():
        source, target = device.upload(values), device.buffer(values.nbytes)
        run(device, [copy(device, source, target)])
        assert np.array_equal(device.read(target, np.uint32), values)


def test_copy_bandwidth_frees_its_buffers(device: Device) -> None:
    before = device.memory_stats()
    assert copy_bandwidth(device, 4 * COPIED, seconds=0.0, least_runs=2) > 0
    after = device.memory_stats()
    assert after.allocated - after.pooled == before.allocated - before.pooled
    assert after.peak >= before.allocated + 8 * COPIED


def test_a_pass_is_timed_by_the_round(device: Device) -> None:
    """A kernel of some µs, many times over in a pass of 50 ms."""
    with device.scope():
        item = copy(device, device.buffer(COPIED), device.buffer(COPIED))
        alone, twice = profile_passes(device, [[item], [item, item]], least_seconds=0.05)
    assert 0 < alone < 0.02
    assert 0 < twice < 0.02


def test_every_pass_begins_with_the_copies_before_it(device: Device) -> None:
    values = np.arange(COPIED // 4, dtype=np.uint32)
    with device.scope():
        saved, zero, source, target = (device.upload(values * i) for i in (1, 0, 0, 0))
        passes = [[copy(device, zero, source)], [copy(device, source, target)]]
        profile_passes(
            device, passes, repeats=2, before=[Copy((saved, 0), (source, 0), saved.nbytes)]
        )
        assert np.array_equal(device.read(target, np.uint32), values)


# Shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the published safetensors files count them
        ("gemma-3-4b", 3_880_263_168),
        ("glm-4.7-flash", 29_943_393_920),  # without the layer that predicts a further token
        ("gpt-oss-20b", 20_914_757_184),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("lfm2-1.2b", 1_170_340_608),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("nemotron-3-nano-30b-a3b", 31_577_937_344 + 23 * 128),  # and what corrects 23 routers
        ("olmo-3-7b", 7_298_011_136),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("smollm2-135m", 134_515_008),
        ("starcoder2-3b", 3_030_371_328),
    ],
)
def test_shapes_have_the_parameters_of_their_models(name: str, parameters: int) -> None:
    model = build_model(shape_config(name))
    assert sum(prod(spec.shape) for spec in model.weights()) == parameters


def test_unknown_shape() -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        shape_config("llama-9")


@others_full("name", SHAPES, ["smollm2-135m"])
def test_random_weights_give_finite_logits(device: Device, name: str) -> None:
    """Logits are finite in models as deep as the real ones, which lets values grow, but narrow."""
    narrow = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "head_dim": 8}
    narrow |= {"vocab_size_per_layer_input": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for key in SHAPES[name].keys() & {"num_experts", "num_local_experts", "n_routed_experts"}:
        heads |= {key: 4, "num_experts_per_tok": 2}
    narrow |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    narrow |= {"block_ff_dim": 64, "block_multiple_of": 32}
    if "kv_lora_rank" in SHAPES[name]:
        heads |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        heads |= {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 8}
        heads |= {"qk_rope_head_dim": 8, "v_head_dim": 12}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    heads |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    params = replace(measure.GREEDY, max_tokens=9)
    with device.scope():
        engine = make_engine(device, SHAPES[name] | narrow | heads)
        steps = list(engine.generate([1, 2, 3], params, with_logits=True))
    assert len(steps) == 9
    logits = np.stack([step.logits for step in steps if step.logits is not None])
    assert np.isfinite(logits).all()
    assert np.ptp(logits, axis=1).min() > 0.1


@others_full("kind", PUBLISHED, ["gptq", "mxfp4", "q4_k"])
def test_random_codes_give_finite_logits(device: Device, kind: str) -> None:
    """Values about as large as those of other random weights, around zero."""
    model = build_model(RawConfig(TINY | {"hidden_size": 256, "intermediate_size": 256}))
    with device.scope():
        weights = random_weights(device, list(model.weights()), "bf16", published=PUBLISHED[kind])
        forward = Forward(device, 64)
        rows = ops.embedding(weights["layers.0.mlp.down_proj"])
        values = forward.run(rows, tokens=range(64))
        assert abs(values.mean()) < 0.01
        assert values.std() * 256**0.5 == pytest.approx(1, rel=0.4)
        engine = Engine(device, Loaded(model, weights), EngineOptions(context=64))
        (step,) = engine.generate(
            [1, 2, 3], replace(measure.GREEDY, max_tokens=1), with_logits=True
        )
    assert step.logits is not None
    assert np.isfinite(step.logits).all()
    assert np.ptp(step.logits) > 0.1


@pytest.mark.parametrize(("kind", "dtype"), [("mlx-4bit", "f32"), ("gptq", "f16")])
def test_random_routers_are_floats(kind: str, dtype: str) -> None:
    """Routers are floats, as `stored` has them, whatever the files have."""
    spec = WeightSpec("layers.0.mlp.router", (Source("gate", (8, 64)),))
    assert plan_random([spec], "bf16", PUBLISHED[kind]).weights[0].stored.dtype == dtype


# The cost of a step


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_token(device: Device, tied: bool) -> None:
    with device.scope():
        engine = make_engine(device, TINY | {"tie_word_embeddings": tied})
        assert measure.weight_bytes_per_token(engine) == 2 * (LAYERS + 64 * 32)
        # Four steps after a prompt of one see 2, 3, 4 and 5 positions.
        assert measure.cache_bytes_per_token(engine.model, "f16", 1, 4) == 3.5 * KV_BYTES
        assert measure.cache_bytes_per_token(engine.model, "f32", 100, 1) == 101 * 2 * KV_BYTES


def test_only_chosen_experts_count(device: Device) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = TINY | experts | {"model_type": "qwen3_moe", "mlp_only_layers": [0]}
    dense, router, expert = 3 * 48 * 32, 6 * 32, 3 * 24 * 32
    layers = LAYERS - dense + router + 2 * expert
    with device.scope():
        engine = make_engine(device, config)
        assert measure.weight_bytes_per_token(engine) == 2 * (layers + 64 * 32)
        attention = 4 * 32 * 2 * (1 + 2 + 3)
        assert measure.prefill_flops(engine.model, 3) == 2 * (3 * layers + 64 * 32) + attention


def test_windows_bound_what_attention_reads() -> None:
    model = build_model(RawConfig(TINY | {"model_type": "mistral", "sliding_window": 3}))
    assert measure.cache_bytes_per_token(model, "f16", 1, 4) == (2 + 3 + 3 + 3) / 4 * KV_BYTES
    assert measure.prefill_flops(model, 5) == 2 * (5 * LAYERS + 64 * 32) + 4 * 32 * 2 * 12


def test_states_are_read_and_written() -> None:
    """The state of the first layer counts: it has two inputs of 32 channels in f32."""
    own = {"full_attn_idxs": [1], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
    model = build_model(RawConfig(TINY | own | {"model_type": "lfm2"}))
    got = measure.cache_bytes_per_token(model, "f16", 100, 1)
    assert got == 101 * KV_BYTES / 2 + 2 * (2 * 32 * 4)


def test_flops_of_a_prefill() -> None:
    model = build_model(RawConfig(TINY))
    assert measure.prefill_flops(model, 5) == 2 * (5 * 15360 + 2048) + 4 * 32 * 2 * (
        1 + 2 + 3 + 4 + 5
    )
    assert measure.decode_flops(model, 5, 3) == 3 * 2 * (15360 + 2048) + 4 * 32 * 2 * (6 + 7 + 8)


# The tests


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, same_kernels: None) -> None:
    monkeypatch.setattr(measure, "_WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(bench, "copy_bandwidth", partial(copy_bandwidth, nbytes=1 << 20, seconds=0))
    monkeypatch.setitem(SHAPES, "tiny", TINY)


@pytest.mark.usefixtures("short")
def test_prefill_computes_what_is_not_cached_every_time(engine: Engine) -> None:
    row = measure.EngineBench(engine, 1e9, 2, lambda *_: None).prefill(20)
    assert (row.test, row.tokens, len(row.seconds)) == ("pp20", 20, 2)
    assert (engine.timings.prefilled_tokens, engine.timings.reused_tokens) == (20, 0)
    speeds = [20 / seconds for seconds in row.seconds]
    assert row.tps == pytest.approx(np.mean(speeds))
    assert row.tps_deviation == pytest.approx(np.std(speeds, ddof=1))
    assert row.flops == measure.prefill_flops(engine.model, 20)
    assert row.flops_per_second == pytest.approx(row.flops / np.mean(row.seconds))
    row = measure.EngineBench(engine, 1e9, 2, lambda *_: None).prefill(20, cached=15)
    assert (row.test, row.tokens, len(row.seconds)) == ("pp20, 15 cached", 20, 2)
    assert (engine.timings.prefilled_tokens, engine.timings.reused_tokens) == (5, 15)
    whole, first = (measure.prefill_flops(engine.model, count) for count in (20, 15))
    assert row.flops == whole - first + 2 * 64 * 32  # the head's


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("depth", "prompt", "test"), [(0, 1, "tg6"), (40, 40, "tg6 @ d40")])
def test_decode_times_only_its_steps(engine: Engine, depth: int, prompt: int, test: str) -> None:
    measured = measure.EngineBench(engine, 1e9, 1, lambda *_: None)
    (row,) = measured.decode(6, depth, measure.GREEDY)
    assert row.test == test
    assert engine.timings.reused_tokens == prompt - 1
    assert engine.timings.decoded_tokens == 6
    nbytes = 2 * (LAYERS + 64 * 32) + (prompt + 3.5) * KV_BYTES
    assert row.bytes_per_token == nbytes
    assert row.tps == pytest.approx(6 / row.seconds[0])
    assert row.bandwidth == pytest.approx(nbytes * row.tps)
    assert row.share == pytest.approx(nbytes * row.tps / 1e9)


def test_sampled_test_uses_every_stage() -> None:
    """All that change what is sampled: not log probabilities, which tell of it, and neither a mask
    nor a least number of tokens, which an answer has that is held to something."""
    stages = vars(measure.SAMPLED.chain()) | {"logprobs": True, "mask": True, "ends": True}
    assert all(stages.values())
    assert not any(vars(measure.GREEDY.chain()).values())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "of",
    [("--shape", "tiny"), pytest.param(("demo",), marks=pytest.mark.full)],
    ids=lambda of: of[-1],
)
def test_many_answers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: tuple[str, ...]
) -> None:
    noise = SamplingParams(temperature=0.8, seed=0).resolved({})  # its kernels are the fewest
    monkeypatch.setattr(measure, "SAMPLED", noise)
    counts = ("--prompt-tokens", 8, "-n", 2, "-r", 1, "--depth", 20, "--batch", "1,2")
    done = invoke("bench", *of, *counts, "--clients", 2, "--profile", "--save", tmp_path)
    assert done.exit_code == 0
    (path,) = tmp_path.iterdir()
    report = BenchReport.from_json(path.read_text(encoding="utf-8"))
    alone, together = report.rows[-2:]
    assert [alone.test, together.test] == ["tg32 x 1 @ d20", "tg32 x 2 @ d20"]
    assert (alone.tokens, together.tokens) == (32, 64)
    assert (alone.sequences, together.sequences) == (1, 2)
    assert together.tps == pytest.approx(64 / together.seconds[0])
    (load,) = report.loads
    assert (load.clients, load.requests, load.tokens) == (2, 2, 4)
    assert done.stdout == format_report(report) + "\n"
    (batch,) = (p for p in report.profiles if p.step == "decode of 2 sequences")
    assert (batch.rows, batch.kv_len) == (2, 20)


def serving(
    device: Device, config: dict[str, Any], max_batch: int, speculate: str = "off"
) -> Engine:
    """speculate: "draft" by a model of the same shape."""
    model = build_model(RawConfig(config))
    weights = random_weights(device, list(model.weights()), "bf16")
    draft = Loaded(model, weights) if speculate == "draft" else None
    options = EngineOptions(
        context=256,
        max_batch=max_batch,
        cache_positions=6 * 256,
        speculate=speculate,
    )
    return Engine(device, Loaded(model, weights), options, draft)


def begun(engine: Engine) -> list[Answer]:
    """All that the engine begins from now on."""
    answers: list[Answer] = []
    begin = engine.answer

    def noting(request: Request) -> Answer:
        answers.append(begin(request))
        return answers[-1]

    engine.answer = noting  # type: ignore[method-assign]
    return answers


STATES = {"model_type": "lfm2", "full_attn_idxs": [1], "conv_L_cache": 3}
STATES |= {"block_auto_adjust_ff_dim": False}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("way", ["lookup", "draft"])
@pytest.mark.parametrize(("accept", "step_tokens"), [(0.0, 1.0), (0.7, 2.533), (1.0, 4.0)])
def test_drafts_are_as_right_as_decreed(
    device: Device, accept: float, step_tokens: float, way: str
) -> None:
    """Three drafted tokens of which each is right with probability p give 1 + p + p² + p³."""
    with device.scope():
        engine = serving(device, TINY, 2, way)
        answers = begun(engine)
        row = measure.EngineBench(engine, 1e9, 2, lambda *_: None).drafts(2, 60, 9, accept, 3)
        assert (row.test, row.tokens) == (f"tg60 + 3 x 2 @ d9, {accept:g} right", 120)
        assert row.step_tokens == pytest.approx(step_tokens, rel=0.15)
        assert not engine.runner.speculation.is_on
        assert not engine.runner.drafter.steps
        drafted = [answer.timings.drafted_tokens for answer in answers]
        assert min(drafted) > 30


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("own", [{}, STATES], ids=["llama", "lfm2"])
def test_a_batch_is_as_deep_as_it_says(device: Device, own: dict[str, Any]) -> None:
    """The first token of each answer that is timed comes after `depth` others and one."""
    with device.scope():
        engine = serving(device, TINY | own, 6)
        answers = begun(engine)
        row = measure.EngineBench(engine, 1e9, 2, lambda *_: None).batch(6, 5, 90)
        assert (row.test, row.tokens, row.sequences) == ("tg5 x 6 @ d90", 30, 6)
        for run in (answers[-12:-6], answers[-6:]):
            assert {len(a.prompt) + a.count for a in run} == {90 + 1 + 5}
            assert {len(a.prompt) for a in run} == set(range(83, 89) if own else [88])
            assert min(a.timings.reused_tokens - len(a.prompt) for a in run) >= -8  # one step
        kv_dtype, model = engine.options.kv_dtype, engine.model
        nbytes = measure.cache_bytes_per_token(model, kv_dtype, 90, 5)
        assert row.bytes_per_token == nbytes + measure.weight_bytes_per_token(engine) / 6
        assert row.flops == 6 * measure.decode_flops(model, 90, 5)
        # Prompts of one token, after which the answers have 3, or 8, 7, 6, 5, 4 and 3.
        row = measure.EngineBench(engine, 1e9, 1, lambda *_: None).batch(6, 5, 3)
        assert row.test == ("tg5 x 6 @ d6" if own else "tg5 x 6 @ d3")


@pytest.mark.usefixtures("short")
def test_a_batch_without_room_is_no_batch(device: Device) -> None:
    with device.scope():
        engine = serving(device, TINY, 2)
        measured = measure.EngineBench(engine, 1e9, 1, lambda *_: None)
        with pytest.raises(RequestError, match="3 answers did not run at once"):
            measured.batch(3, 5, 20)


@pytest.mark.usefixtures("short")
def test_a_load_of_requests(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report agrees with what the engine did."""
    with device.scope():
        engine = serving(device, TINY, 2)
        answers = begun(engine)
        most = 0

        def wait(ready: Callable[[], bool]) -> None:
            nonlocal most
            most = max(most, sum(not (a.ended or a.cancelled) for a in answers))
            Engine.wait(engine, ready)

        monkeypatch.setattr(engine, "wait", wait)
        load = measure.EngineBench(engine, 1e9, 2, lambda *_: None).load(3, 40, 6)
        assert most == 3  # of which one waits for a slot
        assert len(answers) == 3 + 6  # of the warm-up, and
        served = answers[3:]
        assert (load.clients, load.requests, load.tokens) == (3, 6, 36)
        assert [a.count for a in served] == [6] * 6
        assert all(5 <= len(a.prompt) <= 40 for a in served)
        assert len({len(a.prompt) for a in served}) > 1
        assert load.prompt_tokens == sum(len(a.prompt) for a in served)
        assert load.reused_tokens == sum(a.timings.reused_tokens for a in served)
        assert load.tps == 36 / load.seconds
        ends = [a.begun + a.timings.prefill_seconds + a.timings.decode_seconds for a in served]
        assert load.seconds == pytest.approx(max(ends) - served[0].begun, abs=0.05)
        first = [a.timings.prefill_seconds for a in served]
        assert load.ttft_seconds == pytest.approx(np.percentile(first, (50, 99)), abs=0.05)
        assert 0 < load.itl_seconds[0] <= load.itl_seconds[1] < load.seconds


@pytest.mark.usefixtures("short")
def test_end_to_end(tmp_path: Path) -> None:
    counts = ("--prompt-tokens", 20, "-n", 4, "-r", 2, "--depth", 30, "--context", 256)
    counts = (*counts, "--prefix", 0.9)
    done = invoke("bench", "--shape", "tiny", *counts, "--profile", "--save", tmp_path)
    assert done.exit_code == 0
    (path,) = tmp_path.iterdir()
    report = BenchReport.from_json(path.read_text(encoding="utf-8"))
    assert done.stderr.splitlines()[1:7] == [
        "loading tiny",
        "pp20",
        "pp20, 18 cached",
        "tg4, tg4 sampled",
        "tg4 @ d30",
        "host and GPU of a step",
    ]
    assert done.stderr.endswith(f"\nwrote {path}\n")
    assert path.name == report.file_name
    assert path.name.endswith("-tiny-bf16.json")
    assert done.stdout == format_report(report) + "\n"
    tests = ["pp20", "pp20, 18 cached", "tg4", "tg4 sampled", "tg4 @ d30"]
    assert [row.test for row in report.rows] == tests
    assert all(len(row.seconds) == 2 for row in report.rows)
    assert report.random_weights
    assert report.context == 256
    assert report.parameters == LAYERS + 64 * 32 + 5 * 32
    assert report.dtype == "bf16"
    assert 2 * (LAYERS + 64 * 32) < report.weight_bytes < report.peak_bytes
    assert report.dispatches is not None
    assert report.submit_seconds is not None
    assert report.gpu_seconds is not None
    assert 0 < report.submit_seconds < report.host_seconds
    assert report.gpu_seconds > 0
    for row in report.rows[2:]:
        assert row.share is not None
        assert row.bytes_per_token is not None
        assert row.share == pytest.approx(row.tps * row.bytes_per_token / report.copy_bandwidth)
    steps = [profile.step for profile in report.profiles]
    assert steps == ["prefill of pp20", "decode of tg4", "decode of tg4 @ d30", "full sampler"]
    prefill, decode, deep, sampler = report.profiles
    assert sum(kernel.calls for kernel in decode.kernels) == report.dispatches
    assert [p.host_seconds for p in report.profiles] == [None, *[report.host_seconds] * 2, None]
    assert prefill.step_seconds == pytest.approx(report.ttft_seconds[0])
    assert deep.step_seconds == 1 / report.rows[4].tps
    assert sampler.step_seconds is None
    assert min(profile.gpu_seconds for profile in report.profiles) > 0
    assert decode.kv_len == 3
    assert sum(k.nbytes for k in decode.kernels if k.kernel.startswith("matmul")) == 2 * (
        LAYERS + 64 * 32
    )


@pytest.mark.full
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("of", [("--shape", "tiny"), ("demo",)], ids=lambda of: of[-1])
def test_an_invariant_engine(tmp_path: Path, of: tuple[str, ...]) -> None:
    counts = ("--prompt-tokens", 8, "-n", 2, "-r", 1)
    assert invoke("bench", *of, *counts, "--invariant", "--save", tmp_path).exit_code == 0
    (path,) = tmp_path.iterdir()
    report = BenchReport.from_json(path.read_text(encoding="utf-8"))
    assert report.model_and_dtypes == f"{of[-1]} bf16, invariant"
    assert path.name.endswith(f"-{of[-1]}-bf16-invariant.json")


@pytest.mark.usefixtures("short")
def test_measuring_leaves_the_engine_as_good_as_new(engine: Engine) -> None:
    params = replace(measure.GREEDY, max_tokens=5)
    before = [step.token for step in engine.generate([5, 6, 7], params)]
    measured = measure.EngineBench(engine, 1e9, 1, lambda *_: None)
    prefill, (decode, _) = (
        measured.prefill(12),
        measured.decode(4, 0, measure.GREEDY, measure.SAMPLED),
    )
    measured.host_seconds()
    measured.gpu_seconds(decode)
    measured.profiles(prefill, {0: decode})
    assert [step.token for step in engine.generate([5, 6, 7], params)] == before


def split(options: dict[str, Any]) -> tuple[Subject, BenchTests]:
    """Options of a subject and of tests, by their names."""
    own = {each.name for each in fields(Subject)}
    others = {name: value for name, value in options.items() if name not in own}
    return Subject(**{n: v for n, v in options.items() if n in own}), BenchTests(**others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a model or a shape"),
        ({"model": "demo", "shape": "smollm2-135m"}, "either a model or a shape"),
        ({"shape": "smollm2-135m", "adapter": "x"}, "An adapter belongs to a model"),
        ({"model": "demo", "adapter": "/no/such"}, "no folder /no/such. An adapter is"),
        ({"model": "demo", "repeats": 0}, "at least 1"),
        ({"model": "demo", "depths": [100, 0]}, "at least 1"),
        ({"model": "demo", "clients": [4, 0]}, "clients and repeats must be at least 1"),
        ({"model": "demo", "batches": [1, 65]}, "At most 64 answers run at once, not 65"),
        ({"shape": "smollm2-135m", "dtype": "int4"}, "f32, f16 or bf16"),
        ({"model": "/no/such"}, "no folder or file /no/such"),
        ({"model": "demo", "context": 1025}, "1025 .* positions up to 1024"),
        ({"model": "demo", "decode_tokens": 10**9}, "positions up to 1024"),
        ({"model": "demo", "quantize": "q3"}, "quantize must be one of"),
        ({"shape": "smollm2-135m", "accept": 2.0}, "from 0 to 1, not 2.0"),
        ({"shape": "smollm2-135m", "draft_rows": 3}, "how likely they are right"),
        ({"model": "demo", "draft": "demo-draft"}, "say how likely they are to be"),
        ({"shape": "smollm2-135m", "accept": 0.5, "draft": "demo"}, "no shape"),
        ({"shape": "smollm2-135m", "accept": 0.5, "draft_rows": 8}, "From 1 to 7 tokens"),
        ({"shape": "smollm2-135m", "prefix": 1.0}, "between 0 and 1, not 1.0"),
        ({"shape": "smollm2-135m", "prefix": 0.5, "prompt_tokens": 1}, "prompt of one token"),
        ({"shape": "smollm2-135m", "context": -1}, "not -1"),
        ({"shape": "smollm2-135m", "prompt_tokens": 10**6}, "positions up to 8192"),
        ({"shape": "smollm2-135m", "format": "mlx"}, "A format is one of .*mlx-4bit"),
    ],
)
def test_bad_requests(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """All are said before anything is measured."""
    monkeypatch.delattr(bench, "copy_bandwidth")
    with pytest.raises(InferError, match=message):
        bench.run_bench(*split(options))


def test_a_model_that_does_not_fit_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(bench, "copy_bandwidth")
    report_free(monkeypatch, 1 << 20)
    with pytest.raises(OutOfMemoryError, match="bytes"):
        bench.run_bench(Subject(model="demo", context=512), BenchTests())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--context", "256", "--prompt-tokens", "512"), "need 513 positions, and the context"),
        (("--context", "256", "--depth", "300"), "need 302 positions, and the context holds 256"),
        (("--clients", "2", "--context", "512"), "need 641 positions, and the context holds 512"),
        (("--save", "/no/such/folder/x.json"), "no folder /no/such/folder"),
        (("--save", "x" * 300), "cannot be written .*too long"),
        (("demo",), "either a model or a shape"),
        (("--device", "99"), "No adapter matches"),
    ],
)
def test_bad_commands(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    """All are said before anything is measured."""
    monkeypatch.delattr(bench, "copy_bandwidth")
    assert re.search(message, refused("bench", "--shape", "tiny", *flags, code=2))


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run_bench(subject: Subject, tests: BenchTests, **_: Any) -> None:
        seen.update(asdict(subject) | asdict(tests))
        raise RequestError("seen enough")

    monkeypatch.setattr(bench, "run_bench", run_bench)
    flags = ("--device", "1", "--dtype", "f16", "--revision", "v2", "--offline", "--profile")
    sizes = ("--prompt-tokens", 7, "-n", 8, "-r", 9, "--depth", "3,4", "--kv-dtype", "q8")
    sizes += ("--batch", "1,4-7, 64", "--clients", "16", "--accept", "0.7", "--draft-rows", 3)
    assert refused("bench", "org/name", *flags, *sizes, code=2) == "error: seen enough"
    expected = {"model": "org/name", "shape": None, "device": "1", "dtype": "f16", "format": None}
    expected |= {"revision": "v2", "offline": True, "profile": True, "kv_dtype": "q8"}
    expected |= {"prompt_tokens": 7, "decode_tokens": 8, "repeats": 9, "depths": [3, 4]}
    expected |= {"batches": [1, 4, 5, 6, 7, 64], "clients": [16], "accept": 0.7, "draft_rows": 3}
    assert seen.items() >= expected.items()


def test_wrong_usage() -> None:
    assert "not a list of numbers like 4096,16384" in refused(
        "bench", "demo", "--depth", "1,x", code=2
    )
    for counts in ("", "1,", "x", "1-", "-4", "8-4", "1-2-3", "1.5", "1-999999999", "9" * 5000):
        told = refused("bench", "demo", "--batch", counts, code=2)
        assert "is not a list of numbers like 1,8,64 or 1-64" in told
    assert "is not a list of numbers like 1,8,64 or 1-64" in refused(
        "bench", "demo", "--clients", "n", code=2
    )
    assert "neither a file" in refused("bench", "demo", "--save", "none/", code=2)
    assert "No such option: -p" in refused("bench", "demo", "-p", "4", code=2)


# Sizes


class Timed(measure.EngineBench):
    """Prefill at so many seconds a token, and decode at as many; nothing is run."""

    def __init__(self, per_token: float, context: int) -> None:
        own = {"context": context, "vocab_size": 9, "forget": lambda: None}
        runner = SimpleNamespace(drafter=None)
        verification = SimpleNamespace(draft_by=lambda _: None)
        engine: Any = SimpleNamespace(**own, runner=runner, verification=verification)
        super().__init__(engine, 1e9, 1, lambda *_: None)
        self.per_token = per_token

    def _generate(self, ids: Sequence[int], params: SamplingParams) -> tuple[float, float]:
        assert params.max_tokens is not None
        return self.per_token * len(ids), self.per_token * (params.max_tokens - 1)


@pytest.mark.parametrize("per_token", [0.001, 0.02, 0.05, 0.1, 0.5])
def test_a_slow_adapter_gets_sizes_for_a_minute(per_token: float) -> None:
    sizes = Timed(per_token, 4096).sizes(None, None, None, 1)
    runs = sizes.repeats + 1
    assert runs * (sizes.prompt + 2 * sizes.decode) * per_token <= 60
    if per_token == 0.001:
        assert (sizes.prompt, sizes.decode, sizes.repeats) == (512, 128, 5)
    elif per_token == 0.02:  # and no less than there is time for
        assert runs * (sizes.prompt + 2 * sizes.decode) * per_token >= 10


def test_given_sizes_stay_and_the_context_bounds_the_others() -> None:
    sizes = Timed(100.0, 4096).sizes(300, None, 4, 1)
    assert (sizes.prompt, sizes.repeats) == (300, 4)
    sizes = Timed(0.0, 100).sizes(None, None, None, 90)
    assert (sizes.prompt, sizes.decode) == (99, 9)


# Reports


def test_json_holds_everything() -> None:
    values = json.loads(REPORT.to_json())
    assert values["schema"] == 1
    assert values["rows"][0]["seconds"] == [0.01, 0.03]
    assert values["versions"] == {"infer": "0.1.0", "wgpu": "0.32.0"}
    assert BenchReport.from_json(REPORT.to_json()) == REPORT
    before = {name: value for name, value in values.items() if name != "loads"}
    assert BenchReport.from_json(json.dumps(before)) == REPORT
    assert values["webgpu"] == "wgpu-native"
    del before["webgpu"]
    assert BenchReport.from_json(json.dumps(before)) == REPORT
    before["versions"] = {"infer": "0.1.0", "wgpudawn": "0.32.0.4", "Dawn": "20261009"}
    assert BenchReport.from_json(json.dumps(before)).webgpu == "dawn"
    assert REPORT.file_name == "2026-01-02-a-gpu-x-tiny-model-bf16.json"
    exact = replace(REPORT, precision="f32", products="f32")
    assert exact.file_name == "2026-01-02-a-gpu-x-tiny-model-bf16-precision-f32.json"
    assert exact.model_and_dtypes == "org/Tiny Model bf16, precision f32"
    assert "; products in f32" in format_report(exact)
    assert replace(REPORT, webgpu="dawn").file_name.endswith("-bf16-dawn.json")
    with pytest.raises(ValueError, match="schema 1"):
        BenchReport.from_json(json.dumps(values | {"schema": 2}))


def test_results_table() -> None:
    assert results_table(REPORT).splitlines() == [
        "| test  |                   t/s |    GB/s |  share | TFLOP/s |",
        "| ----- | --------------------: | ------: | -----: | ------: |",
        "| pp512 | 34,133.33 ± 24,135.71 |         |        |   50.00 |",
        "| tg128 |       1,280.00 ± 0.00 | 1,600.0 | 40.0 % |         |",
    ]


BATCH = Row("tg32 x 64 @ d128", 2048, (0.5,), 4096.0, 0.5, 1e9, 2.5e12, 0.625, 10**12, 2e12, 64)
LOAD = Load(64, 320, 92_160, 40_960, 12.8, 3200.0, (0.25, 1.5), (0.02, 0.0305), 4608, 0)


def test_results_of_many() -> None:
    report = replace(REPORT, rows=(*REPORT.rows, BATCH), loads=(LOAD,))
    assert BenchReport.from_json(report.to_json()) == report
    assert results_table(report).splitlines()[-1] == (
        "| tg32 x 64 @ d128 |       4,096.00 ± 0.50 | 64.0 | 2,500.0 | 62.5 % |    2.00 |"
    )
    assert loads_table(report).splitlines() == [
        "clients at once; ms to the first token (TTFT) and between tokens (ITL)",
        "",
        "| clients | requests |     t/s | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | hits |",
        "| ------- | -------: | ------: | -------: | -------: | ------: | ------: | ---: |",
        "| 64      |      320 | 3,200.0 |    250.0 |  1,500.0 |    20.0 |    30.5 |  5 % |",
    ]
    assert loads_table(report) in format_report(report)
    narrow = format_report(report, 80).splitlines()
    assert max(len(line) for line in narrow if line.startswith(("| tg", "| 64"))) <= 80


def test_tables_are_no_wider_than_the_terminal() -> None:
    kernels = (KernelTime("matmul_vec K=2048 N=8192 norm gated", 16, 0.0005, 10**9, 10**9),)
    report = replace(REPORT, profiles=(replace(REPORT.profiles[0], kernels=kernels),))
    whole, narrow = format_report(report), format_report(report, 80)
    assert max(len(line) for line in whole.splitlines() if line[:1] == "|") > 100
    table = [line for line in narrow.splitlines() if line[:1] == "|"]
    assert max(map(len, table)) <= 80
    assert all(name in narrow for name in ("tg128", "1,280.00", "40.0 %", "of step", "norm gated"))
    # Columns that cannot be left out stay, however narrow the terminal is.
    assert [line.count("|") for line in results_table(report, 10).splitlines()] == [4] * 4


def test_profile_table() -> None:
    assert profile_table(REPORT.profiles[0], REPORT.copy_bandwidth).splitlines() == [
        "decode: rows 1, positions 65; meanwhile the host takes 500 µs",
        "",
        "| kernel                   | calls | µs each |      µs | of step "
        "|    GB/s |  share | TFLOP/s |",
        "| ------------------------ | ----: | ------: | ------: | ------: "
        "| ------: | -----: | ------: |",
        "| matmul_vec               |     2 |  250.00 |   500.0 |  50.0 % "
        "| 2,000.0 | 50.0 % |    2.00 |",
        "| embedding                |     1 |  100.00 |   100.0 |  10.0 % "
        "|         |        |         |",
        "| all kernels              |     3 |         |   600.0 |  60.0 % "
        "|         |        |         |",
        "| order of kernels, caches |       |         |    50.0 |   5.0 % "
        "|         |        |         |",
        "| step on the GPU          |       |         |   650.0 |  65.0 % "
        "|         |        |         |",
        "| submitting, reading back |       |         |   350.0 |  35.0 % "
        "|         |        |         |",
        "| step                     |       |         | 1,000.0 | 100.0 % "
        "|         |        |         |",
    ]


def test_profile_says_what_a_step_waited_for() -> None:
    def last_rows(profile: Profile) -> list[str]:
        table = profile_table(profile, 1e9).splitlines()
        return [row.split(" | ")[0].strip("| ") for row in table[-3:]]

    profile = REPORT.profiles[0]
    assert last_rows(replace(profile, host_seconds=0.0009))[1] == "waiting for the host"
    assert last_rows(replace(profile, host_seconds=None))[1] == "submitting, reading back"
    assert last_rows(replace(profile, step_seconds=None))[2] == "step on the GPU"


def test_format_report_names_what_and_where() -> None:
    text = format_report(REPORT)
    for part in (
        "A GPU (x) (discrete, Vulkan by wgpu-native), driver 1.2",
        "org/Tiny Model bf16: 1.50 GiB, 1.24 B parameters; context 8192, KV cache f16",
        "2 of each test",
        "2026-01-02T03:04:05+00:00, infer 0.1.0, wgpu 0.32.0 (abc)",
        "4,000.0 GB/s",
        "20.00 ± 14.14 ms (pp512)",
        "97.5 % of greedy",
        "500 µs per token: 400 to record and submit 100 dispatches (4.00 each), 100 to read the id",
        "650 µs per token: hides the host's part",
        "3.00 GiB",
    ):
        assert part in text


def test_kernel_label_tells_shapes_apart() -> None:
    spec = KernelSpec.of("matmul_vec", K=64, N=32, NORM=True, GATED=False, WG=128)
    assert measure.kernel_label(spec) == "matmul_vec K=64 N=32 norm"


def test_the_table_takes_the_newest_report(tmp_path: Path) -> None:
    tables = script("bench_table")
    newer = replace(REPORT, date="2026-01-03T00:00:00+00:00", driver="1.3")
    other = replace(REPORT, adapter="B GPU")
    assert tables.newest([newer, REPORT, other]) == [newer, other]
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n", encoding="utf-8")
    tables.write(document, tables.table([newer, other]))
    lines = document.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert lines[2:7] == [
        "A GPU (x), Vulkan, driver 1.3, wgpu 0.32.0, 2026-01-03; copies 4,000 GB/s",
        "",
        "| model               |     size |  pp512 | TFLOP/s |   tg128 |  GB/s |  share "
        "| sampled |",
        "| ------------------- | -------: | -----: | ------: | ------: | ----: | -----: "
        "| ------: |",
        "| org/Tiny Model bf16 | 1.50 GiB | 34,133 |      50 | 1,280.0 | 1,600 | 40.0 % "
        "|         |",
    ]
    assert sum("tg128" in line for line in lines) == 2
    document.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        tables.write(document, "text")


def test_the_table_of_many(tmp_path: Path) -> None:
    tables = script("bench_table")
    pair = Row("tg32 x 2 @ d128", 64, (0.1,), 640.0, 0.0)
    odd = replace(pair, test="tg32 x 3 @ d128")  # has no column
    deep = replace(pair, test="tg32 x 2 @ d4096", tps=64.0)
    report = replace(REPORT, rows=(*REPORT.rows, pair, odd, BATCH, deep))
    (tmp_path / "a.json").write_text(report.to_json(), encoding="utf-8")
    assert tables.read(tmp_path) == [report]
    assert tables.table([report]) == tables.table([REPORT])  # that of one sequence
    heading, *lines = tables.batches([report]).splitlines()
    assert heading.startswith("A GPU (x), Vulkan, driver 1.2")
    assert lines == [
        "",
        "| model               | depth |  1 |   2 |  4 |  8 | 16 | 32 |    64 |",
        "| ------------------- | ----: | -: | --: | -: | -: | -: | -: | ----: |",
        "| org/Tiny Model bf16 |   128 |    | 640 |    |    |    |    | 4,096 |",
        "| org/Tiny Model bf16 | 4,096 |    |  64 |    |    |    |    |       |",
    ]
    *_, row = tables.batches([replace(report, loads=(LOAD,))]).splitlines()
    assert row == (
        "| org/Tiny Model bf16 |      64 | 3,200 |   250 ms | 1,500 ms | 20.0 ms | 30.5 ms |"
    )


# The sweep


def sweep(*arguments: str, shape: str = "tiny") -> int:
    code: int = script("tune").main(["--shape", shape, "--repeats", "1", *arguments])
    return code


@pytest.mark.usefixtures("short")
def test_sweep_times_every_variant_on_every_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    grid = ["--workgroup", "32", "--team", "32", "--outputs", "1,2", "--unroll", "1"]
    assert sweep(*grid, "--depth", "20", "--json", str(path)) == 0
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    nbytes = {  # of the weights: q, k and v, and the head; o; gate and up; down
        "matmul_vec K=32 N=64 norm": 2 * 64 * 32,
        "matmul_vec K=32 N=32 residual": 2 * 32 * 32,
        "matmul_vec K=32 N=48 norm gated": 2 * 96 * 32,
        "matmul_vec K=48 N=32 residual": 2 * 48 * 32,
    }
    labels = {result["kernel"] for result in results}
    assert labels == nbytes.keys()
    for label in labels:
        same = [result for result in results if result["kernel"] == label]
        assert {1, 2} <= {result["variant"]["outputs"] for result in same}  # and the rule's choice
        assert sum(result["chosen"] for result in same) == 1
        assert min(result["seconds"] for result in same) > 0
        assert {result["kv_len"] for result in same} == {21}
        assert {result["nbytes"] for result in same} == {nbytes[label]}
    out = capsys.readouterr().out
    assert all(f"{label}: 21 positions" in out for label in labels)


@pytest.mark.full
@pytest.mark.usefixtures("short")
def test_sweep_of_attention_and_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    splits = ["--workgroup", "64", "--heads", "1", "--batch", "2", "--splits", "4"]
    splits += ["--min-split", "32", "--max-split", "256"]
    assert sweep("--kernel", "attention", *splits, "--depth", "20,100") == 0
    out = capsys.readouterr().out
    assert "101 positions" in out
    assert "21 positions" in out
    tiles = ["--m-tile", "4", "--n-tile", "4", "--m-size", "16", "--n-size", "16"]
    tiles += ["--splits", "1,2", "--only", "K=48"]
    assert sweep("--kernel", "matmul", *tiles) == 0
    assert "matmul K=48 N=32: 512 positions, 5 variants" in capsys.readouterr().out
    lanes = ["--m-tile", "2,4", "--n-tile", "2", "--k-lanes", "4", "--n-teams", "2"]
    lanes += ["--k-teams", "1", "--splits", "1", "--staged", "0", "--only", "K=48"]
    assert sweep("--kernel", "matmul_rows", "--step-rows", "4", *lanes) == 0
    assert "matmul_rows K=48 N=32: 4 positions, 3 variants" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_sweep_of_matrices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Emulated ones, which stand for an adapter's."""

    def emulated(tuning: Tuning, *call: Any) -> MatrixVariant:
        return EMULATED

    tune, path = script("tune"), tmp_path / "sweep.json"
    monkeypatch.setattr("infer.kernels.ops.linear.matmul_matrix_variant", emulated)
    monkeypatch.setitem(tune.RULES, "matmul_matrix", emulated)
    tiles = ["--rows", "16,48", "--columns", "32,64", "--sub-rows", "16", "--sub-columns", "16"]
    tiles += ["--tile-depth", "32", "--splits", "1,2", "--ahead", "2"]
    tiles += ["--only", "K=48"]
    sizes = ["--step-rows", "16", "--repeats", "1", "--json", str(path)]
    assert tune.main(["--shape", "tiny", "--kernel", "matmul_matrix", *tiles, *sizes]) == 0
    assert "matmul_matrix K=48 N=32: 16 positions, 4 variants" in capsys.readouterr().out
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert {result["variant"]["rows"] for result in results} == {16}
    assert [result["variant"]["columns"] for result in results if result["chosen"]] == [32]


@pytest.mark.full
@pytest.mark.usefixtures("short")
def test_sweep_goes_on_after_a_variant_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = script("tune")
    monkeypatch.setattr(tune, "valid", lambda *arguments: True)
    tiles = ["--m-tile", "0,8", "--n-tile", "4", "--double", "1", "--m-size", "16"]
    tiles += ["--n-size", "16", "--splits", "1", "--only", "K=48", "--repeats", "1"]
    assert tune.main(["--shape", "tiny", "--kernel", "matmul", *tiles]) == 0
    out = capsys.readouterr().out
    assert any("m_tile=0" in line and "does not compile" in line for line in out.splitlines())
    assert "K=48 N=32: 512 positions, 2 variants" in out


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--splits", "4"], "VecVariant has no splits"),
        (["--only", "K=5"], "No shape matches --only"),
        (["--model", "demo"], "either a model or a shape"),
    ],
)
def test_bad_sweeps(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*arguments) == 1
    assert message in capsys.readouterr().err
