"""generation_config.json: which of its fields count, and what is said of those that do not.

The fields are those of transformers' GenerationConfig. `SamplingParams.resolved` and the tokenizer
read IMPLEMENTED.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infer.boundaries import shown
from infer.kernels.errors import CheckpointError

IMPLEMENTED = frozenset(
    "do_sample temperature top_k top_p min_p repetition_penalty "  # noqa: SIM905
    "max_new_tokens max_length stop_strings eos_token_id "
    "suppress_tokens bad_words_ids sequence_bias".split()
)

RENAMED = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}  # ours to theirs

# Fields that change the answer and are not implemented, with the values that turn them off.
MISSING: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "force_words_ids": (),
    "constraints": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "is_assistant": (False,),
}

# Fields that count only while sampling, and the values that change nothing then.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_k": (None, 0, 1, 50),
    "top_p": (None, 1),
    "min_p": (None, 0),
}

# Fields that change no answer of one model without beams: how it is computed, what is returned
# beside it, guesses that another model would confirm, and details of fields in MISSING.
IRRELEVANT = frozenset(
    "use_cache cache_implementation cache_config max_cache_len low_memory "  # noqa: SIM905
    "prefill_chunk_size "
    "compile_config disable_compile continuous_batching_config renormalize_logits "
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    "early_stopping length_penalty num_beam_groups diversity_penalty "
    "use_mtp num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight speculation_type "
    "bos_token_id pad_token_id decoder_start_token_id "  # ids that prompts have or need not
    "remove_invalid_values "  # logits that are not finite are an error here
    "transformers_version".split()
)


# Sequences of tokens, and what is added to the logit of their last one after the others.
_FORMS = {
    "sequence_bias": "pairs of token ids and a number up to 100, such as [[[5], -2.5]]",
    "bad_words_ids": "lists of token ids, such as [[5], [6]]",
    "suppress_tokens": "token ids, such as [5, 6]",
}


def _biases(config: Mapping[str, Any], name: str) -> list[tuple[list[int], float]]:
    """The entries of such a field, in one form. Raises CheckpointError."""
    value = config.get(name)
    entries: Any = [] if value is None else value if isinstance(value, list) else [value]
    if name == "suppress_tokens":
        entries = [[[token], -math.inf] for token in entries]
    elif name == "bad_words_ids":
        entries = [[tokens, -math.inf] for tokens in entries]
    try:
        for tokens, bias in entries:
            number = type(bias) in (int, float) and (-1e30 <= bias <= 100 or bias == -math.inf)
            if not (number and tokens and all(type(token) is int for token in tokens)):
                raise TypeError
    except (TypeError, ValueError):
        raise CheckpointError(
            f"generation_config.json: {name} must be a list of {_FORMS[name]}, not "
            f"{shown(value)}. Mend the file."
        ) from None
    return [(tokens, float(bias)) for tokens, bias in entries]


def token_bias(config: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    """Returns the biases of the logits of single tokens, by id; -inf forbids a token. As in
    transformers, a bad word cannot forbid the end. Raises CheckpointError."""
    ends = config.get("eos_token_id")
    result: dict[int, float] = {}
    for name in _FORMS:
        for tokens, bias in _biases(config, name):
            end = name == "bad_words_ids" and tokens[0] in (ends if type(ends) is list else [ends])
            if len(tokens) == 1 and 0 <= tokens[0] < vocab_size and not end:
                result[tokens[0]] = bias
    return result


def sampling_defaults(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The fields that SamplingParams.resolved reads, by its names. Raises CheckpointError."""
    return {
        **config,
        **{ours: config.get(theirs) for ours, theirs in RENAMED.items()},
        "logit_bias": token_bias(config, vocab_size),
    }


def notes(config: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each reason why the file does not get what it asks for; mostly none.

    Raises CheckpointError.
    """
    unserved = [
        f"{name} {shown(value)}"
        for name, off in MISSING.items()
        if (value := config.get(name)) is not None and value not in off
    ]
    unserved += [
        f"{name} of several tokens"
        for name in _FORMS
        if any(len(tokens) > 1 for tokens, _ in _biases(config, name))
    ]
    result = []
    if unserved:
        result.append(
            f"generation_config.json asks for what is not implemented: {', '.join(unserved)}. "
            "Answers may differ from those of transformers."
        )
    unused = [name for name, off in _SAMPLING.items() if config.get(name, off[0]) not in off]
    if unused and not config.get("do_sample"):
        result.append(
            f"generation_config.json has {', '.join(unused)} but no do_sample: decoding is greedy, "
            "as in transformers. Give a temperature to sample."
        )
    return result
