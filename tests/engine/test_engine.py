"""The decode loop: the same answers on every path, and what a token costs in calls to WebGPU."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from engines import Answer, EngineOf, answer, build_engine, scores
from numpy.typing import NDArray
from reference_models import DATA, load, relative_error
from wgpu.backends.wgpu_native import ffi, lib

from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.pace import Pace
from infer.engine.prompts import Prompt
from infer.engine.recordings import Recipe
from infer.engine.steps import Loaded
from infer.engine.token_engine import Request
from infer.kernels.errors import DeviceError, ModelError, OutOfMemoryError, RequestError
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.native import library, wgpu_native
from infer.kernels.gpu.plan import needed
from infer.kernels.gpu.record import EMPTY, RawQueue, Recording
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import allocate
from infer.kernels.lowering.target import stride
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import ROW_LOGPROBS
from infer.kernels.state.step import NO_TOKEN
from infer.models import build_model
from infer.models.blocks.decoder import Decoder
from infer.models.loading.config import RawConfig
from infer.models.loading.shapes import shape_config
from infer.sampling import SamplingParams

TOLERANCE = 1e-5
CASES = ["llama", "mistral_sliding", "qwen3", "lfm2", "qwen3_5_text", "nemotron_h_experts"]
STEPS = 32


def prompt_of(case: str) -> list[int]:
    ids: list[int] = load(case).prompt_ids.tolist()
    return ids


def assert_same(actual: Answer, expected: Answer) -> None:
    assert actual.token_ids == expected.token_ids
    assert relative_error(actual.logits, expected.logits) <= TOLERANCE


# Every path gives equal answers. test_models.py holds the first of them to transformers.


@pytest.mark.dawn
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        # The last has them as well.
        pytest.param({"fuse": False}, marks=pytest.mark.full),
        pytest.param({"ahead": 1}, marks=pytest.mark.full),
        pytest.param({"raw": False}, marks=pytest.mark.full),
        pytest.param({"ahead": 3}, marks=pytest.mark.full),
        pytest.param({"prefill_chunk": 16}, marks=pytest.mark.full),
        {"context": 600},
        {"fuse": False, "raw": False, "ahead": 1, "prefill_chunk": 16},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_options_do_not_change_the_answer(
    engine_of: EngineOf, case: str, options: dict[str, Any]
) -> None:
    prompt_ids = prompt_of(case)
    usual, other = engine_of(case), engine_of(case, **options)
    assert other.options != usual.options
    assert_same(answer(other, prompt_ids, STEPS), answer(usual, prompt_ids, STEPS))
    assert relative_error(scores(other, prompt_ids), load(case).logits) <= TOLERANCE


def test_what_was_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    """And an engine that was not asked to compile does so for the steps that come."""
    folder = load("llama").write_checkpoint(tmp_path / "llama")
    with Device.open() as device:
        engine = build_engine(device, folder)
        before = device.n_pipelines
        engine.runner.recordings.of(Recipe(engine.runner.kinds.decode))
        first = device.n_pipelines
        engine.runner.steps.compile()
        compiled = device.n_pipelines
        assert before < first < compiled
        for kind in engine.runner.kinds.alone:
            engine.runner.recordings.of(Recipe(kind))
        assert device.n_pipelines == compiled


@pytest.mark.parametrize("case", ["llama", "lfm2"])
@pytest.mark.parametrize("length", [8, 20])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 7, "seed": 1}])
def test_warming_up_touches_every_kernel_and_runs_none(
    engine_of: EngineOf,
    case: str,
    length: int,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A software adapter's driver compiles a kernel when it is first submitted."""
    engine, kernels, grids = engine_of(case), set(), set()
    submit = RawQueue.submit

    def noted(self: RawQueue, recording: Recording, rows: int, kv_len: int, copies: Any) -> int:
        items = needed(recording.dispatches, rows, kv_len)
        kernels.update(item.pipeline for item in items)
        grids.update(item.size(rows, kv_len) for item in items)
        return submit(self, recording, rows, kv_len, copies)

    monkeypatch.setattr(RawQueue, "submit", noted)
    monkeypatch.setattr(engine.device, "software", True)
    params = SamplingParams(max_tokens=4, **sampling).resolved({})
    seen: list[tuple[int, int]] = []
    engine.runner.warm_up(length, params, lambda *progress: seen.append(progress))
    warm = set(kernels)
    assert grids == {(0, 1, 1)}
    assert seen == [(done, len(warm)) for done in range(1, len(warm) + 1)]
    assert len(list(engine.generate(prompt_of(case)[:length], params))) == 4
    assert kernels == warm
    assert len(grids) > 1


@pytest.mark.dawn
@pytest.mark.parametrize("chunk", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("case", CASES)
def test_decode_is_prefill(engine_of: EngineOf, case: str, chunk: int) -> None:
    """The prompt in pieces of 1 (decode), up to 8 (few rows) and more (prefill), each after what
    the cache holds, gives the logits that transformers gives for it in one pass."""
    reference, prompt_ids = load(case), prompt_of(case)
    engine, rows = engine_of(case, state_places=64), []
    ends = [*range(chunk, len(prompt_ids), chunk), len(prompt_ids)]
    for end in ends:
        rows.append(answer(engine, prompt_ids[:end], 1).logits[0])
        assert engine.timings.reused_tokens == (end - 1) // chunk * chunk
        assert engine.timings.prefilled_tokens == end - engine.timings.reused_tokens
    expected = reference.logits[[end - 1 for end in ends]]
    assert relative_error(np.stack(rows), expected) <= TOLERANCE


@pytest.mark.parametrize("shared", [0, 1, 30, 44, 45])
def test_reusing_a_prefix_changes_nothing(engine_of: EngineOf, shared: int) -> None:
    prompt_ids = prompt_of("qwen3")
    other_ids = [*prompt_ids[:shared], *(i - 1 for i in prompt_ids[shared:])]
    engine = engine_of("qwen3")
    expected = answer(engine, prompt_ids, STEPS)
    engine.forget()
    answer(engine, other_ids, 8)
    assert_same(answer(engine, prompt_ids, STEPS), expected)
    assert engine.timings.reused_tokens == min(shared, len(prompt_ids) - 1)


def test_a_chat_goes_on_from_its_own_answer(engine_of: EngineOf) -> None:
    """The next turn's prompt holds the last answer, whose keys and values are there already."""
    prompt_ids, engine = prompt_of("llama"), engine_of("llama")
    first = answer(engine, prompt_ids, 9)
    turn_ids = [*prompt_ids, *first.token_ids, 5, 6, 7]
    second = answer(engine, turn_ids, 9)
    # All but the last token of the answer had been put into the cache to find the next.
    assert engine.timings.reused_tokens == len(prompt_ids) + 8
    engine.forget()
    assert_same(answer(engine, turn_ids, 9), second)


@pytest.mark.parametrize("left", [1, 2, 20])
def test_an_abandoned_generation_leaves_a_good_cache(engine_of: EngineOf, left: int) -> None:
    """Steps that had been submitted ahead when the reader went away do no harm."""
    prompt_ids, engine = prompt_of("mistral_sliding"), engine_of("mistral_sliding")
    expected = answer(engine, prompt_ids, STEPS)
    engine.forget()
    steps = engine.generate(prompt_ids, SamplingParams(max_tokens=STEPS).resolved({}))
    got = [next(steps).token for _ in range(left)]
    steps.close()
    assert got == expected.token_ids[:left]
    assert_same(answer(engine, prompt_ids, STEPS), expected)


def test_what_lies_beyond_the_cache_is_never_read(engine_of: EngineOf) -> None:
    engine, prompt_ids = engine_of("llama", context=600), prompt_of("llama")
    expected = answer(engine, prompt_ids, STEPS)
    for layer in engine.runner.caches.kv.layers:
        for buffer in (layer.keys, layer.values):
            engine.device.write(buffer, np.full(buffer.nbytes // 4, np.nan, np.float32))
    engine.forget()
    assert_same(answer(engine, prompt_ids, STEPS), expected)
    assert np.isfinite(scores(engine, prompt_ids)).all()


# Where it ends


def test_ends_at_any_stop_id_with_that_id(engine_of: EngineOf) -> None:
    engine, prompt_ids = engine_of("llama"), prompt_of("llama")
    greedy = answer(engine, prompt_ids, STEPS).token_ids
    params = SamplingParams(max_tokens=STEPS).resolved({})
    for stop in (greedy[0], greedy[12]):
        steps = engine.generate(prompt_ids, params, stop_ids=[0, stop])
        assert [step.token for step in steps] == greedy[: greedy.index(stop) + 1]


def test_a_row_that_has_stopped_stays_so(engine_of: EngineOf) -> None:
    """Steps that were submitted ahead of a stop sample nothing and write nothing to the cache."""
    engine, prompt_ids = engine_of("llama", ahead=3), prompt_of("llama")
    for _ in range(2):  # the second time, the kernels compute the last position as below
        stop = answer(engine, prompt_ids, 1).token_ids[0]
    before = cache_bytes(engine)
    steps = engine.generate(
        prompt_ids, SamplingParams(max_tokens=STEPS).resolved({}), stop_ids=[stop]
    )
    assert [step.token for step in steps] == [stop]
    assert engine.device.read(engine.runner.sampler.sampled, np.uint32, 1)[0] == NO_TOKEN
    assert cache_bytes(engine) == before


def cache_bytes(engine: Engine) -> list[bytes]:
    return [
        engine.device.read(buffer, np.uint8).tobytes() for buffer in engine.runner.caches.kv.buffers
    ]


def test_the_context_is_used_to_its_end(engine_of: EngineOf) -> None:
    """The last token needs no position of its own."""
    prompt_ids = prompt_of("llama")
    engine = engine_of("llama", context=len(prompt_ids) + 3)
    params = SamplingParams().resolved({})
    tokens = [step.token for step in engine.generate(prompt_ids, params)]
    assert tokens == answer(engine_of("llama"), prompt_ids, 3).token_ids
    assert len(list(engine.generate([*prompt_ids, 1, 2], params))) == 1
    with pytest.raises(RequestError, match="has 48 tokens, and the context holds 48"):
        next(engine.generate([*prompt_ids, 1, 2, 3], params))
    assert scores(engine, [*prompt_ids, 1, 2, 3]).shape == (48, engine.vocab_size)


def test_scores_fit_in_a_binding(open_device: OpenDevice, tmp_path: Path) -> None:
    """Where 128 rows of logits are more than a binding, a few rows are scored at a time."""
    reference = load("llama")
    row = 4 * stride(reference.logits.shape[1])
    folder = reference.write_checkpoint(tmp_path / "llama")
    device = open_device(Settings(max_binding=128 * row - 256))
    with device.scope():
        engine = build_engine(device, folder, cache_positions=128)
        assert (
            relative_error(scores(engine, reference.prompt_ids.tolist()), reference.logits)
            < TOLERANCE
        )


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "prompt is empty"), ([3, -1], "Token -1 is not"), ([211], "Token 211 is not")],
)
def test_prompts_that_cannot_be_served(engine_of: EngineOf, ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        next(engine_of("llama").generate(ids, SamplingParams().resolved({})))
    with pytest.raises(RequestError, match=message):
        next(engine_of("llama").logits(ids))


@pytest.mark.parametrize("ahead", [1, 2])
def test_logits_that_are_not_finite_end_it(device: Device, tmp_path: Path, ahead: int) -> None:
    folder = load("llama").write_checkpoint(tmp_path / "llama")
    with device.scope():
        engine = build_engine(device, folder, ahead=ahead)
        norm = engine.weights["norm"].shards[0].buffer
        good = device.read(norm)
        device.write(norm, np.full_like(good, np.nan))
        for _ in range(2):  # the second time too
            with pytest.raises(ModelError, match="not finite"):
                answer(engine, prompt_of("llama"), STEPS)
        device.write(norm, good)
        assert answer(engine, prompt_of("llama"), 8).token_ids == greedy_ids("llama")[:8]


def greedy_ids(case: str) -> list[int]:
    ids: list[int] = load(case).greedy_ids.tolist()
    return ids


# The cost of a token


@dataclass(frozen=True)
class Call:
    """One call to the C library: its name, its arguments and what it returned. `index` is what a
    poll waits for: a submission's index, None for everything."""

    name: str
    args: tuple[Any, ...]
    result: Any
    index: int | None


class CountingLib:
    """Stands in for the C library and writes down every call to it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(lib, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            index = None
            if name == "wgpuDevicePoll" and args[2] != ffi.NULL:
                index = args[2][0]
            result = value(*args)
            self.calls.append(Call(name, args, result, index))
            return result

        return call

    def begin(self) -> None:
        gc.collect()  # what others have left would be released in between
        self.calls.clear()

    def count(self) -> Counter[str]:
        return Counter(call.name for call in self.calls)

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingLib:
    """Sees all calls to wgpu-native in this process: infer's own, and those of the Python API."""
    if library().name != "wgpu-native":
        pytest.skip("these are calls of wgpu-native")
    counting = CountingLib()
    for module in list(sys.modules.values()):
        if module is not sys.modules[__name__] and getattr(module, "lib", None) is lib:
            monkeypatch.setattr(module, "lib", counting)
    for part in (wgpu_native._Device, wgpu_native._Mapping):
        monkeypatch.setattr(part, "lib", counting)
    # The Python API calls copies of the functions.
    from wgpu.backends.wgpu_native import _api

    for name, function in vars(_api.libf).items():
        if name.startswith("wgpu"):
            monkeypatch.setattr(_api.libf, name, _counted(counting, name, function))
    return counting


def _counted(counting: CountingLib, name: str, function: Callable[..., Any]) -> Any:
    def call(*args: Any) -> Any:
        result = function(*args)
        counting.calls.append(Call(name, args, result, None))
        return result

    return call


# The calls of one decode step, and how often; besides, one of three for each dispatch.
STEP = {
    "wgpuDeviceCreateCommandEncoder": 1,
    "wgpuCommandEncoderBeginComputePass": 1,
    "wgpuComputePassEncoderEnd": 1,
    "wgpuComputePassEncoderRelease": 1,
    "wgpuCommandEncoderCopyBufferToBuffer": 1,
    "wgpuCommandEncoderFinish": 1,
    "wgpuQueueSubmitForIndex": 1,
    "wgpuCommandBufferRelease": 1,
    "wgpuCommandEncoderRelease": 1,
    "wgpuBufferMapAsync": 1,
    "wgpuDevicePoll": 1,
    "wgpuBufferGetConstMappedRange": 1,
    "wgpuBufferUnmap": 1,
}
PER_DISPATCH = {
    "wgpuComputePassEncoderSetPipeline",
    "wgpuComputePassEncoderSetBindGroup",
    "wgpuComputePassEncoderDispatchWorkgroups",
}
TOKENS = 20

FILTERED: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {7: 1.0},
    "seed": 1,
}


@pytest.mark.parametrize(
    "sampling",
    [{}, FILTERED, {"logprobs": 3}],
    ids=["greedy", "all filters", "log probabilities"],
)
@pytest.mark.parametrize("with_logits", [False, True])
def test_calls_of_a_token(
    engine_of: EngineOf, counting: CountingLib, sampling: dict[str, Any], with_logits: bool
) -> None:
    engine, prompt_ids = engine_of("qwen3"), prompt_of("qwen3")
    engine.runner.submissions.queue = RawQueue(engine.device)  # which knows the counting library
    # The end is so far away that every step counted has one after it.
    params = SamplingParams(max_tokens=2 * TOKENS, **sampling).resolved({})
    for _ in range(2):  # the first compiles the sampler
        steps = engine.generate(prompt_ids, params, with_logits=with_logits)
        for _ in range(3):
            next(steps)
        counting.begin()
        allocated = engine.device.memory_stats()
        tokens = [next(steps) for _ in range(TOKENS)]
        calls, names = counting.calls.copy(), counting.count()
        steps.close()
    assert all((step.logits is not None) == with_logits for step in tokens)
    assert engine.device.memory_stats() == allocated

    # One encoder, one command buffer, one submission, one map, and nothing that is not here.
    read = [4]  # bytes
    read += [8 * ROW_LOGPROBS] if "logprobs" in sampling else []
    read += [4 * engine.vocab_size] if with_logits else []
    reads = len(read)
    twice = {"Copy": reads, "Map": reads, "Poll": reads, "Unmap": reads}
    expected = {
        name: TOKENS * next((n for part, n in twice.items() if part in name), count)
        for name, count in STEP.items()
    }
    dispatches = names["wgpuComputePassEncoderDispatchWorkgroups"]
    assert names.pop("wgpuQueueWriteBuffer", 0) <= -(-TOKENS // PAGE)  # to the page table
    assert {name: names[name] for name in names.keys() - PER_DISPATCH} == expected
    assert dispatches % TOKENS == 0
    assert names["wgpuComputePassEncoderSetBindGroup"] == dispatches
    assert 0 < names["wgpuComputePassEncoderSetPipeline"] <= dispatches

    # Ids, and log probabilities and logits if they were asked for, are all that is copied.
    copied = [call.args[-1] for call in calls if call.name.endswith("CopyBufferToBuffer")]
    assert copied == read * TOKENS


def test_the_next_step_is_submitted_before_an_id_is_read(
    engine_of: EngineOf, counting: CountingLib
) -> None:
    engine, prompt_ids = engine_of("qwen3"), prompt_of("qwen3")[:1]  # nothing of which is reused
    engine.runner.submissions.queue = RawQueue(engine.device)
    answer(engine, prompt_ids, 2)
    counting.begin()
    steps = engine.generate(prompt_ids, SamplingParams(max_tokens=TOKENS).resolved({}))
    assert len(list(steps)) == TOKENS
    submitted: list[int] = []
    staging: dict[int, Any] = {}  # submission -> the buffer that its id was copied to
    polls = 0
    copied_to = mapped = None
    for call in counting.calls:
        match call.name:
            case "wgpuCommandEncoderCopyBufferToBuffer":
                copied_to = call.args[3]
            case "wgpuQueueSubmitForIndex":
                submitted.append(call.result)
                staging[call.result] = copied_to
            case "wgpuBufferMapAsync":
                mapped = call.args[0]
            case "wgpuDevicePoll" if call.index is None:  # asked in naps: nothing is on its way
                assert polls == TOKENS - 1
            case "wgpuDevicePoll":
                # For one submission, of which this maps the id, while the next is on its way.
                assert call.index == submitted[polls]
                assert mapped == staging[call.index]
                assert len(submitted) == min(polls + 2, TOKENS)
                polls += 1
    assert polls == TOKENS


@pytest.mark.parametrize("sampling", [{}, FILTERED], ids=["greedy", "all filters"])
def test_a_generation_creates_nothing(
    engine_of: EngineOf,
    counting: CountingLib,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once its kernels have been compiled, from the prompt on: neither on the GPU nor for it."""
    monkeypatch.setattr("infer.engine.pace.SUBMISSION_SECONDS", 1e9)  # a chunk is never cut
    monkeypatch.setattr("infer.engine.pace.SUBMISSIONS", 1)
    engine, prompt_ids = engine_of("qwen3", prefill_chunk=16), prompt_of("qwen3")
    engine.runner.submissions.queue = RawQueue(engine.device)
    for _ in range(2):
        engine.forget()
        counting.begin()
        answer(engine, prompt_ids, STEPS, **sampling)
    created = {name for name in counting.count() if "Create" in name}
    assert created == {"wgpuDeviceCreateCommandEncoder"}
    chunks = -(-len(prompt_ids) // 16)
    assert counting.count()["wgpuQueueSubmitForIndex"] == chunks + STEPS - 1
    assert counting.count()["wgpuQueueSubmit"] == 0


def test_what_is_not_sent_is_not_finished(engine_of: EngineOf, counting: CountingLib) -> None:
    """A command buffer that is never submitted is never freed by wgpu-native."""
    queue = RawQueue(engine_of("qwen3").device)
    before = counting.count()
    queue.drop(queue.record(EMPTY, 1, 0, ()))
    queue.wait(queue.send(queue.record(EMPTY, 1, 0, ())))
    queue.wait(queue.send(queue.record(EMPTY, 1, 0, (), finish=True)))
    counts = counting.count()
    counts.subtract(before)
    assert counts["wgpuDeviceCreateCommandEncoder"] == counts["wgpuCommandEncoderRelease"] == 3
    assert counts["wgpuCommandEncoderFinish"] == counts["wgpuCommandBufferRelease"] == 2


def workgroups(engine: Engine, counting: CountingLib, length: int) -> NDArray[np.int64]:
    """Workgroups of each dispatch of the decode step after so many positions."""
    engine.runner.submissions.queue = RawQueue(engine.device)
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(3, engine.vocab_size, length).tolist()
    steps = engine.generate(prompt_ids, SamplingParams(max_tokens=3).resolved({}))
    next(steps)
    counting.begin()
    next(steps)
    steps.close()
    dispatches = counting.named("wgpuComputePassEncoderDispatchWorkgroups")
    return np.array([np.prod(call.args[1:]) for call in dispatches])


@pytest.mark.full
@pytest.mark.parametrize("fuse", [True, False])
def test_attention_costs_what_is_in_the_cache(
    engine_of: EngineOf,
    own_device: Device,
    counting: CountingLib,
    monkeypatch: pytest.MonkeyPatch,
    fuse: bool,
) -> None:
    monkeypatch.setattr(own_device, "software", True)  # which splits short contexts too
    small = engine_of("llama", context=128, fuse=fuse)
    large = engine_of("llama", context=1024, fuse=fuse)
    # The capacity does not count …
    expected = workgroups(small, counting, 100)
    assert workgroups(large, counting, 100).tolist() == expected.tolist()
    # … the length does, in the dispatches of attention and nowhere else.
    short, long = workgroups(large, counting, 20), workgroups(large, counting, 900)
    grown = short < long
    assert short.shape == long.shape
    assert grown.any()
    assert (short[~grown] == long[~grown]).all()
    n_layers = large.model.config.num_hidden_layers
    assert grown.sum() % n_layers == 0
    assert grown.sum() / n_layers <= (1 if fuse else 3)


@pytest.mark.full
def test_a_context_grows_out_of_one_split(
    engine_of: EngineOf, own_device: Device, counting: CountingLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of a GPU a short context takes a kernel less in each layer."""
    ids = [i % 200 for i in range(3, 1021)]
    expected = answer(engine_of("llama", context=1100), ids, 12)
    monkeypatch.setattr(own_device, "software", False)
    engine = engine_of("llama", context=1101)
    assert_same(answer(engine, ids, 12), expected)
    short, long = workgroups(engine, counting, 20), workgroups(engine, counting, 1030)
    assert len(short) == len(long) - engine.model.config.num_hidden_layers


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "granitemoehybrid"])
def test_prompts_of_any_length_have_steps_of_their_size(
    model_type: str, engine_of: EngineOf, own_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has tiles for short prompts, and kernels without them for the shortest."""
    monkeypatch.setattr(own_device, "software", True)
    engine = engine_of(model_type, context=501)
    kinds = engine.runner.kinds
    assert {kinds.prefill(rows).rows for _, rows in engine.runner.chunks(300)} == {kinds.chunk}
    lengths = (9, 30, 33, 65, 129, 300)
    ids = [i % engine.vocab_size for i in range(7, 307)]
    expected = [answer(engine, ids[:length], 3) for length in lengths]
    monkeypatch.setattr(own_device, "software", False)
    monkeypatch.setattr("infer.engine.pace.FIRST_ROWS", 512)
    engine = engine_of(model_type, context=502)
    kinds, sizes = engine.runner.kinds, list[int]()
    for length in (1, 8, *lengths):
        ((_, rows),) = engine.runner.chunks(length)
        sizes.append(kinds.prefill(rows).rows)
    assert sizes == [1, 8, 16, 32, 64, 128, 256, kinds.chunk]
    for length, answered in zip(lengths, expected, strict=True):
        engine.forget()
        assert_same(answer(engine, ids[:length], 3), answered)


def largest_activation(device: DryDevice, model: Decoder, context: int) -> tuple[int, int]:
    """Its bytes, and the rows of a prefill step."""
    weights = {
        spec.name: allocate(
            device, spec.shape, "bf16" if len(spec.shape) > 1 else "f32", spec.name, unit=spec.unit
        )
        for spec in model.weights()
    }
    runner = Engine(device, Loaded(model, weights), EngineOptions(context)).runner
    return max(slot.nbytes for slot in runner.steps.arena.slots), runner.kinds.chunk


def test_no_activation_is_larger_than_a_binding() -> None:
    """By the least limits a layer of OLMo's gate and up is in shards, of which one is small."""
    device, model = DryDevice(Limits()), build_model(shape_config("olmo-3-7b"))
    largest, rows = largest_activation(device, model, 1024)
    assert rows == 512
    assert largest <= device.limits.max_binding


# The widest is a projection of queries, keys and values; gates and what is convolved with them; the
# results of a row's experts; gate and up of twice the width; queries of latents.
@pytest.mark.parametrize("case", ["llama_f32", "nemotron_h", "qwen3_moe", "gemma4", "deepseek_v3"])
def test_a_prefill_step_has_as_many_rows_as_a_binding_holds(case: str) -> None:
    model = build_model(RawConfig.open(DATA / case))
    device = DryDevice(Limits(max_binding=1 << 18))
    largest, rows = largest_activation(device, model, 1024)
    assert 16 < rows < 512
    assert largest <= device.limits.max_binding <= largest * (rows + 128) // rows


def test_kernels_of_batches_can_be_compiled_beforehand(tmp_path: Path) -> None:
    folder, prompt_ids = load("llama").write_checkpoint(tmp_path / "llama"), prompt_of("llama")
    with Device.open() as device:
        engine = build_engine(device, folder, max_batch=4)
        answer(engine, prompt_ids, 2)
        before = device.n_pipelines
        params = SamplingParams(temperature=0.0, max_tokens=4).resolved({})
        engine.runner.compile_batches(params)
        compiled = device.n_pipelines
        assert compiled > before
        for each in [engine.generate(prompt_ids[i:], params) for i in range(3)]:
            assert len(list(each)) == 4
        assert device.n_pipelines == compiled


def test_long_steps_are_cut_into_short_submissions(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow an adapter is: the same tokens, from fewer rows and fewer kernels at a time."""
    engine = engine_of("llama", context=500, prefill_chunk=256)
    ids = [i % engine.vocab_size for i in range(7, 407)]
    expected = answer(engine, ids, 4)
    submitted: list[tuple[int, int]] = []
    submit = engine.runner.queue.submit

    def noting(recording: Recording, rows: int, *rest: Any) -> Any:
        submitted.append((rows, len(recording.dispatches)))
        return submit(recording, rows, *rest)

    seconds = iter(range(1_000_000))  # each look at the clock is a second later
    monkeypatch.setattr(engine.runner.queue, "submit", noting)
    monkeypatch.setattr("infer.engine.engine.time.perf_counter", lambda: float(next(seconds)))
    engine.forget()
    layers = engine.model.config.num_hidden_layers
    monkeypatch.setattr(engine.runner, "pace", Pace(layers))
    assert_same(answer(engine, ids, 4), expected)
    prefill = [(rows, kernels) for rows, kernels in submitted if rows > 8]
    body = Recipe(engine.runner.kinds.alone[0], head=False)
    whole = len(engine.runner.recordings.of(body).dispatches)
    assert sum(rows == 64 for rows, _ in prefill) > len(prefill) / 2
    assert max(kernels for rows, kernels in prefill if rows == 64) <= -(-(whole + 8) // layers)


def test_an_interrupt_while_recording_leaves_nothing_behind(
    engine_of: EngineOf, counting: CountingLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt_ids = engine_of("qwen3"), prompt_of("qwen3")
    engine.runner.submissions.queue = RawQueue(engine.device)
    expected = answer(engine, prompt_ids, 8)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in (
        "wgpuComputePassEncoderDispatchWorkgroups",
        "wgpuCommandEncoderCopyBufferToBuffer",
        "wgpuCommandEncoderFinish",
        "wgpuQueueSubmitForIndex",
    ):
        counting.begin()
        with monkeypatch.context() as patch:
            patch.setattr(counting, name, interrupted, raising=False)
            with pytest.raises(KeyboardInterrupt):
                answer(engine, prompt_ids, 8)
        calls = counting.count()
        made = calls["wgpuDeviceCreateCommandEncoder"]
        assert made == calls["wgpuCommandEncoderRelease"] > 0
        assert made == calls["wgpuComputePassEncoderRelease"]
        assert calls["wgpuCommandEncoderFinish"] == calls["wgpuCommandBufferRelease"]
        assert_same(answer(engine, prompt_ids, 8), expected)


@pytest.mark.dawn
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_interrupt_while_reading_leaves_nothing_mapped(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, times: int, before: bool
) -> None:
    """Interrupts come in a step, and then in those that are drained because of it."""
    engine, prompt_ids = engine_of("qwen3"), prompt_of("qwen3")
    expected = answer(engine, prompt_ids, 8)
    mapping = engine.runner.queue._mapping
    real, left = mapping.wait, iter(range(times))

    def interrupted(submission: int) -> memoryview:
        stop = next(left, None) is not None
        if not (stop and before):
            memory = real(submission)
        if stop:
            raise KeyboardInterrupt
        return memory

    with monkeypatch.context() as patch:
        patch.setattr(mapping, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(engine, prompt_ids, 8)
    assert_same(answer(engine, prompt_ids, 8), expected)


@pytest.mark.dawn
@pytest.mark.parametrize("raw", [True, False])
def test_a_lost_device_is_an_error(tmp_path: Path, raw: bool) -> None:
    """Before a prompt and, on the public API too, where the next step is submitted."""
    folder = load("llama").write_checkpoint(tmp_path / "llama")
    with Device.open() as device:
        engine = build_engine(device, folder, raw=raw)
        steps = engine.generate(prompt_of("llama"), SamplingParams().resolved({}))
        next(steps)
        device.handle.destroy()
        for call in (
            lambda: next(steps),
            lambda: answer(engine, prompt_of("llama"), 2),
            lambda: scores(engine, prompt_of("llama")),
            lambda: device.pipeline(KernelSpec.of("take_rows", STRIDE=8)),
        ):
            with pytest.raises(DeviceError, match="was lost") as caught:
                call()
            assert not isinstance(caught.value, OutOfMemoryError)


@pytest.mark.parametrize("generated", [[5, 6, 7], [5, 9]])
def test_there_is_nothing_to_go_on_with(engine_of: EngineOf, generated: list[int]) -> None:
    """After max_tokens, and after a stop id."""
    params = SamplingParams(max_tokens=3).resolved({})
    engine = engine_of("llama")
    request = Request(Prompt([1, 2]), params, stop_ids=[9], generated=generated)
    assert not list(engine.answer(request))
    assert len(list(engine.answer(replace(request, generated=[5, 6])))) == 1
