"""Ollama's API, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ollama")

import ollama
from serving import ANSWER, CALLS, JSON, MESSAGES, STORY, Scripted, ask, fake_service, serving

import infer
from infer import LLM
from infer.inspection import inspect_model
from infer.results import Chunk
from infer.sampling import SamplingParams
from infer.server.engine import LLMClient
from infer.server.service import ServerOptions, Service

pytestmark = pytest.mark.demo

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Any]:
    served = Service(LLMClient(llm), ServerOptions())
    with serving(served) as address, ollama.Client(address) as client:
        yield client


def test_a_chat(client: Any, llm: LLM) -> None:
    expected = llm.chat(MESSAGES)
    reply = client.chat("demo:latest", MESSAGES, keep_alive="5m", options={"num_ctx": 512})
    assert reply.message.model_dump(exclude_none=True) == {"role": "assistant", "content": ANSWER}
    assert (reply.model, reply.done, reply.done_reason) == ("demo", True, "stop")
    assert reply.prompt_eval_count == expected.prompt_tokens
    assert reply.eval_count == expected.completion_tokens
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration > 0
    *parts, last = client.chat("demo", MESSAGES, stream=True)
    assert "".join(part.message.content for part in parts) == ANSWER
    assert len(parts) == expected.completion_tokens
    assert not any(part.done for part in parts)
    assert (last.done, last.message.content) == (True, "")
    assert last.eval_count == reply.eval_count


def test_an_answer_that_is_begun_goes_on(client: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Your cat"}]
    assert client.chat("demo", begun).message.content == ANSWER.removeprefix("Your cat")


def test_a_prompt(client: Any, llm: LLM) -> None:
    prompt = MESSAGES[0]["content"]
    assert client.generate("demo", prompt).response == ANSWER
    expected = llm.generate(STORY, max_tokens=5, stop=" a time")
    options = {"num_predict": 5, "stop": [" a time"]}
    parts = [*client.generate("demo", STORY, raw=True, stream=True, options=options)]
    assert "".join(part.response for part in parts) == expected.text
    cut = client.generate("demo", STORY, raw=True, options={"num_predict": 3}, logprobs=True)
    assert cut.done_reason == "length"
    tokens = llm.generate(STORY, max_tokens=3, logprobs=0).logprobs or []
    assert [each.token for each in cut.logprobs] == [token.text for token in tokens]
    unlimited = {"num_predict": -2, "top_k": -1}
    assert client.generate("demo", prompt, options=unlimited).response == ANSWER
    assert client.generate("demo", "A number?", format={"enum": [3]}).response == "3"
    loaded = client.generate("demo")
    assert (loaded.response, loaded.done_reason) == ("", "load")


def test_embeddings(client: Any, llm: LLM) -> None:
    texts = ["A cat", "A small dog"]
    made = client.embed("demo", texts, keep_alive="5m", truncate=True)
    np.testing.assert_allclose(made.embeddings, llm.embed(texts), atol=1e-5)
    assert made.prompt_eval_count == sum(len(llm.encode(text)) for text in texts)
    np.testing.assert_allclose(client.embed("demo", "A cat").embeddings, made.embeddings[:1])


def test_an_embedding_as_it_was_asked_for_before(client: Any, llm: LLM) -> None:
    made = client.embeddings("demo", "A cat", options={"num_ctx": 512})
    np.testing.assert_allclose(made.embedding, llm.embed("A cat"), atol=1e-5)


def test_the_models(client: Any, llm: LLM) -> None:
    (listed,) = client.list().models
    assert listed.model == "demo"
    assert listed.size > 1e6
    (running,) = client.ps().models
    assert running.context_length == 1024
    shown = client.show("demo:latest")
    assert shown.capabilities == ["completion", "tools"]
    kind = shown.modelinfo["general.architecture"]
    count = inspect_model("demo").parameters
    assert shown.modelinfo["general.parameter_count"] == count
    for each in (listed, running, shown):
        assert each.details.model_dump() == {
            "parent_model": "",
            "format": "safetensors",
            "family": kind,
            "families": [kind],
            "parameter_size": f"{count / 1e6:.2f}M",
            "quantization_level": llm.summary.type,
        }
    assert llm.summary.type in ("F32", "F16", "BF16")
    assert shown.modelinfo[f"{kind}.context_length"] == 1024
    assert "messages" in shown.template


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8_000_000_000, "8B"),
        (7_615_616_512, "7.6B"),
        (268_098_176, "268.10M"),
        (3_000_000, "3M"),
        (999_499, "999K"),
        (512, "512"),
    ],
)
def test_numbers_of_parameters(count: int, text: str) -> None:
    engine = Scripted()
    engine.summary = replace(engine.summary, parameters=count)
    with serving(fake_service(engine)) as address, ollama.Client(address) as client:
        assert client.show("fake").details.parameter_size == text


def test_a_model_that_is_never_unloaded(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="never unloads its model"):
        client.generate("demo", keep_alive=0)
    assert client.chat("demo", MESSAGES, keep_alive=0).message.content == ANSWER


def test_errors(client: Any) -> None:
    for call in (
        lambda: client.chat("llama3", MESSAGES),
        lambda: client.show("llama3"),
    ):
        with pytest.raises(ollama.ResponseError, match="There is no model 'llama3'") as found:
            call()
        assert found.value.status_code == 404
    for wrong in (
        {"options": {"temperature": -1}},
        {"format": {"type": "nothing"}},
        {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat("demo", **{"messages": MESSAGES} | wrong)
        assert refused.value.status_code == 400


def test_thoughts_and_calls() -> None:
    engine = Scripted(*CALLS, reason="tool_calls")
    asked: dict[str, Any] = {"tools": [WEATHER], "think": True}
    with serving(fake_service(engine)) as address, ollama.Client(address) as client:
        whole = client.chat("fake", MESSAGES, **asked).message
        parts = [part.message for part in client.chat("fake", MESSAGES, stream=True, **asked)]
    assert whole.thinking == "".join(part.thinking or "" for part in parts) == "It is hot."
    assert whole.content == "".join(part.content for part in parts) == "I look it up."
    calls = [call for part in parts for call in part.tool_calls or ()]
    for found in (whole.tool_calls, calls):
        assert [call.function.arguments for call in found] == [{"city": "Rome"}, {}]
        assert {call.function.name for call in found} == {"get_weather"}
    (prompt, args), *_ = engine.asked
    assert prompt == MESSAGES
    assert args["enable_thinking"] is True
    assert engine.tools[0] is not None
    (tool,) = engine.tools[0]["tools"] or ()
    assert tool["function"]["name"] == "get_weather"


def test_what_the_engine_is_asked() -> None:
    engine = Scripted(Chunk("a", 1))
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": -1,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "num_gpu": 1,
        "mirostat": 1,
        "num_ctx": 2048,
    }
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "1", "tool_name": "f"},
        {"role": "tool", "content": "2"},
    ]
    with serving(fake_service(engine)) as address:
        body = {"messages": messages, "options": options, "format": "json", "stream": False}
        response, _ = ask(address, "/api/chat", body, JSON)
    warning = response.getheader("X-Infer-Warning") or ""
    assert "'mirostat'" in warning
    assert "100 positions" in warning
    assert "num_gpu" not in warning
    (prompt, _), (_, params, _) = engine.asked
    assert params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["x"],
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.75,
        schema={"type": "object"},
    )
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(2)]
    assert prompt == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "call00000", "name": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "call00001"},
    ]


def test_an_error_in_a_stream() -> None:
    engine = Scripted(Chunk("a", 1))
    engine.error = infer.DeviceError("The GPU was lost.")
    with serving(fake_service(engine)) as address:
        _, data = ask(address, "/api/generate", {"prompt": "x"}, JSON)
    assert json.loads(data.splitlines()[-1]) == {"error": "The GPU was lost."}
