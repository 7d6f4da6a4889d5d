"""Tools whose input is a text, as /v1/responses has them, beside functions: for a model, they are
functions with a text as their only argument."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from msgspec import Struct

from infer.engine.constraint import schema_error

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The characters at the beginning of a JSON string that are whole: both escapes of a surrogate pair,
# never one of them.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


class InputFormat(Struct, kw_only=True, omit_defaults=True):
    """The form that the input of a custom tool must have. type: text or grammar. syntax: the
    language of the grammar, lark or regex. definition: the grammar's source."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None

    @property
    def pattern(self) -> str | None:
        """The regular expression in which a JSON schema expresses this form; None if the form is no
        grammar, or one that no schema can express."""
        if self.syntax != "regex" or self.definition is None:
            return None
        pattern = f"^(?:{self.definition})$"
        return pattern if _can_be_followed(pattern) else None

    @property
    def is_held(self) -> bool:
        """Whether the model's inputs are forced into this form. Grammars in Lark are not enforced:
        they say nothing of the quotes of JSON, in which most models write an input."""
        return self.type == "text" or self.pattern is not None


@lru_cache(maxsize=64)
def _can_be_followed(pattern: str) -> bool:
    return schema_error({"type": "string", "pattern": pattern}) is None


def function_of(name: str, description: str | None, format: InputFormat) -> dict[str, Any]:
    """Describes a custom tool as a function in the form of chat completions. The function's only
    argument is the input."""
    text: dict[str, Any] = {"type": "string", "description": "The input, as it is."}
    if format.definition is not None:
        text["description"] += f" It matches this grammar ({format.syntax}):\n{format.definition}"
    if (pattern := format.pattern) is not None:
        text["pattern"] = pattern
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        },
        "strict": pattern is not None,
    }


def arguments_of(text: str) -> str:
    """Returns the JSON arguments of the function that stand for an input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the input that a whole call's arguments hold; the arguments' own text if the model
    has not written the expected JSON."""
    try:
        text = json.loads(arguments, strict=False)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text.encode(errors="replace").decode() if isinstance(text, str) else arguments


class InputReader:
    """Reads the input of a custom tool while pieces of the function's JSON arguments arrive."""

    def __init__(self) -> None:
        self._arguments, self._read, self.text = "", 0, ""

    def add(self, piece: str) -> str:
        """Takes a piece of the arguments. Returns the characters that `text` has gained."""
        self._arguments += piece
        if not self._read and (begin := _BEGIN.match(self._arguments)):
            self._read = begin.end()
        if not self._read:
            return ""
        new = _CHARACTERS.match(self._arguments, self._read)
        assert new is not None
        self._read = new.end()
        try:
            text: str = json.loads(f'"{new[0]}"', strict=False)
        except ValueError:  # an escape that JSON does not have
            return ""
        self.text += text
        return text

    def end(self) -> str:
        """Takes note that the arguments are whole. Returns the characters that `text` has
        gained."""
        whole = input_of(self._arguments)
        new = whole[len(self.text) :]
        self.text = whole
        return new
