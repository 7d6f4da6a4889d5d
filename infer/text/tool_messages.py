"""Messages with calls and their results, as chat templates expect them."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.boundaries import shown
from infer.kernels.errors import RequestError

_ID = string.digits + string.ascii_letters

# The description of tools for templates that know none.
_WORDS = """# Tools

You may call functions to answer. They are described within <tools></tools>, one a line:
<tools>
{tools}
</tools>

To call one, write:
{call}"""


def check_calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a copy of the message, without an empty list of calls. Raises RequestError for
    malformed calls."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise RequestError(f"{where}: tool_calls must be a list, not {shown(calls)}.")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{where}: a call must be {{"id", "type": "function", "function": {{"name", '
                f'"arguments"}}}}, not {shown(call)}.'
            )
    return dict(message)


def with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Returns a copy of a message whose calls have arguments as JSON text, or as objects. APIs have
    text; transformers hands objects to templates. Text of a model that is no JSON object stays
    text."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        arguments = call.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not as_text and isinstance(arguments, str):
            try:
                decoded = json.loads(arguments)
            except (ValueError, RecursionError):
                decoded = None
            arguments = decoded if isinstance(decoded, dict) else arguments
        return {**call, "arguments": arguments}

    return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the messages in which ids of calls are nine letters and digits, as
    Mistral's templates demand."""

    def short(call_id: object) -> object:
        if not isinstance(call_id, str) or re.fullmatch("[0-9A-Za-z]{9}", call_id):
            return call_id
        digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
        return "".join(_ID[byte % len(_ID)] for byte in digest[:9])

    changed = []
    for message in messages:
        own = dict(message)
        if "tool_call_id" in own:
            own["tool_call_id"] = short(own["tool_call_id"])
        if "tool_calls" in own:
            own["tool_calls"] = [
                {**call, "id": short(call["id"])} if "id" in call else call
                for call in own["tool_calls"]
            ]
        changed.append(own)
    return changed


def with_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    role: str,
    call: str,
) -> list[dict[str, Any]]:
    """Returns copies of the messages with a description of the tools, for templates that write
    none. role: "system" to put it into a first message of the system, "user" to put it into the
    user's first message. call: an example of a call."""
    written = [dict(each) for each in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _WORDS.format(tools=lines, call=call)
    begin = written[:1] if role == "system" else written
    own = next((each for each in begin if each["role"] == role), None)
    if own is None:
        written.insert(0, {"role": role, "content": words})
    else:
        parts = [words, joined(own.get("content", ""))]
        own["content"] = "\n\n".join(reversed(parts) if role == "system" else parts)
    return written


def in_words(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields copies of the messages with calls and results as text, in the form of Hermes and Qwen,
    for templates that know neither."""
    results: list[str] = []
    for message in messages:
        text = joined(message.get("content", ""))
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:  # results of several calls are one message: roles alternate
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if "tool_calls" not in message:
            yield dict(message)
            continue
        own = with_arguments(message, as_text=False)
        calls = []
        for call in own.pop("tool_calls"):
            function = call.get("function", call)
            known = {"name": function["name"], "arguments": function["arguments"]}
            calls.append(f"<tool_call>\n{json.dumps(known, ensure_ascii=False)}\n</tool_call>")
        yield own | {"content": "\n".join(part for part in (text, *calls) if part)}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a content. Parts are joined by line ends, as vLLM and llama.cpp do."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
