"""Functions that an answer may call, in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from infer.boundaries import reason, shown
from infer.kernels.errors import RequestError
from infer.text.functions import PythonFunction

# {"type": "function", "function": {"name", "description", "parameters": a JSON schema, "strict"}},
# or a Python function, which its signature and docstring describe.
Tool = Mapping[str, Any] | Callable[..., Any]
# "none", "auto", "required", or a tool's name, also as {"type": "function", "function": {"name"}}
ToolChoice = str | Mapping[str, Any]

MAX_TOOLS = 1024


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call at an index. The first piece of a call has the id and the name; later
    pieces have parts of the arguments, which together are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolCall:
    """A call of a function. arguments: the JSON that the model has written, which is an object
    unless the model made a mistake or a stop string ended it. id: a random one; calls that differ
    only in their id are equal."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        # No field of the dataclass, since the model has not written it.
        self._function: PythonFunction | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the function, which pickle may not know.
        return type(self), (self.id, self.name, self.arguments)

    def parsed(self) -> dict[str, Any]:
        """Returns the arguments: for a Python function that was given as a tool as the types that
        it takes (but not in a copy of this object), for other functions as JSON has them. Raises
        ValueError if they are no JSON object, or if the Python function does not take them."""
        try:
            value = json.loads(self.arguments)
            # An escape may be half of a surrogate pair, which cannot be encoded as UTF-8.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        except RecursionError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are no JSON object")
        return value if self._function is None else self._function.read(value)


def add_deltas(
    calls: list[ToolCall],
    deltas: Sequence[ToolCallDelta],
    functions: Mapping[str, PythonFunction] | None = None,
) -> None:
    """Appends pieces of calls to the calls that they belong to. functions: the tools that are
    Python functions, by name."""
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name))
            calls[-1]._function = (functions or {}).get(delta.name)
        calls[delta.index].arguments += delta.arguments


class ToolOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.stream` about the functions that an answer may call."""

    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool


@dataclass(frozen=True)
class Tools:
    """The options about tools, checked. required: whether the answer must have a call. parallel:
    whether it may have several.

    offered: the tools that the prompt describes, or None for no tools: with the choice "none"
    nothing can be called, and what looks like a call is text. python: the Python functions among
    them, by name.
    """

    offered: list[dict[str, Any]] | None
    required: bool = False
    named: str | None = None  # the only function that may be called
    parallel: bool = True
    python: Mapping[str, PythonFunction] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of the functions' arguments by name; None without tools."""
        if self.offered is None:
            return None
        functions = (tool["function"] for tool in self.offered)
        return {each["name"]: each.get("parameters") or {} for each in functions}


def check_tools(
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
) -> Tools:
    """Checks the options about tools. Raises RequestError, which says where the mistake is."""
    checked = _checked(tools or ())
    offered = [tool for tool, _ in checked.values()]
    if not isinstance(parallel_tool_calls, bool):
        raise RequestError(
            f"parallel_tool_calls must be true or false, not {shown(parallel_tool_calls)}."
        )
    named = None if tool_choice in ("none", "auto", "required") else _named(tool_choice)
    if named is not None and named not in checked:
        raise RequestError(
            f"tool_choice names {shown(named)}, which is not among the tools. It can be one of "
            'their names, "none", "auto" or "required".'
        )
    if tool_choice == "required" and not offered:
        raise RequestError("tool_choice is required, and there are no tools.")
    if tool_choice == "none" or not offered:
        return Tools(None)
    required = tool_choice == "required" or named is not None
    python = {name: function for name, (_, function) in checked.items() if function is not None}
    return Tools(offered, required, named, parallel_tool_calls, python)


def _named(choice: object) -> str:
    """Returns the name of the tool that has to be called. Raises RequestError for a choice that
    names none."""
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function") if choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required", the name of a tool, or {"type": '
            f'"function", "function": {{"name": ...}}}}, not {shown(choice)}.'
        )
    return name


def _checked(tools: object) -> dict[str, tuple[dict[str, Any], PythonFunction | None]]:
    """Returns the tools by their names, each with the Python function that it was given as, or
    None. Raises RequestError for tools that are malformed."""
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list, not {shown(tools)}.")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools must be at most {MAX_TOOLS}, not {len(tools)}.")
    checked: dict[str, tuple[dict[str, Any], PythonFunction | None]] = {}
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", None
        if callable(tool) and not isinstance(tool, Mapping):
            try:
                function = PythonFunction.of(tool)
            except RequestError as error:
                raise RequestError(f"{where}: {error}") from error
        plain = _checked_tool(where, tool if function is None else function.tool)
        name = plain["function"]["name"]
        if name in checked:
            raise RequestError(f"tools[{index}].function.name is {name} again.")
        checked[name] = plain, function
    return checked


def _checked_tool(where: str, tool: object) -> dict[str, Any]:
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
    given.setdefault("description", "")  # templates expect a description
    try:
        plain: dict[str, Any] = json.loads(json.dumps({"type": "function", "function": given}))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} must be made of JSON types: {reason(error)}") from error
    return plain
