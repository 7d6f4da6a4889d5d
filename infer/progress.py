"""A line of progress on standard error, and how to write there."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TextIO

note_lost = False
"""Whether something for standard error could not be written there."""


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters but for line ends and tabs
    as \\x1b and the like. What comes out of files or out of a model may hold any."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_note(text: str) -> None:
    """Text on standard error. What cannot be written there is lost, and so is all that follows."""
    global note_lost
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr.fileno())
        note_lost = True


def discard(descriptor: int) -> None:
    """From now on, whatever is written there is lost."""
    # Python flushes at its exit too; what is still buffered must have somewhere to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} GiB"


_UNITS = {"": 1, "b": 1} | {
    unit + end: base**power
    for power, unit in enumerate("kmgt", 1)
    for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_size(text: str) -> int | None:
    """4GB, 512MiB or a number, as bytes; None if the text is no amount of memory."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


def columns(stream: TextIO) -> int:
    """Returns the width in columns of the terminal that the stream is; 80 where it is unknown."""
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
                self._show_bytes("downloading", done, total, now - self._begin)
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
        write_note("\r" + line.ljust(self._width))  # what was longer is wiped out
        self._width = len(line)
