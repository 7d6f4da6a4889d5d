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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from infer.bench.measure import (
    BATCH_DEPTH,
    BATCH_TOKENS,
    GREEDY,
    SAMPLED,
    EngineBench,
    Progress,
    Sizes,
    batch_positions,
    deviation,
    drafts_positions,
)
from infer.bench.report import BenchReport
from infer.calls import warn
from infer.engine.engine import Engine
from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.speculation import MAX_DRAFT
from infer.engine.steps import Loaded
from infer.hub import resolve_adapter
from infer.inspection import inspect_model
from infer.kernels.errors import OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, choose_adapter, software_note
from infer.kernels.gpu.bandwidth import copy_bandwidth
from infer.kernels.gpu.device import Device, Limits
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import KV_DTYPES, PAGE
from infer.keywords import Progress as LoadProgress
from infer.loading import DTYPES, check_draft_quantize, load, weight_dtype
from infer.memory import DEFAULT_CONTEXT, Draft, MemoryCount, checked_context
from infer.models import build_model
from infer.models.blocks.decoder import Decoder
from infer.models.loading.plan import LoadPlan, plan_random
from infer.models.loading.random_weights import random_weights
from infer.models.loading.shapes import PUBLISHED, shape_config
from infer.versions import commit, versions

OWN_LAYER = "mtp"  # the value of draft that means the model's own predicting layer
_CONTEXT = 1024  # of a shape with many answers, where nobody says more: the other tests fit


def run_bench(
    model: str | None = None,
    shape: str | None = None,
    *,
    device: str | int | None = None,
    webgpu: str | None = None,
    precision: str = "auto",
    context: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    format: str | None = None,
    kv_dtype: str = "f16",
    adapter: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    invariant: bool = False,
    prompt_tokens: int | None = None,
    prefix: float | None = None,
    decode_tokens: int | None = None,
    depths: Sequence[int] = (),
    batches: Sequence[int] = (),
    clients: Sequence[int] = (),
    accept: float | None = None,
    draft_rows: int | None = None,
    draft: str | None = None,
    draft_quantize: str | None = None,
    repeats: int | None = None,
    profile: bool = False,
    progress: Progress = lambda test, run, runs: None,
    loading: LoadProgress | None = None,
) -> BenchReport:
    """Benchmark a model, or the shape of one (a key of SHAPES) on random weights.

    model, device, webgpu, precision, context, dtype, quantize, kv_dtype, adapter, revision, offline
    and invariant are as for `load`; a shape's weights are bf16 where dtype and quantize are None,
    or packed as in checkpoints of a `format` (a key of PUBLISHED), and have no adapter.
    prompt_tokens of the prefill test, of which there is one more with a prefix: the share that is
    in the cache before; decode_tokens of every decode test, of which there is one more for each of
    `depths`, the tokens that are in the cache before it. batches: of so many answers at once, after
    as many tokens each as the depths say, or 128. clients: of so many at once, each of which sends
    `repeats` requests, one after the other: prompts of an eighth of prompt_tokens to all of them,
    answers of decode_tokens. accept: decode also with drafts, alone and in each of `batches`, of
    which each is right with this probability; draft_rows of them for each step, or None: as many as
    pay, if any. draft: the model that drafts them, or for a shape another shape, quantised or not
    as draft_quantize says, or "mtp", the model's own layer; without it nothing is run for that.
    Each test runs `repeats` times after a warm-up. What of these three is None is 512, 128 and 5,
    or as much less as keeps a slow adapter to about a minute. profile: time every kernel. progress
    is told what runs; loading: as progress of `load`. Raises RequestError and whatever `load`
    raises.
    """
    given = (prompt_tokens, decode_tokens, repeats, *depths, *batches, *clients)
    if min((n for n in given if n is not None), default=1) < 1:
        raise RequestError(
            "Counts of tokens, depths, answers, clients and repeats must be at least 1."
        )
    if accept is not None and not 0 <= accept <= 1:
        raise RequestError(f"A probability is a number from 0 to 1, not {accept}.")
    if prefix is not None and not 0 < prefix < 1:
        raise RequestError(f"A prefix is a share of the prompt between 0 and 1, not {prefix}.")
    if prefix is not None and prompt_tokens == 1:
        raise RequestError("A prompt of one token has nothing to be cached before it.")
    if draft_rows is not None and (accept is None or not 1 <= draft_rows <= MAX_DRAFT):
        raise RequestError(
            f"From 1 to {MAX_DRAFT} tokens can be drafted for a step, and it must be said how "
            "likely they are right (--accept)."
        )
    if draft is not None and accept is None:
        raise RequestError(
            "Prompts are random, so that no draft would be right: say how likely they are to be "
            "(--accept)."
        )
    if max(batches, default=1) > MAX_BATCH:
        raise RequestError(f"At most {MAX_BATCH} answers run at once, not {max(batches)}.")
    if dtype not in (None, *DTYPES) or kv_dtype not in KV_DTYPES:
        raise RequestError("Weights are f32, f16 or bf16, and the KV cache f16, f32 or q8.")
    weight_dtype(dtype, quantize)
    needed = max(prompt_tokens or 1, max(depths, default=1) + (decode_tokens or 1)) + 1
    batched = [(rows, depth) for depth in depths or [BATCH_DEPTH] for rows in batches]
    needed = max(needed, *(batch_positions(*sizes, BATCH_TOKENS) for sizes in batched), 0)
    if accept is not None:
        needed = max(needed, *(drafts_positions(*sizes, BATCH_TOKENS) for sizes in batched), 0)
        needed = max(needed, drafts_positions(1, 1, decode_tokens or Sizes().decode))
    if clients:
        most = Sizes()
        longest = prompt_tokens or most.prompt, max(2, decode_tokens or most.decode)
        needed = max(needed, sum(longest) + 1)
    max_batch = min(max([1, *batches, *clients]), MAX_BATCH)
    if context is None and needed > DEFAULT_CONTEXT:
        context = needed
    gpu = choose_adapter(device, webgpu, precision)
    if profile and "timestamp-query" not in gpu.features:
        raise RequestError(f"{gpu} has no timestamp queries: leave out --profile.")
    opened = open_engine(
        model,
        shape,
        device,
        context,
        dtype,
        kv_dtype,
        quantize,
        format,
        adapter,
        revision,
        offline,
        webgpu=webgpu,
        precision=precision,
        needed=needed,
        max_batch=max_batch,
        speculate="off"
        if accept is None
        else {None: "lookup", OWN_LAYER: "mtp"}.get(draft, "draft"),
        draft=draft,
        draft_quantize=draft_quantize,
        invariant=invariant,
        loading=loading,
    )
    lora = None if adapter is None else resolve_adapter(str(adapter), offline=True).name
    progress(f"copy bandwidth of {gpu}", 0, 0)
    with Device(gpu) as own:
        bandwidth = copy_bandwidth(own)
    progress(f"loading {model or shape}", 0, 0)
    begin = time.perf_counter()
    with opened as (name, engine):
        load_seconds = time.perf_counter() - begin
        bench = EngineBench(engine, bandwidth, repeats or 1, progress)
        sizes = bench.sizes(prompt_tokens, decode_tokens, repeats, max(depths, default=1))
        bench.repeats = sizes.repeats
        prefill = bench.prefill(sizes.prompt)
        cached = []
        if prefix is not None:
            cached = [bench.prefill(sizes.prompt, max(1, int(prefix * sizes.prompt)))]
        greedy, sampled = bench.decode(sizes.decode, 0, GREEDY, SAMPLED)
        deep = {depth: bench.decode(sizes.decode, depth, GREEDY)[0] for depth in depths}
        together = [bench.batch(rows, BATCH_TOKENS, depth) for rows, depth in batched]
        drafted = []
        if accept is not None:
            sized = [
                (1, sizes.decode, 1),
                *((rows, BATCH_TOKENS, depth) for rows, depth in batched),
            ]
            drafted = [bench.drafts(*each, accept, draft_rows) for each in sized]
        loads = [bench.load(count, sizes.prompt, sizes.decode) for count in clients]
        progress("host and GPU of a step", 0, 0)
        submit_seconds, read_seconds = bench.host_seconds()
        host_seconds = submit_seconds + read_seconds
        gpu_seconds = bench.gpu_seconds(greedy)
        profiles = []
        if profile:
            profiles = bench.profiles(prefill, {0: greedy, **deep}, host_seconds, batched)
        c, weights = engine.model.config, engine.weights.values()
        report = BenchReport(
            model=name,
            random_weights=shape is not None,
            architecture=c.model_type,
            dtype=quantize or format or _dtypes(weights),
            kv_dtype=engine.options.kv_dtype,
            parameters=sum(prod(weight.shape) for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
            context=engine.context,
            adapter=gpu.name,
            adapter_kind=gpu.kind,
            backend=gpu.backend,
            driver=gpu.driver,
            versions=versions(gpu.webgpu),
            commit=commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            copy_bandwidth=bandwidth,
            rows=(prefill, *cached, greedy, sampled, *deep.values(), *together, *drafted),
            ttft_seconds=(statistics.fmean(prefill.seconds), deviation(prefill.seconds)),
            sampled_share=sampled.tps / greedy.tps,
            host_seconds=host_seconds,
            peak_bytes=engine.device.memory_stats().peak,
            load_seconds=load_seconds,
            lora=lora,
            draft=draft and f"{draft}{f' {draft_quantize}' if draft_quantize else ''}",
            invariant=invariant,
            precision=precision,
            products=engine.runner.products,
            webgpu=gpu.webgpu,
            dispatches=len(bench.greedy_step.dispatches),
            submit_seconds=submit_seconds,
            gpu_seconds=gpu_seconds,
            profiles=tuple(profiles),
            loads=tuple(loads),
        )
    return report


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
    model: str | None,
    shape: str | None,
    device: str | int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    kv_dtype: str = "f16",
    quantize: str | None = None,
    format: str | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    *,
    webgpu: str | None = None,
    precision: str = "auto",
    needed: int = 2,
    max_batch: int = 1,
    speculate: str = "off",
    draft: str | None = None,
    draft_quantize: str | None = None,
    invariant: bool = False,
    loading: LoadProgress | None = None,
) -> AbstractContextManager[tuple[str, Engine]]:
    """Name and engine of a model, or of a shape on random weights; closed at the end of `with`.

    As for `run_bench`. needed: positions that the context must hold, and the cache for each of
    `max_batch` answers. What can be checked before anything is allocated is checked at once. Raises
    RequestError, also unless one of model and shape is given, and whatever `load` raises.
    """
    if model is not None and shape is None and format is None:
        options = {
            "device": device,
            "webgpu": webgpu,
            "precision": precision,
            "context": context,
            "dtype": dtype,
            "quantize": quantize,
            "kv_dtype": kv_dtype,
            "draft": None if draft == OWN_LAYER else draft,
            "draft_quantize": draft_quantize,
            "adapter": adapter,
            "revision": revision,
            "offline": offline,
        }
        _check_model(model, options, needed)
        room = {"cache_positions": _room(context or DEFAULT_CONTEXT, needed, max_batch)}
        own = {"progress": loading, "max_batch": max_batch, "speculate": speculate, "engine": room}
        own["invariant"] = invariant
        return _loaded(model, options | own)
    if shape is not None and model is None:
        if adapter is not None:
            raise RequestError(
                "An adapter belongs to a model, and a shape has random weights. Give the model."
            )
        if format is not None and (dtype or quantize):
            raise RequestError("A format has dtypes of its own: give no other beside it.")
        stored = weight_dtype(dtype, quantize) or "bf16"
        check_draft_quantize(draft_quantize, draft)
        drafts = None
        if draft is not None:
            smaller = _own_layer(shape) if draft == OWN_LAYER else build_model(shape_config(draft))
            plan = plan_random(smaller.weights(), draft_quantize or stored).joined()
            drafts = Draft(draft, smaller, plan)
        sizes = needed, max_batch, speculate, invariant
        gpu = choose_adapter(device, webgpu, precision)
        if gpu.kind == "software":
            warn(software_note(gpu))
        return _random(shape, gpu, context, stored, kv_dtype, format, *sizes, drafts)
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
    shape: str,
    gpu: AdapterInfo,
    context: int | None,
    dtype: str,
    kv_dtype: str,
    format: str | None,
    needed: int,
    max_batch: int,
    speculate: str,
    invariant: bool,
    draft: Draft | None,
) -> AbstractContextManager[tuple[str, Engine]]:
    """Name and engine of a shape with random weights."""
    model = build_model(shape_config(shape))
    if format not in (None, *PUBLISHED):
        raise RequestError(f"A format is one of {', '.join(PUBLISHED)}, not {format!r}.")
    published = None if format is None else PUBLISHED[format]
    plan = plan_random(model.weights(), dtype, published).joined()
    positions = checked_context(model, shape, context, gpu, draft, most=DEFAULT_CONTEXT)
    if max_batch > 1 and context is None:
        positions = min(positions, max(needed, _CONTEXT))
    options = MemoryCount(model, plan, Limits.of(gpu.limits), gpu, draft=draft).fitting(
        EngineOptions(
            context=positions,
            max_batch=max_batch,
            cache_positions=_room(positions, needed, max_batch),
            kv_dtype=kv_dtype,
            speculate=speculate,
            invariant=invariant,
        ),
        may_shrink=("context",) if context is None and max_batch == 1 else (),
    )
    _check_positions(options.context, needed)
    return _on_random(shape, model, plan, gpu, options, draft)


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
