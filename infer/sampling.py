"""How a token is chosen: the parameters, and the same sampling in numpy.

The GPU samples (infer.kernels.state.sampler) unless the user's own logits processor has to see the
logits; then NumpySampler does, with the same filters and the same noise: a seed gives the same text
on both paths as long as their logits agree. The steps mean what transformers' logits processors do.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import checked, shown
from infer.generation_config import RENAMED
from infer.kernels.errors import CheckpointError, RequestError
from infer.kernels.state.step import FORBIDDEN, MAX_LOGPROBS, MAX_STOP_IDS, SAMPLING
from infer.typed import TypedSchema, is_type

if TYPE_CHECKING:
    from infer.kernels.state.sampler import SamplerChain

T = TypeVar("T")

Scores = NDArray[np.float64]
# Takes the ids so far (prompt and output) and the logits after penalties and bias, float32 [vocab];
# returns logits of that shape. -inf forbids a token.
LogitsProcessor = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.floating]]

# The log probability of a token, and the best (id, log probability) in its place, best first.
Logprobs = tuple[float, list[tuple[int, float]]]

# Characters at most. What follows a regular expression takes time in each step by its length.
CONSTRAINTS = {"schema": 1 << 16, "regex": 1 << 14, "choices": 1 << 16, "grammar": 1 << 18}

_STOPS, _STOP_CHARACTERS = 64, 1024  # which each piece of text is compared with

_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Scores divided by less than this could overflow float32; long before that the draw is greedy.
_LEAST_TEMPERATURE = 1e-5
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "a number from 0 (greedy) to 100"),
    "top_p": (0, 1, "a number from 0 to 1 (off)"),
    "min_p": (0, 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (1e-3, 1e3, "a number from 0.001 to 1000 (1 is off)"),
    "presence_penalty": (-2, 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2 (0 is off)"),
}
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "top_k": (0, 2**32 - 1, "an integer from 0 (off) to 2**32 - 1"),
    "seed": (0, 2**64 - 1, "an integer from 0 to 2**64 - 1"),
    "max_tokens": (1, 2**32 - 1, "an integer from 1 up (without it, there is no limit of its own)"),
    "min_tokens": (0, 2**32 - 1, "an integer from 0 (off) up"),
    "logprobs": (
        0,
        MAX_LOGPROBS,
        f"an integer from 0 to {MAX_LOGPROBS} (without it, there are none)",
    ),
}


# Options of calls beside these parameters.
OF_CALLS = (
    *("adapter", "add_generation_prompt", "cache_salt", "continue_final_message"),
    *("logits_processor", "n", "parallel_tool_calls", "priority", "template_args", "timeout"),
    *("tool_choice", "tools"),
)


def _checked(kind: type[T]) -> type[T]:
    """A class whose options are checked by their names."""
    init = checked((), OF_CALLS, "generate()")(kind.__init__)
    kind.__init__ = init  # type: ignore[method-assign]
    return kind


@_checked
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. What is None or empty is left to the model (see
    `resolved`).

    temperature         divides the logits; 0 (and anything below 1e-5) is greedy
    top_k               keep the k most probable tokens and what ties with the last; 0: off
    top_p               keep the fewest of the most probable tokens that together reach this; 1: off
    min_p               keep tokens at least this fraction as probable as the best; 0: off
    repetition_penalty  divides positive, multiplies negative logits of tokens in prompt and output
    presence_penalty    subtracted from the logits of tokens in the output
    frequency_penalty   the same, for each time a token is there
    logit_bias          token id -> added to its logit, at most 100; -inf forbids the token
    seed                from 0 to 2**64 - 1; None takes a new one for each generation
    max_tokens          at least 1; without one, until a stop or the end of the context
    min_tokens          tokens that come before any that ends the answer: one of the model's own
                        end, of stop_token_ids, or of a stop string
    stop                a string or several; the text ends before the first that appears
    stop_token_ids      token ids that end the answer too
    include_stop_str_in_output
                        the text ends with what ended it: the stop string, or the text of one of
                        stop_token_ids, whose id is then among the answer's
    bad_words           texts, or lists of token ids, that are not in the output: the last token of
                        one is forbidden where the others stand before it. A text is forbidden at
                        the beginning and after a space
    allowed_token_ids   the only tokens that may come; without the model's end among them the answer
                        has no end of its own
    ignore_eos          go on after the model's own end, as benchmarks do, up to max_tokens
    logprobs            report the log probability of each token, and of the best 0 to 20

    What the whole text of an answer must be, of which one may be given; it goes before bad_words
    and min_tokens where it leaves nothing else:

    schema              JSON that is valid under this schema: a dictionary; or a pydantic model, a
                        dataclass or a TypedDict, the class, or what is made of these, such as
                        list[int]. Objects then have no properties but their own
    regex               what this regular expression matches
    choices             one of these texts
    grammar             what this grammar derives, in llguidance's dialect of Lark

    Raises RequestError that names the parameter, its value and what is allowed.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    schema: Mapping[str, Any] | type | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most, allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _OFF:
                continue
            # The comparison is false for NaN too.
            if not (_is(value, Real) and least <= value <= most):
                given = shown(value).removesuffix(".0")  # of --temperature -1
                raise RequestError(f"`{name}` must be {allowed}, not {given}.")
            object.__setattr__(self, name, float(value))
        for name, (first, last, allowed) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not (_is(value, Integral) and first <= value <= last):
                raise RequestError(f"`{name}` must be {allowed}, not {shown(value)}.")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self) or ())
        object.__setattr__(self, "allowed_token_ids", _checked_ids("allowed_token_ids", self))
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))
        object.__setattr__(self, "schema", _checked_schema(self.schema))
        object.__setattr__(self, "choices", _checked_choices(self.choices))
        _check_constraints({name: getattr(self, name) for name in CONSTRAINTS})
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"`{name}` must be True or False, not {shown(value)}.")
        object.__setattr__(self, "min_tokens", self.min_tokens or 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"`min_tokens` must be at most `max_tokens`, {self.max_tokens}, not "
                f"{self.min_tokens}."
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "`allowed_token_ids` must name a token: there must be one to choose."
            )
        if self.ignore_eos and self.constrained:
            raise RequestError(
                "`ignore_eos` leaves no end for an answer by a schema, a regex or a grammar."
            )

    @property
    def greedy(self) -> bool:
        return (self.temperature or 0.0) < _LEAST_TEMPERATURE

    @property
    def constrained(self) -> bool:
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def pattern(self) -> str | None:
        """The regular expression of the whole text, if there is one."""
        return self.regex if self.choices is None else "|".join(map(re.escape, self.choices))

    @property
    def bad_word_ids(self) -> list[tuple[int, ...]]:
        """Bad words that are forbidden by what comes before them: those of several tokens, once
        they are token ids."""
        ids = (tuple(word) for word in self.bad_words if not isinstance(word, str))
        return [word for word in ids if len(word) > 1]

    @property
    def masked(self) -> bool:
        """Whether each token is chosen among those that the host allows."""
        return self.constrained or bool(self.bad_word_ids)

    @property
    def penalized(self) -> bool:
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def resolved(
        self, defaults: Mapping[str, Any], prompt_tokens: int | None = None
    ) -> SamplingParams:
        """With a value for everything that is left to the model, from its generation_config.json
        (`sampling_defaults`).

        As in transformers, do_sample false or absent means greedy, and do_sample true without a
        temperature or a top_k means temperature 1 and top_k 50 (files leave out what equals
        transformers' defaults). Where only the user asks to sample, what a file leaves out is off.
        Of max_length, a limit for prompt and answer, the prompt leaves max_tokens.

        Raises CheckpointError for a value of the file that is none, RequestError for a prompt
        beyond its max_length.
        """
        names = (*_OFF, "max_tokens", "stop")
        given = {name: defaults[name] for name in names if defaults.get(name) is not None}
        if defaults.get("do_sample"):
            given = {"temperature": 1.0, "top_k": 50} | given
        else:
            given["temperature"] = 0.0
        own = {name: getattr(self, name) for name in names}
        own = {name: value for name, value in own.items() if value not in (None, ())}
        for name in given.keys() - own.keys():
            try:
                SamplingParams(**{name: given[name]})
            except RequestError as error:
                text = str(error).replace(name, RENAMED.get(name, name), 1)
                raise CheckpointError(
                    f"generation_config.json: {text} Mend the file, or give the option yourself."
                ) from None
        if prompt_tokens is not None and "max_tokens" not in given | own:
            given |= _rest_of(defaults.get("max_length"), prompt_tokens)
        bias = {**(defaults.get("logit_bias") or {}), **(self.logit_bias or {})} or None
        # 53 bits, so that readers of JSON whose numbers are floats give it back as it is.
        seed = secrets.randbits(53) if self.seed is None else self.seed
        return replace(self, **(_OFF | given | own), logit_bias=bias, seed=seed)

    def record(
        self, *, vocab_size: int, prompt_tokens: int, context: int, stop_ids: Sequence[int]
    ) -> NDArray[Any]:
        """The SAMPLING record [1] of a generation after `prompt_tokens` tokens.

        It ends after one of `stop_ids`, after max_tokens, or when the next row's position would
        reach `context`. What is None is off. Raises RequestError for bias or stop ids that do not
        fit."""
        self.check_bias(vocab_size)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stop_ids)} stop ids were given; at most {MAX_STOP_IDS} are possible."
            )
        # The prompt's last row gives the first token, so the last token needs one row less.
        end = context if self.max_tokens is None else prompt_tokens + self.max_tokens - 1
        seed = self.seed or 0
        record = np.zeros(1, SAMPLING)
        record["temperature"] = 0.0 if self.greedy else self.temperature
        record["top_k"] = self.top_k or 0
        record["top_p"] = 1.0 if self.top_p is None else self.top_p
        record["min_p"] = self.min_p or 0.0
        record["repetition_penalty"] = self.repetition_penalty or 1.0
        record["presence_penalty"] = self.presence_penalty
        record["frequency_penalty"] = self.frequency_penalty
        record["seed_low"], record["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
        record["max_position"] = min(end, context)
        record["min_position"] = min(prompt_tokens + self.min_tokens - 1, context)
        record["n_stop_ids"], record["masked"] = len(stop_ids), self.masked
        record["stop_ids"][0, : len(stop_ids)] = stop_ids
        return record

    def chain(self) -> SamplerChain:
        """The stages of the GPU sampler that these parameters need."""
        from infer.kernels.state.sampler import SamplerChain  # imports wgpu

        noise = not self.greedy
        return SamplerChain(
            noise=noise,
            penalties=self.penalized,
            bias=bool(self.logit_bias) or self.allowed_token_ids is not None,
            ends=self.min_tokens > 0,
            top_k=noise and bool(self.top_k),
            top_p=noise and self.top_p is not None and self.top_p < 1.0,
            min_p=noise and bool(self.min_p),
            logprobs=self.logprobs is not None,
            mask=self.masked,
        )

    def check_bias(self, vocab_size: int) -> None:
        """Raises RequestError if logit_bias names ids that the vocabulary does not have, or leaves
        none of those that it has."""
        bias = self.logit_bias or {}
        wrong = [token for token in bias if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(
                f"`logit_bias` must name token ids from 0 to {vocab_size - 1}, not "
                f"{shown(wrong[0])}."
            )
        if len(bias) == vocab_size and max(bias.values()) == -math.inf:
            raise RequestError("`logit_bias` forbids every token: there must be one to choose.")

    def check_tokens(self, vocab_size: int) -> None:
        """Raises RequestError if a token id in any of the parameters is not in the vocabulary, or
        where `check_bias` does."""
        self.check_bias(vocab_size)
        words = chain.from_iterable(word for word in self.bad_words if not isinstance(word, str))
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", words),
        ):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"{name} must name token ids from 0 to {vocab_size - 1}, not {shown(wrong)}."
                )


def _rest_of(max_length: Any, prompt_tokens: int) -> dict[str, int]:
    """Returns the max_tokens that a model's limit for prompt and answer together leaves; {} without
    a limit. Raises CheckpointError for an invalid limit, RequestError for too long a prompt."""
    if max_length is None:
        return {}
    if not (_is(max_length, int) and max_length >= 1):
        raise CheckpointError(
            f"generation_config.json: max_length must be an integer from 1 up, not "
            f"{shown(max_length)}. Mend the file, or give `max_tokens` yourself."
        )
    if prompt_tokens >= max_length:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens, and the model's generation_config.json ends "
            f"prompt and answer after {max_length} (max_length). Give `max_tokens` to go beyond."
        )
    return {"max_tokens": min(max_length - prompt_tokens, 2**32 - 1)}


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    bad_words: Sequence[str | Sequence[int]]
    allowed_token_ids: Sequence[int] | None
    logprobs: int | None
    schema: Mapping[str, Any] | type | None
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool | np.bool_)


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, list | tuple) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise RequestError(
            f"`stop` must be a string or a list of strings, none empty, not {shown(stop)}."
        )
    if len(strings) > _STOPS or any(len(string) > _STOP_CHARACTERS for string in strings):
        raise RequestError(
            f"`stop` must be at most {_STOPS} strings of at most {_STOP_CHARACTERS:,} characters."
        )
    return tuple(strings)


def _checked_ids(name: str, params: SamplingParams) -> tuple[int, ...] | None:
    """The token ids of a parameter, each once; None if it has none."""
    given = getattr(params, name)
    if given is None:
        return None
    ids = [given] if _is(given, Integral) else given
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple | set | frozenset | range) or not all(map(_is_id, ids)):
        raise RequestError(f"{name} must be a list of token ids, not {shown(given)}.")
    return tuple(dict.fromkeys(map(int, ids)))


def _is_id(value: object) -> bool:
    return _is(value, Integral) and 0 <= value < 2**32  # type: ignore[operator]


def _checked_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    listed = [words] if isinstance(words, str) else [] if words is None else words
    if not isinstance(listed, list | tuple | set) or not all(
        bool(word.strip())
        if isinstance(word, str)
        else isinstance(word, list | tuple) and word and all(map(_is_id, word))
        for word in listed
    ):
        raise RequestError(
            "`bad_words` must be a list of texts, or of lists of token ids, none of them empty, "
            f"not {shown(words)}."
        )
    return tuple(word if isinstance(word, str) else tuple(map(int, word)) for word in listed)


def _checked_choices(choices: object) -> tuple[str, ...] | None:
    if choices is None:
        return None
    if not isinstance(choices, list | tuple) or not (
        choices and all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise RequestError(
            f"`choices` must be a list of texts, at least one, none empty, not {shown(choices)}."
        )
    _check_length("choices", "".join(choices))
    return tuple(choices)


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"`logit_bias` must map token ids to numbers, not {shown(bias)}.")
    for token, value in bias.items():
        number = _is(value, Real) and (-1e30 <= value <= 100 or value == -math.inf)
        if not (_is(token, Integral) and number):
            raise RequestError(
                "`logit_bias` must map token ids to numbers up to 100, or -inf to forbid one, "
                f"not {shown(token)} to {shown(value)}."
            )
    return {int(token): float(value) for token, value in bias.items()}


def _checked_schema(schema: object) -> dict[str, Any] | None:
    """A copy of its own, of what JSON can say; of a type, its schema."""
    if schema is None:
        return None
    if is_type(schema):
        schema = TypedSchema(schema)
    if not isinstance(schema, Mapping):
        raise RequestError(
            "`schema` must be a JSON schema as a dictionary, or a type such as a pydantic model or "
            f"a dataclass (the class), not {shown(schema)}."
        )
    try:
        text = json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"`schema` must be what JSON can say: {error}.") from None
    _check_length("schema", text)
    if isinstance(schema, TypedSchema):
        return schema
    checked: dict[str, Any] = json.loads(text)
    return checked


def _check_constraints(given: Mapping[str, object]) -> None:
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"`{names[0]}` and `{names[1]}` were given: an answer can follow one.")
    for name in ("regex", "grammar"):
        value = given[name]
        if value is None:
            continue
        if not (isinstance(value, str) and value):
            raise RequestError(f"`{name}` must be text that is not empty, not {shown(value)}.")
        _check_length(name, value)


def _check_length(name: str, text: str) -> None:
    most = CONSTRAINTS[name]
    if len(text) > most:
        raise RequestError(f"`{name}` must have at most {most:,} characters, not {len(text):,}.")


# The filters: scores [vocab] in, scores [vocab] out, -inf for what does not survive.


def penalize(
    logits: NDArray[np.floating], params: SamplingParams, ids: NDArray[np.int64], prompt_tokens: int
) -> NDArray[np.floating]:
    """Repetition penalty over `ids`, presence and frequency penalty over ids[prompt_tokens:]."""
    result = logits.copy()
    seen = np.unique(ids[ids < len(logits)])
    penalty = params.repetition_penalty or 1.0
    result[seen] = np.where(result[seen] < 0, result[seen] * penalty, result[seen] / penalty)
    output, times = np.unique(ids[prompt_tokens:], return_counts=True)
    result[output] -= params.presence_penalty + params.frequency_penalty * times
    return result


def keep_top_k(scores: Scores, k: int) -> Scores:
    """The k largest and what ties with the last of them."""
    if not 0 < k < len(scores):
        return scores
    least = np.partition(scores, -k)[-k]
    return np.where(scores < least, -np.inf, scores)


def keep_top_p(scores: Scores, p: float) -> Scores:
    """The fewest of the largest whose probability reaches p, at least one; of equal scores those
    with the lowest ids (transformers leaves to its sort which)."""
    if p >= 1.0:
        return scores
    ascending = np.argsort(-scores, kind="stable")[::-1]
    weights = np.exp(scores[ascending] - scores.max())
    removed = np.cumsum(weights) <= (1.0 - p) * weights.sum()
    removed[-1] = False
    result = scores.copy()
    result[ascending[removed]] = -np.inf
    return result


def keep_min_p(scores: Scores, p: float) -> Scores:
    """Returns the scores, with -inf for tokens less than p times as probable as the best one."""
    return np.where(np.exp(scores - scores.max()) < p, -np.inf, scores)


class NumpySampler:
    """Samples one generation from logits on the host, with the user's logits processor between the
    penalties and the temperature, where transformers calls custom processors."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        logits_processor: LogitsProcessor | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """params: `resolved`. stop_ids: what min_tokens forbids. Raises RequestError if logit_bias
        does not fit the vocabulary."""
        params.check_bias(vocab_size)
        self.params, self.logits_processor = params, logits_processor
        self._stop_ids = list(stop_ids)
        self.prompt_tokens = len(prompt_ids)
        self.ids = np.array(prompt_ids, np.int64)

    def scores(
        self, logits: NDArray[np.floating], allowed: NDArray[np.bool_] | None = None
    ) -> Scores:
        """Returns the scores that the next token is drawn from: biased, penalised, processed,
        masked, divided by temperature and filtered. logits: [vocab], after the last id; allowed:
        which of the tokens may come next. Raises RequestError if no token is possible.
        """
        params = self.params
        scores = np.array(logits, np.float32)
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += bias
        if params.allowed_token_ids is not None:
            others = np.ones(len(scores), np.bool_)
            others[list(params.allowed_token_ids)] = False
            scores[others] += FORBIDDEN
        if len(self.ids) - self.prompt_tokens < params.min_tokens:
            scores[self._stop_ids] += FORBIDDEN
        if params.penalized:
            scores = penalize(scores, params, self.ids, self.prompt_tokens).astype(np.float32)
        if self.logits_processor is not None:
            returned = self.logits_processor(self.ids.copy(), scores)
            try:
                processed = np.asarray(returned)
            except ValueError:  # lists of unlike lengths
                processed = np.array(None)
            if processed.shape != logits.shape or processed.dtype.kind not in "fiu":
                raise RequestError(
                    f"The logits processor must return logits of shape {logits.shape}, "
                    f"not {processed.shape} of {processed.dtype}."
                )
            scores = processed
        result = scores.astype(np.float64)
        if allowed is not None:
            result[~allowed] = -np.inf
        if np.isnan(result).any() or not np.isfinite(result.max()):
            raise RequestError(
                "The logits hold NaN or infinity, or the logits processor left no token to choose: "
                "at least one must be above -inf."
            )
        if params.greedy:
            return result
        result = keep_top_k(result / (params.temperature or 1.0), params.top_k or 0)
        result = keep_top_p(result, 1.0 if params.top_p is None else params.top_p)
        return keep_min_p(result, params.min_p or 0.0)

    def __call__(
        self, logits: NDArray[np.floating], allowed: NDArray[np.bool_] | None = None
    ) -> int:
        """Choose the next token from the logits [vocab] of the last id, and remember it."""
        scores = self.scores(logits, allowed)
        if not self.params.greedy:
            survivors = np.flatnonzero(scores > -np.inf)
            noise = gumbel(self.params.seed or 0, len(self.ids) - 1, survivors)
            token = int(survivors[np.argmax(scores[survivors] + noise)])
        else:
            token = int(np.argmax(scores))
        self.ids = np.append(self.ids, token)
        return token


def gumbel(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Standard Gumbel noise for the draw of `tokens` after the token at `position`: a function of
    nothing else, the one of kernels/sample_noise.wgsl."""
    counter = np.full(len(tokens), position, np.uint32)
    bits, _ = threefry(seed, counter, tokens.astype(np.uint32))
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-uniform))


def threefry(
    key: int, first: NDArray[np.uint32], second: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Threefry-2x32 with 20 rounds of the 64-bit key and pairs of 32-bit counters.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    schedule = (low, high, low ^ high ^ np.uint32(0x1BD11BDA))
    x, y = first + low, second + high
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def logprobs(logits: NDArray[np.floating], token: int, n: int) -> Logprobs:
    """Returns the log probabilities of `token` and of the n best tokens, before any filter. logits:
    [vocab], as the model computed them."""
    wide = logits.astype(np.float64)
    top = wide.max()
    logprob = wide - top - math.log(np.exp(wide - top).sum())
    best = np.arange(0)
    if n:
        best = np.flatnonzero(logprob >= np.partition(logprob, -n)[-n])  # few, and what ties
        best = best[np.argsort(-logprob[best], kind="stable")][:n]
    return float(logprob[token]), [(int(i), float(logprob[i])) for i in best]
