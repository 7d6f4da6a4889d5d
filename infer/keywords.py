"""What `generate`, `chat`, `stream` and `load` take by name, for editors and type checkers; and
what somebody may have meant who gave another name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypedDict

from infer.kernels.errors import RequestError
from infer.sampling import LogitsProcessor, SamplingOptions, SamplingParams
from infer.text.tools import Tool, ToolChoice

# What is being done ("download", "weights" or "kernels"), how much is done, and how much there is.
Progress = Callable[[str, int, int], None]


class _AnswerOptions(SamplingOptions, total=False):
    params: SamplingParams | None
    logits_processor: LogitsProcessor | None
    template_args: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    cache_salt: str | None
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool


class AnswerOptions(_AnswerOptions, total=False):
    """Options of `LLM.generate`, `LLM.chat` and `LLM.stream`, which says what they mean, and of
    `LLM.agenerate` and `LLM.astream`."""

    adapter: str | None


class LoadOptions(TypedDict, total=False):
    """Those of `load` that the module's `generate` and `stream` take too."""

    device: str | int | None
    webgpu: str | None
    context: int | None
    dtype: str | None
    quantize: str | None
    kv_dtype: str
    max_batch: int | None
    cache_memory: int | None
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
    *("adapter", "adapters", "isolate", "settings", "engine"),
)


class Options(LoadOptions, _AnswerOptions, total=False):
    """Options of the module's `generate` and `stream`. adapter: one to load, or the name of one
    that an LLM has."""

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


# What transformers, llama.cpp, Ollama, vLLM and others call it, if it is not spelled like ours.
_ELSEWHERE = {
    "chat_template_kwargs": "template_args",
    "ctx_size": "context",
    "assistant_model": "draft",
    "do_sample": "temperature",
    "draft_model": "draft",
    "enable_thinking": "template_args",
    "functions": "tools",
    "generation_config": "params",
    "guided_choice": "regex",
    "guided_grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "json_schema": "schema",
    "kv_cache_dtype": "kv_dtype",
    "load_in_4bit": "quantize",
    "load_in_8bit": "quantize",
    "local_files_only": "offline",
    "lora": "adapter",
    "lora_path": "adapter",
    "lora_request": "adapter",
    "format": "schema",
    "gpu_memory_utilization": "cache_memory",
    "max_batch_size": "max_batch",
    "max_model_len": "context",
    "max_num_seqs": "max_batch",
    "n_ctx": "context",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_ctx": "context",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "reasoning_effort": "template_args",
    "repeat_penalty": "repetition_penalty",
    "response_format": "schema",
    "sampling_params": "params",
    "stop_sequences": "stop",
    "speculative_config": "draft",
    "speculative_model": "draft",
    "stop_strings": "stop",
    "structured_outputs": "schema",
    "temp": "temperature",
    "top_logprobs": "logprobs",
    "top_n": "top_k",
    "torch_dtype": "dtype",
}


def check_names(
    given: Iterable[str], known: Collection[str], others: Collection[str], place: str
) -> None:
    """Raises RequestError for a name that is not known, with the one that was likely meant. others:
    what the functions of `place` know."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    if unknown in others:
        raise RequestError(f"{unknown} is an option of {place}.")
    names = [*known, *(name for name in others if name not in known)]
    likely = _ELSEWHERE.get(unknown)
    if likely not in names:
        likely = next(iter(get_close_matches(unknown, names, n=1)), None)
    if likely is None:
        hint = f"There are: {', '.join(sorted(known))}."
    else:
        hint = f"Did you mean {likely}{'' if likely in known else f', of {place}'}?"
    raise RequestError(f"{unknown} is not an option. {hint}")
