"""`infer.load`: finds the files of a model by its name, opens a GPU and loads the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from infer.boundaries import checked, shown
from infer.calls import check_names, warn
from infer.embedding import EmbeddingConfig, read_embedding_config
from infer.engine.engine import Engine
from infer.engine.host_memory import HostMemory
from infer.engine.isolated import WorkerEngine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.generation_config import notes, sampling_defaults
from infer.hub import ResolvedModel, resolve, resolve_adapter
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.adapters import check_precision, choose_adapter, software_note
from infer.kernels.gpu.device import Device, Settings, enough_threads
from infer.kernels.gpu.tensor import QUANTIZED, GpuTensor
from infer.kernels.state.kv_cache import KV_DTYPES
from infer.keywords import LOAD_NAMES, AnswerOptions, Progress
from infer.llm import LLM
from infer.memory import (
    DEFAULT_CONTEXT,
    Draft,
    MemoryCount,
    cache_positions,
    checked_context,
)
from infer.models import open_model
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.mtp import find_predictor
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.load import load_weights
from infer.models.loading.lora import Lora, Loras
from infer.models.loading.plan import LoadPlan, plan_weights
from infer.progress import ProgressLine, parse_size
from infer.text.chat import own_template
from infer.text.folder_tokenizer import open_tokenizer, read_json
from infer.text.tokenizer import Tokenizer

DTYPES = ("f32", "f16", "bf16")


@checked((), (*AnswerOptions.__optional_keys__, "params", "n"), "generate()")
def load(
    model: str | Path,
    *,
    device: str | int | None = None,
    webgpu: str | None = None,
    precision: str = "auto",
    context: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_dtype: str = "f16",
    max_batch: int | None = None,
    cache_memory: int | str | None = None,
    host_cache: int | str | None = None,
    invariant: bool = False,
    speculate: str | None = None,
    draft: str | Path | None = None,
    draft_quantize: str | None = None,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    isolate: bool = False,
    host_memory: HostMemory | None = None,
    progress: bool | Progress | None = None,
    settings: Settings | None = None,
    engine: Mapping[str, Any] | None = None,
) -> LLM:
    """Load a model onto a GPU.

    model: a hub id ("HuggingFaceTB/SmolLM2-135M-Instruct") or its URL, a GGUF model there
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "org/name/file.gguf"), a folder, a .gguf file, or "demo".
    device: the index of an adapter, or part of its name. None: INFER_DEVICE, or the best one.
    webgpu: the library that runs the kernels, "wgpu-native" or "dawn". None: INFER_WEBGPU, or
        wgpu-native.
    precision: "auto" multiplies many rows, as of a prompt, in f16 with sums in f32, where the
        library and the GPU have matrices for that (tensor cores); "f32" never does, which is
        slower.
    context: the most positions of a prompt and its answer. None: the model's own, but at most
        131,072 (8,192 on a software adapter), or less if that does not fit. Memory for 8,192 is
        taken at first; more as it is used.
    dtype: convert the matrices to "f32", "f16" or "bf16". None: keep them as they are.
    quantize: quantise the matrices to 8 or 4 bits instead: "q8" or "q4".
    kv_dtype: of keys and values: "f16", "f32" or "q8" (8 bits, and a scale for 32 values).
    max_batch: the most answers generated at once, up to 64; others wait. None: 8, or 4 on a
        software adapter, or 1 if no more fit.
    cache_memory: bytes for the keys and values of all answers, enough for one context, as a number
        or as a text such as "1GiB" or "500MB". None: one context, and 1,024 positions for each
        further answer.
    host_cache: bytes of host memory, in the same forms, for what the cache on the GPU has no room
        for: prompts go on from there where that is faster than computing. With `isolate` it
        outlives the process of the engine. None: none.
    invariant: on one device an answer is the same to the last bit, alone or among others, whoever
        comes and goes, and whatever the cache holds. Slower, prefill above all.
    speculate: draft tokens and verify several in one step; only the speed changes. "lookup" drafts
        what followed the same tokens earlier in prompt or answer. "mtp" drafts with the model's own
        layer for that, if the checkpoint has one. "draft" drafts with `draft`. "auto" uses the best
        of these that is there, as far as it is measured to be faster. "off" drafts nothing. None:
        "auto" with a draft model, else "off".
    draft: a smaller model with the same tokenizer that drafts tokens, such as "demo-draft".
    draft_quantize: "q8" or "q4", for the draft model alone. None: dtype and quantize hold for both,
        unless the draft model's files are quantised already.
    adapter: a LoRA adapter (a folder or a hub id) that is always on. It is merged into the weights
        before they are quantised, or applied beside weights that the files have quantised.
    adapters: LoRA adapters by names of your choice, applied beside the weights. Each call chooses
        one of them, or none (`generate(..., adapter=name)`).
    chat_template: the file of a chat template (Jinja), or its source, in place of all that the
        model's files have. A text with a brace in it is a source.
    revision, offline: see `infer.hub.resolve`.
    isolate: use the GPU in a process of its own. If that ends, by a lost GPU or exhausted memory,
        it is started again and goes on with the answers that it had.
    host_memory: memory in place of `host_cache` that several models share, and that outlives them:
        infer.engine.host_memory.HostMemory(bytes).
    progress: whether a line on standard error shows the progress. None: in a terminal or a notebook
        only. Or a function, called with "download", bytes that came, and bytes of all files begun;
        with "weights", bytes read, and all bytes; meanwhile and afterwards with "kernels", how many
        are compiled, and how many there are.
    engine: other fields of EngineOptions.

    Raises ModelError, TokenizerError, DeviceError, RequestError, OutOfMemoryError. Warns with an
    InferWarning of an adapter that is software, of what generation_config.json asks for and is not
    implemented, and where the files of a model contradict each other.
    """
    if not (engine is None or isinstance(engine, Mapping)) or not all(
        isinstance(name, str) for name in engine or ()
    ):
        raise RequestError(
            'engine must be a dictionary of options, such as {"fuse": False}, '
            f"not {shown(engine)}."
        )
    check_names(engine or (), _ENGINE_NAMES, LOAD_NAMES, "load()")
    converted = weight_dtype(dtype, quantize)
    check_draft_quantize(draft_quantize, draft)
    _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
    check_precision(precision)
    host_bytes = _memory("host_cache", host_cache)
    if host_memory is not None:
        if host_bytes is not None:
            raise RequestError("Give either `host_cache` or `host_memory`.")
        host_bytes = host_memory.capacity
    template = None if chat_template is None else own_template(chat_template)
    with ProgressLine(False if callable(progress) else progress) as line:
        report = progress if callable(progress) else line.loading
        fetched = partial(report, "download")
        resolved = resolve(str(model), revision=revision, offline=offline, progress=fetched)
        drafted = None
        if draft is not None:
            drafted = resolve(str(draft), offline=offline, progress=fetched)
        if isolate:
            asked: dict[str, Any] = {
                "device": device,
                "webgpu": webgpu,
                "precision": precision,
                "context": context,
                "dtype": dtype,
                "quantize": quantize,
                "kv_dtype": kv_dtype,
                "max_batch": max_batch,
                "cache_memory": cache_memory,
                "host_cache": host_bytes,
                "invariant": invariant,
                "speculate": speculate,
                "draft_quantize": draft_quantize,
                "settings": settings,
                "engine": engine,
            }
            if drafted is not None:
                asked["draft"] = drafted.path.absolute()
            one, several = find_adapters(adapter, adapters, offline, fetched)
            asked["adapter"] = None if one is None else one.path.absolute()
            paths = {name: found.path.absolute() for name, found in several.items()}
            asked["adapters"] = paths or None
            return _isolated(resolved, asked, template, report, host_memory)
        always, named = open_adapters(adapter, adapters, offline, fetched)
        gpu = choose_adapter(device, webgpu, precision)
        if gpu.kind == "software":
            warn(software_note(gpu))
        way = way_to_speculate(speculate, draft)
        drafts = way if draft is None else "draft"
        files = _Files.open(resolved, converted, always, named, drafts, template)
        if drafted is not None:
            of = files.name, files.tokenizer
            files = replace(files, draft=open_draft(drafted, converted, draft_quantize, *of))
        usual = _SOFTWARE_BATCH if gpu.kind == "software" else _BATCH
        more = dict(engine or {})
        positions, held = more.get("cache_positions"), _memory("cache_memory", cache_memory)
        if positions is None and held is not None:
            counted = EngineOptions(
                context=files.model.config.max_position_embeddings,
                max_batch=usual if max_batch is None else max_batch,
                host_cache=host_bytes or 0,
                kv_dtype=kv_dtype,
                prefill_chunk=more.get("prefill_chunk", EngineOptions.prefill_chunk),
            )
            drafting = None if files.draft is None else files.draft.model
            positions = cache_positions(held, files.model, drafting, counted)
        of_model = files.model, files.name, context, gpu, files.draft
        asked = {
            "context": checked_context(*of_model, most=positions),
            "max_batch": usual if max_batch is None else max_batch,
            "cache_positions": positions,
            "host_cache": host_bytes or 0,
            "kv_dtype": kv_dtype,
            "invariant": invariant,
            "speculate": way,
        }
        options = EngineOptions(**asked | more)
        own = tuple(n for n, v in (("context", context), ("max_batch", max_batch)) if v is None)
        fill = partial(files.fill, options, may_shrink=own)
        llm = _Thread(partial(Device, gpu, settings), fill).result(report)
        if host_memory is not None:
            llm.engine.share(host_memory)
            llm.engine.restoring.is_outlived = True
        return llm


def way_to_speculate(speculate: str | None, draft: str | Path | None) -> str:
    """The way in which tokens are drafted, given whether there is a draft model. Raises
    RequestError if the two do not go together."""
    if speculate is None:
        return "off" if draft is None else "auto"
    if draft is not None and speculate in ("off", "lookup", "mtp"):
        raise RequestError(
            f'`speculate="{speculate}"` is given, and a draft model ({draft}), which drafts in '
            "place of that. Leave one of the two out."
        )
    if draft is None and speculate == "draft":
        raise RequestError(
            '`speculate="draft"` is given, and there is no model to draft with. Give one with the '
            "same tokenizer (`draft`), or take lookup, mtp or auto."
        )
    return speculate


def check_options(
    *,
    context: int | None,
    dtype: str | None,
    quantize: str | None,
    kv_dtype: str,
    max_batch: int | None,
    speculate: str | None,
    draft: str | Path | None,
    draft_quantize: str | None,
    precision: str,
    **_: Any,
) -> None:
    """Check options of `load` as far as that needs no model, for programs that load one later.
    Raises RequestError and UnsupportedError."""
    weight_dtype(dtype, quantize)
    check_draft_quantize(draft_quantize, draft)
    _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
    check_precision(precision)
    EngineOptions(
        context=DEFAULT_CONTEXT if context is None else context,
        max_batch=_BATCH if max_batch is None else max_batch,
        speculate=way_to_speculate(speculate, draft),
    )


def check_draft_quantize(quantize: str | None, draft: str | Path | None) -> None:
    """Raises UnsupportedError for an unknown format, and RequestError without a draft model."""
    _check_choice("draft_quantize", quantize, (None, *QUANTIZED))
    if quantize is not None and draft is None:
        raise RequestError(
            f'`draft_quantize="{quantize}"` is given, and there is no draft model. Give one '
            "with the same tokenizer (`draft`), or leave it out."
        )


_BATCH, _SOFTWARE_BATCH = 8, 4  # answers at once, where nobody says how many


def _memory(name: str, value: int | str | None) -> int | None:
    """Returns the bytes of an option's value, which may be a text; None for None. Raises
    RequestError for a value that is no amount of memory."""
    if value is None:
        return None
    held = parse_size(value) if isinstance(value, str) else value
    if type(held) is not int or held < 1:
        raise RequestError(
            f"`{name}` is a number of bytes, or a text such as 1GiB, not {shown(value)}."
        )
    return held


_ENGINE_NAMES = {option.name for option in fields(EngineOptions)} - set(LOAD_NAMES)


def _isolated(
    resolved: ResolvedModel,
    options: Mapping[str, Any],
    template: str | None,
    progress: Progress,
    memory: HostMemory | None,
) -> LLM:
    """An LLM whose engine is in a process of its own, which sees token ids alone."""
    path = resolved.path.absolute()  # whatever folder is the current one at a restart
    engine = WorkerEngine(path, options, memory)
    try:
        tokenizer = open_tokenizer(path, template)  # meanwhile
        embedding = read_embedding_config(path)
        generation_config = read_json(path / "generation_config.json")
        engine.load(progress)
        defaults = sampling_defaults(generation_config, engine.vocab_size)
        for text in engine.notes:
            warn(text)
        return LLM(resolved.name, engine, tokenizer, defaults, embedding, engine.summary)
    except BaseException:
        engine.close()
        raise


def find_adapters(
    adapter: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    offline: bool,
    progress: Callable[[int, int], None],
) -> tuple[ResolvedModel | None, dict[str, ResolvedModel]]:
    """The adapter that is always on, and those that are chosen by name. Raises ModelError, and
    RequestError where both are given."""
    if adapter is not None and adapters:
        raise RequestError(
            "Give either one adapter that is always on (`adapter`) or several by name (`adapters`)."
        )

    if not isinstance(adapters or {}, Mapping) or not all(
        isinstance(name, str) and name for name in adapters or ()
    ):
        raise RequestError(
            'Give adapters as a dictionary, such as {"sql": "org/sql-lora"}: names of adapters, '
            "none of them empty, and their folders or hub ids."
        )

    def found(place: str | Path) -> ResolvedModel:
        return resolve_adapter(str(place), offline=offline, progress=progress)

    named = {name: found(place) for name, place in (adapters or {}).items()}
    return None if adapter is None else found(adapter), named


def open_adapters(
    adapter: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    offline: bool,
    progress: Callable[[int, int], None],
) -> tuple[Lora | None, dict[str, Lora]]:
    """Find the LoRA adapters and read their files: the one that is always on, and those that are
    chosen by name. Raises as `find_adapters`, and ModelError for files that are damaged."""

    def opened(found: ResolvedModel) -> Lora:
        return Lora.open(found.path, found.name)

    one, several = find_adapters(adapter, adapters, offline, progress)
    named = {name: opened(found) for name, found in several.items()}
    return None if one is None else opened(one), named


def open_draft(
    found: ResolvedModel, dtype: str | None, quantize: str | None, name: str, tokenizer: Tokenizer
) -> Draft:
    """Returns what is read of a draft model. name: the model that it drafts for. dtype: the dtype
    that this model is converted to. quantize: the dtype that the draft is quantised to. Raises
    UnsupportedError where the draft has another tokenizer, and ModelError."""
    model, checkpoint = open_model(found.path)
    differs = tokenizer.difference(open_tokenizer(found.path))
    if differs is not None:
        token, text, other = differs
        raise UnsupportedError(
            f"{found.name} cannot draft for {name}: its tokenizer is another one. Token {token} "
            f"is {shown(other)} in it, and {shown(text)} here. Give a smaller model of the same "
            "family."
        )
    stored = dtype if quantize is None and checkpoint.format is None else quantize
    plan = plan_weights(model.weights(), checkpoint, stored, model.ignorable).joined()
    return Draft(found.name, model, plan)


def open_predictor(
    name: str, model: Decoder, checkpoint: Checkpoint, dtype: str | None, speculate: str
) -> Draft | None:
    """Returns what is read of the model's own layer that predicts further tokens, if that is to
    draft; otherwise None. dtype: as for `plan_weights`. Raises UnsupportedError where `speculate`
    asks for such a layer and there is none."""
    if speculate not in ("mtp", "auto"):
        return None
    predictor = find_predictor(model, [*checkpoint.tensors, *checkpoint.packed])
    if predictor is None:
        if speculate == "auto":
            return None
        raise UnsupportedError(
            f'`speculate="mtp"` is given, and {name} has no layer that predicts further tokens. '
            "Take auto or lookup, or give a draft model (`draft`)."
        )
    plan = plan_weights(predictor.weights(), checkpoint, dtype, lambda key: True)
    return Draft(name, predictor, plan.joined())


@dataclass(frozen=True)
class _Files:
    """A model and its adapters as read before there is a device: all but the weights."""

    name: str
    model: Decoder
    plan: LoadPlan
    loras: Loras
    tokenizer: Tokenizer
    defaults: Mapping[str, Any]
    embedding: EmbeddingConfig
    draft: Draft | None = None

    @classmethod
    def open(
        cls,
        resolved: ResolvedModel,
        dtype: str | None,
        always: Lora | None,
        named: Mapping[str, Lora],
        speculate: str = "off",
        template: str | None = None,
    ) -> _Files:
        """speculate: one of WAYS. template: as for `open_tokenizer`. Raises ModelError and
        TokenizerError; warns the caller of `load` of what is not implemented."""
        path = resolved.path
        model, checkpoint = open_model(path, predicts=speculate in ("mtp", "auto"))
        tokenizer = open_tokenizer(path, template)
        generation_config = read_json(path / "generation_config.json")
        defaults = sampling_defaults(generation_config, model.config.vocab_size)
        for text in (*checkpoint.notes, *notes(generation_config)):
            warn(text)
        plan = plan_weights(model.weights(), checkpoint, dtype, model.ignorable)
        loras = Loras.fit(model, plan, always=always, named=named)
        plan = plan.joined(loras.names)
        embedding = read_embedding_config(path)
        draft = open_predictor(resolved.name, model, checkpoint, dtype, speculate)
        return cls(resolved.name, model, plan, loras, tokenizer, defaults, embedding, draft)

    def fill(
        self,
        options: EngineOptions,
        device: Device,
        progress: Progress,
        *,
        may_shrink: Sequence[str],
    ) -> LLM:
        """Read the weights onto a device, while the kernels of the engine are compiled.
        may_shrink: the options that may be less where they do not fit."""
        count = MemoryCount(
            self.model, self.plan, device.limits, device.adapter, self.loras, self.draft
        )
        fitting = count.fitting(options, may_shrink=may_shrink)
        started: list[tuple[Engine, Future[None]]] = []
        draft = None if self.draft is None else self.draft.load(device, progress)

        def allocated(weights: dict[str, GpuTensor]) -> None:
            beside = self.loras.allocate(device, weights)
            engine = Engine(device, Loaded(self.model, weights, beside), fitting, draft)
            with enough_threads():
                started.append(
                    (engine, thread.submit(engine.runner.compile, partial(progress, "kernels")))
                )
            self.loras.fill(device, weights, beside)

        # Kernels are compiled while the weights are read, which leaves most of the CPU idle.
        with ThreadPoolExecutor(1) as thread:
            try:
                load_weights(
                    device,
                    self.plan,
                    changes=self.loras.merged,
                    allocated=allocated,
                    progress=partial(progress, "weights"),
                )
            except BaseException:
                device.stop()  # compiling
                raise
        ((engine, compiled),) = started
        compiled.result()
        engine.runner.weights_are_read()
        summary = self.plan.summary
        return LLM(self.name, engine, self.tokenizer, self.defaults, self.embedding, summary)


class _Thread:
    """A device being opened and filled in a thread of its own. What signals raise, as Ctrl-C does,
    comes in the main thread between any two instructions; what it cut in half there would be lost
    with its memory and its threads."""

    def __init__(
        self,
        open_device: Callable[[], Device],
        fill: Callable[[Device, Progress], LLM],
    ) -> None:
        self._open, self._fill = open_device, fill
        self._reports = SimpleQueue[tuple[str, int, int] | None]()  # of progress; None: the end
        self._device: Device | None = None
        self._cancelled = False
        self._llm: LLM | None = None
        self._error: BaseException | None = None

    def result(self, progress: Progress) -> LLM:
        """The LLM. `progress` is called in this thread. Whatever is raised closes the device."""
        thread = threading.Thread(target=self._run, name="load")
        try:
            with enough_threads():
                thread.start()
            while (report := self._next_report()) is not None:
                progress(*report)
            thread.join()
            if self._error is not None:
                raise self._error
            assert self._llm is not None
            return self._llm
        except BaseException:
            self._cancelled = True
            if self._device is not None:
                self._device.stop()
            if thread.is_alive():
                thread.join()
            if self._llm is not None:
                self._llm.close()
            raise
        finally:
            self._error = None  # whose traceback holds this object

    def _next_report(self) -> tuple[str, int, int] | None:
        while True:
            with suppress(Empty):
                return self._reports.get(timeout=0.5)  # without one, Ctrl-C waits on Windows

    def _run(self) -> None:
        try:
            self._llm = self._opened_and_filled()
        except BaseException as error:
            self._error = error
        finally:
            self._reports.put(None)

    def _opened_and_filled(self) -> LLM:
        device = self._device = self._open()
        try:
            if self._cancelled:
                device.stop()
            llm = self._fill(device, lambda *report: self._reports.put(report))
            device.check_open()
            return llm
        except BaseException:
            device.close()
            raise


def weight_dtype(dtype: str | None, quantize: str | None) -> str | None:
    """Returns the dtype that matrices are converted or quantised to; None: they stay as they are.
    Raises UnsupportedError for an unknown word, and RequestError where both are given."""
    _check_choice("dtype", dtype, (None, *DTYPES))
    _check_choice("quantize", quantize, (None, *QUANTIZED))
    if dtype is not None and quantize is not None:
        raise RequestError(
            f'Weights are either converted (`dtype="{dtype}"`) or quantised '
            f'(`quantize="{quantize}"`). '
            "Give one of the two."
        )
    return dtype or quantize


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        shown = ", ".join(str(choice) for choice in choices if choice is not None)
        raise UnsupportedError(f"`{name}` must be one of {shown}, not {value!r}.")
