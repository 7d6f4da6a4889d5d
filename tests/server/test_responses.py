"""/v1/responses, by OpenAI's client."""

from __future__ import annotations

import json
import re
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


# As Codex sends its tool for patches, and calls of it.
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files. Do not wrap the patch in JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
PATCHED = '*** Begin Patch\n+say("\\n\U0001f600 ü")\n*** End Patch\n'
PATCH_CALL = {"type": "custom_tool_call", "status": "completed", "name": "apply_patch"}
FREE = "The model is told the format of the tool 'apply_patch', but not held to it."


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_custom_tool(size: int) -> None:
    arguments = json.dumps({"input": PATCHED})
    assert "\\ud83d\\ude00" in arguments
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    engine = Scripted(
        Chunk("", 1, tool_calls=(ToolCallDelta(0, "call_1", "apply_patch"),)),
        *(Chunk("", 2, tool_calls=(ToolCallDelta(0, arguments=each),)) for each in pieces),
        Chunk("", 3, tool_calls=(ToolCallDelta(1, "call_2", "get_weather", "{}"),)),
        reason="tool_calls",
    )
    choice = {"type": "custom", "name": "apply_patch"}
    asked: dict[str, Any] = {"model": "fake", "input": "a", "tools": [PATCH, TOOL]}
    with serving(fake_service(engine)) as address, of(address) as client:
        raw = client.responses.with_raw_response.create(**asked, tool_choice=choice)
        _, data = ask(address, PATH, asked | {"stream": True}, JSON)
    assert raw.headers["X-Infer-Warning"] == FREE
    whole = raw.parse()
    assert whole.metadata == {"infer_warning": FREE}
    patch, weather = whole.output
    assert (patch.type, patch.call_id, patch.name) == ("custom_tool_call", "call_1", "apply_patch")
    assert (patch.input, weather.arguments) == (PATCHED, "{}")
    listed = events_of(data)
    for each in listed:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(each)
    name = "response.custom_tool_call_input"
    deltas = [each["delta"] for each in listed if each["type"] == f"{name}.delta"]
    assert "".join(deltas) == PATCHED
    assert len(deltas) > (10 if size < 1000 else 0)
    (done,) = (each for each in listed if each["type"] == f"{name}.done")
    assert done["input"] == PATCHED
    item = next(each["item"] for each in listed if each["type"] == "response.output_item.done")
    assert (item["input"], item["status"]) == (PATCHED, "completed")
    assert listed[-1]["response"]["output"][0] == item
    options = engine.tools[0] or {}
    assert options["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    function = (options["tools"] or ())[0]["function"]
    (parameter,) = function["parameters"]["properties"].values()
    assert parameter["type"] == "string"
    assert PATCH["format"]["definition"] in parameter["description"]  # type: ignore[index]


@pytest.mark.parametrize("arguments", ['{"patch": 1}', "*** Begin", '{"input": "\\ud83d"}'])
def test_what_a_model_writes_as_no_input_is_the_input(arguments: str) -> None:
    delta = ToolCallDelta(0, "call_1", "apply_patch", arguments)
    engine = Scripted(Chunk("", 1, tool_calls=(delta,)), reason="tool_calls")
    asked: dict[str, Any] = {"model": "fake", "input": "a", "tools": [PATCH]}
    with serving(fake_service(engine)) as address, of(address) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            streamed = list(stream)[-1].response
    text = "?" if "ud83d" in arguments else arguments
    assert whole.output[0].input == streamed.output[0].input == text


def test_an_input_that_a_limit_cuts() -> None:
    class Cut(Scripted):
        def answer(self) -> Any:
            answer = super().answer()
            answer.result.tool_calls.clear()  # of which only whole ones are told
            return answer

    delta = ToolCallDelta(0, "call_1", "apply_patch", '{"input": "ab')
    engine = Cut(Chunk("", 1, tool_calls=(delta,)), reason="length")
    with serving(fake_service(engine)) as address:
        body = {"input": "a", "tools": [PATCH], "stream": True}
        _, data = ask(address, PATH, body, JSON)
    *_, piece, done, last = events_of(data)
    assert (piece["type"], piece["delta"]) == ("response.custom_tool_call_input.delta", "ab")
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert last["type"] == "response.incomplete"


def test_an_input_is_held_to_a_regular_expression(client: Any) -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": r'[xy]{3}\n"q|[xy]{3}\n"q'}
    tool = {"type": "custom", "name": "draw", "format": format}
    asked: dict[str, Any] = {"model": "demo", "input": "Draw.", "tools": [tool]}
    raw = client.responses.with_raw_response.create(**asked, tool_choice="required")
    assert "X-Infer-Warning" not in raw.headers or "draw" not in raw.headers["X-Infer-Warning"]
    (call,) = (item for item in raw.parse().output if item.type == "custom_tool_call")
    assert re.fullmatch(r'[xy]{3}\n"q', call.input)
    lookahead = format | {"definition": "(?=a)a"}
    asked["tools"] = [tool | {"format": lookahead}]
    raw = client.responses.with_raw_response.create(**asked)
    assert "the tool 'draw', but not held to it" in raw.headers["X-Infer-Warning"]


# As Codex 0.148 to 0.171 sends what its agents tell each other. The message's argument is for
# OpenAI's servers to encrypt.
SPAWN = {
    "type": "namespace",
    "name": "collaboration",
    "tools": [
        {
            "type": "function",
            "name": "spawn_agent",
            "parameters": {
                "type": "object",
                "properties": {
                    "message": {"type": "string", "encrypted": True},
                    "task_name": {"type": "string"},
                },
            },
        }
    ],
}
TASK = "Message Type: NEW_TASK\nTask name: /root/worker\nSender: /root\nPayload:\nCount."
AGENT_MESSAGE = {
    "type": "agent_message",
    "author": "/root",
    "recipient": "/root/worker",
    "content": [{"type": "input_text", "text": TASK}],
}
HIDDEN = {"type": "encrypted_content", "encrypted_content": "gAAAAAB"}


def test_agents_of_codex_tell_each_other_texts() -> None:
    delta = ToolCallDelta(0, "call_1", "collaboration__spawn_agent", '{"message": "Count."}')
    engine = Scripted(Chunk("", 1, tool_calls=(delta,)), reason="tool_calls")
    with serving(fake_service(engine)) as address:
        body = {"input": [AGENT_MESSAGE], "tools": [SPAWN, TOOL], "stream": True}
        _, data = ask(address, PATH, body, JSON)
        old = AGENT_MESSAGE | {"content": [*AGENT_MESSAGE["content"], HIDDEN]}
        response, _ = ask(address, PATH, {"input": [old, *MESSAGES]}, JSON)
        refused, text = ask(address, PATH, {"input": [*MESSAGES, old]}, JSON)
    item = next(each["item"] for each in events_of(data) if "item" in each)
    assert (item["namespace"], item["name"]) == ("collaboration", "spawn_agent")
    assert item["encrypted_function_args"] == []
    prompt, args = engine.asked[0]
    assert prompt == [{"role": "user", "content": TASK}]
    properties = args["tools"][0]["function"]["parameters"]["properties"]
    assert properties == {"message": {"type": "string"}, "task_name": {"type": "string"}}
    assert "'encrypted_content' was left out" in (response.getheader("X-Infer-Warning") or "")
    assert refused.status == 400
    assert b"'encrypted_content' is not supported" in text


def test_other_items_of_codex() -> None:
    engine = Scripted(Chunk("ok", 1))
    forecast = {"type": "function", "name": "forecast", "parameters": {"type": "object"}}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [PATCH, TOOL]},
        *MESSAGES,
        {**PATCH_CALL, "call_id": "c1", "input": PATCHED},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"q": 1}},
        {"type": "tool_search_output", "call_id": "s1", "status": "completed", "tools": [forecast]},
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
        {
            "type": "local_shell_call",
            "call_id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "function_call_output", "call_id": "c2", "output": "a.py"},
    ]
    with serving(fake_service(engine)) as address:
        response, _ = ask(address, PATH, {"input": items, "tools": [TOOL]}, JSON)
        summary = {"type": "context_compaction", "encrypted_content": "gAAAAAB"}
        refused, text = ask(address, PATH, {"input": [summary, *MESSAGES]}, JSON)
    assert response.status == 200
    warned = response.getheader("X-Infer-Warning") or ""
    assert [kind in warned for kind in ("tool_search_call", "configuration_update")] == [True, True]
    prompt, args = engine.asked[0]
    names = [tool["function"]["name"] for tool in args["tools"]]
    assert names == ["get_weather", "apply_patch", "forecast"]
    called = [each["tool_calls"][0] for each in prompt if "tool_calls" in each]
    assert json.loads(called[0]["function"]["arguments"]) == {"input": PATCHED}
    assert called[1]["function"]["name"] == "local_shell"
    assert json.loads(called[1]["function"]["arguments"])["command"] == ["ls"]
    outputs = [(each["tool_call_id"], each["content"]) for each in prompt if each["role"] == "tool"]
    assert outputs == [("c1", "Done."), ("c2", "a.py")]
    assert (refused.status, b"'context_compaction' is not supported" in text) == (400, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tools": [TOOL, PATCH | {"name": "get_weather"}]}, "two tools with the name"),
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
