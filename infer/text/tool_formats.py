"""How models write calls of functions: a parser for each way, found by what the chat template says.

All of them are read strictly where a call begins, since it is text otherwise, and leniently behind
its name: clients see what a model wrote as arguments.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from infer.text.answer_reader import MalformedError, Reader, Steps
from infer.text.schemas import BEGINS_AS, KINDS, SPACE, Argument, argument_of

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_TEXT = frozenset({"string"})
_NOT_TEXT = frozenset(KINDS) - _TEXT


@dataclass(frozen=True)
class ToolFormat:
    """A way of writing calls. signs: texts by which a template of this format is recognised. read:
    the parser of the answer behind its reasoning; if `whole`, of the whole answer, reasoning too.
    markers: texts that may be special tokens. short_ids: as for `Reader`."""

    name: str
    signs: tuple[str, ...]
    read: Callable[[Reader], Steps[None]]
    markers: tuple[str, ...] = ()
    short_ids: bool = False
    whole: bool = False


# JSON: {"name": ..., "arguments": {...}}, or a list of such objects


def _json(reader: Reader, begin: str, end: str) -> Steps[None]:
    """Reads calls in JSON, one or a list of them, between two markers."""
    while (yield from reader.text_until(begin)):
        yield from reader.attempt(begin, _json_calls(reader, end))


def _json_calls(reader: Reader, end: str, *, bare: bool = False) -> Steps[None]:
    yield from reader.accept("[")
    while True:
        yield from _json_call(reader, bare=bare)
        for separator in ",;":
            yield from reader.accept(separator)
        if not (yield from reader.sees("{")):
            break
    yield from reader.accept("]")
    if end:
        yield from reader.accept(end)


def _json_call(reader: Reader, *, bare: bool) -> Steps[None]:
    """Reads a call that is a JSON object. bare: the call has no marker around it, so JSON that has
    other keys, or names no known function, is text."""
    name: str | None = None
    arguments: str | None = None
    told = False
    yield from reader.expect("{")
    while not (yield from reader.accept("}")):
        key = yield from reader.json_string()
        yield from reader.expect(":")
        if key in _NAMES and name is None:
            if bare and not (yield from reader.sees(*map(json.dumps, reader.functions))):
                raise MalformedError
            name = yield from reader.json_string()
            if not _is_name(name) or (bare and name not in reader.functions):
                raise MalformedError
            if arguments is not None:
                reader.call(name)
                reader.arguments(arguments)
                reader.end_call()
                told = True
        elif key in _ARGUMENTS and name is None:
            parts: list[str] = []
            yield from reader.json_value(parts.append)
            arguments = _object("".join(parts))
        elif key in _ARGUMENTS and not told and name is not None:
            reader.call(name)
            told = True
            yield from _arguments(reader)
        elif bare and key not in ("type", "id"):
            raise MalformedError
        else:
            yield from reader.json_value(lambda _: None)
        yield from reader.accept(",")
    if name is None:
        raise MalformedError
    if not told:
        reader.call(name)
        reader.arguments("{}")
        reader.end_call()


def _arguments(reader: Reader) -> Steps[None]:
    """Reads arguments in JSON and the end of the call. If they are an object, they are passed on
    while they arrive."""
    parts: list[str] = []
    is_object = yield from reader.sees("{")
    is_whole = yield from reader.json_value(reader.arguments if is_object else parts.append)
    if not is_object:
        reader.arguments(_object("".join(parts)))
    if is_whole:
        reader.end_call()


def _object(text: str) -> str:
    """Returns the JSON of a call's arguments: an object that the model wrote within a string is
    taken out of it, and null becomes {}."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return text
    if isinstance(value, str) and _is_unicode(value):
        return value
    return text if value else "{}"


def _llama(reader: Reader) -> Steps[None]:
    """Reads Llama's calls: an answer that is nothing but JSON, or JSON after <|python_tag|>."""
    while True:
        marker = "<|python_tag|>" if (yield from reader.accept("<|python_tag|>")) else ""
        if not (marker or (yield from reader.sees("{"))):
            break
        yield from reader.attempt(marker, _json_calls(reader, "", bare=True))
        if not reader.calls:
            break
    while (yield from reader.text_until("<|python_tag|>")):
        yield from reader.attempt("<|python_tag|>", _json_calls(reader, "", bare=True))


def _mistral(reader: Reader) -> Steps[None]:
    """Reads Mistral's calls: [TOOL_CALLS][{...}], or, from newer models,
    [TOOL_CALLS]name[ARGS]{...} for each call."""
    while (yield from reader.text_until("[TOOL_CALLS]")):
        if (yield from reader.sees("[{", "[ {", "[\n", "{")):
            steps = _json_calls(reader, "")
        else:
            steps = _mistral_call(reader)
        yield from reader.attempt("[TOOL_CALLS]", steps)


def _mistral_call(reader: Reader) -> Steps[None]:
    name = (yield from reader.until("[CALL_ID]", "[ARGS]", "{", take=False)).strip()
    if not _is_name(name):
        raise MalformedError
    call_id = None
    if (yield from reader.accept("[CALL_ID]")):
        call_id = (yield from reader.until("[ARGS]")).strip()
    else:
        yield from reader.accept("[ARGS]")
    reader.call(name, call_id)
    yield from _arguments(reader)


_KIMI = tuple(
    f"<|tool_call{each}|>"
    for each in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
)


def _kimi(reader: Reader) -> Steps[None]:
    """Reads Kimi's calls: sections of calls, each with an id functions.NAME:INDEX."""
    while (yield from reader.text_until(_KIMI[0])):
        yield from reader.attempt(_KIMI[0], _kimi_calls(reader))


def _kimi_calls(reader: Reader) -> Steps[None]:
    _, begin, separator, end, end_of_all = _KIMI
    yield from reader.expect(begin)
    while True:
        call_id = (yield from reader.until(separator)).strip()
        name = call_id.removeprefix("functions.")
        name = name.rpartition(":")[0] or name
        if not _is_name(name):
            raise MalformedError
        reader.call(name, call_id)
        yield from _arguments(reader)
        yield from reader.accept(end)
        if not (yield from reader.accept(begin)):
            break
    yield from reader.accept(end_of_all)


_DEEPSEEK = tuple(
    f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


def _deepseek(reader: Reader) -> Steps[None]:
    """Reads DeepSeek's calls: V3 and R1 write function<sep>NAME and JSON within ```, V3.1 writes
    NAME<sep> and JSON."""
    while (yield from reader.text_until(_DEEPSEEK[0])):
        yield from reader.attempt(_DEEPSEEK[0], _deepseek_calls(reader))


def _deepseek_calls(reader: Reader) -> Steps[None]:
    _, begin, separator, end, end_of_all = _DEEPSEEK
    yield from reader.expect(begin)
    while True:
        name = (yield from reader.until(separator)).strip()
        if name == "function":
            name = (yield from reader.until("\n")).strip()
        if not _is_name(name):
            raise MalformedError
        reader.call(name)
        yield from reader.accept("```json")
        yield from _arguments(reader)
        yield from reader.accept("```")
        yield from reader.accept(end)
        if not (yield from reader.accept(begin)):
            break
    yield from reader.accept(end_of_all)


# XML: a tag for each argument


@dataclass(frozen=True)
class Tags:
    """The texts that surround the parts of a call. section: around all calls, or around each if
    `call` is empty. A call's name ends with name_end. A parameter's name ends with key_end; then
    come its value and value_end. newlines: the value stands between line breaks."""

    section: str
    section_end: str
    call: str
    name_end: str
    call_end: str
    parameter: str
    key_end: str
    value_end: str
    newlines: bool = False
    alone: bool = False  # a call may come without a section


QWEN_TAGS = Tags(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    ">",
    "</parameter>",
    newlines=True,
    alone=True,
)
SEED_TAGS = Tags(
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    ">",
    "</parameter>",
)
MINIMAX_TAGS = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    '">',
    "</parameter>",
)
DSML_TAGS = Tags(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    '">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    ">",
    "</｜DSML｜parameter>",
)
GLM_TAGS = Tags(
    "<tool_call>", "", "", "", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>"
)


def _xml(reader: Reader, tags: Tags) -> Steps[None]:
    starts = (tags.section, tags.call) if tags.alone else (tags.section,)
    while start := (yield from reader.text_until(*starts)):
        yield from reader.attempt(start, _xml_calls(reader, tags, start == tags.call))


def _xml_calls(reader: Reader, tags: Tags, inside: bool) -> Steps[None]:
    """Reads calls in tags. inside: the tag of the first call has been read."""
    if not tags.call:
        yield from _xml_call(reader, tags)
        return
    if not inside:
        yield from reader.expect(tags.call)
    while True:
        yield from _xml_call(reader, tags)
        if not (yield from reader.accept(tags.call)):
            break
    yield from reader.accept(tags.section_end)


def _xml_call(reader: Reader, tags: Tags) -> Steps[None]:
    if tags.name_end:
        name = yield from reader.until(tags.name_end)
    else:
        name = yield from reader.until("\n", tags.parameter, tags.call_end, take=False)
    name = name.strip()
    if not _is_name(name):
        raise MalformedError
    schema = reader.functions.get(name, {})
    reader.call(name)
    begin = "{"
    while (yield from reader.accept(tags.parameter)):
        key, _, attributes = (yield from reader.until(tags.key_end)).strip().partition('"')
        reader.arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        argument = argument_of(schema, key)
        if 'string="' in attributes:
            argument = argument.of(_TEXT if 'string="true' in attributes else _NOT_TEXT)
        yield from _xml_value(reader, tags, argument)
        begin = ", "
    if (yield from reader.accept(tags.call_end)) or not reader.is_cut:
        reader.arguments("{}" if begin == "{" else "}")
        reader.end_call()


def _xml_value(reader: Reader, tags: Tags, argument: Argument) -> Steps[None]:
    """Reads a value in tags. It ends where its end tag is followed by the next parameter or the end
    of the call; any other end tag belongs to the value."""
    ends, behind = [tags.value_end], value_followers(tags)
    if tags is GLM_TAGS:
        yield from reader.expect("<arg_value>")
    if tags.newlines:
        ends.append("\n" + tags.value_end)
        yield from reader.skip("\n")
    if argument.kinds == _TEXT:  # a text may be long: it is passed on while it arrives
        reader.arguments('"')
        end = yield from reader.value_until(
            *ends,
            behind=behind,
            write=lambda text: reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1]),
        )
        if end is not None:
            reader.arguments('"')
    else:
        parts: list[str] = []
        first = 0  # parts before the first end
        while end := (yield from reader.value_until(*ends, behind=behind, write=parts.append)):
            first = first or len(parts)
            if not _ends_in_string("".join(parts), argument):
                break
            parts.append(end)
        # The first end counts: the value was no string.
        if end is None and first and not reader.is_cut:
            end = parts[first]
            reader.put_back("".join(parts[first + 1 :]))
            del parts[first:]
        if end is not None:
            reader.arguments(_value("".join(parts), argument))
    if end is None:  # the value was cut off; its JSON stays without an end, which shows it
        raise MalformedError


def value_followers(tags: Tags) -> tuple[str, ...]:
    """Returns the tags that may come behind the end of a value."""
    followers = tags.parameter, tags.call_end, tags.section_end, tags.call or tags.section
    return tuple(filter(None, followers))


_STRINGS_CLOSED = re.compile(r"""(?:[^"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*+""", re.DOTALL)


def _ends_in_string(text: str, argument: Argument) -> bool:
    """Whether a list or an object, of JSON or Python, ends within a string."""
    begins = text.lstrip(SPACE)[:1]
    is_nested = any(begins == BEGINS_AS.get(kind) for kind in argument.apart)
    return is_nested and not _STRINGS_CLOSED.fullmatch(text)


def _value(text: str, argument: Argument) -> str:
    """Returns the JSON of a value that stands without quotes if it is text. A value that may be
    text is text, unless it is read as a value of another of its types."""
    if "string" in argument.kinds and not argument.may_be_other(text):
        return _dumps(text)
    plain = text.strip(SPACE)
    try:
        json.loads(plain, parse_constant=_no_constant)
        return plain
    except (ValueError, RecursionError):
        pass
    try:
        value = _literal(ast.parse(plain, mode="eval").body)
        return _dumps(text if isinstance(value, str) else value)
    except _NO_LITERAL:
        return _dumps(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _dumps(value: object) -> str:
    """Returns JSON in which text is as readable as possible. Raises ValueError for infinity and
    NaN."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if _is_unicode(written) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. Halves of surrogate pairs, which escapes can make,
    cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Python: [f(a=1), g(b="x")]

# Python 3.11 raises SystemError for some expressions that are nested deeply.
_NO_LITERAL = (SyntaxError, ValueError, MemoryError, RecursionError, SystemError, MalformedError)
_CONSTANTS = {"true": True, "false": False, "null": None}


def _pythonic(reader: Reader, begin: str = "", end: str = "") -> Steps[None]:
    """Reads calls in Python's syntax between two markers; without markers, an answer that begins
    with a call of a known function."""
    if begin:
        while (yield from reader.text_until(begin)):
            if (yield from reader.sees("{", "[{")):
                steps = _json_calls(reader, end)
            else:
                steps = _python_calls(reader, end)
            yield from reader.attempt(begin, steps)
        return
    tagged = yield from reader.accept("<|python_start|>")
    yield from reader.attempt("", _python_calls(reader, "<|python_end|>", bare=not tagged))


def _python_calls(reader: Reader, end: str, *, bare: bool = False) -> Steps[None]:
    listed = yield from reader.accept("[")
    if bare and not listed:
        raise MalformedError
    while True:
        if bare and not (yield from reader.sees(*reader.functions)):
            raise MalformedError
        name = yield from reader.word()
        if not _is_name(name) or (bare and name not in reader.functions):
            raise MalformedError
        arguments = _python_arguments((yield from reader.parenthesised()))
        reader.call(name)
        reader.arguments(arguments)
        reader.end_call()
        yield from reader.accept(",")
        if (yield from reader.sees("]", "<")) or (yield from reader.is_over()):
            break
    yield from reader.accept("]")
    yield from reader.accept(end)


def _python_arguments(text: str) -> str:
    """Returns the JSON of arguments in Python's syntax, such as "(a=1, b='x')"."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedError
        values = {each.arg: _literal(each.value) for each in call.keywords}
        if None in values:
            raise MalformedError
        return _dumps(values)
    except _NO_LITERAL:
        raise MalformedError from None


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal in the syntax of Python or JSON."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(each) for key, each in zip(keys, values, strict=True)}
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise MalformedError
    return key


# Gemma: call:f{a:1,b:<|"|>x<|"|>}


def _gemma(reader: Reader, begin: str, end: str, quote: str) -> Steps[None]:
    """Reads Gemma's calls. quote: the token around texts."""
    while (yield from reader.text_until(begin)):
        yield from reader.attempt(begin, _gemma_call(reader, end, quote))


def _gemma_call(reader: Reader, end: str, quote: str) -> Steps[None]:
    yield from reader.expect("call:")
    name = (yield from reader.until("{", take=False)).strip()
    if not _is_name(name):
        raise MalformedError
    reader.call(name)
    parts: list[str] = []
    while (found := (yield from reader.copy_until(end, quote, write=parts.append))) == quote:
        parts.append(quote)  # a text may contain the end of a call
        if (yield from reader.copy_until(quote, write=parts.append)):
            parts.append(quote)
    text = "".join(parts).strip()
    try:
        value, rest = _gemma_value(text, quote)
    except _NO_LITERAL:
        value, rest = text, text
    if rest.strip() and reader.is_cut and found is None:
        return
    reader.arguments(text if rest.strip() else value)
    reader.end_call()


def _gemma_value(text: str, quote: str) -> tuple[str, str]:
    """Returns the JSON of the value with which a text begins, and the rest of the text."""
    text = text.lstrip()
    if text.startswith(quote):
        value, closed, rest = text[len(quote) :].partition(quote)
        if not closed:
            raise MalformedError
        return _dumps(value), rest
    if text.startswith("{"):
        entries, rest = {}, text[1:].lstrip()
        while not rest.startswith("}"):
            if rest.startswith(quote):
                key, rest = _gemma_value(rest, quote)
                rest = rest.lstrip().removeprefix(":")
            else:
                key, colon, rest = rest.partition(":")
                if not colon:
                    raise MalformedError
                key = _dumps(key.strip())
            entries[key], rest = _gemma_value(rest, quote)
            rest = rest.lstrip().removeprefix(",").lstrip()
        written = ", ".join(f"{key}: {value}" for key, value in entries.items())
        return f"{{{written}}}", rest[1:]
    if text.startswith("["):
        items, rest = [], text[1:].lstrip()
        while not rest.startswith("]"):
            item, rest = _gemma_value(rest, quote)
            items.append(item)
            rest = rest.lstrip().removeprefix(",").lstrip()
        return f"[{', '.join(items)}]", rest[1:]
    word = re.match(r"[^,\]}]+", text)
    if word is None:
        raise MalformedError
    return _value(word[0].strip(), Argument(_NOT_TEXT, _NOT_TEXT)), text[word.end() :]


# Harmony: <|channel|>analysis<|message|>...<|end|>, and calls addressed to functions


HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def _harmony(reader: Reader) -> Steps[None]:
    """Reads the messages of gpt-oss, each with a header that tells its channel and its
    recipient."""
    while True:
        parts: list[str] = []
        if not (yield from reader.copy_until("<|message|>", write=parts.append)):
            header = "".join(parts)
            if "<|" not in header and header.strip() not in ("", "assistant"):
                reader.text(header)
            return
        header = "".join(parts)
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        if recipient and _is_name(recipient[1]):
            reader.call(recipient[1])
            yield from _arguments(reader)
            end = yield from reader.copy_until(*HARMONY_ENDS, write=reader.arguments)
        elif "<|channel|>analysis" in header:
            end = yield from reader.think_until(*HARMONY_ENDS)
        else:
            end = yield from reader.text_until(*HARMONY_ENDS)
        if end is None:
            return


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[^\s\"'<>{}()\[\]]{1,256}", text) is not None and text.isprintable()


def _mistral_format(name: str, *signs: str) -> ToolFormat:
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    return ToolFormat(name, signs, _mistral, markers, short_ids=True)


def _json_format(name: str, begin: str, end: str) -> ToolFormat:
    return ToolFormat(name, (begin,), partial(_json, begin=begin, end=end), (begin, end))


def _python_format(name: str, begin: str, end: str) -> ToolFormat:
    return ToolFormat(name, (begin,), partial(_pythonic, begin=begin, end=end), (begin, end))


HERMES = _json_format("hermes", "<tool_call>", "</tool_call>")

# A template has the first format whose signs it has all. Formats further down have signs that
# others have, too.
FORMATS = (
    ToolFormat(
        "harmony",
        ("<|channel|>analysis",),
        _harmony,
        (*HARMONY_ENDS, "<|channel|>", "<|message|>", "<|constrain|>"),
        whole=True,
    ),
    ToolFormat(
        "gemma4",
        ("<|tool_call>call:",),
        partial(_gemma, begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    ToolFormat(
        "functiongemma",
        ("<start_function_call>call:",),
        partial(_gemma, begin="<start_function_call>", end="<end_function_call>", quote="<escape>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    ToolFormat("kimi", (_KIMI[0],), _kimi, _KIMI),
    ToolFormat("deepseek_v3", (_DEEPSEEK[0], "```json"), _deepseek, _DEEPSEEK),
    ToolFormat("deepseek", (_DEEPSEEK[0],), _deepseek, _DEEPSEEK),
    ToolFormat("deepseek_v3.2", ("｜DSML｜",), partial(_xml, tags=DSML_TAGS), ("｜DSML｜",)),
    ToolFormat(
        "minimax",
        (MINIMAX_TAGS.section,),
        partial(_xml, tags=MINIMAX_TAGS),
        (MINIMAX_TAGS.section, MINIMAX_TAGS.section_end),
    ),
    ToolFormat(
        "glm",
        ("<tool_call>", "<arg_key>"),
        partial(_xml, tags=GLM_TAGS),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat(
        "seed_oss",
        (SEED_TAGS.section,),
        partial(_xml, tags=SEED_TAGS),
        (SEED_TAGS.section, SEED_TAGS.section_end),
    ),
    ToolFormat(
        "qwen3_coder",
        ("<function=", "<parameter="),
        partial(_xml, tags=QWEN_TAGS),
        (QWEN_TAGS.section, QWEN_TAGS.section_end),
    ),
    _mistral_format("mistral", "[TOOL_CALLS]", "[ARGS]"),
    _mistral_format("mistral_list", "[TOOL_CALLS]"),
    _json_format("command", "<|START_ACTION|>", "<|END_ACTION|>"),
    _json_format("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _json_format("granite", "<|tool_call|>", "<|/tool_call|>"),
    _python_format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    _python_format("olmo3", "<function_calls>", "</function_calls>"),
    HERMES,
    ToolFormat("pythonic", ("[func_name1(",), _pythonic, ("<|python_start|>", "<|python_end|>")),
    ToolFormat("llama", ("<|python_tag|>",), _llama, ("<|python_tag|>",)),
    ToolFormat("llama", ('"parameters": dictionary of argument',), _llama, ("<|python_tag|>",)),
)


def find_format(template: str) -> ToolFormat | None:
    """Returns the format of calls that a chat template shows, or None."""
    found = (each for each in FORMATS if all(sign in template for sign in each.signs))
    return next(found, None)
