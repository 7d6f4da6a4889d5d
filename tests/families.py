"""Families of models as their tokenizers and chat templates have them, for the demo model's words.

The added tokens and their flags are those that are published; the templates are shortened, and keep
what is around messages, calls and results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from infer.hub import DEMO, resolve
from infer.text.tokenizer import Tokenizer

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """special, plain: the added tokens. ends: those of them that end a turn. begins: the token that
    a call begins with. write: calls as the model writes them. thought: what is around one, if the
    answer begins it."""

    special: str
    plain: str
    ends: tuple[str, ...]
    begins: str | None
    write: Callable[[Sequence[Call]], str]
    template: str
    thought: tuple[str, str] = ("", "")
    template_args: tuple[tuple[str, Any], ...] = ()
    content: tuple[str, str] = ("", "")  # around an answer that is no call

    @property
    def single(self) -> bool:
        """Whether an answer has one call."""
        return "<|call|>" in self.special

    def tokenizer(self) -> Tokenizer:
        return demo_tokenizer(
            dict.fromkeys(self.special.split(), True) | dict.fromkeys(self.plain.split(), False),
            self.ends,
            self.template,
        )


def demo_tokenizer(
    added: dict[str, bool], ends: Sequence[str], template: str | None = None
) -> Tokenizer:
    """The demo model's, in which its own special tokens and its last words are replaced by these.
    added: whether each is special."""
    path = Path(resolve(DEMO).path) / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    model, own = description["model"], {each["id"] for each in description["added_tokens"]}
    size = len(model["vocab"])
    ids = [*sorted(own), *range(size - len(added) + len(own), size)]
    names = dict(zip(ids, [*added, *(f"<|unused_{i}|>" for i in own)], strict=False))
    words = {word: i for word, i in model["vocab"].items() if i not in names}
    model["vocab"] = words | {name: i for i, name in names.items()}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in words]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description["added_tokens"] = [
        {"id": i, "content": name, "special": added.get(name, True), **flags}
        for i, name in names.items()
    ]
    description["post_processor"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    return Tokenizer(
        backend,
        eos_token_ids=[backend.token_to_id(end) for end in ends],
        templates={} if template is None else {"default": template},
    )


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _each(text: Callable[[str, dict[str, Any]], str], between: str = "") -> Callable[..., str]:
    return lambda calls: between.join(text(*call) for call in calls)


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else js(value)


def _glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_xml_value(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def _minimax(name: str, arguments: dict[str, Any]) -> str:
    pairs = (
        f'<parameter name="{key}">{_xml_value(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{"".join(pairs)}</invoke>\n'


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return js(value)


QWEN3 = """
{%- if tools %}<|im_start|>system
{{ messages[0].content }}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
For each function call, return a json object within <tool_call></tool_call> XML tags.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (loop.first and tools) %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

GLM = """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|observation|>
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}<think></think>
{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

DEEPSEEK = """<｜begin▁of▁sentence｜>{{ messages[0].content }}
{% for tool in tools or [] %}### {{ tool.function.name }}
Parameters: {{ tool.function.parameters | tojson }}
{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- elif message.role == 'assistant' %}<｜Assistant｜></think>{{ message.content or '' }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' ~ call.function.name ~ '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>
{%- endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}
{%- endif %}"""

KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_system|>tool<|im_middle|>Of {{ message.tool_call_id }}
{{ message.content }}
{%- else %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content or '' }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls %}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- endif %}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

MINIMAX = """]~!b[]~b]system
{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>
{% endfor %}<minimax:tool_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
</invoke>
</minimax:tool_call>[e~[
{% for message in messages %}
{%- if message.role == 'tool' %}]~b]tool
<response>{{ message.content }}</response>
{%- else %}]~b]{{ 'ai' if message.role == 'assistant' else message.role }}
{{ message.content or '' }}
{%- if message.tool_calls %}
<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}{% endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

GPT_OSS = """<|start|>system<|message|>Reasoning: low
# Valid channels: analysis, commentary, final.<|end|>
{%- for message in messages %}
{%- if message.role == 'system' %}<|start|>developer<|message|># Instructions
{{ message.content }}
{% for tool in tools or [] %}type {{ tool.function | tojson }}
{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- elif message.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>
{%- for call in message.tool_calls %}<|start|>assistant to=functions.
{{- call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>{% endfor %}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>
{{- message.content }}<|end|>
{%- else %}<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

MISTRAL = """<s>[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- for message in messages %}
{%- if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]
{%- elif message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}[TOOL_CALLS]
{{- call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>
{%- endif %}{% endfor %}{# [THINK] #}"""

GEMMA4 = """<bos>{% for message in messages %}
{%- if message.role == 'tool' %}<|tool_response>response:f{value:<|"|>{{ message.content }}<|"|>}
{{- '<tool_response|>' }}
{%- else %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content or '' }}{% if loop.first %}{% for tool in tools or [] %}<|tool>declaration:
{{- tool.function | tojson }}<tool|>{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}
{{- call.function.arguments | tojson }}<tool_call|>{% endfor %}<turn|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}{# <|channel>thought <channel|> #}"""

LLAMA3 = """<|begin_of_text|>{% for message in messages %}<|start_header_id|>
{{- 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if loop.first %}Environment: ipython
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{# <|python_tag|> #}{% endif %}
{%- for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", "parameters": {{
call.function.arguments | tojson }}}{% else %}{{ message.content }}{% endfor %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

FAMILIES = {
    "qwen3": Family(
        "<|endoftext|> <|im_start|> <|im_end|>",
        "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <|fim_prefix|>",
        ("<|im_end|>", "<|endoftext|>"),
        "<tool_call>",
        _each(
            lambda name, arguments: (
                f"<tool_call>\n{js({'name': name, 'arguments': arguments})}\n</tool_call>"
            ),
            "\n",
        ),
        QWEN3,
        ("<think>\n", "\n</think>\n\n"),
    ),
    "glm-4.6": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> "
        "</arg_key> <arg_value> </arg_value>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "<tool_call>",
        _each(_glm, "\n"),
        GLM,
        ("<think>", "</think>\n"),
    ),
    "deepseek-v3.1": Family(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>",
        "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
        "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜>",
        ("<｜end▁of▁sentence｜>",),
        "<｜tool▁calls▁begin｜>",
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + _each(
                lambda name, arguments: (
                    f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{js(arguments)}<｜tool▁call▁end｜>"
                )
            )(calls)
            + "<｜tool▁calls▁end｜>"
        ),
        DEEPSEEK,
        ("", "</think>"),
        (("thinking", True),),
    ),
    "kimi-k2": Family(
        "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>",
        "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|>",
        ("<|im_end|>", "[EOS]"),
        "<|tool_calls_section_begin|>",
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
                f"{js(arguments)}<|tool_call_end|>"
                for i, (name, arguments) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
        KIMI,
    ),
    "minimax-m2": Family(
        "]~!b[ ]~b] [e~[",
        "<think> </think> <minimax:tool_call> </minimax:tool_call>",
        ("[e~[",),
        "<minimax:tool_call>",
        lambda calls: f"<minimax:tool_call>\n{_each(_minimax)(calls)}</minimax:tool_call>",
        MINIMAX,
        ("", "\n</think>\n\n"),
    ),
    "gpt-oss": Family(
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> "
        "<|message|> <|call|>",
        "",
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        "<|channel|>",
        _each(
            lambda name, arguments: (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                + js(arguments)
            )
        ),
        GPT_OSS,
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        content=("<|channel|>final<|message|>", ""),
    ),
    "mistral": Family(
        "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS] [TOOL_CALLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [ARGS] [CALL_ID] [THINK] "
        "[/THINK]",
        "",
        ("</s>",),
        "[TOOL_CALLS]",
        _each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{js(arguments)}"),
        MISTRAL,
        ("[THINK]", "[/THINK]"),
    ),
    "gemma-4": Family(
        "<pad> <eos> <bos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> "
        '<|tool_response> <tool_response|> <|"|> <|channel> <channel|>',
        "<b> </b> <table>",
        ("<turn|>", "<eos>", "<|tool_response>"),
        "<|tool_call>",
        _each(lambda name, arguments: f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>"),
        GEMMA4,
        ("<|channel>thought\n", "<channel|>"),
    ),
    "llama-3": Family(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
        "<|eot_id|> <|python_tag|>",
        "",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        None,
        _each(lambda name, arguments: js({"name": name, "parameters": arguments}), "; "),
        LLAMA3,
    ),
}
