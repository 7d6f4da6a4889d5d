"""Grammars of answers with calls, in llguidance's dialect of Lark: what a model may write of them.

A call that must come is forced from the answer's beginning, after a thought; one that may come from
where its marker stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from infer.kernels.errors import RequestError
from infer.text.answer import AnswerStyle
from infer.text.argument_grammars import Arguments
from infer.text.schemas import SchemaError
from infer.text.tool_formats import (
    DSML_TAGS,
    GLM_TAGS,
    MINIMAX_TAGS,
    QWEN_TAGS,
    SEED_TAGS,
    Tags,
)
from infer.text.tools import Tools

_INDEX = "\0"  # stands for a call's number in a layout


@dataclass(frozen=True)
class _Layout:
    """The texts around the parts of a call in a format. begin, end: around all calls, or around
    each one. A call is `name` with the function's name in it, then the arguments, then `after`.
    quote: the token around texts in Gemma's format. tags: the tags of arguments in XML."""

    begin: str
    name: str
    after: str = ""
    separator: str = ""
    end: str = ""
    each: bool = False
    single: bool = False
    arguments: str = "json"
    tags: Tags | None = None
    quote: str = ""


def _json_list(begin: str, end: str) -> _Layout:
    return _Layout(begin, '{"name": "NAME", "arguments": ', "}", ", ", end)


def _tagged(tags: Tags) -> _Layout:
    begin, end = tags.section + "\n", tags.section_end
    name, after = f"{tags.call}NAME{tags.name_end}\n", "\n"
    if not tags.call:
        begin, name, after = tags.section, "NAME\n", ""
    each = tags in (QWEN_TAGS, GLM_TAGS)
    return _Layout(begin, name, after, "\n" if each else "", end, each, False, "xml", tags)


_LAYOUTS = {
    "hermes": _Layout(
        "<tool_call>\n",
        '{"name": "NAME", "arguments": ',
        "}",
        "\n",
        "\n</tool_call>",
        each=True,
    ),
    "granite": _json_list("<|tool_call|>[", "]"),
    "nemotron": _json_list("<TOOLCALL>[", "]</TOOLCALL>"),
    "command": _Layout(
        "<|START_ACTION|>[\n",
        f'    {{"tool_call_id": "{_INDEX}", "tool_name": "NAME", "parameters": ',
        "}",
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "mistral_list": _json_list("[TOOL_CALLS][", "]"),
    "mistral": _Layout("[TOOL_CALLS]", "NAME[ARGS]", each=True),
    "llama": _Layout("", '{"name": "NAME", "parameters": ', "}", "; "),
    "kimi": _Layout(
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>functions.NAME:{_INDEX}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    "deepseek_v3": _Layout(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek": _Layout(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "harmony": _Layout(
        "<|channel|>commentary to=functions.",
        "NAME <|constrain|>json<|message|>",
        single=True,
    ),
    "gemma4": _Layout(
        "<|tool_call>call:",
        "NAME{",
        "}<tool_call|>",
        each=True,
        arguments="gemma",
        quote='<|"|>',
    ),
    "functiongemma": _Layout(
        "<start_function_call>call:",
        "NAME{",
        "}<end_function_call>",
        each=True,
        arguments="gemma",
        quote="<escape>",
    ),
    "pythonic": _Layout("[", "NAME(", ")", ", ", "]", arguments="python"),
    "lfm2": _Layout(
        "<|tool_call_start|>[", "NAME(", ")", ", ", "]<|tool_call_end|>", arguments="python"
    ),
    "olmo3": _Layout(
        "<function_calls>", "NAME(", ")", "\n", "</function_calls>", arguments="python"
    ),
    "qwen3_coder": _tagged(QWEN_TAGS),
    "seed_oss": _tagged(SEED_TAGS),
    "minimax": _tagged(MINIMAX_TAGS),
    "deepseek_v3.2": _tagged(DSML_TAGS),
    "glm": _tagged(GLM_TAGS),
}


def example_call(format_name: str) -> str:
    """Returns an example of a call in this format, to show to a model."""
    layout = _LAYOUTS[format_name]
    arguments = "<arguments as a JSON object>"
    if layout.tags is not None:
        tags = layout.tags
        value = "<arg_value>value" if tags is GLM_TAGS else "value"
        arguments = f"{tags.parameter}parameter{tags.key_end}{value}{tags.value_end}\n"
        arguments += tags.call_end
    elif layout.arguments != "json":
        text = f"{layout.quote}text{layout.quote}"
        pairs = {"gemma": f"parameter:{text},other:1", "python": 'parameter="text", other=1'}
        arguments = pairs[layout.arguments]
    call = layout.name.replace("NAME", "<name>").replace(_INDEX, "0") + arguments + layout.after
    return f"{layout.begin}{call}{layout.end}"


def answer_grammar(
    style: AnswerStyle,
    tools: Tools,
    *,
    thinking: bool,
    may_think: bool,
    special_tokens: Mapping[str, int],
    text_tokens: Mapping[str, int],
    loose: Collection[int],
    schema_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    error_of: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
    content: str | None = None,
) -> str | None:
    """Returns the grammar of an answer in Lark; None if the answer may be any text, or must be
    `content` and nothing else.

    thinking: whether the prompt has begun the thought. may_think: whether the answer may begin one.
    special_tokens, text_tokens: the ids of markers that are tokens, by name; text_tokens are text
    as well. loose: special tokens that may stand anywhere in a text. schema_of: returns the schema
    to which a function's arguments are held. error_of: returns the reason why a schema cannot be
    followed, or None. content: the grammar, in Lark, of an answer that is no call.
    """
    layout = _LAYOUTS[style.tools.name]
    lark = _Lark(special_tokens, text_tokens, loose)
    thought = lark.thought(style, thinking, may_think)
    final = lark.sequence("<|channel|>final<|message|>") if layout.single else ""
    if tools.offered is None:
        if content is None or not thought:
            return None
        return lark.written(f"{thought} {final} {content}")
    functions = [tool["function"] for tool in tools.offered]
    is_strict = any(each.get("strict") for each in functions)
    if layout.single and not (tools.required or is_strict) and content is None:
        return None
    calls = [
        lark.sequence(layout.name.replace("NAME", each["name"]))
        + f" {_arguments(lark, layout, each, schema_of(each), error_of)} "
        + lark.sequence(layout.after)
        for each in functions
        if tools.named in (None, each["name"])
    ]
    call = lark.rule(" | ".join(calls))
    begin, end = lark.sequence(layout.begin), lark.sequence(layout.end)
    several = tools.parallel and not layout.single
    if layout.each:
        one = lark.rule(f"{begin} {call} {end}")
        more = f"({lark.sequence(layout.separator)} {one})*" if several else ""
        all_calls = f"{one} {more}"
    else:
        more = f"({lark.sequence(layout.separator)} {call})*" if several else ""
        all_calls = f"{begin} {call} {more} {end}"
    if tools.required:
        return lark.written(f"{thought} {all_calls}")
    if content is not None:
        return lark.written(f"{thought} ({all_calls} | {final} {content})")
    if layout.single:
        preamble = lark.message("commentary")  # a message to the user before a call
        answer = f"({all_calls} | {final} text)"
        return lark.written(f"({thought} {preamble})* {thought} {answer}")
    if not layout.begin or style.tools.name == "pythonic":
        first = "\\[" if layout.begin else "{"
        lark.rules.append(f"OTHER: /\\s*[^{first}\\s](.|\\n)*/")
        tag = lark.sequence("<|python_tag|>")
        return lark.written(f"{thought} (SPACE? {tag}? {all_calls} | (OTHER {lark.more_text})?)")
    # The text before a call ends with the call's marker.
    marker, rest = lark.split_marker(layout.begin)
    inner = f"{rest} {call} {more} {end}"
    if layout.each:
        inner = f"{rest} {call} {end}"
    head = f"{lark.text_until(marker)} {inner}"
    return lark.written(f"{thought} ({head}){'*' if several else '?'} text")


def _arguments(
    lark: _Lark,
    layout: _Layout,
    function: Mapping[str, Any],
    schema: Mapping[str, Any],
    error_of: Callable[[Mapping[str, Any]], str | None],
) -> str:
    """Returns the grammar of a function's arguments, as a format writes them. Raises RequestError
    if the function is strict and its schema cannot be followed there."""
    if layout.arguments == "json":
        return lark.json(schema)
    arguments = Arguments(lark, schema, error_of, strict=bool(function.get("strict")))
    try:
        if layout.tags is not None:
            return arguments.xml(layout.tags)
        if layout.arguments == "gemma":
            return arguments.gemma(layout.quote)
        return arguments.python()
    except (SchemaError, RecursionError) as error:
        raise RequestError(
            f"tools: the parameters of {function['name']} cannot be followed in the way in which "
            f"this model writes calls: {error}"
        ) from error


class _Lark:
    """The rules of a grammar in Lark. Markers that are tokens are written by their ids, whether
    they are text or not: where several markers may come, the library would otherwise force the
    beginning that their texts share, in other tokens."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        text_tokens: Mapping[str, int],
        loose: Collection[int],
    ) -> None:
        """special_tokens, text_tokens, loose: as for `answer_grammar`."""
        self._specials = special_tokens
        self._ids = {**special_tokens, **text_tokens}
        names = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.rules = [
            "TEXT: /(.|\\n)*/",
            "SPACE: /[ \\n]{1,4}/",
            "INDEX: /[0-9]{1,3}/",
            f"text: {'(TEXT loose)* TEXT' if loose else 'TEXT'}",
        ]
        self._known: dict[str, str] = {}  # names of rules by their definitions
        self._loose = self.more_text = ""
        if loose:
            self._loose, self.more_text = "(TEXT loose)* ", "(loose TEXT)*"
            self.rules.append(f"loose: <[{_ranges(loose)}]>")

    def written(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self.rules)) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def recursive(self, write: Callable[[str], str]) -> str:
        """Adds a rule that may refer to itself, and returns its name. write: makes the rule's body,
        given the name."""
        at = len(self.rules)
        name = self.rule("")
        self.rules[at] = f"{name}: {write(name)}"
        return name

    def parts(self, text: str) -> list[str]:
        """Splits a text into markers that are tokens and the texts between them."""
        found, at = [], 0
        for match in self._names.finditer(text):
            found += [text[at : match.start()], match[0]]
            at = match.end()
        return [part for part in (*found, text[at:]) if part]

    def sequence(self, text: str) -> str:
        """Returns an expression that matches exactly this text."""
        written = []
        for part in self.parts(text):
            if part in self._ids:
                written.append(f"<[{self._ids[part]}]>")
            else:
                pieces = (json.dumps(each, ensure_ascii=False) for each in part.split(_INDEX))
                written.append(" INDEX ".join(pieces))
        return " ".join(written)

    def split_marker(self, text: str) -> tuple[str, str]:
        """Returns the part of a text that marks its beginning, and the sequence of the rest."""
        first, *rest = self.parts(text)
        if first in self._ids:
            marker = first
        elif rest:
            marker = first + rest[0]
        else:
            marker = first.rstrip("\n[") or first
        return marker, self.sequence(text[len(marker) :])

    def text_until(self, end: str) -> str:
        """Returns an expression for any text that does not contain `end`, followed by `end`."""
        first, *rest = self.parts(end)
        if first in self._specials:
            return f"text {self.sequence(end)}"
        text = f"TEXT {json.dumps(first, ensure_ascii=False)}"
        # Only the token behind it shows whether this is the end.
        if rest and first not in self._ids:
            until = f"UNTIL{len(self.rules)}"
            self.rules.append(f"{until}: {text}")
        else:
            until = self.rule(text, "[lazy]")
        return f"{self._loose}{until} {self.sequence(''.join(rest))}"

    def thought(self, style: AnswerStyle, thinking: bool, may_think: bool) -> str:
        """Returns the grammar of the thought with which an answer may begin, or of the rest of a
        thought that the prompt has begun."""
        if style.tools.whole:
            rest = self.rest_of_message() if thinking else ""
            return f"{rest} ({self.message('analysis')})*"
        begin, end = style.thought
        if thinking:
            return f"{self.text_until(end)} SPACE?"
        if may_think:
            return f"({self.sequence(begin)} {self.text_until(end)} SPACE?)?"
        return ""

    def message(self, channel: str) -> str:
        """Returns an expression for a message in a channel of gpt-oss, and the beginning of the
        next message."""
        return f"{self.sequence(f'<|channel|>{channel}<|message|>')} {self.rest_of_message()}"

    def rest_of_message(self) -> str:
        return f"{self.text_until('<|end|>')} {self.sequence('<|start|>assistant')}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns the name of a rule for the JSON values that are valid under a schema. Equal
        schemas share a rule."""
        body = f"%json {json.dumps(schema)}"
        if body not in self._known:
            self._known[body] = self.rule(body)
        return self._known[body]

    def terminal(self, body: str) -> str:
        """Returns the name of a terminal, which is a regular expression. Equal expressions share a
        name."""
        if body not in self._known:
            self._known[body] = f"T{len(self.rules)}"
            self.rules.append(f"{self._known[body]}: {body}")
        return self._known[body]

    def before(self, text: str, end: str, *, loose: bool) -> str:
        """Returns the grammar of a text that a terminal matches, which must not contain anything
        that looks like the end, with the end behind it. loose: whether the text may contain special
        tokens that may stand anywhere."""
        first, *rest = self.parts(end)
        held = f"({text} loose)* " if loose and self._loose else ""
        if first in self._ids:
            return f"{held}{text} {self.sequence(end)}"
        joined = self.terminal(f"{text} {json.dumps(first, ensure_ascii=False)}")
        return f"{held}{joined} {self.sequence(''.join(rest))}"


def _ranges(ids: Collection[int]) -> str:
    """Returns ids as ranges, such as "3-5,7"."""
    firsts = sorted(i for i in ids if i - 1 not in ids)
    lasts = sorted(i for i in ids if i + 1 not in ids)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True))
