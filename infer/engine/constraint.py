"""Constraints on the text of an answer: JSON that is valid under a schema, what a regular
expression matches, one of several texts, or what a grammar derives; and words that are not in it.

llguidance follows an answer token by token, and says which tokens may come next; at its end, only
those that end a turn. Its documents say which parts of JSON Schema, of regular expressions (those
of Rust's regex, without look-around) and of Lark it knows; the rest is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import foreign, shown
from infer.engine.bad_words import BadWords
from infer.kernels.errors import InferError, RequestError, UnsupportedError
from infer.sampling import CONSTRAINTS, SamplingParams
from infer.text.schemas import SchemaError, target

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from infer.text.tokenizer import Tokenizer

# Between the parts of JSON, as people write it. Unbounded, some models write nothing else.
WHITESPACE = r" |\n[ \t]{0,20}"
MOST_OPTIONAL = 512  # properties of an object
_MOST_GBNF = 1 << 13  # characters: to translate them takes as long as the square of that
_KNOWN = 64  # grammars that are kept: making one takes milliseconds, a copy of it none
_SEVERAL = 4  # masks that threads make faster than one


def schema_error(schema: Mapping[str, Any]) -> str | None:
    """Why a JSON schema cannot be followed; None if it can, or the library is missing."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return None
    with foreign("`schema` cannot be followed", RequestError):
        if (error := _unusable(schema)) is not None:  # first: some of it would end the process
            return error
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return LLMatcher.validate_grammar(grammar).strip() or None


def _unusable(schema: object) -> str | None:
    """Why a schema would fail in the middle of an answer, or not hold it."""
    return _too_wide(schema) or _circular(schema) or _number_error(schema)


def _check_usable(name: str, schema: object) -> None:
    if (error := _unusable(schema)) is not None:
        raise RequestError(f"{name} cannot be followed: {error}")


def _circular(schema: object) -> str | None:
    """A reference that leads to itself, with nothing between that describes a value."""
    done = set[str]()  # those that do not

    def leads_to(ref: str, above: frozenset[str]) -> bool:
        if ref in above:
            return True
        if ref in done:
            return False
        parts: list[Any] = []
        with suppress(SchemaError):  # which the library says better
            parts.append(target(ref, schema))
        while parts:
            part = parts.pop()
            if isinstance(part, Mapping):
                parts += part["allOf"] if isinstance(part.get("allOf"), list) else ()
                own = part.get("$ref")
                if isinstance(own, str) and leads_to(own, above | {ref}):
                    return True
        done.add(ref)
        return False

    refs = (part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str))
    found = next((ref for ref in refs if leads_to(ref, frozenset())), None)
    return None if found is None else f"$ref {shown(found)} leads to itself, and to no value."


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _too_wide(schema: object) -> str | None:
    """After each property, any later one may come until the next required one, and all of these are
    looked for at once."""
    for part in _parts(schema):
        names, required = part.get("properties"), part.get("required")
        if isinstance(names, Mapping):
            known = required if isinstance(required, list) else ()
            count = len(names.keys() - {name for name in known if isinstance(name, str)})
            if count > MOST_OPTIONAL:
                return (
                    f"an object has {count:,} properties that are not required, and at most "
                    f"{MOST_OPTIONAL} can be followed. Require some, or nest them in objects."
                )
    return None


def _number_error(schema: object) -> str | None:
    """An error for a number of a schema that the library, which counts in float64 and int64, would
    change, that would end the process (the least integer), or would take it minutes."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, Mapping):
            continue
        for key, value in part.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
                parts += value.values()
            elif key in ("const", "enum"):
                for number in _numbers(value):
                    if abs(number) >= _INT64 or _is_rounded(number):
                        return _beyond(key, number)
            elif key in _BOUNDS:
                for number in _numbers(value):
                    if not _is_held(key, number, part.get("type")):
                        return _beyond(key, number)
            elif key == "multipleOf":
                for number in _numbers(value):
                    if len(Decimal(str(number)).normalize().as_tuple().digits) > 5:
                        return f"multipleOf {number}: at most 5 digits before zeros can be followed"
            elif key not in ("default", "examples"):
                parts.append(value)
    return None


_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_FLOAT64, _INT64 = 1 << 53, 1 << 63  # up to which all integers are held


def _numbers(value: object) -> Iterator[int | float]:
    """Yields all numbers in a value of JSON, at any depth."""
    parts: list[Any] = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield part


def _is_rounded(number: int | float) -> bool:
    """Whether float64 does not have it."""
    return isinstance(number, int) and (abs(number) >= 1 << 1023 or float(number) != number)


def _is_held(bound: str, number: int | float, kind: object) -> bool:
    """Whether an answer is held to a bound of numbers of this type."""
    if number <= -_INT64:
        return False
    kinds = kind if isinstance(kind, list) else [kind]
    if bound == "maximum" and number >= _INT64 - 1 and "integer" in kinds and "number" not in kinds:
        return True  # as no greater integers are written
    if bound.startswith("exclusive") and isinstance(number, int):
        return abs(number) < _FLOAT64  # the next one has to be held
    return not _is_rounded(number)


def _beyond(key: str, number: int | float) -> str:
    digits = f"{number:,}" if abs(number) < 10**40 else "a number of more than 40 digits"
    return (
        f"{key} {digits} would be rounded: integers beyond 2^53 are not held exactly. Leave it "
        "out, or make it a string."
    )


def _schemas_in(grammar: str) -> Iterator[object]:
    """The JSON schemas in a grammar."""
    for found in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # which the library says better
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
            yield schema


def library() -> ModuleType:
    """llguidance. Raises InferError if it is missing."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise InferError(
            "Answers by a schema, a regex or a grammar need the package llguidance. Install it: "
            "pip install 'infer-wgpu[structured]', or in a checkout pip install '.[structured]'."
        ) from None


def lark_of(grammar: str) -> str:
    """A grammar in Lark, out of one in GBNF, as llama.cpp has it; another as it is. Raises
    RequestError, and InferError if the library is missing."""
    library()
    from llguidance import gbnf_to_lark

    if gbnf_to_lark.is_lark_syntax(grammar):
        return grammar
    if len(grammar) > _MOST_GBNF:
        raise RequestError(
            f"`grammar` must have at most {_MOST_GBNF:,} characters in GBNF, not {len(grammar):,}. "
            "Write it in Lark."
        )
    with foreign("`grammar` cannot be followed", RequestError):
        return str(gbnf_to_lark.gbnf_to_lark(grammar))


class Constraint:
    """The constraint of one answer."""

    def __init__(
        self,
        name: str,
        matcher: LLMatcher | None,
        tokens: int,
        threads: MaskThreads,
        ends: Collection[int] = (),
        bad_words: BadWords | None = None,
    ) -> None:
        """name: of the option that asks for it. matcher: at its beginning; None: any token may
        come. tokens: those of its tokenizer. threads: those of its model. ends: the tokens that end
        a turn. bad_words: what may not come, unless the matcher leaves nothing else."""
        self.name, self.matcher, self.bad_words = name, matcher, bad_words
        self._beginning = None if matcher is None else matcher.deep_copy()
        self.mask_words, self.threads = -(-tokens // 32), threads
        self._ends = ends
        self._seen: int | None = 0  # tokens; None: not known

    def mask_after(self, tokens: Sequence[int], start: int) -> NDArray[np.uint32]:
        """The mask after tokens[start:], each of which was allowed. Token t may follow if bit t %
        32 of word t / 32 is set. It covers at least the vocabulary. Raises RequestError if that
        takes too long."""
        masks: NDArray[np.uint32] = np.zeros((1, self.mask_words), np.uint32)
        (error,) = self.threads.make([Asked(self, tokens, start, 0)], masks)
        if error is not None:
            raise error
        return masks.reshape(-1)

    def allowed_after(self, tokens: Sequence[int], start: int, vocab: int) -> NDArray[np.bool_]:
        """Returns which tokens may follow tokens[start:], as booleans [vocab]. Raises RequestError
        as `mask_after` does."""
        mask = self.mask_after(tokens, start).view(np.uint8)
        return np.unpackbits(mask, count=vocab, bitorder="little").view(np.bool_)

    @property
    def error(self) -> RequestError | None:
        """Why it cannot be followed any further; None if it can."""
        if self.matcher is None or not self.matcher.is_error():
            return None
        error, _, _ = self.matcher.get_error().partition("\n<non-verbose/>")
        return RequestError(f"{self.name} cannot be followed: {error.strip()}")

    def forced_after(self, tokens: Sequence[int], start: int) -> list[int]:
        """The tokens that must come after tokens[start:]: each will be the only one possible."""
        if self.matcher is None:
            return []
        self.go_on(tokens, start)
        forced: list[int] = self.matcher.compute_ff_tokens()
        return forced

    def count_allowed(self, tokens: Sequence[int], start: int, ids: Sequence[int]) -> int:
        """How many of the first `ids` may come after tokens[start:], one after the other, without
        the end, whatever words they make."""
        before = list(takewhile(lambda token: token not in self._ends, ids))
        if self.matcher is None:
            return len(before)
        self.go_on(tokens, start)
        count: int = self.matcher.validate_tokens(before)
        return count

    def go_on(self, tokens: Sequence[int], start: int) -> None:
        """Advance the matcher to after tokens[start:]."""
        if self.matcher is None or self._beginning is None:
            return
        seen, self._seen = self._seen, None  # an interrupt may come
        count = len(tokens) - start
        if seen is None or seen > count:
            self.matcher, seen = self._beginning.deep_copy(), 0
        self.matcher.consume_tokens(list(tokens[start + seen :]))
        self._seen = count


class Asked(NamedTuple):
    """A request for a mask, and one more after each drafted token; all of these are allowed.

    start: where the answer begins in its tokens. row: of the first mask; the others follow.
    """

    constraint: Constraint
    tokens: Sequence[int]
    start: int
    row: int
    draft: Sequence[int] = ()

    @property
    def rows(self) -> range:
        return range(self.row, self.row + 1 + len(self.draft))


class MaskThreads:
    """The threads that make the masks of a model's answers."""

    def __init__(self, executor: LLExecutor | None = None) -> None:
        """executor: given before the first constraint that has a matcher."""
        self.executor = executor
        self._first = ThreadPoolExecutor(1, "masks")  # waits for the others

    @contextmanager
    def making(
        self, asked: Sequence[Asked], masks: NDArray[np.uint32]
    ) -> Iterator[Future[list[RequestError | None]]]:
        """Write the `mask_after` of each to its rows of masks [rows, words], by a thread, while the
        block runs and until its end at the latest. The result has what each would raise."""
        made = self._first.submit(self.make, asked, masks)
        try:
            yield made
        finally:  # nothing else may touch them before
            wait([made])

    def make(self, asked: Sequence[Asked], masks: NDArray[np.uint32]) -> list[RequestError | None]:
        """Writes the masks as `making` does, in this thread. Returns the error of each, or None."""
        words = asked[0].constraint.mask_words
        if masks.shape[1] == words:
            self._fill(asked, masks)
        else:  # tokenizer and model have not equally many tokens
            made = np.zeros((len(masks), words), np.uint32)
            self._fill(asked, made)
            for each in asked:
                masks[each.rows] = made[each.rows, : masks.shape[1]]
        return [each.constraint.error for each in asked]

    def _fill(self, asked: Sequence[Asked], masks: NDArray[np.uint32]) -> None:
        begin, nbytes = masks.ctypes.data, masks.strides[0]
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for each in asked:
            constraint, tokens, start, row, draft = each
            constraint.go_on(tokens, start)
            if constraint.matcher is None:
                masks[each.rows] = 0xFFFFFFFF
            elif draft:
                drafted.append((constraint.matcher, row, list(draft)))
            else:
                plain.append((constraint.matcher, row))
        if drafted:
            of = begin, nbytes, len(masks)
            self._made_by.unsafe_compute_mask_ptr_with_draft_token(drafted, *of)
        if len(plain) >= _SEVERAL:
            self._made_by.unsafe_compute_mask_ptr(plain, begin, nbytes, len(masks))
        else:
            for matcher, row in plain:
                matcher.unsafe_compute_mask_ptr(begin + row * nbytes, nbytes)
        for each in asked:
            if (words := each.constraint.bad_words) is not None:
                first = max(each.start, len(each.tokens) - words.longest)
                so_far = [*each.tokens[first:], *each.draft]
                for i, row in enumerate(reversed(each.rows)):
                    words.forbid(masks[row], so_far[: len(so_far) - i])

    @property
    def _made_by(self) -> LLExecutor:
        assert self.executor is not None
        return self.executor


class Constraints:
    """The constraints of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._threads = MaskThreads()
        self._first = Lock()  # of many answers that come at once
        self._grammars: _Grammars | None = None  # made for the first answer that needs them

    def of(self, params: SamplingParams) -> Constraint | None:
        """The constraint that the parameters ask for, if they do. Raises RequestError for what the
        library does not know, InferError where the library is missing, and UnsupportedError for a
        tokenizer that it does not know."""
        if not params.masked:
            return None
        words = BadWords(params.bad_word_ids) if params.bad_word_ids else None
        name = next((n for n in CONSTRAINTS if getattr(params, n) is not None), None)
        if name is None:
            size = max(self._vocab_size, self._tokenizer.size)  # as of all others
            return Constraint("bad_words", None, size, self._threads, bad_words=words)
        with self._first:
            if self._grammars is None:
                self._grammars = _Grammars(self._tokenizer, self._vocab_size, self._threads)
        return self._grammars.constraint(name, self._grammars.matcher(name, params), words)


class _Grammars:
    """Matchers of llguidance for one model, whose tokens the library is told once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, threads: MaskThreads) -> None:
        llguidance = library()
        self._matcher = llguidance.LLMatcher
        self._beginning = lru_cache(_KNOWN)(self._new_beginning)
        self._threads, threads.executor = threads, llguidance.LLExecutor()
        # So that no step of others waits for seconds, and MOST_OPTIONAL properties fit: a mask of
        # so many items takes 50 ms. Errors go to who gave the grammar, and need not say all of it.
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=200_000,
            step_max_items=100_000,
            max_items_in_row=10_000,
            verbose_errors=False,
        )
        self._ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        if not self._ends:
            raise UnsupportedError(
                "This model's files name no token that ends an answer, which one by a schema, a "
                "regex or a grammar needs."
            )
        with foreign("llguidance does not know this tokenizer", UnsupportedError):
            self._size = max(vocab_size, tokenizer.size)  # either may have more
            self._tokenizer = _library_tokenizer(llguidance, tokenizer, self._size, self._ends)
        self._text_ids = tokenizer.added_text_ids

    def matcher(self, name: str, params: SamplingParams) -> LLMatcher:
        """The matcher, at its beginning, of the parameter with that name. Raises RequestError for
        what the library does not know."""
        with foreign(f"`{name}` cannot be followed", RequestError):  # nested too deeply, no Unicode
            source = self._source(params)
        return self._beginning(name, source).deep_copy()

    def _source(self, params: SamplingParams) -> str:
        """Returns the source, for llguidance, of the schema, regular expression or grammar."""
        grammar: str
        if (pattern := params.pattern) is not None:
            grammar = self._matcher.grammar_from_regex(pattern)
        elif params.schema is not None:
            _check_usable("schema", params.schema)
            spaces = {"whitespace_pattern": WHITESPACE}
            grammar = self._matcher.grammar_from_json_schema(json.dumps(params.schema), spaces)
        else:
            assert params.grammar is not None
            for schema in _schemas_in(params.grammar):
                _check_usable("grammar", schema)
            grammar = self._matcher.grammar_from_lark(_by_ids(params.grammar, self._text_ids))
        return grammar

    def _new_beginning(self, name: str, source: str) -> LLMatcher:
        """The matcher at the beginning of every answer with the same constraint."""
        with foreign(f"`{name}` cannot be followed", RequestError):
            matcher: LLMatcher = self._matcher(
                self._tokenizer, source, log_level=0, limits=self._limits
            )
            # Finds what is wrong, and the first takes longest.
            self.constraint(name, matcher).mask_after((), 0)
        return matcher

    def constraint(
        self, name: str, matcher: LLMatcher, words: BadWords | None = None
    ) -> Constraint:
        return Constraint(name, matcher, self._size, self._threads, self._ends, words)


def _library_tokenizer(
    llguidance: ModuleType, tokenizer: Tokenizer, size: int, ends: Sequence[int]
) -> LLTokenizer:
    """The tokenizer as the library sees it, of `size` tokens: special tokens, and `ends`, are none
    of them text, all others are.

    Of a tokenizer.json the library takes every added token of the form <...> for special, and finds
    special tokens in texts that spell their names.
    """
    names = {i: tokenizer.token_text(i) for i in {*tokenizer.special_names.values(), *ends}}
    encoder = llguidance.LLTokenizer(_encoder_json(tokenizer.to_json()), size, ends, slices=[])

    def text_of(token: int) -> bytes:
        text: bytes = encoder.decode_bytes([token]) if tokenizer.is_shown(token) else b""
        return text

    # The attributes and the call that the library asks of a foreign tokenizer. The call goes
    # straight into Rust, because Ctrl-C could interrupt Python code.
    vocabulary = {
        "is_tokenizer_wrapper": True,
        "bos_token_id": None,
        "eos_token_id": ends[0],
        "special_token_ids": sorted(names),
        "tokens": [names[i].encode() if i in names else text_of(i) for i in range(size)],
        "__call__": staticmethod(encoder.tokenize_str),
    }
    made: LLTokenizer = llguidance.LLTokenizer(type("Vocabulary", (), vocabulary)(), size, ends)
    return made


def _encoder_json(tokenizer: str) -> str:
    """The tokenizer.json of an encoder in the form that the library reads: its tokens have exactly
    the text that is given, which is neither normalized nor has special tokens in it."""
    description = json.loads(tokenizer)
    model, added, decoder = (description[key] for key in ("model", "added_tokens", "decoder"))
    special = {token["content"] for token in added if token["special"]}

    def unseen(name: str) -> str:
        return f"\ufdd0{name}" if name in special else name  # begins with what is no character

    for token in added:
        token |= {"content": unseen(token["content"]), "lstrip": False, "rstrip": False}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {unseen(name): i for name, i in vocab.items()}
    else:
        model["vocab"] = [[unseen(name), score] for name, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = unseen(model["unk_token"])
    if "merges" in model:
        merges = model["merges"]
        model["merges"] = [each for each in merges if special.isdisjoint((*each, "".join(each)))]
    description["normalizer"] = _marked_spaces(description["normalizer"])
    description["post_processor"] = None
    if decoder is not None and decoder["type"] == "Metaspace":  # unknown to it, unlike its parts
        space = {"pattern": {"String": decoder["replacement"]}, "content": " "}
        decoders = [{"type": "Replace", **space}, {"type": "ByteFallback"}, {"type": "Fuse"}]
        description["decoder"] = {"type": "Sequence", "decoders": decoders}
    return json.dumps(description)


def _marked_spaces(normalizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The steps of a normalizer that write spaces in the form that the vocabulary has; None if it
    has none."""
    if normalizer is None or normalizer["type"] != "Sequence":
        is_space = normalizer is not None and normalizer.get("pattern") == {"String": " "}
        return normalizer if is_space else None
    steps = [step for step in map(_marked_spaces, normalizer["normalizers"]) if step is not None]
    return {"type": "Sequence", "normalizers": steps}


# A comment, a text or a regular expression of Lark, or what may be the name of a token.
_LARK = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)')


def _by_ids(grammar: str, ids: Mapping[str, int]) -> str:
    """A grammar with the names of these tokens replaced by their ids: the library knows the names
    of special tokens alone."""
    return _LARK.sub(lambda found: f"<[{ids[found[1]]}]>" if found[1] in ids else found[0], grammar)
