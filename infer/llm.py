"""The API: load a model, generate text."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import signature
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Never, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.engine import Engine, EngineOptions, Timings
from infer.foreign import shown
from infer.generation_config import notes, sampling_defaults
from infer.hub import ResolvedModel, resolve, resolve_adapter
from infer.kernels.errors import ClosedError, InferWarning, RequestError, UnsupportedError
from infer.kernels.gpu.adapters import AdapterInfo, check_process, choose_adapter, is_forked
from infer.kernels.gpu.device import Device, MemoryStats, Settings, enough_threads
from infer.kernels.gpu.tensor import QUANTIZED, GpuTensor
from infer.kernels.state.kv_cache import KV_DTYPES
from infer.keywords import AnswerOptions, LoadOptions, Options, Progress, check_names
from infer.memory import checked_context, fitting_options
from infer.models import open_model
from infer.models.loading.load import load_weights
from infer.models.loading.lora import Lora, Loras
from infer.models.loading.plan import plan_weights
from infer.sampling import LogitsProcessor, SamplingOptions, SamplingParams, logprobs
from infer.text.detokenizer import StopStrings, StreamingDetokenizer
from infer.text.tokenizer import Tokenizer, read_json

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class TopLogprob:
    """A token that may come next, and the log probability that it does: of the model itself, before
    any filter or penalty. text: as the token stands within a text, where it is special by its name,
    and U+FFFD for a part of a character."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True)
class TokenLogprob(TopLogprob):
    """The same of the token that was chosen. top: the most probable in its place, best first."""

    top: tuple[TopLogprob, ...]


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream, which prints as its text: what is now certain (perhaps nothing), and the
    token that led to it (None in the last piece, when text was held back). logprob is there when
    asked for."""

    text: str
    token_id: int | None
    logprob: TokenLogprob | None = None

    def __str__(self) -> str:
        return self.text


@dataclass
class Result:
    """A whole generation, which prints as its text.

    token_ids: without the id that ended it. finish_reason: "stop" (an end-of-turn id or a stop
    string), "length" (max_tokens, or the context is full) or "cancelled" (closed before its end).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    logprobs: list[TokenLogprob] | None = None
    prompt_tokens: int = 0
    timings: Timings = field(default_factory=Timings)

    def __str__(self) -> str:
        return self.text

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens computed per second, up to the first token that was generated."""
        t = self.timings
        return t.prefilled_tokens / t.prefill_seconds if t.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first one."""
        t = self.timings
        return t.decoded_tokens / t.decode_seconds if t.decode_seconds else 0.0


class Stream(Iterator[Chunk]):
    """Text as it is generated. Iterate it to its end, close it, or drop it: each frees the model
    for the next. `result` holds what has been generated so far, and in the end everything. Threads
    may share it: each piece goes to one of them."""

    def __init__(self, llm: LLM, chunks: Iterator[Chunk], result: Result) -> None:
        self._llm, self.result = llm, result
        self._chunks = llm._served(weakref.ref(self), chunks)
        self._turn = threading.Lock()  # of the thread that runs or closes `_chunks`
        self._closed = False
        self._error: ClosedError | None = None  # what closed it, if the reader does not know
        self._keeps: object = None  # what lives as long as it is open

    def __next__(self) -> Chunk:
        if not self._closed:
            llm, thread = self._llm, threading.get_ident()
            llm._check_thread(self)
            try:
                llm._inside.add(thread)
                with self._turn:
                    if not self._closed:  # while this waited
                        return next(self._chunks)
            except BaseException:
                self._closed = True
                raise
            finally:
                llm._inside.discard(thread)
                if self._closed:
                    self.close()
                if llm._closing:
                    llm.close()
        error, self._error = self._error, None
        raise error or StopIteration

    def close(self) -> None:
        """End the stream. Safe at any time, in any thread, in a signal handler and in a logits
        processor, and twice. A piece that is being made meanwhile is the last one."""
        self._closed = True
        if not self._turn.locked():  # else the `__next__` that has it comes here at its end
            with self._turn:
                self._chunks.close()
                self._keeps = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LLM:
    """A loaded model. Made by `load`; use it in `with`, or close it.

    It serves one stream at a time: a second from another thread waits, one from the thread that has
    a stream open is refused. Several LLMs, and several devices, live side by side.
    """

    def __init__(
        self, name: str, engine: Engine, tokenizer: Tokenizer, defaults: Mapping[str, Any]
    ) -> None:
        self.name, self.engine, self.tokenizer, self.defaults = name, engine, tokenizer, defaults
        self.config = engine.model.config
        self.device = engine.device
        self._lock = threading.Lock()  # of the stream, or the call, that is served
        self._owner: int | None = None  # the thread that has begun it
        self._active: weakref.ref[Stream] | None = None  # a dropped stream must end
        self._inside: set[int] = set()  # threads that are in the middle of a call
        self._closing = False

    @property
    def context(self) -> int:
        """Positions that a prompt and its answer may take."""
        return self.engine.context

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that a call can choose."""
        return tuple(name for name in self.engine.adapters if name is not None)

    # Generating

    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Result:
        """The whole answer to a prompt.

        prompt: text to be continued, token ids, or chat messages ({"role", "content"}), which go
        through the model's chat template. options: as for `stream`.
        """
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def chat(self, messages: str | Sequence[Message], **options: Unpack[AnswerOptions]) -> Result:
        """The answer to chat messages, or to one user message given as text. options: as for
        `stream`."""
        return self.generate(_messages(messages), **options)

    def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        logits_processor: LogitsProcessor | None = None,
        template_args: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The answer piece by piece.

        sampling: the fields of SamplingParams (or give `params`); what is left out comes from the
        model's generation_config.json, else greedy. logits_processor: numpy function of (ids so
        far, logits [vocab]) that returns the logits to choose from; slower, because the logits come
        to the host for every token. template_args: for the chat template (enable_thinking, …).
        adapter: the name of one of `adapters`.

        Raises RequestError at once for a prompt or a value that cannot be served.
        """
        self._check_open()
        check_names(sampling, AnswerOptions.__optional_keys__, _LOAD_NAMES, "load()")
        self.engine.check_adapter(adapter)
        _check_processor(logits_processor)
        params = _params(params, sampling)
        _check_template_args(template_args)
        ids = self.encode(prompt, **(template_args or {}))
        self.engine.check_prompt(ids)
        params = params.resolved(self.defaults, len(ids))
        params.check_bias(self.engine.vocab_size)
        result = Result(prompt_tokens=len(ids))
        chunks = self._generate(ids, params, logits_processor, adapter, result)
        return Stream(self, chunks, result)

    def encode(self, prompt: Prompt, /, **template_args: Any) -> list[int]:
        """The token ids of a prompt, as `generate` takes it."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        several = isinstance(prompt, Iterable) and getattr(prompt, "ndim", 1) > 0
        if several and not isinstance(prompt, Mapping | bytes | bytearray | memoryview):
            items: list[Any] = list(prompt)
            if items and all(isinstance(item, Mapping) for item in items):
                return self.tokenizer.encode_chat(items, **template_args)
            if all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in items):
                return [int(item) for item in items]
        raise RequestError("A prompt is text, a list of token ids, or a list of chat messages.")

    def decode(self, ids: int | Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, or of one; bytes that are not UTF-8 become U+FFFD. Raises
        RequestError for what is no id of the model's."""
        listed = list(ids) if isinstance(ids, Iterable) else [ids]
        for i in listed:
            if not (isinstance(i, int | np.integer) and 0 <= i < self.engine.vocab_size):
                raise RequestError(
                    f"Token ids are integers from 0 to {self.engine.vocab_size - 1}, not {i!r}."
                )
        return self.tokenizer.decode(list(map(int, listed)), skip_special_tokens)

    def logits(self, prompt: Prompt, *, adapter: str | None = None) -> NDArray[np.float32]:
        """The logits after every token of a prompt, [tokens, vocab_size]: for scoring."""
        self._check_open()
        self.engine.check_adapter(adapter)
        ids = self.encode(prompt)
        self._check_thread(None)
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            with self._lock:
                self._check_open()
                return np.concatenate(list(self.engine.score(ids, adapter)))
        finally:
            self._inside.discard(thread)
            if self._closing:
                self.close()

    def _generate(
        self,
        ids: list[int],
        params: SamplingParams,
        logits_processor: LogitsProcessor | None,
        adapter: str | None,
        result: Result,
    ) -> Iterator[Chunk]:
        detokenizer, stop = StreamingDetokenizer(self.tokenizer, ids), StopStrings(params.stop)
        stop_ids = sorted(self.tokenizer.eos_token_ids)
        n_logprobs = params.logprobs
        result.logprobs = None if n_logprobs is None else []
        steps = self.engine.generate(
            ids,
            params,
            stop_ids=stop_ids,
            with_logits=n_logprobs is not None,
            logits_processor=logits_processor,
            adapter=adapter,
        )
        try:
            for step in steps:
                result.timings = self.engine.timings
                if step.token in stop_ids:
                    result.finish_reason = "stop"
                    break
                logprob = None
                if n_logprobs is not None and step.logits is not None:
                    own, best = logprobs(step.logits, step.token, n_logprobs)
                    text_of = self.tokenizer.token_text
                    top = tuple(TopLogprob(i, value, text_of(i)) for i, value in best)
                    logprob = TokenLogprob(step.token, own, text_of(step.token), top)
                    assert result.logprobs is not None
                    result.logprobs.append(logprob)
                result.token_ids.append(step.token)
                text = stop.add(detokenizer.add(step.token))
                result.text += text
                if stop.hit is not None:
                    result.finish_reason = "stop"
                    yield Chunk(text, step.token, logprob)
                    return
                yield Chunk(text, step.token, logprob)
            else:
                result.finish_reason = "length"
            text = stop.add(detokenizer.finish())
            if stop.hit is None:
                text += stop.finish()
            else:
                result.finish_reason = "stop"
            result.text += text
            if text:
                yield Chunk(text, None)
        finally:
            steps.close()  # type: ignore[attr-defined]

    # One stream at a time

    def _served(
        self, stream: weakref.ref[Stream], chunks: Iterator[Chunk]
    ) -> Generator[Chunk, None, None]:
        """The chunks, for which this LLM is there from the first one to the end."""
        with self._lock:
            self._active, self._owner = stream, threading.get_ident()
            try:
                self._check_open()
                yield from chunks
            finally:
                self._owner = self._active = None

    def _check_thread(self, stream: Stream | None) -> None:
        """Raises RequestError for a call, or the next piece of a stream, for which this thread
        would wait for itself; and DeviceError in a process that was forked."""
        check_process()
        thread = threading.get_ident()
        active = None if self._active is None else self._active()
        own = stream is not None and active is stream
        if thread in self._inside or (self._owner == thread and not own):
            raise RequestError(
                "This LLM is in the middle of another stream of this thread. Read that one to its "
                "end or close() it first, or load() the model a second time."
            )

    # End

    def memory_stats(self) -> MemoryStats:
        """GPU memory of this model's device."""
        return self.device.memory_stats()

    def close(self) -> None:
        """Free the GPU memory. A stream that is open ends: in another thread with a ClosedError at
        its next token. Safe at any time, in any thread, and twice. In a signal handler or a logits
        processor that came in the middle of a call, the memory is freed when that call returns."""
        self._closing = True
        if is_forked():
            return
        thread = threading.get_ident()
        active = None if self._active is None else self._active()
        if active is not None:
            if self._owner != thread:
                active._error = ClosedError("The LLM was closed in the middle of this stream.")
            active.close()
        if thread in self._inside:  # that call comes here at its end
            return
        try:
            self._inside.add(thread)
            with self._lock:
                self.device.close()
        finally:
            self._inside.discard(thread)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        check_process()
        if self._closing:
            raise ClosedError("This LLM has been closed. Load the model again.")


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


DTYPES = ("f32", "f16", "bf16")


def load(
    model: str | Path,
    *,
    device: str | int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_dtype: str = "f16",
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: bool | Progress | None = None,
    settings: Settings | None = None,
    engine: Mapping[str, Any] | None = None,
    **unknown: Never,
) -> LLM:
    """Load a model onto a GPU.

    model: a hub id ("HuggingFaceTB/SmolLM2-135M-Instruct") or its URL, one of the GGUF models there
    ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "org/name/file.gguf"), a folder, a .gguf file, or "demo".
    device: index or part of the name of an adapter; None takes INFER_DEVICE or the best one.
    context: positions for prompt and answer; None takes the smaller of the model's own and 8192,
    or less where that does not fit. dtype: "f32", "f16" or "bf16" to convert the matrices; None
    keeps them as they are. quantize: "q8" or "q4" instead, to quantise them to 8 or 4 bits.
    kv_dtype: "f16", "f32" or "q8" (8 bits and a scale for 32 values).
    adapter: a LoRA adapter of the model (a folder or a hub id) that is always on: merged into the
    weights, before `quantize` if that is given, or applied beside those that the files have
    quantised. adapters: several by names of your own, applied beside the weights; none is on but
    the one that a call names (`generate(..., adapter=name)`).
    revision, offline: see `infer.hub.resolve`.
    progress: whether a line on standard error shows how far it is; None: where a person sees it,
    in a terminal or a notebook. Or a function, called with "download", bytes that came and bytes
    of all files that were begun; with "weights", bytes read and bytes in all; and meanwhile and
    afterwards with "kernels", how many are compiled and how many there are.
    engine: other fields of EngineOptions.

    Raises ModelError, TokenizerError, DeviceError, RequestError, OutOfMemoryError. Warns by an
    InferWarning of what the model's generation_config.json asks for and is not implemented.
    """
    from infer.cli.terminal import ProgressLine  # imports typer

    check_names(unknown, _LOAD_NAMES, AnswerOptions.__optional_keys__, "generate()")
    if not (engine is None or isinstance(engine, Mapping)) or not all(
        isinstance(name, str) for name in engine or ()
    ):
        raise RequestError(
            'engine must be a dictionary of options, such as {"fuse": False}, '
            f"not {shown(engine)}."
        )
    check_names(engine or (), _ENGINE_NAMES, _LOAD_NAMES, "load()")
    converted = weight_dtype(dtype, quantize)
    _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
    with ProgressLine(False if callable(progress) else progress) as line:
        report = progress if callable(progress) else line.loading
        fetched = partial(report, "download")
        resolved = resolve(str(model), revision=revision, offline=offline, progress=fetched)
        always, named = open_adapters(adapter, adapters, offline, fetched)
        return _load(
            resolved,
            choose_adapter(device),
            settings,
            context,
            converted,
            kv_dtype,
            always,
            named,
            report,
            engine or {},
        )


_LOAD_NAMES = [name for name in signature(load).parameters if name not in ("model", "unknown")]
_ENGINE_NAMES = {option.name for option in fields(EngineOptions)} - set(_LOAD_NAMES)


def open_adapters(
    adapter: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    offline: bool,
    progress: Callable[[int, int], None],
) -> tuple[Lora | None, dict[str, Lora]]:
    """The adapter that is always on, and those that are chosen by name. Raises ModelError, and
    RequestError where both are given."""
    if adapter is not None and adapters:
        raise RequestError(
            "Give either one adapter that is always on (adapter) or several by name (adapters)."
        )

    if not isinstance(adapters or {}, Mapping) or not all(
        isinstance(name, str) and name for name in adapters or ()
    ):
        raise RequestError(
            'Give adapters as a dictionary, such as {"sql": "org/sql-lora"}: names of adapters, '
            "none of them empty, and their folders or hub ids."
        )

    def opened(place: str | Path) -> Lora:
        found = resolve_adapter(str(place), offline=offline, progress=progress)
        return Lora.open(found.path, found.name)

    named = {name: opened(place) for name, place in (adapters or {}).items()}
    return None if adapter is None else opened(adapter), named


def _load(
    resolved: ResolvedModel,
    adapter: AdapterInfo,
    settings: Settings | None,
    context: int | None,
    dtype: str | None,
    kv_dtype: str,
    always: Lora | None,
    named: Mapping[str, Lora],
    progress: Progress,
    engine_options: Mapping[str, Any],
) -> LLM:
    path = resolved.path
    model, checkpoint = open_model(path)
    tokenizer = Tokenizer.open(path)
    generation_config = read_json(path / "generation_config.json")
    defaults = sampling_defaults(generation_config, model.config.vocab_size)
    for text in notes(generation_config):
        warnings.warn(text, InferWarning, stacklevel=3)
    plan = plan_weights(model.weights(), checkpoint, dtype, model.ignorable)
    positions = checked_context(model, resolved.name, context)
    loras = Loras.fit(model, plan, always=always, named=named)
    plan = plan.joined(loras.names)

    def fill(device: Device, progress: Progress) -> LLM:
        options = fitting_options(
            model,
            plan,
            EngineOptions(context=positions, kv_dtype=kv_dtype, **engine_options),
            device.limits,
            device.adapter,
            may_shrink=context is None,
            loras=loras,
        )
        started: list[tuple[Engine, Future[None]]] = []

        def allocated(weights: dict[str, GpuTensor]) -> None:
            beside = loras.allocate(device, weights)
            engine = Engine(device, model, weights, options, beside)
            with enough_threads():
                started.append(
                    (engine, thread.submit(engine.compile, partial(progress, "kernels")))
                )
            loras.fill(device, weights, beside)

        # Kernels are compiled while the weights are read, which leaves most of the CPU idle.
        with ThreadPoolExecutor(1) as thread:
            try:
                load_weights(
                    device,
                    plan,
                    changes=loras.merged,
                    allocated=allocated,
                    progress=partial(progress, "weights"),
                )
            except BaseException:
                device.stop()  # compiling
                raise
        ((engine, compiled),) = started
        compiled.result()
        return LLM(resolved.name, engine, tokenizer, defaults)

    return _Loading(lambda: Device(adapter, settings), fill).result(progress)


class _Loading:
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
    """What matrices are converted or quantised to; None: nothing. Raises UnsupportedError for a
    word that is neither, and RequestError where both are given."""
    _check_choice("dtype", dtype, (None, *DTYPES))
    _check_choice("quantize", quantize, (None, *QUANTIZED))
    if dtype is not None and quantize is not None:
        raise RequestError(
            f"Weights are either converted (dtype {dtype}) or quantised (quantize {quantize}). "
            "Give one of the two."
        )
    return dtype or quantize


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        shown = ", ".join(str(choice) for choice in choices if choice is not None)
        raise UnsupportedError(f"{name} must be one of {shown}, not {value!r}.")


# The module's own generate keeps the model that it loaded last.


class _Kept:
    """A model that was loaded here. It is closed when nothing holds this any more: neither the
    module, nor a stream or a call that uses it."""

    def __init__(self, key: tuple[Any, ...], llm: LLM) -> None:
        self.key, self.llm = key, llm

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.llm.close()


_last: _Kept | None = None
_last_lock = threading.Lock()


def _kept(model: str | Path, options: dict[str, Any]) -> _Kept:
    global _last
    progress = options.pop("progress", None)
    key = (str(model), *sorted(options.items()))
    with _last_lock:
        if _last is None or _last.key != key or _last.llm._closing:
            _last = None  # before the next one is loaded
            _last = _Kept(key, load(model, progress=progress, **options))
        return _last


def _params(params: SamplingParams | None, sampling: SamplingOptions) -> SamplingParams:
    """sampling: checked for names."""
    if not (params is None or isinstance(params, SamplingParams)):
        raise RequestError(f"params must be SamplingParams, not {shown(params)}.")
    if params is not None and sampling:
        raise RequestError("Give either params or single sampling options, not both.")
    return params if params is not None else SamplingParams(**sampling)


def _check_processor(logits_processor: LogitsProcessor | None) -> None:
    if not (logits_processor is None or callable(logits_processor)):
        raise RequestError(
            "logits_processor must be a function of (ids so far, logits) that returns logits, "
            f"not {shown(logits_processor)}."
        )


def _check_template_args(template_args: object) -> None:
    if template_args is not None and not (
        isinstance(template_args, Mapping) and all(isinstance(name, str) for name in template_args)
    ):
        raise RequestError(
            'template_args must be a dictionary, such as {"enable_thinking": False}, '
            f"not {shown(template_args)}."
        )


def _check_options(
    params: SamplingParams | None = None,
    logits_processor: LogitsProcessor | None = None,
    template_args: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """What `stream` refuses of its options whatever the model is: before one is loaded."""
    _check_processor(logits_processor)
    _check_template_args(template_args)
    _params(params, sampling)


def _split(model: str | Path | LLM, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of `load`, and those of `LLM.stream`."""
    check_names(options, Options.__optional_keys__, _LOAD_NAMES, "load()")
    names = set(LoadOptions.__optional_keys__)
    if not isinstance(model, LLM):
        names.add("adapter")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    if isinstance(model, LLM) and given:
        raise RequestError("Load options go to load(), where the LLM comes from.")
    return given, {name: value for name, value in options.items() if name not in names}


def generate(model: str | Path | LLM, prompt: Prompt, **options: Unpack[Options]) -> Result:
    """The answer of a model to a prompt: `load` and `LLM.generate` in one.

    model: an id, a folder or an LLM. A model that is loaded here stays loaded until another one is
    asked for, and until what uses it is done. options: those of `LLM.stream`, and of `load`:
    device, context, dtype, quantize, kv_dtype, revision, offline, progress, and, where the model is
    not an LLM, adapter.
    """
    given, rest = _split(model, options)
    _check_options(**rest)
    if isinstance(model, LLM):
        return model.generate(prompt, **rest)
    kept = _kept(model, given)
    try:
        return kept.llm.generate(prompt, **rest)
    finally:
        del kept  # which the traceback of an error would hold


def stream(model: str | Path | LLM, prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """The same as `generate`, piece by piece."""
    given, rest = _split(model, options)
    _check_options(**rest)
    if isinstance(model, LLM):
        return model.stream(prompt, **rest)
    kept = _kept(model, given)
    try:
        stream = kept.llm.stream(prompt, **rest)
        stream._keeps = kept
        return stream
    finally:
        del kept
