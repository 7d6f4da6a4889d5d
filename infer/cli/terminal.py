"""Between a command and its terminal: exit codes, standard input and output, a line of progress."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import typer

from infer.kernels.errors import InferError, InferWarning, RequestError

# What a shell reports for a program that SIGINT, or SIGPIPE, has ended: 128 + the signal's number.
INTERRUPTED, NOBODY_READS = 130, 141


# Whether a line for standard error could not be written there.
_note_lost = False


@contextmanager
def exit_codes(verbose: bool = False) -> Iterator[None]:
    """Ends a command as a shell expects: after an InferError, or an error of the system, with its
    message and code 1, after Ctrl-C with 130, with 141 when nobody reads the output any more, and
    with 1 where all was well but a note was lost. verbose adds the traceback of an error; any other
    exception is a bug, and passes."""
    global _note_lost
    _note_lost = False
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
        note(f"error: {error if isinstance(error, InferError) else of_system(error)}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if _note_lost:
        raise typer.Exit(1)


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


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters but for line ends and tabs
    as \\x1b and the like. What comes out of files or out of a model may hold any."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Text on standard output, at once; a terminal shows control characters and obeys none."""
    if sys.stdout is None:  # as it is where a program is started with the stream closed
        return
    try:
        # typer.echo would take escape sequences out, and would put UTF-8 into an ASCII stream.
        sys.stdout.write(visible(text) if is_terminal(sys.stdout) else text)
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
            write(text)
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
        write("".join(pieces))

    def end(self) -> None:
        """What was held back, and a line end."""
        write((self._placed(columns(sys.stdout)) if self._word else "") + "\n")

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


def note(text: str) -> None:
    """A line on standard error, its control characters visible. Where it cannot be written, no
    answer is lost for it: `exit_codes` tells."""
    _note(visible(text) + "\n")


@contextmanager
def warnings_as_notes(quiet: bool) -> Iterator[None]:
    """What the library warns of in the block is noted at its end, unless quiet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InferWarning)
        yield
    for warning in caught:
        if not issubclass(warning.category, InferWarning):
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif not quiet:
            note(f"note: {warning.message}")


def _note(text: str) -> None:
    global _note_lost
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr.fileno())
        _note_lost = True


def discard(descriptor: int) -> None:
    """From now on, whatever is written there is lost."""
    # Python flushes at its exit too; what is still buffered must have somewhere to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


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


def _of_bytes(text: bytes, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not UTF-8: byte {text[error.start]:#04x} at {error.start}. Convert the "
            "text first, for example with iconv."
        ) from error


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} GiB"


def columns(stream: TextIO) -> int:
    """Of the terminal that the stream is."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees the stream (None: the program was started with it closed)."""
    return stream is not None and stream.isatty()


def _is_seen(stream: TextIO | None) -> bool:
    """The same, and in a notebook, whose streams are ipykernel's and no terminals."""
    return is_terminal(stream) or type(stream).__module__.partition(".")[0] == "ipykernel"


class ProgressLine:
    """A line on standard error that is written over, and gone in the end. shown=None: where a
    person sees it, and nothing is written elsewhere."""

    def __init__(self, shown: bool | None = None) -> None:
        self.shown = _is_seen(sys.stderr) if shown is None else shown
        self._begin = self._end = time.perf_counter()
        self._next, self._width = 0.0, 0
        self._read: float | None = None  # when the weights were

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._replace("")
            self._replace("")

    def show(self, line: str, now: bool = False) -> None:
        """Replace the line, ten times a second at most but for what is to be shown now."""
        if self.shown and (now or time.perf_counter() >= self._next):
            self._next = time.perf_counter() + 0.1
            self._replace(line)

    @property
    def waiting(self) -> float:
        """Seconds since the weights were read."""
        return 0.0 if self._read is None else time.perf_counter() - self._read

    def loading(self, what: str, done: int, total: int) -> None:
        """The progress of `infer.load`: bytes that are fetched, then bytes of weights, and how fast
        they come; when they are there, the kernels that are compiled, and since when nothing else
        is done."""
        now = time.perf_counter()
        if what == "download":
            if total == 0:
                self._begin = now
            else:
                self._show_bytes("fetching", done, total, now - self._begin)
            self._end = now  # of fetching: the weights begin
        elif what == "kernels":
            if self._read is not None:
                self.show(f"compiling kernels: {done} of {total}, {self.waiting:.1f} s")
        elif done == total:
            self._read = now
            self.show("compiling kernels", now=True)
        else:
            self._show_bytes("reading weights", done, total, now - self._end)

    def _show_bytes(self, what: str, done: int, total: int, seconds: float) -> None:
        rate = size(done / max(seconds, 1e-9))
        self.show(f"{what}: {done / total:.0%}, {size(done)} of {size(total)}, {rate}/s")

    def _replace(self, line: str) -> None:
        line = visible(line)[: columns(sys.stderr) - 1]
        _note("\r" + line.ljust(self._width))  # what was longer is wiped out
        self._width = len(line)
