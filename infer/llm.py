"""The API: load a model, generate text."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Never, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.detokenizer import StopStrings, StreamingDetokenizer
from infer.engine import Engine, EngineOptions, Timings
from infer.foreign import shown
from infer.generation_config import notes, sampling_defaults
from infer.hub import ResolvedModel, resolve, resolve_adapter
from infer.kernels.adapters import choose_adapter
from infer.kernels.device import Device, MemoryStats, Settings
from infer.kernels.errors import ClosedError, InferWarning, RequestError, UnsupportedError
from infer.kernels.kv_cache import KV_DTYPES
from infer.kernels.tensor import QUANTIZED, GpuTensor
from infer.keywords import AnswerOptions, LoadOptions, Options, Progress, check_names
from infer.memory import checked_context, fitting_options
from infer.models import open_model
from infer.models.lora import Lora, Loras
from infer.models.packing import Stored
from infer.models.weights import WeightSpec, check_checkpoint, joined, load_weights, stored
from infer.sampling import LogitsProcessor, SamplingOptions, SamplingParams, logprobs
from infer.tokenizer import Tokenizer, read_json

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
    for the next. `result` holds what has been generated so far, and in the end everything."""

    def __init__(self, llm: LLM, chunks: Iterator[Chunk], result: Result) -> None:
        self._llm, self._chunks, self.result = llm, chunks, result
        self._state = "new"

    def __next__(self) -> Chunk:
        if self._state == "new":
            self._llm._enter(self)
            self._state = "running"
        if self._state == "closed":
            raise StopIteration
        try:
            if self._llm._closing:
                raise ClosedError("The LLM was closed in the middle of this stream.")
            return next(self._chunks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the stream. Safe to call at any time, and twice."""
        state, self._state = self._state, "closed"
        if state == "running":
            try:
                self._chunks.close()  # type: ignore[attr-defined]
            finally:
                self._llm._leave()

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
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._active: weakref.ref[Stream] | None = None  # a dropped stream must end
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
        self._enter(None)
        try:
            return np.concatenate(list(self.engine.score(ids, adapter)))
        finally:
            self._leave()

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
        result.timings = self.engine.timings
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

    def _enter(self, stream: Stream | None) -> None:
        if self._owner == threading.get_ident():
            raise RequestError(
                "This LLM is in the middle of another stream of this thread. Read that one to its "
                "end or close() it first, or load() the model a second time."
            )
        self._lock.acquire()
        if self._closing:
            self._lock.release()
            raise ClosedError("This LLM has been closed.")
        self._owner = threading.get_ident()
        self._active = None if stream is None else weakref.ref(stream)

    def _leave(self) -> None:
        self._owner = self._active = None
        self._lock.release()

    # End

    def memory_stats(self) -> MemoryStats:
        """GPU memory of this model's device."""
        return self.device.memory_stats()

    def close(self) -> None:
        """Free the GPU memory. A stream that is open ends: in this thread at once, in another one
        with a ClosedError at its next token. Safe to call twice."""
        if self.device.closed:
            return
        self._closing = True
        active = self._active() if self._active is not None else None
        if self._owner == threading.get_ident() and active is not None:
            active.close()
        with self._lock:
            self.device.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
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
    afterwards, from another thread, with "kernels", how many are compiled and how many there are.
    engine: other fields of EngineOptions.

    Raises ModelError, TokenizerError, DeviceError, RequestError, OutOfMemoryError. Warns by an
    InferWarning of what the model's generation_config.json asks for and is not implemented.
    """
    from infer.terminal import ProgressLine  # imports typer

    check_names(unknown, _LOAD_NAMES, AnswerOptions.__optional_keys__, "generate()")
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
            Device(choose_adapter(device), settings),
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
    device: Device,
    context: int | None,
    dtype: str | None,
    kv_dtype: str,
    always: Lora | None,
    named: Mapping[str, Lora],
    progress: Progress,
    engine_options: Mapping[str, Any],
) -> LLM:
    try:
        path = resolved.path
        model, checkpoint = open_model(path)
        tokenizer = Tokenizer.open(path)
        generation_config = read_json(path / "generation_config.json")
        defaults = sampling_defaults(generation_config, model.config.vocab_size)
        for text in notes(generation_config):
            warnings.warn(text, InferWarning, stacklevel=3)
        check_checkpoint(model.weights(), checkpoint, model.ignorable)
        positions = checked_context(model, resolved.name, context)

        loras = Loras.fit(model, checkpoint, always=always, named=named)

        def stored_as(spec: WeightSpec) -> Stored:
            return stored(spec, checkpoint, dtype)

        options = fitting_options(
            model,
            stored_as,
            EngineOptions(context=positions, kv_dtype=kv_dtype, **engine_options),
            device.limits,
            device.adapter,
            may_shrink=context is None,
            loras=loras,
        )
        started: list[tuple[Engine, Future[None]]] = []
        # Kernels are compiled while the weights are read, which leaves most of the CPU idle.
        with ThreadPoolExecutor(1) as thread:

            def allocated(weights: dict[str, GpuTensor]) -> None:
                beside = loras.allocate(device, weights)
                engine = Engine(device, model, weights, options, beside)
                started.append(
                    (engine, thread.submit(engine.compile, partial(progress, "kernels")))
                )
                loras.fill(device, weights, beside)

            load_weights(
                device,
                joined(model.weights(), stored_as, loras.names),
                checkpoint,
                ignorable=model.ignorable,
                dtype=dtype,
                changes=loras.merged,
                allocated=allocated,
                progress=partial(progress, "weights"),
            )
        ((engine, compiled),) = started
        compiled.result()
        return LLM(resolved.name, engine, tokenizer, defaults)
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

_last: tuple[tuple[Any, ...], LLM] | None = None
_last_lock = threading.Lock()


def _model(model: str | Path | LLM, options: dict[str, Any]) -> LLM:
    global _last
    if isinstance(model, LLM):
        if options:
            raise RequestError("Load options go to load(), where the LLM comes from.")
        return model
    progress = options.pop("progress", None)
    key = (str(model), *sorted(options.items()))
    with _last_lock:
        if _last is not None and (_last[0] != key or _last[1]._closing):
            _last[1].close()
            _last = None
        if _last is None:
            _last = (key, load(model, progress=progress, **options))
        return _last[1]


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
    return given, {name: value for name, value in options.items() if name not in names}


def generate(model: str | Path | LLM, prompt: Prompt, **options: Unpack[Options]) -> Result:
    """The answer of a model to a prompt: `load` and `LLM.generate` in one.

    model: an id, a folder or an LLM. A model that is loaded here stays loaded until another one is
    asked for. options: those of `LLM.stream`, and of `load`: device, context, dtype, quantize,
    kv_dtype, revision, offline, progress, and, where the model is not an LLM, adapter.
    """
    given, rest = _split(model, options)
    _check_options(**rest)
    return _model(model, given).generate(prompt, **rest)


def stream(model: str | Path | LLM, prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """The same as `generate`, piece by piece."""
    given, rest = _split(model, options)
    _check_options(**rest)
    return _model(model, given).stream(prompt, **rest)
