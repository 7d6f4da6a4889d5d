"""Reads JSON schemas: their references are followed and their parts put together.

Some formats of calls write texts without quotes. The parser that reads a value there and the
grammar that it is held to both ask here which JSON types it may have, and what is read as which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

# The JSON types; integers are among the numbers.
KINDS = ("string", "number", "boolean", "null", "array", "object")

_TYPES = (*KINDS, "integer")

SPACE = " \t\r\n"
# Where a value may be a string or have this type, a text that matches, with SPACE around it, is
# read as this type. For objects and arrays only the beginning has to match. The expressions mean
# the same in Python and in Rust.
READ_AS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?(?:0|[1-9][0-9]*)",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
BEGINS_AS = {"array": "[", "object": "{"}

_MOST_WAYS = 256
_NOTES = ("title", "description", "default", "examples", "$comment")
# Keywords of each type, and how the values of two schemas for one value are combined.
_LARGER = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_SMALLER = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_ALL = ("pattern", "format", "multipleOf")  # keywords whose values become lists
_OWN: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ),
}

Way = dict[str, Any]


class SchemaError(Exception):
    """A part of a schema cannot be followed. The text says which part, and why."""


def ways_of(schema: object, root: Mapping[str, Any]) -> list[Way]:
    """Returns the ways in which a value can be valid: a list of schemas without `$ref`, `allOf`,
    `anyOf`, `oneOf` and `const`, each with one `type`. Some of them may be impossible. `pattern`
    and `format` are lists.

    Schemas of items and properties stay as they are; if two apply to one value, they become an
    `allOf`. That only one schema of a `oneOf` may be valid is not held to. root: the schema in
    which references are looked up. Raises SchemaError for a part that cannot be followed.
    """
    try:
        found = _ways(schema, root, ())
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    for way in found:
        if "enum" in way:
            way["enum"] = [each for each in way["enum"] if _fits(each, way)]
    return [way for way in found if way.get("enum") != []]


def loose_ways_of(schema: object, root: Mapping[str, Any]) -> list[Way]:
    """Returns `ways_of` a schema or, if the schema cannot be followed, the ways of a schema that
    allows everything."""
    try:
        return ways_of(schema, root) or _plain_ways({})
    except SchemaError:
        return _plain_ways({})


def argument_ways(parameters: Mapping[str, Any]) -> list[Way]:
    """Returns the ways in which the arguments of a function may be valid, all of them objects.
    Raises SchemaError for a part that cannot be followed."""
    ways = [way for way in ways_of(parameters, parameters) if way["type"] == "object"]
    if not ways:
        raise SchemaError("it allows no object")
    return ways


def loose_argument_ways(parameters: Mapping[str, Any]) -> list[Way]:
    """Returns `argument_ways` of a schema or, if the schema cannot be followed, the schema
    itself."""
    try:
        return argument_ways(parameters)
    except SchemaError:
        return [{"type": "object"} | {k: v for k, v in parameters.items() if k in _OWN["object"]}]


@dataclass(frozen=True)
class Argument:
    """The way in which an argument's value is read in formats that write texts without quotes.

    kinds: the JSON types that the value may have. apart: those of these types that a text must not
    look like, because not every value of them is valid.
    """

    kinds: frozenset[str]
    apart: frozenset[str]

    def may_be_other(self, text: str) -> bool:
        """Whether a text would be read as a value of another type of the argument."""
        text = text.strip(SPACE)
        return any(
            text.startswith(BEGINS_AS[kind])
            if kind in BEGINS_AS
            else re.fullmatch(READ_AS[kind], text)
            for kind in self.kinds - {"string"}
        )

    def of(self, kinds: frozenset[str]) -> Argument:
        """Returns how a value is read that is known to have one of these types."""
        known = self.kinds & kinds or kinds
        return Argument(known, known - {"string"})


def argument_of(parameters: Mapping[str, Any], name: str) -> Argument:
    """Returns how the value of the argument `name` of a function is read."""
    kinds: set[str] = set()
    free = set(KINDS)
    for way in loose_argument_ways(parameters):
        own = way.get("properties", {}).get(name, way.get("additionalProperties", True))
        ways = loose_ways_of(own, parameters)
        kinds |= {each["type"] for each in ways}
        any_of = {kind for kind in KINDS if {"type": kind} in ways}
        free &= any_of if "string" in any_of else any_of - {"array", "object"}
    return Argument(frozenset(kinds), frozenset(kinds - {"string"} - free))


def kind_of(value: object) -> str:
    """Returns the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def standalone(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a schema that has all it refers to in its own `$defs`, without
    descriptions."""
    names: dict[str, str] = {}
    found: dict[str, Any] = {}

    def moved(part: object) -> object:
        if isinstance(part, list):
            return [*map(moved, part)]
        if not isinstance(part, Mapping):
            return part
        copied: dict[str, Any] = {}
        for key, value in part.items():
            if key == "$ref":
                referred = target(value, root)
                if value not in names:
                    names[value] = name = str(len(names))
                    found[name] = moved(referred)
                copied[key] = f"#/$defs/{names[value]}"
            elif key in ("properties", "patternProperties") and isinstance(value, Mapping):
                copied[key] = {name: moved(each) for name, each in value.items()}
            elif key in ("const", "enum"):
                copied[key] = value
            elif key not in ("$defs", "definitions", *_NOTES):
                copied[key] = moved(value)
        return copied

    own = moved(schema)
    whole: dict[str, Any] = {"allOf": [own]} if not isinstance(own, dict) else own
    if found:
        whole["$defs"] = found
    return whole


def closed(schema: Any) -> Any:
    """Returns a copy of pydantic's schema whose objects allow no further properties: pydantic's
    models ignore properties that they do not know, so a model need not write any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: closed(each) for name, each in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        own.setdefault("additionalProperties", False)
    return own


def target(pointer: object, root: object) -> object:
    """Returns the target of a reference within a schema. Raises SchemaError for any other."""
    if not isinstance(pointer, str) or not re.match(r"#(/|$)", pointer):
        raise SchemaError(f"$ref {pointer!r} is not within the schema")
    found: Any = root
    for step in pointer.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise SchemaError(f"$ref {pointer!r} is to nothing")
    return found


def _ways(schema: object, root: Mapping[str, Any], within: tuple[str, ...]) -> list[Way]:
    """Returns `ways_of` before the values of `enum` are checked. within: the references that are
    being followed."""
    if schema is False:
        return []
    if schema is not True and not isinstance(schema, Mapping):
        raise SchemaError(f"{schema!r} is no schema")
    if schema is True:
        schema = {}
    found = _plain_ways(schema)
    if (pointer := schema.get("$ref")) is not None:
        if pointer in within:
            raise SchemaError(f"$ref {pointer!r} is to itself")
        found = _both(found, _ways(target(pointer, root), root, (*within, pointer)))
    for part in _list(schema, "allOf"):
        found = _both(found, _ways(part, root, within))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = (_ways(part, root, within) for part in _list(schema, key))
            found = _both(found, [way for part in parts for way in part])
    return found


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    parts = schema.get(key, ())
    if not isinstance(parts, list | tuple):
        raise SchemaError(f"{key} must be a list")
    return parts


def _plain_ways(schema: Mapping[str, Any]) -> list[Way]:
    """Returns the ways to be valid by the schema's own keywords, without its references and
    combinations."""
    declared = schema.get("type", KINDS)
    types = [declared] if isinstance(declared, str) else declared
    if not isinstance(types, list | tuple) or not all(each in _TYPES for each in types):
        raise SchemaError(f"type {declared!r} is none of JSON")
    values = [schema["const"]] if "const" in schema else None
    if "enum" in schema:
        listed = _list(schema, "enum")
        values = [each for each in listed if values is None or is_same(each, values[0])]
    found = []
    for kind in types:
        way: Way = {"type": kind}
        for key in _OWN.get(kind, ()):
            if key in schema:
                _check(key, schema[key])
                way[key] = [schema[key]] if key in _ALL else schema[key]
        # A list of schemas here is the form of drafts before 2020.
        if isinstance(way.get("items"), list):
            way["prefixItems"], way["items"] = way["items"], schema.get("additionalItems", True)
        if values is not None:
            way["enum"] = [each for each in values if _is_of(each, kind)]
        if way.get("enum") != []:
            found.append(way)
    return found


def _check(key: str, value: object) -> None:
    """Raises SchemaError if the value of a keyword is not of the type that this module expects."""
    kinds: tuple[type, ...] = (bool, Mapping, list)  # these are the forms of schemas
    if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        kinds = (int, float)
    elif key == "multipleOf":
        kinds = (int, float) if isinstance(value, int | float) and 0 < value < math.inf else ()
    elif key in (*_LARGER, *_SMALLER):
        kinds = (int,)
    elif key in ("pattern", "format"):
        kinds = (str,)
    elif key in ("properties", "patternProperties"):
        kinds = (Mapping,)
    elif key in ("required", "prefixItems"):
        kinds = (list,)
    names = value if key == "required" and isinstance(value, list) else ()
    if not isinstance(value, kinds) or not all(isinstance(each, str) for each in names):
        raise SchemaError(f"{key} must not be {value!r}")


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same in JSON, where 1 is 1.0 and not true."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _fits(value: Any, way: Way) -> bool:
    """Whether a text or a number is within the bounds of a way, but for `pattern` and `format`."""
    if way["type"] == "string":
        return bool(way.get("minLength", 0) <= len(value) <= way.get("maxLength", len(value)))
    if way["type"] in ("integer", "number"):
        return (
            way.get("minimum", value) <= value <= way.get("maximum", value)
            and way.get("exclusiveMinimum", -math.inf) < value
            and value < way.get("exclusiveMaximum", math.inf)
            and math.isfinite(value)
            and all(Fraction(value) % Fraction(each) == 0 for each in way.get("multipleOf", ()))
        )
    return True


def _is_of(value: object, kind: str) -> bool:
    own = kind_of(value)
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return own == kind or (own, kind) == ("integer", "number")


def _both(some: list[Way], others: list[Way]) -> list[Way]:
    """Returns the ways in which a value can be valid under both of two lists of ways."""
    numbers = {"integer", "number"}
    found = [
        _together(one, other)
        for one in some
        for other in others
        if one["type"] == other["type"] or {one["type"], other["type"]} == numbers
    ]
    if len(found) > _MOST_WAYS:
        raise SchemaError(f"it has more than {_MOST_WAYS} combinations of anyOf and oneOf")
    return [way for way in found if way.get("enum") != []]


def _together(one: Way, other: Way) -> Way:
    way = one | other
    if "integer" in (one["type"], other["type"]):
        way["type"] = "integer"
        if "enum" in way:
            way["enum"] = [each for each in way["enum"] if _is_of(each, "integer")]
    for key in one.keys() & other.keys():
        if key in _LARGER:
            way[key] = max(one[key], other[key])
        elif key in _SMALLER:
            way[key] = min(one[key], other[key])
        elif key in _ALL:
            way[key] = [*one[key], *other[key]]
        elif key == "enum":
            way[key] = [a for a in one[key] if any(is_same(a, b) for b in other[key])]
        elif key == "required":
            way[key] = [*dict.fromkeys((*one[key], *other[key]))]
        elif key in ("items", "additionalProperties"):
            way[key] = _all_of(one[key], other[key])
        elif key in ("prefixItems", "patternProperties"):
            raise SchemaError(f"{key} is in two parts of a schema")
    if "properties" in one or "properties" in other:
        a, b = one.get("properties", {}), other.get("properties", {})
        way["properties"] = {
            name: _all_of(
                a.get(name, one.get("additionalProperties", True)),
                b.get(name, other.get("additionalProperties", True)),
            )
            for name in {**a, **b}
        }
    return way


def _all_of(one: object, other: object) -> object:
    if one is True or one == other:
        return other
    if other is True:
        return one
    return False if False in (one, other) else {"allOf": [one, other]}
