"""Texts of errors for wrong arguments, which name the right keyword, also for keywords of other
libraries; and warnings that point at the line of the caller."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature
from pathlib import Path

from infer.kernels.errors import InferWarning, RequestError

# Names of parameters in transformers, llama.cpp, Ollama, vLLM and others, and our name for each.
ELSEWHERE = {
    "chat_template_kwargs": "template_args",
    "choice": "choices",
    "conversation": "messages",
    "ctx_size": "context",
    "assistant_model": "draft",
    "bad_words_ids": "bad_words",
    "best_of": "n",
    "do_sample": "temperature",
    "draft_model": "draft",
    "enable_thinking": "template_args",
    "eos_token_id": "stop_token_ids",
    "functions": "tools",
    "generation_config": "params",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "input": "texts",
    "inputs": "prompt",
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
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_model_len": "context",
    "max_new_tokens": "max_tokens",
    "max_num_seqs": "max_batch",
    "max_output_tokens": "max_tokens",
    "max_time": "timeout",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "model_path": "model",
    "n_ctx": "context",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_ctx": "context",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "pretrained_model_name_or_path": "model",
    "prompt_token_ids": "prompt",
    "random_seed": "seed",
    "reasoning_effort": "template_args",
    "repeat_penalty": "repetition_penalty",
    "request_timeout": "timeout",
    "response_format": "schema",
    "sampling_params": "params",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "speculative_config": "draft",
    "speculative_model": "draft",
    "stop_strings": "stop",
    "structured_outputs": "schema",
    "suppress_tokens": "bad_words",
    "temp": "temperature",
    "top_logprobs": "logprobs",
    "top_n": "top_k",
    "torch_dtype": "dtype",
}

_ONE_GPU = "A model runs on one GPU: leave {name} out, and choose the GPU with device."
_ON_GPU = "All of a model is computed on the GPU: leave {name} out."
_STREAM = "Call stream() or astream(), which give an answer piece by piece, without {name}."
_SYSTEM = (
    "Give it as the first of the messages: "
    '[{{"role": "system", "content": ...}}, {{"role": "user", "content": ...}}].'
)
_TEXT_ONLY = "Models read text alone here: leave {name} out."
_PROMPT_SCORES = "Call the method prompt_logprobs(prompt) of an LLM."
_LEAVE_OUT = "There is nothing to choose: leave {name} out."

# Parameters of other libraries that have no counterpart here, and what to do instead.
INSTEAD = {
    "data_parallel_size": _ONE_GPU,
    "detokenize": "A result has the text and the token ids: leave {name} out.",
    "device_map": _ONE_GPU,
    "disable_log_stats": _LEAVE_OUT,
    "echo": "A result has the answer alone. " + _PROMPT_SCORES,
    "enable_prefix_caching": "What prompts begin with alike is always shared: leave {name} out.",
    "enforce_eager": _LEAVE_OUT,
    "gpu_layers": _ON_GPU,
    "images": _TEXT_ONLY,
    "instructions": _SYSTEM,
    "keep_alive": "A model stays loaded until it is closed: leave {name} out.",
    "main_gpu": "Choose the GPU with device.",
    "multi_modal_data": _TEXT_ONLY,
    "n": "n is an option of generate() and chat(): a stream has one answer.",
    "n_gpu_layers": _ON_GPU,
    "n_threads": _ON_GPU,
    "num_gpu": _ON_GPU,
    "num_thread": _ON_GPU,
    "options": "Give each by its own name, such as temperature=0.7, without {name}.",
    "pipeline_parallel_size": _ONE_GPU,
    "prompt_logprobs": _PROMPT_SCORES,
    "raw": "generate() takes a text as it is, and chat() takes it for a message.",
    "return_full_text": "A result has the answer alone: put the prompt before it.",
    "skip_special_tokens": (
        "The text of an answer has no special tokens. "
        "decode(result.token_ids, skip_special_tokens=False) shows them."
    ),
    "stream": _STREAM,
    "streamer": _STREAM,
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "tensor_parallel_size": _ONE_GPU,
    "tokenizer": "A model's tokenizer comes with its files: leave {name} out.",
    "trust_remote_code": "No code of a model's files is ever run: leave {name} out.",
    "use_beam_search": "There is no beam search: ask for several samples with n.",
    "use_tqdm": "generate() shows no progress: leave {name} out.",
    "verbose": "load() shows its progress, and nothing else is printed: leave {name} out.",
}


_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def warn(text: str) -> None:
    """Gives an InferWarning that points at the line of the user's program that calls this
    package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, InferWarning, stacklevel=level)


def check_names(
    given: Iterable[str], known: Collection[str], others: Collection[str], place: str
) -> None:
    """Raises RequestError for a name that is not known; its text has the name that was likely
    meant. others: the names that the functions of `place` know."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    if unknown in others:
        raise RequestError(f"{unknown} is an option of {place}.")
    names = [*known, *(name for name in others if name not in known)]
    likely = ELSEWHERE.get(unknown)
    if likely not in names and unknown in INSTEAD:
        hint = INSTEAD[unknown].format(name=unknown)
        raise RequestError(f"{unknown} is not an option. {hint}")
    if likely not in names:
        likely = next(iter(get_close_matches(unknown, names, n=1)), None)
    if likely is None:
        hint = f"There are: {', '.join(sorted(known))}."
    else:
        hint = f"Did you mean {likely}{'' if likely in known else f', of {place}'}?"
    raise RequestError(f"{unknown} is not an option. {hint}")


def misfit(
    function: Callable[..., object],
    own: Signature,
    args: Sequence[object],
    given: Iterable[str],
) -> str:
    """Returns a sentence that says how arguments, all of known names, do not fit a function."""
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    named = [p for p in own.parameters.values() if p.name != "self"]
    by_place = [p.name for p in named if p.kind <= Parameter.POSITIONAL_OR_KEYWORD]
    given = [p.name for p in named if p.name in given and p.kind > Parameter.POSITIONAL_ONLY]
    places = args[len(own.parameters.keys() & {"self"}) :]
    if len(places) > len(by_place):
        if not by_place:
            return f"{name}() takes nothing without its name: give everything as name=value."
        shown = ", ".join(by_place)
        return f"{name}() takes {shown} without a name: give everything else as name=value."
    for twice in by_place[: len(places)]:
        if twice in given:
            return f"{twice} was given twice: by its place, and by its name."
    needed = [p.name for p in named if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    lacking = [each for each in needed if each not in (*by_place[: len(places)], *given)]
    return f"{name}() needs {' and '.join(lacking)}: {name}({', '.join(needed)})."
