"""Answers in event loops: those of `generate`, whoever comes, goes and fails beside them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import infer
from infer import LLM
from infer.engine.scheduler import Decode, Events, Prefill
from infer.hub import DEMO

pytestmark = pytest.mark.demo

PROMPTS = [f"{begin} upon a time, there was" for begin in ("Once", "Twice", "Now", "Then")]
PROMPTS += ["The cat", "A red barrel"]
TOKENS = 8


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[str]:
    return [llm.generate(prompt, max_tokens=TOKENS).text for prompt in PROMPTS]


def is_idle(llm: LLM) -> bool:
    """Whether nothing is left of answers that have ended, once the engine has made a step."""
    llm.generate("One", max_tokens=1)
    engine = llm.engine
    step = engine.scheduler.next(lambda position: 1)
    return not (engine.pool.stats.in_use or engine.jobs.of or step)


async def text_of(llm: LLM, prompt: str) -> str:
    return "".join([chunk.text async for chunk in llm.astream(prompt, max_tokens=TOKENS)])


def failing(ids: Any, logits: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError


def test_tasks_are_answered_together(
    llm: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []

    class Counted(Events):
        def submits(self, work: Sequence[Prefill] | Decode) -> None:
            if isinstance(work, Decode):
                loads.append(len(work.sequences))

    monkeypatch.setattr(llm.engine, "events", Counted())

    async def main() -> None:
        assert await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS)) == expected

    asyncio.run(main())
    assert max(loads) == 4
    assert is_idle(llm)


def test_whole_answers(llm: LLM, expected: list[str]) -> None:
    async def main() -> None:
        listed, single = await asyncio.gather(
            llm.agenerate(PROMPTS[1:], max_tokens=TOKENS),
            llm.agenerate(PROMPTS[0], max_tokens=TOKENS),
        )
        assert [result.text for result in [single, *listed]] == expected
        assert single.finish_reason == "length"
        assert single.completion_tokens == TOKENS
        samples = await llm.agenerate(PROMPTS[0], n=2, max_tokens=TOKENS)
        assert [result.text for result in samples] == [expected[0]] * 2
        with pytest.raises(infer.RequestError, match="A prompt is text"):
            await llm.agenerate([None])  # type: ignore[list-item]
        with pytest.raises(infer.RequestError, match="temperatur is not an option"):
            llm.astream("Once", temperatur=1)  # type: ignore[call-arg]

    asyncio.run(main())


def test_the_loop_goes_on_meanwhile(llm: LLM) -> None:
    """Neither the engine nor a logits processor runs in the thread of the event loop."""
    threads: set[int] = set()
    go_on = threading.Event()

    def waiting(ids: Any, logits: np.ndarray) -> np.ndarray:
        threads.add(threading.get_ident())
        assert go_on.wait(timeout=600)
        return logits

    async def main() -> None:
        task = asyncio.create_task(llm.agenerate("Once", logits_processor=waiting, max_tokens=2))
        while not threads:
            await asyncio.sleep(0)
        go_on.set()
        assert (await task).completion_tokens == 2
        assert threading.get_ident() not in threads

    asyncio.run(main())


@pytest.mark.parametrize("end", ["cancel", "aclose", "break", "with", "timeout"])
def test_a_stream_that_ends_early_frees_its_row(llm: LLM, expected: list[str], end: str) -> None:
    async def some(stream: infer.AsyncStream[Any, Any], begun: asyncio.Event) -> None:
        async for _ in stream:
            begun.set()

    async def main() -> None:
        stream, begun = llm.astream("Once upon a time"), asyncio.Event()
        result = stream.so_far
        beside = asyncio.create_task(text_of(llm, PROMPTS[0]))
        if end == "cancel":
            task = asyncio.create_task(some(stream, begun))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif end == "timeout":
            await anext(stream)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(some(stream, begun), 0)
            await stream.aclose()  # the task may not have begun to wait
        elif end == "with":
            async with stream:
                await anext(stream)
        else:
            async for _ in stream:
                break
            if end == "aclose":
                await stream.aclose()
                await stream.aclose()
            else:
                del stream
        gc.collect()
        if end != "break":
            assert [chunk async for chunk in stream] == []
        assert await beside == expected[0]
        assert result.finish_reason == "cancelled"
        assert result.completion_tokens < 100

    asyncio.run(main())
    assert is_idle(llm)


def test_what_takes_long_to_prepare_is_done_in_another_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = llm.encode_pieces

    def encode_pieces(*arguments: Any) -> Iterator[list[int]]:
        threads.append(threading.get_ident())
        return encode(*arguments)

    monkeypatch.setattr(llm, "encode_pieces", encode_pieces)
    asyncio.run(llm.agenerate("One", max_tokens=1))
    assert threads
    assert threading.get_ident() not in threads


def test_an_error_is_that_of_its_task_alone(llm: LLM, expected: list[str]) -> None:
    async def main() -> None:
        *texts, error = await asyncio.gather(
            *(text_of(llm, prompt) for prompt in PROMPTS[:2]),
            llm.agenerate(PROMPTS[2], logits_processor=failing),
            return_exceptions=True,
        )
        assert isinstance(error, ZeroDivisionError)
        assert texts == expected[:2]

    asyncio.run(main())
    assert is_idle(llm)


def test_loops_of_several_threads_beside_a_stream(llm: LLM, expected: list[str]) -> None:
    found: dict[int, str] = {}

    def run(i: int) -> None:
        found[i] = asyncio.run(text_of(llm, PROMPTS[i]))

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    texts = [llm.generate(prompt, max_tokens=TOKENS).text for prompt in PROMPTS[3:]]
    for thread in threads:
        thread.join(timeout=600)
    assert [*(found[i] for i in range(3)), *texts] == expected
    assert is_idle(llm)


def test_a_loop_that_ends_leaves_nothing(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.astream("Once upon a time")
    loop.run_until_complete(anext(stream))
    loop.close()
    while llm._runner._runs:
        threading.Event().wait(0.01)
    assert stream.result.finish_reason == "cancelled"
    assert is_idle(llm)


@pytest.mark.parametrize("where", ["loop", "thread", "processor"])
@pytest.mark.usefixtures("same_kernels")
def test_close_in_the_middle(where: str) -> None:
    llm = infer.load(DEMO, max_batch=4)

    def closing(ids: Any, logits: np.ndarray) -> np.ndarray:
        llm.close()
        return logits

    async def main() -> None:
        streams = [llm.astream(prompt) for prompt in PROMPTS[: 3 if where == "processor" else 6]]
        for stream in streams[:2]:
            await anext(stream)
        tasks = [asyncio.create_task(to_its_end(stream)) for stream in streams]
        await asyncio.sleep(0)  # all have begun
        if where == "loop":
            llm.close()
        elif where == "thread":
            await asyncio.to_thread(llm.close)
        else:
            tasks.append(
                asyncio.create_task(to_its_end(llm.astream("A", logits_processor=closing)))
            )
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, infer.ClosedError)
        with pytest.raises(infer.ClosedError):
            await llm.agenerate("Once")

    async def to_its_end(stream: infer.AsyncStream[Any, Any]) -> None:
        async for _ in stream:
            pass

    asyncio.run(main())
    llm.close()
    assert llm.stats().memory.allocated == 0
