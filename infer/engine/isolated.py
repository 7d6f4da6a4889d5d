"""An engine in a process of its own (`infer.engine.worker`), which is started again if it ends.

A lost GPU, or memory exhausted inside a driver, ends a process. This side keeps of each answer its
prompt, its tokens so far and a seed. That is enough for the next process to go on with it, as a
token is a function of these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from pickle import PicklingError
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, cast

from infer.boundaries import reason
from infer.engine.host_memory import CAN_SHARE, HostMemory
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
    packed,
)
from infer.engine.token_engine import EngineStats, Request, Step, Timings, TokenAnswer, TokenEngine
from infer.kernels.errors import (
    ClosedError,
    DeviceError,
    InferError,
    RequestError,
    UnsupportedError,
)
from infer.kernels.gpu.adapters import AdapterInfo
from infer.keywords import Progress as Report
from infer.progress import write_note

DEATHS, WITHIN = 3, 60.0  # so many, within so many seconds, are the last
_ASK_EVERY = 5.0  # seconds without a word to it
_STATS_SECONDS = 2.0  # that are waited for them
_CLOSE_SECONDS = 15.0  # that it has to end
_LINES = 5  # of its standard error that are told


@dataclass(eq=False)
class WorkerAnswer(TokenAnswer):
    """generated: all tokens that came. deaths: of the process, since the last token came."""

    engine: WorkerEngine
    key: int
    request: Request
    timings: Timings = field(default_factory=Timings)
    steps: deque[Step] = field(default_factory=deque)
    generated: list[int] = field(default_factory=list)
    ended: bool = False
    cancelled: bool = False
    error: InferError | None = None
    deaths: int = 0
    begun: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.stop_ids = self.request.stop_ids

    @property
    def priority(self) -> int:
        return self.request.priority

    def message(self) -> Begin:
        """The message that begins it, or goes on with it."""
        return Begin(self.key, replace(self.request, generated=self.generated, constraint=None))

    def take(self, step: Step, now: float) -> None:
        timings = self.timings
        if not self.generated:
            timings.prefill_seconds = now - self.begun
        else:
            timings.decode_seconds = now - self.begun - timings.prefill_seconds
            timings.decoded_tokens += 1
        self.deaths = 0
        self.generated.append(step.token)
        self.steps.append(step)


@dataclass(eq=False)
class _Call:
    method: str
    arguments: tuple[Any, ...]
    parts: deque[Any] = field(default_factory=deque)
    count: int = 0  # of parts that came
    ended: bool = False
    error: InferError | None = None
    deaths: int = 0  # as those of an answer


class _Process:
    """One process of an engine, and the threads that write to it and read its standard error."""

    def __init__(self, order: Load) -> None:
        """order: the first message. Raises OSError if it cannot be started, and what pickling
        raises."""
        self._outbox = SimpleQueue[bytes | None]()  # messages; None: the end
        self.send(order)
        self._process = subprocess.Popen(
            # -P: nothing of the current folder
            [sys.executable, "-P", "-m", "infer.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if order.memory is None else order.memory[:1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())},
        )
        self._stdin = cast(BinaryIO, self._process.stdin)
        self._stdout = cast(BinaryIO, self._process.stdout)
        self._stderr = cast(BinaryIO, self._process.stderr)
        self._pipe = Pipe(self._stdout, self._stdin)
        self._lines = deque[str](maxlen=_LINES)
        self.heard = time.monotonic()  # when a message came last
        self._threads = [
            threading.Thread(target=each, name="infer worker", daemon=True)
            for each in (self._write, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Send without waiting. Raises what pickling raises."""
        self._outbox.put(packed(message))

    def _write(self) -> None:
        with suppress(OSError):  # it has ended, which its reader sees
            while True:
                try:
                    data = self._outbox.get(timeout=_ASK_EVERY)
                except Empty:
                    data = packed(Ask())
                if data is None:
                    break
                self._pipe.write(data)
        with suppress(OSError):
            self._stdin.close()

    def _read_stderr(self) -> None:
        for line in self._stderr:
            text = line.decode(errors="replace")
            self._lines.append(text.rstrip())
            write_note(text)

    def finish(self) -> None:
        """Let it end."""
        self._outbox.put(None)

    def note(self, text: str) -> None:
        """Treat this text as if it had come on its standard error."""
        self._lines.append(text)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the process has ended."""
        message = self._pipe.receive()
        self.heard = time.monotonic()
        return message

    def end(self) -> str:
        """Wait for its end, and kill it if need be. Returns why it ended."""
        self.finish()
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._stdout.close()
        for thread in self._threads:
            thread.join(1.0)  # another process may have its standard error
        if not self._threads[-1].is_alive():
            self._stderr.close()
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = "\n".join(self._lines)
        return f"{why}: {said}" if said else f"{why}."

    def kill(self) -> None:
        self._process.kill()


def _python_path() -> list[str]:
    """The folders of this process's modules; the current one by its name, as it may be gone."""
    here = ""
    with suppress(OSError):
        here = os.getcwd()
    return [path for path in (path or here for path in sys.path) if path]


class WorkerEngine(TokenEngine):
    """Starts the process; `load` waits until it is ready."""

    def __init__(
        self, model: Path, options: Mapping[str, Any], memory: HostMemory | None = None
    ) -> None:
        """options: further arguments of `load`; they hold for all processes to come. memory: the
        one that `host_cache` of these is part of; None: the processes have one to themselves."""
        self._memory, self._own_memory = memory, None
        if memory is None and options.get("host_cache") and CAN_SHARE:
            memory = self._own_memory = HostMemory(options["host_cache"])
        shared = None
        if memory is not None and memory.descriptor is not None:
            shared = memory.descriptor, memory.capacity
        self._order = Load(str(model), dict(options), shared)
        self._changed = threading.Condition()
        self._answers: dict[int, WorkerAnswer] = {}
        self._calls: dict[int, _Call] = {}
        self._keys = count()
        self._reports = SimpleQueue[Progress | None]()  # None: loaded, or not to be loaded
        self._ready: Ready | None = None  # of the first process
        self._runs = False  # there is a process that has loaded the model
        self._closing = False
        self._error: InferError | None = None  # why nothing can be generated any more
        self._deaths = deque[float](maxlen=DEATHS)
        self._failed_loads = 0  # in a row
        self._stats: EngineStats | None = None  # with the counts of processes that have ended
        self._ended: EngineStats | None = None  # the last of the process before
        self._pid = os.getpid()
        self.on_failure: Callable[[InferError], object] = lambda error: None
        try:
            self._process = _Process(self._order)
        except OSError as error:
            raise DeviceError(f"The process of the engine cannot be started: {error}.") from error
        except (AttributeError, TypeError, PicklingError) as error:
            raise RequestError(
                f"An option of load() cannot be told to another process: {reason(error)}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="infer engine", daemon=True)
        self._thread.start()

    def load(self, progress: Report) -> None:
        """Wait until it is loaded. Raises what `infer.load` raises, and DeviceError if the process
        ends."""
        while (report := self._next_report()) is not None:
            progress(report.what, report.done, report.total)
        if self._error is not None:
            raise self._error
        if self._ready is None:
            raise ClosedError("The model was closed while it was loaded.")
        ready, options = self._ready, self._ready.options
        self.config, self.adapter_names = ready.config, ready.adapter_names
        self.summary = ready.summary
        self.context, self.slots = options.context, options.max_batch
        self.vocab_size = ready.config.vocab_size
        self.notes = ready.notes

    def _next_report(self) -> Progress | None:
        while True:
            with suppress(Empty):
                return self._reports.get(timeout=0.5)  # without one, Ctrl-C waits on Windows

    @property
    def gpu(self) -> AdapterInfo:
        assert self._ready is not None
        return self._ready.gpu

    @property
    def restarts(self) -> bool:
        return not self._runs

    @property
    def silent(self) -> float:
        return time.monotonic() - self._process.heard if self._runs else 0.0

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process._process.pid

    # The process

    def _run(self) -> None:
        """Run one process after another."""
        while True:
            try:
                while True:
                    self._take(self._process.receive())
            except EOFError:
                pass
            except Exception:  # of ours: the next one may do better
                write_note(traceback.format_exc())
                self._process.kill()
            why = self._process.end()
            with self._changed:
                ran, self._runs = self._runs, False
                if not (self._closing or self._error):
                    self._died(why, ran)
                over = self._closing or self._error is not None
                if not over:
                    try:
                        self._process = _Process(self._order)
                    except OSError as error:
                        self._fail(f"The engine cannot be started again: {error}.")
                        over = True
                self._changed.notify_all()
            if over:
                self._reports.put(None)
                if self._error is not None and not self._closing:
                    self.on_failure(self._error)
                return

    def _died(self, why: str, ran: bool) -> None:
        """ran: whether it had loaded the model."""
        now = time.monotonic()
        self._deaths.append(now)
        self._failed_loads = 0 if ran else self._failed_loads + 1
        if self._ready is None:
            self._fail(f"The process of the engine ended while it loaded the model, by {why}")
        elif len(self._deaths) == DEATHS and now - self._deaths[0] < WITHIN:
            self._fail(
                f"The process of the engine ended {DEATHS} times within {WITHIN:.0f} seconds, at "
                f"last by {why}"
            )
        elif self._failed_loads == DEATHS:  # each may take longer than that
            self._fail(
                f"The process of the engine could not load the model again in {DEATHS} attempts. "
                f"It ended by {why}"
            )
        else:
            write_note(f"note: the process of the engine ended by {why} It is started again.\n")
            # Nobody knows which answers were running: assume those with tokens, then by priority.
            answers = sorted(self._answers.values(), key=lambda a: (not a.generated, a.priority))
            begun: list[WorkerAnswer | _Call] = [*answers[: self.slots], *self._calls.values()]
            for each in begun if ran else ():
                each.deaths += 1
                if each.deaths > 1 and not each.ended:  # perhaps it is what they died of
                    error = InferError(
                        "The process of the engine ended twice at this answer, and is not asked "
                        f"for it again. It ended by {why}"
                    )
                    self._end(each, error)

    def _fail(self, message: str) -> None:
        self._error = DeviceError(message)
        for answer in list(self._answers.values()):
            self._end(answer, DeviceError(message))
        for call in list(self._calls.values()):
            self._end(call, DeviceError(message))

    def _take(self, message: object) -> None:
        match message:
            case Made():
                self._take_made(message)
            case Progress():
                if self._ready is None:
                    self._reports.put(message)
            case Ready():
                self._begin_all(message)
            case Failed(error):
                if self._ready is not None and isinstance(error, DeviceError):
                    self._process.note(str(error))  # memory may be free in a while
                    return
                with self._changed:
                    self._fail(str(error))
                    self._error = error
            case Stats(stats):
                with self._changed:
                    self._stats = self._counted(stats)
                    self._changed.notify_all()
            case Part(key, value):
                with self._changed:
                    if (call := self._calls.get(key)) is not None:
                        call.parts.append(value)
                        call.count, call.deaths = call.count + 1, 0
                        self._changed.notify_all()
            case Returned(key, error):
                with self._changed:
                    if (call := self._calls.get(key)) is not None:
                        self._end(call, error)
                        self._changed.notify_all()

    def _begin_all(self, ready: Ready) -> None:
        """Send what was asked for while there was no engine, or begun by an earlier one."""
        with self._changed:
            if self._ready is None:
                # The next one is to be the same, whatever else needs memory then.
                fitted = {"context": ready.options.context, "max_batch": ready.options.max_batch}
                self._order = replace(self._order, options={**self._order.options, **fitted})
                self._ready = ready
            self._runs, self._ended = True, self._stats
            self._stats = self._counted(ready.stats)
            for answer in list(self._answers.values()):
                self._process.send(answer.message())
            for key, call in list(self._calls.items()):
                if not call.ended:
                    self._process.send(Call(key, call.method, call.arguments, call.count))
        self._reports.put(None)

    def _take_made(self, made: Made) -> None:
        now = time.perf_counter()
        with self._changed:
            answers = self._answers
            for key, reused, seconds in made.begun:
                if (answer := answers.get(key)) is not None and not answer.generated:
                    answer.timings.reused_tokens = reused
                    answer.timings.prefilled_tokens = len(answer.request.prompt) - reused
                    answer.timings.queue_seconds = max(0.0, now - answer.begun - seconds)
            for key, token, logprobs in made.steps:
                if (answer := answers.get(key)) is not None:
                    answer.take(Step(token, logprobs=logprobs), now)
            for key, drafted, accepted in made.drafts:
                if (answer := answers.get(key)) is not None:
                    answer.timings.drafted_tokens = drafted
                    answer.timings.accepted_tokens = accepted
            for key, error in made.ended:
                if (answer := answers.get(key)) is not None:
                    self._end(answer, error)
            self._changed.notify_all()

    def _end(self, asked: WorkerAnswer | _Call, error: InferError | None) -> None:
        if isinstance(asked, WorkerAnswer):
            del self._answers[asked.key]
        asked.error = error
        asked.ended = True

    # Answers

    def answer(self, request: Request) -> WorkerAnswer:
        self.check_prompt(request.prompt)
        self.check_adapter(request.adapter)
        if request.logits_processor is not None:
            raise UnsupportedError(
                "A logits processor needs the engine in its own process. Load the model without "
                "isolate."
            )
        answer = WorkerAnswer(self, next(self._keys), request)
        with self._changed:
            self._check_open()
            if self._runs:
                self._process.send(answer.message())
            self._answers[answer.key] = answer
        return answer

    def cancel(self, answer: WorkerAnswer) -> None:
        if answer.ended or answer.cancelled:
            return
        answer.cancelled = True
        with self._changed:
            if self._answers.pop(answer.key, None) is not None and self._runs:
                self._process.send(Cancel(answer.key))
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        self._check_process()
        with self._changed:
            while not ready():
                self._changed.wait(0.5)  # without one, Ctrl-C waits on Windows

    def _check_open(self) -> None:
        self._check_process()
        if self._closing:
            raise ClosedError("This LLM has been closed. Load the model again.")
        if self._error is not None:
            raise DeviceError(str(self._error))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DeviceError(
                "This process was forked from the one that had loaded the model, and cannot share "
                "it. Load it here."
            )

    # Calls

    def call(self, what: str, *arguments: Any) -> Generator[Any, None, None]:
        call, key = _Call(what, arguments), next(self._keys)
        with self._changed:
            self._check_open()
            self._calls[key] = call
            if self._runs:
                self._process.send(Call(key, what, arguments, 0))
        try:
            while True:
                self.wait(lambda: bool(call.parts) or call.ended)
                if call.parts:
                    yield call.parts.popleft()
                    self._process.send(More(key))
                elif call.error is not None:
                    raise call.error
                else:
                    return
        finally:
            with self._changed:
                del self._calls[key]
                if not call.ended:
                    self._process.send(Cancel(key))

    def stats(self) -> EngineStats:
        """The engine's statistics; the last known ones if it does not answer. Counts go on where
        its process was started again, from the last that were known."""
        with self._changed:
            self._check_open()
            before = self._stats
            if self._runs:
                self._process.send(Ask())
                self._changed.wait_for(lambda: self._stats is not before, _STATS_SECONDS)
            assert self._stats is not None  # once it is loaded
            return self._stats

    def _counted(self, stats: EngineStats) -> EngineStats:
        return stats if self._ended is None else stats.continuing(self._ended)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            for answer in list(self._answers.values()):
                self._end(answer, ClosedError("The LLM was closed in the middle of this answer."))
            for call in self._calls.values():
                if not call.ended:
                    self._end(call, ClosedError("The LLM was closed in the middle of this call."))
            process = self._process
            if self._runs and self._memory is not None and not self._memory.is_ending:
                process.send(Leave())
            process.finish()
            if not self._runs:  # it need not load to the end
                process.kill()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # `on_failure` may close it
            self._thread.join()
        if self._own_memory is not None:
            self._own_memory.close()
