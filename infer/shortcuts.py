"""`infer.generate`, `chat`, `stream` and `embed`, which keep the model that was loaded last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import checked
from infer.kernels.errors import RequestError
from infer.keywords import LOAD_NAMES, EmbedOptions, LoadOptions, Options, show_options
from infer.llm import (
    LLM,
    Chat,
    Chats,
    Params,
    Prompt,
    Prompts,
    Stream,
    as_chats,
    by_prompt,
    check_options,
    listed,
    samples,
    together,
)
from infer.loading import load
from infer.results import Result, Results
from infer.sampling import SamplingParams

_checked = partial(checked, Options.__optional_keys__, LOAD_NAMES, "load()")


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    n: Literal[1] = 1,
    **options: Unpack[Options],
) -> Result: ...


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    prompt: Prompts,
    params: Params | None = None,
    *,
    n: Literal[1] = 1,
    **options: Unpack[Options],
) -> list[Result]: ...


@overload
def generate(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    n: int,
    **options: Unpack[Options],
) -> list[Result]: ...


@overload
def generate(
    model: str | Path | LLM,
    prompt: Prompts,
    params: Params | None = None,
    *,
    n: int,
    **options: Unpack[Options],
) -> list[list[Result]]: ...


@overload
def generate(
    model: str | Path | LLM,
    *,
    prompts: Prompts,
    params: Params | None = None,
    **options: Unpack[Options],
) -> list[Result]: ...


@_checked(renamed={"prompts": "prompt"})  # type: ignore[misc]
def generate(
    model: str | Path | LLM,
    prompt: Prompt | Prompts,
    params: Params | None = None,
    *,
    n: int = 1,
    **options: Unpack[Options],
) -> Results:
    """The answer of a model to a prompt, or the answers to a list of prompts: `load` and
    `LLM.generate` in one.

    model: an id, a folder or an LLM. A model that is loaded here stays loaded until another one is
    asked for and all that uses it has ended. params, n: as for `LLM.generate`. options: all options
    of `LLM.stream`, and of `load`: device, webgpu, precision, context, dtype, quantize, kv_dtype,
    max_batch, cache_memory, host_cache, invariant, speculate, draft, draft_quantize, chat_template,
    revision, offline, progress, and, where the model is not an LLM, adapter.
    """
    prompt = listed(prompt)
    asked = samples(prompt, n, {**options, "params": params})
    streams = (stream(model, each, **own) for each, own in asked)
    return by_prompt(together(streams), prompt, n)


@overload
def chat(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    messages: Chat,
    params: SamplingParams | None = None,
    *,
    n: Literal[1] = 1,
    **options: Unpack[Options],
) -> Result: ...


@overload
def chat(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    messages: Chats,
    params: Params | None = None,
    *,
    n: Literal[1] = 1,
    **options: Unpack[Options],
) -> list[Result]: ...


@overload
def chat(  # type: ignore[overload-overlap]
    model: str | Path | LLM,
    messages: Chat,
    params: SamplingParams | None = None,
    *,
    n: int,
    **options: Unpack[Options],
) -> list[Result]: ...


@overload
def chat(
    model: str | Path | LLM,
    messages: Chats,
    params: Params | None = None,
    *,
    n: int,
    **options: Unpack[Options],
) -> list[list[Result]]: ...


@_checked()
def chat(
    model: str | Path | LLM,
    messages: Chat | Chats,
    params: Params | None = None,
    *,
    n: int = 1,
    **options: Unpack[Options],
) -> Results:
    """The answer of a model to chat messages, or to a user's message given as text; or the answers
    to a list of either: `load` and `LLM.chat` in one. All other arguments are as for `generate`."""
    return generate(model, as_chats(messages), params, n=n, **options)


@_checked()
def stream(
    model: str | Path | LLM,
    prompt: Prompt,
    params: SamplingParams | None = None,
    **options: Unpack[Options],
) -> Stream:
    """Returns the answer of a model to a prompt as a stream of pieces: `load` and `LLM.stream` in
    one. The model that was loaded last stays loaded, as with `generate`."""
    given, rest = _split(model, options)
    check_options(params, **rest)
    if isinstance(model, LLM):
        return model.stream(prompt, params, **rest)
    kept = _kept(model, given)
    try:
        stream = kept.llm.stream(prompt, params, **rest)
        stream._keeps = kept
        return stream
    finally:
        del kept


@checked((*LoadOptions.__optional_keys__, "adapter"), Options.__optional_keys__, "generate()")
def embed(
    model: str | Path | LLM,
    texts: Prompt | Prompts,
    *,
    pooling: Literal["mean", "last"] | None = None,
    normalize: bool | None = None,
    **options: Unpack[EmbedOptions],
) -> NDArray[np.float32]:
    """The embedding of a text by a model, or of each of a list of texts: `load` and `LLM.embed` in
    one. model, options: as for `generate`."""
    given, rest = _split(model, options)
    rest |= {"pooling": pooling, "normalize": normalize}
    if isinstance(model, LLM):
        return model.embed(texts, **rest)
    kept = _kept(model, given)
    try:
        return kept.llm.embed(texts, **rest)
    finally:
        del kept


show_options(Options, generate, chat, stream)
show_options(EmbedOptions, embed)


def _split(
    model: str | Path | LLM, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the options into those for load() and those for LLM.stream(). Raises RequestError for
    options of load() beside an LLM."""
    names = set(LoadOptions.__optional_keys__)
    if not isinstance(model, LLM):
        names.add("adapter")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    if isinstance(model, LLM) and given:
        raise RequestError("Load options go to load(), where the LLM comes from.")
    return given, {name: value for name, value in options.items() if name not in names}


class _Kept:
    """A model that this module has loaded. It is closed when nothing holds this object any more:
    neither the module, nor a stream or a call that uses it."""

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
            _last = None  # let go before the next model is loaded
            _last = _Kept(key, load(model, progress=progress, **options))
        return _last
