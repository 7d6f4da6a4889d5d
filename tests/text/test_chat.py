"""Chat templates against what transformers rendered, and the errors of those that fail.

The templates under tests/data/text are in the style of Llama 3, Qwen, Mistral and Gemma.
"""

import json
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest

import infer.text.template
from infer.kernels.errors import RequestError, TokenizerError
from infer.text.chat import own_template
from infer.text.folder_tokenizer import folder_tokenizer, open_tokenizer
from infer.text.tokenizer import Tokenizer

DATA = places.DATA / "text"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
FORMS = EXPECTED["chatml"]["forms"]
CHATS = [(kind, case) for kind, cases in EXPECTED.items() for case in cases["chats"]]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return folder_tokenizer(DATA / "llama3")


def arguments(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of transformers under our names; theirs renders no generation prompt unasked."""
    args = {"add_generation_prompt": False} | args
    return {"template" if k == "chat_template" else k: v for k, v in args.items()}


@pytest.mark.parametrize(("kind", "case"), CHATS)
def test_chats_are_those_of_transformers(kind: str, case: dict[str, Any]) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    args = arguments(case["args"])
    assert tokenizer.render_chat(case["messages"], **args) == case["text"]
    assert tokenizer.encode_chat(case["messages"], **args) == case["ids"]


# The form that a template reads


def variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """All ways in which clients write the same messages."""

    def content(message: dict[str, Any], in_parts: bool, empty: dict[str, Any]) -> dict[str, Any]:
        given = message.get("content")
        if not given and "tool_calls" in message:
            return empty
        if isinstance(given, list):
            (part,) = given
            given = part["text"]
        return {"content": [{"type": "text", "text": given}] if in_parts else given}

    def calls(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
        if "tool_calls" not in message:
            return {}
        (call,) = message["tool_calls"]
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) != as_text:
            own = (
                json.loads(arguments) if not as_text else json.dumps(arguments, ensure_ascii=False)
            )
            call = {**call, "function": {**call["function"], "arguments": own}}
        return {"tool_calls": [call]}

    for in_parts in (False, True):
        for as_text in (False, True):
            for empty in ({}, {"content": None}, {"content": ""}, {"content": []}):
                yield [
                    {"role": message["role"]}
                    | content(message, in_parts, empty)
                    | calls(message, as_text)
                    for message in messages
                ]


@pytest.mark.parametrize("case", FORMS, ids=[case["name"] for case in FORMS])
def test_messages_are_given_in_the_form_that_a_template_reads(case: dict[str, Any]) -> None:
    """The prompt is that of transformers for this form, in whichever the client has written."""
    tokenizer = folder_tokenizer(DATA / "chatml")
    args = arguments(case["args"])
    assert tokenizer.render_chat(case["messages"], **args) == case["text"]
    assert tokenizer.left_out(case["messages"], **args) == []
    if "several" not in case["name"]:
        for messages in variants(case["messages"]):
            assert tokenizer.render_chat(messages, **args) == case["text"]


@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content[0].text }}"])
def test_a_line_end_joins_texts_where_a_template_joins_none(
    content: str, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": text} for text in ("One", " two")]
    source = "{# #}{% for m in messages %}" + content + "{% endfor %}"
    messages = [{"role": "user", "content": parts}]
    assert tokenizer.render_chat(messages, template=source) == "One\n two"


@pytest.mark.parametrize("kind", ["llama3", "chatml", "mistral", "gemma"])
def test_a_part_is_as_its_text(kind: str) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    for case in EXPECTED[kind]["chats"]:
        parts = [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            if isinstance(each["content"], str)
            else each
            for each in case["messages"]
        ]
        assert tokenizer.render_chat(parts, **arguments(case["args"])) == case["text"]


# Templates that use the environment: each must give the same text, or fail, in both.
PROBES = [
    "{{ messages | tojson }}|{{ tools }}|{{ documents }}|{{ add_generation_prompt }}",
    "{{ {'b': '<é>', 'a': [1, None, true]} | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}",
    "{{ strftime_now('%d %B %Y') }}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
    "{% endif %}{{ i }}{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "  {% if true %}\n  a\n  {% endif %}\n  {# note #}\nb\n",
    "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}{{ namespace(self=2).self }}",
    "{% macro kind(p, optional=false) %}{% if p.type == 'array' %}{{ kind(p['items']) ~ '[]' }}"
    "{% elif p.type is not string and p.type is iterable %}{{ p.type | join(' | ') }}"
    "{% else %}{{ p.type }}{% endif %}{{ '?' if optional }}{% endmacro %}"
    "{% for name, p in {'a': {'type': 'array', 'items': {'type': ['n', 'null']}}}.items() -%}"
    "{{ name }}: {{ kind(p, optional=true) }}{{ ',' if not loop.last }}{% endfor %}"
    "{{ messages[1:] | length }}{{ messages[::-1] | length }}",
    "{{ bos_token }}{{ eos_token }}[{{ pad_token }}]{{ pad_token is defined }}{{ missing }}",
    "{{ messages[0].content.upper().split() | join('-') }}{{ messages[-1]['role'] }}",
    "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}",
    "{{ messages[0].name is defined }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(_x=1) }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content.format.__globals__ }}",
    "{{ dict.__class__ }}{{ dict.mro() }}",
    "{{ missing.field }}",
    "{{ 'a' + 1 }}",
    "{{ range(1000000) | list }}",
    "{% include 'other' %}",
    "{{ raise_exception('No such role: ' ~ messages[0].role) }}",
    "{% if %}",
    "{% generation %}",
]


@pytest.mark.live
@pytest.mark.parametrize("template", PROBES)
def test_environment_is_that_of_transformers_live(template: str, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(DATA / "llama3")
    message = {"role": "user", "content": "Hi you", "name": None, "reasoning": "r"}
    args = {"add_generation_prompt": False}
    expected = text_or_error(
        lambda: reference.apply_chat_template(
            [message], chat_template=template, tokenize=False, **args
        )
    )
    rendered = text_or_error(lambda: tokenizer.render_chat([message], template=template, **args))
    if isinstance(expected, Exception):
        assert isinstance(rendered, TokenizerError)
    else:
        assert rendered == expected


def text_or_error(render: Callable[[], str]) -> str | Exception:
    try:
        return render()
    except Exception as error:
        return error


@pytest.mark.live
@pytest.mark.parametrize("kind", ["llama3", "chatml", "mistral", "gemma"])
def test_random_chats_live(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(DATA / kind)
    tokenizer = folder_tokenizer(DATA / kind)
    rng = random.Random(0)
    for _ in range(40):
        roles = ["user", "assistant"] * 3
        messages = [
            {"role": role, "content": "".join(rng.choices("ab é\n<>🙂{}", k=rng.randrange(12)))}
            for role in roles[: rng.randrange(1, 6)]
        ]
        args: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.5, "date_string": "now"}
        expected = reference.apply_chat_template(messages, return_dict=False, **args)
        assert tokenizer.encode_chat(messages, **args) == expected


def test_strftime_now_is_the_date_of_today(tokenizer: Tokenizer) -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = tokenizer.render_chat(USER)
    assert f"Today: {before}" in text or datetime.now().strftime("%d %b %Y") != before


# The choice of the template


def test_files_stand_above_tokenizer_config(tmp_path: Path) -> None:
    shutil.copy(DATA / "llama3" / "tokenizer.json", tmp_path)
    assert not folder_tokenizer(tmp_path).has_chat_template
    steps = [
        ("tokenizer_config.json", '{"chat_template": "config"}'),
        ("chat_template.json", '{"chat_template": "json"}'),
        ("chat_template.jinja", "jinja"),
    ]
    for name, text in steps:
        (tmp_path / name).write_text(text)
        tokenizer = folder_tokenizer(tmp_path)
        assert tokenizer.has_chat_template
        assert tokenizer.render_chat(USER) in text
    assert tokenizer.render_chat(USER) == "jinja"


def test_names_of_templates() -> None:
    tokenizer = folder_tokenizer(DATA / "mistral")
    assert sorted(tokenizer.templates) == ["default", "tool_use"]
    with pytest.raises(RequestError, match=r"'rag'.*default, tool_use"):
        tokenizer.render_chat(USER, template="rag")
    assert tokenizer.render_chat(USER, template="{{ eos_token }}") == "</s>"


def test_model_without_template() -> None:
    tokenizer = folder_tokenizer(DATA / "metaspace")
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.encode_chat(USER)
    assert tokenizer.render_chat(USER, template="{{ messages[0].content }}") == "Hi"


# Errors


def test_error_of_a_template_is_its_own_message() -> None:
    tokenizer = folder_tokenizer(DATA / "gemma")
    with pytest.raises(TokenizerError, match=r"roles must alternate user/assistant/user"):
        tokenizer.render_chat([*USER, *USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if %}", "does not compile: line 2"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "'__x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in 'a' %}" * 25 + "{% endfor %}" * 25, "does not compile: too many statically"),
        ("{{ " + "(" * 150 + "1" + ")" * 150 + " }}", "does not compile: nested too deeply"),
        ("{{ " + "-" * 100_000 + "1 }}", "does not compile: nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: nested too deeply"),
    ],
    ids=range(10),
)
def test_templates_that_fail(template: str, message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer.render_chat(USER, template=template)


GROW = (
    "{{% set ns = namespace(x={}) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"
)
TOO_MUCH = [
    "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}" + "x" * 1000 + "{% endcall %}",
    "{{ 'x' * 10**10 }}",
    "{{ ([0] * 10**9) | length }}",
    "{{ 7 ** (10**10) }}",
    "{{ 1 | round(10**9) }}",
    GROW.format("'ab'", "ns.x ~ ns.x"),
    GROW.format("'ab'", "ns.x + ns.x"),
    GROW.format("3", "ns.x * ns.x"),
    # Each list or dictionary is small, and what it is written out is not.
    GROW.format("'ab'", "[ns.x, ns.x]") + "{{ ns.x }}",
    GROW.format("'ab'", "(ns.x, ns.x)") + "{{ ns.x == ns.x[:] }}",
    GROW.format("'ab'", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    GROW.format("{'a': 1}", "dict(a=ns.x.items(), b=ns.x.items())") + "{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' | format(10**10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ ('{:10000000000}' | attr('format'))(1) }}",
    # Zeros in front, digits of another script, widths made of several values or found in them.
    "{{ '%010000000000d' % 1 }}",
    "{{ '{:>010000000000}'.format(1) }}",
    "{{ '{:\u0661\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660}'.format(1) }}",
    "{{ '{:{}}'.format(1, '9999999999') }}",
    "{{ '{:9{}{}}'.format(1, '9999', '99999') }}",
    "{{ '{0:{1[x]}}'.format(1, {'x': 10**10}) }}",
    "{{ '{0:{1.x}}'.format(1, namespace(x=10**10)) }}",
    "{{ '{x:{y}}'.format_map({'x': 1, 'y': '9999999999'}) }}",
    "{{ ('{:{}}' | escape).format(1, 10**10) }}",
    "{{ ('{:100000}' * 10000).format(*range(10000)) }}",
    "{{ ('x' * 100000) | wordwrap(1) }}",
    "{{ [1] | batch(10**10, 'x') | list | length }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000) | join('y' * 1000000) }}",
    "{{ range(99999) | map('string') | join('y' * 1000000) }}",
    "{{ ('y' * 1000000).join(range(99999) | map('string')) }}",
    "{{ range(99) | map('string') | map('center', 9999999) | list | length }}",
    "{% set c = cycler('x' * 9999999) %}{% for i in range(999) %}{{ c.next() }}{% endfor %}",
    "{% autoescape 'x' * 10**10 %}{% endautoescape %}",
    "{{ " + "('x' | center(9999999)) ~ " * 99 + "'x' }}",
]


@pytest.mark.parametrize("template", TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_templates_that_make_too_much(
    template: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert infer.text.template.SIZE == 1 << 24
    monkeypatch.setattr(infer.text.template, "SIZE", 1 << 17)  # which is reached sooner
    tracemalloc.start()
    try:
        with pytest.raises(TokenizerError, match=r"makes too much: more than 13\d,\d+ characters"):
            tokenizer.render_chat(USER, template=template)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


ENDLESS = [
    "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9,
    "{% for a in range(99999) %}" * 9 + "{% for b in range(9) if b > 9 %}" + "{% endfor %}" * 10,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% set x = range(99999) | list %}{{ x | select('in', x) | map('string') | list | length }}",
]


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_templates_that_do_not_end(
    template: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, where no signal could end them."""
    monkeypatch.setattr(infer.text.template, "SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool:
        rendered = pool.submit(tokenizer.render_chat, USER, template=template)
        with pytest.raises(TokenizerError, match=r"was stopped after .*: it does not end"):
            rendered.result()


def test_templates_of_other_limits(tokenizer: Tokenizer) -> None:
    nest = "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}"
    with pytest.raises(TokenizerError, match="more than 200 deep"):
        tokenizer.render_chat(USER, template=nest + "{% endfor %}{{ {ns.x: 1} | length }}")
    with pytest.raises(TokenizerError, match=r"has 600,003 characters; at most 262,144"):
        tokenizer.render_chat(USER, template="{{}" + "x" * 600_000)
    large = "{{ 1 }}" * 1_500_000
    tracemalloc.start()
    try:
        with pytest.raises(TokenizerError, match=r"has 10,500,000 characters; at most 262,144"):
            tokenizer.render_chat(USER, template=large)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # it is not parsed
    finally:
        tracemalloc.stop()
    itself = "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}"
    assert tokenizer.render_chat(USER, template=itself) == "<Namespace>"


@pytest.mark.parametrize("kind", ["llama3", "chatml", "mistral", "gemma"])
def test_long_chats_are_within_the_limits(kind: str) -> None:
    """Megabytes in one message, and in hundreds."""
    tokenizer = folder_tokenizer(DATA / kind)
    for count, text in ((1, "long é " * 1_000_000), (501, "long é " * 2000)):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text.strip()} for i in range(count)]
        assert tokenizer.render_chat(messages).count("long é") == text.count("long é") * count


def test_long_values_are_within_the_limits(tokenizer: Tokenizer) -> None:
    template = (
        "{% set text = messages[0].content.replace('<|end|>', '<' ~ '|end|>' * 3) | trim %}"
        "{{ tools | tojson(indent=4, separators=(',', ': ')) }}{{ text.split('a') | join('--') }}"
        "{{ '%s: %s' | format(messages[0].role, text) }}{{ '{}'.format(1700000000) }}"
        "{{ text | indent(8) }}{{ 1700000000.5 | round(2) }}{{ messages[::-1] | length }}"
        "{{ (text ~ text)[-9:].rjust(40) }}{{ text.rsplit('</think>', 1)[0] | length }}"
    )
    messages = [{"role": "user", "content": "a <|end|>\n" * 200_000}]
    tools = [{"name": "f", "description": "d" * 100_000}] * 10
    text = tokenizer.render_chat(messages, template=template, tools=tools)
    assert len(text) > 8_000_000


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "list that is not empty"),
        ("Hi", "list that is not empty"),
        (USER[0], "list that is not empty"),
        (None, "list that is not empty"),
        (["Hi"], "Message 0 must be a dictionary .* not str"),
        ([*USER, {"content": "Hi"}], 'Message 1 needs a "role"'),
        ([{"role": 3, "content": "Hi"}], 'needs a "role"'),
        ([{"role": "user"}], 'needs a "content"'),
        ([{"role": "assistant", "content": None}], 'needs a "content"'),
        ([{"role": "user", "content": 3}], "only text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "only text"),
        ([{"role": "user", "content": ["Hi"]}], "only text"),
        ([{"role": "user", "content": b"Hi"}], "Message 0 must be made of JSON types"),
    ],
)
def test_malformed_messages(messages: Any, text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=text):
        tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "args",
    [
        {"tools": "weather"},
        {"tools": [len]},
        {"documents": ["x"]},
        {"anything": object()},
        {"anything": {(1, 2): 3}},
        {"anything": 10**5000},
        {"anything": np.float32(1)},
        {"messages": []},
    ],
    ids=range(8),
)
def test_malformed_arguments(args: dict[str, Any], tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="template argument"):
        tokenizer.render_chat(USER, **args)


CALLED = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("final", "args", "message"),
    [
        ({"content": "Hel"}, {"add_generation_prompt": True}, "give one of them"),
        ({"content": "Hel"}, {"continue_final_message": "content"}, "must be true or false"),
        ({"content": "Hel"}, {"template": "{{ messages[0].content }}"}, "leaves out a part"),
        ({"content": "Hel"}, {"template": "{{ messages[1].content[2:] }}"}, "leaves out a part"),
        ({"content": []}, {}, "has no text"),
        ({"content": "Hel", "tool_calls": [CALLED]}, {}, "has calls"),
    ],
)
def test_what_cannot_be_continued(
    final: dict[str, Any], args: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    """transformers continues none of these messages either, but for the one with calls, which it
    leaves out."""
    chat = [*USER, {"role": "assistant"} | final]
    with pytest.raises(RequestError, match=message):
        tokenizer.encode_chat(chat, **{"continue_final_message": True} | args)


@pytest.mark.parametrize("template", [3, ["a"], b"{{ 1 }}", {"default": "a"}])
def test_what_is_no_name_of_a_template(template: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="template must be the name or the source"):
        tokenizer.render_chat(USER, template=template)


def test_messages_are_not_changed(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi", "reasoning": "r", "name": None}]
    copy = json.loads(json.dumps(messages))
    tokenizer.render_chat(messages)
    assert messages == copy


# Calls and results

CALL = {"id": "call_0123456789", "type": "function"}
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": CALL["id"], "content": "done"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def rendered(tokenizer: Tokenizer, source: str, messages: Any = CALLED, **variables: Any) -> str:
    return tokenizer.render_chat(messages, template="{# #}" + source, **variables)


def test_arguments_are_what_a_template_takes(tokenizer: Tokenizer) -> None:
    """APIs have text, templates of transformers objects, and some of those text again, which is
    the client's own."""
    of_call = "{% set f = messages[1].tool_calls[0].function %}{{ tools }}"
    assert rendered(tokenizer, of_call + "{{ f.arguments.a }}") == "Noneé"
    added = of_call + "{{ '[' + f.arguments + ']' }}"
    assert rendered(tokenizer, added) == 'None[{"a": "é"}]'
    for own in ('{"a":"é", "b": 1e2}', '{"a": "\\u00e9"}', "", {"a": "é"}):
        called = json.loads(json.dumps(CALLED))
        called[1]["tool_calls"][0]["function"]["arguments"] = own
        text = {"": "{}"}.get(own, own) if isinstance(own, str) else '{"a": "é"}'
        assert rendered(tokenizer, added, called) == f"None[{text}]"
        assert rendered(tokenizer, of_call + "{{ f.arguments }}", called) == f"None{text}"
    assert rendered(tokenizer, "{{ tools }}{{ messages[1].content }}") == "None"
    broken = json.loads(json.dumps(CALLED).replace('\\"}', ""))
    assert rendered(tokenizer, of_call + "{{ f.arguments }}", broken) == 'None{"a": "é'
    with pytest.raises(TokenizerError, match="no such thing"):
        rendered(tokenizer, of_call + "{{ raise_exception('no such thing') }}")


def test_ids_are_short_where_a_template_wants_it(tokenizer: Tokenizer) -> None:
    ids = "{{ tools }}{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }}"
    assert rendered(tokenizer, ids) == f"None{CALL['id']} {CALL['id']}"
    first, second = rendered(tokenizer, ids + "{# [TOOL_CALLS] #}").removeprefix("None").split()
    assert first == second
    assert len(first) == 9
    assert first.isalnum()


def test_templates_that_know_no_tools(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    result = "<tool_response>\ndone\n</tool_response>"
    said = f"user: Hi|assistant: {call}|user: {result}|"
    assert rendered(tokenizer, source) == said
    with_tools = rendered(tokenizer, source, tools=TOOLS)
    assert with_tools.startswith("system: # Tools\n")
    assert with_tools.endswith(f"</tool_call>|{said}")
    system = [{"role": "system", "content": "Be brief."}, *CALLED]
    assert rendered(tokenizer, source, system, tools=TOOLS).startswith("system: Be brief.\n\n# Too")
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + source
    assert rendered(tokenizer, strict, tools=TOOLS).startswith("user: # Tools\n")
    skips = source.replace(
        "{{ m.role }}", "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
    )
    described = rendered(tokenizer, skips, system, tools=TOOLS)
    assert described.startswith("user: # Tools\n")
    assert described.endswith("</tool_call>\n\nHi" + said.removeprefix("user: Hi"))
    # One that knows calls, but not the tools.
    known = source + "{{ messages[2].tool_calls }}<｜tool▁calls▁begin｜>"
    written = rendered(tokenizer, known, tools=TOOLS)
    assert "<｜tool▁call▁begin｜><name><｜tool▁sep｜><arguments as a JSON object>" in written
    assert "tool: done|" in written


def test_calls_are_shown_where_a_content_hides_them(tokenizer: Tokenizer) -> None:
    """Templates of DeepSeek-R1's distillates want a content that is None to show calls."""
    source = (
        "{{ tools }}{% for m in messages %}{% if m.content is none %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    )
    for empty in ({}, {"content": None}, {"content": ""}, {"content": []}):
        messages = [CALLED[0], {**CALLED[1], **empty}, CALLED[2]]
        written = rendered(tokenizer, source, messages)
        assert written == 'NoneHi|{"name": "f", "arguments": {"a": "é"}}|done|'


# Parts of messages that a template leaves out


def test_what_a_template_leaves_out_is_told(tokenizer: Tokenizer) -> None:
    system, said = {"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}
    critic = {"role": "critic", "content": "c"}

    def left_out(source: str, *messages: Any) -> list[str]:
        source = "{# " + source + " #}{{ tools }}{% for m in messages %}" + source + "{% endfor %}"
        told = tokenizer.left_out(messages, template=source)
        begin, end = "The chat template leaves ", " out of the prompt."
        assert all(text.startswith(begin) and text.endswith(end) for text in told)
        return [text.removeprefix(begin).removesuffix(end) for text in told]

    # That of Phi-3-mini of April 2024.
    phi = (
        "{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|><|assistant|>"
        "{% elif m.role == 'assistant' %}{{ m.content }}<|end|>{% endif %}"
    )
    assert left_out(phi, USER[0], said) == []
    assert left_out(phi, system, USER[0], said) == ["messages of the role 'system'"]
    assert left_out(phi, system | {"content": ""}, USER[0]) == []
    assert left_out(phi, system, critic, USER[0], critic, system) == [
        "messages of the role 'system'",
        "messages of other roles that are not the first",
        "messages of the role 'system' that are not the first",
    ]
    developer = {"role": "developer", "content": "d"}
    assert left_out(phi, developer, *USER) == ["messages of the role 'developer'"]
    named = "{% if m.role != 'critic' %}{{ m.content }}{% endif %}"
    assert left_out(named, critic, *USER) == ["messages of the role 'critic'"]
    others = [{"role": f"role {i}", "content": "e"} for i in range(3000)]
    assert left_out(phi, *others, *USER) == [
        "messages of other roles",
        "messages of other roles that are not the first",
    ]
    first = "{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}"
    assert left_out(first, system, *USER) == []
    assert left_out(first, *USER, system) == [
        "messages of the role 'system' that are not the first"
    ]
    # `render_chat` keeps the argument from the template.
    going_on = "{{ m.content if m.role != 'system' or continue_final_message is defined }}"
    going_on = "{% for m in messages %}" + going_on + "{% endfor %}"
    chat = [system, *USER, said]
    assert tokenizer.render_chat(chat, template=going_on, continue_final_message=True) == "Hib"
    assert len(tokenizer.left_out(chat, template=going_on, continue_final_message=True)) == 1
    # A message with calls.
    call, beside = CALLED[1], CALLED[1] | {"content": "d"}
    no_calls = "{{ m.content }}"
    assert left_out(no_calls, *USER, call) == ["calls of functions"]
    no_text = "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
    assert left_out(no_text, *USER, call) == []
    assert left_out(no_text, *USER, beside) == [
        "the text of messages of the role 'assistant' that have calls"
    ]
    either = "{{ m.content if m.content else m.tool_calls | tojson }}"
    assert left_out(either, *USER, call) == []
    assert left_out(either, *USER, beside) == ["the calls of messages that have a text"]
    # One that fails says so itself.
    assert (
        left_out("{{ raise_exception('no') if m.role == 'system' else m.content }}", system) == []
    )


READING = """{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set date = date_string or 'today' %}
{%- for m in messages %}{% set content = m.content %}{{ bos_token }}{{ content }}{% endfor %}
{%- if add_generation_prompt %}>{% endif %}{{ '<think>' if enable_thinking }}{{ date }}"""


@pytest.mark.parametrize(
    ("args", "unread"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {}),
        ({"date_string": "x", "add_generation_prompt": False}, {}),
        ({"thinkng": False}, {"thinkng": "date_string, enable_thinking"}),
        ({"thinking": False, "date_string": "x"}, {"thinking": "enable_thinking"}),
        # One thing under the names that templates have for it.
        ({"reasoning_effort": "low", "enable_thinking": True, "thinking": True}, {}),
        ({"documents": [{"text": "a"}]}, {"documents": "date_string, enable_thinking"}),
        ({"documents": None}, {}),
    ],
)
def test_an_argument_that_a_template_does_not_read_is_told(
    tokenizer: Tokenizer, args: dict[str, Any], unread: dict[str, str]
) -> None:
    assert tokenizer.left_out(USER, template=READING, **args) == [
        f"The chat template does not read {name}, which therefore changes nothing. Other arguments "
        f"that it reads: {others}."
        for name, others in unread.items()
    ]


def test_an_argument_that_no_template_reads_is_told(tokenizer: Tokenizer) -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert tokenizer.left_out(USER, template=bare, tools=None, **asked) == [
        "The chat template does not read reasoning_effort, which therefore changes nothing. Other "
        "arguments that it reads: none."
    ]


# A template of one's own


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("Ö{{ messages[0].content }}\n", encoding="utf-8")
    for given in (path, str(path)):
        source = own_template(given)
        tokenizer = open_tokenizer(DATA / "mistral", source)
        assert list(tokenizer.templates) == ["default"]  # no tool_use of the model's
        assert tokenizer.render_chat(USER) == "ÖHi"
    source = "{{ messages[0].role }}"
    assert own_template(source) == source
    assert open_tokenizer(DATA / "metaspace", source).render_chat(USER) == "user"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "own.jinja cannot be read: No such file or directory"),
        (b"\xff{{ messages }}", "own.jinja cannot be read: 'utf-8' codec"),
        (b"{% for m in messages %}", "own.jinja: The chat template does not compile: line 1"),
        (b"{{ prompt }}", "own.jinja is not a chat template: it does not read"),
        (b'{"chat_template": "{{ messages }}"}', "own.jinja is not a chat template: it is JSON"),
        (b"{# " + b"x" * 300_000 + b" #}", "own.jinja: The chat template has 300,006 characters"),
    ],
    ids=range(6),
)
def test_a_file_that_is_no_template(data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(RequestError, match=message):
        own_template(path)


def test_what_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read: .*(not a regular file|directory)"):
        own_template(tmp_path)
    with pytest.raises(RequestError, match="a chat template's file or its source, not 3"):
        own_template(3)  # type: ignore[arg-type]
