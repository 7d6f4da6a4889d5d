"""Python functions as tools: JSON schemas from signatures and docstrings, and arguments of calls
converted to the types that the functions take."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time
from enum import Enum
from functools import partial
from itertools import chain, count
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from infer.boundaries import reason, shown
from infer.kernels.errors import RequestError
from infer.text.docstrings import read_docstring
from infer.text.schemas import closed, is_same, kind_of

_KNOWN = (
    "str, int, float, bool, list, dict, tuple, date, time, datetime, Any, an Enum, a dataclass, "
    "Literal, these or None, or what pydantic 2 knows, if it is installed"
)
# The modules whose annotations and metadata pydantic reads.
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types")
_LISTS = (list, Sequence, Collection, Iterable)
_OBJECTS = (dict, Mapping, MutableMapping)


class WrongValueError(ValueError):
    """A value that an argument cannot have. place: where in the arguments the value stands, as
    ".cities[0]"."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place} {what}")
        self.what, self.place = what, place


@dataclass(frozen=True)
class ValueType:
    """The type of an argument. schema: its JSON schema. read: turns a JSON value into a value of
    this type, or raises WrongValueError."""

    schema: dict[str, Any]
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class PythonFunction:
    """A function that an answer may call. arguments: the type of all arguments together, by their
    names."""

    name: str
    description: str
    arguments: ValueType

    @classmethod
    def of(cls, function: Callable[..., Any]) -> PythonFunction:
        """Describes a function by its signature and its docstring. Raises RequestError if that is
        not possible."""
        name, docstring = _named(function)
        description, texts = read_docstring(docstring)
        annotations = _Annotations()
        arguments = annotations.of(function, name, texts)
        if annotations.definitions:
            arguments.schema["$defs"] = annotations.definitions
        return cls(name, description, arguments)

    @property
    def tool(self) -> dict[str, Any]:
        """The function as a tool, in OpenAI's form."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": described | {"parameters": self.arguments.schema}}

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call as the types that the function takes. Raises ValueError
        for arguments that it does not take."""
        try:
            read: dict[str, Any] = self.arguments.read(arguments)
        except WrongValueError as wrong:
            raise ValueError(f"{self.name}{wrong.place} {wrong.what}.") from wrong
        return read


def _named(function: Any) -> tuple[str, str]:
    """Returns the name and the docstring of a function, a class, or an object that can be
    called."""
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function) or ""
    if not hasattr(function, "__name__"):
        called = type(function).__call__.__doc__
        docstring = inspect.cleandoc(called) if called else docstring
    if is_dataclass(function) and docstring.startswith(f"{name}("):
        docstring = ""  # the dataclass decorator wrote this docstring: it is only a signature
    return name, docstring


def _parameters(function: Any, name: str) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yields each parameter that a call may give, with its annotation. Raises RequestError for a
    function that cannot be called with named arguments."""
    bound: set[str] = set()  # arguments that a functools.partial has given; no call may change them
    annotated = function
    while isinstance(annotated, partial):
        bound |= annotated.keywords.keys()
        annotated = annotated.func
    if not (inspect.isroutine(annotated) or hasattr(annotated, "__wrapped__")):
        is_class = inspect.isclass(annotated)
        annotated = annotated.__init__ if is_class else type(annotated).__call__
    try:
        hints = get_type_hints(annotated, include_extras=True)
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError, NameError) as error:
        raise RequestError(f"{name} cannot be described: {reason(error)}") from error
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].name not in hints:
        raise RequestError(f"{name} is a method: give that of an object, as in tools=[it.{name}].")
    for each in parameters:
        if each.name in bound:
            continue
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise RequestError(
                f"{name} takes {each}, and calls give arguments by their names alone. Give the "
                "tool as a dictionary."
            )
        yield each, hints.get(each.name, Any)


class _Annotations:
    """Reads annotations of functions as JSON schemas, and as readers of the values that fit."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}  # schemas of types that contain themselves
        self._within: list[type] = []  # dataclasses that are being described

    def of(self, function: Any, name: str, texts: Mapping[str, str]) -> ValueType:
        """Returns the type of all arguments of a function or a class, as a dictionary. texts: the
        descriptions of parameters in its docstring. Raises RequestError for an annotation that no
        JSON schema can express."""
        if isinstance(function, type) and _is_pydantic(function):
            return self._model(function, name)
        values: dict[str, ValueType] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        # Defaults that the function itself does not fill in.
        defaults: dict[str, Callable[[], Any]] = {}
        for each, hint in _parameters(function, name):
            default = each.default
            if _is_field(default):
                hint, default = Annotated[hint, default], each.empty
                if not each.default.is_required():
                    defaults[each.name] = partial(
                        each.default.get_default, call_default_factory=True
                    )
            value = self._type(hint)
            if value is None:
                raise RequestError(
                    f"the parameter {each.name} of {name} must be annotated with {_KNOWN}, not "
                    f"with {shown(hint)}. Or give the tool as a dictionary."
                )
            values[each.name] = value
            properties[each.name] = dict(value.schema)
            if _description(hint) is None and each.name in texts:
                properties[each.name]["description"] = texts[each.name]
            if default is not each.empty:
                properties[each.name] |= _default(default)
            elif each.name not in defaults:
                required.append(each.name)

        def read(given: Any) -> dict[str, Any]:
            if not isinstance(given, Mapping):
                raise _wrong("an object", given)
            for key in given:
                if key not in values:
                    raise WrongValueError(f"takes no {key}")
            for key in required:
                if key not in given:
                    raise WrongValueError(f"needs {key}")
            read = {key: _at(f".{key}", values[key], each) for key, each in given.items()}
            return {key: make() for key, make in defaults.items() if key not in read} | read

        schema = {"type": "object", "properties": properties, "required": required}
        return ValueType(schema, read)

    def _type(self, hint: Any) -> ValueType | None:
        """Returns the type of an annotation with its description; None where neither this module
        nor pydantic knows it."""
        metadata = hint.__metadata__ if get_origin(hint) is Annotated else ()
        if any(map(_is_pydantic, metadata)):
            known = self._pydantic(hint)
        else:
            known = self._plain(hint.__origin__ if metadata else hint) or self._pydantic(hint)
        text = _description(hint)
        if known is None or text is None:
            return known
        return ValueType(known.schema | {"description": text}, known.read)

    def _plain(self, hint: Any) -> ValueType | None:
        """Returns the type of an annotation; None where this module does not know it."""
        if hint is Any or hint is object:
            return _ANYTHING
        if hint is None or (isinstance(hint, type) and hint in _SCALARS):
            return _SCALARS[hint or type(None)]
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _choice([(each.value, each) for each in hint])
        origin, arguments = get_origin(hint) or hint, get_args(hint)
        if origin is Literal:
            return _choice([(e.value if isinstance(e, Enum) else e, e) for e in arguments])
        if isinstance(hint, type) and is_dataclass(hint) and not _is_pydantic(hint):
            return self._dataclass(hint)
        open_ended = arguments[-1:] == (...,)
        found = [self._type(each) for each in (arguments[:-1] if open_ended else arguments)]
        parts = [each for each in found if each is not None]
        if len(parts) < len(found):
            return None
        if origin in (Union, types.UnionType):
            return _union(parts)
        if origin in _LISTS or (origin is tuple and (open_ended or not arguments)):
            return _list(parts, tuple if origin is tuple else list)
        if origin is tuple:
            return _tuple(parts)
        if origin in _OBJECTS and arguments[:1] in ((), (str,), (Any,)):
            return _dict(parts)
        return None

    def _dataclass(self, hint: type) -> ValueType | None:
        if hint in self._within:  # the type contains itself: its schema would have no end
            return None
        self._within.append(hint)
        name, docstring = _named(hint)
        description, texts = read_docstring(docstring)
        own = self.of(hint, name, texts)
        self._within.pop()
        about = {"description": description} if description else {}

        def read(value: object) -> Any:
            values = own.read(value)
            try:
                return hint(**values)
            except ValueError as error:  # the function's own error
                raise WrongValueError(f"is no {name}: {error}") from error

        return ValueType(own.schema | {"additionalProperties": False} | about, read)

    def _model(self, model: type, name: str) -> ValueType:
        """Returns the arguments of one of pydantic's classes, which reads them itself."""
        value = self._pydantic(model)
        if value is None:
            raise RequestError(f"pydantic gives no JSON schema of {name}.")
        read = value.read

        def checked(given: Any) -> dict[str, Any]:
            read(given)
            return dict(given)

        schema = {key: each for key, each in value.schema.items() if key != "description"}
        return ValueType(schema, checked)

    def _pydantic(self, hint: Any) -> ValueType | None:
        """Returns the type that pydantic makes of an annotation; None if pydantic is not installed
        or does not know it."""
        try:
            from pydantic import TypeAdapter, ValidationError
            from pydantic.errors import PydanticUserError
            from pydantic.json_schema import GenerateJsonSchema
        except ImportError:
            return None

        class Untitled(GenerateJsonSchema):
            """Makes schemas without titles, which would only repeat the names of parameters."""

            def field_title_should_be_set(self, schema: Any) -> bool:
                return False

        try:
            adapter = TypeAdapter(hint)
            schema = adapter.json_schema(schema_generator=Untitled)
        except (PydanticUserError, NameError, TypeError):
            return None

        def read(value: object) -> Any:
            try:
                return adapter.validate_json(json.dumps(value))
            except ValidationError as error:
                first = error.errors()[0]
                place = "".join(
                    f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]
                )
                raise WrongValueError(f"is wrong: {first['msg']}", place) from error

        return ValueType(self._inlined(closed(schema)), read)

    def _inlined(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a schema with each definition at the place of its reference, because
        few chat templates show definitions. Definitions that contain themselves stay in
        `definitions`."""
        own: dict[str, Any] = schema.pop("$defs", {})
        parts = {name: _references(each) for name, each in own.items()}
        for through in own:
            for reached in parts.values():
                reached |= parts[through] if through in reached else set()
        names: dict[str, str] = {}

        def moved(part: Any) -> Any:
            if isinstance(part, list):
                return [*map(moved, part)]
            if not isinstance(part, dict):
                return part
            kept = {key: moved(each) for key, each in part.items()}
            if "oneOf" in part:  # a discriminator, which names the reference for each value
                kept.pop("discriminator", None)
            name = _reference(part.get("$ref"))
            if name is None:
                return kept
            del kept["$ref"]
            if name not in parts[name]:
                return moved(own[name]) | kept
            if name not in names:
                names[name] = new = _unused(name, self.definitions)
                self.definitions[new] = {}  # keeps its place until the schema is there
                self.definitions[new] = moved(own[name])
            return {"$ref": f"#/$defs/{names[name]}"} | kept

        inlined: dict[str, Any] = moved(schema)
        return inlined


def _references(part: Any) -> set[str]:
    """Returns the names of the definitions that a schema refers to."""
    if isinstance(part, list):
        return set().union(*map(_references, part))
    if not isinstance(part, dict):
        return set()
    own = _reference(part.get("$ref"))
    return set().union(*map(_references, part.values())) | ({own} if own else set())


def _reference(pointer: object) -> str | None:
    is_one = isinstance(pointer, str) and pointer.startswith("#/$defs/")
    return str(pointer).removeprefix("#/$defs/") if is_one else None


def _unused(name: str, names: Container[str]) -> str:
    return next(
        each for each in chain([name], (f"{name}{i}" for i in count(2))) if each not in names
    )


def _is_pydantic(thing: object) -> bool:
    """Whether only pydantic can tell the meaning of an annotation, or of a part of it."""
    kind = thing if isinstance(thing, type) else type(thing)
    hooks = ("__get_pydantic_core_schema__", "__pydantic_core_schema__")
    return kind.__module__.partition(".")[0] in _PYDANTIC or any(hasattr(kind, h) for h in hooks)


def _is_field(default: object) -> bool:
    """Whether a default is pydantic's Field, which has the default and more."""
    return type(default).__module__ == "pydantic.fields"


def _description(hint: Any) -> str | None:
    """Returns the text in Annotated[int, "text"], or in pydantic's Field; None without one."""
    if get_origin(hint) is not Annotated:
        return None
    texts = (
        e if isinstance(e, str) else getattr(e, "description", None) for e in hint.__metadata__
    )
    return next((text for text in texts if isinstance(text, str)), None)


def _wrong(wanted: str, value: object) -> WrongValueError:
    return WrongValueError(f"must be {wanted}, not {shown(value)}")


def _at(place: str, kind: ValueType, value: object) -> Any:
    """Reads the value of a part of the arguments. place: where the part is, for the error."""
    try:
        return kind.read(value)
    except WrongValueError as wrong:
        raise WrongValueError(wrong.what, place + wrong.place) from None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("a string", value)
    return value


def _integer(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong("an integer", value)
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong("a smaller number", value) from None


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def _null(value: object) -> None:
    if value is not None:
        raise _wrong("null", value)


def _point_in_time(kind: type[date] | type[time], format: str, example: str) -> ValueType:
    def read(value: object) -> date | time:
        try:
            return kind.fromisoformat(_string(value).upper())  # RFC 3339 has t and z, too
        except ValueError:
            raise _wrong(f"as {example}", value) from None

    return ValueType({"type": "string", "format": format}, read)


_ANYTHING = ValueType({}, lambda value: value)
_SCALARS: dict[type, ValueType] = {
    str: ValueType({"type": "string"}, _string),
    int: ValueType({"type": "integer"}, _integer),
    float: ValueType({"type": "number"}, _number),
    bool: ValueType({"type": "boolean"}, _boolean),
    type(None): ValueType({"type": "null"}, _null),
    date: _point_in_time(date, "date", "2026-12-31"),
    time: _point_in_time(time, "time", "23:59:59Z"),
    datetime: _point_in_time(datetime, "date-time", "2026-12-31T23:59:59Z"),
}


def _choice(options: Sequence[tuple[Any, Any]]) -> ValueType | None:
    """Returns the type of one of several values, or None if one of them is not plain. options:
    pairs of a value in JSON and the Python value that it stands for."""
    plain = [option for option, _ in options]
    if not plain or not all(isinstance(each, str | int | float | None) for each in plain):
        return None
    kinds = [*dict.fromkeys(map(kind_of, plain))]

    def read(value: object) -> Any:
        for option, own in options:
            if is_same(option, value):
                return own
        raise _wrong(f"one of {', '.join(map(shown, plain))}", value)

    return ValueType({"type": kinds[0] if len(kinds) == 1 else kinds, "enum": plain}, read)


def _union(parts: Sequence[ValueType]) -> ValueType:
    # A number may be an integer, which stays one if it can.
    by_care = sorted(parts, key=lambda each: each is _SCALARS[float])

    def read(value: object) -> Any:
        wrongs = []
        for each in by_care:
            try:
                return each.read(value)
            except WrongValueError as wrong:
                wrongs.append(wrong)
        if len(deepest := [wrong for wrong in wrongs if wrong.place]) == 1:
            raise deepest[0]
        raise WrongValueError(
            ", or ".join(f"{wrong.place} {wrong.what}".strip() for wrong in wrongs)
        )

    return ValueType({"anyOf": [each.schema for each in parts]}, read)


def _list(parts: Sequence[ValueType], kind: type[list[Any]] | type[tuple[Any, ...]]) -> ValueType:
    """Returns the type of a list or a tuple. parts: the type of its items, if it is known."""
    item = parts[0] if parts else _ANYTHING

    def read(value: object) -> Any:
        if not isinstance(value, list):
            raise _wrong("an array", value)
        return kind(_at(f"[{i}]", item, each) for i, each in enumerate(value))

    items = {"items": item.schema} if item.schema else {}
    return ValueType({"type": "array"} | items, read)


def _tuple(parts: Sequence[ValueType]) -> ValueType:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(parts):
            raise _wrong(f"an array of {len(parts)}", value)
        pairs = zip(parts, value, strict=True)
        return tuple(_at(f"[{i}]", part, each) for i, (part, each) in enumerate(pairs))

    schema: dict[str, Any] = {"type": "array", "minItems": len(parts), "maxItems": len(parts)}
    items = {"prefixItems": [part.schema for part in parts]} if parts else {}
    return ValueType(schema | items, read)


def _dict(parts: Sequence[ValueType]) -> ValueType:
    """Returns the type of a dictionary. parts: the types of its keys and its values, if they are
    known."""
    item = parts[1] if parts else _ANYTHING

    def read(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        return {key: _at(f".{key}", item, each) for key, each in value.items()}

    values = {"additionalProperties": item.schema} if item.schema else {}
    return ValueType({"type": "object"} | values, read)


def _default(value: object) -> dict[str, Any]:
    """Returns the keyword `default` of a schema, or nothing if JSON cannot express the value."""

    def plain(part: Any) -> Any:
        if isinstance(part, Enum):
            return part.value
        if isinstance(part, date | time):
            return part.isoformat()
        if is_dataclass(part) and not isinstance(part, type):
            return {each.name: getattr(part, each.name) for each in fields(part)}
        # An instance of a pydantic model.
        if hasattr(part, "model_dump") and not isinstance(part, type):
            return part.model_dump(mode="json")
        raise TypeError(f"{part!r} is not in JSON")

    try:
        return {"default": json.loads(json.dumps(value, default=plain, allow_nan=False))}
    except (TypeError, ValueError, RecursionError):
        return {}
