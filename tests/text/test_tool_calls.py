"""Tools and reasoning in chats: over HTTP to OpenAI's client, and in process."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from functools import partial
from typing import Any, Literal

import pytest

import infer
from infer import LLM, RequestError, sampling
from infer.engine.constraint import Constraints

pytest.importorskip("openai")

import openai
from families import FAMILIES, Family
from marks import others_full
from serving import ANSWER, CHAT, MESSAGES, answer, ask, serving, streamed

from infer.cli.app import generate as write_answer
from infer.engine.engine import Engine
from infer.engine.token_engine import Step, Timings, TokenAnswer
from infer.sampling import SamplingParams
from infer.server.engine import Answer, LLMClient
from infer.server.service import ServerOptions, Service
from infer.text import tool_formats, tool_grammars
from infer.text.answer import answer_style
from infer.text.tool_formats import ToolFormat
from infer.text.tools import check_tools

pytestmark = pytest.mark.demo

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "Oslo", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# A template like Qwen's, for chats with tools and thoughts, which the prompt begins if asked to.
TEMPLATE = """{{ bos_token }}
{%- if tools %}<|system|>Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{% endif %}
{%- for message in messages %}{{ '<|' ~ message.role ~ '|>' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ call.function.name ~ '(' ~ call.function.arguments.city ~ ')' }}
{%- endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"""
NO_TOOLS_SHOWN = (
    "{{ bos_token }}<|user|>{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}"
    "<|assistant|>"
)


@pytest.fixture
def with_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llm.tokenizer.templates, "default", TEMPLATE)


@contextmanager
def saying(llm: LLM, text: str) -> Iterator[None]:
    """Answers that are asked for in the block are this text, in the model's tokens, whatever the
    prompt is. One that the text may not be is refused."""
    (end, *_) = sorted(llm.tokenizer.eos_token_ids)
    said = [*llm.tokenizer.encode(text, add_special_tokens=False), end]

    def generate(ids: list[int], params: SamplingParams, **options: Any) -> Said:
        constraint = options["constraint"]
        tokens = said[: params.max_tokens]
        for i, token in enumerate(() if constraint is None else tokens):
            if not constraint.allowed_after(said[:i], 0, llm.engine.vocab_size)[token]:
                raise RequestError(f"not allowed: {text!r} from its token {i} on")
        return Said(llm.engine, tokens, options["stop_ids"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "generate", generate)
        yield


class Said(TokenAnswer):
    """One that is whole at once."""

    def __init__(self, engine: Engine, ids: list[int], stop_ids: Sequence[int]) -> None:
        self.engine, self.stop_ids, self.timings = engine, stop_ids, Timings()
        self.steps = deque(map(Step, ids))
        self.ended, self.cancelled, self.error = True, False, None

    def close(self) -> None:
        pass


class ForcedEngine(LLMClient):
    """Answers with `text`."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.text = ""
        self.prompts: list[str] = []

    async def open(self, ids: Sequence[int], *others: Any) -> Answer:
        self.prompts.append(self._llm.decode(ids, skip_special_tokens=False))
        with saying(self._llm, self.text):
            return await super().open(ids, *others)


@pytest.fixture(scope="module")
def engine(llm: LLM) -> ForcedEngine:
    return ForcedEngine(llm)


@pytest.fixture(scope="module")
def address(engine: ForcedEngine) -> Iterator[str]:
    with serving(Service(engine, ServerOptions(keepalive=600))) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


USER = [{"role": "user", "content": "How is the weather?"}]


@pytest.mark.usefixtures("with_template")
def test_a_conversation_with_openais_client(client: Any, engine: ForcedEngine) -> None:
    engine.text = f"<think>\nOslo?\n</think>\n\nOne moment.\n{CALL}\n{CALL_NOW}"
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER, NOW]}
    whole = client.chat.completions.create(messages=USER, **asked)
    (choice,) = whole.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "One moment.")
    assert message.reasoning_content == message.reasoning == "Oslo?"
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert calls == [("get_weather", {"city": "Oslo", "days": 3}), ("now", {})]
    assert {call.type for call in message.tool_calls} == {"function"}
    details = whole.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.completion_tokens
    assert '"name": "get_weather"' in engine.prompts[-1]

    engine.text = "Cold."
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{i}"}
        for i, call in enumerate(message.tool_calls)
    ]
    final = client.chat.completions.create(messages=[*USER, message, *results], **asked)
    assert final.choices[0].message.content == "Cold."
    assert final.choices[0].message.tool_calls is None
    assert final.choices[0].finish_reason == "stop"
    # The arguments, text to APIs, are an object to the template.
    said = "<|assistant|><think>Oslo?</think>One moment.<tool_call>get_weather(Oslo)"
    assert said in engine.prompts[-1]
    assert "<|tool|>0<|end|><|tool|>1<|end|>" in engine.prompts[-1]


@pytest.mark.usefixtures("with_template")
def test_a_stream_with_openais_client(client: Any, engine: ForcedEngine) -> None:
    engine.text = f"<think>Oslo?</think>One moment.{CALL}{CALL_NOW}"
    text, reasoning, deltas, reasons = "", "", [], []
    asked: dict[str, Any] = {"model": "demo", "messages": USER, "tools": [WEATHER, NOW]}
    with client.chat.completions.create(stream=True, **asked) as parts:
        for part in parts:
            (choice,) = part.choices
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", "")
            deltas += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert (text, reasoning) == ("One moment.", "Oslo?")
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    begun = [(delta.index, delta.type, delta.function.name) for delta in deltas if delta.id]
    assert begun == [(0, "function", "get_weather"), (1, "function", "now")]
    arguments = ["", ""]
    for delta in deltas:
        arguments[delta.index] += delta.function.arguments or ""
    assert arguments == [ARGUMENTS, "{}"]
    assert len(deltas) > 6  # arguments come in pieces
    with client.chat.completions.stream(
        model="demo", messages=USER, tools=[WEATHER, NOW]
    ) as events:
        message = events.get_final_completion().choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == arguments


@pytest.mark.usefixtures("with_template")
def test_what_a_request_leaves_of_calls(client: Any, engine: ForcedEngine) -> None:
    engine.text = f"{CALL}\n{CALL_NOW}"

    def message(**options: Any) -> Any:
        asked = {"model": "demo", "messages": USER, "tools": [WEATHER, NOW]} | options
        return client.chat.completions.create(**asked).choices[0].message

    none = message(tool_choice="none")
    assert (none.tool_calls, none.content) == (None, engine.text)
    assert "get_weather" not in engine.prompts[-1]
    assert message(tools=[]).content == engine.text
    assert len(message(tool_choice="required").tool_calls) == 2
    engine.text = CALL
    assert len(message(parallel_tool_calls=False).tool_calls) == 1
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert len(message(tool_choice=named).tool_calls) == 1


@pytest.mark.usefixtures("with_template")
def test_thoughts_that_the_prompt_begins(address: str, engine: ForcedEngine) -> None:
    engine.text = "Hm.</think>Yes."
    asked: dict[str, Any] = {"messages": USER, "reasoning_effort": "high"}
    message = answer(address, CHAT, **asked)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert engine.prompts[-1].endswith("<think>")
    deltas = [event["choices"][0]["delta"] for event in streamed(address, CHAT, **asked)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    engine.text = "Yes."
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = answer(address, CHAT, messages=USER, **off)["choices"][0]["message"]
        assert ("reasoning" in message, message["content"]) == (False, "Yes.")
    engine.text = 'Hm.</think>{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema},
    }
    message = answer(address, CHAT, **asked)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"a": 1}')


@pytest.mark.usefixtures("with_template")
@pytest.mark.parametrize(
    ("begun", "rest", "reasoning", "content"),
    [
        ("<think>" + "Well. " * 20, "Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>Hm.</think>Y", "es.", None, "es."),
        ("", "Yes.", None, "Yes."),
    ],
)
def test_thoughts_of_an_answer_that_is_begun(
    address: str,
    engine: ForcedEngine,
    begun: str,
    rest: str,
    reasoning: str | None,
    content: str,
) -> None:
    messages = [
        {"role": "user", "content": "What is <think>?"},
        {"role": "assistant", "content": begun},
    ]
    engine.text = rest
    asked: dict[str, Any] = {"messages": messages, "continue_final_message": True}
    message = answer(address, CHAT, **asked)["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def function(**changes: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **changes}}]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": {}}, "tools", "Expected `array"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must describe"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": function(name="a b")}, "tools", "tools[0].function.name"),
        ({"tools": function(name=None)}, "tools", "tools[0].function.name"),
        ({"tools": function(parameters=[])}, "tools", "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools", '"object"'),
        ({"tools": function(description=3)}, "tools", "tools[0].function.description"),
        ({"tools": function() * 2}, "tools", "tools[1].function.name is f again"),
        ({"tools": function(), "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"tools": function(), "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed"),
        (
            {
                "tools": function(
                    strict=True, parameters={"type": "object", "unheard": {}, "not": {}}
                )
            },
            "tools",
            "the parameters of f cannot be followed",
        ),
        (
            {"tools": function(), "tool_choice": "required", "regex": "a"},
            "tool_choice",
            "no room",
        ),
        ({"tools": function(), "ignore_eos": True}, "ignore_eos", "no end for a call"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": [2**53 + 1]}},
                }
            },
            "response_format",
            "enum 9,007,199,254,740,993 would be rounded",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages", "a call must be"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages", "must be a list"),
    ],
)
def test_what_is_refused(address: str, body: dict[str, Any], param: str, message: str) -> None:
    response, data = ask(address, CHAT, {"messages": MESSAGES} | body)
    error = json.loads(data)["error"]
    assert (response.status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.usefixtures("with_template")
def test_a_schema_beside_a_call_that_has_to_come(address: str, engine: ForcedEngine) -> None:
    engine.text = CALL
    asked = {"messages": USER, "tools": [WEATHER], "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    response, data = ask(address, CHAT, asked | {"response_format": form})
    (choice,) = json.loads(data)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert "no schema" in (response.getheader("X-Infer-Warning") or "")


def test_a_template_that_knows_no_tools(address: str, engine: ForcedEngine) -> None:
    engine.text = CALL
    calls = answer(address, CHAT, messages=USER, tools=[WEATHER])["choices"][0]["message"][
        "tool_calls"
    ]
    prompt = engine.prompts[-1]
    assert prompt.startswith("<|bos|><|system|># Tools")
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in prompt
    results = [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "Cold."}] * 2
    engine.text = "Brr."
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    answer(address, CHAT, messages=messages, tools=[WEATHER])
    result = "<tool_response>\nCold.\n</tool_response>"
    assert f"<|assistant|>{CALL}<|end|><|user|>{result}\n{result}<|end|>" in engine.prompts[-1]


def test_a_call_by_all_formats_is_the_same(address: str, engine: ForcedEngine) -> None:
    engine.text = CALL.replace("get_weather", "f").replace(ARGUMENTS, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 80}
    function = {"name": "f", "parameters": schema}
    named: dict[str, Any] = {"type": "function", "function": function}
    required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = answer(address, CHAT, **asked, tools=[named], **required)["choices"]
    (call,) = choice["message"]["tool_calls"]
    given = {"a": 1}
    assert json.loads(call["function"]["arguments"]) == given

    tools = [{"name": "f", "input_schema": schema}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = answer(address, "/v1/messages", **asked, tools=tools, tool_choice=choice)
    (block,) = message["content"]
    assert (block["name"], block["input"], message["stop_reason"]) == ("f", given, "tool_use")
    counted = {"messages": MESSAGES, "tools": tools}
    usage = message["usage"]
    assert answer(address, "/v1/messages/count_tokens", **counted)["input_tokens"] == (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
    )
    written = answer(address, "/tokenize", messages=MESSAGES, tools=[named])
    assert written["count"] == usage["input_tokens"] + usage["cache_read_input_tokens"]

    tools = [{"type": "function", **function}]
    (item,) = answer(address, "/v1/responses", input=MESSAGES, tools=tools, **required)["output"]
    assert (item["name"], json.loads(item["arguments"])) == ("f", given)


def told_by(address: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    _, data = ask(address, path, {"stream": True, **body})
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]


@pytest.mark.usefixtures("with_template")
def test_a_call_that_a_limit_cuts(llm: LLM, address: str, engine: ForcedEngine) -> None:
    """A call that is whole is given, of one that is not there is nothing in what is whole; a stream
    has its beginning. The reason is the limit."""
    tools = [WEATHER, NOW]
    named = [{"type": "function", **each["function"]} for each in tools]
    theirs = [{"name": each["name"], "input_schema": each.get("parameters", {})} for each in named]
    for each in theirs:
        each["input_schema"] = {"type": "object"} | each["input_schema"]
    whole_and_more = f"One.{CALL_NOW}\n{CALL}"
    for text, cut_in in (
        (f"One.{CALL_NOW}", "</tool"),
        (whole_and_more, '<tool_call>\\n{"name": "get_w'),
        (whole_and_more, '"city": "O'),
    ):
        end = text.rindex(cut_in.replace("\\n", "\n")) + len(cut_in.replace("\\n", "\n"))
        engine.text = text
        limit = len(llm.encode(text[:end], add_special_tokens=False))
        has_begun = "city" in cut_in  # in a stream
        # OpenAI's chat
        asked: dict[str, Any] = {"messages": USER, "tools": tools, "max_tokens": limit}
        (choice,) = answer(address, CHAT, **asked)["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("length", "One.")
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")
        parts = [part["choices"][0] for part in streamed(address, CHAT, **asked)]
        assert parts[-1]["finish_reason"] == "length"
        assert "".join(part["delta"].get("content") or "" for part in parts) == "One."
        deltas = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        names = [delta["function"]["name"] for delta in deltas if delta.get("id")]
        assert names == ["now", "get_weather"][: 1 + has_begun]
        # Responses
        asked = {"input": USER, "tools": named, "max_output_tokens": limit}
        response = answer(address, "/v1/responses", **asked)
        said, called = response["output"]
        assert (response["status"], said["content"][0]["text"]) == ("incomplete", "One.")
        assert (called["name"], called["status"]) == ("now", "completed")
        events = told_by(address, "/v1/responses", **asked)
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        told = [(item.get("name"), item["status"]) for item in done]
        expected = [(None, "completed"), ("now", "completed"), ("get_weather", "incomplete")]
        assert told == expected[: 2 + has_begun]
        ends = [each for each in events if each["type"].endswith("arguments.done")]
        assert [each["name"] for each in ends] == ["now"]
        assert events[-1]["type"] == "response.incomplete"
        # Anthropic's
        asked = {"messages": USER, "tools": theirs, "max_tokens": limit}
        message = answer(address, "/v1/messages", **asked)
        kinds = [
            (block["type"], block.get("text", block.get("name"))) for block in message["content"]
        ]
        assert (message["stop_reason"], kinds) == (
            "max_tokens",
            [("text", "One."), ("tool_use", "now")],
        )
        events = told_by(address, "/v1/messages", **asked)
        begun = [each["content_block"] for each in events if each["type"] == "content_block_start"]
        assert [block.get("name") for block in begun] == [None, "now", "get_weather"][
            : 2 + has_begun
        ]
        texts = [each["delta"].get("text", "") for each in events if "delta" in each]
        assert "".join(texts) == "One."
        # Ollama's, which streams calls when they are whole
        asked = {"messages": USER, "tools": tools, "options": {"num_predict": limit}}
        reply = answer(address, "/api/chat", **asked, stream=False)
        (call,) = reply["message"]["tool_calls"]
        assert (reply["done_reason"], reply["message"]["content"]) == ("length", "One.")
        assert call["function"]["name"] == "now"
        _, data = ask(address, "/api/chat", asked)
        lines = [json.loads(line) for line in data.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "One."
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert [call["function"]["name"] for call in calls] == ["now"]
        # Python
        with saying(llm, text):
            stream = llm.stream(USER, tools=tools, max_tokens=limit)
            pieces = [delta for chunk in stream for delta in chunk.tool_calls]
        result = stream.result
        assert (result.finish_reason, result.text) == ("length", "One.")
        assert [(call.name, call.parsed()) for call in result.tool_calls] == [("now", {})]
        assert [piece.name for piece in pieces if piece.id] == names


# In process, where the model chooses what the grammar leaves it


@pytest.mark.parametrize(
    "named", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_calls_that_must_come(llm: LLM, named: str | dict[str, Any]) -> None:
    options: dict[str, Any] = {"tool_choice": named, "parallel_tool_calls": False}
    stream = llm.stream(MESSAGES, tools=[NOW, WEATHER], **options)
    pieces = [delta for chunk in stream for delta in chunk.tool_calls]
    (call,) = stream.result.tool_calls
    assert (stream.result.finish_reason, stream.result.text) == ("tool_calls", "")
    assert pieces[0].name == call.name == "get_weather"
    assert "".join(piece.arguments for piece in pieces) == call.arguments
    assert call.parsed().keys() == {"city", "days"}
    assert call.parsed()["days"] in (1, 3)


@pytest.mark.usefixtures("with_template")
def test_calls_that_are_held_to_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, or with more tools than it takes, unless they must be right."""
    wrong = CALL.replace("3", '"x"')

    def call(*tools: dict[str, Any], **options: Any) -> Any:
        with saying(llm, wrong):
            return llm.chat(MESSAGES, tools=tools, **options).tool_calls[0].parsed()["days"]

    with pytest.raises(RequestError, match="not allowed"):
        call(WEATHER)
    loose = {**WEATHER["function"], "parameters": {"type": "object", "not": {}}}
    assert call({"type": "function", "function": loose}) == "x"
    many = [
        {"type": "function", "function": {"name": f"f{i}", "description": "x" * 1000}}
        for i in range(3)
    ]
    monkeypatch.setitem(sampling.CONSTRAINTS, "grammar", 100)
    assert call(WEATHER, *many, template_args={"template": NO_TOOLS_SHOWN}) == "x"
    with pytest.raises(RequestError, match="too many to hold calls to"):
        call(WEATHER, tool_choice="required")
    monkeypatch.undo()
    monkeypatch.setitem(llm.tokenizer.templates, "default", TEMPLATE)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(llm._constraints, "_grammars", None)
    assert call(WEATHER) == "x"
    with pytest.raises(infer.InferError, match="structured"):
        call(WEATHER, tool_choice="required")


def test_without_a_call_the_answer_is_the_same(llm: LLM) -> None:
    assert llm.chat(MESSAGES, tools=[], max_tokens=8).text == ANSWER
    assert llm.chat(MESSAGES).tool_calls == []
    with pytest.raises(RequestError, match="tools belong to chat messages"):
        llm.generate("Once", tools=[WEATHER])
    with pytest.raises(RequestError, match="tools must be a list"):
        infer.generate("demo", MESSAGES, tools="weather")  # type: ignore[call-overload]


def get_weather(city: str, days: Literal[1, 3] = 1, tags: list[str] | None = None) -> str:
    """The weather of a city.

    With details."""
    return city


def test_thoughts_on_the_command_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with saying(llm, "<think>\nOne.\n\nTwo.\n</think>\n\nYes."):
            stream = llm.stream(MESSAGES)
        write_answer(stream, streamed=True, quiet=quiet)
        assert capsys.readouterr() == ("Yes.\n", "" if quiet else "One.\n\nTwo.\n\n")


@pytest.mark.usefixtures("with_template")
def test_functions_of_python_as_tools(llm: LLM) -> None:
    (tool,) = check_tools([get_weather]).offered or ()
    assert tool["function"]["description"] == "The weather of a city.\n\nWith details."
    jsonschema = pytest.importorskip("jsonschema")
    valid = jsonschema.Draft202012Validator(tool["function"]["parameters"]).is_valid
    assert valid({"city": "Oslo", "days": 3, "tags": ["a"]})
    assert valid({"city": "Oslo", "tags": None})
    wrong: list[dict[str, Any]] = [
        {},
        {"city": 3},
        {"city": "", "days": 2},
        {"city": "", "tags": [1]},
    ]
    assert not any(map(valid, wrong))
    with saying(llm, f"<think>Hm.</think>{CALL}"):
        result = llm.chat(MESSAGES, tools=[get_weather])
    (call,) = result.tool_calls
    assert get_weather(**call.parsed()) == "Oslo"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Cold."}]
    prompt = llm.tokenizer.render_chat([*MESSAGES, result.message, *results])
    assert "<think>Hm.</think><tool_call>get_weather(Oslo)<|end|><|tool|>Cold.<|end|>" in prompt


class Unit(Enum):
    DAY = "d"
    WEEK = "w"


@dataclass
class Place:
    """A place."""

    name: Literal["Oslo", "Rome"]


def plan(place: Place, unit: Unit, at: tuple[Literal[1, 2], bool], day: date, anything=None) -> str:  # type: ignore[no-untyped-def]
    """Plan a trip."""
    return f"{place.name} {unit.name} {at[1]} {day.year}"


def test_arguments_come_as_the_types_that_a_function_takes(llm: LLM) -> None:
    """The model is held to the types, in the format of Hermes, which is not asked for by name."""
    result = llm.chat(
        MESSAGES, tools=[plan, NOW], tool_choice="plan", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = result.tool_calls
    arguments = call.parsed()
    assert isinstance(arguments["place"], Place)
    assert isinstance(arguments["unit"], Unit)
    assert isinstance(arguments["day"], date)
    assert plan(**arguments).split()[0] in ("Oslo", "Rome")


@pytest.mark.usefixtures("with_template")
def test_a_prompt_with_functions_is_encoded_as_it_is_generated(llm: LLM) -> None:
    tools = [get_weather, NOW]
    ids = llm.encode(MESSAGES, tools=tools)
    assert llm.stream(MESSAGES, tools=tools).so_far.prompt_tokens == len(ids)
    assert "The weather of a city." in llm.decode(ids, skip_special_tokens=False)
    assert (
        llm.encode(MESSAGES, tools=[]) == llm.encode(MESSAGES, tools=None) == llm.encode(MESSAGES)
    )
    with pytest.raises(RequestError, match=r"tools\[0\] must be"):
        llm.encode(MESSAGES, tools=["get_weather"])


def test_a_stop_string_and_a_limit_within_an_answer(llm: LLM) -> None:
    def chat(text: str, **options: Any) -> infer.Result:
        with saying(llm, text):
            return llm.chat(MESSAGES, tools=[NOW], **options)

    assert chat("I think so <", stop=["think"]).text == "I "
    assert chat("<think>All of it", stop=["of"]).reasoning == "All"
    assert chat("a <tool_cal").text == "a <tool_cal"
    cut = chat("a <tool_call>", max_tokens=4)
    assert (cut.finish_reason, cut.text) == ("length", "a ")


def test_special_tokens_of_a_format_are_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens that are not of the format are not shown, as ever."""
    style = ToolFormat(
        "hermes",
        ("tools",),
        partial(tool_formats._json, begin="<|system|>", end="<|user|>"),
        ("<|system|>", "<|user|>"),
    )
    monkeypatch.setitem(
        llm.tokenizer.templates, "default", "{{ tools }}{{ messages[0].content }}<|user|>"
    )
    monkeypatch.setattr(tool_formats, "FORMATS", (style,))
    answer_style.cache_clear()
    begin = tool_grammars._LAYOUTS["hermes"]
    layout = replace(begin, begin="<|system|>", end="<|user|>")
    monkeypatch.setitem(tool_grammars._LAYOUTS, "hermes", layout)
    options: dict[str, Any] = {"tools": [NOW], "max_tokens": 60}
    text = 'Hi<|assistant|>!<|system|>{"name": "now", "arguments": {}}<|user|>'
    with saying(llm, text):
        result = llm.chat(MESSAGES, **options)
    assert (result.text, [call.name for call in result.tool_calls]) == ("Hi!", ["now"])
    assert "<|system|>" not in llm.decode(result.token_ids)
    result = llm.chat(MESSAGES, tool_choice="required", parallel_tool_calls=False, **options)
    assert [call.parsed() for call in result.tool_calls] == [{}]
    names = llm.tokenizer.special_names
    assert {*result.token_ids} >= {names["<|system|>"], names["<|user|>"]}


# Families of models: their tokens and templates, an agent's request, and what their models answer


READ = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["path"],
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "filter": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["file", "folder"]},
                "depth": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["kind", "depth", "tags"],
            "additionalProperties": False,
        },
    },
    "required": ["query", "filter"],
}
RATE = {
    "type": "object",
    "properties": {
        "stars": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
        "of": {
            "type": "object",
            "properties": {"kind": {"enum": ["file", "folder"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
    "required": ["stars", "of"],
}


def agents_tools(**options: Any) -> list[dict[str, Any]]:
    described = {"read_file": READ, "search": SEARCH, "rate": RATE}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **options}}
        for name, schema in described.items()
    ]


HISTORY = [
    {"role": "system", "content": "You work on files."},
    {"role": "user", "content": "What is in a.py?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "functions.read_file:0",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path": "a.py", "lines": [1, 2]}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "functions.read_file:0", "content": "import <b>"},
    {"role": "user", "content": "Look for more."},
]


@contextmanager
def playing(llm: LLM, family: Family) -> Iterator[None]:
    """The model has the tokens and the template of this family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "tokenizer", family.tokenizer())
        own = Constraints(llm.tokenizer, llm.engine.vocab_size)
        patch.setattr(llm, "_constraints", own)
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_an_agents_request_to_each_family(llm: LLM, name: str) -> None:
    """Forced, free and strict, streamed, after a thought: the model's own answer is one that it may
    give, token by token, and is read."""
    family = FAMILIES[name]
    query = f"how {' and '.join(['<i>', *family.plain.split()[:2]])} work"
    arguments = {"query": query, "filter": {"kind": "file", "depth": 2, "tags": ["a", "<b>"]}}
    calls = [("search", arguments), ("rate", {"stars": [2, 1], "of": {"kind": "folder"}})]
    calls = calls[: 1 if family.single else 2]
    thought = "Hm. ".join(family.thought) if any(family.thought) else ""
    said = "" if family.single or family.begins is None else "I look."
    ways: list[tuple[str, dict[str, Any]]] = [
        (thought, {"tool_choice": "required"}),
        (thought, {"tool_choice": {"type": "function", "function": {"name": "search"}}}),
        (thought + said, {}),
        (thought + said, {"strict": True}),
    ]
    with playing(llm, family):
        for before, options in ways:
            tools = agents_tools(strict=options.pop("strict", False))
            named = isinstance(options.get("tool_choice"), dict)
            expected = calls[:1] if named else calls
            with saying(llm, before + family.write(expected)):
                args = dict(family.template_args)
                stream = llm.stream(HISTORY, tools=tools, template_args=args, **options)
                text = "".join(map(str, stream))
            found = [(call.name, call.parsed()) for call in stream.result.tool_calls]
            assert found == expected
            assert text.strip() == (said if before.endswith("look.") else "")
            assert (stream.result.reasoning or "").strip() == ("Hm." if thought else "")
            assert stream.result.finish_reason == "tool_calls"
        wrong = [("search", arguments | {"filter": {"kind": "file", "depth": "x", "tags": []}})]
        with (
            saying(llm, thought + family.write(wrong)),
            pytest.raises(RequestError, match="not allowed"),
        ):
            llm.chat(HISTORY, tools=agents_tools(strict=True), template_args=args)
        answer = f"See {query}.".replace(family.begins or "", "")
        with saying(llm, thought + answer.join(family.content)):
            result = llm.chat(HISTORY, tools=agents_tools(strict=True), template_args=args)
        assert (result.text, result.tool_calls) == (answer, [])


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_each_family_that_is_begun(llm: LLM, name: str) -> None:
    """The new part of the answer is text, or what a regular expression holds it to."""
    begun = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]
    options: dict[str, Any] = {"template_args": dict(FAMILIES[name].template_args)}
    options["continue_final_message"] = True
    with playing(llm, FAMILIES[name]):
        for held in ({"tools": agents_tools(strict=True)}, {"regex": " [a-z]+"}):
            with saying(llm, " four"):
                stream = llm.stream(begun, **options, **held)
                texts = [chunk.text for chunk in stream]
            assert texts[0] != ""  # what comes is passed on at once
            assert (stream.result.text, stream.result.reasoning) == (" four", "")
        if FAMILIES[name].single:  # a call is a message of its own
            with pytest.raises(RequestError, match="tool_choice asks for a call"):
                llm.stream(begun, **options, tools=agents_tools(), tool_choice="required")


PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 2}},
            "required": ["n"],
        },
    },
}


def bias(llm: LLM, *texts: str) -> dict[int, float]:
    """By which the first tokens of these come wherever they may."""
    return dict.fromkeys((llm.tokenizer.encode(text, False)[0] for text in texts), 40.0)


@others_full("name", FAMILIES, ["qwen3"])
def test_calls_that_the_model_makes(llm: LLM, name: str) -> None:
    """By itself, strictly and not, where it wants to; and forced, after a thought that it ends."""
    family = FAMILIES[name]
    strict = {**PICK, "function": {**PICK["function"], "strict": True}}
    with playing(llm, family):
        wanted = bias(llm, family.begins or '{"')
        forced = bias(llm, family.thought[1].strip() or '{"')
        ways = [(PICK, {"tool_choice": "required", "logit_bias": forced})]
        if not (family.single or family.thought[0] == ""):  # else something else comes before
            ways += [(tool, {"logit_bias": wanted}) for tool in (PICK, strict)]
        for tool, options in ways:
            result = llm.chat(MESSAGES, tools=[tool], max_tokens=60, **options)
            assert [call.name for call in result.tool_calls][:1] == ["pick"]
            assert result.tool_calls[0].parsed()["n"] in (1, 2)


def test_a_call_through_the_server_with_tokens_like_qwens(llm: LLM) -> None:
    """That the model wants, and that it has to make."""
    with (
        playing(llm, FAMILIES["qwen3"]),
        serving(Service(LLMClient(llm), ServerOptions())) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        begin = {str(llm.tokenizer.added_text_ids["<tool_call>"]): 40}
        asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": [PICK]}
        asked |= {"logit_bias": begin, "max_tokens": 40, "stop": ["</tool_call>"]}
        for choice in ("auto", "required"):
            whole = client.chat.completions.create(tool_choice=choice, **asked).choices[0].message
            (call, *_) = whole.tool_calls
            assert (call.function.name, whole.content) == ("pick", None)
            assert json.loads(call.function.arguments)["n"] in (1, 2)
            with client.chat.completions.create(tool_choice=choice, stream=True, **asked) as parts:
                deltas = [part.choices[0].delta for part in parts]
            assert not any(delta.content for delta in deltas)
            pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
            text = "".join(each.function.arguments or "" for each in pieces if each.index == 0)
            assert text == call.function.arguments
