"""Answers for event loops: while there are any, one thread of the LLM generates for all of them.

After each step the thread hands each loop its new pieces, in one call. Loops never wait for the
GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from infer.engine.token_engine import TokenAnswer, TokenEngine
from infer.kernels.errors import Uncopied

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")
_PieceT_co = TypeVar("_PieceT_co", covariant=True)
_ResultT_co = TypeVar("_ResultT_co", covariant=True)


class Source(Protocol[_PieceT_co, _ResultT_co]):
    """The part of `llm.Stream` that an AsyncStream reads from."""

    @property
    def result(self) -> _ResultT_co: ...

    @property
    def so_far(self) -> _ResultT_co: ...

    def begin_elsewhere(self) -> TokenAnswer:
        """Begins the answer, which another thread will read. From then on it is generated whenever
        another answer is."""

    def __next__(self) -> _PieceT_co: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _End:
    """The end of a stream. error: what ended it, or None."""

    error: BaseException | None


@dataclass(eq=False)
class _Feed(Generic[PieceT]):
    """A stream that the thread reads, and the queue for its pieces. whole: whether the queue gets
    only the stream's end."""

    stream: Source[PieceT, object]
    answer: TokenAnswer
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[PieceT | _End]
    whole: bool
    ended: bool = False

    def take(self, failed: BaseException | None) -> list[PieceT | _End]:
        """Returns the pieces that have come, without waiting. failed: the error for which no more
        pieces will come, or None."""
        pieces: list[PieceT | _End] = []
        if failed is not None:
            self.stream.close()
        try:
            while failed is not None or self.answer.is_ready:
                piece = next(self.stream)
                if not self.whole:
                    pieces.append(piece)
        except StopIteration:
            pieces.append(_End(failed))
        except BaseException as error:  # the error belongs to the task, not to this thread
            pieces.append(_End(error))
        else:
            return pieces
        self.ended = True
        return pieces


class Runner:
    """Reads all streams of an LLM that event loops wait for."""

    def __init__(
        self, engine: TokenEngine, call: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """call: opens the block in which the LLM counts this thread as calling it."""
        self._engine, self._call = engine, call
        self._lock = threading.Lock()  # guards the two attributes below
        self._feeds: list[_Feed[object]] = []
        self._runs = False
        # Starting a thread for each answer would take the event loop longer than all else.
        self._thread = ThreadPoolExecutor(1, "infer.aio")

    def add(self, feed: _Feed[object]) -> None:
        with self._lock:
            self._feeds.append(feed)
            if not self._runs:
                self._thread.submit(self._run)
                self._runs = True

    def _run(self) -> None:
        while True:
            failed: BaseException | None = None
            try:
                with self._call():
                    self._engine.wait(lambda: any(feed.answer.is_ready for feed in self._feeds))
            except BaseException as error:  # the device is lost
                failed = error
            self._hand_out(failed)
            with self._lock:
                self._feeds = [feed for feed in self._feeds if not feed.ended]
                if not self._feeds:
                    self._runs = False
                    return

    def _hand_out(self, failed: BaseException | None) -> None:
        handed: dict[asyncio.AbstractEventLoop, list[tuple[_Feed[object], list[object]]]] = {}
        for feed in list(self._feeds):
            pieces = feed.take(failed)
            if pieces:
                handed.setdefault(feed.loop, []).append((feed, pieces))
        for loop, parts in handed.items():
            try:
                loop.call_soon_threadsafe(_put, parts)
            except RuntimeError:  # the loop is closed
                for feed, _ in parts:
                    feed.stream.close()


def _put(parts: Sequence[tuple[_Feed[object], Sequence[object]]]) -> None:
    for feed, pieces in parts:
        for piece in pieces:
            feed.queue.put_nowait(piece)


class AsyncStream(Uncopied, AsyncIterator[PieceT], Generic[PieceT, ResultT]):
    """A `Stream` for `async for`. It begins when it is first asked for a piece, and is then
    generated as fast as possible. Iterate it to its end, close it (`aclose`, `async with`), drop
    it, or cancel the task that waits for it: each frees its place for the next answer. From then on
    `result` is the whole result. `so_far` is what has been generated so far, which may be more than
    the pieces that were taken."""

    instead = "Take its result, which can."

    def __init__(self, runner: Runner, stream: Source[PieceT, ResultT], whole: bool) -> None:
        self._runner, self._stream, self._whole = runner, stream, whole
        self._feed: _Feed[PieceT] | None = None
        self._closed = False

    @property
    def result(self) -> ResultT:
        """The result, like `Stream.result`. Raises InferError before the stream has ended."""
        return self._stream.result

    @property
    def so_far(self) -> ResultT:
        """The result of all that has been generated until now, like `Stream.so_far`."""
        return self._stream.so_far

    def begin(self) -> asyncio.Queue[PieceT | _End]:
        """Begins the answer and returns the queue on which its pieces arrive."""
        if self._feed is None:
            loop, answer = asyncio.get_running_loop(), self._stream.begin_elsewhere()
            self._feed = _Feed(self._stream, answer, loop, asyncio.Queue(), self._whole)
            self._runner.add(self._feed)  # type: ignore[arg-type]
        return self._feed.queue

    async def __anext__(self) -> PieceT:
        if self._closed:
            raise StopAsyncIteration
        try:
            queue = self.begin()
            piece = await queue.get()
        except BaseException:
            self.close()
            raise
        if not isinstance(piece, _End):
            return piece
        self.close()
        queue.put_nowait(_End(None))  # for other tasks that wait for this stream
        raise piece.error or StopAsyncIteration

    def close(self) -> None:
        """Closes the stream: generation ends, and `result` is what was generated."""
        self._closed = True
        self._stream.close()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> AsyncStream[PieceT, ResultT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._stream)[1:]}"

    def __del__(self) -> None:
        self._stream.close()


async def together(streams: Sequence[AsyncStream[PieceT, ResultT]]) -> list[ResultT]:
    """Generates all streams at once, to their ends. Returns their results."""
    try:
        for stream in streams:
            stream.begin()
        for stream in streams:
            async for _ in stream:
                pass
        return [stream.result for stream in streams]
    finally:
        for stream in streams:
            stream.close()
