"""Between a command and its terminal: exit codes, standard input and output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TextIO

import typer

from infer import progress
from infer.boundaries import reason, shown
from infer.kernels.errors import (
    InferError,
    InferWarning,
    ModelNotFoundError,
    RequestError,
    named,
)
from infer.progress import columns, discard, is_terminal, visible, write_note

# The exit codes of a program that SIGINT, or SIGPIPE, has ended: 128 + the signal's number.
INTERRUPTED, NOBODY_READS = 130, 141


@contextmanager
def exit_codes(verbose: bool = False) -> Iterator[None]:
    """Ends a command as a shell expects: after an InferError, or an error of the system, with its
    message and code 1, or 2 where what was asked for is wrong; after Ctrl-C with 130, with 141 when
    nobody reads the output any more, and with 1 where all was well but a note was lost. verbose
    adds the traceback of an error; any other exception is a bug, and passes."""
    progress.note_lost = False
    if callable(signal.getsignal(signal.SIGINT)):  # it is ignored in the background: leave that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # closed connections must not end us
    try:
        yield
    except BrokenPipeError:
        discard(1)
        raise typer.Exit(NOBODY_READS) from None
    except (InferError, OSError) as error:
        if verbose:
            write_note(visible(traceback.format_exc()))
        note(f"error: {in_options(error) if isinstance(error, InferError) else of_system(error)}")
        wrong = isinstance(error, RequestError | ModelNotFoundError)
        raise typer.Exit(2 if wrong else 1) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if progress.note_lost:
        raise typer.Exit(1)


OPTIONS = ContextVar[Mapping[str, str]]("OPTIONS", default=MappingProxyType({}))
"""The options of the command that runs, by the names of their values in Python."""


def in_options(said: object) -> str:
    """The text of an error or a warning, in which names of parameters are replaced by the names of
    options."""
    return named(getattr(said, "marked", str(said)), OPTIONS.get())


def of_system(error: OSError) -> str:
    """Returns the system's reason as a sentence, with the file's name if there is one."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}." if error.filename is None else f"{error.filename}: {reason}."


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that the block runs once and completely."""
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
    """Let both output streams replace characters that their encoding lacks: a model may write
    anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Writes text on standard output, at once; a terminal shows control characters, obeys none."""
    write_as_is(visible(text) if is_terminal(sys.stdout) else text)


def write_as_is(text: str) -> None:
    """Writes text on standard output, at once, with control characters that a terminal obeys."""
    if sys.stdout is None:  # the program was started with the stream closed
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


_MAY_GO_ON = re.compile(r"[`*#]+\Z")


class MarkdownWriter:
    """Writes streamed text on standard output. Where a terminal has styles, headings and **bold**
    are bold and `code` is coloured. All characters of the text stay, none are added, and the
    terminal breaks the lines: what is copied from it is the text."""

    def __init__(self) -> None:
        self.dim = False  # such as reasoning
        self._styles = (
            is_terminal(sys.stdout)
            and os.environ.get("TERM") != "dumb"
            and not os.environ.get("NO_COLOR")
            and os.name != "nt"
        )
        self._held = ""  # a mark at the end, which may go on
        self._line = ""  # the beginning of the line, which tells its kind
        self._block = self._heading = self._bold = self._code = False

    def write(self, text: str) -> None:
        """Write a text at once, except for a mark at its end that may continue."""
        if not self._styles:
            write(text)
            return
        text = self._held + visible(text)
        found = _MAY_GO_ON.search(text)
        self._held = found[0] if found else ""
        self._write_styled(text.removesuffix(self._held))

    def end(self) -> None:
        """Writes the text that was held back, and a line end."""
        self._write_styled(self._held + "\n")
        self._held = ""

    def _write_styled(self, text: str) -> None:
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
        if not self._styles:
            return part
        codes = ["2"] if self.dim else []
        if self._block or self._code or self._line.startswith("```"):
            codes.append("36")
        elif self._bold or self._heading:
            codes.append("1")
        return part if part == "\n" or not codes else f"\x1b[{';'.join(codes)}m{part}\x1b[0m"


def wrapped(text: str, stream: TextIO | None) -> str:
    """Text for people. If the stream is a terminal, lines that are too long are broken between
    words. The rest of a line is indented like its beginning, or, in a table of names and values,
    like the value."""
    if stream is None or not is_terminal(stream):
        return text
    width = columns(stream)
    return "\n".join(
        line if len(line) <= width else _broken(line, width) for line in text.split("\n")
    )


def _broken(line: str, width: int) -> str:
    begin = len(line) - len(line.lstrip())
    name = re.match(r" *\S+(?: \S+)* {2,}", line)
    column = begin if name is None else name.end()
    if column > width // 2:  # too little would be left for the value
        column = begin + 2
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Mapping[str, str], indent: str = "") -> str:
    """Lines with a name and a value each; all values are in one column."""
    width = max(map(len, rows))
    lines = (f"{indent}{name:{width}}  {value}" for name, value in rows.items())
    return "\n".join(visible(line).replace("\n", "\\n") for line in lines)


@contextmanager
def quiet() -> Iterator[None]:
    """In the block, whatever libraries write to standard error is lost. Only for a process in which
    nothing else runs meanwhile: it has one standard error."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    try:
        discard(2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def note(text: str) -> None:
    """Write a note on standard error, with control characters made visible. If it cannot be
    written, the answer goes on, and `exit_codes` tells at the end."""
    write_note(wrapped(visible(text), sys.stderr) + "\n")


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


def tell(text: str) -> None:
    """Write lines for people on standard output."""
    write(wrapped(text, sys.stdout) + "\n")


class Shown(Protocol):
    """The output of a command, as text and as JSON."""

    def text(self) -> str: ...
    def json(self) -> dict[str, Any]: ...


def show(report: Shown, as_json: bool) -> None:
    """Write a report on standard output."""
    if as_json:
        write_json(report.json())
    else:
        tell(report.text())


def write_json(value: Mapping[str, Any]) -> None:
    """Write a JSON object on standard output, in ASCII."""
    write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_prompt(given: str | None) -> str:
    """The prompt: the text given, or, if none or "-" was given, standard input without its last
    line end. Raises RequestError if there is no prompt, or an empty one."""
    if given is not None and given != "-":
        # Python keeps the bytes of arguments that are not UTF-8.
        text = _of_bytes(given.encode("utf-8", sys.getfilesystemencodeerrors()), "The prompt")
    elif sys.stdin is None or (given is None and is_terminal(sys.stdin)):
        raise RequestError(
            'Give a prompt after the model, as in infer run demo "Why is the sky blue?", or pipe '
            "one in."
        )
    else:
        text = re.sub(r"\r?\n\Z", "", _of_bytes(sys.stdin.buffer.read(), "Standard input"))
    if not text:
        raise RequestError("The prompt is empty. Give some text after the model, or pipe it in.")
    return text


def read_text(path: str) -> str:
    """The text of a file. Raises RequestError if the file cannot be read or is not UTF-8."""
    return _of_bytes(read_file(path), path)


def read_file(path: str) -> bytes:
    """Returns the bytes of a file that an option names. Raises RequestError where it cannot be
    read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from error


def read_schema(path: str) -> dict[str, Any]:
    """Returns the JSON schema in a file. Raises RequestError where there is none in it."""
    try:
        schema = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {reason(error)}") from None
    if not isinstance(schema, dict):
        raise RequestError(
            f"{path} is not a JSON schema, which must be an object: {shown(schema)}."
        )
    return schema


def _of_bytes(text: bytes, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not UTF-8: byte {text[error.start]:#04x} at {error.start}. Convert the "
            "text first, for example with iconv."
        ) from error
