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
    client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage == client.messages.create(**asked).usage
    # The second time the cache has all but the last token, which a client is told at the beginning.
    first = events[0].message.usage
    assert first.output_tokens == 0
    assert first.cache_read_input_tokens == message.usage.cache_read_input_tokens > 0
    assert first.input_tokens == message.usage.input_tokens == 1
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 7
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_context_that_is_full_is_no_limit_of_tokens(client: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "one two three " * 338}]
    room = llm.context - len(llm.encode(messages))
    assert 1 < room < 10  # of the answer, which has more tokens
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 1000}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for full in (streamed, client.messages.create(**asked)):
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.output_tokens == room
    for most in (1, room):
        assert client.messages.create(**asked | {"max_tokens": most}).stop_reason == "max_tokens"


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


# What Claude Code 2.1 sends of its tool search, without the rest of its prompt.
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
DEFERRED = [
    {**TOOL, "name": name, "defer_loading": True} for name in ("CronCreate", "WebFetch", "LSP")
]
SEARCHED = {
    "type": "tool_use",
    "id": "toolu_1",
    "name": "ToolSearch",
    "input": {"query": "select:WebFetch,CronCreate"},
}
FOUND = {
    "type": "tool_result",
    "tool_use_id": "toolu_1",
    "content": [
        {"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "CronCreate")
    ],
    "cache_control": {"type": "ephemeral"},
}
AFTER_SEARCH = [
    *MESSAGES,
    {"role": "assistant", "content": [SEARCHED]},
    {"role": "user", "content": [FOUND]},
]


def test_deferred_tools_are_described_where_a_search_found_them() -> None:
    engine = Scripted(Chunk("ok", 1))
    asked = {"model": "fake", "max_tokens": 9, "tools": [*DEFERRED, SEARCH]}
    unknown = {"type": "tool", "name": "LSP"}
    with serving(fake_service(engine)) as address, client_of(address) as client:
        for messages in (MESSAGES, AFTER_SEARCH):
            raw = client.messages.with_raw_response.create(**asked, messages=messages)
            assert "X-Infer-Warning" not in raw.headers
        with pytest.raises(anthropic.BadRequestError, match="not among the tools"):
            client.messages.create(**asked, messages=AFTER_SEARCH, tool_choice=unknown)
    (first, before), _, (then, after), *_ = engine.asked
    # The prompt begins as before, and so the cache has it.
    assert then[: len(first)] == first
    assert after["tools"] == before["tools"]
    assert [tool["function"]["name"] for tool in after["tools"]] == ["ToolSearch"]
    lines = [
        f'<function>{{"description":"{TOOL["description"]}","name":"{name}","parameters":'
        '{"type":"object","properties":{"city":{"type":"string"}}}}</function>'
        for name in ("WebFetch", "CronCreate")
    ]
    content = "\n".join(["<functions>", *lines, "</functions>"])
    assert then[-1] == {"role": "tool", "tool_call_id": "toolu_1", "content": content}
    callable_ = [[tool["function"]["name"] for tool in each["tools"]] for each in engine.tools]
    assert callable_ == [["ToolSearch"], ["CronCreate", "WebFetch", "ToolSearch"]]


def test_tools_are_not_deferred_for_a_search_that_is_not_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Scripted(Chunk("ok", 1))
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    with serving(fake_service(engine)) as address, client_of(address) as client:
        raw = client.messages.with_raw_response.create(
            model="fake", max_tokens=9, messages=MESSAGES, tools=[search, *DEFERRED]
        )
    told = [
        f"The tool '{search['type']}' is not here. It was left out.",
        "defer_loading is not obeyed, because the tool that would search is not here.",
    ]
    assert raw.headers["X-Infer-Warning"] == " ".join(told)
    assert [text for text in caplog.messages if "fake" in text] == [f"fake: {x}" for x in told]
    names = [tool["function"]["name"] for tool in engine.asked[0][1]["tools"]]
    assert names == ["CronCreate", "WebFetch", "LSP"]


def test_a_search_for_tools_keeps_the_cache(client: Any) -> None:
    asked = {"model": "demo", "max_tokens": 1, "tools": [*DEFERRED, SEARCH]}
    first = client.messages.create(**asked, messages=MESSAGES).usage
    then = client.messages.create(**asked, messages=AFTER_SEARCH).usage
    whole = first.input_tokens + first.cache_read_input_tokens
    assert then.input_tokens > 50
    # The last few tokens of a prompt begin the answer.
    assert then.cache_read_input_tokens >= whole - 16


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
