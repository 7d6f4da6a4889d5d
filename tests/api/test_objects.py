"""The objects of the API (LLMs, streams, results): their states, equality, repr and parsed values,
with the bundled model."""

from __future__ import annotations

import asyncio
import copy
import json
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import TypedDict

import infer
from infer import LLM
from infer.hub import DEMO

pytestmark = pytest.mark.demo

STORY = "Once upon a time"

pydantic = pytest.importorskip("pydantic")


class Model(pydantic.BaseModel):  # type: ignore[misc]
    age: int = pydantic.Field(ge=0, le=99)
    tags: list[bool] = pydantic.Field(max_length=2)


@dataclass
class Data:
    yes: bool
    no: bool


class Typed(TypedDict):
    yes: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO) as llm:
        yield llm


# Ends


@pytest.mark.usefixtures("same_kernels")
def test_generate_raises_where_another_thread_closes_the_model() -> None:
    """In the middle of a prompt, whose first part is computed: nothing must be taken for an answer
    that is none."""
    llm = infer.load(DEMO)
    closer, real = threading.Thread(target=llm.close), llm.engine.runner.submissions.read

    def closing(*args: Any) -> Any:
        if closer.ident is None:
            closer.start()
            while not all(answer.cancelled for answer in llm.engine.jobs.of.values()):
                threading.Event().wait(0.001)
        return real(*args)

    llm.engine.runner.submissions.read = closing  # type: ignore[method-assign]
    with pytest.raises(infer.ClosedError, match="was closed in the middle of this"):
        llm.generate([5] * 700, max_tokens=40)
    closer.join(timeout=600)
    assert not closer.is_alive()


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.full)])
def test_generate_raises_for_answers_that_were_closed_before_they_were_read(isolate: bool) -> None:
    llm = infer.load(DEMO, context=256, isolate=isolate)
    streams, real = [], infer.Stream._finish

    def finish(self: infer.Stream) -> infer.Result:
        streams.append(self)
        if len(streams) == 2:
            closer = threading.Thread(target=llm.close)
            closer.start()
            closer.join(timeout=600)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer.Stream, "_finish", finish)
        with pytest.raises(infer.ClosedError, match="was closed in the middle of this"):
            llm.generate([STORY, "One day"], max_tokens=5)
    assert len(streams) == 2


@pytest.mark.usefixtures("same_kernels")
def test_a_stream_that_has_ended_stays_whole_when_the_model_is_closed() -> None:
    llm = infer.load(DEMO, context=256)
    stream = llm.stream(STORY, max_tokens=3)
    list(stream)
    closer = threading.Thread(target=llm.close)
    closer.start()
    closer.join(timeout=600)
    assert list(stream) == []
    assert stream.result.finish_reason == "length"


def close(stream: infer.Stream) -> None:
    stream.close()


def drop(stream: infer.Stream) -> None:
    stream.__del__()  # what the end of the last reference calls


@pytest.mark.parametrize("end", [close, drop])
def test_statistics_leave_out_answers_that_nobody_waits_for(
    llm: LLM, end: Callable[[infer.Stream], None]
) -> None:
    begun, new, kept = (llm.stream(STORY, max_tokens=30) for _ in range(3))
    next(begun)
    new._begin()
    assert (llm.stats().running, llm.stats().waiting) == (1, 1)
    end(begun)
    end(new)
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)
    next(kept)
    assert (llm.stats().running, llm.stats().waiting) == (1, 0)
    kept.close()


def test_statistics_leave_out_cancelled_tasks(llm: LLM) -> None:
    async def main() -> tuple[int, int]:
        stream = llm.astream(STORY, max_tokens=200)
        await anext(stream)
        stream.close()
        stats = llm.stats()
        return stats.running, stats.waiting

    assert asyncio.run(main()) == (0, 0)


# Results


def test_a_stream_has_its_result_when_it_has_ended(llm: LLM) -> None:
    stream = llm.stream(STORY, max_tokens=3)
    for _ in range(3):
        with pytest.raises(infer.InferError, match="This stream has not ended, so it has no resul"):
            _ = stream.result
        next(stream)
    assert len(stream.so_far.token_ids) == 3
    list(stream)
    assert stream.result is stream.so_far
    assert stream.result.finish_reason == "length"


def test_a_closed_stream_has_what_there_is(llm: LLM) -> None:
    with llm.stream(STORY, max_tokens=3) as stream:
        first = next(stream)
    assert (stream.result.text, stream.result.finish_reason) == (first.text, "cancelled")


def test_a_stream_of_an_event_loop_has_its_result_when_it_has_ended(llm: LLM) -> None:
    async def main() -> None:
        async with llm.astream(STORY, max_tokens=3) as stream:
            with pytest.raises(infer.InferError, match="This stream has not ended"):
                _ = stream.result
            async for _ in stream:
                assert stream.so_far.token_ids
        assert len(stream.result.token_ids) == 3

    asyncio.run(main())


def test_results_are_equal_by_what_was_said(llm: LLM) -> None:
    first, second = (llm.generate(STORY, max_tokens=6) for _ in range(2))
    assert first == second
    assert (first.timings, first.seed) != (second.timings, second.seed)
    assert first != llm.generate(STORY, max_tokens=5)
    calls = [infer.ToolCall(id, "weather", "{}") for id in "ab"]
    assert calls[0] == calls[1] != infer.ToolCall("a", "weather", '{"a": 1}')


def test_a_result_has_the_seed_that_samples_it_again(llm: LLM) -> None:
    first = llm.generate(STORY, max_tokens=12, temperature=1.5)
    assert isinstance(first.seed, int)
    assert llm.generate(STORY, max_tokens=12, temperature=1.5, seed=first.seed) == first
    seeds = [result.seed for result in llm.generate(STORY, max_tokens=1, n=3, seed=4)]
    assert seeds == [4, 5, 6]


@pytest.mark.parametrize(
    ("schema", "kind"), [(Model, Model), (Data, Data), (Typed, dict), (list[bool], list)]
)
def test_a_type_is_a_schema_and_the_answer_is_of_it(llm: LLM, schema: Any, kind: type) -> None:
    pytest.importorskip("llguidance")
    result = llm.chat("Write.", schema=schema, temperature=1.0, seed=3, max_tokens=200)
    assert isinstance(result.parsed, kind)
    assert result.parsed == pydantic.TypeAdapter(schema).validate_json(result.text)
    assert result.parsed is result.parsed
    params = infer.SamplingParams(schema=schema, temperature=1.0, seed=3, max_tokens=200)
    assert llm.chat("Write.", params=params).parsed == result.parsed


def test_by_a_schema_that_is_a_dictionary_the_answer_is_a_value(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    result = llm.chat("Write.", schema=schema, max_tokens=100)
    assert result.parsed == json.loads(result.text)


def test_a_cut_answer_and_one_without_a_schema_are_not_parsed(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    cut = llm.chat("Write.", schema=Model, max_tokens=2)
    with pytest.raises(infer.InferError, match=r'finish_reason is "length"\. Give it mo'):
        _ = cut.parsed
    with pytest.raises(infer.InferError, match="held to no schema"):
        _ = llm.generate(STORY, max_tokens=1).parsed


class Opaque:
    pass


def test_types_without_a_schema(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(infer.RequestError, match="schema Opaque gives no JSON schema: "):
        llm.chat("Write.", schema=Opaque)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(infer.RequestError, match=r"Data is a type, .* pip install pydantic"):
        llm.chat("Write.", schema=Data)


def test_a_typed_schema_is_a_dictionary_in_another_process() -> None:
    params = infer.SamplingParams(schema=Data)
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert type(other.schema) is dict
        assert other == params


# repr() of objects


def test_objects_say_what_they_are() -> None:
    llm = infer.load(DEMO, context=256)
    gpu = str(llm.gpu)
    mebibytes = f"{llm.stats().memory.allocated / 2**20:.1f} MiB"
    assert repr(llm) == f"<LLM demo: llama, BF16, context 256, {mebibytes} on {gpu}>"
    assert repr(llm.device) == f"<Device {gpu}: {mebibytes} in use>"
    assert repr(llm.tokenizer) == "<Tokenizer: 2,048 tokens, chat templates: 1>"
    stream, waiting = llm.stream(STORY, max_tokens=2), llm.astream(STORY)
    next(stream)
    assert repr(stream) == "<Stream of demo: open, 1 token>"
    assert repr(waiting) == "<AsyncStream of demo: open, 0 tokens>"
    list(stream)
    assert repr(stream) == "<Stream of demo: ended (length), 2 tokens>"
    llm.close()
    assert repr(llm) == "<LLM demo: llama, BF16, context 256, closed>"
    assert repr(llm.device) == f"<Device {gpu}: closed>"


def test_adapters_are_a_line_each() -> None:
    for adapter in infer.list_adapters():
        assert repr(adapter) == (
            f"AdapterInfo(index={adapter.index}, name={adapter.name!r}, kind={adapter.kind!r}, "
            f"backend={adapter.backend!r}, webgpu={adapter.webgpu!r})"
        )


def test_attributes_of_a_model_are_documented(llm: LLM) -> None:
    public = {name for name in vars(llm) if not name.startswith("_")}
    documented = LLM.__doc__ or ""
    assert public == {"name", "config", "tokenizer", "defaults", "summary"}
    assert all(f"{name}: " in documented for name in public)


def sent(value: object) -> None:
    multiprocessing.get_context("spawn").Process(target=print, args=(value,)).start()


@pytest.mark.parametrize("send", [copy.copy, copy.deepcopy, pickle.dumps, sent])
@pytest.mark.parametrize(
    ("of", "instead"),
    [
        (lambda llm: llm, "infer.load"),
        (lambda llm: {"model": [llm.generate]}, "infer.load"),
        (lambda llm: llm.device, "Device.open"),
        (lambda llm: llm.stream(STORY), "Take its result"),
        (lambda llm: llm.astream(STORY), "Take its result"),
    ],
    ids=["LLM", "method", "Device", "Stream", "AsyncStream"],
)
def test_what_holds_memory_of_a_gpu_is_neither_copied_nor_sent(
    llm: LLM, send: Callable[[Any], object], of: Callable[[LLM], Any], instead: str
) -> None:
    value = of(llm)
    if send is copy.copy and isinstance(value, dict):
        return  # whose copy has the same model
    with pytest.raises(infer.InferError, match=f"can be neither copied nor sent.*{instead}"):
        send(value)
