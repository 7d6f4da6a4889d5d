"""Reads docstrings in the styles of Google, NumPy and Sphinx: the description of a function and of
each of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from textwrap import dedent

# Names of sections. The first group describes parameters; the others say nothing about a call.
_NAMES = (
    "((?:Other |Keyword )?(?:Args|Arguments|Param(?:eter)?s)|Attributes)|Returns?|Yields?|Raises"
)
_GOOGLE = re.compile(rf"(?:{_NAMES}):\s*")
_NUMPY = re.compile(rf"(?:{_NAMES})\s*")
_DASHES = re.compile(r"---+\s*")
_FIELD = re.compile(
    r":(?:(param|parameter|arg|argument|key|keyword)|type|raises?|except|exception|returns?|rtype)"
    r"\b([^:]*):\s*(.*)"
)
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_NUMPY_ENTRY = re.compile(r"((?:\\?\*){0,2}\w+(?:\s*,\s*(?:\\?\*){0,2}\w+)*)\s*(?::.*)?")


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the description of a function, which is the docstring without its sections about
    parameters, results and errors; and the description of each parameter by its name. docstring: as
    `inspect.getdoc` returns it."""
    lines = docstring.splitlines()
    kept: list[str] = []
    texts: dict[str, str] = {}
    place = 0
    while place < len(lines):
        line, rest = lines[place], lines[place + 1 :]
        if found := _GOOGLE.fullmatch(line):
            body = [*takewhile(_is_within, rest)]
            if found[1]:
                texts |= _google(body)
        elif rest and _DASHES.fullmatch(rest[0]) and (found := _NUMPY.fullmatch(line)):
            body = rest[: _numpy_end(rest)]
            if found[1]:
                texts |= _numpy(body[1:])
        elif found := _FIELD.match(line):
            body = [*takewhile(_is_within, rest)]
            if found[1] and (names := found[2].split()):
                texts[names[-1].strip("\\*")] = _joined([found[3], *body])
        else:
            body = []
            kept.append(line)
        place += 1 + len(body)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), texts


def _is_within(line: str) -> bool:
    """Whether a line belongs to the section or the field above it."""
    return not line or line[0].isspace()


def _numpy_end(lines: Sequence[str]) -> int:
    """Returns how many lines there are before the next header."""
    for place in range(1, len(lines) - 1):
        if lines[place].strip() and _DASHES.fullmatch(lines[place + 1]):
            return place
    return len(lines)


def _google(lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for line in dedent("\n".join(lines)).splitlines():
        if entry := _GOOGLE_ENTRY.fullmatch(line):
            found[entry[1]] = [entry[2]]
        elif found:
            found[[*found][-1]].append(line)
    return {name: _joined(text) for name, text in found.items()}


def _numpy(lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    text: list[str] = []
    for line in lines:
        if entry := _NUMPY_ENTRY.fullmatch(line):
            text = []
            found |= {name.strip().strip("\\*"): text for name in entry[1].split(",")}
        else:
            text.append(line)
    return {name: _joined(text) for name, text in found.items()}


def _joined(lines: Iterable[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())
