"""Functions, which scripts/make_function_references.py has transformers describe as tools."""

from enum import Enum
from typing import Any, Literal


class Unit(Enum):
    METRIC = "metric"
    IMPERIAL = "imperial"


class Level(Enum):
    LOW = 1
    HIGH = 2
    NONE = None


def no_parameters():
    """Say the time."""


def scalars(text: str, whole: int, number: float = 0.5, flag: bool = False):
    """
    Take one of each.

    There is more to say: a colon, and
    a second line.

    Args:
        text: The text.
        whole: A whole number: 1 or 2,
            or more
            of them.
        number: Another.

        flag: Whether (or not) it is: so.
    """


def typed(
    names: list[str],
    many: list[list[int]],
    table: dict[str, float],
    pair: tuple[int, str],
    anything: Any,
    plain: list,
    mapping: dict,
):
    """Take what has parts.

    Args:
        names (list[str]): Names.
        many (list[list[int]], optional): Numbers (of numbers).
        table (dict): By name.
        pair (tuple[int, str]): A number and a text
        anything: Anything
        plain: A list
        mapping: By name

    Returns:
        str: What it took.

    Raises:
        ValueError: always
    """


def choices(unit: Unit, level: Level, word: Literal["a", "b"], mixed: Literal[1, "a", None]):
    """Take one of several.

    Args:
        unit: The unit
        level: The level
        word: The word
        mixed: What it is

    Returns:
        Nothing.
    """


FUNCTIONS = (no_parameters, scalars, typed, choices)
