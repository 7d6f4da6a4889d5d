"""Runs the benchmark: how fast a model is on this adapter, and how near to the memory's speed.

    pp512           prefill of 512 tokens, until the id of the first new token has arrived
    tg128           decode: 128 steps, from the arrival of the first token to that of the last
    tg128 sampled   tg128 with every stage of the sampler
    tg128 @ d4096   tg128 after a prompt of 4096 tokens
    tg32 x 8 @ d128 8 answers at once, each after 128 tokens of its own
    tg128 + 7       tg128 with 7 tokens drafted for each step; each counts as right with a given
                    probability
    8 clients       requests of random lengths, of which 8 are open at any time

The tests, the prompts of random ids and the table are llama-bench's. Decode is bounded by memory.
Its share of the memory's speed is (weight bytes + KV bytes that a token reads) x tokens/s, divided
by the bandwidth of a copy on the same adapter in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from infer.bench.measure import (
    BATCH_TOKENS,
    GREEDY,
    SAMPLED,
    EngineBench,
    Progress,
    deviation,
)
from infer.bench.options import OWN_LAYER, BenchTests, Subject
from infer.bench.report import BenchReport
from infer.calls import warn
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.hub import resolve_adapter
from infer.inspection import inspect_model
from infer.kernels.errors import OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, choose_adapter, software_note
from infer.kernels.gpu.bandwidth import copy_bandwidth
from infer.kernels.gpu.device import Device, Limits
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import PAGE
from infer.keywords import Progress as LoadProgress
from infer.loading import check_draft_quantize, load, weight_dtype
from infer.memory import DEFAULT_CONTEXT, Draft, MemoryCount, checked_context
from infer.models import build_model
from infer.models.blocks.decoder import Decoder
from infer.models.loading.plan import LoadPlan, plan_random
from infer.models.loading.random_weights import random_weights
from infer.models.loading.shapes import PUBLISHED, shape_config
from infer.versions import commit, versions

_CONTEXT = 1024  # of a shape with many answers, where nobody says more: the other tests fit


def run_bench(
    subject: Subject,
    tests: BenchTests,
    progress: Progress = lambda test, run, runs: None,
    loading: LoadProgress | None = None,
) -> BenchReport:
    """Benchmark a model or a shape. progress is told what runs; loading: as progress of `load`.
    Raises RequestError and whatever `load` raises."""
    tests.check(subject.draft)
    subject.check()
    if subject.context is None and tests.needed > DEFAULT_CONTEXT:
        subject = replace(subject, context=tests.needed)
    gpu = choose_adapter(subject.device, subject.webgpu, subject.precision)
    if tests.profile and "timestamp-query" not in gpu.features:
        raise RequestError(f"{gpu} has no timestamp queries: leave out --profile.")
    way = {None: "lookup", OWN_LAYER: "mtp"}.get(subject.draft, "draft")
    opened = open_engine(
        subject,
        needed=tests.needed,
        max_batch=tests.max_batch,
        speculate="off" if tests.accept is None else way,
        loading=loading,
    )
    progress(f"copy bandwidth of {gpu}", 0, 0)
    with Device(gpu) as own:
        bandwidth = copy_bandwidth(own)
    progress(f"loading {subject.model or subject.shape}", 0, 0)
    begin = time.perf_counter()
    with opened as (name, engine):
        load_seconds = time.perf_counter() - begin
        bench = EngineBench(engine, bandwidth, tests.repeats or 1, progress)
        measured = _measured(bench, tests)
        return BenchReport(
            **measured,
            **_about(subject, name, engine),
            copy_bandwidth=bandwidth,
            load_seconds=load_seconds,
            peak_bytes=engine.device.memory_stats().peak,
        )


def _measured(bench: EngineBench, tests: BenchTests) -> dict[str, Any]:
    """Run the tests. Returns the fields of a report that they give."""
    sizes = bench.sizes(
        tests.prompt_tokens, tests.decode_tokens, tests.repeats, max(tests.depths, default=1)
    )
    bench.repeats = sizes.repeats
    prefill = bench.prefill(sizes.prompt)
    cached = []
    if tests.prefix is not None:
        cached = [bench.prefill(sizes.prompt, max(1, int(tests.prefix * sizes.prompt)))]
    greedy, sampled = bench.decode(sizes.decode, 0, GREEDY, SAMPLED)
    deep = {depth: bench.decode(sizes.decode, depth, GREEDY)[0] for depth in tests.depths}
    together = [bench.batch(rows, BATCH_TOKENS, depth) for rows, depth in tests.batched]
    drafted = []
    if tests.accept is not None:
        several = ((rows, BATCH_TOKENS, depth) for rows, depth in tests.batched)
        sized = [(1, sizes.decode, 1), *several]
        drafted = [bench.drafts(*each, tests.accept, tests.draft_rows) for each in sized]
    loads = [bench.load(count, sizes.prompt, sizes.decode) for count in tests.clients]
    bench.progress("host and GPU of a step", 0, 0)
    submit_seconds, read_seconds = bench.host_seconds()
    host_seconds = submit_seconds + read_seconds
    gpu_seconds = bench.gpu_seconds(greedy)
    profiles = []
    if tests.profile:
        profiles = bench.profiles(prefill, {0: greedy, **deep}, host_seconds, tests.batched)
    return {
        "rows": (prefill, *cached, greedy, sampled, *deep.values(), *together, *drafted),
        "ttft_seconds": (statistics.fmean(prefill.seconds), deviation(prefill.seconds)),
        "sampled_share": sampled.tps / greedy.tps,
        "host_seconds": host_seconds,
        "dispatches": len(bench.greedy_step.dispatches),
        "submit_seconds": submit_seconds,
        "gpu_seconds": gpu_seconds,
        "profiles": tuple(profiles),
        "loads": tuple(loads),
    }


def _about(subject: Subject, name: str, engine: Engine) -> dict[str, Any]:
    """The fields of a report that say what was measured."""
    gpu, config, weights = engine.gpu, engine.model.config, engine.weights.values()
    lora, draft = subject.adapter, subject.draft
    return {
        "model": name,
        "random_weights": subject.shape is not None,
        "architecture": config.model_type,
        "dtype": subject.quantize or subject.format or _dtypes(weights),
        "kv_dtype": engine.options.kv_dtype,
        "parameters": sum(prod(weight.shape) for weight in weights),
        "weight_bytes": sum(weight.nbytes for weight in weights),
        "context": engine.context,
        "adapter": gpu.name,
        "adapter_kind": gpu.kind,
        "backend": gpu.backend,
        "driver": gpu.driver,
        "versions": versions(gpu.webgpu),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "lora": None if lora is None else resolve_adapter(str(lora), offline=True).name,
        "draft": draft and " ".join(filter(None, (draft, subject.draft_quantize))),
        "invariant": subject.invariant,
        "precision": subject.precision,
        "products": engine.runner.products,
        "webgpu": gpu.webgpu,
    }


def save(report: BenchReport, path: Path) -> Path:
    """Write the report to a file, or under a name of its own into a folder. Returns the path of the
    file."""
    path = path / report.file_name if path.is_dir() else path
    path.write_text(report.to_json(), encoding="utf-8")
    return path


def check_writable(path: Path) -> None:
    """Raises RequestError if `save` would fail, so that nothing is measured in vain."""
    if not path.parent.is_dir():
        raise RequestError(f"There is no folder {path.parent} to write the report to.")
    try:
        if path.is_dir():
            TemporaryFile(dir=path).close()
        else:
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()
    except OSError as error:
        raise RequestError(
            f"The report cannot be written to {path} ({error.strerror}). Name another place."
        ) from None


# The model


def open_engine(
    subject: Subject,
    *,
    needed: int = 2,
    max_batch: int = 1,
    speculate: str = "off",
    loading: LoadProgress | None = None,
) -> AbstractContextManager[tuple[str, Engine]]:
    """Name and engine of a model, or of a shape on random weights; closed at the end of `with`.

    needed: positions that the context must hold, and the cache for each of `max_batch` answers.
    speculate, loading: as `speculate` and `progress` of `load`. What can be checked before anything
    is allocated is checked at once. Raises RequestError, also unless one of model and shape is
    given, and whatever `load` raises.
    """
    if subject.model is not None and subject.shape is None and subject.format is None:
        options = asdict(subject)
        for name in ("model", "shape", "format"):
            del options[name]
        invariant = options.pop("invariant")
        if subject.draft == OWN_LAYER:
            options["draft"] = None
        _check_model(subject.model, options, needed)
        room = {"cache_positions": _room(subject.context or DEFAULT_CONTEXT, needed, max_batch)}
        own = {"progress": loading, "max_batch": max_batch, "speculate": speculate, "engine": room}
        return _loaded(subject.model, options | own | {"invariant": invariant})
    if subject.shape is not None and subject.model is None:
        return _random(subject, needed, max_batch, speculate)
    raise RequestError(
        "Give either a model or a shape (infer bench demo, infer bench --shape llama-3.2-1b); a "
        "format is for a shape."
    )


def _own_layer(shape: str) -> Decoder:
    """The model of a shape's layer that predicts further tokens. Raises RequestError if the shape
    has none."""
    layer = build_model(shape_config(shape)).predictor
    if layer is None:
        raise RequestError(
            f"{shape} has no layer that predicts further tokens. Give another shape to draft "
            "(--draft), or leave it out."
        )
    return layer


def _room(context: int, needed: int, max_batch: int) -> int | None:
    """Positions of a cache for `max_batch` answers of `needed` positions each, or None for the
    default room of one answer. Each answer has two more pages: one that the scheduler leaves it to
    grow, and one of its prompt, whose beginning it copies."""
    return None if max_batch == 1 else max(context, (-(-needed // PAGE) + 2) * PAGE * max_batch)


def _dtypes(weights: Iterable[GpuTensor]) -> str:
    return "+".join(sorted({weight.dtype for weight in weights if len(weight.shape) == 2}))


def _check_positions(context: int, needed: int) -> None:
    if context < needed:
        raise RequestError(
            f"Each answer of the tests may need {needed} positions, and the context holds "
            f"{context}. Raise it (--context) or ask for fewer tokens."
        )


@contextmanager
def _loaded(model: str, options: dict[str, Any]) -> Iterator[tuple[str, Engine]]:
    with load(model, **options) as llm:
        yield llm.name, llm.engine


def _check_model(model: str, options: dict[str, Any], needed: int) -> None:
    """Raise the errors that `load` would raise, except for files whose tensors are damaged."""
    found = inspect_model(model, **options)
    if found.fits is False:
        raise OutOfMemoryError(found.verdict)
    _check_positions(found.context, needed)


def _random(
    subject: Subject, needed: int, max_batch: int, speculate: str
) -> AbstractContextManager[tuple[str, Engine]]:
    """Name and engine of a shape with random weights. As `open_engine`."""
    shape, format, context = subject.shape, subject.format, subject.context
    assert shape is not None
    if subject.adapter is not None:
        raise RequestError(
            "An adapter belongs to a model, and a shape has random weights. Give the model."
        )
    if format is not None and (subject.dtype or subject.quantize):
        raise RequestError("A format has dtypes of its own: give no other beside it.")
    stored = weight_dtype(subject.dtype, subject.quantize) or "bf16"
    draft = _draft(subject, shape, stored)
    gpu = choose_adapter(subject.device, subject.webgpu, subject.precision)
    if gpu.kind == "software":
        warn(software_note(gpu))
    model = build_model(shape_config(shape))
    if format not in (None, *PUBLISHED):
        raise RequestError(f"A format is one of {', '.join(PUBLISHED)}, not {format!r}.")
    published = None if format is None else PUBLISHED[format]
    plan = plan_random(model.weights(), stored, published).joined()
    positions = checked_context(model, shape, context, gpu, draft, most=DEFAULT_CONTEXT)
    if max_batch > 1 and context is None:
        positions = min(positions, max(needed, _CONTEXT))
    options = MemoryCount(model, plan, Limits.of(gpu.limits), gpu, draft=draft).fitting(
        EngineOptions(
            context=positions,
            max_batch=max_batch,
            cache_positions=_room(positions, needed, max_batch),
            kv_dtype=subject.kv_dtype,
            speculate=speculate,
            invariant=subject.invariant,
        ),
        may_shrink=("context",) if context is None and max_batch == 1 else (),
    )
    _check_positions(options.context, needed)
    return _on_random(shape, model, plan, gpu, options, draft)


def _draft(subject: Subject, shape: str, stored: str) -> Draft | None:
    """The draft model of a shape with random weights. stored: the dtype of the shape's weights."""
    check_draft_quantize(subject.draft_quantize, subject.draft)
    if subject.draft is None:
        return None
    if subject.draft == OWN_LAYER:
        smaller = _own_layer(shape)
    else:
        smaller = build_model(shape_config(subject.draft))
    plan = plan_random(smaller.weights(), subject.draft_quantize or stored).joined()
    return Draft(subject.draft, smaller, plan)


@contextmanager
def _on_random(
    shape: str,
    model: Decoder,
    plan: LoadPlan,
    gpu: AdapterInfo,
    options: EngineOptions,
    draft: Draft | None,
) -> Iterator[tuple[str, Engine]]:
    with Device(gpu) as device:
        weights = random_weights(device, plan)
        drafts = None
        if draft is not None:
            drafts = Loaded(draft.model, random_weights(device, draft.plan))
        engine = Engine(device, Loaded(model, weights), options, drafts)
        engine.runner.compile()
        device.wait()
        yield shape, engine
