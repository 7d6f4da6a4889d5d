"""From a request for answers to its response: what all endpoints that generate share."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import msgspec

from infer.kernels.errors import InferError
from infer.llm import Prompt, samples
from infer.results import Chunk, Result
from infer.sampling import SamplingParams
from infer.server.endpoint import Call
from infer.server.engine import Answer, EngineClient, LongPromptError, in_thread
from infer.server.errors import ApiError, PromptTooLongError, api_error
from infer.server.protocol import MAX_ANSWERS, RequestT, named_in
from infer.text.answer import answer_style
from infer.text.chat import THINKING_ARGS, left_out
from infer.text.tools import ToolOptions, check_tools


@dataclass(frozen=True)
class Answers:
    """The answers to one request, `n` to each of its prompts, in the order of the prompts. model:
    the name by which clients know the model. created: seconds since the epoch."""

    model: str
    each: Sequence[Answer]
    n: int = 1
    created: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def results(self) -> list[Result]:
        return [answer.result for answer in self.each]

    @property
    def of_prompts(self) -> list[Result]:
        """The first result of each prompt. Counts of prompt tokens come from these: a prompt is
        computed once."""
        return self.results[:: self.n]


class Format(Protocol):
    """The way in which an API writes the answers to one request. Each method returns the next bytes
    of a stream, which may be empty, but `whole`, which returns the body of a response in one
    piece."""

    media_type: str  # the content type of a stream
    keepalive: bytes  # bytes that show that a stream lives

    def whole(self) -> msgspec.Struct: ...

    def begin(self) -> bytes: ...

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Returns the bytes for a piece of the answer at an index."""

    def end(self, index: int, result: Result) -> bytes:
        """Returns the bytes for the end of the answer at an index."""

    def finish(self) -> bytes:
        """Returns the bytes for the end of the stream, after all answers have ended."""

    def error(self, error: ApiError) -> bytes:
        """Returns the bytes that tell of an error and end the stream."""


@dataclass(frozen=True)
class Job:
    """A request that has been read. param: the name of the parameter that holds the prompts.
    params: the sampling parameters, or None if nothing is to be generated. format: makes the format
    in which the answers are written. template_args: variables for the chat template. tools: the
    functions that an answer to a chat may call; None: the answers are plain text. unlisted: names
    of functions that messages describe, so that the template does not. n: answers to each prompt.
    suffix: the text that follows the answers. before: awaited with the engine, the encoded prompts
    and the adapter, before anything is generated. counts: whether a prompt that is too long is
    encoded to its end, so that the error can tell its length. begins_first: whether a stream begins
    before it tells that a prompt is too long."""

    prompts: Sequence[Prompt]
    param: str
    params: SamplingParams | None
    format: Callable[[Answers], Format]
    template_args: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolOptions | None = None
    unlisted: Collection[str] = ()
    n: int = 1
    stream: bool = False
    suffix: str | None = None
    before: Callable[[EngineClient, list[list[int]], str | None], Awaitable[None]] | None = None
    counts: bool = False
    begins_first: bool = False


def generate(
    read: Callable[[Call[RequestT]], Job],
) -> Callable[[Call[RequestT]], Coroutine[Any, Any, None]]:
    """Makes the work of an endpoint that generates. read: reads a request as a job; it may raise
    ApiError."""

    async def run(call: Call[RequestT]) -> None:
        service = call.service
        model, adapter = service.model(call.request.model)
        job = await call.read(partial(read, call))
        count = len(job.prompts) * job.n
        if not 1 <= count <= MAX_ANSWERS:
            raise ApiError(
                400,
                f"A request has 1 to {MAX_ANSWERS} answers, and this one {count}.",
                param=job.param,
            )
        with service.admission.admitted(count):
            try:
                opened = await _open(call, job, adapter)
            except PromptTooLongError as error:
                if not (job.stream and job.begins_first):
                    raise
                format = job.format(Answers(model, ()))
                await _begin(call, format)
                await call.part(format.begin() + format.error(error), last=True)
                return
            call.is_encoded()
            job = replace(job, prompts=())
            label = adapter or service.name
            watched = [service.metrics.watched(label, answer) for answer in opened]
            answers = Answers(model, watched, job.n)
            try:
                if job.stream:
                    await _stream(call, answers, job.format)
                else:
                    await _finish(answers, service.stopped)
                    await call.reply(job.format(answers).whole())
            finally:
                call.tell(_told(answers))

    return run


def _told(answers: Answers) -> str:
    """Returns the log's text about the answers to a request: the tokens of all answers together,
    and the longest of each of their times. Times are known once a token has come."""
    prompts, times = answers.of_prompts, [each.timings for each in answers.results]
    made = sum(each.completion_tokens for each in answers.results)
    tokens = (
        f"{sum(each.prompt_tokens for each in prompts)} tokens in, "
        f"{sum(each.timings.reused_tokens for each in prompts)} of them cached, {made} out; "
    )
    if not made:
        return f"{tokens}no token was generated"
    return (
        f"{tokens}queue {max(each.queue_seconds for each in times):.3f}s, "
        f"prefill {max(each.prefill_seconds - each.queue_seconds for each in times):.3f}s, "
        f"decode {max(each.decode_seconds for each in times):.3f}s"
    )


async def _open(call: Call[Any], job: Job, adapter: str | None) -> list[Answer]:
    engine, params = call.service.engine, job.params
    try:
        prompts = await encode(call, job)
        if job.before is not None:
            await job.before(engine, prompts, adapter)
        if job.params is None:
            each = [ids for ids in prompts for _ in range(job.n)]
            return [_Nothing(Result(finish_reason="length", prompt_tokens=len(i))) for i in each]
        if job.params.schema is not None and check_tools(**(job.tools or {})).required:
            call.warnings.append("tool_choice asks for a call, which no schema of answers holds.")
            params = replace(job.params, schema=None)
        salt, priority = call.cache_salt, getattr(call.request, "priority", 0)
        return [
            await engine.open(ids, own["params"], adapter, job.tools, salt, priority)  # type: ignore[arg-type]
            for ids, own in samples(prompts, job.n, {"params": params})
        ]
    except InferError as error:
        told = api_error(error)
        if told.status == 400:
            told.param = named_in(told.message, call.request) or job.param
        raise told from error


def _template_args(job: Job) -> dict[str, Any]:
    """Returns the variables that the chat template may read. Functions that the template should
    describe are among them as `tools`."""
    args = dict(job.template_args)
    offered = (check_tools(**job.tools).offered or ()) if job.tools else ()
    if listed := [tool for tool in offered if tool["function"]["name"] not in job.unlisted]:
        args["tools"] = listed
    return args


async def encode(call: Call[Any], job: Job) -> list[list[int]]:
    """Returns the token ids of each prompt. Raises ApiError (400) for a prompt that cannot be
    encoded, PromptTooLongError for one that is too long."""
    engine, template_args = call.service.engine, _template_args(job)
    given: Sequence[Prompt] = [without_billing(prompt) for prompt in job.prompts]
    if job.suffix is not None:
        given = [_infill(engine, prompt, job.suffix) for prompt in given]
    encoded = [
        await encode_prompt(engine, each, template_args, job.param, counts=job.counts)
        for each in given
    ]
    for prompt in given:
        await note_left_out(call, prompt, template_args)
    return encoded


async def note_left_out(call: Call[Any], prompt: Prompt, template_args: Mapping[str, Any]) -> None:
    """Adds warnings about the parts of an encoded prompt that the chat template has left out, and
    about arguments that it does not read."""
    engine = call.service.engine
    if not engine.templates or not _is_chat(prompt):
        return
    if template_args.get("reasoning_effort") == "none" and not answer_style(engine.template).thinks:
        template_args = {k: v for k, v in template_args.items() if k not in THINKING_ARGS}
    own = engine.templates, prompt, engine.special_tokens, template_args
    call.warnings += await in_thread(partial(left_out, *own))


def _is_chat(prompt: Prompt) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return bool(prompt) and isinstance(prompt[0], Mapping)


# The fields of Claude Code's billing line differ in each request. Nothing that stands behind them
# would be found in the cache.
_BILLING = re.compile(
    r"^[ \t]*x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;)+[ \t]*\n?", re.I | re.M
)


def without_billing(prompt: Prompt) -> Prompt:
    """Returns a chat without the fields of billing lines in its system messages. All other text
    stays."""
    if not _is_chat(prompt):
        return prompt
    messages: list[Any] = []
    for message in prompt:
        if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
            content = unbilled(message.get("content"))
            if not content and message.get("content"):
                continue
            message = {**message, "content": content}
        messages.append(message)
    return messages


def unbilled(content: Any) -> Any:
    """Returns the content of a system message, which is a text or a list of parts, without the
    fields of billing lines. A part that held nothing else is left out."""
    match content:
        case str() if _BILLING.search(content):
            return _BILLING.sub("", content).lstrip("\n")
        case list():
            parts = [(part, unbilled(part)) for part in content]
            return [new for part, new in parts if new == part or new["text"]]
        case {"text": str(text)}:
            return {**content, "text": unbilled(text)}
    return content


async def encode_prompt(
    engine: EngineClient,
    prompt: Prompt,
    template_args: Mapping[str, Any],
    param: str,
    room: int = 1,
    counts: bool = False,
) -> list[int]:
    """Returns the token ids of a prompt. room: how many tokens must fit into the context after it.
    counts: as in `Job`. Raises PromptTooLongError if the prompt leaves less room."""
    most = engine.context - room
    try:
        ids = await engine.encode(prompt, template_args, most=most, counts=counts)
    except LongPromptError as error:
        long = error
    else:
        if len(ids) <= most:
            return ids
        long = LongPromptError(len(ids), True)
    raise PromptTooLongError(long.tokens, most, engine.context, is_whole=long.is_whole, param=param)


def _infill(engine: EngineClient, prefix: Prompt, suffix: str) -> str:
    """Returns the prompt whose continuation stands between a prefix and a suffix. Raises ApiError
    (400) for a model that cannot fill in the middle, and for a prefix that is not text."""
    if engine.infill is None:
        raise ApiError(
            400,
            "This model has no tokens for what stands between two texts, so it takes no suffix.",
            param="suffix",
            code="unsupported_parameter",
        )
    if not isinstance(prefix, str):
        raise ApiError(400, "Where there is a suffix, the prompt is a text.", param="prompt")
    return engine.infill.text(prefix, suffix)


@dataclass(frozen=True)
class _Nothing:
    """An answer without tokens, for requests that generate nothing."""

    result: Result

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> Chunk:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        pass


async def _finish(answers: Answers, stopped: asyncio.Event) -> None:
    """Generates all answers to their ends. Raises the first error that ends one."""
    async with _reading(answers.each, stopped) as inbox:
        left = len(answers.each)
        while left:
            for _, piece in await inbox.take():
                if isinstance(piece, Exception):
                    raise piece
                left -= piece is None


async def _stream(call: Call[Any], answers: Answers, written: Callable[[Answers], Format]) -> None:
    """Sends the answers as a stream. After some seconds without a piece, a sign of life is sent, so
    that no proxy takes the connection for dead. written: makes the format of the answers."""
    left = len(answers.each)
    async with _reading(answers.each, call.service.stopped, call.service.keepalive) as inbox:
        format = written(answers)
        await _begin(call, format)
        if data := format.begin():
            await call.part(data)
        while left:
            pieces = await inbox.take()
            data = b"" if pieces else format.keepalive
            for index, piece in pieces:
                if isinstance(piece, Exception):
                    await call.part(data + format.error(api_error(piece)), last=True)
                    return
                if piece is None:
                    left -= 1
                    data += format.end(index, answers.each[index].result)
                else:
                    data += format.piece(index, piece)
            if data and left:  # a piece may have no text yet
                await call.part(data)
    await call.part(data + format.finish(), last=True)


async def _begin(call: Call[Any], format: Format) -> None:
    await call.start(
        {
            "Content-Type": format.media_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # so that nginx passes each part on at once
        }
    )


class _Inbox:
    """A queue of the pieces of all answers to a request. Each entry is the index of an answer and a
    piece of it; None stands for its end, an exception for the error that ended it. Only one task
    may take entries."""

    def __init__(self, seconds: float | None) -> None:
        """seconds: the longest time that `take` waits; None: until there is an entry."""
        self._loop, self._seconds = asyncio.get_running_loop(), seconds
        self._items: list[tuple[int, Chunk | Exception | None]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None  # set once for many pieces

    def put(self, index: int, piece: Chunk | Exception | None) -> None:
        self._items.append((index, piece))
        self._wake()

    async def take(self) -> list[tuple[int, Chunk | Exception | None]]:
        """Returns all entries that have come; an empty list if none has come in time."""
        if not self._items:
            self._waiter = self._loop.create_future()
            if self._seconds is not None:
                self._until = self._loop.time() + self._seconds
                if self._timer is None:
                    self._timer = self._loop.call_at(self._until, self._tick)
            await self._waiter
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        self._timer = None
        if self._until > self._loop.time():
            self._timer = self._loop.call_at(self._until, self._tick)
        else:
            self._wake()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@asynccontextmanager
async def _reading(
    answers: Sequence[Answer], stopped: asyncio.Event, seconds: float | None = None
) -> AsyncIterator[_Inbox]:
    """Opens an inbox for the pieces of all answers, which are generated together. The answers end
    with the block. Once `stopped` is set, the inbox gets an error. seconds: as for `_Inbox`."""
    inbox = _Inbox(seconds)

    async def read(index: int, answer: Answer) -> None:
        end: Exception | None = None
        try:
            async for chunk in answer:
                inbox.put(index, chunk)
        except Exception as error:
            end = error
        inbox.put(index, end)

    async def stop() -> None:
        await stopped.wait()
        inbox.put(0, ApiError(503, "The server is shutting down."))

    tasks = [asyncio.create_task(read(i, answer)) for i, answer in enumerate(answers)]
    tasks.append(asyncio.create_task(stop()))
    try:
        await asyncio.sleep(0)  # the answers begin before anything is sent
        yield inbox
    finally:
        inbox.close()
        for answer in answers:
            await answer.aclose()
        for task in tasks:
            task.cancel()
