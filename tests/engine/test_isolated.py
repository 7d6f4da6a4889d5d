"""Engines in processes of their own: held against the same in this process, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infer
from infer import LLM, CheckpointError, ClosedError, DeviceError, InferError, UnsupportedError
from infer.engine import isolated
from infer.engine.host_memory import CAN_SHARE, HostMemory
from infer.engine.isolated import WorkerEngine
from infer.engine.messages import Made, Part
from infer.engine.prompts import Attachment, Prompt
from infer.engine.token_engine import Request
from infer.engine.worker import _tell
from infer.hub import DEMO
from infer.kernels.gpu.pack import from_bf16
from infer.llm import together
from infer.sampling import SamplingParams

pytestmark = pytest.mark.demo

needs_sharing = pytest.mark.skipif(not CAN_SHARE, reason="needs descriptors of other processes")

STORY = "Once upon a time"
ENDLESS = {2: -100.0, 3: -100.0}  # no end of turn


@pytest.fixture(scope="module")
def here() -> Iterator[LLM]:
    with infer.load(DEMO, max_batch=4, invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def there() -> Iterator[LLM]:
    own = "{# no <think> #}{{ bos_token }}Own: {{ messages[0].content }}"
    with infer.load(DEMO, max_batch=4, invariant=True, isolate=True, chat_template=own) as llm:
        yield llm


def engine(llm: LLM) -> WorkerEngine:
    assert isinstance(llm._engine, WorkerEngine)
    return llm._engine


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except FileNotFoundError:
        return False


def test_answers_are_the_same(here: LLM, there: LLM) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5, "seed": 3, "logprobs": 2, "n": 2},
        {"stop": "was", "repetition_penalty": 1.3},
    ]
    for each in options:
        expected = here.generate(STORY, max_tokens=10, **each)
        got = there.generate(STORY, max_tokens=10, **each)
        assert _said(got) == _said(expected)
    assert np.array_equal(there.embed([STORY, "The cat"]), here.embed([STORY, "The cat"]))
    assert there.score(STORY, [", there"]) == here.score(STORY, [", there"])
    assert (there.context, there.slots, there.config) == (here.context, here.slots, here.config)
    assert there.summary == here.summary
    assert there.stats().memory.allocated > 0


def test_the_cache_of_one_is_a_file_for_the_other(
    here: LLM, there: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # whatever the worker's folder is
    story = STORY * 9
    saved = there.save_cache("story.cache", story, cache_salt="there")
    assert saved == len(there.encode(story))
    assert here.load_cache(tmp_path / "story.cache", cache_salt="from there") == saved
    result = here.generate(story + " The", max_tokens=1, cache_salt="from there")
    assert result.timings.reused_tokens > saved - 3
    (tmp_path / "story.cache").write_text("nothing")
    for llm in (here, there):
        with pytest.raises(infer.RequestError, match=r"cannot be read from .*story\.cache"):
            llm.load_cache("story.cache")


def test_rows_in_place_of_tokens_are_sent_again(here: LLM, there: LLM) -> None:
    """To the process that goes on when one has been killed."""
    ids = here.encode(STORY * 4)
    weight = here.engine.weights["embed_tokens"]
    table = here.device.read(weight.buffer, np.uint16).reshape(weight.shape[0], -1)
    rows = from_bf16(table[:, : weight.shape[1]])[ids[5:15]]
    request = Request(
        Prompt(ids, [Attachment(5, rows)]), SamplingParams(max_tokens=30, seed=1).resolved({})
    )
    expected = [step.token for step in here.engine.answer(request)]
    answer = engine(there).answer(request)
    tokens = [next(answer).token for _ in range(3)]
    os.kill(engine(there).pid, signal.SIGKILL)
    assert tokens + [step.token for step in answer] == expected


def _said(given: Any) -> Any:
    each = given if isinstance(given, list) else [given]
    return [(r.text, r.token_ids, r.finish_reason, r.logprobs) for r in each]


def test_eight_answers_go_on_when_the_process_is_killed(here: LLM, there: LLM) -> None:
    """Two are generated and others wait; some have stop strings of which a part is held back."""
    options: list[dict[str, Any]] = [
        {
            "temperature": 1.0,
            "seed": i,
            "max_tokens": 8 + i % 4,
            "logit_bias": ENDLESS,
            "logprobs": i % 3 or None,
            "frequency_penalty": 0.5 * (i % 4),
            "repetition_penalty": 1.2 if i % 2 else None,
            "stop": "the end of it" if i % 5 == 0 else (),
        }
        for i in range(8)
    ]
    expected = together(here.stream(f"{STORY} {i}", **own) for i, own in enumerate(options))
    streams = [there.stream(f"{STORY} {i}", **own) for i, own in enumerate(options)]
    for stream in streams:
        stream._begin()
    for _ in range(4):
        next(streams[0])
    engine(there)._deaths.clear()  # of other tests
    os.kill(engine(there).pid, signal.SIGKILL)
    assert _said(together(streams)) == _said(expected)
    assert streams[0].result.timings.decoded_tokens == 7


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "there"])
def test_a_lower_priority_goes_first(isolated: bool, request: pytest.FixtureRequest) -> None:
    """Of two answers that wait for a slot, the first to be asked for waits until the other had
    one."""
    llm: LLM = request.getfixturevalue("there" if isolated else "here")
    limits = [10, 30, 50, 70]
    running = [llm.stream(STORY, max_tokens=n, ignore_eos=True) for n in limits]
    waiting = [llm.stream(STORY, max_tokens=1, priority=n) for n in (0, -1)]
    assert len(running) == llm.slots
    for stream in (*running, *waiting):
        stream._begin()
    together([*running, *waiting])
    late, early = (stream.result.timings.queue_seconds for stream in waiting)
    assert 0 < early < late


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
HELD: list[dict[str, Any]] = [
    {"schema": {"type": "array", "items": {"type": "integer"}, "minItems": 4}},
    {"regex": "([a-z]{3,7} ){5}", "n": 2, "seed": 7, "temperature": 1.0, "logprobs": 2},
    {"grammar": 'start: "so" (" he" | " she")+ "."', "presence_penalty": 1.0, "cache_salt": "a"},
    {"priority": -1},
    {"tools": [TOOL], "tool_choice": "required"},
]


@pytest.mark.full
def test_what_holds_an_answer_goes_on_when_the_process_is_killed(here: LLM, there: LLM) -> None:
    def ask(llm: LLM) -> Iterator[Any]:
        for own in HELD:
            prompt: Any = [{"role": "user", "content": STORY}] if "tools" in own else STORY
            yield from (
                llm.stream(each, max_tokens=24, **{k: v for k, v in one.items() if k != "n"})
                for each, one in infer.llm.samples(prompt, own.get("n", 1), own)
            )

    pytest.importorskip("llguidance")
    expected = together(ask(here))
    streams = list(ask(there))
    for stream in streams:
        stream._begin()
    next(streams[there.slots - 1])  # the last of those that are generated
    engine(there)._deaths.clear()  # of other tests
    os.kill(engine(there).pid, signal.SIGKILL)
    got = together(streams)
    assert _said(got) == _said(expected)
    assert [each.tool_calls and each.tool_calls[0].arguments for each in got] == [
        each.tool_calls and each.tool_calls[0].arguments for each in expected
    ]


def test_counts_go_on_when_the_process_is_killed() -> None:
    with infer.load(DEMO, isolate=True) as llm:
        llm.generate(STORY, max_tokens=2)
        looked_up = llm.stats().cache.lookups
        assert looked_up > 0
        for deaths in (1, 2):
            os.kill(engine(llm).pid, signal.SIGKILL)
            llm.generate(STORY, max_tokens=2)
            cache = llm.stats().cache
            assert (cache.lookups, cache.hits) == (looked_up * (1 + deaths), 0)


HOSTED: dict[str, Any] = {
    "context": 320,
    "max_batch": 1,
    "isolate": True,
    "engine": {"cache_positions": 384},
}
LONG, OTHER = [*range(100, 400)], [*range(500, 800)]  # the cache has room for one


def holders(device: int, inode: int) -> set[int]:
    """The processes that have a file."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            own = path.stat()
            if (own.st_dev, own.st_ino) == (device, inode):
                found.add(int(path.parts[2]))
    return found


@needs_sharing
def test_what_is_in_host_memory_outlives_the_process() -> None:
    with infer.load(DEMO, host_cache="64MiB", **HOSTED) as llm:
        first = llm.generate(LONG, max_tokens=4)
        llm.generate(OTHER, max_tokens=1)
        memory = engine(llm)._own_memory
        assert memory is not None
        assert memory.descriptor is not None
        file = os.fstat(memory.descriptor)
        assert holders(file.st_dev, file.st_ino) == {os.getpid(), engine(llm).pid}
        for _ in range(2):
            kill(llm)
            again = llm.generate(LONG, max_tokens=4)
            assert again.timings.reused_tokens >= 256
            assert _said(again) == _said(first)
            assert llm.generate(LONG, max_tokens=1, cache_salt="a").timings.reused_tokens == 0
        stats = llm.stats().host_cache
        assert stats is not None
        assert stats.pages >= 4
    assert not holders(file.st_dev, file.st_ino)


@needs_sharing
@pytest.mark.full
def test_models_share_host_memory_and_find_it_again() -> None:
    """But not what another model has left there. What the GPU has at the end goes there."""
    memory = HostMemory(64 << 20)
    for prompt, reused in ((LONG, 0), (OTHER, 299)):
        for model in (DEMO, "demo-draft"):
            with infer.load(model, host_memory=memory, **HOSTED) as llm:
                assert llm.generate(prompt, max_tokens=1).timings.reused_tokens == reused
                assert (llm.stats().host_cache.restored > 0) == (reused > 0)
                if prompt is LONG:
                    next(llm.stream(OTHER, max_tokens=20, ignore_eos=True))  # runs at the end
    memory.close()


def test_what_it_warns_of_is_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", _tell)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("Memory is full.", infer.InferWarning, stacklevel=1)
        warnings.warn("Old.", DeprecationWarning, stacklevel=1)
    note, other = capsys.readouterr().err.split("\n")[:2]
    assert note == "note: Memory is full."
    assert "DeprecationWarning: Old." in other


def test_times_of_an_answer_are_told(there: LLM) -> None:
    times = there.generate(STORY, max_tokens=4).timings
    assert 0 <= times.queue_seconds < times.prefill_seconds
    assert times.decode_seconds > 0


@pytest.mark.full
def test_a_call_goes_on_when_the_process_is_killed(here: LLM, there: LLM) -> None:
    ids = [*range(100, 300)]  # in several parts, more than may wait
    parts = engine(there).logits(ids)
    got = [next(parts)]
    engine(there)._deaths.clear()  # of other tests
    os.kill(engine(there).pid, signal.SIGKILL)
    got += parts
    assert np.array_equal(np.concatenate(got), here.logits(ids))


def test_what_is_cancelled_frees_its_pages_at_once(there: LLM) -> None:
    with there.stream(STORY, logit_bias=ENDLESS) as stream:
        next(stream)
        assert there.stats().running == 1
    wait_for(lambda: there.stats().cache.in_use == 0)
    assert there.stats().running == 0


def test_a_chat_template_of_ones_own(there: LLM) -> None:
    messages = [{"role": "user", "content": STORY}]
    assert there.encode(messages) == there.encode(f"Own: {STORY}")
    assert there.generate(messages, max_tokens=1).prompt_tokens == len(there.encode(messages))


def test_what_needs_the_same_process(there: LLM) -> None:
    with pytest.raises(UnsupportedError, match="without isolate"):
        there.generate(STORY, logits_processor=lambda ids, logits: logits)
    with pytest.raises(UnsupportedError, match="without isolate"):
        _ = there.engine


def test_what_is_refused_is_refused_here(there: LLM) -> None:
    with pytest.raises(infer.RequestError, match="context holds 1024"):
        there.stream([5] * 2000)
    with pytest.raises(infer.RequestError, match="No adapter"):
        there.embed("x", adapter="sql")


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(
        (Path(infer.__file__).parent / "demo/config.json").read_bytes()
    )
    (tmp_path / "tokenizer.json").write_bytes(
        (Path(infer.__file__).parent / "demo/tokenizer.json").read_bytes()
    )
    with pytest.raises(CheckpointError, match="no weights"):
        infer.load(tmp_path, isolate=True)


@pytest.mark.full
def test_three_failed_loads_are_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them takes."""
    monkeypatch.setattr(isolated, "WITHIN", 0.0)
    with infer.load(DEMO, isolate=True) as llm:
        stream = llm.stream(STORY, logit_bias=ENDLESS)
        next(stream)
        monkeypatch.setenv("INFER_DEVICE", "a GPU that has gone")
        os.kill(engine(llm).pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"could not load the model again in 3 attempts"):
            list(stream)


@pytest.mark.full
def test_three_deaths_are_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[InferError] = []
    with infer.load(DEMO, isolate=True) as llm:
        llm.watch(told.append)
        stream = llm.stream(STORY, logit_bias=ENDLESS)
        for _ in range(3):
            next(stream)
            os.kill(engine(llm).pid, signal.SIGKILL)
            before = engine(llm).pid
            wait_for(lambda: told or engine(llm).pid != before)  # noqa: B023
        with pytest.raises(DeviceError, match=r"3 times within 60 seconds, at last by signal 9"):
            for _ in stream:
                pass
        with pytest.raises(DeviceError, match="3 times"):
            llm.generate(STORY)
        assert len(told) == 1
    assert capfd.readouterr().err.count("started again") == 2


def kill(llm: LLM) -> None:
    """Its process, until the next one is there, which may not have loaded yet."""
    before = engine(llm).pid
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: engine(llm).pid != before)


@pytest.mark.full
@pytest.mark.parametrize("asked", ["answer", "call"])
def test_that_at_which_it_dies_twice_is_given_up(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = WorkerEngine._take

    def take_no_more(self: WorkerEngine, message: object) -> None:
        if not isinstance(message, Made | Part):
            take(self, message)

    with infer.load(DEMO, isolate=True) as llm, ThreadPoolExecutor(1) as pool:
        given: Iterator[Any] = llm.stream(STORY, max_tokens=4)
        if asked == "call":
            given = engine(llm).logits([100, 101])
        with monkeypatch.context() as patch:
            patch.setattr(WorkerEngine, "_take", take_no_more)
            waits = pool.submit(next, given)
            wait_for(lambda: engine(llm)._answers or engine(llm)._calls)
            kill(llm)
            wait_for(lambda: not engine(llm).restarts)
            kill(llm)
            with pytest.raises(InferError, match="ended twice at this answer"):
                waits.result(60)
        assert llm.generate(STORY, max_tokens=4).completion_tokens == 4


@pytest.mark.full
def test_answers_that_had_to_wait_are_not_blamed_for_its_death() -> None:
    with infer.load(DEMO, isolate=True, max_batch=1) as llm:
        os.kill(engine(llm).pid, signal.SIGSTOP)
        streams = [llm.stream(STORY, max_tokens=4, priority=priority) for priority in (0, -1, 1)]
        for stream in streams:
            stream._begin()
        answers = [*engine(llm)._answers.values()]
        kill(llm)
        assert [answer.deaths for answer in answers] == [0, 1, 0]


@pytest.mark.full
def test_answers_are_not_blamed_for_its_death_while_it_loads() -> None:
    with infer.load(DEMO, isolate=True) as llm:
        stream = llm.stream(STORY, max_tokens=4)
        os.kill(engine(llm).pid, signal.SIGSTOP)
        stream._begin()
        kill(llm)
        kill(llm)
        assert len([chunk.token_id for chunk in stream]) == 4


@pytest.mark.full
def test_an_answer_need_not_wait_for_a_long_call() -> None:
    with infer.load(DEMO, isolate=True) as llm, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(llm.embed, [STORY * 50] * 200)
        wait_for(lambda: engine(llm)._calls)
        assert llm.generate(STORY, max_tokens=2).completion_tokens == 2
        assert not waits.done()
        llm.close()
        with pytest.raises(ClosedError):
            waits.result(60)


@pytest.mark.full
def test_closing_ends_calls() -> None:
    ids = [*range(100, 900)]
    with infer.load(DEMO, isolate=True) as llm:
        parts = engine(llm).logits(ids)
        next(parts)
        llm.close()
        with pytest.raises(ClosedError):
            list(parts)


@pytest.mark.full
def test_a_folder_that_is_gone_and_a_path_from_it(tmp_path: Path) -> None:
    program = (
        "import os, shutil, signal, infer\n"
        "llm = infer.load('demo', isolate=True)\n"
        "os.mkdir('other'); os.chdir('other'); os.rmdir('../other')\n"
        "os.kill(llm._engine.pid, signal.SIGKILL)\n"
        "print(llm.generate('x', max_tokens=2).completion_tokens)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2"], done.stderr


def test_an_option_that_cannot_be_told() -> None:
    with pytest.raises(infer.RequestError, match="cannot be told to another process"):
        infer.load(DEMO, isolate=True, engine={"ahead": lambda: 1})


@pytest.mark.full
@pytest.mark.parametrize("when", ["loaded", "generating"])
def test_it_ends_with_the_process_that_started_it(when: str) -> None:
    program = (
        "import infer, os\n"
        "llm = infer.load('demo', isolate=True, host_cache='16MiB')\n"
        "memory = llm._engine._own_memory\n"
        "file = os.fstat(memory.descriptor)\n"
        "print(llm._engine.pid, file.st_dev, file.st_ino, flush=True)\n"
        "if 'generating' in __import__('sys').argv:\n"
        "    llm.generate('x', logit_bias={2: -100, 3: -100})\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, when], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid, *file = map(int, process.stdout.readline().split())
        assert runs(pid)
        assert holders(*file) == {pid, process.pid}
        process.kill()
    wait_for(lambda: not runs(pid))
    assert not holders(*file)


def test_signals_of_the_group_are_not_for_it(there: LLM) -> None:
    pid = engine(there).pid
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, each)
    assert there.generate(STORY, max_tokens=3).completion_tokens == 3
    assert engine(there).pid == pid


def test_closing_ends_it_and_its_streams(there: LLM) -> None:
    """The last one of this model."""
    pid = engine(there).pid
    stream = there.stream(STORY)
    next(stream)
    there.close()
    assert not runs(pid)
    with pytest.raises(ClosedError):
        there.generate(STORY)
