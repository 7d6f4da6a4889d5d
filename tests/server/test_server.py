"""The server: what goes over its socket, to clients of others and byte by byte."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import typer
from serving import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    JSON,
    KEEPALIVE,
    MESSAGES,
    STORY,
    FakeAnswer,
    FakeEngine,
    answer,
    ask,
    connect,
    events,
    fake_service,
    serving,
    streamed,
    wait_for,
)
from typer.testing import CliRunner

import infer
from infer import LLM, DeviceError, InferError, OutOfMemoryError, RequestError
from infer.cli.app import app
from infer.cli.options import parse_bytes
from infer.hub import ResolvedModel
from infer.kernels.gpu.adapters import choose_adapter
from infer.kernels.gpu.native import library
from infer.llm import Prompt
from infer.sampling import SamplingParams
from infer.server.engine import LLMClient
from infer.server.generation import _Inbox
from infer.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from infer.server.responses import ResponsesRequest
from infer.server.run import listen
from infer.server.run import serve as serve_until_signal
from infer.server.service import Host, ServerOptions, Service

pytestmark = pytest.mark.demo

ENDLESS = {"2": -100, "3": -100}  # no end of turn
NOT = {"type": "json_schema", "json_schema": {"name": "no", "schema": {"not": {}}}}


@pytest.fixture(scope="module")
def service(llm: LLM) -> Service:
    return Service(LLMClient(llm), ServerOptions(max_body=100_000, keepalive=600))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


# Answers


def test_a_chat_is_that_of_the_model(address: str, llm: LLM) -> None:
    whole = answer(address, CHAT, messages=MESSAGES, model="demo")
    expected = llm.chat(MESSAGES)
    assert expected.text == ANSWER
    assert (whole["object"], whole["model"]) == ("chat.completion", "demo")
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt, made = len(llm.encode(MESSAGES)), expected.completion_tokens
    unlimited = {"max_tokens": -1, "top_k": -1}
    assert answer(address, CHAT, messages=MESSAGES, **unlimited)["choices"] == whole["choices"]
    usage = answer(address, CHAT, messages=MESSAGES)["usage"]
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": expected.prompt_tokens - 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_parts_are_their_text(address: str) -> None:
    def count(*messages: dict[str, Any]) -> int:
        usage = answer(address, CHAT, messages=[*messages], max_tokens=1)["usage"]
        return int(usage["prompt_tokens"])

    def in_parts(message: dict[str, Any], *texts: str) -> dict[str, Any]:
        return message | {"content": [{"type": "text", "text": text} for text in texts]}

    system = {"role": "system", "content": "Be\nbrief."}
    assert count(in_parts(system, "Be", "brief.")) == count(system)
    (user,) = MESSAGES
    assert count(in_parts(user, user["content"])) == count(user)


def test_a_stream_has_the_pieces_of_the_answer(address: str) -> None:
    first, *pieces, last, usage = streamed(
        address, CHAT, messages=MESSAGES, stream_options={"include_usage": True}
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(pieces) > 1
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == ANSWER
    assert {piece["choices"][0]["finish_reason"] for piece in [first, *pieces]} == {None}
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    everything = [first, *pieces, last]
    assert {event["object"] for event in everything} == {"chat.completion.chunk"}
    assert {event["usage"] for event in everything} == {None}
    assert {event["id"] for event in everything} == {usage["id"]}
    assert not any("usage" in event for event in streamed(address, CHAT, messages=MESSAGES))


def test_prompts_of_all_kinds(address: str, llm: LLM) -> None:
    texts = [STORY, "The cat"]
    ids = [llm.encode(text) for text in texts]
    expected = [result.text for result in llm.generate(texts, max_tokens=6)]
    prompts = {STORY: expected[:1], tuple(ids[0]): expected[:1]}
    for prompt, wanted in [*prompts.items(), (texts, expected), (ids, expected)]:
        whole = answer(address, COMPLETIONS, prompt=prompt, max_tokens=6)
        assert [choice["text"] for choice in whole["choices"]] == wanted
        assert [choice["index"] for choice in whole["choices"]] == [*range(len(wanted))]
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert whole["usage"]["completion_tokens"] == 12


def test_samples_of_several_prompts(address: str, llm: LLM) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 1.5, "max_tokens": 5}
    prompts = [STORY, "The cat"]
    results = llm.generate(prompts, **options)
    expected = [sample.text for samples in results for sample in samples]
    assert len(set(expected)) == 4
    whole = answer(address, COMPLETIONS, prompt=prompts, **options)
    assert [choice["text"] for choice in whole["choices"]] == expected
    texts = [""] * 4
    for event in streamed(address, COMPLETIONS, prompt=prompts, **options):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert whole["usage"]["prompt_tokens"] == sum(len(llm.encode(prompt)) for prompt in prompts)


def test_log_probabilities(address: str, llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "stop": " nothing"}
    expected = llm.generate(STORY, logprobs=2, **options).logprobs
    assert expected is not None
    whole = answer(address, COMPLETIONS, prompt=STORY, logprobs=2, **options)
    written = whole["choices"][0]["logprobs"]
    assert written["tokens"] == [token.text for token in expected]
    assert "".join(written["tokens"]) == whole["choices"][0]["text"]
    assert written["token_logprobs"] == pytest.approx([t.logprob for t in expected], abs=1e-4)
    assert [[*top] for top in written["top_logprobs"]] == [
        [t.text for t in e.top] for e in expected
    ]
    lengths = [len(token.text) for token in expected]
    assert written["text_offset"] == [sum(lengths[:i]) for i in range(4)]
    pieces = [
        event["choices"][0]["logprobs"]
        for event in streamed(address, COMPLETIONS, prompt=STORY, logprobs=2, **options)
    ]
    offsets = [offset for piece in pieces if piece for offset in piece["text_offset"]]
    assert offsets == written["text_offset"]

    expected = llm.chat(MESSAGES, logprobs=1).logprobs
    assert expected is not None
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    content = answer(address, CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == [token.text for token in expected]
    assert [bytes(token["bytes"]).decode() for token in content] == [t.text for t in expected]
    assert [len(token["top_logprobs"]) for token in content] == [1] * len(expected)
    pieces = [event["choices"][0]["logprobs"] for event in streamed(address, CHAT, **asked)]
    tokens = [token["token"] for piece in pieces if piece for token in piece["content"]]
    assert tokens == [token.text for token in expected]


def test_log_probabilities_of_split_characters(address: str) -> None:
    text = "a🙂é日"
    asked: dict[str, Any] = {"messages": MESSAGES, "regex": text, "logprobs": True}
    content = answer(address, CHAT, **asked, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == text.encode()
    assert {type(top["bytes"]) for token in content for top in token["top_logprobs"]} == {list}
    begins = [0, 1, 1, 1, 1, 2, 2, 3, 3, 3]  # each token is a byte
    asked = {"prompt": STORY, "regex": text, "logprobs": 0}
    for echo in (False, True):
        whole = answer(address, COMPLETIONS, **asked, echo=echo)["choices"][0]
        pieces = [
            event["choices"][0]["logprobs"]
            for event in streamed(address, COMPLETIONS, **asked, echo=echo)
        ]
        offsets = [offset for piece in pieces if piece for offset in piece["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"]
        assert offsets[-10:] == [whole["text"].index("a🙂") + begin for begin in begins]
        words = zip(whole["logprobs"]["tokens"][:-10], offsets, strict=False)
        assert all(whole["text"].startswith(word, at) for word, at in words if "|" not in word)
    assert offsets[:2] == [0, 0]  # BOS is not in the text


def test_the_models(address: str) -> None:
    _, data = ask(address, "/v1/models")
    (model,) = json.loads(data)["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 1024)
    for path in ("/v1/models/demo", "/v1/models/demo:latest", "/models/demo"):
        assert json.loads(ask(address, path)[1]) == model
    assert ask(address, "/v1/models/other")[0].status == 404
    assert model["gpu"]["name"] == choose_adapter().name
    response, data = ask(address, "/health")
    assert (response.status, json.loads(data)) == (200, {"status": "ok", "webgpu": library().name})
    assert model["gpu"]["webgpu"] == library().name
    version = json.loads(ask(address, "/version")[1])
    assert version["version"] == version["versions"]["infer"] == infer.__version__


# Clients of others


def test_what_benchmarks_ask_for(address: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 20}
    whole = answer(address, CHAT, min_tokens=20, **asked)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"].startswith(ANSWER)
    assert whole["usage"]["completion_tokens"] == 20
    told = streamed(address, CHAT, **asked, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in told]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 20)


def test_what_ends_an_answer_and_what_is_in_it(address: str, llm: LLM) -> None:
    """The parameters that vLLM has beside OpenAI's."""

    def text(path: str = CHAT, **more: Any) -> str:
        asked = {"prompt": STORY} if path == COMPLETIONS else {"messages": MESSAGES}
        (choice,) = answer(address, path, **asked, **({"max_tokens": 12} | more))["choices"]
        return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])

    cat = llm.encode(" cat")[-1]
    assert text(stop_token_ids=[cat]) == ANSWER.partition(" cat")[0]
    assert text(stop_token_ids=[cat], include_stop_str_in_output=True) == "Your cat"
    assert "cat" not in text(bad_words=["cat"])
    assert len(text(min_tokens=40, max_tokens=40)) > len(ANSWER)
    assert text(COMPLETIONS, allowed_token_ids=[cat], max_tokens=3) == " cat" * 3
    for named in ("choices", "guided_choice"):
        assert text(**{named: ["a b", "c"]}) in ("a b", "c")
    assert text(COMPLETIONS, structured_outputs={"choice": ["a b", "c"]}) in ("a b", "c")


def test_a_developer_where_the_template_has_none(address: str) -> None:
    each = [
        answer(address, CHAT, messages=[{"role": role, "content": "Be brief."}, *MESSAGES])
        for role in ("developer", "system")
    ]
    assert each[0]["choices"] == each[1]["choices"]
    assert each[0]["usage"]["prompt_tokens"] == each[1]["usage"]["prompt_tokens"]
    told = answer(address, "/tokenize", messages=[{"role": "developer", "content": "Be brief."}])
    assert told == answer(
        address, "/tokenize", messages=[{"role": "system", "content": "Be brief."}]
    )


def test_an_answer_that_is_begun_goes_on(address: str, llm: LLM) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Your cat is"}]
    asked: dict[str, Any] = {"messages": begun, "continue_final_message": True}
    whole = answer(address, CHAT, **asked, add_generation_prompt=False)  # as vLLM wants it
    assert whole["choices"][0]["message"]["content"] == ANSWER.removeprefix("Your cat is")
    pieces = streamed(address, CHAT, **asked)
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == ANSWER.removeprefix("Your cat is")
    tokens = answer(address, "/tokenize", **asked)["tokens"]
    assert tokens == llm.encode(begun, continue_final_message=True)
    assert whole["usage"]["prompt_tokens"] == len(tokens)
    bare = answer(address, CHAT, messages=MESSAGES, add_generation_prompt=False, max_tokens=1)
    count = len(llm.encode(MESSAGES, add_generation_prompt=False))
    assert bare["usage"]["prompt_tokens"] == count


def test_paths_without_a_version_and_names_with_a_tag(address: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=address, api_key="any", max_retries=0) as client:
        name = "demo:latest"
        chat = client.chat.completions.create(model=name, messages=MESSAGES)
        assert (chat.choices[0].message.content, chat.model) == (ANSWER, "demo")
        assert client.completions.create(model=name, prompt=STORY, max_tokens=1).choices
        assert client.responses.create(model=name, input=MESSAGES).output_text == ANSWER
        assert client.embeddings.create(model=name, input=STORY).data
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.NotFoundError, match="There is no model 'demo:7b'"):
            client.completions.create(model="demo:7b", prompt=STORY)


def test_openais_client(address: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True)
        assert chat.choices[0].message.content == ANSWER
        with client.chat.completions.create(model="demo", messages=MESSAGES, stream=True) as parts:
            deltas = [part.choices[0].delta.content or "" for part in parts]
        assert "".join(deltas) == ANSWER
        text = client.completions.create(model="demo", prompt=[STORY], max_tokens=3, logprobs=1)
        assert text.choices[0].finish_reason == "length"
        assert [model.id for model in client.models.list()] == ["demo"]
        again = [*MESSAGES, chat.choices[0].message, MESSAGES[0]]
        assert client.chat.completions.create(model="demo", messages=again).usage.prompt_tokens > 16
        with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-4' here") as found:
            client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match=r"2000 tokens.* 1024 tokens") as found:
            client.completions.create(model="demo", prompt=[5] * 2000)
        assert found.value.code == "context_length_exceeded"


def test_openais_client_parses_what_a_schema_asks_for(address: str) -> None:
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")

    class Place(pydantic.BaseModel):  # type: ignore[misc]
        kind: Literal["river", "town"]
        stars: list[bool]

    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 100}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions.parse(response_format=Place, **options).choices[0]
        assert isinstance(chat.message.parsed, Place)
        assert chat.finish_reason == "stop"
        with client.chat.completions.stream(response_format=Place, **options) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == chat.message.parsed
        options |= {"extra_body": {"regex": r"[0-9]{3}"}}
        assert re.fullmatch(
            "[0-9]{3}", client.chat.completions.create(**options).choices[0].message.content
        )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"guided_json": {"const": 3}}, "3"),
        ({"guided_json": '{"const": 3}'}, "3"),
        ({"json_schema": {"const": 3}}, "3"),
        ({"response_format": {"type": "json_object", "schema": {"const": 3}}}, "3"),
        ({"response_format": {"type": "json_schema", "schema": {"const": 3}}}, "3"),
        ({"structured_outputs": {"json": {"const": 3}, "regex": None}}, "3"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_choice": ["a (b)", "c|d #1"]}, r"a \(b\)|c\|d #1"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"guided_grammar": 'start: "yes"'}, "yes"),
        ({"structured_outputs": {"grammar": "root ::= digit{2}\ndigit ::= [0-9]"}}, "[0-9]{2}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"grammar": 'start: "a ::= b"'}, "a ::= b"),
    ],
)
def test_structured_output_as_other_servers_ask_for_it(
    address: str, asked: dict[str, Any], expected: str
) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": STORY})):
        (choice,) = answer(address, path, **prompt, **asked, max_tokens=20)["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert re.fullmatch(expected, text, re.S)


def test_openais_own_parameters_are_known_by_name(address: str) -> None:
    """Each is taken or refused: none of them is one that nobody knows. A later release of OpenAI's
    package may have more of them."""
    types = pytest.importorskip("openai.types")
    release = tuple(int(part) for part in version("openai").split(".")[:2])
    for kind, params in (
        (ChatRequest, types.chat.completion_create_params.CompletionCreateParamsBase),
        (CompletionRequest, types.completion_create_params.CompletionCreateParamsBase),
        (ResponsesRequest, types.responses.response_create_params.ResponseCreateParamsBase),
        (EmbeddingRequest, types.EmbeddingCreateParams),
    ):
        known = {*kind.__struct_encode_fields__, *kind.labels, *kind.off}
        assert release > (3, 57) or params.__annotations__.keys() <= known
    for path, body in (
        (CHAT, {"messages": MESSAGES, "web_search_options": {}}),
        (CHAT, {"messages": MESSAGES, "verbosity": "low"}),
        (CHAT, {"messages": MESSAGES, "audio": {"voice": "x", "format": "mp3"}}),
        (CHAT, {"messages": MESSAGES, "function_call": {"name": "f"}}),
        ("/v1/responses", {"input": STORY, "moderation": {"model": "x"}}),
    ):
        response, data = ask(address, path, body)
        assert response.status == 400
        assert json.loads(data)["error"]["param"] == [*body][1]
    same = {"verbosity": "medium", "function_call": "auto", "prompt_cache_options": {}}
    response, _ = ask(address, CHAT, {"messages": MESSAGES, **same})
    assert (response.status, response.getheader("X-Infer-Warning")) == (200, None)


def test_a_json_object(address: str) -> None:
    asked = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "temperature": 1}
    ended = 0
    for seed in range(3):
        choice = answer(address, CHAT, **asked, seed=seed, max_tokens=40)["choices"][0]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
            ended += 1
    assert ended


def test_responses_are_of_openais_types(address: str) -> None:
    pytest.importorskip("openai")
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    asked: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    ChatCompletion.model_validate(answer(address, CHAT, **asked))
    for event in streamed(address, CHAT, **asked, stream_options={"include_usage": True}):
        ChatCompletionChunk.model_validate(event)
    asked = {"prompt": STORY, "logprobs": 2, "max_tokens": 3}
    Completion.model_validate(answer(address, COMPLETIONS, **asked))
    for event in streamed(address, COMPLETIONS, **asked)[:-1]:
        event["choices"][0]["finish_reason"] = "length"  # of events, OpenAI's has null too
        Completion.model_validate(event)
    Model.model_validate(json.loads(ask(address, "/v1/models/demo")[1]))


# Requests that are refused


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (CHAT, b"{", 400, None, "not valid JSON"),
        (CHAT, b"\xff", 400, None, "not valid JSON"),
        (CHAT, b"[" * 50_000, 400, None, "not valid JSON"),
        (CHAT, b"[]", 400, None, "a JSON object"),
        (CHAT, {}, 400, "messages", "missing required field"),
        (CHAT, {"messages": "x"}, 400, "messages", "Expected `array`"),
        (CHAT, {"messages": []}, 400, "messages", "length >= 1"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", 'needs a "content"'),
        (CHAT, {"temperature": "hot"}, 400, "temperature", "Expected `float"),
        (CHAT, {"priority": "high"}, 400, "priority", "Expected `int`"),
        (CHAT, {"priority": 1.5}, 400, "priority", "Expected `int`"),
        (CHAT, {"priority": 2**31}, 400, "priority", "Expected `int` <= 2147483647"),
        (CHAT, {"temperature": -1}, 400, "temperature", "from 0 (greedy) to 100"),
        (CHAT, {"n": 0}, 400, "n", ">= 1"),
        (CHAT, {"max_tokens": 0}, 400, "max_tokens", "from 1 up"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "give one"),
        (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "<= 20"),
        (CHAT, {"logit_bias": {"99999": 1}}, 400, "logit_bias", "from 0 to 2047"),
        (CHAT, {"stream_options": {}}, 400, "stream_options", "stream: true"),
        (CHAT, {"min_tokens": -1}, 400, "min_tokens", "from 0 (off) up"),
        (CHAT, {"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens", "at most max_tokens, 4"),
        (CHAT, {"stop_token_ids": [9999]}, 400, "stop_token_ids", "from 0 to 2047"),
        (CHAT, {"bad_words": [""]}, 400, "bad_words", "none of them empty"),
        (CHAT, {"allowed_token_ids": []}, 400, "allowed_token_ids", "name a token"),
        (CHAT, {"choices": ["a", ""]}, 400, "choices", "none empty"),
        (CHAT, {"choices": ["a"], "guided_regex": "a"}, 400, "guided_regex", "were given"),
        (CHAT, {"ignore_eos": True, "regex": "a"}, 400, "ignore_eos", "no end"),
        (
            CHAT,
            {"stream": True, "stream_options": {"more": 1}},
            400,
            "stream_options.more",
            "unknown field",
        ),
        (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format", "'xml'"),
        (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format", "only then"),
        (CHAT, {"response_format": NOT | {"schema": {}}}, 400, "response_format", "only then"),
        (CHAT, {"response_format": NOT}, 400, "response_format", "not"),
        (CHAT, {"response_format": NOT, "regex": "a"}, 400, "response_format", "regex were given"),
        (CHAT, {"response_format": NOT, "schema": {}}, 400, "response_format", "schema were given"),
        (CHAT, {"guided_json": '{"not": {}}'}, 400, "guided_json", "not"),
        (CHAT, {"guided_json": "{"}, 400, "guided_json", "not valid JSON"),
        (CHAT, {"guided_choice": []}, 400, "guided_choice", "at least one"),
        (CHAT, {"json_schema": {}, "guided_regex": "a"}, 400, "json_schema", "regex were given"),
        (
            CHAT,
            {"structured_outputs": {"json": {}, "regex": "a"}},
            400,
            "structured_outputs",
            "schema and regex of structured_outputs",
        ),
        (
            CHAT,
            {"structured_outputs": {"whitespace_pattern": " "}},
            400,
            "structured_outputs.whitespace_pattern",
            "unknown field",
        ),
        (CHAT, {"grammar": "root ::= a ("}, 400, "grammar", "cannot be followed"),
        (CHAT, {"grammar": "a ::= " + "'" * 9000}, 400, "grammar", "8,192 characters in GBNF"),
        (CHAT, {"schema": {"not": {}}}, 400, "schema", "not"),
        (CHAT, {"regex": "(a"}, 400, "regex", "unclosed group"),
        (COMPLETIONS, {"prompt": "x", "grammar": "start: x"}, 400, "grammar", "unknown name"),
        (
            CHAT,
            {"add_generation_prompt": True, "continue_final_message": True},
            400,
            "add_generation_prompt",
            "give one of them",
        ),
        (CHAT, {"functions": [{"name": "f"}]}, 400, "functions", "not supported"),
        (CHAT, {"chat_template_kwargs": {"template": ""}}, 400, "chat_template_kwargs", "template"),
        (CHAT, {"model": "gpt-4"}, 404, "model", "There are: demo"),
        (COMPLETIONS, {"prompt": ["a", 3]}, 400, "prompt", "a list of"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [5000]}, 400, "prompt", "vocabulary"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 2}, 400, "prompt", "400"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", "no tokens for"),
        (COMPLETIONS, b"x" * 100_001, 413, None, "100000 bytes"),
        ("/v1/nothing", {}, 404, None, "There is no such endpoint. /docs"),
        ("/health", {}, 405, None, "other methods: GET"),
    ],
)
def test_what_is_refused(
    address: str, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    if path == CHAT and isinstance(body, dict) and body:
        body = {"messages": MESSAGES} | body
    response, data = ask(address, path, body)
    assert response.status == status
    error = json.loads(data)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_a_body_whose_size_shows_late(address: str) -> None:
    connection = connect(address)
    parts = iter([b"x" * 60_000] * 2)
    connection.request("POST", CHAT, parts, dict(JSON), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_what_a_web_page_may_send_is_refused(address: str) -> None:
    """Without asking first: forms and plain text."""
    body = json.dumps({"messages": MESSAGES}).encode()
    page = {"Origin": "https://example.org"}
    assert ask(address, CHAT, body, page | {"Content-Type": "text/plain"})[0].status == 415
    assert ask(address, CHAT, body, page)[0].status == 415
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl says without a header
    assert ask(address, CHAT, body, form)[0].status == 200


# Requests as they reach the engine


def test_all_parameters_arrive() -> None:
    engine = FakeEngine()
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "stop": ["x", "y"],
    }
    asked = {**options, "logit_bias": {"5": -1}, "seed": -1, "user": "me", "tools": None}
    expected = SamplingParams(**options, logit_bias={5: -1}, seed=2**64 - 1, logprobs=3)
    kwargs = {"enable_thinking": False}
    with serving(fake_service(engine)) as address:
        answer(
            address,
            CHAT,
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=3,
            chat_template_kwargs=kwargs,
            model="sql",
            response_format={"type": "text"},
            **asked,
        )
        answer(address, COMPLETIONS, prompt="x", logprobs=3, regex="x+", **asked)
        answer(address, CHAT, messages=MESSAGES, max_completion_tokens=4)
        answer(address, CHAT, messages=MESSAGES, max_tokens=-1, top_k=-1)
    assert engine.asked == [
        (MESSAGES, kwargs),
        ([1, 2, 3], expected, "sql"),
        ("x", {}),
        ([1, 2, 3], replace(expected, regex="x+"), None),
        (MESSAGES, {}),
        ([1, 2, 3], SamplingParams(max_tokens=4), None),
        (MESSAGES, {}),
        ([1, 2, 3], SamplingParams(max_tokens=2**32 - 1, top_k=0), None),
    ]


def test_pieces_without_text_are_not_sent() -> None:
    with serving(fake_service(FakeEngine(), keepalive=600)) as address:
        sent = streamed(address, COMPLETIONS, prompt="x")
    assert [event["choices"][0]["text"] for event in sent] == ["a", "b", ""]


def test_a_model_has_several_names() -> None:
    names = ["mine", "claude-haiku", "*", "mine"]
    asked = {"mine": "mine", "claude-haiku:latest": "claude-haiku", "sql": "sql"}
    with serving(fake_service(engine := FakeEngine(), names=names[:2])) as address:
        listed = json.loads(ask(address, "/v1/models")[1])["data"]
        assert [(each["id"], each.get("root"), each["parent"]) for each in listed] == [
            ("mine", None, None),
            ("claude-haiku", "mine", None),
            ("sql", None, "mine"),
        ]
        tags = json.loads(ask(address, "/api/tags")[1])["models"]
        assert [each["details"]["family"] for each in tags] == ["fake"] * 3
        for name, told in asked.items():
            assert answer(address, COMPLETIONS, prompt="x", model=name)["model"] == told
        response, data = ask(address, COMPLETIONS, {"prompt": "x", "model": "other"})
        assert response.status == 404
        assert b"There are: mine, claude-haiku, sql." in data
    assert [adapter for *_, adapter in engine.asked[1::2]] == [None, None, "sql"]
    with serving(fake_service(engine := FakeEngine(), names=names)) as address:
        for name, told in {**asked, "other": "mine"}.items():
            assert answer(address, COMPLETIONS, prompt="x", model=name)["model"] == told
        ids = [each["id"] for each in json.loads(ask(address, "/v1/models")[1])["data"]]
        assert ids == ["mine", "claude-haiku", "sql"]
        # What clients call a model makes no new series of numbers.
        counted = ask(address, "/metrics")[1].decode()
    labels = re.findall(r'vllm:generation_tokens_total\{model_name="(.*)"\}', counted)
    assert labels == ["mine", "sql"]
    with serving(fake_service(FakeEngine(), names=["*"])) as address:
        assert answer(address, COMPLETIONS, prompt="x", model="other")["model"] == "fake"
    with pytest.raises(RequestError, match="Both the model and an adapter are called 'sql'"):
        fake_service(FakeEngine(), names=["mine", "sql"])


def test_names_that_are_not_the_models_load_nothing(fakes: list[FakeModel]) -> None:
    options = ServerOptions(["mine", "other"])
    with serving(Host(fakes[:1], options, keep_alive=0)) as address:
        answer(address, COMPLETIONS, prompt="x", model="other")
        wait_for(lambda: FakeModel.room == [])
        loads = fakes[0].loads
        assert ask(address, COMPLETIONS, {"prompt": "x", "model": "a"})[0].status == 404
        assert fakes[0].loads == loads
        assert answer(address, COMPLETIONS, prompt="x", model="other")["model"] == "other"
    with serving(Host(fakes[1:2], ServerOptions(["*"]))) as address:
        assert answer(address, COMPLETIONS, prompt="x", model="other")["model"] == "b"


def test_who_has_no_key() -> None:
    with serving(fake_service(FakeEngine(), api_keys=["secret"], names=["mine"])) as address:
        for path in ("/v1/models", "/v1/nothing"):
            for headers in ({}, {"Authorization": "Bearer secreT"}, {"Authorization": "secret"}):
                response, data = ask(address, path, headers=headers)
                assert response.status == 401
                assert json.loads(data)["error"]["code"] == "invalid_api_key"
        response, data = ask(address, "/v1/models", headers={"Authorization": "Bearer secret"})
        assert [model["id"] for model in json.loads(data)["data"]] == ["mine", "sql"]
        assert ask(address, "/health")[0].status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_wait_are_sent_away(stream: bool) -> None:
    engine = FakeEngine(waits=True)
    service = fake_service(engine, queue=1)
    body = json.dumps({"prompt": "x", "stream": stream})
    with serving(service) as address:
        waiting = [connect(address) for _ in range(2)]
        for connection in waiting:
            connection.request("POST", COMPLETIONS, body, JSON)
        wait_for(lambda: service.admission.count == 2)
        response, data = ask(address, COMPLETIONS, {"prompt": "x"})
        assert (response.status, response.getheader("retry-after")) == (429, "1")
        assert json.loads(data)["error"]["code"] == "queue_full"
        engine.go_on.set()
        for connection in waiting:
            assert connection.getresponse().status == 200
            connection.close()
        wait_for(lambda: service.admission.count == 0)
        answer(address, COMPLETIONS, prompt="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_answers(stream: bool) -> None:
    engine = FakeEngine(waits=True)
    service = fake_service(engine)
    with serving(service) as address:
        connection = connect(address)
        body = json.dumps({"prompt": "x", "n": 2, "stream": stream})
        connection.request("POST", COMPLETIONS, body, JSON)
        wait_for(lambda: len(engine.asked) == 3)
        assert engine.closed == 0
        assert connection.sock is not None
        connection.sock.close()
        wait_for(lambda: service.admission.count == 0)
    assert engine.closed == 2


def test_a_stream_that_nobody_reads_frees_its_place(
    address: str, service: Service, llm: LLM
) -> None:
    connection = connect(address)
    body = {"prompt": STORY, "stream": True, "logit_bias": ENDLESS}
    connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {")
    response.close()
    connection.close()
    wait_for(lambda: service.admission.count == 0)
    llm.generate("One", max_tokens=1)  # the engine makes a step, and sees it
    assert not llm.engine.jobs.of
    assert llm.stats().cache.in_use == 0


def test_a_piece_that_comes_with_the_end_does_not_hide_it() -> None:
    """A client that goes away while a piece comes."""

    async def main() -> None:
        inbox = _Inbox(600)
        task = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.put(0, None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_an_engine_that_fails() -> None:
    engine = FakeEngine()
    engine.error = DeviceError("The GPU was lost.")
    with serving(fake_service(engine)) as address:
        response, data = ask(address, COMPLETIONS, {"prompt": "x"})
        assert response.status == 500
        error = json.loads(data)["error"]
        assert (error["type"], error["message"]) == ("server_error", "The GPU was lost.")
        _, data = ask(address, COMPLETIONS, {"prompt": "x", "stream": True})
        *_, last, nothing = data.split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: ")) == {"error": error}
        assert nothing == b""
        engine.failure = "lost"
        assert ask(address, "/health")[0].status == 503


def test_a_stream_shows_that_it_lives() -> None:
    engine = FakeEngine(waits=True)
    with serving(fake_service(engine, keepalive=0.01)) as address:
        connection = connect(address)
        body = json.dumps({"prompt": "x", "stream": True})
        connection.request("POST", COMPLETIONS, body, JSON)
        response = connection.getresponse()
        while response.readline() != b": keepalive\n":
            pass
        engine.go_on.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_what_runs_may_end() -> None:
    engine = FakeEngine(waits=True)
    service = fake_service(engine)
    with serving(service) as address:
        connection, idle = connect(address), connect(address)
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "x"}), JSON)
        wait_for(lambda: len(engine.asked) == 2)
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        service.admission.draining = True
        idle.request("GET", "/health")
        response = idle.getresponse()
        assert (response.status, bool(response.read())) == (503, True)
        idle.request("POST", COMPLETIONS, json.dumps({"prompt": "x"}), JSON)
        assert idle.getresponse().status == 503
        idle.close()
        engine.go_on.set()
        assert connection.getresponse().status == 200
        connection.close()


def test_what_is_no_answer_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a response, in the form of its API."""
    monkeypatch.setattr("infer.server.run.DRAIN_SECONDS", 0)
    monkeypatch.setattr("infer.server.endpoint._LAST_SECONDS", 0)
    engine = FakeEngine()
    begun = threading.Event()

    async def embed(*_: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "embed", embed)
    with serving(Service(engine, ServerOptions())) as address:
        connection = connect(address)
        connection.request("POST", "/api/embed", json.dumps({"input": "x"}), JSON)
        assert begun.wait(60)
    response = connection.getresponse()
    assert response.status == 503
    assert json.loads(response.read()) == {"error": "The server is shutting down."}
    connection.close()


def test_what_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.server.run.DRAIN_SECONDS", 0)
    engine = FakeEngine(waits=True)
    with serving(fake_service(engine)) as address:
        whole, stream = connect(address), connect(address)
        for connection, streamed in ((whole, False), (stream, True)):
            body = json.dumps({"prompt": "x", "stream": streamed})
            connection.request("POST", COMPLETIONS, body, JSON)
        wait_for(lambda: len(engine.asked) == 4)
    told = whole.getresponse()
    assert (told.status, told.getheader("content-type")) == (503, "application/json")
    error = told.read()
    assert b"shutting down" in error
    assert stream.getresponse().read().endswith(b"data: " + error + b"\n\n")
    whole.close()
    stream.close()


# Several models


class FakeModel:
    """A source of a model, and the LLM that it loads."""

    adapters, is_embedder = (), False
    tokenizer = SimpleNamespace(templates={}, special_tokens={}, infill=None)
    config = SimpleNamespace(model_type="fake", hidden_size=4)
    context, slots, restarts, silent = 100, 1, False, 0.0
    gpu, summary = FakeEngine.gpu, FakeEngine.summary
    room: list[FakeModel] = []  # noqa: RUF012
    most = 1

    def __init__(self, name: str) -> None:
        self.name, self.loads = name, 0
        self.go_on = threading.Event()
        self.go_on.set()

    def find(self, progress: Any) -> str:
        return self.name

    def load(self, progress: Any) -> Any:
        progress("weights", 1, 4)
        assert self.go_on.wait(timeout=60)
        if len(self.room) >= self.most:
            raise OutOfMemoryError("full")
        self.room.append(self)
        self.loads += 1
        return self

    def encode_pieces(self, prompt: Prompt, *_: Any) -> Iterator[list[int]]:
        yield [1]

    def astream(self, ids: Sequence[int], **options: Any) -> FakeAnswer:
        return FakeAnswer(FakeEngine())

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        self.lost = on_failure

    def close(self) -> None:
        self.room.remove(self)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    monkeypatch.setattr(FakeModel, "room", [])
    monkeypatch.setattr(FakeModel, "most", 1)
    return [FakeModel(name) for name in "abc"]


def status(address: str) -> tuple[int, dict[str, Any]]:
    response, data = ask(address, "/health")
    return response.status, json.loads(data)


def test_models_are_loaded_when_they_are_asked_for(fakes: list[FakeModel]) -> None:
    """There is room for two: the one that was used longest ago goes."""
    a, b, c = fakes
    FakeModel.most = 2
    with serving(Host(fakes, ServerOptions())) as address:
        wait_for(lambda: status(address) == (200, {"status": "ok"}))
        listed = json.loads(ask(address, "/v1/models")[1])["data"]
        assert [model["id"] for model in listed] == ["a", "b", "c"]
        assert FakeModel.room == []
        for name, room in (("a", [a]), ("b", [a, b]), ("a", [a, b]), ("c", [a, c]), ("b", [c, b])):
            assert answer(address, COMPLETIONS, prompt="x", model=name)["model"] == name
            assert FakeModel.room == room
        answer(address, COMPLETIONS, prompt="x")  # of the first
        assert FakeModel.room == [b, a]
        response, data = ask(address, COMPLETIONS, {"prompt": "x", "model": "d"})
        assert response.status == 404
        assert "There are: a, b, c." in json.loads(data)["error"]["message"]
    assert FakeModel.room == []


def test_a_model_that_cannot_be_loaded_is_no_fault_of_who_asked(
    fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(progress: Any) -> Any:
        raise RequestError("A context of 4096 was asked for; a has positions up to 1024.")

    monkeypatch.setattr(fakes[0], "load", refuse)
    with serving(Host(fakes[:2], ServerOptions())) as address:
        response, data = ask(address, COMPLETIONS, {"prompt": "x", "model": "a"})
        assert response.status == 500
        assert "a cannot be loaded: A context of 4096" in json.loads(data)["error"]["message"]
        assert answer(address, COMPLETIONS, prompt="x", model="b")["model"] == "b"


def test_options_of_several_models_are_checked_at_the_start() -> None:
    for flags, message in (
        ("--max-batch 0", "--max-batch must be a positive integer"),
        ("--context 0", "--context must be a positive integer"),
        ("--speculate draft", "no model to draft with"),
        ("--dtype f16 --quantize q4", "Give one of the two"),
    ):
        done = invoke("demo", "demo-draft", "--port", "0", *flags.split())
        assert done.exit_code == 2
        assert message in done.stderr


def test_a_model_that_is_used_stays_until_it_is_not(
    fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = fakes
    engine = FakeEngine(waits=True)
    monkeypatch.setattr(a, "astream", lambda *_, **__: FakeAnswer(engine))
    with serving(Host([a, b], ServerOptions())) as address:
        first, second = connect(address), connect(address)
        for connection, name in ((first, "a"), (second, "b")):
            body = json.dumps({"prompt": "x", "model": name})
            connection.request("POST", COMPLETIONS, body, JSON)
            wait_for(lambda: FakeModel.room)
        assert FakeModel.room == [a]
        engine.go_on.set()
        assert first.getresponse().status == second.getresponse().status == 200
        assert FakeModel.room == [b]
        first.close()
        second.close()


def test_a_model_that_nobody_uses_is_unloaded(fakes: list[FakeModel]) -> None:
    with serving(Host(fakes[:1], ServerOptions(), keep_alive=0)) as address:
        for loads in (1, 2, 3):
            wait_for(lambda: fakes[0].loads == loads and FakeModel.room == [])  # noqa: B023
            answer(address, COMPLETIONS, prompt="x")
        wait_for(lambda: FakeModel.room == [])
        for path, more in ((COMPLETIONS, {}), ("/api/generate", {"keep_alive": 0})):
            asked = {"model": "z", "prompt": "", **more}
            assert ask(address, path, asked)[0].status == 404  # and loads nothing
        assert fakes[0].loads == 4
        assert status(address)[0] == 200


@pytest.mark.parametrize("zero", [0, "0", "0s", 0.0])
def test_a_model_is_unloaded_by_those_who_ask(fakes: list[FakeModel], zero: Any) -> None:
    a, b, _ = fakes
    FakeModel.most = 2
    with serving(Host([a, b], ServerOptions())) as address:
        done = answer(address, "/api/generate", model="a:latest", keep_alive=zero)
        assert (done["response"], done["done"], done["done_reason"]) == ("", True, "unload")
        assert a.loads == 0
        for model in ("a", "b"):
            told = answer(address, "/api/generate", model=model, keep_alive="5m")
            assert told["done_reason"] == "load"
        assert FakeModel.room == [a, b]
        done = answer(address, "/api/chat", model="a", keep_alive=zero)
        assert (done["message"]["content"], done["done_reason"]) == ("", "unload")
        wait_for(lambda: FakeModel.room == [b])
        asked = {"prompt": "x", "raw": True, "stream": False, "keep_alive": zero}
        assert answer(address, "/api/generate", model="b", **asked)["done_reason"] == "stop"
        wait_for(lambda: FakeModel.room == [])
        answer(address, "/api/generate", model="b", **asked | {"keep_alive": -1})
        assert ask(address, "/api/generate", {"model": "d", "keep_alive": 0})[0].status == 404
    assert (a.loads, b.loads) == (1, 2)


def test_the_server_answers_while_it_loads(
    fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fakes[0]
    monkeypatch.setattr("infer.server.service.MOST_WAITING", 1)
    model.go_on.clear()
    host = Host([model], ServerOptions())
    with serving(host) as address:
        loading = {"status": "loading", "message": "reading weights", "progress": 0.25}
        wait_for(lambda: status(address) == (503, loading))
        connection = connect(address)
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "x"}), JSON)
        wait_for(lambda: host._waiting)
        response, data = ask(address, COMPLETIONS, {"prompt": "x"})
        assert response.status == 503
        assert (response.headers["Retry-After"], b'"loading"' in data) == ("5", True)
        model.go_on.set()
        assert connection.getresponse().status == 200
        connection.close()
        assert status(address) == (200, {"status": "ok", "webgpu": "wgpu-native"})
        model.silent = 100.0
        code, health = status(address)
        assert (code, health["status"]) == (503, "stalled")
        model.silent, model.restarts = 0.0, True
        assert status(address)[1]["status"] == "restarting"


def test_versions_are_those_of_the_library_that_runs_the_kernels(
    fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.server.app.versions", lambda webgpu: {"ran": webgpu})
    with serving(Host(fakes, ServerOptions(), webgpu="dawn")) as address:
        assert json.loads(ask(address, "/version")[1])["versions"] == {"ran": "dawn"}


def test_one_of_several_models_is_loaded(fakes: list[FakeModel]) -> None:
    fakes[1].go_on.clear()
    with serving(Host(fakes, ServerOptions())) as address:
        wait_for(lambda: status(address) == (200, {"status": "ok"}))
        connection = connect(address)
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "x", "model": "b"}), JSON)
        loading = {"status": "ok", "message": "Loading b: reading weights", "progress": 0.25}
        wait_for(lambda: status(address) == (200, loading))
        fakes[1].go_on.set()
        assert connection.getresponse().status == 200
        connection.close()
        assert status(address) == (200, {"status": "ok", "webgpu": "wgpu-native"})


def test_what_ends_the_server(fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be loaded, two of one name, and an engine that is not started again."""
    FakeModel.most = 0
    for sources, message in (([fakes[0]], "full"), ([fakes[0]] * 2, "Two models are called 'a'")):
        with (
            listen("127.0.0.1", 0) as opened,
            pytest.raises(InferError, match=message),
        ):
            serve_until_signal(Host(sources, ServerOptions()), opened)
    FakeModel.most = 1
    lost = lambda host: fakes[0].lost(DeviceError("gone"))  # noqa: E731
    with listen("127.0.0.1", 0) as opened, pytest.raises(DeviceError, match="gone"):
        serve_until_signal(Host(fakes[:1], ServerOptions(), ready=lost), opened)


# The command


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process, and what it shows once it answers."""
    line = [sys.executable, "-m", "infer", "serve", "demo", "--port", "0", *arguments]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            shown = ""
            while "Ctrl-C" not in shown:
                part = process.stdout.readline()
                assert part
                shown += part
            yield process, shown
        finally:
            process.kill()


def address_in(shown: str) -> str:
    found = re.search(r"^address +(http://127.0.0.1:\d+)/v1$", shown, re.M)
    assert found
    return found[1]


def worker_of(process: subprocess.Popen[str]) -> int:
    """Its only child."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        children += (task / "children").read_text().split()
    (child,) = set(children)
    return int(child)


@pytest.mark.full
def test_streams_go_on_when_the_engine_is_killed() -> None:
    same: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "logit_bias": ENDLESS}
    asked = [{"prompt": f"{STORY} {i}", "seed": i, "stream": True, **same} for i in range(16)]
    with command("--invariant", "--max-batch", "16") as (process, shown):
        address = address_in(shown)
        opened = []
        for body in asked:
            opened.append(connect(address))
            opened[-1].request("POST", COMPLETIONS, json.dumps(body), JSON)
        responses = [connection.getresponse() for connection in opened]
        firsts = [response.readline() for response in responses]
        os.kill(worker_of(process), signal.SIGKILL)
        for body, first, response in zip(asked, firsts, responses, strict=True):
            got = events((first + response.read()).replace(KEEPALIVE, b""))
            whole = answer(address, COMPLETIONS, **body | {"stream": False})
            assert _text(got) == _text([whole])
        for connection in opened:
            connection.close()
        while process.poll() is None:  # as often as it takes for three within a minute
            with suppress(OSError, ValueError):  # it ends, or has no child just now
                if status(address)[0] == 200:
                    os.kill(worker_of(process), signal.SIGKILL)
            time.sleep(0.1)
        assert process.wait() == 1
        assert process.stderr is not None
        *_, last = process.stderr.read().splitlines()
        assert last.startswith("error: The process of the engine ended 3 times within 60 seconds")


def _text(events: Sequence[Mapping[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.full
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(by: signal.Signals) -> None:
    with command() as (process, shown):
        address = address_in(shown)
        assert f"infer connect claude-code --url {address}" in shown
        example = re.search(r"^curl (\S+) \\\n  -H '(.*): (.*)' -d '(.*)'$", shown, re.M)
        assert example
        place, name, value, body = example.groups()
        assert place == f"{address}{CHAT}"
        response, _ = ask(address, CHAT, body.encode(), {name: value})
        assert response.status == 200
        connection = connect(address)
        asked = {"messages": MESSAGES, "stream": True, "logit_bias": ENDLESS, "max_tokens": 200}
        connection.request("POST", CHAT, json.dumps(asked), JSON)
        response = connection.getresponse()
        first = response.readline()
        worker = worker_of(process)
        for pid in (process.pid, worker):  # as of a terminal, or a service manager
            os.kill(pid, by)
        *_, last = events((first + response.read()).replace(KEEPALIVE, b""))
        assert last["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert process.wait(timeout=60) == 0
        assert not Path(f"/proc/{worker}").exists()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)


def test_load_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(model: str, **options: Any) -> LLM:
        seen.update(options, model=model)
        raise DeviceError("seen enough")

    monkeypatch.setattr(infer.loading, "load", load)
    found = ResolvedModel(Path("/models/name"), "org/name")
    monkeypatch.setattr(infer.hub, "resolve", lambda *_, **__: found)
    flags = (
        "--port 0 --context 512 --quantize q4 --dtype f16 --kv-dtype q8 --device 1 --max-batch 3"
    )
    flags += " --cache-memory 1.5GiB --host-cache 8GiB --invariant --offline"
    flags += " --adapter sql=a/b --adapter law=./c=d"
    done = invoke("org/name", *flags.split())
    assert (done.exit_code, done.stderr) == (1, "error: seen enough\n")
    expected = {
        "model": found.path,
        "isolate": True,
        "context": 512,
        "quantize": "q4",
        "dtype": "f16",
        "kv_dtype": "q8",
        "device": "1",
        "max_batch": 3,
        "cache_memory": 3 << 29,
        "invariant": True,
        "adapters": {"sql": "a/b", "law": "./c=d"},
        "offline": True,
    }
    assert seen.items() >= expected.items()
    assert seen["host_memory"].capacity == 8 << 30
    assert seen["host_memory"].descriptor is None  # it was closed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cache-memory", "much"), "not an amount of memory"),
        (("--adapter", "./folder"), "as in sql=org/sql-lora"),
        (("--api-key", ""), "the key must not be empty"),
        (("--port", "70000"), "65535"),
        (("--host", "192.0.2.1"), "Choose others (--host, --port)"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], message: str) -> None:
    done = invoke("demo", *flags)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", "").split())


def test_a_port_that_is_taken_shows_at_once() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        done = invoke("/no/such/model", "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "Address already in use" in done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "server", sys.modules["infer.server"])  # and back
    for name in [name for name in sys.modules if name.startswith("infer.server")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("starlette", "msgspec"):
        monkeypatch.setitem(sys.modules, name, None)
    done = invoke("demo")
    assert done.exit_code == 1
    assert "pip install 'infer-wgpu[serve]'" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GB", 4 * 10**9), ("512 MiB", 512 << 20), ("1.5g", 15 * 10**8), ("7", 7), ("2kb", 2000)],
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_bytes(text, "--cache-memory") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4XB", "1e9", "4.GB"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text, "--cache-memory")
