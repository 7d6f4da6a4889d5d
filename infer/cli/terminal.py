"""Between a command and its terminal: exit codes, standard input and output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import typer

from infer import progress
from infer.foreign import reason, shown
from infer.kernels.errors import InferError, InferWarning, RequestError, named
from infer.progress import columns, discard, is_terminal, visible, write_note

# What a shell reports for a program that SIGINT, or SIGPIPE, has ended: 128 + the signal's number.
INTERRUPTED, NOBODY_READS = 130, 141


@contextmanager
def exit_codes(verbose: bool = False) -> Iterator[None]:
    """Ends a command as a shell expects: after an InferError, or an error of the system, with its
    message and code 1, after Ctrl-C with 130, with 141 when nobody reads the output any more, and
    with 1 where all was well but a note was lost. verbose adds the traceback of an error; any other
    exception is a bug, and passes."""
    progress.note_lost = False
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # of a connection too, which must not end us
    try:
        yield
    except BrokenPipeError:
        discard(1)
        raise typer.Exit(NOBODY_READS) from None
    except (InferError, OSError) as error:
        if verbose:
            note(traceback.format_exc().rstrip())
        note(f"error: {in_options(error) if isinstance(error, InferError) else of_system(error)}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if progress.note_lost:
        raise typer.Exit(1)


OPTIONS = ContextVar[Mapping[str, str]]("OPTIONS", default=MappingProxyType({}))
"""The options of the command that runs, by the names of their values in Python."""


def in_options(said: object) -> str:
    """An error or a warning, in which what users choose has the name of its option."""
    return named(getattr(said, "marked", str(said)), OPTIONS.get())


def of_system(error: OSError) -> str:
    """What the system refused, and of which file."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}." if error.filename is None else f"{error.filename}: {reason}."


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C in the block takes effect at its end, so that what it does is done once and wholly."""
    if threading.current_thread() is not threading.main_thread():  # gets no signals
        yield
        return
    pending = False

    def note_it(*_: object) -> None:
        nonlocal pending
        pending = True

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt


def never_fail_to_encode() -> None:
    """Let both output streams replace what their encoding lacks: a model may say anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Text on standard output, at once; a terminal shows control characters and obeys none."""
    write_as_is(visible(text) if is_terminal(sys.stdout) else text)


def write_as_is(text: str) -> None:
    """The same for text that a terminal may obey."""
    if sys.stdout is None:  # as it is where a program is started with the stream closed
        return
    try:
        # typer.echo would take escape sequences out, and would put UTF-8 into an ASCII stream.
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout.fileno())
        raise InferError(f"The output cannot be written: {error.strerror}.") from error


_BULLET = re.compile(r"[-*+•]|\d+[.)]")


def _is_wide(character: str) -> bool:
    """Whether it takes two columns."""
    return unicodedata.east_asian_width(character) in ("W", "F")


class TextWriter:
    """Writes streamed text on standard output. On a terminal a word that would cross the right edge
    goes whole to the next line, and so a word is written when it has ended.

    The line is filled up with spaces, as a terminal takes lines that it has wrapped by itself for
    one when they are copied. Left to the terminal are tables and code: between ```, or four columns
    from the edge. And so is the rest of a line after a character whose width terminals do not agree
    on, such as a joined emoji."""

    def __init__(self) -> None:
        self._wraps = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
        self._word, self._column = "", 0
        self._begins = True  # whether the line has had no word yet
        self._after_space = False
        self._fenced = self._as_it_is = False

    def write(self, text: str) -> None:
        """Text at once, but for a word that may go on."""
        if not self._wraps:
            self._put(text)
            return
        width = columns(sys.stdout)
        pieces: list[str] = []
        for character in visible(text):
            if character.isspace() or _is_wide(character):
                pieces += [self._placed(width), self._placed_one(character, width)]
            else:
                self._word += character
                if len(self._word) >= width:
                    pieces.append(self._placed(width))
        self._put("".join(pieces))

    def end(self) -> None:
        """What was held back, and a line end."""
        self._put((self._placed(columns(sys.stdout)) if self._word else "") + "\n")

    def _put(self, text: str) -> None:
        write(text)

    def _placed(self, width: int) -> str:
        """The word, on the next line if it does not fit into this one."""
        word, self._word = self._word, ""
        if not word:
            return ""
        if self._begins:
            self._begins = False
            self._fenced ^= word.startswith("```")
            indented = self._column >= 4 and not _BULLET.fullmatch(word)
            self._as_it_is |= self._fenced or indented or word.startswith(("```", "|"))
        self._as_it_is |= any(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in word)
        fill = ""
        # The last column is for the space after a word.
        if self._after_space and not self._as_it_is and self._column + len(word) >= width:
            fill, self._column = " " * (width - self._column), 0
        self._column = (self._column + len(word)) % width
        self._after_space = False
        return fill + word

    def _placed_one(self, character: str, width: int) -> str:
        """A space, a line end, or a wide character, which is a word of its own."""
        if character == "\n":
            self._column, self._begins, self._as_it_is = 0, True, False
            return character
        wide, self._after_space = _is_wide(character), character.isspace()
        self._as_it_is |= character == "\t"
        self._begins &= self._after_space
        if wide and self._column == width - 1:  # it does not fit into one column
            self._column = 0
        self._column = (self._column + 1 + wide) % width
        return character


class MarkdownWriter(TextWriter):
    """The same, with headings and **bold** in bold and `code` in colour, where a terminal has both.
    All characters of the text stay, and nothing that was written is written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = False  # such as reasoning
        self._styles = self._wraps and not os.environ.get("NO_COLOR") and os.name != "nt"
        self._line = ""  # how the line begins, as far as that says what it is
        self._block = self._heading = self._bold = self._code = False

    def _put(self, text: str) -> None:
        if not self._styles:
            write(text)
            return
        pieces: list[str] = []
        parts = re.findall(r"\n|`+|\*\*|[^\n`*]+|\*", text)
        for part, after in zip(parts, [*parts[1:], " "], strict=False):
            ends = self._mark(part, after)
            pieces.append(self._styled(part))
            if ends:
                self._bold ^= part == "**"
                self._code ^= part == "`"
        write_as_is("".join(pieces))

    def _mark(self, part: str, after: str) -> bool:
        """Note what a part means, before another; whether it ends a style, which it has itself."""
        if part == "\n":
            self._block ^= self._line.startswith("```")
            self._line, self._heading, self._bold, self._code = "", False, False, False
            return False
        begins = not self._line.strip()
        if len(self._line) < 16:
            self._line = (self._line + part).lstrip()
        if self._block or self._line.startswith("```"):
            return False
        self._heading |= begins and re.fullmatch(r"#{1,6}( .*)?", part.strip()) is not None
        if part == "`" or (part == "**" and not self._code):
            is_on = self._code if part == "`" else self._bold
            if is_on:
                return True
            self._bold |= part == "**" and not after[0].isspace()
            self._code |= part == "`"
        return False

    def _styled(self, part: str) -> str:
        codes = ["2"] if self.dim else []
        if self._block or self._code or self._line.startswith("```"):
            codes.append("36")
        elif self._bold or self._heading:
            codes.append("1")
        return part if part == "\n" or not codes else f"\x1b[{';'.join(codes)}m{part}\x1b[0m"


def note(text: str) -> None:
    """A line on standard error, its control characters visible. Where it cannot be written, no
    answer is lost for it: `exit_codes` tells."""
    write_note(visible(text) + "\n")


@contextmanager
def warnings_as_notes(quiet: bool, told: set[str] | None = None) -> Iterator[None]:
    """Prints the library's warnings in the block as notes at its end, each once; none if quiet.
    told: notes that have been printed before and are not repeated; new ones are added."""
    told = set() if told is None else told
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InferWarning)
        yield
    for warning in caught:
        if not issubclass(warning.category, InferWarning):
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif not quiet and (text := in_options(warning.message)) not in told:
            told.add(text)
            note(f"note: {text}")


class Shown(Protocol):
    """What a command prints."""

    def text(self) -> str: ...
    def json(self) -> dict[str, Any]: ...


def show(report: Shown, as_json: bool) -> None:
    """A report on standard output."""
    if as_json:
        write_json(report.json())
    else:
        write(report.text() + "\n")


def write_json(value: Mapping[str, Any]) -> None:
    """A JSON object on standard output, in ASCII."""
    write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_prompt(given: str | None) -> str:
    """The prompt: as given, or what standard input holds, without its last line end, where "-" or
    nothing is given. Raises typer.BadParameter without a prompt, RequestError for an empty one."""
    if given is not None and given != "-":
        # Of arguments that are not UTF-8, Python has kept the bytes.
        text = _of_bytes(given.encode("utf-8", sys.getfilesystemencodeerrors()), "The prompt")
    elif sys.stdin is None or (given is None and is_terminal(sys.stdin)):
        raise typer.BadParameter(
            'give it after the model, as in infer run demo "Why is the sky blue?", or pipe it in',
            param_hint="PROMPT",
        )
    else:
        text = re.sub(r"\r?\n\Z", "", _of_bytes(sys.stdin.buffer.read(), "Standard input"))
    if not text:
        raise RequestError("The prompt is empty. Give some text after the model, or pipe it in.")
    return text


def read_text(path: str) -> str:
    """That of a file. Raises RequestError for what is none."""
    return _of_bytes(Path(path).read_bytes(), path)


def read_schema(path: str) -> dict[str, Any]:
    """The JSON schema in a file. Raises RequestError for what is none."""
    try:
        schema = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {reason(error)}") from None
    if not isinstance(schema, dict):
        raise RequestError(f"{path} is no JSON schema, which is an object: {shown(schema)}.")
    return schema


def _of_bytes(text: bytes, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not UTF-8: byte {text[error.start]:#04x} at {error.start}. Convert the "
            "text first, for example with iconv."
        ) from error
