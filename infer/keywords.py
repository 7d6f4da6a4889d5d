"""The keyword arguments of `generate`, `chat`, `stream` and `load` as types, for editors and type
checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypedDict

from infer.sampling import LogitsProcessor, SamplingOptions
from infer.text.tools import Tool, ToolChoice

# Called with the task ("download", "weights" or "kernels"), how much of it is done, and how much
# there is.
Progress = Callable[[str, int, int], None]


class _AnswerOptions(SamplingOptions, total=False):
    logits_processor: LogitsProcessor | None
    template_args: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    cache_salt: str | None
    priority: int
    timeout: float | None
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool


class AnswerOptions(_AnswerOptions, total=False):
    """Options of `LLM.generate`, `LLM.chat` and `LLM.stream`, which says what they mean, and of
    `LLM.agenerate`, `LLM.achat` and `LLM.astream`."""

    adapter: str | None


class LoadOptions(TypedDict, total=False):
    """Options of `load` that the module's `generate`, `chat`, `stream` and `embed` take too."""

    device: str | int | None
    webgpu: str | None
    precision: str
    context: int | None
    dtype: str | None
    quantize: str | None
    kv_dtype: str
    max_batch: int | None
    cache_memory: int | str | None
    host_cache: int | str | None
    invariant: bool
    speculate: str | None
    draft: str | Path | None
    draft_quantize: str | None
    chat_template: str | Path | None
    revision: str | None
    offline: bool
    progress: bool | Progress | None


# All that `load` takes by name.
LOAD_NAMES = (
    *LoadOptions.__optional_keys__,
    *("adapter", "adapters", "isolate", "host_memory", "settings", "engine"),
)


class EmbedOptions(LoadOptions, total=False):
    """Options of the module's `embed`. adapter: as in Options."""

    adapter: str | Path | None


class Options(LoadOptions, _AnswerOptions, total=False):
    """Options of the module's `generate`, `chat` and `stream`. adapter: one to load, or the name of
    one that an LLM has."""

    adapter: str | Path | None


def show_options(options: type, *functions: Callable[..., Any]) -> None:
    """Have the signatures of functions name what their **options take, a TypedDict: IPython, help()
    and editors that look at a running program complete these names."""
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
        for name, kind in options.__annotations__.items()
    ]
    for function in functions:
        own = signature(function)
        fixed = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        more = [p for p in shown if p.name not in own.parameters]
        function.__signature__ = own.replace(parameters=[*fixed, *more])  # type: ignore[attr-defined]
