"""/v1/responses, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import ANSWER, CALLS, JSON, MESSAGES, Scripted, ask, events, fake_service, serving

import infer
from infer import LLM
from infer.results import Chunk
from infer.sampling import SamplingParams
from infer.server.engine import LLMClient
from infer.server.service import ServerOptions, Service
from infer.text.tools import ToolCallDelta

pytestmark = pytest.mark.demo

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Any]:
    with serving(Service(LLMClient(llm), ServerOptions())) as address, of(address) as client:
        yield client


def of(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def test_a_response(client: Any, llm: LLM) -> None:
    response = client.responses.create(model="demo", input=MESSAGES)
    assert (response.status, response.output_text) == ("completed", ANSWER)
    expected = llm.chat(MESSAGES)
    assert response.usage.input_tokens == expected.prompt_tokens
    assert response.usage.output_tokens == expected.completion_tokens
    again = [*MESSAGES, *response.output, *MESSAGES]
    assert client.responses.create(model="demo", input=again).usage.input_tokens > 16
    text = MESSAGES[0]["content"]
    cut = client.responses.create(model="demo", input=text, max_output_tokens=2, top_logprobs=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert "".join(each.token for each in cut.output[0].content[0].logprobs) == cut.output_text
    Response.model_validate(cut.to_dict())


def test_a_response_is_streamed(client: Any) -> None:
    with client.responses.stream(model="demo", input=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_thoughts_and_calls() -> None:
    engine = Scripted(*CALLS, reason="tool_calls")
    asked: dict[str, Any] = {
        "model": "fake",
        "input": MESSAGES,
        "tools": [TOOL, {"type": "web_search"}],
        "tool_choice": "required",
        "reasoning": {"effort": "low"},
    }
    with serving(fake_service(engine)) as address, of(address) as client:
        raw = client.responses.with_raw_response.create(**asked)
        _, data = ask(address, PATH, asked | {"stream": True}, JSON)
        with client.responses.stream(**asked) as stream:
            streamed = list(stream)[-1].response
    for response in (raw.parse(), streamed):
        thought, message, *calls = response.output
        assert thought.content[0].text == "It is hot."
        assert message.content[0].text == "I look it up."
        assert [call.arguments for call in calls] == ['{"city": "Rome"}', "{}"]
        assert [call.call_id for call in calls] == ["call_1", "call_2"]
        assert {item.status for item in response.output} == {"completed"}
    assert "'web_search'" in raw.headers["X-Infer-Warning"]
    listed = events_of(data)
    event = TypeAdapter[Any](ResponseStreamEvent)
    for each in listed:
        event.validate_python(each)
    assert [each["sequence_number"] for each in listed] == [*range(len(listed))]
    assert engine.asked[0][1].items() >= {"reasoning_effort": "low"}.items()
    assert engine.tools[0] is not None
    assert engine.tools[0]["tool_choice"] == "required"
    (tool,) = engine.tools[0]["tools"] or ()
    assert tool["function"]["name"] == "get_weather"


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream in which each has a name."""
    lines = [line for line in data.split(b"\n") if not line.startswith(b"event: ")]
    listed = events(b"\n".join(lines) + b"data: [DONE]\n\n")
    names = [line[7:].decode() for line in data.split(b"\n") if line.startswith(b"event: ")]
    assert names == [event["type"] for event in listed]
    return listed


def test_items_become_messages_of_the_template() -> None:
    engine = Scripted(Chunk("ok", 1))
    call = {"type": "function_call", "name": "f"}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {**call, "call_id": "c1", "arguments": "{}"},
        {**call, "call_id": "c2", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": "c"},
    ]
    schema = {"type": "object", "properties": {}}
    format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    with serving(fake_service(engine)) as address:
        body = {
            "input": items,
            "instructions": "Be brief.",
            "text": {"format": format},
            "max_output_tokens": 9,
            "temperature": 0.5,
        }
        response, _ = ask(address, PATH, body, JSON)
    assert response.status == 200
    assert "'web_search_call'" in (response.getheader("X-Infer-Warning") or "")
    (prompt, _), (_, params, _) = engine.asked
    assert params == SamplingParams(max_tokens=9, temperature=0.5, schema=schema)
    functions = [
        {"id": key, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for key, arguments in (("c1", "{}"), ("c2", "[]"))
    ]
    assert prompt == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": functions,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "reasoning_content": "so", "content": "b"},
        {"role": "user", "content": "c"},
    ]


# As Codex 0.149 to 0.169 sends tools of MCP servers, and what it was told without a call.
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Tools in the mcp__weather namespace.",
    "tools": [{**TOOL, "description": "Now.", "strict": False}, {**TOOL, "name": "forecast"}],
}
MADE = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_0",
    "namespace": "mcp__weather",
    "name": "forecast",
    "arguments": "{}",
}
MADE_OUTPUT = {
    "type": "function_call_output",
    "call_id": "call_0",
    "output": [{"type": "input_text", "text": "Rain."}],
}
UNASKED = {
    "type": "function_call_output",
    "id": "fco_1",
    "name": "automation_update",
    "namespace": "codex_app",
    "output": "<heartbeat>Go on.</heartbeat>",
}


def test_tools_of_a_namespace(caplog: pytest.LogCaptureFixture) -> None:
    delta = ToolCallDelta(0, "call_1", "mcp__weather__get_weather", "{}")
    engine = Scripted(Chunk("", 1, tool_calls=(delta,)), reason="tool_calls")
    tools = [TOOL, NAMESPACE, {"type": "web_search", "external_web_access": False}]
    choice = {"type": "function", "name": "forecast", "namespace": "mcp__weather"}
    asked: dict[str, Any] = {
        "model": "fake",
        "input": [*MESSAGES, MADE, MADE_OUTPUT, UNASKED],
        "tools": tools,
        "tool_choice": choice,
    }
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    with serving(fake_service(engine)) as address, of(address) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            *listed, last = list(stream)
        client.responses.create(**asked | {"tool_choice": allowed})
    added, done = (
        next(event.item for event in listed if event.type == f"response.output_item.{what}")
        for what in ("added", "done")
    )
    for call in (whole.output[0], added, done, last.response.output[0]):
        assert (call.namespace, call.name) == ("mcp__weather", "get_weather")
    assert done.arguments == "{}"
    names = ["get_weather", "mcp__weather__get_weather", "mcp__weather__forecast"]
    prompt, args = engine.asked[0]
    functions = [tool["function"] for tool in args["tools"]]
    assert [each["name"] for each in functions] == names
    texts = ["", "Tools in the mcp__weather namespace.\n\nNow.", ""]
    assert [each["description"] for each in functions] == texts
    call = {"name": "mcp__weather__forecast", "arguments": "{}"}
    assert prompt[1:] == [
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "Rain."},
        {"role": "user", "content": "<heartbeat>Go on.</heartbeat>"},
    ]
    named, _, only = (each or {} for each in engine.tools)
    assert named["tool_choice"] == {"type": "function", "function": {"name": names[2]}}
    assert [tool["function"]["name"] for tool in only["tools"] or ()] == names[2:]
    left = "fake: Tools of the type 'web_search' are not here. It was left out."
    assert [text for text in caplog.messages if text.startswith("fake")] == [left]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"previous_response_id": "resp_1"}, "Send the whole input"),
        ({"conversation": "conv_1"}, "Send the whole input"),
        ({"background": True}, "not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "Send the item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"input": []}, "empty"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "needs a schema"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "not among the tools"),
    ],
)
def test_what_is_refused(client: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(model="demo", input="a", extra_body=wrong)


def test_an_error_in_a_stream() -> None:
    engine = Scripted(Chunk("a", 1))
    engine.error = infer.DeviceError("The GPU was lost.")
    with serving(fake_service(engine)) as address:
        _, data = ask(address, PATH, {"input": "x", "stream": True}, JSON)
    *_, error, failed = events_of(data)
    assert (error["type"], error["message"]) == ("error", "The GPU was lost.")
    assert failed["response"]["error"]["message"] == "The GPU was lost."
    assert failed["response"]["status"] == "failed"
