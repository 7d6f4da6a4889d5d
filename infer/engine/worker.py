"""The process of an engine: `python -m infer.engine.worker`, which `infer.engine.isolated` starts.

Messages come on its standard input and go to its standard output. It ends when the input ends,
because then the process that started it has ended, in whatever way. One thread generates for all
answers, and sends what a step has made in one message. An error of the GPU ends the process: its
starter starts another, which goes on with the answers from the tokens that came.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, TextIO

from infer.boundaries import reason
from infer.engine.answers import Answer
from infer.engine.constraint import Constraint
from infer.engine.engine import Engine
from infer.engine.host_memory import HostMemory
from infer.engine.messages import (
    Ask,
    Begin,
    Call,
    Cancel,
    Failed,
    Leave,
    Load,
    Made,
    More,
    Part,
    Pipe,
    Progress,
    Ready,
    Returned,
    Stats,
)
from infer.kernels.errors import DeviceError, InferError, InferWarning, OutOfMemoryError
from infer.llm import LLM
from infer.loading import load
from infer.progress import write_note
from infer.sampling import SamplingParams

_GRACE = 10.0  # seconds to end in by itself
_UNTAKEN = 2  # parts of what a call gives that wait at most
_COMPILERS = 2  # constraints that are made at once
_WARM_TOKENS = 64  # of the prompt that is compiled for beforehand


def main() -> None:
    # Its end is up to who started it, who may want answers to end before: a terminal, or a service
    # manager, sends signals to both.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    try:
        _Worker(_standard_streams()).run()
    except (DeviceError, BrokenPipeError) as error:
        _end(1, str(error))
    except BaseException:
        _end(1, traceback.format_exc().rstrip())
    _end(0)


def _end(code: int, message: str = "") -> None:
    """End at once, whatever other threads are doing."""
    if message:
        print(message, file=sys.stderr, flush=True)
    os._exit(code)


def _standard_streams() -> Pipe:
    """Returns the pipe on standard input and output; from here on, prints go to standard error."""
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return Pipe(os.fdopen(reader, "rb"), os.fdopen(writer, "wb"))


@dataclass(frozen=True)
class _Compiled:
    """A constraint that was compiled for an answer, or why it could not be."""

    begin: Begin
    constraint: Constraint | InferError | None


class _Worker:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._inbox = SimpleQueue[Any]()  # None: the end
        self._engine: Engine | None = None  # once it is loaded
        self._answers: dict[int, Answer] = {}
        self._compiling: set[int] = set()  # answers that wait for their constraint
        self._compilers = ThreadPoolExecutor(_COMPILERS, "compile")
        self._begun: set[int] = set()  # of which it was said how much the cache had
        self._credits: dict[int, threading.Semaphore] = {}  # of calls

    def run(self) -> None:
        order: Load = self._pipe.receive()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        try:
            llm, notes = self._load(order)
        except InferError as error:
            self._pipe.send(Failed(error))
            _end(1)
        self._llm, self._engine = llm, llm.engine
        engine = llm.engine
        gpu = replace(engine.gpu, handle=None)
        names, stats = engine.adapter_names, engine.stats()
        ready = Ready(gpu, engine.config, engine.options, names, stats, llm.summary, notes)
        self._pipe.send(ready)
        self._generate(engine)
        llm.close()

    def _load(self, order: Load) -> tuple[LLM, tuple[str, ...]]:
        """The model, and what was warned of, which is told where the process was started."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", InferWarning)
            progress = _seldom(lambda *report: self._pipe.send(Progress(*report)))
            llm = load(order.model, **order.options, offline=True, progress=progress)
            if order.memory is not None:
                descriptor, capacity = order.memory
                llm.engine.share(HostMemory(capacity, descriptor=descriptor))
        warnings.showwarning = _tell
        params = SamplingParams().resolved(llm.defaults)
        llm.engine.runner.warm_up(min(_WARM_TOKENS, llm.context - 1), params)
        if not llm.device.software:  # there it takes too long for what may never come
            llm.engine.runner.compile_batches(params)
        ours = [w for w in caught if issubclass(w.category, InferWarning)]
        for w in caught:
            if w not in ours:
                warnings.showwarning(w.message, w.category, w.filename, w.lineno)
        return llm, tuple(getattr(w.message, "marked", str(w.message)) for w in ours)

    def _receive(self) -> None:
        with suppress(EOFError):
            while True:
                message = self._pipe.receive()
                if isinstance(message, Call):
                    self._credits[message.key] = threading.Semaphore(_UNTAKEN)
                elif isinstance(message, More | Cancel):
                    self._release(message)
                if not isinstance(message, More):
                    self._inbox.put(message)
        self._inbox.put(None)
        for key in list(self._credits):  # nobody takes what these give
            self._release(Cancel(key))
        if self._engine is not None:
            time.sleep(_GRACE)  # it may hang
        _end(1)

    def _release(self, message: More | Cancel) -> None:
        """Let a call go on. Done by this thread, because the other may be waiting for it."""
        key = message.key
        credit = self._credits.get(key)
        if isinstance(message, Cancel):
            self._credits.pop(key, None)
        if credit is not None:
            credit.release()

    def _generate(self, engine: Engine) -> None:
        """Generate until the input ends."""
        while True:
            if self._answers and self._inbox.empty():
                engine.wait(self._is_due)
                self._hand_out()
                continue
            if not (self._answers or self._credits):  # a call takes it in, too
                engine.settle()
            message = self._inbox.get()
            if message is None:
                return
            self._take(message, engine)

    def _is_due(self) -> bool:
        ready = any(answer.is_ready for answer in self._answers.values())
        return ready or not self._inbox.empty()

    def _take(self, message: object, engine: Engine) -> None:
        match message:
            case Begin(key):
                if message.request.params.masked:
                    self._compiling.add(key)
                    self._compilers.submit(self._compile, message)
                else:
                    self._begin(message, None, engine)
            case _Compiled(begin, constraint) if begin.key in self._compiling:
                self._compiling.discard(begin.key)
                self._begin(begin, constraint, engine)
            case Cancel(key):
                self._compiling.discard(key)
                if (answer := self._answers.pop(key, None)) is not None:
                    answer.close()
                    self._begun.discard(key)
            case Call(key):
                if (credit := self._credits.get(key)) is not None:  # else it was cancelled
                    work = threading.Thread(target=self._call, args=(message, credit), daemon=True)
                    work.start()
            case Leave():
                for answer in self._answers.values():
                    answer.close()
                self._answers.clear()
                engine.settle()
                engine.restoring.is_outlived = True
            case Ask():
                self._pipe.send(Stats(engine.stats()))

    def _compile(self, message: Begin) -> None:
        """Runs in a thread of its own: large schemas take seconds."""
        constraint: Constraint | InferError | None
        try:
            constraint = self._llm.constraint(message.request.params)
        except Exception as error:
            constraint = _sendable(error)
        self._inbox.put(_Compiled(message, constraint))

    def _begin(
        self, message: Begin, constraint: Constraint | InferError | None, engine: Engine
    ) -> None:
        """constraint: that of the answer, if it has one, or why it could not be made."""
        try:
            if isinstance(constraint, InferError):
                raise constraint
            request = replace(message.request, constraint=constraint)
            self._answers[message.key] = engine.answer(request)
        except InferError as error:
            self._pipe.send(Made((), (), (), [(message.key, error)]))

    def _hand_out(self) -> None:
        steps: list[Any] = []
        begun: list[Any] = []
        drafts: list[Any] = []
        ended: list[Any] = []
        for key, answer in self._answers.items():
            over = answer.ended  # looked at first: as in `TokenEngine.next_step`
            timings = answer.timings
            if answer.steps and timings.drafted_tokens:
                drafts.append((key, timings.drafted_tokens, timings.accepted_tokens))
            while answer.steps:
                step = answer.steps.popleft()
                steps.append((key, step.token, step.logprobs))
                if key not in self._begun:
                    self._begun.add(key)
                    seconds = timings.prefill_seconds - timings.queue_seconds
                    begun.append((key, timings.reused_tokens, seconds))
            if answer.error is not None or over:
                ended.append((key, _sendable(answer.error)))
        for key, _ in ended:
            del self._answers[key]
            self._begun.discard(key)
        if steps or ended:
            self._pipe.send(Made(steps, begun, drafts, ended))

    def _call(self, message: Call, credit: threading.Semaphore) -> None:
        """Runs in a thread of its own, so that answers are handed out meanwhile."""
        key, error, engine = message.key, None, self._engine
        assert engine is not None
        try:
            parts = engine.call(message.method, *message.arguments)
            for part in islice(parts, message.skip, None):
                credit.acquire()
                if key not in self._credits:
                    return
                self._pipe.send(Part(key, part))
        except Exception as raised:
            if isinstance(raised, DeviceError) and not isinstance(raised, OutOfMemoryError):
                _end(1, str(raised))
            error = _sendable(raised)
        self._credits.pop(key, None)
        self._pipe.send(Returned(key, error))


def _tell(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning on standard error, as a note if it is ours: nobody called this code."""
    if issubclass(category, InferWarning):
        write_note(f"note: {message}\n")
    else:
        write_note(warnings.formatwarning(message, category, filename, lineno, line))


def _sendable(error: Exception | None) -> InferError | None:
    """The error, as one that the other process knows."""
    if error is None or isinstance(error, InferError):
        return error
    traceback.print_exception(error)
    return InferError(f"The engine failed: {reason(error)}")


def _seldom(report: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Reports progress only as often as a person can see: beginnings, ends, ten times a second."""
    next_at = 0.0

    def pass_on(what: str, done: int, total: int) -> None:
        nonlocal next_at
        now = time.perf_counter()
        if now >= next_at or done in (0, total):
            next_at = now + 0.1
            report(what, done, total)

    return pass_on


if __name__ == "__main__":
    main()
