"""Functions that an answer may call, in OpenAI's form."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from infer.foreign import reason, shown
from infer.kernels.errors import RequestError

# {"type": "function", "function": {"name", "description", "parameters": a JSON schema, "strict"}},
# or a Python function, which its signature and docstring describe.
Tool = Mapping[str, Any] | Callable[..., Any]
# "none", "auto", "required", or {"type": "function", "function": {"name"}}
ToolChoice = str | Mapping[str, Any]

MAX_TOOLS = 1024


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call at an index. Its first piece has id and name, those that follow only have
    a piece of the arguments, which together are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolCall:
    """arguments: JSON, as the model wrote it: an object, unless it made a mistake or a stop string
    ended it. id: a random one. Calls that differ in it alone are equal."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError where they are no JSON object."""
        try:
            value = json.loads(self.arguments)
            # An escape may be half of a pair, which is no text that can be sent on.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        except RecursionError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are no JSON object")
        return value


def add_deltas(calls: list[ToolCall], deltas: Sequence[ToolCallDelta]) -> None:
    """Put pieces of calls where they belong."""
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name))
        calls[delta.index].arguments += delta.arguments


class ToolOptions(TypedDict, total=False):
    """What a chat's answer may call; those of `LLM.stream`."""

    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool


@dataclass(frozen=True)
class Tools:
    """ToolOptions that have been checked. required: at least one call. parallel: several may come.

    offered: those that the prompt describes, None for none: with the choice "none" nothing can be
    called, nor is a call that comes all the same anything but text.
    """

    offered: list[dict[str, Any]] | None
    required: bool = False
    named: str | None = None  # the only function that may be called
    parallel: bool = True

    @property
    def functions(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of the arguments by name."""
        if self.offered is None:
            return None
        functions = (tool["function"] for tool in self.offered)
        return {each["name"]: each.get("parameters") or {} for each in functions}


def check_tools(
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
) -> Tools:
    """Raises RequestError, which says where the mistake is."""
    offered = _checked(tools or ())
    names = [tool["function"]["name"] for tool in offered]
    if not isinstance(parallel_tool_calls, bool):
        raise RequestError(
            f"parallel_tool_calls must be true or false, not {shown(parallel_tool_calls)}."
        )
    named = None
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        if tool_choice.get("type") != "function" or not isinstance(named, str):
            raise RequestError(
                'tool_choice must be "none", "auto", "required" or {"type": "function", '
                f'"function": {{"name": ...}}}}, not {shown(tool_choice)}.'
            )
        if named not in names:
            raise RequestError(f"tool_choice names {shown(named)}, which is not among the tools.")
    elif tool_choice not in ("none", "auto", "required"):
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or name a function, not '
            f"{shown(tool_choice)}."
        )
    if tool_choice == "required" and not offered:
        raise RequestError("tool_choice is required, and there are no tools.")
    if tool_choice == "none" or not offered:
        return Tools(None)
    required = tool_choice == "required" or named is not None
    return Tools(offered, required, named, parallel_tool_calls)


def _checked(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list, not {shown(tools)}.")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools must be at most {MAX_TOOLS}, not {len(tools)}.")
    checked: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        plain = _checked_tool(f"tools[{index}]", tool)
        name = plain["function"]["name"]
        if name in checked:
            raise RequestError(f"tools[{index}].function.name is {name} again.")
        checked[name] = plain
    return list(checked.values())


def _checked_tool(where: str, tool: object) -> dict[str, Any]:
    if callable(tool) and not isinstance(tool, Mapping):
        tool = _described(where, tool)
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{...}}}}, not {shown(tool)}.'
        )
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must describe the function, not {shown(function)}.")
    given = {key: value for key, value in function.items() if value is not None}
    name = given.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,128}", name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits or _.:/-, not {shown(name)}."
        )
    for key, kind, what in (
        ("description", str, "text"),
        ("parameters", Mapping, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if key in given and not isinstance(given[key], kind):
            raise RequestError(f"{where}.function.{key} must be {what}, not {shown(given[key])}.")
    schema = given.setdefault("parameters", {"type": "object", "properties": {}})
    if schema and schema.get("type", "object") != "object":
        raise RequestError(
            f'{where}.function.parameters must be of the type "object", not '
            f"{shown(schema['type'])}."
        )
    if not isinstance(schema.get("properties", {}), Mapping):
        raise RequestError(f"{where}.function.parameters.properties must be an object.")
    given.setdefault("description", "")  # templates count on it
    try:
        plain: dict[str, Any] = json.loads(json.dumps({"type": "function", "function": given}))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} must be made of JSON types: {reason(error)}") from error
    return plain


def _described(where: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A Python function as a tool. Raises RequestError for a parameter whose type is not known."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise RequestError(f"{where}: {name} cannot be described: {reason(error)}") from error
    properties, required = {}, []
    for each in parameters:
        schema = _schema(hints.get(each.name))
        if schema is None or each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise RequestError(
                f"{where}: the parameter {each.name} of {name} must be annotated with str, int, "
                "float, bool, list, dict, Literal, or these or None. Or give the tool as a "
                "dictionary."
            )
        properties[each.name] = schema
        if each.default is each.empty:
            required.append(each.name)
    described = {
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": described}


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}


def _schema(hint: Any) -> dict[str, Any] | None:
    """The JSON schema of a type; None if there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _TYPES or origin is dict:
        return {"type": _TYPES[dict if origin is dict else hint]}
    if hint is type(None):
        return {"type": "null"}
    if hint is list:
        return {"type": "array"}
    if origin is Literal:
        return {"enum": list(arguments)}
    schemas = [_schema(each) for each in arguments]
    if None in schemas:
        return None
    if origin is list:
        return {"type": "array", "items": schemas[0]}
    if origin in (Union, types.UnionType):
        return {"anyOf": schemas}
    return None
