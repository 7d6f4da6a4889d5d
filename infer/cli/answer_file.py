"""Writes the answers to a file of prompts, shows progress, and finds what is already answered."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infer.boundaries import shown
from infer.cli.terminal import of_system, uninterrupted, write
from infer.kernels.errors import InferError, RequestError

Id = str | int | float


class HasId(Protocol):
    @property
    def id(self) -> Id: ...


def is_id(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def answer_state(answer: dict[str, Any]) -> tuple[Id, bool]:
    """Returns the id of the request that a line answers, and whether the answer is an error. Raises
    ValueError, TypeError or LookupError for a line that is no answer."""
    if "custom_id" in answer:
        return str(answer["custom_id"]), answer["response"]["status_code"] != 200
    key, failed = answer["id"], "error" in answer
    if not (is_id(key) and (failed or "text" in answer or "choices" in answer)):
        raise ValueError
    return key, failed


class Answers:
    """The output for answers, a line each: standard output, or a file, whose earlier answers are
    kept."""

    def __init__(self, path: str | None, requests: Sequence[HasId]) -> None:
        """Open the file. A last line that was cut off, and errors, are removed: these requests are
        tried again. Raises RequestError if the file holds answers to other requests."""
        self._places = {request.id: place for place, request in enumerate(requests)}
        self.path = None if path is None else Path(path)
        self.done: set[Id] = set()
        self._last, self._sorted = -1, True
        if self.path is None:
            return
        if self.path.is_file():
            self._keep(self.path)
        with open(self.path, "ab"):  # a file that cannot be written is an error now
            pass

    def __str__(self) -> str:
        where = "written" if self.path is None else f"in {self.path}"
        return f"{len(self.done):,} of {len(self._places):,} answers are {where}"

    def _keep(self, path: Path) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        begin = b'{"id": '
        if rest[: len(begin)] != begin[: len(rest)]:
            raise self._foreign(len(lines) + 1, "is not an answer")
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                answer = json.loads(line)
                key, failed = answer_state(answer)
            except (ValueError, TypeError, LookupError, RecursionError):
                raise self._foreign(number, "is not an answer") from None
            if key not in self._places:
                raise self._foreign(number, f"has the id {shown(key)}, which no prompt has")
            if key in self.done:
                raise self._foreign(number, f"has the id {shown(key)} for the second time")
            if not failed:
                self._note(key)
                kept.append(line)
        if rest or len(kept) < len(lines):
            _rewrite(path, kept)

    def _foreign(self, number: int, what: str) -> RequestError:
        return RequestError(
            f"{self.path}, line {number} {what}, so the file does not belong to these prompts. "
            "Give --out another name, or remove the file."
        )

    def _note(self, key: Id) -> None:
        place = self._places[key]
        self.done.add(key)
        self._sorted &= place > self._last
        self._last = place

    def write(self, key: Id, answer: dict[str, Any]) -> None:
        """Write an answer at once. Raises InferError, or BrokenPipeError if nobody reads standard
        output."""
        own = {} if "custom_id" in answer else {"id": key}
        line = json.dumps(own | answer, allow_nan=False) + "\n"
        if self.path is None:
            write(line)
        else:
            end = None
            try:
                with open(self.path, "ab") as file:
                    end = file.tell()
                    file.write(line.encode())
            except OSError as error:
                with suppress(OSError):  # no part of a line stays
                    if end is not None:
                        os.truncate(self.path, end)
                raise InferError(f"{self.path} cannot be written: {of_system(error)}") from error
        self._note(key)

    def sort(self) -> None:
        """Sorts the lines of the file into the order of their prompts, if any is out of it."""
        if self.path is not None and not self._sorted and self.path.is_file():
            lines = self.path.read_bytes().splitlines()
            _rewrite(
                self.path, sorted(lines, key=lambda s: self._places[answer_state(json.loads(s))[0]])
            )
            self._sorted = True


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the lines of a file, all at once or not at all."""
    path = path.resolve()  # the target, if it is a link
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.writelines(line + b"\n" for line in lines)
        shutil.copymode(path, name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


@dataclass
class Progress:
    """The progress so far: answers of this run, how many of them failed, tokens of answers, and
    tokens of prompts."""

    all: int
    answers: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    begun: float = field(default_factory=time.perf_counter)

    @property
    def tps(self) -> float:
        """Tokens per second of all answers together."""
        return self.tokens / max(time.perf_counter() - self.begun, 1e-9)

    def __str__(self) -> str:
        failed = f" ({self.failed} failed)" if self.failed else ""
        return f"answers: {self.answers:,} of {self.all:,}{failed}, {self.tps:,.1f} tokens/s"


class Written:
    """Answers that are written in the order of their requests."""

    def __init__(self, answers: Answers, ids: Sequence[Id], progress: Progress) -> None:
        self._answers, self._ids, self._progress = answers, ids, progress
        self._ready: dict[int, dict[str, Any]] = {}
        self.count = 0

    def put(self, place: int, answer: dict[str, Any], *, failed: bool) -> None:
        """Write an answer once all answers before it are written, and then those that waited for
        it. place: its index in `ids`."""
        self._ready[place] = answer
        self._progress.answers += 1
        self._progress.failed += failed
        while self.count in self._ready:
            self._write(self.count)

    def put_rest(self) -> None:
        """Write the answers that still wait, because no others will come."""
        for place in sorted(self._ready):
            self._write(place)

    def _write(self, place: int) -> None:
        with uninterrupted():
            self._answers.write(self._ids[place], self._ready[place])
            del self._ready[place]
            self.count = place + 1
