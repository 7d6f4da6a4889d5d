"""A file of prompts, answered many at once: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.cli.report import Loading, answer_json, table
from infer.cli.terminal import INTERRUPTED, note, of_system, uninterrupted, write
from infer.foreign import reason, shown
from infer.kernels.errors import InferError, ModelError, RequestError, TokenizerError
from infer.keywords import check_names
from infer.llm import LLM, Chat, Stream
from infer.progress import ProgressLine, is_terminal, size
from infer.sampling import SamplingOptions, SamplingParams

Id = str | int | float
_OWN = ("id", "prompt", "messages")
_FAILURES = (RequestError, TokenizerError, ModelError)  # of one answer, beside which others go on


@dataclass(frozen=True)
class Request:
    """A line: text to be answered, or chat messages."""

    id: Id
    prompt: str | list[dict[str, Any]]
    params: SamplingParams


def read_requests(path: str, params: SamplingParams, *, raw: bool) -> list[Request]:
    """The lines of a file, or with "-" of standard input. params: where a line says nothing. raw:
    there is no chat template for messages. Raises RequestError with the number of a wrong line."""
    name = "standard input" if path == "-" else path
    if path != "-":
        content = Path(path).read_bytes()
    else:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    requests: list[Request] = []
    lines: dict[Id, int] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            request = _request(_parsed(line), number, params, raw)
            if request.id in lines:
                raise RequestError(
                    f"The id {shown(request.id)} is that of line {lines[request.id]} too. Give "
                    'each line an "id" of its own, or none; without one, its number is its id.'
                )
        except RequestError as error:
            raise RequestError(f"{name}, line {number}: {error}") from None
        lines[request.id] = number
        requests.append(request)
    if not requests:
        raise RequestError(
            f'There is no prompt in {name}. Give one a line, as in {{"prompt": "Why?"}}.'
        )
    return requests


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        wrong = f"it is not UTF-8: byte {line[error.start]:#04x} at {error.start}."
    except json.JSONDecodeError as error:
        wrong = f"{error.msg} at column {error.colno}."
    except (ValueError, RecursionError) as error:
        wrong = reason(error)
    raise RequestError(
        f'This is not one JSON object, such as {{"prompt": "Why?"}}, all of it in one line: {wrong}'
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _is_id(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def _request(value: Any, number: int, params: SamplingParams, raw: bool) -> Request:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise RequestError(f"A line is an object or a string, not {shown(value)}.")
    names = SamplingOptions.__optional_keys__
    check_names(value, (*_OWN, *sorted(names)), (), "")
    given, prompt = value.get("id", number), value.get("prompt")
    if not _is_id(given):
        raise RequestError(f"id must be a string or a number, not {shown(given)}.")
    if ("prompt" in value) == ("messages" in value):
        raise RequestError("Give either prompt or messages.")
    if "messages" in value:
        prompt = value["messages"]
        if raw:
            raise RequestError("--raw leaves no chat template for messages. Give a prompt.")
        if not (isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)):
            raise RequestError(
                'messages must be a list such as [{"role": "user", "content": "Why?"}], not '
                f"{shown(prompt)}."
            )
    elif not (isinstance(prompt, str) and prompt):
        raise RequestError(f"prompt must be text that is not empty, not {shown(prompt)}.")
    own = {name: value[name] for name in value if name in names}
    if isinstance(own.get("logit_bias"), dict):  # JSON's keys are strings
        with suppress(ValueError):
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    return Request(given, prompt, replace(params, **own) if own else params)


class Answers:
    """Where answers go, a line each: standard output, or a file, which keeps those that it has."""

    def __init__(self, path: str | None, requests: Iterable[Request]) -> None:
        """Without what was cut off in the file, and without errors, which are tried again. Raises
        RequestError for a file that is not of these requests."""
        self._places = {request.id: place for place, request in enumerate(requests)}
        self.path = None if path is None else Path(path)
        self.done: set[Id] = set()
        self._last, self._sorted = -1, True
        if self.path is None:
            return
        if self.path.is_file():
            self._keep(self.path)
        with open(self.path, "ab"):  # what cannot be written is told before any answer is made
            pass

    def __str__(self) -> str:
        where = "written" if self.path is None else f"in {self.path}"
        return f"{len(self.done):,} of {len(self._places):,} answers are {where}"

    def _keep(self, path: Path) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        begin = b'{"id": '
        if rest[: len(begin)] != begin[: len(rest)]:
            raise self._foreign(len(lines) + 1, "is no answer")
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                answer = json.loads(line)
                key, failed = answer["id"], "error" in answer
                if not (_is_id(key) and (failed or "text" in answer)):
                    raise ValueError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise self._foreign(number, "is no answer") from None
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
            f"{self.path}, line {number} {what}, so the file is not that of these prompts. Give "
            "--out another name, or remove the file."
        )

    def _note(self, key: Id) -> None:
        place = self._places[key]
        self.done.add(key)
        self._sorted &= place > self._last
        self._last = place

    def write(self, key: Id, answer: dict[str, Any]) -> None:
        """At once. Raises InferError, or BrokenPipeError."""
        line = json.dumps({"id": key} | answer, allow_nan=False) + "\n"
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
        """Those that came later, to where their prompts are."""
        if self.path is not None and not self._sorted and self.path.is_file():
            lines = self.path.read_bytes().splitlines()
            _rewrite(self.path, sorted(lines, key=lambda s: self._places[json.loads(s)["id"]]))
            self._sorted = True


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """All of it or nothing."""
    path = path.resolve()  # what a link leads to
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
    """So far: answers of this run, those of them that failed, and tokens, of prompts too."""

    all: int
    answers: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    begun: float = field(default_factory=time.perf_counter)

    @property
    def tps(self) -> float:
        """Tokens a second, of all answers together."""
        return self.tokens / max(time.perf_counter() - self.begun, 1e-9)

    def __str__(self) -> str:
        failed = f" ({self.failed} failed)" if self.failed else ""
        return f"answers: {self.answers:,} of {self.all:,}{failed}, {self.tps:,.1f} tokens/s"


def answer_all(
    llm: LLM,
    requests: list[Request],
    answers: Answers,
    *,
    ask: Callable[[str], Chat],
    template_args: Mapping[str, Any],
    tell: Callable[[Progress], None],
) -> Progress:
    """Answer those that are not in `answers`. They come there in the order of the requests; after
    Ctrl-C and errors, so does what is ready beyond the first that is not. ask: what a prompt that
    is text becomes. Twice as many as `max_batch` are open, so that some wait when one ends."""
    left = [request for request in requests if request.id not in answers.done]
    progress = Progress(len(left))
    most = 2 * llm.engine.options.max_batch
    opened: dict[int, Stream] = {}  # by place in `left`, and in its order
    ready: dict[int, dict[str, Any]] = {}
    begun = written = 0

    def put(place: int, answer: dict[str, Any]) -> None:
        ready[place] = answer
        progress.answers += 1
        progress.failed += "error" in answer

    def write_next(place: int) -> None:
        nonlocal written
        with uninterrupted():
            answers.write(left[place].id, ready[place])
            del ready[place]
            written = place + 1

    try:
        while written < len(left):
            while begun < len(left) and len(opened) < most and written not in ready:
                request, place = left[begun], begun
                begun += 1
                text = request.prompt
                prompt = ask(text) if isinstance(text, str) else text
                try:
                    params = request.params.resolved(llm.defaults)
                    stream = llm.stream(prompt, params=params, template_args=template_args)
                    stream._begin()
                    opened[place] = stream
                except _FAILURES as error:
                    put(place, {"error": str(error)})
            # The first takes a step of the model if it has to, which all get their tokens from.
            waits = True
            for place, stream in list(opened.items()):
                try:
                    while waits or stream._is_ready():
                        waits = False
                        progress.tokens += next(stream).token_id is not None
                    continue
                except StopIteration:
                    progress.prompt_tokens += stream.result.prompt_tokens
                    put(place, answer_json(stream.result) | {"seed": stream.result.seed})
                except _FAILURES as error:
                    put(place, {"error": str(error)})
                del opened[place]
            while written in ready:
                write_next(written)
            tell(progress)
    finally:
        for place in sorted(ready):
            write_next(place)
        for stream in opened.values():
            stream.close()
    answers.sort()
    return progress


def run(
    llm: LLM,
    requests: list[Request],
    answers: Answers,
    ask: Callable[[str], Chat],
    template_args: Mapping[str, Any],
    loading: Loading,
    *,
    quiet: bool,
) -> int:
    """`answer_all` with what it shows on standard error; returns the exit code."""
    # On a terminal the answers themselves show how far it is.
    shown = not quiet and (answers.path is not None or not is_terminal(sys.stdout))
    try:
        with ProgressLine(None if shown else False) as line:
            progress = answer_all(
                llm,
                requests,
                answers,
                ask=ask,
                template_args=template_args,
                tell=lambda progress: line.show(str(progress)),
            )
    except KeyboardInterrupt:
        again = "" if answers.path is None else "; the same command goes on from there"
        note(f"interrupted: {answers}{again}")
        return INTERRUPTED
    if not quiet:
        note(batch_text(llm, progress, loading))
    if not progress.failed:
        return 0
    again = "" if answers.path is None else f" {answers.path} says why; a rerun tries them again."
    note(f"error: {progress.failed:,} of {len(requests):,} prompts were not answered.{again}")
    return 1


def batch_text(llm: LLM, progress: Progress, loading: Loading) -> str:
    """What many answers took together, as `infer run --verbose` says of one."""
    memory = llm.stats().memory
    return table(
        {
            "answers": f"{progress.answers - progress.failed:,}, {progress.failed:,} failed",
            "prompts": f"{progress.prompt_tokens:,} tokens",
            "generation": f"{progress.tokens:,} tokens, {progress.tps:,.1f} tokens/s",
            "memory": f"{size(memory.allocated)} on {llm.device.adapter.name} "
            f"({size(memory.peak)} at most)",
            "loading": str(loading),
        }
    )
