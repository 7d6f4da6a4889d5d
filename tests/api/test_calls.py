"""Calls as programs write them that come from vLLM, transformers, Ollama or llama.cpp."""

from __future__ import annotations

import array
import asyncio
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import infer
from infer import LLM, SamplingParams
from infer.hub import DEMO

pytestmark = pytest.mark.demo

PROMPTS = ["Once upon a time", "The cat", "2 + 2 ="]
SHORT = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[str]:
    return [llm.generate(prompt, max_tokens=6).text for prompt in PROMPTS]


def texts_of(results: Sequence[infer.Result]) -> list[str]:
    return [result.text for result in results]


# Parameters by their place


def test_params_may_come_second(llm: LLM, expected: list[str]) -> None:
    assert texts_of(llm.generate(PROMPTS, SHORT)) == expected
    assert llm.generate(PROMPTS[0], SHORT).text == expected[0]
    with llm.stream(PROMPTS[0], SHORT) as stream:
        assert "".join(map(str, stream)) == expected[0]
    assert llm.chat("Hi", SHORT).text == llm.chat("Hi", max_tokens=6).text
    assert texts_of(llm.chat(["Hi", "Count."], SHORT))[0] == llm.chat("Hi", SHORT).text
    assert infer.generate(llm, PROMPTS[0], SHORT).text == expected[0]
    assert str(infer.stream(llm, PROMPTS[0], SHORT)._finish()) == expected[0]


def test_each_prompt_may_have_its_params(llm: LLM, expected: list[str]) -> None:
    each = [replace(SHORT, max_tokens=n) for n in (1, 4, 6)]
    results = llm.generate(PROMPTS, each)
    assert [result.completion_tokens for result in results[:2]] == [1, 4]
    assert all(text.startswith(r.text) for text, r in zip(expected, results, strict=True))
    assert results[2].text == expected[2]
    seeded = [SamplingParams(max_tokens=4, temperature=2, seed=seed) for seed in (3, 5)]
    samples = llm.generate(PROMPTS[:2], seeded, n=2)
    assert samples[1][1].text == llm.generate(PROMPTS[1], replace(seeded[1], seed=6)).text


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (PROMPTS, [SHORT], "params is a list of 1, and 3 prompts were given"),
        (PROMPTS[0], [SHORT], "params is a list of 1, and one prompt was given"),
        ([], [SHORT], "params is a list of 1, and 0 prompts were given"),
        (PROMPTS, [SHORT, SHORT, None, SHORT], "params is a list of 4, and 3 prompts"),
        (PROMPTS, [SHORT, {"max_tokens": 5}, SHORT], "params must be SamplingParams, not {"),
        (PROMPTS, 5, "params must be SamplingParams, not 5"),
    ],
)
def test_params_that_do_not_fit(llm: LLM, prompt: Any, params: Any, message: str) -> None:
    with pytest.raises(infer.RequestError, match=message):
        llm.generate(prompt, params)


# Prompts in every container


CONTAINERS: dict[str, Callable[[list[str]], Any]] = {
    "tuple": tuple,
    "generator": lambda each: (text for text in each),
    "array": np.array,
    "keys": lambda each: dict.fromkeys(each).keys(),
    "map": lambda each: map(str, each),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_prompts_in_any_container(llm: LLM, expected: list[str], kind: str) -> None:
    made = CONTAINERS[kind]
    assert texts_of(llm.generate(made(PROMPTS), SHORT)) == expected
    assert texts_of(llm.generate(prompts=made(PROMPTS), params=SHORT)) == expected
    assert texts_of(infer.generate(llm, prompts=made(PROMPTS), params=SHORT)) == expected


def test_ids_in_any_container(llm: LLM) -> None:
    """Two rows of an array are two prompts; one row is one, as is a range."""
    ids = [*range(40, 46)]
    one = llm.generate(ids, SHORT).text
    for made in (np.array(ids), iter(ids), range(40, 46), array.array("i", ids)):
        assert llm.generate(made, SHORT).text == one  # type: ignore[arg-type]
    assert texts_of(llm.generate(np.array([ids, ids]), SHORT)) == [one, one]  # type: ignore[call-overload]


def test_torch_tensors_and_columns_of_tables(llm: LLM, expected: list[str]) -> None:
    torch = pytest.importorskip("torch")
    ids = llm.encode(PROMPTS[1])
    assert llm.generate(torch.tensor(ids), SHORT).text == expected[1]
    assert texts_of(llm.generate(torch.tensor([ids]), SHORT)) == expected[1:2]


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    for nothing in ([], (), np.array([]), iter([])):
        assert llm.generate(nothing) == []  # type: ignore[call-overload]
    assert llm.chat([]) == llm.generate([], n=2) == llm.logits([]) == llm.prompt_logprobs([]) == []
    assert llm.embed([]).shape == (0, llm.config.hidden_size)
    with pytest.raises(infer.RequestError, match="temperatur is not"):
        llm.generate([], temperatur=1)  # type: ignore[call-overload]
    with pytest.raises(infer.RequestError, match="prompt is empty"):
        llm.stream([])


def test_batches_of_logits_and_logprobs(llm: LLM) -> None:
    each = llm.logits(iter(PROMPTS))  # type: ignore[call-overload]
    assert [rows.shape[0] for rows in each] == [len(llm.encode(prompt)) for prompt in PROMPTS]
    for prompt, rows in zip(PROMPTS, each, strict=True):
        np.testing.assert_array_equal(rows, llm.logits(prompt))
    listed = llm.prompt_logprobs(PROMPTS, 2)
    assert listed == [llm.prompt_logprobs(prompt, 2) for prompt in PROMPTS]
    for n in (-1, 2049, "2", True):
        with pytest.raises(infer.RequestError, match="n must be an integer from 0 to 2048"):
            llm.prompt_logprobs(PROMPTS[0], n)  # type: ignore[call-overload]


# Event loops, and models by their names


def test_all_that_generates_has_a_form_for_event_loops(llm: LLM) -> None:
    async def main() -> None:
        chat, chats, vectors, scores = await asyncio.gather(
            llm.achat("Count.", SHORT),
            llm.achat(["Count.", "Hi"], max_tokens=6),
            llm.aembed(PROMPTS, pooling="last"),
            llm.ascore(PROMPTS[0], [",", " in"]),
        )
        assert chat.text == chats[0].text == llm.chat("Count.", SHORT).text
        np.testing.assert_array_equal(vectors, llm.embed(PROMPTS, pooling="last"))
        assert scores == llm.score(PROMPTS[0], [",", " in"])
        assert await llm.agenerate([]) == await llm.achat([]) == []
        assert texts_of(await llm.agenerate(iter(PROMPTS), SHORT)) == texts_of(
            await llm.agenerate(prompts=PROMPTS, params=SHORT)
        )
        assert [str(c) async for c in llm.astream("Once", SHORT)] != []

    asyncio.run(main())


def test_chat_and_embed_of_a_model_by_its_name(llm: LLM) -> None:
    assert infer.chat(llm, "Count.", SHORT).text == llm.chat("Count.", SHORT).text
    assert texts_of(infer.chat(llm, messages=["Count."], max_tokens=6)) == [
        llm.chat("Count.", SHORT).text
    ]
    expected = llm.embed("a cat", normalize=False)
    np.testing.assert_array_equal(infer.embed(llm, "a cat", normalize=False), expected)
    with pytest.raises(infer.RequestError, match="go to load"):
        infer.embed(llm, "a cat", context=64)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GiB", 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2g", 2 * 10**9),
        ("100 MB", 10**8),
        ("12B", 12),
    ],
)
def test_sizes_of_memory(text: str, nbytes: int) -> None:
    assert infer.loading._memory("cache_memory", text) == nbytes


@pytest.mark.parametrize("wrong", ["", "0", "1 XB", "-5", "GiB", 1.5, True])
def test_what_is_no_size_of_memory(wrong: Any) -> None:
    with pytest.raises(infer.RequestError, match="cache_memory is a number of bytes, or a text"):
        infer.loading._memory("cache_memory", wrong)


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(), r"generate\(\) needs prompt: generate\(prompt\)\."),
        (lambda llm: llm.generate("a", SHORT, 3), r"generate\(\) takes prompt, params without a"),
        (lambda llm: llm.generate("a", max_length=5), r"max_length .* Did you mean max_tokens\?"),
        (lambda llm: llm.generate("a", prompt_logprobs=1), "Call the method prompt_logprobs"),
        (lambda llm: llm.generate("a", system="b"), "first of the messages"),
        (lambda llm: llm.generate("a", stream=True), r"Call stream\(\)"),
        (lambda llm: llm.generate(promt="a"), r"promt is not an option. Did you mean prompt\?"),
        (lambda llm: llm.generate("a", prompts="b"), "prompt was given twice"),
        (lambda llm: llm.chat("a", "b", "c"), r"chat\(\) takes messages, params"),
        (lambda llm: llm.chat(conversation="a"), r"Did you mean messages\?"),
        (lambda llm: llm.stream("a", n=2), r"n is an option of generate\(\)"),
        (lambda llm: llm.astream("a", best=2), "best is not an option"),
        (lambda llm: llm.embed("a", pool="mean"), r"pool is not an option. Did you mean pooling\?"),
        (lambda llm: llm.embed(input="a"), r"input is not an option. Did you mean texts\?"),
        (lambda llm: llm.embed("a", "mean"), r"embed\(\) takes texts without a name"),
        (lambda llm: llm.aembed("a", "mean"), r"aembed\(\) takes texts without a name"),
        (lambda llm: llm.score("a"), r"score\(\) needs continuations"),
        (lambda llm: llm.logits(), r"logits\(\) needs prompt"),
        (lambda llm: llm.decode(), r"decode\(\) needs ids"),
        (lambda llm: llm.encode(), r"encode\(\) needs prompt: encode\(prompt\)\."),
        (lambda llm: llm.encode(prompt="a"), r"encode\(\) needs prompt: encode\(prompt\)\."),
        (lambda llm: llm.encode("a", "b"), r"encode\(\) takes prompt without a name"),
        (lambda llm: infer.load(), r"load\(\) needs model: load\(model\)\."),
        (lambda llm: infer.load(DEMO, n_gpu_layers=-1), "All of a model is computed on the GPU"),
        (lambda llm: infer.load(DEMO, tensor_parallel_size=2), "A model runs on one GPU"),
        (lambda llm: infer.load(DEMO, 5), r"load\(\) takes model without a name"),
        (lambda llm: infer.generate(DEMO), r"generate\(\) needs prompt"),
        (lambda llm: infer.embed(DEMO, "a", seed=1), r"seed is an option of generate\(\)"),
        (lambda llm: infer.chat(DEMO, "a", options={}), "Give each by its own name"),
        (lambda llm: LLM("demo"), r"load\(\) makes an LLM"),
        (lambda llm: LLM(model="demo"), r"load\(\) makes an LLM"),
    ],
)
def test_a_wrong_call_is_told_what_is_right(
    llm: LLM, call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(infer.RequestError, match=message):
        call(llm)


WRONG = [None, True, -1, 2.5, b"a", {"a": 1}, {1}, object(), [None], [[]], [{}], "\ud83d"]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: ascii(value).partition(" at 0x")[0])
def test_no_value_is_a_bare_error(llm: LLM, value: Any) -> None:
    """Whatever is given to whatever takes something: it is served, or refused by an InferError."""

    def tried(call: Callable[..., Any], *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = call(*args, **options)
            except infer.InferError:
                return
        if hasattr(result, "close"):
            result.close()

    for method in (llm.generate, llm.chat, llm.stream):
        tried(method, value, max_tokens=1)
        for name in infer.keywords.AnswerOptions.__optional_keys__:
            tried(method, "a", **{"max_tokens": 1, name: value})
        tried(method, "a", value)
    for method in (llm.embed, llm.logits, llm.prompt_logprobs, llm.encode, llm.decode):
        tried(method, value)
    for name in ("pooling", "normalize", "adapter"):
        tried(llm.embed, "a", **{name: value})
    assert llm.encode([{"role": "user", "content": "a"}], anything=1)
    tried(llm.score, value, ["a"])
    tried(llm.score, "a", value)
    tried(llm.prompt_logprobs, "a", value)


# timeout


class Clock:
    """A time that goes on by a second whenever an answer looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(infer.engine.token_engine, "time", own)
    monkeypatch.setattr(infer.llm, "time", own)
    return own


@pytest.mark.usefixtures("clock")
def test_an_answer_ends_when_its_time_is_over(llm: LLM) -> None:
    """With what there is, and its place is free for the next one."""
    full = llm.generate(PROMPTS[0], max_tokens=40)
    cut = llm.generate(PROMPTS[0], max_tokens=40, timeout=20)
    assert cut.finish_reason == "timeout"
    assert 0 < len(cut.token_ids) < 40
    assert full.text.startswith(cut.text)
    nothing = llm.generate(PROMPTS[0], max_tokens=40, timeout=0.5)
    assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", [], "timeout")
    in_time = llm.generate(PROMPTS[0], max_tokens=40, timeout=1e6)
    assert (in_time.text, in_time.finish_reason) == (full.text, "length")
    with llm.stream(PROMPTS[0], SHORT, timeout=20) as stream:
        assert "".join(map(str, stream)) == stream.result.text
    several = llm.generate(PROMPTS, max_tokens=200, timeout=100)
    assert "timeout" in {result.finish_reason for result in several}
    llm.generate("a", max_tokens=1)  # takes in what has ended
    assert not llm.engine.pool.stats.in_use


@pytest.mark.usefixtures("clock")
def test_an_answer_in_an_event_loop_ends_when_its_time_is_over(llm: LLM) -> None:
    async def main() -> None:
        cut, free = await asyncio.gather(
            llm.achat("Tell me a story.", max_tokens=60, timeout=30),
            llm.agenerate(PROMPTS[0], SHORT),
        )
        assert (cut.finish_reason, free.finish_reason) == ("timeout", "length")
        assert cut.completion_tokens < 60

    asyncio.run(main())


def test_a_late_answer_of_another_process_ends() -> None:
    """Also where that process says nothing."""
    from infer.engine.isolated import WorkerEngine
    from infer.engine.token_engine import TokenAnswer

    class Silent(WorkerEngine):
        def __init__(self) -> None:
            self._changed, self._pid = threading.Condition(), os.getpid()

    answer = TokenAnswer()
    answer.engine, answer.steps, answer.ended, answer.cancelled = Silent(), deque(), False, False
    answer.error, answer.deadline = None, time.monotonic() + 0.01
    assert next(answer, None) is None
    assert answer.timed_out


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan"), float("inf")])
def test_what_is_no_timeout(llm: LLM, timeout: Any) -> None:
    for function in (llm.stream, lambda *a, **o: infer.generate("/no/such/model", *a, **o)):
        with pytest.raises(
            infer.RequestError, match="timeout must be a positive number of seconds"
        ):
            function("a", timeout=timeout)
