"""Answers of models in every format that is read: what they say, think and call.

The answers are written after the published chat templates and documentation of the models.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from families import demo_tokenizer

from infer import RequestError
from infer.chat_answers import Reading
from infer.engine.constraint import Constraint, Constraints
from infer.sampling import SamplingParams
from infer.text.answer import AnswerParser, AnswerStyle, answer_style
from infer.text.answer_reader import Pieces
from infer.text.detokenizer import StreamingDetokenizer
from infer.text.text_schemas import FORMATS as FORMATS_OF_TEXTS
from infer.text.tokenizer import Tokenizer
from infer.text.tool_formats import (
    DSML_TAGS,
    FORMATS,
    GLM_TAGS,
    MINIMAX_TAGS,
    QWEN_TAGS,
    Tags,
    ToolFormat,
    find_format,
)
from infer.text.tool_grammars import answer_grammar, example_call
from infer.text.tools import ToolCall, add_deltas, check_tools

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": ["string", "null"]}},
    },
    "now": {"type": "object", "properties": {}},
    "search": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
            "exact": {"type": "boolean"},
        },
    },
}
PARIS = ("get_weather", {"city": "Paris", "days": 3})
OSLO = ("get_weather", {"city": "Oslo"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
SEARCH = ("search", {"tags": ["a", "b, c"], "options": {"k": "v"}, "exact": True})
CODE = 'def f(x):\n    return {"a": x}  # "quoted" </p> é\n'
FILE = ("write_file", {"path": "a/b.py", "text": CODE})


@dataclass
class Case:
    """An answer, and what it is. sign: of the template."""

    sign: str
    answer: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    thinking: bool = False
    ids: list[str] | None = None


def js(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{js(*call)}\n</tool_call>" for call in calls)


HERMES = "<tool_call>"
QWEN_CODER = "<tool_call> <function= <parameter="
MISTRAL = "[TOOL_CALLS] [/TOOL_RESULTS]"
LLAMA = "<|python_tag|>"
PYTHONIC = "[func_name1(params_name1=params_value1, ...)]"
HARMONY = "<|start|>assistant<|channel|>analysis<|message|>"
DS = "<｜tool▁calls▁begin｜>"
DSML = "｜DSML｜"

CASES = {
    # NousResearch Hermes 2 Pro, Qwen2.5, Qwen3, SmolLM3, Granite 4, ERNIE 4.5
    "hermes": Case(HERMES, hermes(PARIS), [PARIS]),
    "hermes_text": Case(HERMES, f"I look.\n\n{hermes(PARIS, OSLO)}", [PARIS, OSLO], "I look."),
    "hermes_thought": Case(
        "<think> <tool_call>",
        f"<think>\nParis, then.\n</think>\n\n{hermes(PARIS)}",
        [PARIS],
        reasoning="Paris, then.",
    ),
    "hermes_thought_begun": Case(
        "<think> <tool_call>",
        f"\nHm. </think>\n\nSo: {hermes(OSLO)}",
        [OSLO],
        "So:",
        "Hm.",
        thinking=True,
    ),
    "hermes_order": Case(
        HERMES,
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>',
        [OSLO],
    ),
    "hermes_list": Case(
        HERMES, f"<tool_call>[{js(*PARIS)}, {js(*OSLO)}]</tool_call>", [PARIS, OSLO]
    ),
    "hermes_string": Case(
        HERMES, f"<tool_call>{js('get_weather', json.dumps(OSLO[1]))}</tool_call>", [OSLO]
    ),
    "hermes_null": Case(HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
    "hermes_none": Case(HERMES, '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    "hermes_code": Case(HERMES, hermes(FILE), [FILE]),
    "hermes_end_within": Case(
        HERMES,
        hermes(("write_file", {"path": "</tool_call>"})),
        [("write_file", {"path": "</tool_call>"})],
    ),
    "hermes_unknown": Case("no tools here", hermes(PARIS), [PARIS]),
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    "qwen3_coder": Case(
        QWEN_CODER,
        "Writing.\n<tool_call>\n<function=write_file>\n<parameter=path>\na/b.py\n</parameter>\n"
        f"<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
        [FILE],
        "Writing.",
    ),
    "qwen3_coder_types": Case(
        QWEN_CODER,
        '<tool_call>\n<function=search>\n<parameter=tags>\n["a", "b, c"]\n</parameter>\n'
        "<parameter=options>\n{'k': 'v'}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [SEARCH, NOW],
    ),
    "qwen3_coder_alone": Case(
        QWEN_CODER,
        "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        [OSLO],
    ),
    # ByteDance Seed-OSS
    "seed_oss": Case(
        "<seed:tool_call> <seed:think>",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        [PARIS],
        reasoning="Hm.",
    ),
    # MiniMax M2
    "minimax": Case(
        "<minimax:tool_call> <think>",
        'Both.</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="write_file">\n<parameter name="path">a/b.py</parameter>\n'
        f'<parameter name="text">{CODE}</parameter>\n</invoke>\n</minimax:tool_call>',
        [PARIS, FILE],
        reasoning="Both.",
        thinking=True,
    ),
    # DeepSeek V3.2
    "deepseek_v3.2": Case(
        DSML,
        f'Let me see.\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>",
        [PARIS],
        "Let me see.",
    ),
    # GLM 4.5 to 4.7
    "glm": Case(
        "<tool_call> <arg_key> <think>",
        "\n<think>Two.</think>\nOne moment.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>now</tool_call>",
        [PARIS, NOW],
        "One moment.",
        "Two.",
    ),
    # Mistral 7B v0.3 to Small 3.1; then Small 3.2, Devstral, Magistral, Ministral 3
    "mistral": Case(
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, '
        '"id": "9Ae3bDc2F"}, {"name": "now", "arguments": {}}]',
        [PARIS, NOW],
    ),
    "mistral_args": Case(
        f"{MISTRAL} [ARGS]",
        'Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        [PARIS, NOW],
        "Yes.",
    ),
    "mistral_id": Case(
        MISTRAL,
        '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "Oslo"}',
        [OSLO],
        ids=["abcdef123"],
    ),
    "mistral_bare": Case(MISTRAL, '[TOOL_CALLS]get_weather{"city": "Oslo"}', [OSLO]),
    "mistral_thought": Case(
        "[TOOL_CALLS] [THINK]",
        '[THINK]Oslo it is.[/THINK]Right.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        [OSLO],
        "Right.",
        "Oslo it is.",
    ),
    # Llama 3.1 to 3.3
    "llama": Case(LLAMA, js(*PARIS, key="parameters"), [PARIS]),
    "llama_several": Case(
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        "; ".join(js(*call, key="parameters") for call in (PARIS, OSLO)),
        [PARIS, OSLO],
    ),
    "llama_tag": Case(LLAMA, f"<|python_tag|>{js(*OSLO, key='parameters')}", [OSLO]),
    "llama_type": Case(
        LLAMA,
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
        [OSLO],
    ),
    "llama_json_text": Case(
        LLAMA, '{"city": "Oslo", "name": "now"}', text='{"city": "Oslo", "name": "now"}'
    ),
    "llama_other_function": Case(LLAMA, '{"name": "Bob"}', text='{"name": "Bob"}'),
    "llama_code": Case(LLAMA, "<|python_tag|>print(1)", text="<|python_tag|>print(1)"),
    # Llama 3.2 1B and 3B, Llama 4, Gemma 3's documentation; LFM2; Olmo 3
    "pythonic": Case(PYTHONIC, "[get_weather(city='Paris', days=3), now()]", [PARIS, NOW]),
    "pythonic_types": Case(
        PYTHONIC,
        "[search(tags=['a', \"b, c\"], options={'k': 'v'}, exact=True)]",
        [SEARCH],
    ),
    "pythonic_tags": Case(
        PYTHONIC, '<|python_start|>[get_weather(city="Oslo")]<|python_end|>', [OSLO]
    ),
    "pythonic_brackets": Case(
        PYTHONIC,
        '[write_file(path="a)]", text="\\"(\\n")]',
        [("write_file", {"path": "a)]", "text": '"(\n'})],
    ),
    "pythonic_text": Case(PYTHONIC, "[1] says so (see there).", text="[1] says so (see there)."),
    "lfm2": Case(
        "<|tool_call_start|>",
        '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>Checking.',
        [PARIS],
        "Checking.",
    ),
    "lfm2_json": Case(
        "<|tool_call_start|>",
        f"<|tool_call_start|>[{js(*PARIS)}, {js(*NOW)}]<|tool_call_end|>",
        [PARIS, NOW],
    ),
    "olmo3": Case(
        "<function_calls>",
        'Sure.\n<function_calls>get_weather(city="Oslo")\nnow()\n'
        'search(tags=["a", "b, c"], options={"k": "v"}, exact=true)</function_calls>',
        [OSLO, NOW, SEARCH],
        "Sure.",
    ),
    # Kimi K2
    "kimi": Case(
        "<|tool_calls_section_begin|> <think>",
        "<think>Well.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [OSLO, NOW],
        "I look.",
        "Well.",
        ids=["functions.get_weather:0", "functions.now:1"],
    ),
    # DeepSeek V3 and R1; V3.1
    "deepseek_v3": Case(
        f"{DS} ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO, NOW],
    ),
    "deepseek_v3.1": Case(
        f"{DS} </think>",
        "Hm.</think>Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO, NOW],
        "Now.",
        "Hm.",
        thinking=True,
    ),
    # gpt-oss
    "harmony": Case(
        HARMONY,
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
        reasoning="Need weather.",
    ),
    "harmony_text": Case(
        HARMONY,
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is **4**.\n",
        text="It is **4**.\n",
        reasoning="Easy.",
    ),
    "harmony_preamble": Case(
        HARMONY,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>"
        'assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        [OSLO],
        "I look.",
        "One.\n\nTwo.",
    ),
    # Gemma 4, FunctionGemma
    "gemma4": Case(
        "<|channel>thought\\n<channel|> <|tool_call>call:",
        '<|channel>thought\nParis.\n<channel|>Fine.<|tool_call>call:get_weather{city:<|"|>Paris'
        '<|"|>,days:3}<tool_call|><|tool_call>call:search{exact:true,options:{k:<|"|>v<|"|>},'
        'tags:[<|"|>a<|"|>,<|"|>b, c<|"|>]}<tool_call|>',
        [PARIS, SEARCH],
        "Fine.",
        "Paris.",
    ),
    "functiongemma": Case(
        "<start_function_call>call:",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        [OSLO, NOW],
    ),
    # Granite 3, Phi 4 mini; Nemotron Nano; Command R7B and A
    "granite": Case("<|tool_call|>", f"<|tool_call|>[{js(*PARIS)}]", [PARIS]),
    "phi4": Case("<|tool_call|>", f"<|tool_call|>[{js(*PARIS)}]<|/tool_call|>", [PARIS]),
    "nemotron": Case(
        "<TOOLCALL> <think>",
        f"<think>\nHm.\n</think>\n\n<TOOLCALL>[{js(*PARIS)}, {js(*OSLO)}]</TOOLCALL>",
        [PARIS, OSLO],
        reasoning="Hm.",
    ),
    "command": Case(
        "<|START_ACTION|> <|START_THINKING|>",
        '<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        '"tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]<|END_ACTION|>',
        [OSLO],
        reasoning="I look.",
    ),
    # Text that is no call
    "text": Case(
        HERMES, "  Two lines,\n\n and <b>tags</b>. \n", text="  Two lines,\n\n and <b>tags</b>. \n"
    ),
    "text_marker": Case(HERMES, "Use <tool_call> so.", text="Use <tool_call> so."),
    "text_call": Case(
        HERMES, '<tool_call>{"call": 1}</tool_call>!', text='<tool_call>{"call": 1}</tool_call>!'
    ),
    "text_no_json": Case(
        HERMES, "<tool_call>{name: x}</tool_call>", text="<tool_call>{name: x}</tool_call>"
    ),
    "text_qwen3_coder": Case(
        QWEN_CODER, "a <tool_call> b </tool_call>", text="a <tool_call> b </tool_call>"
    ),
    "thought_later": Case("<think>", "Say <think>.</think>", text="Say <think>.</think>"),
    "thought_only": Case("<think>", "<think>\nAnd so on\n", reasoning="And so on"),
    "thought_empty": Case("<think>", "<think>\n\n</think>\n\nYes.", text="Yes."),
}


def parse(case: Case, pieces: list[str]) -> tuple[Pieces, list[ToolCall]]:
    style = answer_style(case.sign)
    parser = AnswerParser(style, FUNCTIONS, thinking=case.thinking)
    whole, calls = Pieces(), list[ToolCall]()
    for told in [*map(parser.add, pieces), parser.finish()]:
        whole.text += told.text
        whole.reasoning += told.reasoning
        add_deltas(calls, told.tool_calls)
    return whole, calls


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def cut_off(case: Case, pieces: list[str]) -> tuple[Pieces, list[ToolCall]]:
    """Returns the pieces of an answer that a limit ends, and those of its calls that are whole."""
    parser = AnswerParser(answer_style(case.sign), FUNCTIONS, thinking=case.thinking)
    whole, calls = Pieces(), list[ToolCall]()
    for told in (*map(parser.add, pieces), parser.finish(cut=True)):
        whole += told
        add_deltas(calls, told.tool_calls)
    return whole, calls if parser.unfinished is None else calls[: parser.unfinished]


def summary(parsed: tuple[Pieces, list[ToolCall]]) -> tuple[Any, ...]:
    whole, calls = parsed
    return whole.text, whole.reasoning, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    case = CASES[name]
    whole, calls = parse(case, [case.answer])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == case.calls
    assert (whole.text, whole.reasoning) == (case.text, case.reasoning)
    assert len({call.id for call in calls}) == len(calls)
    if case.ids:
        assert [call.id for call in calls] == case.ids


def test_all_formats_have_a_case() -> None:
    assert {find_format(case.sign) for case in CASES.values()} >= {*FORMATS}


@pytest.mark.parametrize("name", CASES)
def test_cuts_change_nothing(name: str) -> None:
    case = CASES[name]
    text = case.answer
    expected = summary(parse(case, [text]))
    for place in range(1, len(text)):
        assert summary(parse(case, cut(text, [place]))) == expected, text[:place]
    assert summary(parse(case, list(text))) == expected
    draw = random.Random(name)
    for _ in range(20):
        places = sorted(draw.sample(range(1, len(text)), min(len(text) - 1, draw.randint(2, 20))))
        assert summary(parse(case, cut(text, places))) == expected


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_is_cut_shows_no_markup(name: str) -> None:
    """Wherever it is cut: what is text and reasoning begins as it does in the whole answer, and
    there are the calls that are whole."""
    case = CASES[name]
    for end in range(len(case.answer)):
        text = case.answer[:end]
        whole, calls = cut_off(case, [text])
        assert case.text.startswith(whole.text.rstrip()), text
        assert case.reasoning.startswith(whole.reasoning), text
        told = [(call.name, json.loads(call.arguments)) for call in calls]
        assert told == case.calls[: len(told)], text
        assert summary(cut_off(case, list(text))) == summary((whole, calls))
    assert summary(cut_off(case, [case.answer]))[2] == summary(parse(case, [case.answer]))[2]


@pytest.mark.parametrize(
    "text",
    ["a <", "a <tool_", "a <tool_call>", 'a <tool_call>\n{"name": "no', "<thi", "<think>a</thi"],
)
def test_a_beginning_of_a_marker_that_a_model_ends_is_text(text: str) -> None:
    told, calls = parse(Case("<think> <tool_call>", text), list(text))
    assert (told.text or f"<think>{told.reasoning}", calls) == (text, [])


def test_what_no_limit_can_cut_is_text() -> None:
    """A marker that is one token has no beginning. What is no call is not held for one."""
    style = answer_style("<think> <tool_call>")
    for text in ("a <", "a <tool_", "<thi"):
        parser = AnswerParser(style, FUNCTIONS, tokens=("<tool_call>", "<think>", "</think>"))
        assert (parser.add(text) + parser.finish(cut=True)).text == text
    for special in (True, False):
        tokenizer = demo_tokenizer({"<|stop|>": True, "<tool_call>": special}, ["<|stop|>"])
        tools = check_tools([{"type": "function", "function": {"name": "now"}}])
        parser = Reading.of(tokenizer, tools, [], None).parser()
        assert (parser.add("a <") + parser.finish(cut=True)).text == "a <"
    for sign, text in ((LLAMA, '{"name": "Bob and'), (PYTHONIC, "[Bob")):
        parser = AnswerParser(answer_style(sign), FUNCTIONS)
        assert parser.add(text).text == text


def test_a_thought_that_is_cut_may_hold_a_call() -> None:
    case = Case("<think> <tool_call>", f"<think>Say {hermes(PARIS)} or</thi")
    whole, calls = cut_off(case, [case.answer])
    assert (whole.text, whole.reasoning, calls) == ("", f"Say {hermes(PARIS)} or", [])


TYPED: dict[str, dict[str, Any]] = {
    "get_weather": FUNCTIONS["get_weather"],
    "set": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "levels": {"type": "array", "items": {"type": "integer"}},
            "note": {"type": ["string", "null"]},
        },
    },
    "now": FUNCTIONS["now"],
}
ENDS = ['"', "}", "]", ")", '<|"|>', "<escape>", "</think>", "<|end|>", "</parameter>", "1"]
ENDS += [
    f"{tags.value_end}\n{tags.call_end}" for tags in (QWEN_TAGS, MINIMAX_TAGS, DSML_TAGS, GLM_TAGS)
]


def walk(grammar: str, draw: random.Random, ends: list[str]) -> str | None:
    """An answer that llguidance takes, of bytes and ends of texts drawn at random; None for one
    that gets too long."""
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")
    source = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(tokens, source, log_level=0)
    mask = np.zeros(-(-tokens.vocab_size // 32), np.uint32)
    answer = bytearray()
    for _ in range(1000):
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.4):
            return answer.decode()
        end = draw.choice(ends).encode()
        if taken := matcher.try_consume_tokens(list(end)):
            answer += end[:taken]
            continue
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]
        allowed = [int(byte) for byte in np.flatnonzero(bits)]
        # Numbers of JSON may have exponents that those of Python have not.
        byte = draw.choice([each for each in allowed if each not in b"eE"] or allowed)
        matcher.consume_tokens([byte])
        answer.append(byte)
    return None


@pytest.mark.parametrize("choice", ["required", "auto", "set"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_what_a_grammar_allows_is_read(format: ToolFormat, choice: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TYPED.items()
    ]
    named = {"type": "function", "function": {"name": choice}}
    checked = check_tools(tools, named if choice == "set" else choice)
    style = AnswerStyle(format, ("<think>", "</think>"), True)
    found = 0
    for seed in range(4):
        thinking = seed % 2 == 0
        grammar = answer_grammar(
            style,
            checked,
            thinking=thinking,
            may_think=False,
            special_tokens={},
            text_tokens={},
            loose=(),
            schema_of=lambda function: {"additionalProperties": False} | function["parameters"],
        )
        if grammar is None:
            assert (format.name, choice) == ("harmony", "auto")
            return
        draw = random.Random(seed)
        answer = walk(grammar, draw, [*ENDS, *format.markers[:1]])
        if answer is None:
            continue
        parser = AnswerParser(style, TYPED, thinking=thinking)
        pieces = parser.add(answer) + parser.finish()
        calls = list[ToolCall]()
        add_deltas(calls, pieces.tool_calls)
        found += bool(calls)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TYPED[call.name])
        if choice != "auto":
            assert (bool(calls), pieces.text) == (True, ""), answer
        if choice == "set":
            assert {call.name for call in calls} == {"set"}
    assert found or choice == "auto"


# Arguments that are not written as JSON


def keywords(format: ToolFormat) -> dict[str, Any]:
    """Returns the keyword arguments of a format's parser."""
    return format.read.keywords if isinstance(format.read, partial) else {}


TAGS: dict[str, Tags] = {
    each.name: keywords(each)["tags"] for each in FORMATS if "tags" in keywords(each)
}
NOT_JSON = [each for each in FORMATS if each.name in (*TAGS, "gemma4", "functiongemma", "lfm2")]


def written(format: ToolFormat, arguments: dict[str, Any]) -> str:
    """A call of f as the templates of a format write it."""
    if (tags := TAGS.get(format.name)) is None:
        if format.name == "lfm2":
            values = [f"{key}={js_of(value)}" for key, value in arguments.items()]
            return f"<|tool_call_start|>[f({', '.join(values)})]<|tool_call_end|>"
        begin, end, quote = (keywords(format)[key] for key in ("begin", "end", "quote"))
        return f"{begin}call:f{in_gemma(arguments, quote)}{end}"
    parameters = "".join(parameter(tags, *each) for each in arguments.items())
    if tags is GLM_TAGS:
        return f"<tool_call>f\n{parameters}</tool_call>"
    call = f"{tags.call}f{tags.name_end}\n{parameters}{tags.call_end}\n"
    return f"{tags.section}\n{call}{tags.section_end}"


def parameter(tags: Tags, name: str, value: Any) -> str:
    is_text, newline = isinstance(value, str), "\n" if tags.newlines else ""
    attribute = f'" string="{js_of(is_text)}"' if tags is DSML_TAGS else ""
    begin = f"{tags.parameter}{name}{attribute}{tags.key_end}{newline}"
    begin += "\n<arg_value>" if tags is GLM_TAGS else ""
    return f"{begin}{value if is_text else js_of(value)}{newline}{tags.value_end}\n"


def in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{in_gemma(each, quote)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(in_gemma(each, quote) for each in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else js_of(value)


def js_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read(format: ToolFormat, answer: str, schema: dict[str, Any]) -> Any:
    """The arguments of an answer's only call, the same however it arrives."""
    style, found = AnswerStyle(format, ("<think>", "</think>"), True), []
    for pieces in ([answer], list(answer)):
        parser, calls = AnswerParser(style, {"f": schema}), list[ToolCall]()
        told = [*map(parser.add, pieces), parser.finish()]
        add_deltas(calls, [delta for each in told for delta in each.tool_calls])
        assert "".join(each.text for each in told) == ""
        found.append([json.loads(call.arguments) for call in calls])
    assert found[0] == found[1]
    (arguments,) = found[0]
    return arguments


def grammar_of(
    format: ToolFormat, schema: dict[str, Any], *, strict: bool = True, choice: str = "required"
) -> str:
    function = {"name": "f", "parameters": schema, "strict": strict}
    params = Reading(
        AnswerStyle(format, ("<think>", "</think>"), True),
        check_tools([{"type": "function", "function": function}], choice, False),
        thinking=False,
        may_think=False,
        keep=frozenset(),
        special_tokens={},
        text_tokens={},
        ends=frozenset(),
    ).held(SamplingParams())
    assert params.grammar is not None
    return params.grammar


def accepts(grammar: str, answer: str) -> bool:
    llguidance = pytest.importorskip("llguidance")
    source = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(answer.encode())
    taken: int = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and matcher.is_accepting()


def test_strict_functions_that_gpt_oss_may_call() -> None:
    """Thoughts, what the user is told before, and a final text stay free."""
    (harmony,) = (each for each in FORMATS if each.name == "harmony")
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    grammar = grammar_of(harmony, schema, choice="auto")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    told = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Oslo"}'
    final = "<|channel|>final<|message|>It is cold.\n"
    for before in ("", thought, told, thought + told + thought):
        assert accepts(grammar, before + call)
        assert accepts(grammar, before + final)
        assert not accepts(grammar, before + call.replace("Oslo", "Rome"))


DEFINED: dict[str, Any] = {
    "Zip": {"type": "string"},
    "Colour": {"enum": ["red", "12"], "title": "Colour", "type": "string"},
    "Tree": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        },
        "required": ["name"],
    },
}
TEXTS: dict[str, Any] = {
    "ref": {"$ref": "#/$defs/Zip"},
    "ref_within": {"$ref": "#/properties/text"},
    "all_of": {"allOf": [{"$ref": "#/$defs/Zip"}, {"maxLength": 99}]},
    "optional_ref": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
    "one_of": {"oneOf": [{"type": "string"}, {"type": "boolean"}]},
    "types": {"type": ["string", "null"]},
    "const": {"const": "12345"},
    "enum": {"enum": ["12345", "a"]},
    "pattern": {"type": "string", "pattern": "^[0-9]+$"},
    "date": {"type": ["null", "string"], "format": "date"},
}


@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_a_text_stays_one_however_its_schema_says_so(format: ToolFormat) -> None:
    for name, own in TEXTS.items():
        properties = {"text": {"type": "string"}, "value": own}
        schema = {"type": "object", "properties": properties, "$defs": DEFINED}
        given = {"value": "2026-01-31" if name == "date" else "12345"}
        answer = written(format, given)
        assert read(format, answer, schema) == given, name
        assert accepts(grammar_of(format, schema), answer), name


@pytest.mark.parametrize(
    "format", [each for each in FORMATS if each.name in TAGS], ids=lambda it: it.name
)
def test_what_may_be_text_or_something_else(format: ToolFormat) -> None:
    """It is the other where it is written as that."""
    if format.name == "deepseek_v3.2":  # says which it is
        schema = {"type": "object", "properties": {"value": {}}}
        for given in ({"value": "5"}, {"value": 5}, {"value": "null"}, {"value": [1]}):
            assert read(format, written(format, given), schema) == given
        return
    for own, values in (
        ({"type": ["string", "number"]}, {"5": 5, "5.5": 5.5, "5 or 6": "5 or 6", "05": "05"}),
        ({"type": ["string", "integer"]}, {"5": 5, "5.5": "5.5", "1e3": "1e3"}),
        ({"type": ["string", "boolean"]}, {"true": True, "False": False, "5": "5", "no": "no"}),
        ({"type": ["string", "null"]}, {"null": None, "None": None, "nil": "nil", "[1]": "[1]"}),
        ({"type": ["string", "array"]}, {"[1]": [1], "[1": "[1", '{"a": 1}': '{"a": 1}'}),
        ({}, {"5": 5, "true": True, '{"a": 1}': {"a": 1}, '"5"': '"5"', "x = 1": "x = 1"}),
        ({"type": "integer"}, {"5": 5, "five": "five", "True": True}),
        ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "integer"}]}, {"red": "red", "12": 12}),
    ):
        schema = {"type": "object", "properties": {"value": own}, "$defs": DEFINED}
        for text, value in values.items():
            answer = written(format, {"value": text})
            assert read(format, answer, schema) == {"value": value}, (own, text)


@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_a_value_that_holds_its_end_comes_whole(format: ToolFormat) -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["string", "null"]},
        "c": {"type": "array", "items": {"type": "string"}},
        "d": {"$ref": "#/$defs/Tree"},
    }
    schema = {"type": "object", "properties": properties, "$defs": DEFINED}
    grammar = grammar_of(format, schema)
    for tags in TAGS.values():
        end = tags.value_end
        text = f"<a>{end}</a>{end} {end}{tags.parameter.upper()}\n{end}\n{end}"
        within = f"{end}{tags.call_end}{end} {tags.parameter}a{tags.key_end}"
        given = {"a": text, "b": text, "c": [within, text], "d": {"name": within}}
        answer = written(format, given)
        assert read(format, answer, schema) == given
        assert accepts(grammar, answer)
    # Text that would be read as an end cannot be written.
    if own := TAGS.get(format.name):
        wrong = {"a": f"x{own.value_end}\n{own.call_end} y"}
        assert not accepts(grammar, written(format, wrong))


POOL: list[Any] = ["", "a", "b", "ab", "abc", "12", "12345", "red", "null", "None", "true", "x y"]
POOL += ["1.5", "a/b", "é✓", "it's", '"q"', "two\nlines\n", "</parameter>", "2024-02-29", "::1"]
POOL += ["192.168.0.1", "123e4567-e89b-12d3-a456-426614174000", 0, 1, 7, 12, -3, 2.5, True, None]
POOL += [[], ["a"], [1, 2], ["a", None], [[]], {}, {"name": "a"}, {"name": "a", "parts": []}]
POOL += [{"name": "</arg_value>", "parts": [{"name": "1"}]}]


def some_schema(draw: random.Random, depth: int = 0) -> Any:
    def number() -> int:
        return draw.randint(0, 3)

    def nested() -> Any:
        return some_schema(draw, depth + 1)

    simple: list[Callable[[], Any]] = [
        lambda: {},
        lambda: {"type": draw.choice(["string", "integer", "number", "boolean", "null"])},
        lambda: {"type": "string", "minLength": number(), "maxLength": 3 + number()},
        lambda: {"type": "string", "pattern": draw.choice(["^[a-z]{2,3}$", "[0-9]", "^a|b$", "/"])},
        lambda: {"type": "string", "format": draw.choice(["uuid", "ipv4", "ipv6"])},
        lambda: {"type": "integer", "minimum": number(), "exclusiveMaximum": 9},
        lambda: {"enum": draw.sample(POOL[:-14], 5)},
        lambda: {"const": draw.choice(POOL[:-10])},
        lambda: {"type": draw.sample(["string", "number", "boolean", "null"], 2)},
        lambda: {"$ref": f"#/$defs/{draw.choice(list(DEFINED))}"},
    ]
    parts: list[Callable[[], Any]] = [
        lambda: {"anyOf": [nested(), draw.choice([{"type": "null"}, draw.choice(simple)()])]},
        lambda: {"allOf": [draw.choice(simple)(), {"maxLength": 4, "minimum": 1, "maxItems": 1}]},
        lambda: {"type": "array", "items": nested(), "minItems": number() // 2},
        lambda: {"type": "array", "prefixItems": [nested()], "maxItems": number()},
        lambda: some_object(draw, depth + 1) | {"additionalProperties": draw.random() < 0.5},
    ]
    return draw.choice(simple if depth > 2 else [*simple, *parts, *parts])()


def some_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    names = draw.sample(["a", "b", "name"], draw.randint(1, 3))
    properties = {name: some_schema(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.5]
    # Grammars want what is required first.
    ordered = {name: properties[name] for name in sorted(names, key=lambda it: it not in required)}
    return {"type": "object", "properties": ordered, "required": required}


@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_strict_functions_get_what_is_valid_and_all_of_it(format: ToolFormat) -> None:
    hold_to_jsonschema(format, range(4))


@pytest.mark.full
@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_strict_functions_at_length(format: ToolFormat) -> None:
    hold_to_jsonschema(format, range(4, 60))


def hold_to_jsonschema(format: ToolFormat, seeds: Sequence[int]) -> None:
    """Whatever the grammar accepts is read as valid, and what is valid is accepted and read as it
    is; but what may be another type than text where it looks like that."""
    jsonschema = pytest.importorskip("jsonschema")
    accepted, refused = 0, list[str]()
    for seed in seeds:
        draw = random.Random(seed)
        schema = some_object(draw) | {"$defs": DEFINED}
        check = partial(jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker())
        try:
            grammar = grammar_of(format, schema)
        except RequestError as error:
            refused.append(str(error))
            continue
        for turn in range(3):
            answer = walk(grammar, random.Random(turn), [*ENDS, "a", "2024-02-29"])
            if answer is not None:
                arguments = read(format, answer, schema)
                assert check(schema).is_valid(arguments), (seed, schema, answer)
                accepted += 1
            given = {}
            for name, own in schema["properties"].items():
                own_check = check({**own, "$defs": DEFINED})
                valid = [each for each in POOL if own_check.is_valid(each)]
                if valid and (name in schema["required"] or draw.random() < 0.5):
                    given[name] = draw.choice(valid)
            answer = written(format, given)
            arguments = read(format, answer, schema)
            others = [name for name, value in given.items() if arguments[name] != value]
            assert all(
                given[name] in ("12", "12345", "1.5", "null", "None", "true") for name in others
            )
            if not others and check(schema).is_valid(given):
                assert accepts(grammar, answer), (seed, schema, answer)
                accepted += 1
    for error in refused:
        assert re.search(
            "cannot be followed.*: .*(Unsatisf|no value|also be text|of a|of an)", error
        )
    assert accepted > len(seeds)


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_an_optional_enum_of_pydantic(format: ToolFormat) -> None:
    """pydantic describes `Optional[Colour]` like this, with titles and the default."""
    own = {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None, "title": "C"}
    schema = {"$defs": DEFINED, "type": "object", "properties": {"c": own}, "required": ["c"]}
    if format in NOT_JSON:
        grammar = grammar_of(format, schema)
        for value, is_valid in (("red", True), (None, True), ("blue", False), (3, False)):
            answer = written(format, {"c": value})
            assert accepts(grammar, answer) == is_valid
            assert not is_valid or read(format, answer, schema) == {"c": value}
    for turn in range(3):
        answer = walk(grammar_of(format, schema), random.Random(turn), ENDS)
        assert answer is not None
        assert read(format, answer, schema)["c"] in ("red", "12", None)


@pytest.mark.parametrize(
    ("format", "own", "message"),
    [
        ("glm", {"type": "string", "pattern": "(^a|b$)"}, "pattern '(^a|b$)': ^ cannot be"),
        ("gemma4", {"type": "string", "pattern": "^(?i)a$"}, r"(?i) cannot be followed there"),
        ("glm", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, "minimum of"),
        ("gemma4", {"enum": [["a"], ["b"]]}, "enum or const of a list"),
        ("gemma4", {"const": {"a": 1}}, "enum or const of an object"),
        ("gemma4", {"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ("gemma4", {"type": "object", "minProperties": 1}, "minProperties"),
        ("functiongemma", {"type": "object", "maxProperties": 1}, "maxProperties"),
        ("glm", {"type": "string", "format": "date", "maxLength": 3}, "Unsatisfiable"),
        ("glm", {"type": "string", "format": "regex"}, "Unknown format: regex"),
        ("gemma4", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    format: str, own: dict[str, Any], message: str
) -> None:
    """A strict function with such an argument is refused. For others that argument alone is not
    held to its schema."""
    (found,) = (each for each in FORMATS if each.name == format)
    properties = {"a": own, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    with pytest.raises(RequestError, match="f cannot be followed.*" + re.escape(message)):
        grammar_of(found, schema)
    grammar = grammar_of(found, schema, strict=False)
    value: Any = "none of it" if own.get("type") == "string" or "anyOf" in own else None
    if value is None:
        value = {} if own.get("type") == "object" or "const" in own else []
    assert accepts(grammar, written(found, {"a": value, "b": 3}))
    is_known = not message.startswith(("Unknown", "uniqueItems", "Unsatisfiable"))
    assert accepts(grammar, written(found, {"a": value, "b": "text"})) != is_known


@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_names_that_a_format_cannot_write(format: ToolFormat) -> None:
    name = {"lfm2": "class", "glm": "</arg_key>"}.get(format.name, 'a":>{')
    properties = {name: {"type": "string"}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(RequestError, match=r"name .* of a property"):
        grammar_of(format, schema)
    assert accepts(grammar_of(format, schema, strict=False), written(format, {"b": "x"}))


@pytest.mark.parametrize("format", NOT_JSON, ids=lambda each: each.name)
def test_arguments_that_no_schema_names(format: ToolFormat) -> None:
    """Objects may have any arguments, and so have functions whose schema is not known."""
    given = {"first": "x", "second": 3, "third": {"a": [None]}}
    free = {"type": "object", "additionalProperties": True}
    unknown = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    for schema in (free, {"type": "object"}, unknown):
        answer = written(format, given)
        assert accepts(grammar_of(format, schema, strict=False), answer)
        assert read(format, answer, schema) == given
    schema = {"type": "object", "additionalProperties": {"type": "string"}, "properties": {"n": {}}}
    grammar = grammar_of(format, schema)
    answer = written(format, {"n": 1, "first": "1", "second": "2"})
    assert accepts(grammar, answer)
    assert read(format, answer, schema) == {"n": 1, "first": "1", "second": "2"}
    # The properties in one part of the schema are not lost where another part has others.
    parts = {"allOf": [{"properties": {"b": {"type": "string"}}, "required": ["b"]}]}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, **parts}
    assert accepts(grammar_of(format, schema), written(format, {"b": "2"}))
    assert not accepts(grammar_of(format, schema), written(format, {"a": "1"}))
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, **either}
    for given, is_valid in (({"a": 1}, True), ({"b": 1}, True), ({}, False), ({"c": 1}, False)):
        assert accepts(grammar_of(format, schema), written(format, given)) == is_valid


def test_formats_of_texts_are_those_of_jsonschema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    texts = ["2024-02-29", "2023-02-29", "2023-02-28", "1900-02-29", "2000-02-29", "2023-04-31"]
    texts += ["0000-01-01", "2023-1-1", "1.2.3.4", "256.1.1.1", "01.2.3.4", "::", "::1", "1::", "1"]
    texts += ["1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1::8", "::2:3:4:5:6:7:8", "1:2:3:4:5:6:7"]
    texts += ["1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "123e4567-e89b-12d3-a456-426614174000"]
    check = jsonschema.FormatChecker()
    for text in texts:
        for name in ("date", "ipv4", "ipv6", "uuid"):
            is_one = re.fullmatch(FORMATS_OF_TEXTS[name], text) is not None
            assert is_one == check.conforms(text, name), (name, text)
    others = {
        "time": ("23:59:59Z", "23:59:59.5+01:30", "24:00:00Z", "12:00:00"),
        "date-time": ("2024-02-29T00:00:00Z", "2024-02-29t01:02:03-08:00", "2024-02-29", "T"),
        "duration": ("P1Y2M3DT4H5M6S", "PT0.5S", "P1YT", "1D"),
        "hostname": ("a-b.example", "localhost", "-a", "a..b"),
        "email": ("a.b+c@d.e", "o'neil@example.com", "a@", "a b@c.d"),
        "uri": ("https://a.b:80/c%20d/?e=f#g", "urn:isbn:12", "//a.b", "https://a b"),
    }
    for name, (one, other, *wrong) in others.items():
        assert re.fullmatch(FORMATS_OF_TEXTS[name], one)
        assert re.fullmatch(FORMATS_OF_TEXTS[name], other)
        assert not any(re.fullmatch(FORMATS_OF_TEXTS[name], each) for each in wrong)


def walk_tokens(
    constraint: Constraint, tokenizer: Tokenizer, draw: random.Random, often: list[list[int]]
) -> list[int] | None:
    """The tokens of an answer, drawn at random from those that may come; None for one that gets too
    long."""
    ids: list[int] = []
    for _ in range(100):
        allowed = set(np.flatnonzero(constraint.allowed_after(ids, 0, tokenizer.size)).tolist())
        assert constraint.error is None
        others = sorted(allowed - tokenizer.eos_token_ids)
        if not others or (len(others) < len(allowed) and draw.random() < 0.4):
            return ids
        wanted = [each for each in often if constraint.count_allowed(ids, 0, each) == len(each)]
        ids += draw.choice(wanted) if wanted and draw.random() < 0.7 else [draw.choice(others)]
    return None


# Gemma's are special. Were they text, they could stand in texts of arguments.
KINDS = [(each, True) for each in FORMATS]
KINDS += [(each, False) for each in FORMATS if "gemma" not in each.name]


@pytest.mark.parametrize(
    ("format", "special"), KINDS, ids=lambda each: each.name if isinstance(each, ToolFormat) else ""
)
def test_markers_that_are_tokens(format: ToolFormat, special: bool) -> None:
    """Special or not: what is allowed token by token is read, and a call that has to come does."""
    jsonschema = pytest.importorskip("jsonschema")
    style = AnswerStyle(format, ("<think>", "</think>"), True)
    markers = dict.fromkeys(style.markers(with_tools=True), special)
    ends = [end for end in ("<|return|>", "<|call|>") if end in markers] or ["<|stop|>"]
    added = markers | dict.fromkeys((*ends, "<|other|>"), True) | {"<b>": False}
    tokenizer = demo_tokenizer(added, ends)
    constraints = Constraints(tokenizer, tokenizer.size)
    often = [tokenizer.encode(text) for text in dict.fromkeys((*markers, "<b>", *ENDS))]
    often = [ids for ids in often if tokenizer.eos_token_ids.isdisjoint(ids)]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in TYPED.items()
    ]
    for choice, thinking in (("required", False), ("auto", not format.whole)):
        reading = replace(
            Reading.of(tokenizer, check_tools(tools, choice), [], None),
            style=style,
            thinking=thinking,
            may_think=not thinking,
            keep=tokenizer.named_in(tuple(markers)),
        )
        params = reading.held(SamplingParams())
        assert params.constrained
        draws = map(random.Random, range(20))
        constraint = constraints.of(params)
        assert constraint is not None
        walks = (walk_tokens(constraint, tokenizer, draw, often) for draw in draws)
        ids = next(each for each in walks if each is not None)
        detokenizer, parser = StreamingDetokenizer(tokenizer, [], reading.keep), reading.parser()
        text = [*map(detokenizer.add, ids), detokenizer.finish()]
        calls = list[ToolCall]()
        for told in [*map(parser.add, text), parser.finish()]:
            add_deltas(calls, told.tool_calls)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TYPED[call.name])
        assert calls or choice == "auto", "".join(text)


@pytest.mark.parametrize("special", [True, False])
def test_a_marker_with_a_token_in_it(special: bool) -> None:
    """The beginning of the marker is text as long as the token does not follow."""
    tokenizer = demo_tokenizer(
        {"<|stop|>": True, DSML: special}, ["<|stop|>"], f"{{{{ tools }}}}<{DSML}"
    )
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in FUNCTIONS.items()
    ]
    reading = Reading.of(tokenizer, check_tools(tools), [], None)
    path, code = "<a/>", "if a < b:\n  </p></b>"
    answer = (
        f'See a <b> </p>.\n<{DSML}function_calls>\n<{DSML}invoke name="write_file">\n'
        f'<{DSML}parameter name="path" string="true">{path}</{DSML}parameter>\n'
        f'<{DSML}parameter name="text" string="true">{code}</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls> And < so."
    )
    constraint = Constraints(tokenizer, tokenizer.size).of(reading.held(SamplingParams()))
    assert constraint is not None
    ids = tokenizer.encode(answer)
    for i, token in enumerate(ids):
        assert constraint.allowed_after(ids[:i], 0, tokenizer.size)[token], tokenizer.decode(
            ids[:i]
        )
    parser = reading.parser()
    pieces = parser.add(answer) + parser.finish()
    calls = list[ToolCall]()
    add_deltas(calls, pieces.tool_calls)
    assert [(call.name, call.parsed()) for call in calls] == [
        ("write_file", {"path": path, "text": code})
    ]
    assert pieces.text == "See a <b> </p>.\n And < so."


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_the_call_that_models_are_shown(format: ToolFormat) -> None:
    """Is one, once it has a name and arguments."""
    text = example_call(format.name).replace("<name>", "f")
    text = text.replace("<arguments as a JSON object>", '{"parameter": "value"}')
    parser = AnswerParser(AnswerStyle(format, ("<think>", "</think>"), True), {"f": {}})
    calls = list[ToolCall]()
    add_deltas(calls, (parser.add(text) + parser.finish()).tool_calls)
    assert [call.name for call in calls] == ["f"]
    assert "parameter" in calls[0].parsed()


def test_arguments_of_calls_are_what_can_be_sent_on() -> None:
    assert ToolCall("1", "f", '{"a": "\\ud800b", "n": 1e999}').parsed()["a"].encode() == b"?b"
    for wrong in ("[" * 100_000, "[1]", '{"a": ', ""):
        with pytest.raises(ValueError, match=r"JSON object|Expecting value"):
            ToolCall("1", "f", wrong).parsed()


def test_whatever_comes_is_read() -> None:
    """Parts of answers in any order, and answers cut off."""
    draw = random.Random(1)
    for case in CASES.values():
        words = [
            *case.answer.replace("<", "\0<").replace(">", ">\0").split("\0"),
            '"',
            "{",
            "\\u",
            "x",
        ]
        for _ in range(15):
            text = "".join(draw.choices(words, k=draw.randint(1, 12)))
            expected = summary(parse(case, [text]))
            assert summary(parse(case, list(text))) == expected, text
            json.dumps(expected).encode()
        for end in range(0, len(case.answer), 7):
            expected = summary(parse(case, [case.answer[:end]]))
            assert summary(parse(case, list(case.answer[:end]))) == expected
