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
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import typer

from infer.kernels.errors import InferError, InferWarning, RequestError

# What a shell reports for a program that SIGINT, or SIGPIPE, has ended: 128 + the signal's number.
INTERRUPTED, NOBODY_READS = 130, 141


@contextmanager
def exit_codes(verbose: bool = False) -> Iterator[None]:
    """Ends a command as a shell expects: after an InferError with its message and code 1, after
    Ctrl-C with 130, and with 141 when nobody reads the output any more. verbose adds the traceback
    of an InferError; any other exception is a bug, and passes."""
    try:
        yield
    except InferError as error:
        if verbose:
            traceback.print_exc()
        note(f"error: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard(1)
        raise typer.Exit(NOBODY_READS) from None


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
    """Text on standard output, at once."""
    _write(text, sys.stdout)


def note(text: str) -> None:
    """A line on standard error."""
    _write(text + "\n", sys.stderr)


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


def _write(text: str, stream: TextIO | None) -> None:
    # typer.echo would take escape sequences out, and would put UTF-8 into an ASCII stream.
    if stream is not None:  # as it is where a program is started with the stream closed
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            _discard(stream.fileno())
            raise InferError(f"The output cannot be written: {error.strerror}.") from error


def _discard(descriptor: int) -> None:
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
        text = given
    elif sys.stdin is None or (given is None and is_terminal(sys.stdin)):
        raise typer.BadParameter("give the text, or pipe it in", param_hint="--prompt")
    else:
        try:
            text = re.sub(r"\r?\n\Z", "", sys.stdin.buffer.read().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"Standard input is not UTF-8: byte {error.object[error.start]:#04x} at "
                f"{error.start}. Convert the text first, for example with iconv."
            ) from error
    if not text:
        raise RequestError("The prompt is empty. Give some text with --prompt, or pipe it in.")
    return text


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} GiB"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees the stream (None: the program was started with it closed)."""
    return stream is not None and stream.isatty()


class ProgressLine:
    """A line on standard error that is written over, and gone in the end. Only where a person sees
    it: elsewhere, and with shown=False, nothing is written."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown and is_terminal(sys.stderr)
        self._begin, self._next, self._width = time.perf_counter(), 0.0, 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._replace("")
            self._replace("")

    def show(self, line: str) -> None:
        """Replace the line, ten times a second at most."""
        if self.shown and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + 0.1
            self._replace(line)

    def loading(self, done: int, total: int) -> None:
        """Show that so many of all bytes are loaded, and how fast that went."""
        rate = done / max(time.perf_counter() - self._begin, 1e-9)
        self.show(f"loading {done / total:4.0%}, {size(done)} of {size(total)}, {size(rate)}/s")

    def _replace(self, line: str) -> None:
        _write("\r" + line.ljust(self._width), sys.stderr)  # what was longer is wiped out
        self._width = len(line)
