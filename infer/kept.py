"""generate and stream of a model by its name: the one that was loaded last is kept."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from infer.kernels.errors import RequestError
from infer.keywords import LOAD_NAMES, LoadOptions, Options, check_names, show_options
from infer.llm import LLM, Prompt, Prompts, Stream, by_prompt, check_options, samples, together
from infer.loading import load
from infer.results import Result, Results


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM, prompt: Prompt, *, n: Literal[1] = 1, **options: Unpack[Options]
) -> Result: ...


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM, prompt: Prompts, *, n: Literal[1] = 1, **options: Unpack[Options]
) -> list[Result]: ...


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM, prompt: Prompt, *, n: int, **options: Unpack[Options]
) -> list[Result]: ...


@overload
def generate(
    model: str | Path | LLM, prompt: Prompts, *, n: int, **options: Unpack[Options]
) -> list[list[Result]]: ...


def generate(
    model: str | Path | LLM, prompt: Prompt | Prompts, *, n: int = 1, **options: Unpack[Options]
) -> Results:
    """The answer of a model to a prompt, or those to a list of prompts: `load` and `LLM.generate`
    in one.

    model: an id, a folder or an LLM. A model that is loaded here stays loaded until another one is
    asked for, and until what uses it is done. n: as for `LLM.generate`. options: those of
    `LLM.stream`, and of `load`: device, webgpu, context, dtype, quantize, kv_dtype, max_batch,
    cache_memory, invariant, speculate, draft, draft_quantize, chat_template, revision, offline,
    progress, and, where the model is not an LLM, adapter.
    """
    streams = (stream(model, each, **own) for each, own in samples(prompt, n, options))
    return by_prompt(together(streams), prompt, n)


def stream(model: str | Path | LLM, prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """The same as `generate`, piece by piece."""
    given, rest = _split(model, options)
    check_options(**rest)
    if isinstance(model, LLM):
        return model.stream(prompt, **rest)
    kept = _kept(model, given)
    try:
        stream = kept.llm.stream(prompt, **rest)
        stream._keeps = kept
        return stream
    finally:
        del kept


show_options(Options, generate, stream)


def _split(model: str | Path | LLM, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of `load`, and those of `LLM.stream`."""
    check_names(options, Options.__optional_keys__, LOAD_NAMES, "load()")
    names = set(LoadOptions.__optional_keys__)
    if not isinstance(model, LLM):
        names.add("adapter")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    if isinstance(model, LLM) and given:
        raise RequestError("Load options go to load(), where the LLM comes from.")
    return given, {name: value for name, value in options.items() if name not in names}


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
