"""Anthropic's Messages API, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("anthropic")

import anthropic
from serving import ANSWER, CALLS, JSON, MESSAGES, Scripted, ask, fake_service, serving

import infer
from infer import LLM
from infer.results import Chunk
from infer.sampling import SamplingParams
from infer.server.engine import LLMClient
from infer.server.service import ServerOptions, Service

pytestmark = pytest.mark.demo

PATH = "/v1/messages"
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


USED = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with serving(Service(LLMClient(llm), ServerOptions(api_keys=["secret"]))) as address:
        yield address


def client_of(address: str) -> Any:
    return anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0)


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with client_of(address) as client:
        yield client


def test_a_message(client: Any, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": MESSAGES}
    message = client.messages.create(**asked)
    assert message.to_dict() == {
        "id": message.id,
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": message.usage.to_dict(),
    }
    prompt = len(llm.encode(MESSAGES))
    again = client.messages.create(**asked).usage
    assert (again.input_tokens, again.cache_read_input_tokens) == (1, prompt - 1)
    assert again.output_tokens == llm.chat(MESSAGES).completion_tokens
    assert client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens == prompt
    assert client.messages.create(**asked | {"max_tokens": 2}).stop_reason == "max_tokens"
    ended = client.messages.create(**asked, stop_sequences=["none", " called"])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", " called")
    assert ended.content[0].text == ANSWER.split(" called")[0]


def test_a_message_is_streamed(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": MESSAGES}
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage == client.messages.create(**asked).usage
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 7
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_an_answer_that_is_begun_goes_on(client: Any, llm: LLM) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "Your cat"}]}]
    message = client.messages.create(model="demo", max_tokens=50, messages=begun)
    assert message.content[0].text == ANSWER.removeprefix("Your cat")
    count = client.messages.count_tokens(model="demo", messages=begun).input_tokens
    chat = [*MESSAGES, {"role": "assistant", "content": "Your cat"}]
    assert count == len(llm.encode(chat, continue_final_message=True))


def test_the_models(client: Any) -> None:
    page = client.models.list()
    (model,) = page.data
    assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "demo")
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.lifecycle == "active"
    assert model.created_at.timestamp() == model.model_extra["created"]
    assert client.models.retrieve("demo") == model


def test_errors_are_of_its_types(client: Any, address: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": MESSAGES}
    with pytest.raises(anthropic.NotFoundError, match="There is no model") as found:
        client.messages.create(**asked | {"model": "claude"})
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] == "not_found_error"
    wrong: dict[str, Any]
    for wrong in (
        {"messages": []},
        {"max_tokens": 0},
        {"temperature": -1},
        {"messages": [*MESSAGES, {"role": "assistant", "content": [USED]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"mcp_servers": [{"url": "x"}]},
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**asked | {"extra_body": wrong})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
    with (
        anthropic.Anthropic(base_url=address, api_key="other", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as unknown,
    ):
        stranger.messages.create(**asked)
    assert unknown.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("thinks", [True, False])
def test_thoughts_and_calls(thinks: bool) -> None:
    engine = Scripted(*CALLS, reason="tool_calls")
    asked: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 2000,
        "messages": MESSAGES,
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"},
    }
    thought = {"type": "thinking", "thinking": "It is hot.", "signature": ""}
    expected = [
        {"type": "text", "text": "I look it up."},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_2", "name": "get_weather", "input": {}},
    ]
    with (
        serving(fake_service(engine, api_keys=["secret"])) as address,
        client_of(address) as client,
    ):
        raw = client.messages.with_raw_response.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (raw.parse(), streamed):
        content = [block.to_dict() for block in message.content]
        assert content == [thought] * thinks + expected
        assert message.stop_reason == "tool_use"
    warning = raw.headers["X-Infer-Warning"]
    assert "web_search_20250305" in warning
    assert ("budget_tokens" in warning) == thinks
    function = {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "parameters": TOOL["input_schema"],
    }
    assert engine.tools[0] == {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


def test_messages_become_those_of_the_template() -> None:
    engine = Scripted(Chunk("ok", 1))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "none", "is_error": True},
                {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
        {"type": "text", "text": "Be brief."},
    ]
    with (
        serving(fake_service(engine, api_keys=["secret"])) as address,
        client_of(address) as client,
    ):
        client.messages.create(
            model="fake",
            max_tokens=9,
            system=system,
            messages=messages,
            extra_body={"temperature": 0.5},
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        )
        client.messages.count_tokens(model="fake", messages=MESSAGES, system="Be brief.")
    call = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            "content": "I look.",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Error: none"},
        {"role": "user", "content": "c"},
    ]
    asked, (_, params, _), counted = engine.asked
    assert asked[0] == expected
    assert asked[1].items() >= {"enable_thinking": False}.items()
    assert counted[0] == [expected[0], *MESSAGES]
    schema: Mapping[str, Any] = {"type": "object"}
    assert params == SamplingParams(max_tokens=9, temperature=0.5, schema=schema)


def test_an_error_in_a_stream() -> None:
    engine = Scripted(Chunk("a", 1))
    engine.error = infer.DeviceError("The GPU was lost.")
    body = {"max_tokens": 3, "messages": MESSAGES, "stream": True}
    with serving(fake_service(engine)) as address:
        _, data = ask(address, PATH, body, JSON)
    name, event = data.split(b"\n\n")[-2].split(b"\ndata: ")
    assert name == b"event: error"
    expected = {"type": "api_error", "message": "The GPU was lost."}
    assert json.loads(event) == {"type": "error", "error": expected}
