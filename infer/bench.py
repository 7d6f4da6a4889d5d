"""The benchmark: how fast a model runs on this adapter, and how near that is to what it could do.

    pp512           prefill of 512 tokens, until the id of the first new token has arrived
    tg128           decode: 128 steps, from the arrival of the first token to that of the last
    tg128 sampled   the same with every stage of the sampler
    tg128 @ d4096   the same after a prompt of 4096 tokens

Tests, prompts of random ids, and the table are llama-bench's. What decode could do is bounded by
memory: its share is (weight bytes + KV bytes that a token reads) x tokens/s over the bandwidth of a
copy on the same adapter in the same run.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import lib_version_info

import infer
from infer.bench_report import BenchReport, KernelTime, Profile, Row, format_report
from infer.engine import Engine, EngineOptions
from infer.kernels.adapters import AdapterInfo, choose_adapter
from infer.kernels.bandwidth import copy_bandwidth
from infer.kernels.device import Device
from infer.kernels.errors import InferError, RequestError
from infer.kernels.plan import Dispatch
from infer.kernels.profile import profile_dispatches
from infer.kernels.shader import KernelSpec
from infer.kernels.step import pack_step
from infer.llm import load
from infer.memory import DEFAULT_CONTEXT, fitting_options, kv_bytes_per_position
from infer.models import build_model
from infer.models.llama import Llama
from infer.models.shapes import SHAPES, shape_config
from infer.models.weights import random_weights
from infer.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0).resolved({})
SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    seed=0,
).resolved({})

_WARM_UP_SECONDS = 0.3  # a GPU that was idle needs work before its clock is up
_HOST_STEPS = 32

Progress = Callable[[str], None]


def run_bench(
    model: str | None = None,
    shape: str | None = None,
    *,
    device: str | int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    kv_dtype: str = "f16",
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    depths: Sequence[int] = (),
    repeats: int = 5,
    profile: bool = False,
    json_path: Path | None = None,
    progress: Progress = lambda message: None,
) -> BenchReport:
    """Benchmark a model, or the shape of one (a key of SHAPES) on random weights.

    model, device, context, dtype, kv_dtype: as for `load`; a shape's weights are bf16 where dtype
    is None. prompt_tokens of the prefill test; decode_tokens of every decode test, of which there
    is one more for each of `depths`, the tokens that are in the cache before it. Each test runs
    `repeats` times after a warm-up. profile: time every kernel. json_path: a file to write the
    report to, or a folder, for a file named after date, adapter and model. progress is told what
    runs. Raises RequestError and whatever `load` raises.
    """
    if min(prompt_tokens, decode_tokens, repeats, *depths, 1) < 1:
        raise RequestError("Counts of tokens, depths and repeats must be at least 1.")
    if json_path is not None and not json_path.parent.is_dir():
        raise RequestError(f"There is no folder {json_path.parent} to write the report to.")
    needed = max(prompt_tokens, max(depths, default=1) + decode_tokens) + 1
    if context is None and needed > DEFAULT_CONTEXT:
        context = needed
    adapter = choose_adapter(device)
    if profile and "timestamp-query" not in adapter.features:
        raise RequestError(f"{adapter} has no timestamp queries: leave out --profile.")
    if model is not None and shape is None:
        opened = _loaded(model, device, context, dtype, kv_dtype)
    elif shape is not None and model is None:
        opened = _random(shape, adapter, context, dtype or "bf16", kv_dtype)
    else:
        raise RequestError("Give either a model or a shape.")
    progress(f"copy bandwidth of {adapter}")
    with Device(adapter) as own:
        bandwidth = copy_bandwidth(own)
    progress(f"loading {model or shape}")
    begin = time.perf_counter()
    with opened as (name, engine):
        if engine.context < needed:
            raise RequestError(
                f"The tests need {needed} positions, and the context holds {engine.context}. "
                "Raise it (--context) or ask for fewer tokens."
            )
        load_seconds = time.perf_counter() - begin
        bench = _Bench(engine, bandwidth, repeats, progress)
        prefill = bench.prefill(prompt_tokens)
        greedy = bench.decode(decode_tokens, 0, GREEDY)
        sampled = bench.decode(decode_tokens, 0, SAMPLED)
        deep = {depth: bench.decode(decode_tokens, depth, GREEDY) for depth in depths}
        progress("host")
        host_seconds = bench.host_seconds()
        profiles = []
        if profile:
            profiles = bench.profiles(prefill, {0: greedy, **deep})
        c, weights = engine.model.config, engine.weights.values()
        report = BenchReport(
            model=name,
            random_weights=shape is not None,
            architecture=c.model_type,
            dtype="+".join(sorted({w.dtype for w in weights if len(w.shape) == 2})),
            kv_dtype=engine.options.kv_dtype,
            parameters=sum(prod(weight.shape) for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
            context=engine.context,
            adapter=adapter.name,
            adapter_kind=adapter.kind,
            backend=adapter.backend,
            driver=adapter.driver,
            versions=_versions(),
            commit=_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            copy_bandwidth=bandwidth,
            rows=(prefill, greedy, sampled, *deep.values()),
            ttft_seconds=(statistics.fmean(prefill.seconds), _deviation(prefill.seconds)),
            sampled_share=sampled.tps / greedy.tps,
            host_seconds=host_seconds,
            peak_bytes=engine.device.memory_stats().peak,
            load_seconds=load_seconds,
            profiles=tuple(profiles),
        )
    if json_path is not None:
        path = json_path / report.file_name if json_path.is_dir() else json_path
        path.write_text(report.to_json(), encoding="utf-8")
        progress(f"wrote {path}")
    return report


def print_report(report: BenchReport) -> None:
    """The report on stdout."""
    print(format_report(report))


def main(
    argv: Sequence[str] | None = None, *, prog: str = "infer bench", results: str = "."
) -> int:
    """The command; returns its exit code. A bare --json writes into the folder `results`."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure how fast a model runs on this machine's GPU."
    )
    parser.add_argument("model", nargs="?", help="a hub id, a folder, or demo")
    parser.add_argument(
        "--shape", choices=SHAPES, help="instead of a model: the shape of one, on random weights"
    )
    parser.add_argument("--device", help="index or part of the name of an adapter")
    parser.add_argument(
        "--context", type=int, help="positions of the KV cache (default: as for infer run)"
    )
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), help="convert the weights")
    parser.add_argument(
        "--kv-dtype", choices=("f16", "f32"), default="f16", help="of the KV cache (default: f16)"
    )

    def count(short: str, name: str, default: int, text: str) -> None:
        parser.add_argument(short, name, type=int, default=default, metavar="N", help=text)

    count("-p", "--prompt-tokens", 512, "tokens of the prefill test (default: 512)")
    count("-n", "--decode-tokens", 128, "tokens of every decode test (default: 128)")
    count("-r", "--repeats", 5, "runs of a test, after a warm-up (default: 5)")
    parser.add_argument(
        "--depth",
        type=_depths,
        default=[],
        metavar="N,N",
        help="also decode with so many tokens in the cache",
    )
    parser.add_argument("--profile", action="store_true", help="time every kernel of a step")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path(results),
        metavar="PATH",
        help="write the report to a file, or under its own name to a folder (default: %(const)s)",
    )
    options = parser.parse_args(argv)
    try:
        report = run_bench(
            options.model,
            options.shape,
            device=options.device,
            context=options.context,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            prompt_tokens=options.prompt_tokens,
            decode_tokens=options.decode_tokens,
            depths=options.depth,
            repeats=options.repeats,
            profile=options.profile,
            json_path=options.json,
            progress=lambda message: print(message, file=sys.stderr, flush=True),
        )
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_report(report)
    return 0


def _depths(text: str) -> list[int]:
    return [int(depth) for depth in text.split(",")]


# The model


@contextmanager
def _loaded(
    model: str, device: str | int | None, context: int | None, dtype: str | None, kv_dtype: str
) -> Iterator[tuple[str, Engine]]:
    with load(model, device=device, context=context, dtype=dtype, kv_dtype=kv_dtype) as llm:
        yield llm.name, llm.engine


@contextmanager
def _random(
    shape: str, adapter: AdapterInfo, context: int | None, dtype: str, kv_dtype: str
) -> Iterator[tuple[str, Engine]]:
    """An engine of that shape on random weights."""
    model = build_model(shape_config(shape))
    with Device(adapter) as device:
        options = fitting_options(
            model,
            lambda spec: dtype,
            EngineOptions(context=context or DEFAULT_CONTEXT, kv_dtype=kv_dtype),
            device.limits,
            adapter,
            may_shrink=context is None,
        )
        weights = random_weights(device, list(model.weights()), dtype)
        engine = Engine(device, model, weights, options)
        engine.compile()
        device.wait()
        yield shape, engine


# What a step has to read and to compute


def weight_bytes_per_token(engine: Engine) -> int:
    """Bytes of the matrices that decode multiplies with: all but an embedding that is not also the
    head, of which it looks up one row."""
    tied = engine.model.config.tie_word_embeddings
    return sum(
        weight.nbytes
        for name, weight in engine.weights.items()
        if len(weight.shape) == 2 and (tied or name != "embed_tokens")
    )


def kv_bytes_per_token(model: Llama, kv_dtype: str, prompt_tokens: int, tokens: int) -> float:
    """Bytes of keys and values that a decode step reads, mean over `tokens` steps after a prompt:
    step i attends to prompt_tokens + i positions, or to what a layer's window leaves of them."""
    c = model.config
    lengths = range(prompt_tokens + 1, prompt_tokens + tokens + 1)
    positions = sum(min(length, window or length) for window in c.windows for length in lengths)
    per_layer = kv_bytes_per_position(model, kv_dtype) / c.num_hidden_layers
    return positions * per_layer / tokens


def prefill_flops(model: Llama, tokens: int) -> int:
    """Operations of a prefill: 2 for every value of a layer's matrices and token, and of the head
    for the last token; 4 in attention for every query value and position that it attends to."""
    c = model.config
    head = c.vocab_size * c.hidden_size
    layers = sum(
        prod(spec.shape)
        for spec in model.weights()
        if len(spec.shape) == 2 and spec.name not in ("embed_tokens", "lm_head")
    )
    lengths = range(1, tokens + 1)
    positions = sum(min(length, window or length) for window in c.windows for length in lengths)
    attention = 4 * c.num_attention_heads * c.head_dim * positions
    return 2 * (layers * tokens + head) + attention


# Measuring


class _Bench:
    """The tests of one engine."""

    def __init__(self, engine: Engine, bandwidth: float, repeats: int, progress: Progress) -> None:
        self.engine, self.bandwidth = engine, bandwidth
        self.repeats, self.progress = repeats, progress

    def prefill(self, tokens: int) -> Row:
        ids = self._ids(tokens)

        def run() -> float:
            self.engine.tokens.clear()  # nothing may be reused
            return self._generate(ids, replace(GREEDY, max_tokens=1))[0]

        test = f"pp{tokens}"
        seconds = self._repeat(test, run)
        flops = prefill_flops(self.engine.model, tokens)
        mean = statistics.fmean(seconds)
        return Row(
            test,
            tokens,
            seconds,
            *_tps(tokens, seconds),
            flops=flops,
            flops_per_second=flops / mean,
        )

    def decode(self, tokens: int, depth: int, params: SamplingParams) -> Row:
        # Decode needs a token to begin with. A longer prompt is in the cache after the warm-up.
        ids = self._ids(max(depth, 1))
        params = replace(params, max_tokens=tokens + 1)
        test = f"tg{tokens}"
        test += f" @ d{depth}" if depth else "" if params.greedy else " sampled"
        seconds = self._repeat(test, lambda: self._generate(ids, params)[1])
        engine = self.engine
        kv_bytes = kv_bytes_per_token(engine.model, engine.options.kv_dtype, len(ids), tokens)
        nbytes = weight_bytes_per_token(engine) + kv_bytes
        tps, deviation = _tps(tokens, seconds)
        return Row(
            test,
            tokens,
            seconds,
            tps,
            deviation,
            bytes_per_token=nbytes,
            bandwidth=nbytes * tps,
            share=nbytes * tps / self.bandwidth,
        )

    def _ids(self, count: int) -> list[int]:
        return random.Random(0).choices(range(self.engine.vocab_size), k=count)

    def _generate(self, ids: Sequence[int], params: SamplingParams) -> tuple[float, float]:
        """Seconds to the first token, and from there to the last."""
        begin = first = last = time.perf_counter()
        for index, _ in enumerate(self.engine.generate(ids, params)):
            last = time.perf_counter()
            first = last if index == 0 else first
        return first - begin, last - first

    def _repeat(self, test: str, run: Callable[[], float]) -> tuple[float, ...]:
        self.progress(test)
        end = time.perf_counter() + _WARM_UP_SECONDS
        run()
        while time.perf_counter() < end:
            run()
        return tuple(run() for _ in range(self.repeats))

    # One step on its own

    def host_seconds(self) -> float:
        """The host's part of a greedy decode step, median: to record and submit it, and to read its
        id when that is there."""
        engine, queue = self.engine, self.engine._queue
        recording = engine._recording("decode", True, GREEDY.chain())
        self._place([0], 0, GREEDY)
        seconds = []
        with engine.device.scope():
            staging = engine.device.buffer(16, "read", "id")
            for _ in range(_HOST_STEPS):
                begin = time.perf_counter()
                submission = queue.submit(recording, 1, 1, [(engine.sampler.sampled, staging, 4)])
                submitted = time.perf_counter()
                queue.wait(submission)
                waited = time.perf_counter()
                queue.read(staging, 4, submission)
                seconds.append(time.perf_counter() - waited + submitted - begin)
        return statistics.median(seconds)

    def profiles(self, prefill: Row, decode: dict[int, Row]) -> list[Profile]:
        """The kernels of the prefill's first chunk, of a decode step in the middle of each test
        (by depth), and of the full sampler."""
        engine = self.engine
        chunks = list(engine._chunks(prefill.tokens))
        _, rows, kind = chunks[0]
        self._place(self._ids(rows), 0, GREEDY)
        plan = engine._recording(kind, True, None).dispatches
        whole = statistics.fmean(prefill.seconds) if len(chunks) == 1 else None
        profiles = [self._profile(f"prefill of {prefill.test}", [plan], rows, rows, whole)]
        plan = engine._recording("decode", True, None).dispatches
        sampler = engine.sampler.dispatches(GREEDY.chain(), gather=False)
        for depth, row in decode.items():
            kv_len = max(depth, 1) + (row.tokens + 1) // 2
            self._place([0], kv_len - 1, GREEDY)
            name = f"decode of {row.test}"
            profiles.append(self._profile(name, [plan, sampler], 1, kv_len, 1 / row.tps))
        self._place([0], 0, SAMPLED)
        sampler = engine.sampler.dispatches(SAMPLED.chain(), gather=False)
        profiles.append(self._profile("full sampler", [sampler], 1, 1, None))
        return profiles

    def _place(self, ids: Sequence[int], position: int, params: SamplingParams) -> None:
        """Write a step of these rows, alive to the end of the context, into the step buffer."""
        engine = self.engine
        record = params.record(
            vocab_size=engine.vocab_size,
            prompt_tokens=position + len(ids),
            context=engine.context,
            stop_ids=(),
        )
        engine.sampler.begin(0, record[0], ids, params.logit_bias)
        engine.device.write(engine.step, pack_step(ids, position, logits_rows=(len(ids) - 1,)))
        engine.tokens.clear()  # what is submitted now overwrites the cache

    def _profile(
        self,
        step: str,
        parts: Sequence[Sequence[Dispatch]],
        rows: int,
        kv_len: int,
        step_seconds: float | None,
    ) -> Profile:
        """The parts are timed apart: with every run, a sampler moves the step a position on."""
        self.progress(f"profile: {step}")
        device = self.engine.device
        repeats = 3 if device.software else 20
        timed = [
            (item, seconds)
            for part in parts
            for item, seconds in zip(
                part, profile_dispatches(device, part, rows, kv_len, repeats), strict=True
            )
        ]
        kernels: dict[str, KernelTime] = {}
        for item, seconds in timed:
            label = kernel_label(item.pipeline.spec)
            so_far = kernels.get(label, KernelTime(label, 0, 0.0, 0, 0))
            kernels[label] = KernelTime(
                label,
                so_far.calls + 1,
                so_far.seconds + seconds,
                so_far.nbytes + item.moved(rows, kv_len),
                so_far.flops + item.flops(rows, kv_len),
            )
        slowest_first = sorted(kernels.values(), key=lambda kernel: -kernel.seconds)
        return Profile(step, rows, kv_len, step_seconds, tuple(slowest_first))


def kernel_label(spec: KernelSpec) -> str:
    """A kernel's name with its sizes and with what is fused into it."""
    params = dict(spec.params)
    sizes = ("K", "N", "WIDTH", "HEAD_DIM", "GROUP", "WINDOW")
    words = [f"{name}={params[name]}" for name in sizes if params.get(name)]
    fused = ("NORM", "GATED", "BIAS", "RESIDUAL", "PENALTIES")
    words += [name.lower() for name in fused if params.get(name) is True]
    return " ".join([spec.name, *words])


def _tps(tokens: int, seconds: Sequence[float]) -> tuple[float, float]:
    """Tokens per second, mean of the runs and standard deviation."""
    speeds = [tokens / second for second in seconds]
    return statistics.fmean(speeds), _deviation(speeds)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


# Where it ran


def _versions() -> dict[str, str]:
    return {
        "infer": infer.__version__,
        "wgpu": wgpu.__version__,
        "wgpu-native": ".".join(map(str, lib_version_info)),
        "numpy": np.__version__,
        "Python": platform.python_version(),
        platform.system(): platform.machine(),
    }


def _commit() -> str | None:
    """The commit of this package, "-dirty" when files differ from it; None where git has none."""
    folder = Path(infer.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else the repository is another's
        return git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None
