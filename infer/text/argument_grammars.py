"""Grammars of arguments that are not written as JSON, in llguidance's dialect of Lark.

What a schema says is held or, of a strict function, refused by name. Of another function, what
cannot be held is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from keyword import iskeyword, kwlist
from typing import Any, Protocol

from infer.text.schemas import (
    BEGINS_AS,
    READ_AS,
    SchemaError,
    Way,
    argument_of,
    argument_ways,
    loose_argument_ways,
    loose_ways_of,
    standalone,
    ways_of,
)
from infer.text.text_schemas import ANY, NOTHING, exactly, patterns_of
from infer.text.tool_formats import DSML_TAGS, GLM_TAGS, Tags, value_followers

_SPACES = r"[ \t\r\n]*"
_SCALARS = {  # the form of each type's values in JSON
    "null": "null",
    "boolean": "true|false",
    "integer": READ_AS["integer"],
    "number": READ_AS["number"],
}


class Rules(Protocol):
    """A grammar that is being written. Its methods add rules to it, and return expressions in
    Lark."""

    def rule(self, body: str) -> str:
        """Adds a rule and returns its name."""

    def recursive(self, write: Callable[[str], str]) -> str:
        """Adds a rule that may refer to itself, and returns its name. write: makes the rule's body,
        given the name."""

    def terminal(self, body: str) -> str:
        """Adds a terminal, which is a regular expression, and returns its name."""

    def json(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule for the JSON values that are valid under a schema, and returns its name."""

    def sequence(self, text: str) -> str:
        """Returns an expression that matches exactly this text."""

    def before(self, text: str, end: str, *, loose: bool) -> str:
        """Returns an expression for a text that the terminal `text` matches, with `end` behind
        it."""


def escaped(pattern: str) -> str:
    """Returns a regular expression in the form in which it stands between slashes."""
    found = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return found.replace("\n", "\\n")


class Arguments:
    """The grammar of a function's arguments. Methods raise SchemaError if the function is strict
    and its schema cannot be followed."""

    def __init__(
        self,
        lark: Rules,
        parameters: Mapping[str, Any],
        error_of: Callable[[Mapping[str, Any]], str | None],
        *,
        strict: bool,
    ) -> None:
        """parameters: the function's schema. error_of: returns the reason why a JSON schema cannot
        be followed, or None."""
        self._lark, self._root, self._strict = lark, parameters, strict
        self._error_of = error_of
        self._known: dict[str, str] = {}  # the rules of Gemma's values, by the values' schemas

    def python(self) -> str:
        """Returns the grammar of arguments as `a=1, b="x"`."""
        return self._any_of(map(self._python, self._argument_ways()))

    def xml(self, tags: Tags) -> str:
        """Returns the grammar of arguments as tags, one for each parameter, and of the end of the
        call."""
        return self._any_of(self._xml(tags, way) for way in self._argument_ways())

    def gemma(self, quote: str) -> str:
        """Returns the grammar of arguments as `a:1,b:<quote>x<quote>`."""
        ways = self._argument_ways()
        return self._any_of(self._gemma_entries(quote, way, nested=False) for way in ways)

    # Schemas

    def _any_of(self, ways: Iterable[str]) -> str:
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _argument_ways(self) -> list[Way]:
        return (argument_ways if self._strict else loose_argument_ways)(self._root)

    def _ways(self, schema: object) -> list[Way]:
        ways = (ways_of if self._strict else loose_ways_of)(schema, self._root)
        if not ways:
            raise SchemaError("no value is valid for a part of it")
        return ways

    def _unheld(self, what: str) -> None:
        """Takes note of a part of the schema that cannot be followed. Raises SchemaError if the
        function is strict."""
        if self._strict:
            raise SchemaError(what)

    def _properties(
        self, way: Way, is_name: Callable[[str], bool], *, nested: bool = False
    ) -> tuple[list[tuple[str, object, bool]], object]:
        """Returns the members of an object, each as its name, its schema and whether it is
        required; and the schema of all other members, False if there may be none. If arguments are
        named and the schema is silent about others, there are none, because models make them up.
        is_name: whether the format can write a name."""
        named = dict(way.get("properties", {}))
        others = way.get("additionalProperties", nested or not named)
        required = way.get("required", ())
        for name in required:
            named.setdefault(name, others)
        if "patternProperties" in way:
            self._unheld("patternProperties")
        if way.get("minProperties", 0) > len(required):
            self._unheld("minProperties")
        if way.get("maxProperties", len(named)) < len(named) or (
            others is not False and "maxProperties" in way
        ):
            self._unheld("maxProperties")
        if "enum" in way:
            self._unheld("enum or const of an object")
        found = []
        for name, schema in named.items():
            if schema is not False and is_name(name):
                found.append((name, schema, name in required))
            elif schema is not False:
                self._unheld(f"the name {name!r} of a property")
            elif name in required:
                self._unheld(f"{name!r} is required and not allowed")
        return found, others

    def _other_name(self, named: Iterable[tuple[str, object, bool]]) -> str:
        """Returns a terminal for a name that is not among these."""
        taken = "|".join(exactly(name) for name, _, _ in named)
        shape = "/[A-Za-z_][A-Za-z0-9_]*/"
        return self._lark.terminal(f"{shape} & ~/{escaped(taken)}/" if taken else shape)

    def _json(self, schema: object, kinds: Collection[str] | None = None) -> str:
        """Returns a rule for a value in JSON. kinds: the types that the value may have."""
        try:
            own = standalone(schema, self._root)
        except SchemaError:
            if self._strict:
                raise
            own = {}
        if kinds is not None:
            definitions = own.pop("$defs", {})
            own = {"allOf": [own, {"type": sorted(kinds)}], "$defs": definitions}
        if (error := self._error_of(own)) is not None:
            self._unheld(error)
            own = {} if kinds is None else {"type": sorted(kinds)}
        if "x-guidance" in self._root:
            own["x-guidance"] = self._root["x-guidance"]
        return self._lark.json(own)

    def _text(self, ways: Iterable[Way], without: str, apart: Iterable[str] = ()) -> str:
        """Returns the body of a terminal for texts that are valid in one of these ways. without: a
        regular expression that no such text may contain. apart: types as whose values no such text
        may be read."""
        shape = [f"/{ANY}/", f"~{self._begins_with(f'{ANY}(?:{without})')}"]
        for kind in sorted(apart):
            if kind in BEGINS_AS:
                shape.append(f"~{self._begins_with(_SPACES + exactly(BEGINS_AS[kind]))}")
            else:
                shape.append(f"~/{escaped(f'{_SPACES}(?:{READ_AS[kind]}){_SPACES}')}/")
        found: dict[str, None] = {}
        for way in ways:
            try:
                patterns = patterns_of(way)
                if len(patterns) > 1 and (error := self._error_of(_texts(patterns))) is not None:
                    raise SchemaError(error)
            except SchemaError as error:
                self._unheld(str(error))
                patterns = []
            found[" & ".join([*(f"/{escaped(each)}/" for each in patterns), *shape])] = None
        return " | ".join(f"({each})" for each in found)

    def _begins_with(self, pattern: str) -> str:
        """Returns a terminal that matches everything that begins with a match of a regular
        expression. The rest may be any bytes, not only text: so llguidance sees at once where the
        terminal's complement can match no more."""
        nothing = self._lark.terminal(f"/{NOTHING}/")
        anything = self._lark.terminal(f"~{nothing}")
        return self._lark.terminal(f"/{escaped(pattern)}/ {anything}")

    # Formats

    def _separated(
        self, entries: Sequence[tuple[str, bool]], separator: str, other: str = ""
    ) -> str:
        """Returns a grammar of entries with separators between them. entries: the rule of each
        entry, and whether it must come. All entries that must come stand first, then any of the
        others, both in this order, then any number of `other`."""
        between = self._lark.sequence(separator)
        more = f"({between} {other})*" if other else ""
        needed = [name for name, is_needed in entries if is_needed]
        others = [name for name, is_needed in entries if not is_needed]
        tails = [more]  # what may follow an entry
        for name in reversed(others):
            tails.append(self._lark.rule(f"({between} {name})? {tails[-1]}"))
        if needed:
            return f" {between} ".join(needed) + f" {tails[-1]}"
        firsts = [f"{name} {tails[-2 - index]}" for index, name in enumerate(others)]
        firsts += [f"{other} {more}"] if other else []
        return f"({' | '.join(firsts)})?" if firsts else '""'

    def _python(self, way: Way) -> str:
        named, others = self._properties(way, lambda it: it.isidentifier() and not iskeyword(it))
        entries = [
            (self._lark.rule(f"{self._lark.sequence(f'{name}=')} {self._json(schema)}"), needed)
            for name, schema, needed in named
        ]
        other = ""
        if others is not False:
            name = self._other_name([*named, *((each, None, False) for each in kwlist)])
            other = self._lark.rule(f'{name} "=" {self._json(others)}')
        return self._separated(entries, ", ", other)

    def _xml(self, tags: Tags, way: Way) -> str:
        """Returns a grammar of the parameters as tags, in the order of the schema."""
        lark = self._lark
        named, others = self._properties(way, partial(_is_xml_name, tags))
        more, may_end = "", True  # more: the text after the beginning of the next parameter's tag
        if others is not False:
            name = self._other_name(named)
            more = lark.recursive(lambda own: self._xml_parameter(tags, name, "", others, own))
        for name, schema, needed in reversed(named):
            key = lark.sequence(name)
            written = self._xml_parameter(tags, key, name, schema, more, may_end)
            more = lark.rule(written if needed or not more else f"{written} | {more}")
            may_end = may_end and not needed
        ways = [f"{lark.sequence(tags.parameter)} {more}"] if more else []
        ways += [lark.sequence(tags.call_end)] if may_end else []
        return self._any_of(ways)

    def _xml_parameter(
        self, tags: Tags, key: str, name: str, schema: object, more: str, may_end: bool = True
    ) -> str:
        """Returns the grammar of a parameter, from behind the beginning of its tag up to what
        follows it: the beginning of the next parameter and `more`, if `more` is not empty, or the
        end of the call, if `may_end`."""
        lark = self._lark
        newline = "\n" if tags.newlines else ""
        end = f"{newline}{tags.value_end}\n"
        behind = [(tags.parameter, more)] if more else []
        behind += [(tags.call_end, "")] if may_end else []
        followers = "|".join(map(exactly, value_followers(tags)))
        without = f"{exactly(tags.value_end)}{_SPACES}(?:{followers})"
        ways = self._ways(schema)
        texts = [way for way in ways if way["type"] == "string"]
        argument = argument_of(self._root, name)

        def parameter(values: Iterable[str], attributes: str = "") -> str:
            after = "\n<arg_value>" if tags is GLM_TAGS else newline
            begin = lark.sequence(f"{attributes}{tags.key_end}{after}")
            return f"{key} {begin} {self._any_of(values)}"

        def in_json(kinds: Collection[str] | None = None) -> Iterator[str]:
            value = f"{self._json(schema, kinds)} {lark.sequence(end)}"
            yield from (f"{value} {lark.sequence(tag)} {after}" for tag, after in behind)

        def as_text(shape: str) -> Iterator[str]:
            terminal, loose = lark.terminal(shape), {"type": "string"} in ways
            for tag, after in behind:
                yield f"{lark.before(terminal, end + tag, loose=loose)} {after}"

        kinds = {way["type"] for way in ways}
        if tags is DSML_TAGS:
            written = []
            if texts:
                shape = self._text(texts, without)
                written.append(parameter(as_text(shape), '" string="true"'))
            if kinds := kinds - {"string"}:
                written.append(parameter(in_json(kinds if texts else None), '" string="false"'))
            return self._any_of(written)
        if "string" not in argument.kinds:
            return parameter(in_json())
        shapes = [self._text(texts, without, argument.apart)] if texts else []
        shapes += [self._scalar(way) for way in ways if way["type"] in _SCALARS]
        values = [*as_text(" | ".join(shapes))] if shapes else []
        if nested := kinds & argument.apart & BEGINS_AS.keys():
            values += in_json(nested)
        return parameter(values)

    def _scalar(self, way: Way) -> str:
        """Returns the body of a terminal for the values of one type, which stand where other values
        are texts. It is one terminal, because llguidance goes on with the longest alone if several
        match."""
        if "enum" in way:
            return f"/{escaped('|'.join(exactly(json.dumps(each)) for each in way['enum']))}/"
        for key in way.keys() - {"type"}:
            self._unheld(f"{key} of what may also be text")
        return f"/{escaped(_SCALARS[way['type']])}/"

    def _gemma(self, quote: str, schema: object) -> str:
        """Returns a rule for a value in Gemma's format, which may contain other values."""
        known = json.dumps(schema, sort_keys=True)
        if known not in self._known:

            def write(name: str) -> str:
                self._known[known] = name
                return self._gemma_value(quote, schema)

            self._lark.recursive(write)
        return self._known[known]

    def _gemma_value(self, quote: str, schema: object) -> str:
        ways = self._ways(schema)
        written = []
        if texts := [way for way in ways if way["type"] == "string"]:
            terminal = self._lark.terminal(self._text(texts, exactly(quote)))
            loose = {"type": "string"} in texts
            text = self._lark.before(terminal, quote, loose=loose)
            written.append(f"{self._lark.sequence(quote)} {text}")
        for way in ways:
            if way["type"] == "array":
                written.append(f'"[" {self._gemma_items(quote, way)} "]"')
            elif way["type"] == "object":
                written.append(f'"{{" {self._gemma_entries(quote, way, nested=True)} "}}"')
        kinds = {way["type"] for way in ways}
        if scalars := kinds & _SCALARS.keys():
            written.append(self._json(schema, None if scalars == kinds else scalars))
        return self._any_of(written)

    def _gemma_items(self, quote: str, way: Way) -> str:
        """Returns a rule for the items of a list in Gemma's format, with commas between them."""
        if "enum" in way:
            self._unheld("enum or const of a list")
        items = way.get("items", True)
        item = "" if items is False else self._gemma(quote, items)
        first = [self._gemma(quote, each) for each in way.get("prefixItems", ())]
        if item and not first:
            first = [item]
        count, least, most = len(first), way.get("minItems", 0), way.get("maxItems")
        if not item:
            most = count if most is None else min(count, most)
        if most is not None and least > most:
            self._unheld(f"minItems {least} of at most {most} items")
            least = most
        tail = ""  # the items behind the first
        if most is None or most > count:
            bounds = f"{max(0, least - count)},{'' if most is None else most - count}"
            tail = f'("," {item}){{{bounds}}}'
        for index in reversed(range(count if most is None else min(count, most))):
            comma = '"," ' if index else ""
            maybe = "?" if index >= least else ""
            tail = self._lark.rule(f"({comma}{first[index]} {tail}){maybe}")
        return tail or '""'

    def _gemma_entries(self, quote: str, way: Way, *, nested: bool) -> str:
        named, others = self._properties(way, _is_gemma_name, nested=nested)
        entries = [
            (
                self._lark.rule(f"{self._lark.sequence(f'{name}:')} {self._gemma(quote, own)}"),
                needed,
            )
            for name, own, needed in named
        ]
        other = ""
        if others is not False:
            other = self._lark.rule(f'{self._other_name(named)} ":" {self._gemma(quote, others)}')
        return self._separated(entries, ",", other)


def _texts(patterns: Iterable[str]) -> dict[str, Any]:
    """Returns a JSON schema of the texts that match all of these patterns. It serves to find out
    whether there is any such text."""
    return {"type": "string", "allOf": [{"pattern": f"^(?:{each})$"} for each in patterns]}


def _is_xml_name(tags: Tags, name: str) -> bool:
    """Whether the parser of these tags reads a parameter's name back unchanged."""
    return name == name.strip() != "" and tags.key_end not in name and '"' not in name


def _is_gemma_name(name: str) -> bool:
    return re.fullmatch(r"[^\s:,{}\[\]<\"]([^:,{}\[\]<\"\n]*[^\s:,{}\[\]<\"])?", name) is not None
