"""The `Reader` from which parsers of answers take text while it arrives.

A parser is a generator: it takes text from a `Reader` and tells the `Reader` whether that text is
content, reasoning or a call. If the text so far is not enough to decide, the parser yields, and
the `Reader` continues it when there is more. So its code reads like a parser of a whole text, and
it does not matter how the text is cut into pieces. What no parser takes is content.
"""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infer.text.schemas import SPACE
from infer.text.tools import ToolCallDelta

T = TypeVar("T")
Steps = Generator[None, None, T]  # a generator that yields to wait for more text
Write = Callable[[str], None]

_MOST = 1024  # the most characters before a marker that has to come, as behind a function's name
_SHORT_ID = string.ascii_letters + string.digits
_AFTER_SCALARS = ",:]} \t\r\n"  # characters that end numbers, true, false and null
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.' + string.ascii_letters + string.digits + " \t\r\n")


class MalformedError(Exception):
    """A call is malformed. It counts as text, if its name has not been told yet."""


class EnoughError(Exception):
    """The answer has as many calls as may be read."""


@dataclass
class Pieces:
    """A part of an answer, divided into text, reasoning and calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


class _Words:
    """Holds spaces back until words follow. If `trims`, spaces before the first word are
    dropped."""

    def __init__(self) -> None:
        self.trims, self.begun, self.spaces = False, False, ""

    def add(self, text: str) -> str:
        text = self.spaces + text
        if self.trims and not self.begun:
            text = text.lstrip()
        words = text.rstrip()
        self.begun |= bool(words)
        self.spaces = text[len(words) :]
        return words


class Reader(ABC):
    """The text of an answer while it arrives; a parser takes it from the beginning.

    functions: the JSON schema of each function's arguments. most: how many calls are read.
    short_ids: whether ids of calls are nine letters and digits, as Mistral's templates demand.
    tokens: markers that are one token, which no limit cuts.
    """

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        most: int | None = None,
        *,
        short_ids: bool = False,
        tokens: Collection[str] = (),
    ) -> None:
        self.functions, self.most = functions, most
        self.calls = 0
        self.is_done = False  # whether there are as many calls as are read
        self.is_thinking = False
        self.pieces = Pieces()
        self._begun: int | None = None  # the call that has begun and is not whole
        self._short_ids, self._tokens = short_ids, tokens
        self._left = ""  # text that no parser has taken yet
        self._ended = self._cut = False
        self._attempt: str | None = None  # text taken for a call whose name has not come
        self._text, self._reasoning = _Words(), _Words()
        self._reasoning.trims = True
        self._steps: Steps[None] | None = self.parse()  # None at the parser's end
        self._go_on()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Takes text up to the place from which on all is content."""

    def add(self, text: str) -> Pieces:
        """Adds text that has arrived. Returns the pieces that are known now."""
        self._left += text
        return self._go_on()

    def finish(self, *, cut: bool = False) -> Pieces:
        """Takes note that no more text comes, and returns the text that was held back. cut: whether
        a limit has ended the answer, and not the model: then the beginning of a marker is dropped,
        and so is a call that has no name yet."""
        self._ended, self._cut = True, cut
        return self._go_on()

    def _go_on(self) -> Pieces:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
            except EnoughError:
                self._steps, self.is_done = None, True
        if self._steps is None and not self.is_done:
            self.text(self._take(len(self._left)))
            if self._ended and not self.calls:  # spaces at the end belong to the text
                self.pieces.text += self._text.spaces
        pieces, self.pieces = self.pieces, Pieces()
        return pieces

    def put_back(self, text: str) -> None:
        """Puts back text that was taken: it comes next again."""
        self._left = text + self._left

    @property
    def is_cut(self) -> bool:
        """Whether the answer was cut: no more text comes, although the model had not ended the
        answer."""
        return self._cut

    @property
    def unfinished(self) -> int | None:
        """The index of the call that is not whole because the answer was cut, or None."""
        return self._begun if self._cut else None

    # Text that was recognised

    def text(self, text: str) -> None:
        self.pieces.text += self._text.add(text)

    def reasoning(self, text: str) -> None:
        self.pieces.reasoning += self._reasoning.add(text)

    def call(self, name: str, call_id: str | None = None) -> None:
        """Tells that a call begins. Raises EnoughError if it is one too many."""
        if self.calls == self.most:
            raise EnoughError
        if call_id is None and self._short_ids:
            call_id = "".join(secrets.choice(_SHORT_ID) for _ in range(9))
        elif call_id is None:
            call_id = f"call_{secrets.token_hex(12)}"
        self._attempt = None
        self._text.trims = True
        self.pieces.tool_calls.append(ToolCallDelta(self.calls, call_id, name))
        self._begun = self.calls
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Tells a part of the arguments of the call that began last."""
        if text:
            self.pieces.tool_calls.append(ToolCallDelta(self.calls - 1, arguments=text))

    def end_call(self) -> None:
        """Tells that the call that began last is whole."""
        self._begun = None

    # Taking text

    def copy_until(self, *markers: str, write: Write, take: bool = True) -> Steps[str | None]:
        """Writes the text before the first of these markers, and takes the marker too if `take`.
        Returns the marker, or None if the text ends before one. If two markers begin at one place,
        the longer one counts."""
        while True:
            found = [(self._left.find(marker), -len(marker), marker) for marker in markers]
            found = [each for each in found if each[0] >= 0]
            if found:
                at, _, marker = min(found)
                write(self._take(at))
                self._take(len(marker) if take else 0)
                return marker
            held = 0
            if self._cut or not self._ended:
                may_end = (each for each in markers if not (self._cut and each in self._tokens))
                held = max((overlap(self._left, each) for each in may_end), default=0)
            write(self._take(len(self._left) - held))
            if self._ended:
                self._left = ""
                return None
            yield

    def value_until(self, *markers: str, behind: Sequence[str], write: Write) -> Steps[str | None]:
        """Like `copy_until`, but a marker counts only if one of `behind` follows it, after spaces,
        or the end of the answer. Other markers are written as text."""
        while (marker := (yield from self.copy_until(*markers, write=write))) is not None:
            if (yield from self._goes_on(behind)):
                return marker
            write(marker)
        return None

    def _goes_on(self, starts: Sequence[str]) -> Steps[bool]:
        """Whether one of `starts` comes next, after spaces. At the end of the text, a part of one
        is enough."""
        while True:
            text = self._left.lstrip(SPACE)
            if text.startswith(tuple(starts)):
                return True
            if not any(start.startswith(text) for start in starts):
                return False
            if self._ended:
                return True
            yield

    def text_until(self, *markers: str) -> Steps[str | None]:
        return (yield from self.copy_until(*markers, write=self.text))

    def until(self, *markers: str, take: bool = True) -> Steps[str]:
        """Returns the short text before the first of these markers. Raises MalformedError if none
        comes."""
        parts: list[str] = []

        def write(text: str) -> None:
            parts.append(text)
            if sum(map(len, parts)) > _MOST:
                raise MalformedError

        if (yield from self.copy_until(*markers, write=write, take=take)) is None:
            raise MalformedError
        return "".join(parts)

    def think_until(self, *markers: str) -> Steps[str | None]:
        self.is_thinking = True
        self._text.trims = True
        if self._reasoning.begun:  # this is a second thought
            self.pieces.reasoning += "\n\n"
        self._reasoning = _Words()
        self._reasoning.trims = True
        marker = yield from self.copy_until(*markers, write=self.reasoning)
        self.is_thinking = False
        return marker

    def sees(self, *starts: str) -> Steps[bool]:
        """Whether one of `starts` comes next, after spaces."""
        while True:
            text = self._left.lstrip()
            if text.startswith(starts):
                return True
            begun = [start for start in starts if start.startswith(text)]
            if self._cut and any(start not in self._tokens for start in begun):
                self._left = ""
            if self._ended or not begun:
                return False
            yield

    def accept(self, start: str) -> Steps[bool]:
        """Takes `start`, and spaces before it, if it comes next. Returns whether it did."""
        seen = yield from self.sees(start)
        if seen:
            self._take(self._left.index(start) + len(start))
        return seen

    def expect(self, start: str) -> Steps[None]:
        if not (yield from self.accept(start)):
            raise MalformedError

    def skip(self, start: str) -> Steps[None]:
        """Takes `start` if it comes next, with no spaces before it."""
        while not (self._ended or self._left.startswith(start)) and start.startswith(self._left):
            yield
        if self._left.startswith(start):
            self._take(len(start))

    def is_over(self) -> Steps[bool]:
        """Whether nothing but spaces is left."""
        while not (self._left.strip() or self._ended):
            yield
        return not self._left.strip()

    def word(self) -> Steps[str]:
        """Returns the letters, digits and `_.-` that come next, after spaces."""
        yield from self.is_over()
        self._take(len(self._left) - len(self._left.lstrip()))
        while True:
            end = next((i for i, c in enumerate(self._left) if not (c.isalnum() or c in "_.-")), -1)
            if end >= 0:
                return self._take(end)
            if self._ended:
                return self._take(len(self._left))
            yield

    def json_value(self, write: Write) -> Steps[bool]:
        """Writes the JSON value that comes next, unchanged. It ends before the first character that
        cannot belong to a value; nothing else is checked. Returns whether the value ended before
        the answer did."""
        return (yield from self._value(write, '"', _OUTSIDE_STRINGS.__contains__))

    def parenthesised(self) -> Steps[str]:
        """Returns the Python expression in parentheses that comes next, "" if there is none."""
        parts: list[str] = []
        if (yield from self.sees("(")):
            yield from self._value(parts.append, "\"'", lambda _: True)
        return "".join(parts)

    def _value(self, write: Write, quotes: str, allowed: Callable[[str], bool]) -> Steps[bool]:
        """Writes a value up to its end. quotes: the characters that begin strings. allowed: whether
        a character may stand outside of strings."""
        yield from self.is_over()
        self._take(len(self._left) - len(self._left.lstrip()))
        depth, begun, quote, escaped = 0, False, "", False
        while True:
            for at, char in enumerate(self._left):
                ends = False
                if quote:
                    if not escaped and char == quote:
                        quote = ""
                        ends = depth == 0
                    escaped = char == "\\" and not escaped
                elif (depth == 0 and begun and char in _AFTER_SCALARS) or not allowed(char):
                    write(self._take(at))
                    return True
                elif char in quotes:
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                    ends = depth <= 0
                begun = True
                if ends:
                    write(self._take(at + 1))
                    return True
            write(self._take(len(self._left)))
            if self._ended:
                return False
            yield

    def json_string(self) -> Steps[str]:
        """Returns the JSON string that comes next. Raises MalformedError for anything else."""
        parts: list[str] = []
        yield from self.json_value(parts.append)
        try:
            value = json.loads("".join(parts))
        except ValueError:
            raise MalformedError from None
        if not isinstance(value, str):
            raise MalformedError
        return value

    def attempt(self, taken: str, steps: Steps[None]) -> Steps[None]:
        """Runs the steps of a parser of calls. If they find no call, the text that they took is
        content, and so is `taken`, which was taken before them, unless the answer was cut there. If
        a call has been told already, its malformed rest is dropped."""
        self._attempt = taken
        try:
            yield from steps
        except MalformedError:
            if self._attempt is not None and self._cut:
                self._text.spaces = ""
            elif self._attempt is not None:
                self.text(self._attempt)
        self._attempt = None
        if not self._cut:
            self.end_call()

    def _take(self, length: int) -> str:
        taken, self._left = self._left[:length], self._left[length:]
        if self._attempt is not None:
            self._attempt += taken
        return taken


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins; a whole `stop` does
    not count."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
