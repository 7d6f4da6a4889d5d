"""Requests of all kinds at once, drawn at random: each answer is the one that it has alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_tool_calls import NOW, TEMPLATE

import infer
import infer.engine.scheduler
from infer import LLM, Result
from infer.hub import DEMO
from infer.kernels.state.kv_cache import PAGE

pytestmark = [pytest.mark.demo, pytest.mark.full]

CONTEXT = 4 * PAGE
EXACT: dict[str, Any] = {"invariant": True, "kv_dtype": "f32", "context": CONTEXT, "max_batch": 4}
STORY = "Once upon a time there was a girl called Anna. She had a red ball and a cat. " * 2
ASKED = "Tell me a story.", "What is 3 + 4?", "My cat is called Milo. What is my cat called?"
HELD: list[dict[str, Any]] = [
    {"schema": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}},
    {"schema": {"enum": ["red", "green", "blue"]}},
    {"regex": r"The (quick|brown) (dog|cat) went to school\."},
    {"grammar": 'start: "I see " n " cats"\nn: /[0-9]{1,4}/'},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"top_k": 5},
    {"top_p": 0.9},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5},
    {"logit_bias": {100: 5.0, 300: -100.0}},
    {"stop": ["the", "cat"]},
    {"logprobs": 3},
    {"cache_salt": "a"},
    {"priority": -1},
]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with infer.load(DEMO, **EXACT) as llm:
        llm.tokenizer.templates["default"] = TEMPLATE
        yield llm


def drawn(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A prompt and options."""
    options: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 7, 30, CONTEXT])}
    for own in draw.sample(OPTIONS, draw.randrange(5)):
        options |= own
    if draw.random() < 0.4:
        options |= draw.choice(HELD)
    if draw.random() < 0.5:
        return STORY[: draw.randrange(1, len(STORY))], options
    if draw.random() < 0.4:
        options |= {"tools": [NOW], "tool_choice": draw.choice(["auto", "none"])}
    return [{"role": "user", "content": draw.choice(ASKED)}], options


def told(result: Result) -> dict[str, Any]:
    """Returns the parts of a result that do not differ from run to run."""
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    ids = [(entry.token_id, [top.token_id for top in entry.top]) for entry in result.logprobs or ()]
    of = result.text, result.token_ids, result.finish_reason, result.stop_string
    return {"of": of, "reasoning": result.reasoning, "calls": calls, "logprobs": ids}


def asked(llm: LLM, prompt: Any, options: dict[str, Any], way: str) -> Result | None:
    """None: of a stream that was closed before its end."""
    if way == "one of two":
        return llm.generate(prompt, n=2, **options)[0]
    if way == "event loop":
        return asyncio.run(llm.agenerate(prompt, **options))
    with llm.stream(prompt, **options) as stream:
        for i, _ in enumerate(stream):
            if way == "closed" and i == 3:
                return None
        return stream.result


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": "lookup"},
        {"draft": "demo-draft", "speculate": "draft"},
        {"speculate": "lookup", "isolate": True},
        {"draft": "demo-draft"},
    ],
    ids=str,
)
def test_requests_of_all_kinds(
    alone: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Five clients on four slots, with hardly more pages than one of them may need."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)
    draw = random.Random(0)
    ways = ["stream", "closed", "one of two", "event loop"]
    jobs = [(*drawn(draw), draw.choice(ways)) for _ in range(40)]
    engine = {"cache_positions": CONTEXT + PAGE}
    with infer.load(DEMO, **EXACT, engine=engine, **options) as llm:
        llm.tokenizer.templates["default"] = TEMPLATE
        with ThreadPoolExecutor(5) as pool:
            found = list(pool.map(lambda job: asked(llm, *job), jobs))
        llm.generate(STORY, max_tokens=1)  # takes in who was closed last
        assert (llm.stats().running, llm.stats().cache.in_use) == (0, 0)
    for (prompt, own, way), result in zip(jobs, found, strict=True):
        if result is not None:
            alone.engine.forget()
            assert told(result) == told(alone.generate(prompt, **own)), (prompt, own, way)
