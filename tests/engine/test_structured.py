"""Answers that are held to something: by the engine, to masks whose tokens a test can compute; by
the demo model, to what jsonschema, re and pydantic accept."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import places
import pytest
from engines import answer
from families import demo_tokenizer
from marks import others_full
from numpy.typing import NDArray
from reference_models import load as reference
from reference_models import relative_error
from typer.testing import CliRunner

import infer
import infer.engine.scheduler
from infer import LLM, InferError, RequestError
from infer.chat_answers import Reading
from infer.cli.app import app
from infer.engine.answers import Answer
from infer.engine.constraint import (
    MOST_OPTIONAL,
    Constraint,
    Constraints,
    MaskThreads,
    schema_error,
)
from infer.engine.engine import Engine
from infer.engine.speculation import Drafter, Speculation
from infer.engine.token_engine import Step
from infer.hub import DEMO
from infer.kernels.errors import UnsupportedError
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams
from infer.text.detokenizer import StreamingDetokenizer
from infer.text.folder_tokenizer import folder_tokenizer
from infer.text.tokenizer import Tokenizer
from infer.text.tools import check_tools

STEPS = 12
NOT = '{"not": {}}'
TEXTS = places.DATA / "text"

# The engine


def every_third(vocab: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Returns which tokens may follow, as booleans [vocab]: that depends on all tokens before."""
    allowed: NDArray[np.bool_] = (np.arange(vocab) + sum(tokens) + len(tokens)) % 3 == 0
    return allowed


class Third:
    """A matcher in place of llguidance's, which allows every third token."""

    def __init__(self, vocab: int, fails_after: int = 1 << 30, interrupts: int = 1 << 30) -> None:
        """interrupts: of so many tokens, the first time."""
        self.vocab, self.fails_after, self.interrupts = vocab, fails_after, [interrupts]
        self.tokens: list[int] = []

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        return every_third(self.vocab, tokens)

    def deep_copy(self) -> Third:
        other = type(self)(self.vocab, self.fails_after)
        other.tokens, other.interrupts = list(self.tokens), self.interrupts
        return other

    def consume_tokens(self, tokens: list[int]) -> bool:
        for token in tokens:
            assert self.allowed(self.tokens)[token]
            self.tokens.append(token)
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, nbytes: int) -> None:
        if len(self.tokens) == self.interrupts[0]:
            self.interrupts.clear()
            self.interrupts.append(1 << 30)
            raise KeyboardInterrupt
        bits = np.zeros(8 * nbytes, np.bool_)
        bits[: self.vocab] = self.allowed(self.tokens)
        ctypes.memmove(pointer, np.packbits(bits, bitorder="little").ctypes.data, nbytes)

    def compute_ff_tokens(self) -> list[int]:
        forced: list[int] = []
        while (allowed := self.allowed([*self.tokens, *forced])).sum() == 1:
            forced.append(int(allowed.argmax()))
        return forced

    def validate_tokens(self, tokens: list[int]) -> int:
        so_far = list(self.tokens)
        for i, token in enumerate(tokens):
            if not self.allowed(so_far)[token]:
                return i
            so_far.append(token)
        return len(tokens)

    def is_error(self) -> bool:
        return len(self.tokens) >= self.fails_after

    def get_error(self) -> str:
        return "too much"


class Executor:
    """Makes several masks in place of that of llguidance."""

    def unsafe_compute_mask_ptr(
        self, asked: list[tuple[Third, int]], begin: int, nbytes: int, rows: int
    ) -> None:
        for matcher, row in asked:
            assert row < rows
            matcher.unsafe_compute_mask_ptr(begin + row * nbytes, nbytes)

    def unsafe_compute_mask_ptr_with_draft_token(
        self, asked: list[tuple[Third, int, list[int]]], begin: int, nbytes: int, rows: int
    ) -> None:
        for matcher, row, draft in asked:
            copy = matcher.deep_copy()
            self.unsafe_compute_mask_ptr([(copy, row)], begin, nbytes, rows)
            for i, token in enumerate(draft):
                copy.consume_tokens([token])
                self.unsafe_compute_mask_ptr([(copy, row + 1 + i)], begin, nbytes, rows)


def constraint_of(vocab: int, matcher: Third | None = None) -> Constraint:
    return Constraint("regex", matcher or Third(vocab), vocab, MaskThreads(Executor()))


def masked(
    engine: Engine,
    ids: Sequence[int],
    steps: int = STEPS,
    matcher: Third | None = None,
    logits_processor: Any = None,
    **sampling: Any,
) -> Answer:
    params = SamplingParams(max_tokens=steps, regex="of the test", **sampling).resolved({})
    return engine.generate(
        ids,
        params,
        with_logits=True,
        logits_processor=logits_processor,
        constraint=constraint_of(engine.vocab_size, matcher),
    )


def free(engine: Engine, ids: Sequence[int], steps: int = STEPS) -> Answer:
    params = SamplingParams(max_tokens=steps).resolved({})
    return engine.generate(ids, params, with_logits=True)


def together(answers: Sequence[Answer]) -> list[list[Step]]:
    """They take turns."""
    taken: list[list[Step]] = [[] for _ in answers]
    while not all(item.ended for item in answers):
        for item, steps in zip(answers, taken, strict=True):
            steps += [step for step in [next(item, None)] if step is not None]
    for item, steps in zip(answers, taken, strict=True):
        steps += item
    return taken


def assert_follows(steps: Sequence[Step], vocab: int) -> None:
    """Each token is the most probable of those that those before it leave."""
    tokens = [step.token for step in steps]
    assert len(set(tokens)) > 2
    for i, step in enumerate(steps):
        assert step.logits is not None
        allowed = every_third(vocab, tokens[:i])
        assert step.token == np.where(allowed, step.logits, -np.inf).argmax()


@others_full("case", ["llama", "lfm2", "granitemoehybrid_mamba", "qwen3_next"], ["llama", "lfm2"])
def test_masked_answers_beside_free_ones(engine_of: Callable[..., Engine], case: str) -> None:
    """Five answers on four slots. The free ones are what they are alone; the masked ones follow
    their masks, though each step's body is submitted before the token that it embeds is known."""
    engine = engine_of(case, max_batch=4)
    ids: list[int] = reference(case).prompt_ids.tolist()
    alone = [answer(engine, ids, STEPS), answer(engine, ids[3:], 7)]
    engine.forget()
    found = together(
        [
            free(engine, ids),
            masked(engine, ids),
            masked(engine, ids[5:12], 9),
            free(engine, ids[3:], 7),
            masked(engine, ids[:1]),
        ]
    )
    for steps, expected in zip((found[0], found[3]), alone, strict=True):
        assert [step.token for step in steps] == expected.token_ids
        assert relative_error(np.stack([s.logits for s in steps]), expected.logits) <= 2e-5
    for steps, count in zip((found[1], found[2], found[4]), (STEPS, 9, STEPS), strict=True):
        assert len(steps) == count
        assert_follows(steps, engine.vocab_size)
    assert engine.pool.stats.in_use == 0
    engine.forget()
    again = [step.token for step in masked(engine, ids)]
    assert again == [step.token for step in found[1]]


@pytest.mark.parametrize("ahead", [1, 3])
def test_masks_with_other_numbers_of_steps_in_flight(
    engine_of: Callable[..., Engine], ahead: int
) -> None:
    engine = engine_of("llama", max_batch=4, ahead=ahead)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    found = together([masked(engine, ids), free(engine, ids[3:]), masked(engine, ids[5:])])
    assert_follows(found[0], engine.vocab_size)
    assert_follows(found[2], engine.vocab_size)


@pytest.mark.parametrize("pieces", [6, 1000])
def test_a_prompt_in_many_submissions(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Wherever it is cut, nothing samples before the masks are written."""
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    expected = [step.token for step in masked(engine, ids, logprobs=1, **SAMPLED)]
    assert every_third(engine.vocab_size, [])[expected[0]]
    engine.forget()
    engine.runner.sampler.masks[:] = 0
    engine.runner.sampler.write_masks(0, 3)
    monkeypatch.setattr(engine.runner.pace, "submissions", lambda rows, position: pieces)
    assert [step.token for step in masked(engine, ids, logprobs=1, **SAMPLED)] == expected


def test_only_steps_with_a_mask_are_submitted_in_two_parts(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = reference("llama").prompt_ids.tolist()[:5]
    send, count = engine.runner.queue.send, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return send(*args)

    monkeypatch.setattr(engine.runner.queue, "send", counted)
    for begin, parts in ((free, 1), (masked, 2)):
        engine.forget()
        count = 0
        assert len(list(begin(engine, ids))) == STEPS
        assert count == 1 + (STEPS - 1) * parts, begin


SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 5,
    "top_k": 50,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "logit_bias": {7: 1.0},
}


@pytest.mark.parametrize("sampling", [{"temperature": 1.0, "seed": 1}, SAMPLED])
def test_numpy_samples_masked_answers_alike(
    engine_of: Callable[..., Engine], sampling: dict[str, Any]
) -> None:
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    on_gpu = [step.token for step in masked(engine, ids, **sampling)]
    same = masked(engine, ids, logits_processor=lambda _, logits: logits, **sampling)
    assert [step.token for step in same] == on_gpu
    for i, token in enumerate(on_gpu):
        assert every_third(engine.vocab_size, on_gpu[:i])[token]


def test_out_of_pages_a_masked_answer_is_computed_anew(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four answers grow to two pages each, of which there are seven."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)  # so that all of them begin
    engine = engine_of("llama", max_batch=4, context=3 * PAGE, cache_positions=7 * PAGE)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    before = engine.scheduler.preemptions
    for steps in together([masked(engine, ids[i:], 2 * PAGE - len(ids)) for i in range(4)]):
        assert len(steps) == 2 * PAGE - len(ids)
        assert_follows(steps, engine.vocab_size)
    assert engine.scheduler.preemptions > before


def test_a_mask_that_fails_ends_its_answer_alone(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    expected = answer(engine, ids, STEPS).token_ids
    good, other = free(engine, ids), masked(engine, ids[3:])
    bad = masked(engine, ids[5:], matcher=Third(engine.vocab_size, fails_after=3))
    with pytest.raises(RequestError, match="too much"):
        list(bad)
    closed = masked(engine, ids[7:])
    next(closed)
    closed.close()
    assert list(closed) == []
    assert [step.token for step in good] == expected
    assert_follows(list(other), engine.vocab_size)
    assert engine.pool.stats.in_use == 0
    assert engine.scheduler.idle


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupt_in_a_mask_loses_nothing(engine_of: Callable[..., Engine], after: int) -> None:
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = reference("llama").prompt_ids.tolist()
    other = free(engine, ids)
    bad = masked(engine, ids[5:], matcher=Third(engine.vocab_size, interrupts=after))
    steps: list[Step] = []
    with pytest.raises(KeyboardInterrupt):
        steps.extend(bad)
    steps.extend(bad)
    assert_follows(steps, engine.vocab_size)
    assert [step.token for step in other] == answer(engine, ids, STEPS).token_ids


# Answers that are held to a schema or a grammar


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO, max_batch=4, context=512, invariant=True) as llm:
        yield llm


@pytest.mark.demo
def test_a_constraint_that_an_interrupt_has_left_begins_again(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abcabc", add_special_tokens=False)
    constraint = llm.constraint(SamplingParams(regex="[abc]{6}"))
    assert constraint is not None
    expected = [constraint.mask_after(ids[:n], 0).tolist() for n in range(len(ids) + 1)]
    for n in (0, 2, 1, len(ids)):
        assert constraint.mask_after([9, 9, *ids[:n]], 2).tolist() == expected[n]
    constraint._seen = None  # consumed, and not noted
    assert constraint.mask_after(ids[:2], 0).tolist() == expected[2]


@pytest.mark.demo
def test_answers_under_one_grammar_go_their_own_ways(llm: LLM) -> None:
    params = SamplingParams(regex="[abc]{4}d")
    ids = llm.tokenizer.encode("abcad", add_special_tokens=False)
    first, second = llm.constraint(params), llm.constraint(params)
    assert first is not None
    assert second is not None
    masks = [first.mask_after(ids[:n], 0).tolist() for n in range(len(ids) + 1)]
    assert masks[0] != masks[-1]
    for constraint in (second, llm.constraint(params)):
        assert constraint is not None
        assert [constraint.mask_after(ids[:n], 0).tolist() for n in range(len(ids) + 1)] == masks


SCHEMAS: list[dict[str, Any]] = [
    {"const": "fixed"},
    {"enum": ["red", 2, None, [True]]},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]+x$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": ["integer", "null"]},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 1}], "items": False},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 3, "minimum": 0}}, "additionalProperties": False},
        ]
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "n": {"type": "integer", "maximum": 99}},
                "required": ["kind", "n"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
    },
    {
        "type": "object",
        "properties": {'ä "ö"': {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
]


def error_of(schema: dict[str, Any], text: str) -> str | None:
    """Returns jsonschema's message about an answer, formats included; None for a valid one."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return next((each.message for each in validator.iter_errors(json.loads(text))), None)


@pytest.mark.demo
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
def test_answers_are_valid_under_their_schemas(llm: LLM, first: int) -> None:
    """Sampled, many at once, and a free one among them, which is what it is alone."""
    schemas = SCHEMAS[first::2]
    free = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    alone = llm.chat("Tell me a story.", **free)
    streams = [
        llm.stream(
            [{"role": "user", "content": "Write."}],
            schema=schema,
            temperature=1.0,
            seed=seed,
            max_tokens=50,
        )
        for seed, schema in enumerate(schemas)
    ]
    beside = llm.stream([{"role": "user", "content": "Tell me a story."}], **free)
    for stream in [*streams[:5], beside, *streams[5:]]:
        stream._begin()
    results = [stream._finish() for stream in streams]
    assert beside._finish().token_ids == alone.token_ids
    cut = 0
    for schema, result in zip(schemas, results, strict=True):
        if result.finish_reason == "length":
            cut += 1
        else:
            assert error_of(schema, result.text) is None, (schema, result.text)
    assert cut <= 2


@pytest.mark.full
@pytest.mark.demo
def test_answers_are_valid_under_the_schemas_of_a_suite(llm: LLM) -> None:
    """300 of the JSON-Schema-Test-Suite, which the variable names, as it does for jsonschema's own
    tests; that package's source has it. What is not refused is valid, or cut."""
    folder = os.environ.get("JSON_SCHEMA_TEST_SUITE")
    if folder is None:
        pytest.skip("JSON_SCHEMA_TEST_SUITE names no folder")
    files = sorted(Path(folder).glob("tests/draft2020-12/*.json"))
    assert files
    cases = [case["schema"] for path in files for case in json.loads(path.read_bytes())]
    schemas = [each for each in cases if isinstance(each, dict)]
    count = Counter[str]()
    for seed, schema in enumerate(random.Random(0).sample(schemas, 300)):
        options = {"temperature": 1.0, "seed": seed, "max_tokens": 150}
        try:
            result = llm.chat("Write JSON.", schema=schema, **options)
        except RequestError:
            count["refused"] += 1
            continue
        if result.finish_reason == "length":
            count["cut"] += 1
            continue
        # The validator divides floats.
        if schema.get("multipleOf") != 0.0001:
            assert error_of(schema, result.text) is None, (schema, result.text)
        count["valid"] += 1
    print(dict(count))
    assert count["valid"] > 120
    assert count["cut"] < 30


@pytest.mark.demo
@others_full(
    "pattern",
    [r"[A-C]{3}-\d{2,4}", r"(ja|nein|naïve)(, bitte)?", r"\w+ \w+"],
    [r"(ja|nein|naïve)(, bitte)?"],
)
def test_answers_match_their_regular_expressions(llm: LLM, pattern: str) -> None:
    options = {"regex": pattern, "temperature": 1.0, "max_tokens": 60}
    for result in llm.chat("Hello", n=4, seed=3, **options):
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text), result.text


@pytest.mark.demo
def test_an_answer_is_derived_by_its_grammar(llm: LLM) -> None:
    grammar = """
        start: "(" list ")"
        list: item ("," item){2}
        item: /[a-c]+/ | "(" list ")"
    """
    result = llm.chat("Hello", grammar=grammar, temperature=1.0, seed=8, max_tokens=200)
    assert result.finish_reason == "stop"
    reduced = re.sub(r"[a-c]+", "i", result.text)
    while reduced != (smaller := reduced.replace("(i,i,i)", "i")):
        reduced = smaller
    assert reduced == "i", result.text


@pytest.mark.demo
def test_what_else_a_held_answer_is_asked(llm: LLM) -> None:
    schema = SCHEMAS[-1]
    options = {"schema": schema, "seed": 2, "temperature": 1.0, "max_tokens": 100}
    whole = llm.chat("Write.", **options)
    assert whole.finish_reason == "stop"
    assert json.loads(whole.text)["value"] in range(10)
    # The answer comes again from the cache, as a stream.
    again = llm.stream([{"role": "user", "content": "Write."}], **options)
    assert "".join(map(str, again)) == whole.text
    assert again.result.timings.reused_tokens > 0
    # Cut: by a stop string, and by max_tokens.
    before, _, _ = whole.text.partition('"next"')
    stopped = llm.chat("Write.", stop='"next"', **options)
    assert (stopped.text, stopped.finish_reason) == (before, "stop")
    cut = llm.chat("Write.", **options | {"max_tokens": 3})
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:3], "length")
    # Log probabilities are the model's own.
    told = llm.chat("Write.", logprobs=2, **options)
    assert told.token_ids == whole.token_ids
    assert told.logprobs is not None
    assert any(each.token_id not in [t.token_id for t in each.top] for each in told.logprobs)


@pytest.mark.demo
def test_a_pydantic_model_is_a_schema(llm: LLM) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):  # type: ignore[misc]
        x: int = pydantic.Field(ge=0, le=9)
        tags: list[bool] = pydantic.Field(max_length=2)

    result = llm.chat("Write.", schema=Point, temperature=1.0, seed=1, max_tokens=200)
    assert result.finish_reason == "stop"
    assert 0 <= Point.model_validate_json(result.text).x <= 9
    assert json.loads(result.text).keys() == {"x", "tags"}  # which pydantic does not ask for


def wide(count: int, **others: Any) -> dict[str, Any]:
    """An object with so many properties."""
    kinds = {"type": ["string", "null"]}, {"type": "integer"}, {"type": "object"}
    properties = {f"property_{i}": kinds[i % 3] for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False} | others


@pytest.mark.demo
@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_as_many_optional_properties_as_are_taken(llm: LLM, indent: int | str | None) -> None:
    """No answer with so many optional properties fails in the middle, however it is written."""
    schema = wide(700, required=[f"property_{i}" for i in range(700 - MOST_OPTIONAL)])
    required = {f"property_{i}": ("", 1, {})[i % 3] for i in range(700 - MOST_OPTIONAL)}
    value = required | {"property_300": "", "property_301": 7, "property_699": ""}
    assert error_of(schema, json.dumps(value)) is None
    constraint = llm.constraint(SamplingParams(schema=schema))
    assert constraint is not None
    ids = llm.tokenizer.encode(json.dumps(value, indent=indent), add_special_tokens=False)
    assert constraint.count_allowed((), 0, ids) == len(ids)
    tail = len(json.dumps({"property_300": "", "property_301": 7}, indent=indent))
    for n in [0, 1, *range(len(ids) - tail, len(ids))]:
        assert constraint.allowed_after(ids[:n], 0, llm.engine.vocab_size)[ids[n]]


def circular(*steps: str) -> dict[str, Any]:
    """An object whose property's references go this way."""
    refs = pairwise(steps)
    definitions = {each: {"allOf": [{"$ref": f"#/$defs/{other}"}]} for each, other in refs}
    properties = {"a": {"$ref": f"#/$defs/{steps[0]}"}}
    return {"properties": properties, "required": ["a"], "$defs": definitions}


BIG = 2**53 + 1  # which float64 does not have


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": [1, BIG]}, "enum 9,007,199,254,740,993 would be rounded"),
        ({"const": {"a": [-BIG]}}, "const -9,007,199,254,740,993"),
        ({"const": -(2**63)}, "const -9,223,372,036,854,775,808"),  # ends the process
        ({"type": "integer", "enum": [-1e19]}, "enum -1"),  # so does this
        ({"type": "integer", "const": 10**400}, "a number of more than 40 digits"),
        ({"type": "integer", "minimum": BIG}, "minimum 9,007,199,254,740,993"),
        ({"type": "integer", "maximum": -BIG}, "maximum -9,007,199,254,740,993"),
        ({"type": "number", "maximum": 2**63 - 1}, "maximum 9,223,372,036,854,775,807"),
        ({"type": "integer", "minimum": -1e300, "maximum": -1e300}, "minimum a number of more"),
        ({"exclusiveMinimum": BIG - 1, "type": "integer"}, "exclusiveMinimum 9,007"),
        ({"exclusiveMaximum": 2**63 - 1, "type": "integer"}, "exclusiveMaximum 9,223"),
        ({"type": "integer", "multipleOf": BIG}, "multipleOf 9007199254740993"),
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf 1000003"),  # takes minutes
        ({"properties": {"const": {"items": {"const": BIG}}}}, "const 9,007"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": [BIG]}}}, "enum 9,007"),
    ],
)
def test_numbers_that_cannot_be_held(schema: dict[str, Any], message: str) -> None:
    """Are refused by name, wherever a schema comes in."""
    tokenizer = folder_tokenizer(TEXTS / "llama3")
    constraints = Constraints(tokenizer, tokenizer.size)
    with pytest.raises(RequestError, match=f"schema cannot be followed: .*{re.escape(message)}"):
        constraints.of(SamplingParams(schema=schema))
    grammar = f'start: "a" %json {json.dumps(schema)}'
    with pytest.raises(RequestError, match=f"grammar cannot be followed: .*{re.escape(message)}"):
        constraints.of(SamplingParams(grammar=grammar))
    function = {"name": "f", "strict": True, "parameters": {"properties": {"x": schema}}}
    tools = check_tools([{"type": "function", "function": function}], "required")
    reading = Reading.of(tokenizer, tools, [], None)
    with pytest.raises(RequestError, match=f"parameters of f .*{re.escape(message)}"):
        reading.held(SamplingParams())


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"enum": [BIG - 1, -BIG + 1]}, BIG - 1, BIG),
        ({"const": 2**60}, 2**60, 2**60 + 1),
        ({"type": "integer", "minimum": BIG - 1}, BIG - 1, BIG - 2),
        ({"type": ["integer", "null"], "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
        ({"type": "integer", "exclusiveMaximum": BIG - 2}, BIG - 3, BIG - 2),
        ({"type": "integer", "multipleOf": 86_400}, 172_800, 172_801),
        ({"properties": {"enum": {"default": BIG}}, "type": "object"}, {"enum": 1}, None),
    ],
)
def test_numbers_that_are_held(schema: dict[str, Any], valid: Any, wrong: Any) -> None:
    tokenizer = folder_tokenizer(TEXTS / "llama3")
    constraints = Constraints(tokenizer, tokenizer.size)
    for value in (valid, wrong):
        constraint = constraints.of(SamplingParams(schema=schema))
        assert constraint is not None
        ids = tokenizer.encode(json.dumps(value), add_special_tokens=False)
        taken = constraint.count_allowed((), 0, ids) == len(ids)
        whole = taken and constraint.allowed_after(ids, 0, tokenizer.size)[[1, 2, 3]].all()
        assert bool(whole) == (error_of(schema, json.dumps(value)) is None) == (value is valid)


NESTED = json.loads('{"items": ' * 400 + "{}" + "}" * 400)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": {"not": {"type": "string"}}}, r'schema cannot be followed: .*"not"'),
        ({"schema": {"type": "array", "uniqueItems": True}}, r'"uniqueItems"'),
        ({"schema": {"type": "text"}}, "Invalid type: text"),
        ({"schema": {"$ref": "https://example.org/other"}}, "not present"),
        ({"schema": False}, "schema must be a JSON schema as a dictionary"),
        ({"schema": {"const": {1, 2}}}, "schema must be what JSON can say"),
        ({"schema": {"const": float("nan")}}, "schema must be what JSON can say"),
        ({"schema": {"enum": ["x" * 300_000]}}, "at most 65,536 characters, not 300,"),
        ({"schema": {"items": wide(513)}}, "has 513 properties that are not required, and at most"),
        ({"schema": {"$ref": "#"}}, "'#' leads to itself"),
        ({"schema": circular("x", "y", "x")}, "'#/.defs/.' leads to itself"),
        ({"schema": NESTED}, "schema cannot be followed: recursion limit"),
        ({"regex": "(a"}, "(?s)regex cannot be followed: .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a" * 20_000}, "at most 16,384 characters, not 20,000"),
        ({"regex": ""}, "not empty"),
        ({"grammar": "start: word"}, '(?s)grammar cannot be followed: .*unknown name: "word"'),
        ({"grammar": 5}, "grammar must be text"),
        ({"grammar": "start: x", "regex": "x"}, "regex and grammar were given"),
    ],
)
def test_what_nothing_can_be_held_to(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.stream("Hello", **options)


@pytest.mark.demo
def test_references_that_lead_to_a_value(llm: LLM) -> None:
    """Through themselves, too."""
    tree = {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}
    for schema in (tree, circular("x", "y", "z") | {"$defs": {"x": {"const": 3}}}):
        assert llm.constraint(SamplingParams(schema=schema)) is not None
        assert schema_error(schema) is None


@pytest.mark.demo
def test_a_schema_in_a_file(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infer run` takes a schema, a regular expression or a grammar for an answer and for a file of
    prompts, whose lines may have their own."""
    monkeypatch.setattr("infer.loading.load", lambda *_, **__: llm)
    monkeypatch.setattr(LLM, "close", lambda _: None)
    schema, wrong, prompts = (tmp_path / name for name in ("s.json", "w.json", "p.jsonl"))
    schema.write_text(json.dumps({"enum": [["a"], ["b"]]}))
    lines = [{"prompt": "Hi"}, {"prompt": "Hi", "schema": None, "regex": "x{3}"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))

    def run(*given: str | Path) -> Any:
        return CliRunner().invoke(app, ["run", DEMO, "-q", *map(str, given)])

    assert json.loads(run("Hi", "--schema", schema).stdout) in (["a"], ["b"])
    answers = run("--file", prompts, "--schema", schema).stdout.splitlines()
    texts = {answer["id"]: answer["text"] for answer in map(json.loads, answers)}
    assert json.loads(texts[1]) in (["a"], ["b"])
    assert texts[2] == "xxx"
    for content, message in (("{", "is not JSON"), ("[]", "not a JSON schema"), (NOT, '"not"')):
        wrong.write_text(content)
        result = run("Hi", "--schema", wrong)
        assert result.exit_code == 2
        assert message in result.stderr
    assert "No such file" in run("Hi", "--schema", tmp_path / "none").stderr
    assert run("Hi", "--regex", "[a]{2}").stdout == "aa\n"
    wrong.write_text('start: "b" "c"')
    assert run("Hi", "--grammar", wrong).stdout == "bc\n"


def test_a_schema_is_its_own_copy() -> None:
    given = {"enum": ["a"]}
    params = SamplingParams(schema=given)
    given["enum"].append("b")
    assert params.schema == {"enum": ["a"]}


@pytest.mark.demo
def test_without_llguidance(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InferError, match=r"pip install 'infer-wgpu\[structured\]'"):
        Constraints(llm.tokenizer, llm.engine.vocab_size).of(SamplingParams(regex="a"))


def assert_texts_keep_their_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Held to a text, an answer may consist of the very tokens that it is encoded to, one by one;
    then it has to end."""
    size = tokenizer.size + 5  # as models have them
    constraints = Constraints(tokenizer, size)
    ends = sorted(tokenizer.eos_token_ids)
    checked = 0
    for given in texts:
        ids = tokenizer.encode(given, add_special_tokens=False)
        if not ids or not all(map(tokenizer.is_shown, ids)):
            continue
        detokenizer = StreamingDetokenizer(tokenizer, tokenizer.encode("x", False))
        text = "".join([*map(detokenizer.add, ids), detokenizer.finish()])
        constraint = constraints.of(SamplingParams(regex=re.escape(text)))
        assert constraint is not None
        for i, token in enumerate(ids):
            allowed = constraint.allowed_after(ids[:i], 0, size)
            assert allowed[token], (text, i)
            assert not allowed[ends].any()
        assert np.flatnonzero(constraint.allowed_after(ids, 0, size)).tolist() == ends
        checked += 1
    assert checked


@pytest.mark.parametrize("kind", ["llama3", "chatml", "mistral", "gemma", "metaspace"])
def test_texts_keep_their_own_tokens(kind: str) -> None:
    stored = json.loads((TEXTS / "expected.json").read_text(encoding="utf-8"))
    texts = [case["text"] for case in stored[kind]["encode"]]
    assert_texts_keep_their_tokens(folder_tokenizer(TEXTS / kind), texts)


def take(constraint: Constraint | None, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, each of which has to be allowed; then the answer may end."""
    assert constraint is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(ids):
        assert constraint.allowed_after(ids[:i], 0, tokenizer.size)[token], (text, i)
        assert constraint.forced_after(ids[:i], 0)[:1] in ([], [token]), (text, i)
    assert constraint.allowed_after(ids, 0, tokenizer.size)[[*tokenizer.eos_token_ids]].all()
    return ids


WORDS = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"regex": "<b>.*</b>"}, "<b>so</b>"),
        ({"regex": "[<>/a-z_]*"}, "a<tool_call><think></think>"),
        ({"schema": WORDS}, '["<tool_call>", "a <b> c", "\\n</think>"]'),
        ({"schema": {"enum": ["<tool_call>", "<think>", "</think>"]}}, '"</think>"'),
        ({"schema": {"const": {"<b>": "<think>"}}}, '{"<b>":"<think>"}'),
        # In a grammar a name is the token, and a text is text.
        (
            {"grammar": 'start: <think> /[a-z ]*/ "<b>" </think> "x" // <b>\n'},
            "<think>so <b></think>x",
        ),
        (
            {"grammar": "start: /(.|\\n)*/ </think> %json " + json.dumps(WORDS)},
            'a<b></think>["<b>"]',
        ),
        ({"grammar": 'start: "<think>" /<b>+/ "<tool_call>"'}, "<think><b>>><tool_call>"),
    ],
)
def test_added_tokens_that_are_text(held: dict[str, Any], text: str) -> None:
    """llguidance takes those of the form <...> for special, whatever their flag is."""
    names = ("<tool_call>", "<b>", "</b>", "<think>", "</think>")
    tokenizer = demo_tokenizer({"<end>": True} | dict.fromkeys(names, False), ["<end>"])
    constraint = Constraints(tokenizer, tokenizer.size).of(SamplingParams(**held))
    ids = take(constraint, tokenizer, text)
    assert {tokenizer.added_text_ids[name] for name in names if name in text} <= {*ids}


def test_names_of_special_tokens_in_texts_are_text() -> None:
    """Written in other tokens, as are characters that the tokenizer would normalize."""
    for kind in ("llama3", "chatml", "mistral", "gemma"):
        tokenizer = folder_tokenizer(TEXTS / kind)
        constraints = Constraints(tokenizer, tokenizer.size)
        for text in (*tokenizer.special_names, "e\u0301"):
            constraint = constraints.of(SamplingParams(schema={"enum": [f"a {text} b"]}))
            assert constraint is not None
            ids: list[int] = []
            while forced := constraint.forced_after(ids, 0):
                ids += forced
            assert not {*ids} & {*tokenizer.special_names.values()}
            assert json.loads(tokenizer.decode(ids)) == f"a {text} b"


def test_a_token_that_ends_a_turn_is_no_text() -> None:
    """Even if it is not special, as in some GGUF files."""
    tokenizer = demo_tokenizer({"<pad>": True, "[end]": False}, ["[end]"])
    (end,) = tokenizer.eos_token_ids
    constraint = Constraints(tokenizer, tokenizer.size).of(SamplingParams(schema=WORDS))
    assert constraint is not None
    ids = tokenizer.encode('["a', add_special_tokens=False)
    assert not constraint.allowed_after(ids, 0, tokenizer.size)[end]


def test_a_tokenizer_without_an_end() -> None:
    tokenizer = folder_tokenizer(TEXTS / "wordpiece")
    with pytest.raises(UnsupportedError, match="no token that ends an answer"):
        Constraints(tokenizer, tokenizer.size).of(SamplingParams(regex="a"))


# Drafts


@pytest.mark.demo
def test_forced_tokens_are_the_only_ones(llm: LLM) -> None:
    """Each of them is all that its mask allows, whatever came before; no others are left out."""
    schema = SCHEMAS[-1] | {"x": 1}
    options = {"schema": schema, "temperature": 1.0, "max_tokens": 40}
    for result in llm.chat("Write.", n=2, seed=4, **options):
        ids = result.token_ids
        constraint = llm.constraint(SamplingParams(schema=schema))
        assert constraint is not None
        runs = 0
        for n in range(len(ids)):
            forced = constraint.forced_after(ids[:n], 0)
            runs += len(forced) > 1
            size = llm.engine.vocab_size
            allowed = constraint.allowed_after(ids[:n], 0, size)
            only = np.flatnonzero(allowed).tolist() if allowed.sum() == 1 else []
            assert only == forced[:1] or only[0] in llm.tokenizer.eos_token_ids
            assert ids[n : n + len(forced)] == forced[: len(ids) - n]
            assert constraint.count_allowed(ids[:n], 0, ids[n:]) == len(
                [i for i in ids[n:] if i not in llm.tokenizer.eos_token_ids]
            )
        assert runs > 5


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with infer.load(DEMO, max_batch=4, context=512, invariant=True, speculate="lookup") as llm:
        yield llm


def held_answers(llm: LLM, at_once: bool, **options: Any) -> list[infer.Result]:
    """Held to schemas, a regular expression and a grammar, and a free one."""
    held: list[dict[str, Any]] = [{"schema": schema} for schema in SCHEMAS[3::5]]
    held += [{"regex": "(ab|ac){9}"}, {"grammar": 'start: "so " /[a-z]/ " it is "{3}'}, {}]
    messages = [{"role": "user", "content": "Write."}]
    own = {"temperature": 1.0, "max_tokens": 24} | options
    streams = [llm.stream(messages, seed=i, **own, **each) for i, each in enumerate(held)]
    if at_once:
        for stream in streams:
            stream._begin()
    return [stream._finish() for stream in streams]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"logprobs": 2},
    "penalized": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.9},
}


@pytest.mark.demo
@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.full)])
@others_full("way", SAMPLINGS, ["sampled"])
def test_drafts_change_no_answer_that_is_held(
    llm: LLM, drafting: LLM, way: str, at_once: bool
) -> None:
    """To the last bit, as they are invariant."""
    expected = held_answers(llm, True, **SAMPLINGS[way])
    found = held_answers(drafting, at_once, **SAMPLINGS[way])
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.logprobs for result in found] == [result.logprobs for result in expected]
    accepted = sum(result.timings.accepted_tokens for result in found)
    assert accepted > sum(len(result.token_ids) for result in found) / 5


@pytest.mark.demo
def test_what_is_forced_is_drafted(llm: LLM, drafting: LLM) -> None:
    """Where nobody else knows what may come: every draft is right."""
    expected = held_answers(llm, True)
    assert not any(result.timings.drafted_tokens for result in expected)
    engine = drafting.engine
    assert isinstance(engine, Engine)
    before = engine.runner.speculation
    engine.runner.speculation = Speculation(before.kinds, measures=False, drafter=Clueless)
    found = held_answers(drafting, False)
    engine.runner.speculation = before
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    drafted = [result.timings.drafted_tokens for result in found]
    assert [result.timings.accepted_tokens for result in found] == drafted
    assert sum(drafted) > 10
    assert drafted[-1] == 0


class Clueless(Drafter):
    """Drafts nothing."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        return []
