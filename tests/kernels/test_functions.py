"""Python functions as tools: schemas and values of their annotations are those of pydantic."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional

import places
import pytest

from infer import RequestError, ToolCall, ToolCallDelta
from infer.engine.constraint import schema_error
from infer.text.docstrings import read_docstring
from infer.text.tools import add_deltas, check_tools

pydantic = pytest.importorskip("pydantic")
annotated_types, openai = map(pytest.importorskip, ("annotated_types", "openai"))

DATA = places.DATA / "functions"


class Unit(Enum):
    METRIC = "metric"
    IMPERIAL = "imperial"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    NAME = "a"
    NUMBER = 2
    NONE = None


@dataclass
class Place:
    """A place on a map."""

    name: str
    at: tuple[float, float] = (0.0, 0.0)
    units: list[Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name == "nowhere":
            raise ValueError("it is nowhere")


@dataclass
class Trip:
    start: Place
    day: date | None = None
    stops: Sequence[Place] = field(default_factory=list)


def schemas(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schemas of a function's parameters, by their names."""
    (tool,) = check_tools([function]).offered or ()
    properties: dict[str, Any] = tool["function"]["parameters"]["properties"]
    return properties


def annotated(hint: object, **more: Any) -> Callable[..., Any]:
    def function(x: Any) -> None: ...

    function.__annotations__ = {"x": hint}
    return function


def called(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments of a call, as it comes."""
    tools, calls = check_tools([function]), list[ToolCall]()
    (name,) = tools.functions or ()
    text = json.dumps(arguments)
    deltas = [ToolCallDelta(0, "1", name), ToolCallDelta(0, arguments=text)]
    add_deltas(calls, deltas, tools.python)
    return calls[0].parsed()


def told(schema: Any) -> Any:
    """A schema of pydantic's without its titles, and without what any value fits."""
    if isinstance(schema, list):
        return [*map(told, schema)]
    if not isinstance(schema, dict):
        return schema
    ways = {"items": {}, "additionalProperties": True}
    kept = {
        name: told(each)
        for name, each in schema.items()
        if ways.get(name, ...) != each and not (name == "title" and isinstance(each, str))
    }
    return kept


ANNOTATIONS: list[tuple[Any, list[Any]]] = [
    (str, ["a", ""]),
    (int, [3, -1]),
    (float, [3, 0.5]),
    (bool, [True]),
    (None, [None]),
    (Any, [1, [None], {"a": "b"}]),
    (list, [[1, "a"]]),
    (list[int], [[1], []]),
    (Sequence[bool], [[True]]),
    (list[list[Unit]], [[["metric"], []]]),
    (dict, [{"a": 1}]),
    (dict[str, Any], [{"a": 1}]),
    (dict[str, date], [{"a": "2026-12-31"}]),
    (Mapping[str, float], [{"a": 1}]),
    (tuple, [[1, "a"]]),
    (tuple[int, ...], [[1, 2, 3], []]),
    (tuple[int, str, Unit], [[1, "a", "imperial"]]),
    (Optional[int], [None, 3]),  # noqa: UP045
    (int | str, [3, "3"]),
    (float | int, [3, 0.5]),
    (bool | int | None, [True, 1, None]),
    (date | str, ["2026-12-31", "today"]),
    (str | date, ["2026-12-31"]),
    (list[Place | Unit], [["metric", {"name": "a"}]]),
    (date, ["2026-12-31"]),
    (time, ["23:59:59Z", "10:00:00.25+02:00"]),
    (datetime, ["2026-12-31T23:59:59Z", "2026-12-31t23:59:59.5z", "2026-12-31T10:00:00-05:30"]),
    (Unit, ["metric"]),
    (Level, [1]),
    (Mixed, ["a", 2, None]),
    (Literal["a", "b"], ["b"]),
    (Literal[1, 2, "a", None], [2, "a", None]),
    (Literal[True, 0], [True, 0]),
    (Place, [{"name": "Oslo"}, {"name": "Rome", "at": [1, 2.5], "units": ["metric"]}]),
    (Trip, [{"start": {"name": "a"}, "day": "2026-12-31", "stops": [{"name": "b"}]}]),
]


@pytest.mark.parametrize(
    ("hint", "values"), ANNOTATIONS, ids=[str(each) for each, _ in ANNOTATIONS]
)
def test_annotations_mean_what_they_mean_to_pydantic(hint: Any, values: list[Any]) -> None:
    adapter = pydantic.TypeAdapter(hint)
    function = annotated(hint)
    own = schemas(function)["x"]
    known = adapter.json_schema()
    definitions = known.pop("$defs", {})

    def whole(schema: Any) -> Any:
        """With definitions where they belong."""
        if isinstance(schema, list):
            return [*map(whole, schema)]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return whole(definitions[schema["$ref"].removeprefix("#/$defs/")])
        made = {name: whole(each) for name, each in schema.items()}
        if "enum" in made:  # as transformers: the type stands beside the values
            kinds = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
            found = [*dict.fromkeys(kinds[type(each)] for each in made["enum"])]
            made["type"] = found if len(found) > 1 else found[0]
        if "properties" in made:  # others are an error of the dataclass
            made["additionalProperties"] = False
        return made

    assert own == told(whole(known))
    for value in values:
        read = called(function, x=value)["x"]
        expected = adapter.validate_json(json.dumps(value))
        assert read == expected
        assert type(read) is type(expected)


WRONG: list[tuple[Any, Any, str]] = [
    (str, 3, "function.x must be a string, not 3."),
    (int, "3", "function.x must be an integer, not '3'."),
    (int, True, "function.x must be an integer, not True."),
    (int, 3.5, "function.x must be an integer, not 3.5."),
    (float, "x", "function.x must be a number, not 'x'."),
    (bool, 1, "function.x must be true or false, not 1."),
    (None, 0, "function.x must be null, not 0."),
    (list[int], 3, "function.x must be an array, not 3."),
    (list[int], [1, "a"], "function.x[1] must be an integer, not 'a'."),
    (tuple[int, int], [1], "function.x must be an array of 2, not [1]."),
    (tuple[int, ...], [1, None], "function.x[1] must be an integer, not None."),
    (dict, [], "function.x must be an object, not []."),
    (dict[str, int], {"a": "b"}, "function.x.a must be an integer, not 'b'."),
    (date, "soon", "function.x must be as 2026-12-31, not 'soon'."),
    (datetime, 3, "function.x must be as 2026-12-31T23:59:59Z, not 3."),
    (Unit, "feet", "function.x must be one of 'metric', 'imperial', not 'feet'."),
    (Literal[1, 2], "1", "function.x must be one of 1, 2, not '1'."),
    (int | None, "a", "function.x must be an integer, not 'a', or must be null, not 'a'."),
    (Place, "Oslo", "function.x must be an object, not 'Oslo'."),
    (Place, {}, "function.x needs name."),
    (Place, {"name": "a", "at": [0, "b"]}, "function.x.at[1] must be a number, not 'b'."),
    (Place | None, {"name": 1}, "function.x.name must be a string, not 1."),
]


@pytest.mark.parametrize(("hint", "value", "said"), WRONG, ids=[each[2] for each in WRONG])
def test_arguments_that_a_function_does_not_take(hint: Any, value: Any, said: str) -> None:
    """A model that is told so often mends it."""
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    with pytest.raises(ValueError, match=r"^function") as wrong:
        called(annotated(hint), x=value)
    assert str(wrong.value) == said


def test_errors_of_a_dataclass() -> None:
    with pytest.raises(ValueError, match=r"^function\.x is no Place: it is nowhere\.$"):
        called(annotated(Place), x={"name": "nowhere"})
    with pytest.raises(ValueError, match=r"^function\.x takes no color\.$"):
        called(annotated(Place), x={"name": "a", "color": "red"})


def forecast(  # type: ignore[no-untyped-def]
    where,
    when: date = date(2026, 12, 31),
    units: Unit = Unit.METRIC,
    near: Place = Place("Oslo", (59.9, 10.7)),  # noqa: B008
    *,
    days: int = 3,
    name: str | None = None,
    other: object = object(),
    most: float = float("inf"),
) -> str:
    """The weather there."""
    return "rain"


def test_defaults_are_in_the_schema() -> None:
    (tool,) = check_tools([forecast]).offered or ()
    parameters = tool["function"]["parameters"]
    assert parameters["required"] == ["where"]
    assert {k: v["default"] for k, v in parameters["properties"].items() if "default" in v} == {
        "when": "2026-12-31",
        "units": "metric",
        "near": {"name": "Oslo", "at": [59.9, 10.7], "units": []},
        "days": 3,
        "name": None,
    }
    assert parameters["properties"]["where"] == {}  # without an annotation: anything
    assert called(forecast, where=[1], units="imperial") == {"where": [1], "units": Unit.IMPERIAL}


class Weather:
    """Where it rains."""

    def __call__(self, city: str, day: date | None = None) -> str:
        """Whether it rains."""
        return city

    def in_city(self, city: str) -> str:
        """Here."""
        return city

    @classmethod
    def made(cls, city: str) -> str:
        """Made."""
        return city


class Plain:
    """Says a number."""

    def __call__(self, number: int) -> int:
        return number


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


@pytest.mark.parametrize(
    ("function", "name", "description", "properties", "arguments"),
    [
        (Weather(), "Weather", "Whether it rains.", ["city", "day"], {"day": "2026-12-31"}),
        (Weather().in_city, "in_city", "Here.", ["city"], {"city": "a"}),
        (Weather.made, "made", "Made.", ["city"], {"city": "a"}),
        (Plain(), "Plain", "Says a number.", ["number"], {"number": 3}),
        (Place, "Place", "A place on a map.", ["name", "at", "units"], {"name": "a", "at": [0, 1]}),
        (decorated(forecast), "forecast", "The weather there.", None, {"when": "2026-12-31"}),
        (functools.cache(forecast), "forecast", "The weather there.", None, {"days": 3}),
        (
            functools.partial(forecast, "Oslo", days=3),
            "forecast",
            "The weather there.",
            ["when", "units", "near", "name", "other", "most"],
            {"when": "2026-12-31"},
        ),
        (
            functools.partial(Weather(), day=None),
            "Weather",
            "Whether it rains.",
            ["city"],
            {"city": "a"},
        ),
    ],
)
def test_whatever_can_be_called(
    function: Callable[..., Any],
    name: str,
    description: str,
    properties: list[str] | None,
    arguments: dict[str, Any],
) -> None:
    (tool,) = check_tools([function]).offered or ()
    assert (tool["function"]["name"], tool["function"]["description"]) == (name, description)
    own = tool["function"]["parameters"]["properties"]
    assert [*own] == (properties or [*schemas(forecast)])
    given = {"where": ""} if "where" in own else {"city": ""} if "city" in own else {}
    read = called(function, **given | arguments)
    assert function(**read) is not None
    if "when" in read or read.get("day"):
        assert date(2026, 12, 31) in read.values()


def test_a_call_changes_nothing_that_a_partial_gives() -> None:
    own = functools.partial(forecast, days=3)
    with pytest.raises(ValueError, match=r"^forecast takes no days\.$"):
        called(own, where="Oslo", days=4)
    with pytest.raises(ValueError, match=r"^forecast needs where\.$"):
        called(own)


def several(*cities: str) -> None: ...


def others(city: str, **more: str) -> None: ...


def positional(city: str, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (several, r"tools\[0\]: several takes \*cities: "),
        (others, r"tools\[0\]: others takes \*\*more: "),
        (positional, r"tools\[0\]: positional takes city: "),
        (Weather.in_city, r"tools\[0\]: in_city is a method: give that of an object"),
        (print, r"tools\[0\]: print takes \*args"),
        (
            annotated(3),
            r"tools\[0\]: the parameter x of function must be annotated with str, .*not",
        ),
        (annotated(Weather), r"must be annotated with .* not with <class '.*Weather'>"),
        (annotated(list[Weather] | None), r"must be annotated with .*Weather\] \| None"),
        (annotated(Callable[..., Any]), "must be annotated with"),
        (annotated("Missing"), r"tools\[0\]: function cannot be described: name 'Missing' is not"),
        (lambda x: x, "must be 1 to 128 letters"),
    ],
)
def test_functions_that_cannot_be_described(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_tools([function])


def test_a_call_is_plain_but_for_its_arguments() -> None:
    tools, calls = check_tools([forecast]), list[ToolCall]()
    add_deltas(calls, [ToolCallDelta(0, "1", "forecast", '{"where": 1}')], tools.python)
    (call,) = calls
    assert call == ToolCall("1", "forecast", '{"where": 1}')
    assert asdict(call) == {"id": "1", "name": "forecast", "arguments": '{"where": 1}'}
    assert "_function" not in repr(call)
    for copied in (pickle.loads(pickle.dumps(call)), copy.deepcopy(call)):
        assert copied == call
        assert copied.parsed() == {"where": 1}


def test_functions_are_described_as_by_transformers() -> None:
    """Schemas are transformers', which say nothing of defaults or of the length of a tuple."""
    functions = runpy.run_path(str(DATA / "functions.py"))["FUNCTIONS"]
    expected = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    for function, reference in zip(functions, expected, strict=True):
        (tool,) = check_tools([function]).offered or ()
        for schema in tool["function"]["parameters"]["properties"].values():
            for keyword in ("default", "minItems", "maxItems"):
                schema.pop(keyword, None)
        if not tool["function"]["parameters"]["required"]:
            del tool["function"]["parameters"]["required"]
        assert tool == reference


GOOGLE = """The weather of a city.

Of today: or of
another day.

Args:
    city (str): The city.
    days (dict[str, int], optional): How many days
        are asked for: at most 3.

        And so on.
    flag: Whether.

Returns:
    str: Weather.

Raises:
    ValueError: never
"""
NUMPY = """The weather of a city.

Of today: or of
another day.

Parameters
----------
city : str
    The city.
days : int, optional
    How many days
    are asked for: at most 3.

    And so on.
flag
    Whether.

Returns
-------
str
    Weather.

Raises
------
ValueError
    never
"""
SPHINX = """The weather of a city.

Of today: or of
another day.

:param str city: The city.
:param days: How many days
    are asked for: at most 3.

    And so on.
:type days: int
:param flag: Whether.
:returns: Weather.
:rtype: str
:raises ValueError: never
"""


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX])
def test_docstrings_say_what_they_say_to_docstring_parser(docstring: str) -> None:
    parsed = pytest.importorskip("docstring_parser").parse(docstring)
    description, texts = read_docstring(docstring)
    assert description == f"{parsed.short_description}\n\n{parsed.long_description}"
    assert texts == {each.arg_name: " ".join(each.description.split()) for each in parsed.params}
    assert [*texts] == ["city", "days", "flag"]


def test_what_a_docstring_says_beside_its_parameters() -> None:
    """Stays: a model may need it."""
    text = (
        "Send.\n\nNote:\n    There is no way back.\n\nArgs:\n    to: Whom.\n\nExamples:\n    None."
    )
    kept = "Send.\n\nNote:\n    There is no way back.\n\nExamples:\n    None."
    assert read_docstring(text) == (kept, {"to": "Whom."})
    text = "Send.\n\nParameters\n----------\na, *b : int\n    Both.\n\nNotes\n-----\nNone."
    both = {"a": "Both.", "b": "Both."}
    assert read_docstring(text) == ("Send.\n\nNotes\n-----\nNone.", both)
    for plain in ("", "One line: text.", "Args: none.", "Parameters\n\nNone.", ":ref:`x` says so."):
        assert read_docstring(plain) == (plain, {})


@dataclass
class Order:
    """An order.

    Attributes:
        number: Which one.
        place: Whereto.
    """

    number: int
    place: Place | None = None


def order(first: Order, second: Order, third: Place) -> None:
    """Order.

    :param second: The second one.
    """


def test_what_is_said_of_a_parameter_counts_before_what_is_said_of_its_class() -> None:
    known = schemas(order)
    own = ("An order.", "The second one.", "A place on a map.")
    assert tuple(each["description"] for each in known.values()) == own
    assert known["first"]["properties"]["number"] == {
        "type": "integer",
        "description": "Which one.",
    }
    assert known["first"]["properties"]["place"]["description"] == "Whereto."


def noted(
    a: Annotated[int, "A number."],
    b: Annotated[list[Annotated[str, "A tag."]] | None, object(), "Tags."] = None,
    c: Annotated[Place, "Where."] = Place("Oslo"),  # noqa: B008
) -> None:
    """Note.

    Args:
        a: What the annotation says better.
    """


def test_texts_of_annotations() -> None:
    known = schemas(noted)
    assert known["a"] == {"type": "integer", "description": "A number."}
    assert known["b"] == {
        "anyOf": [
            {"type": "array", "items": {"type": "string", "description": "A tag."}},
            {"type": "null"},
        ],
        "description": "Tags.",
        "default": None,
    }
    assert known["c"]["description"] == "Where."
    assert called(noted, a=1, b=["x"]) == {"a": 1, "b": ["x"]}


# Types of pydantic


class Line(pydantic.BaseModel):  # type: ignore[misc]
    """A line of an order."""

    article: str = pydantic.Field(description="By its name.", min_length=1)
    count: int = pydantic.Field(1, ge=1, le=9)
    unit: Unit = Unit.METRIC


class Cat(pydantic.BaseModel):  # type: ignore[misc]
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):  # type: ignore[misc]
    kind: Literal["dog"]
    age: int


class Tree(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    ref: str = pydantic.Field("x", alias="$ref")
    discriminator: int = 1
    below: list[Tree] = pydantic.Field(default_factory=list)


@dataclass
class Node:
    name: str
    next: Node | None = None


@pydantic.dataclasses.dataclass
class Own:
    size: Annotated[int, annotated_types.Gt(0)]


def buy(
    line: Line,
    lines: list[Line],
    at_most: Annotated[float, pydantic.Field(gt=0, description="In euros.")],
    code: Annotated[str, annotated_types.Len(2, 4), "Of the shop."],
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
    price: Decimal,
    own: Own,
    days: int = pydantic.Field(3, ge=1, description="How many."),
    tags: list[str] = pydantic.Field(default_factory=list, max_length=2),  # noqa: B008
    other: Line = Line(article="x"),  # noqa: B008
) -> None:
    """Buy it.

    Args:
        line: The first one.
        days: What Field says better.
    """


def test_what_pydantic_knows_is_as_pydantic_says() -> None:
    (tool,) = check_tools([buy]).offered or ()
    parameters = tool["function"]["parameters"]
    own = parameters["properties"]
    assert parameters["required"] == ["line", "lines", "at_most", "code", "pet", "price", "own"]
    line = {
        "type": "object",
        "title": "Line",
        "description": "The first one.",
        "properties": {
            "article": {"type": "string", "minLength": 1, "description": "By its name."},
            "count": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1},
            "unit": {
                "enum": ["metric", "imperial"],
                "type": "string",
                "title": "Unit",
                "default": "metric",
            },
        },
        "required": ["article"],
        "additionalProperties": False,
    }
    assert own["line"] == line
    assert own["lines"]["items"] == line | {"description": "A line of an order."}
    assert own["at_most"] == {"type": "number", "exclusiveMinimum": 0, "description": "In euros."}
    text = {"type": "string", "minLength": 2, "maxLength": 4, "description": "Of the shop."}
    assert own["code"] == text
    assert [each["title"] for each in own["pet"]["oneOf"]] == ["Cat", "Dog"]
    assert own["own"]["properties"]["size"] == {"type": "integer", "exclusiveMinimum": 0}
    days = {"type": "integer", "minimum": 1, "default": 3, "description": "How many."}
    assert own["days"] == days
    assert own["other"]["default"] == {"article": "x", "count": 1, "unit": "metric"}
    assert "$" not in json.dumps(parameters)

    given = {
        "line": {"article": "a", "unit": "imperial"},
        "lines": [{"article": "b", "count": 2}],
        "at_most": 3,
        "code": "abc",
        "pet": {"kind": "dog", "age": 3},
        "price": 2.5,
        "own": {"size": 1},
    }
    read = called(buy, **given)
    assert read == {
        "line": Line(article="a", unit=Unit.IMPERIAL),
        "lines": [Line(article="b", count=2)],
        "at_most": 3.0,
        "code": "abc",
        "pet": Dog(kind="dog", age=3),
        "price": Decimal("2.5"),
        "own": Own(1),
        "days": 3,
        "tags": [],
    }
    for wrong, said in (
        ({"lines": [{"article": "b", "count": 0}]}, "buy.lines[0].count is wrong: Input should be"),
        ({"code": "a"}, "buy.code is wrong: String should have at least 2"),
        ({"days": 0}, "buy.days is wrong: Input should be greater than or equal to 1"),
        ({"own": {"size": 0}}, "buy.own.size is wrong: Input should be greater than 0"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(said)):
            called(buy, **given | wrong)


def grow(tree: Tree, other: Tree, node: Node) -> None: ...


def test_types_with_themselves_as_a_part() -> None:
    (tool,) = check_tools([grow]).offered or ()
    parameters = tool["function"]["parameters"]
    jsonschema = pytest.importorskip("jsonschema")
    valid = jsonschema.Draft202012Validator(parameters).is_valid
    tree = {"name": "a", "below": [{"name": "b", "below": [{"name": "c"}]}]}
    node = {"name": "a", "next": {"name": "b", "next": {"name": "c", "next": None}}}
    given = {"tree": tree, "other": tree, "node": node}
    assert valid(given)
    assert {*parameters["$defs"]["Tree"]["properties"]} == {
        "name",
        "$ref",
        "discriminator",
        "below",
    }
    assert called(grow, **given) == {
        "tree": Tree(**tree),
        "other": Tree(**tree),
        "node": Node("a", Node("b", Node("c"))),
    }
    for wrong in (
        {"tree": {"name": "a", "below": [{"name": 3}]}},
        {"other": {"name": "a", "below": [{"below": []}]}},
        {"node": {"name": "a", "next": {"name": "b", "next": {"name": 3}}}},
    ):
        assert not valid(given | wrong)
        with pytest.raises(ValueError, match="grow"):
            called(grow, **given | wrong)


def test_a_model_of_pydantic_is_a_tool() -> None:
    (tool,) = check_tools([Line]).offered or ()
    expected = openai.pydantic_function_tool(Line)["function"]
    assert tool["function"]["name"] == expected["name"]
    assert tool["function"]["description"] == expected["description"]
    own = tool["function"]["parameters"]["properties"]
    assert {*own} == {*expected["parameters"]["properties"]}
    assert Line(**called(Line, article="a", unit="imperial")).unit is Unit.IMPERIAL
    with pytest.raises(ValueError, match=r"^Line\.count is wrong: Input should be less"):
        called(Line, article="a", count=10)


def test_plain_annotations_need_no_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [schemas(annotated(hint)) for hint, _ in ANNOTATIONS]
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert [schemas(annotated(hint)) for hint, _ in ANNOTATIONS] == expected
    assert schemas(noted)["a"]["description"] == "A number."
    for hint in (Decimal, Line, Annotated[int, annotated_types.Gt(0)]):
        with pytest.raises(RequestError, match="what pydantic 2 knows, if it is installed, not"):
            check_tools([annotated(hint)])


@pytest.mark.parametrize(
    "function", [forecast, buy, grow, Line, *(annotated(hint) for hint, _ in ANNOTATIONS)]
)
def test_calls_can_be_held_to_what_functions_say(function: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    assert [schema_error(each) for each in (check_tools([function]).functions or {}).values()] == [
        None
    ]
