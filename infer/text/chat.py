"""Chat templates: the programs of a checkpoint that turn messages into the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.boundaries import foreign, reason, shown
from infer.kernels.errors import NoChatTemplateError, RequestError, TokenizerError
from infer.models.loading.files import read_text
from infer.text.tool_messages import (
    check_calls,
    in_words,
    with_short_ids,
    with_tools,
)

if TYPE_CHECKING:  # the module imports Jinja, which is slow
    from infer.text.template_forms import TemplateForms

_MOST_KEPT = 4096  # characters of variables under which the forms of a template are kept

# The names that APIs give a message's reasoning. Templates read the first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates of a model folder by name; a single one is called `default`.

    As in transformers, files (`chat_template.jinja`, `additional_chat_templates/*.jinja`, the older
    `chat_template.json`) replace the entry of tokenizer_config.json, which is one template or a
    list of {"name", "template"}. Raises TokenizerError for a file or an entry that cannot be read.
    """
    paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    try:
        templates = {path.stem: read_text(path) for path in paths}
        if (path := folder / "chat_template.jinja").exists():
            templates["default"] = read_text(path)
        elif (path := folder / "chat_template.json").exists():
            templates["default"] = json.loads(read_text(path))["chat_template"]
        if not templates and (entry := tokenizer_config.get("chat_template")):
            named = isinstance(entry, list)
            templates = {t["name"]: t["template"] for t in entry} if named else {"default": entry}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"The chat template of {folder} cannot be read: {reason(error)} Fetch the model again."
        ) from error
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"The chat templates of {folder} are neither text nor a list of names and templates. "
            "Fetch the model again."
        ) from error
    if not all(isinstance(part, str) for item in templates.items() for part in item):
        raise TokenizerError(f"A chat template of {folder} is not text. Fetch the model again.")
    return templates


def own_template(given: str | Path) -> str:
    """Returns the source of a chat template that takes the place of a model's own. given: its file,
    or, as a text with a brace in it, the source itself. Raises RequestError for a file that cannot
    be read, or that holds no chat template."""
    if isinstance(given, str) and "{" in given:
        source, what = given, "chat_template"
    elif isinstance(given, str | Path):
        what = str(given)
        try:
            source = read_text(Path(given))
        except (OSError, UnicodeDecodeError) as error:
            text = (isinstance(error, OSError) and error.strerror) or str(error)
            raise RequestError(f"The chat template {what} cannot be read: {text}.") from error
    else:
        raise RequestError(
            f"`chat_template` must be a chat template's file or its source, not {shown(given)}."
        )
    from infer.text.template import reads  # Jinja

    try:
        wrong = None if reads(source, "messages") else "it does not read messages"
    except TokenizerError as error:
        raise RequestError(f"{what}: {error}") from error
    with suppress(ValueError, RecursionError):
        json.loads(source)
        wrong = "it is JSON"
    if wrong is not None:
        raise RequestError(
            f"{what} is not a chat template: {wrong}. Give a file in Jinja, such as "
            "chat_template.jinja in a model's folder."
        )
    return source


def choose_template(
    templates: Mapping[str, str], template: str | None, *, with_tools: bool = False
) -> str:
    """Returns the source of the template called `template`, or `template` itself if it is Jinja.
    Without a name, `tool_use` is taken for a call with tools if there is one, else `default`.

    Raises NoChatTemplateError if the model has no template, and RequestError if no template has
    that name, or a name is needed.
    """
    if not (template is None or isinstance(template, str)):
        raise RequestError(
            f"template must be the name or the source of a chat template, not {shown(template)}."
        )
    if template is not None and template not in templates and "{" in template:
        return template
    if not templates:
        raise NoChatTemplateError(
            "This model has no chat template, so it cannot take messages. Give a plain prompt, "
            "or a template of your own."
        )
    if template is None:
        template = "tool_use" if with_tools and "tool_use" in templates else "default"
    if template not in templates:
        names = ", ".join(sorted(templates))
        raise RequestError(
            f"No chat template is called {shown(template)}. This model has: {names}."
        )
    return templates[template]


def begins_answer(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether a prompt ends with the header of an answer. Raises RequestError if the final message
    is to be continued at the same time."""
    given = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    for name, value in given.items():
        if not (value is None or isinstance(value, bool)):
            raise RequestError(f"{name} must be true or false, not {shown(value)}.")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt begins an answer, and continue_final_message goes on with one: "
            "give one of them."
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    continues: bool = False,
) -> str:
    """Render a chat template.

    Args:
        source: the template.
        messages: {"role", "content"} each, oldest first; see `check_messages`.
        variables: everything else that the template may read, made of JSON types.
        continues: end after the text of the final message, as transformers does.

    Raises:
        RequestError: messages or variables that no template can take, and a final message that
            cannot be continued.
        TokenizerError: the template does not compile, takes too long, makes too much, or raised;
            the message is the template's own.
    """
    checked = check_messages(messages)
    final = _marked(checked[-1]) if continues else ""
    if "messages" in variables:
        raise RequestError("The messages are the prompt, and no template argument.")
    plain = _plain(dict(variables), "A template argument")
    for name in ("tools", "documents"):
        entries = plain.setdefault(name, None)
        is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
        if entries is not None and not is_list:
            raise RequestError(f"The template argument {name!r} must be a list of dictionaries.")
    from infer.text.template import render_template  # Jinja: plain prompts do without

    forms, written = _written(source, checked, plain)
    # A template is a program: it can raise anything.
    with foreign("The chat template failed"):
        fitted = written if _are_texts(forms, written) else forms.fitted(written)
        text = render_template(source, plain | {"messages": fitted})
    return _until_mark(text, final) if continues else text


def left_out(
    templates: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    template_args: Mapping[str, Any],
    template: str | None = None,
) -> list[str]:
    """Returns a sentence for each kind of message that a chat template leaves out of the prompt,
    and for each argument that it does not read. messages, template_args: as `choose_template` and
    `render` have accepted them. special_tokens: further variables, which no user has asked for."""
    with_tools = template_args.get("tools") is not None
    source = choose_template(templates, template, with_tools=with_tools)
    keys = ("role", "content", "tool_calls")
    given = [{key: each[key] for key in keys if each.get(key)} for each in messages]
    # This is no variable of templates: `render_chat` itself obeys it.
    args = {key: value for key, value in template_args.items() if key != "continue_final_message"}
    forms, written = _written(source, given, {**special_tokens, **args})
    parts = () if _are_texts(forms, written) else forms.left_out(written)
    told = [f"The chat template leaves {what} out of the prompt." for what in parts]
    return [*told, *_unread(source, special_tokens, args)]


# Names under which templates read whether to think, and how much: one of them is enough.
THINKING_ARGS = ("reasoning_effort", "enable_thinking", "thinking")


def _unread(
    source: str, special_tokens: Mapping[str, str], template_args: Mapping[str, Any]
) -> Iterator[str]:
    from infer.text.template import arguments

    read, offered = arguments(source)
    # Tools are in the prompt in any case, and not the template alone decides where the prompt ends.
    other = ("tools", "add_generation_prompt")
    given = [key for key, value in template_args.items() if value is not None and key not in other]
    unread = [name for name in given if name not in read]
    thinking = [name for name in THINKING_ARGS if name in given]
    extra = {*thinking} if read.intersection(thinking) else {*thinking[1:]}
    usual = {"messages", *other, *special_tokens}
    others = ", ".join(sorted(offered - usual - {*given})) or "none"
    for name in unread:
        if name not in extra:
            yield (
                f"The chat template does not read {name}, which therefore changes nothing. Other "
                f"arguments that it reads: {others}."
            )


def _written(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> tuple[TemplateForms, list[Mapping[str, Any]]]:
    """Returns the forms of a template, and the messages with all that the template does not write
    itself: for a template that reads no tools, the tools, calls and results are text."""
    from infer.text.template import reads

    forms, tools = _forms(source, variables), variables.get("tools")
    with_calls = any(each["role"] == "tool" or "tool_calls" in each for each in messages)
    if (with_calls or tools) and not reads(source, "tools"):
        from infer.text.template_forms import Kind
        from infer.text.tool_formats import find_format
        from infer.text.tool_grammars import example_call

        known = find_format(source)  # it writes calls and results, but no descriptions of tools
        written = [*messages] if known is not None else [*in_words(messages)]
        system = forms.content(Kind("system"))
        role = "system" if system.text or system.part else "user"
        call = example_call("hermes" if known is None else known.name)
        return forms, [*with_tools(written, tools or (), role, call)]
    if with_calls and "[TOOL_CALLS]" in source:
        return forms, [*with_short_ids(messages)]
    return forms, [*messages]


def _forms(source: str, variables: Mapping[str, Any]) -> TemplateForms:
    """Returns the forms of a template, given all other variables that it may read, made of JSON
    types. They are found out once for equal variables."""
    from infer.text.template_forms import TemplateForms, kept_forms

    own = {
        **variables,
        "tools": bool(variables.get("tools")),
        "documents": None,
        "add_generation_prompt": True,
    }
    key = json.dumps(own, sort_keys=True)
    return kept_forms(source, key) if len(key) <= _MOST_KEPT else TemplateForms(source, own)


def _are_texts(forms: TemplateForms, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all messages are texts without calls, of kinds that the template is known to read as
    they are. Such messages need not be fitted to the template, and none is left out."""
    return all(
        isinstance(each.get("content"), str)
        and "tool_calls" not in each
        and (each["role"], index > 0) in forms.texts
        for index, each in enumerate(messages)
    )


_MARK = "END_OF_FINAL_MESSAGE "  # the space at its end shows whether a template trims messages


def _marked(message: dict[str, Any]) -> str:
    """Appends a mark to the text of a message, and returns the text without it. Raises RequestError
    for a message that cannot be continued."""
    if "tool_calls" in message:
        raise RequestError("The final message has calls: only a message of text can be continued.")
    holder, key = message, "content"
    if isinstance(message["content"], list):
        if not message["content"]:
            raise RequestError("The final message has no text to be continued.")
        holder, key = message["content"][-1], "text"
    text: str = holder[key]
    holder[key] = text + _MARK
    return text


def _until_mark(rendered: str, final: str) -> str:
    """Returns the rendered text before the mark. Raises RequestError if a part of the final message
    is not in it."""
    before, mark, after = rendered.rpartition(_MARK.strip())
    if not mark or final.strip() not in before:
        raise RequestError(
            "The chat template leaves out a part of the final message, which therefore cannot be "
            "continued."
        )
    return before if after.startswith(" ") else before.rstrip()


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a plain copy of the messages as templates expect them, without keys that are None.

    Content is text, or a list of {"type": "text", "text"}; a message with tool calls needs none. As
    in transformers, reasoning that is given under one of its names is there under the others.
    Raises RequestError for anything else.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "Messages must be a list that is not empty, such as "
            '[{"role": "user", "content": "Hello"}].'
        )
    checked = []
    for index, message in enumerate(messages):
        where = f"Message {index}"
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise RequestError(f'{where} must be a dictionary {{"role", "content"}}, not {kind}.')
        plain = {k: v for k, v in _plain(dict(message), where).items() if v is not None}
        if not isinstance(plain.get("role"), str):
            raise RequestError(f'{where} needs a "role", such as "user", "assistant" or "system".')
        if "tool_calls" in plain:
            plain = check_calls(plain, where)
        if not ("content" in plain or "tool_calls" in plain):
            raise RequestError(f'{where} needs a "content", its text.')
        content = plain.get("content", "")
        if not isinstance(content, str) and not _is_text_parts(content):
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") not in (None, "text"):
                    raise RequestError(not_text(part["type"]))
            raise RequestError(
                f'The "content" of message {index} must be text or a list of '
                '{"type": "text", "text": ...}: only text is supported.'
            )
        reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
        checked.append(plain)
    return checked


def not_text(kind: object) -> str:
    """Returns the message of all APIs about content of another type than text."""
    return f"Content of the type {shown(kind)} is not supported: only text is."


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _plain(value: Any, what: str) -> Any:
    """Returns a copy that is made of JSON types, so that a template meets no object with methods of
    its own. Raises RequestError for a value that JSON cannot express."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} must be made of JSON types: {reason(error)}") from error
