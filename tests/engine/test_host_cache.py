"""Host memory keeps what the GPU had no room for, and prompts go on from it as if nothing had
happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import BEARABLE, Agents, agents_of

import infer
from infer.engine import host_memory, host_tier, scheduler, snapshots
from infer.engine.host_cache import Found, HostCache, HostCacheStats, Name
from infer.engine.host_memory import HostMemory
from infer.engine.options import EngineOptions
from infer.engine.prefixes import common_length, page_names
from infer.kernels.errors import InferWarning, OutOfMemoryError, RequestError
from infer.kernels.gpu.device import Device
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

SIZE = 4
ROOM = {"context": 640, "cache_positions": 11 * PAGE, "host_cache": 1 << 30}
CASES = ["lfm2", "llama", *(pytest.param(c, marks=pytest.mark.full) for c in ("qwen3_next",))]


def data(value: int, nbytes: int = 100) -> Any:
    return np.full(nbytes, value, np.uint8)


def cache_of(capacity: int) -> HostCache:
    """Made of blocks of 100 bytes."""
    cache = HostCache(capacity)
    cache._memory = HostMemory(capacity, block=100)
    return cache


def kept(cache: HostCache, tokens: list[int], key: Any = None) -> list[Name]:
    """The names of pages with these tokens, which are put there."""
    names = page_names(tokens, key, SIZE)
    starts = range(0, len(tokens), SIZE)
    found = [Name(names[i // SIZE], tuple(tokens[i : i + SIZE])) for i in starts]
    for i, name in enumerate(found):
        cache.put(name, data(i))
    return found


def test_how_much_is_common() -> None:
    a = list(range(300))
    for n in (0, 1, 15, 16, 17, 31, 32, 33, 100, 299, 300):
        for more in (0, 1, 50):
            b = [*a[:n], *[-1] * more]
            assert common_length(a, b) == common_length(b, a) == n
            assert common_length(tuple(a), tuple(b)) == n


def test_the_longest_beginning_is_found() -> None:
    cache = cache_of(10_000)
    tokens = list(range(10))
    names = kept(cache, tokens)
    for length in range(11):
        asked = [*tokens[:length], *[99] * (11 - length)]
        pages = -(-length // SIZE)
        assert cache.find(asked, None, 0, SIZE, False) == Found(length, tuple(names[:pages]))
    assert cache.find(tokens, None, 6, SIZE, False) == Found(10, tuple(names[1:]))
    assert cache.find(tokens, None, 10, SIZE, False) == Found(10, ())
    assert cache.find(tokens, "another", 0, SIZE, False) == Found(0, ())
    assert cache.find([9, *tokens], None, 0, SIZE, False) == Found(0, ())


def test_with_states_it_ends_at_one() -> None:
    cache = cache_of(10_000)
    tokens = list(range(14))
    names, before = kept(cache, tokens), page_names(tokens, None, SIZE)
    states = {
        n: Name(before[n // SIZE], tuple(tokens[n - n % SIZE : n]), "state") for n in (3, 6, 13)
    }
    for state in states.values():
        cache.put(state, data(7))
    assert cache.find(tokens, None, 0, SIZE, True) == Found(13, tuple(names), states[13])
    assert cache.find(tokens[:12], None, 0, SIZE, True) == Found(6, tuple(names[:2]), states[6])
    assert cache.find(tokens[:12], None, 9, SIZE, True) == Found(6, (), states[6])
    assert cache.find(tokens[:5], None, 0, SIZE, True) == Found(3, tuple(names[:1]), states[3])
    assert cache.find([*tokens[:2], 99], None, 0, SIZE, True) == Found(0, ())


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(300)
    names = kept(cache, list(range(12)))
    cache.use(names[:1])
    kept(cache, [50, 51])
    assert [name in cache for name in names] == [True, False, True]
    assert not cache.put(Name(bytes(16), (1,)), data(0, 301))  # larger than all
    assert (cache.stats.nbytes, cache.stats.pages) == (300, 3)
    assert not cache.put(Name(bytes(16), (1,)), data(0), used=0)  # all others were used since
    cache.use(names)
    assert cache.put(Name(bytes(16), (1,)), data(0))
    assert [name in cache for name in names] == [True, False, True]
    assert cache.put(Name(bytes(16), (2,)), data(0))
    assert [name in cache for name in names] == [True, False, False]  # the beginning stays longest


def test_before_the_end_there_is_a_window() -> None:
    cache, tokens = cache_of(10_000), list(range(14))
    names, before = kept(cache, tokens), page_names(tokens, None, SIZE)
    beside = [Name(before[i], tuple(tokens[4 * i : 4 * i + 4]), "window") for i in range(4)]

    def find(window: int, *cached: bool, asked: Sequence[int] = tokens) -> Found:
        """cached: of the first pages, which the GPU has, whether there is a window beside each."""
        own = [(name.tokens, has) for name, has in zip(names, cached, strict=False)]
        return cache.find_with_windows(asked, None, own, SIZE, window)

    assert find(5) == Found(0, ())
    for i in (1, 2):
        cache.put(beside[i], data(7))
    of_two = Found(12, tuple(names[:3]), None, tuple(beside[1:3]), 1)
    assert find(5) == find(8) == of_two
    assert find(9) == Found(0, ())
    assert find(2) == Found(12, tuple(names[:3]), None, (beside[2],), 2)
    # From the GPU come the first pages, and the first window.
    assert find(9, True, False) == Found(12, (names[2],), None, (None, *beside[1:3]), 0)
    assert find(9, False, False) == Found(0, ())
    assert find(5, False, False, False) == Found(12, (), None, tuple(beside[1:3]), 1)
    assert find(1, True, True, True, True) == Found(14, (), None, (None,), 3)
    # Pages end where the shorter of both does, but for those of the GPU, which stay whole.
    asked = [*tokens[:11], 99]
    assert find(5, asked=asked) == Found(11, tuple(names[:3]), None, tuple(beside[1:3]), 1)
    assert find(5, False, False, False, asked=asked) == Found(11, (), None, tuple(beside[1:3]), 1)
    cache.put(Name(before[3], (12,), "window"), data(7))
    assert find(5) == Found(
        13, tuple(names), None, (*beside[2:3], Name(before[3], (12,), "window")), 2
    )
    assert find(5, False, False, False, False) == Found(12, (), None, tuple(beside[1:3]), 1)
    cache.put(Name(before[3], (12, 13, 14), "window"), data(7))
    assert find(5, False, False, False, False).length == 14


def test_models_share_one_budget() -> None:
    """Each finds its own, and what was used longest ago goes, of whichever it is."""
    memory, tokens = HostMemory(600, block=100), list(range(12))
    one, two, later = (HostCache(600) for _ in range(3))
    one.share(memory, b"1" * 16)
    two.share(memory, b"2" * 16)
    names = kept(one, tokens)
    assert two.find(tokens, None, 0, SIZE, False).length == 0
    kept(two, tokens)
    assert one.find(tokens, None, 0, SIZE, False).length == 12
    kept(two, [90, 91])
    assert [name in one for name in names] == [True, True, True]
    assert [name in two for name in names] == [False, True, True]
    found = np.zeros(100, np.uint8)
    assert not two.read(names[0], found)
    assert two.read(names[1], found)
    assert (found == 1).all()
    kept(two, [70, 71])
    kept(two, [80, 81])
    assert two.find(tokens, None, 0, SIZE, False).length == 0
    assert one.find(tokens, None, 0, SIZE, False).length == 12
    later.share(memory, b"1" * 16)
    assert later.find(tokens, None, 0, SIZE, False) == Found(12, tuple(names))
    assert (one.stats.pages, two.stats.pages, later.stats.nbytes) == (3, 3, 300)


def test_what_has_gone_is_forgotten() -> None:
    memory = HostMemory(300, block=100)
    one, two = HostCache(300), HostCache(300)
    one.share(memory, b"1" * 16)
    two.share(memory, b"2" * 16)
    for i in range(2000):
        assert one.put(Name(bytes(16), (i,)), data(1))
        assert two.put(Name(bytes(16), (i,)), data(1))
    assert len(one._held) <= 1024
    assert sum(map(len, one._behind.values())) == len(one._held)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "GAP", 32)
    monkeypatch.setattr(snapshots, "_BEARABLE_ROWS", BEARABLE)
    monkeypatch.setattr(scheduler, "LARGEST_GAP", BEARABLE)
    monkeypatch.setattr(host_tier, "_BATCH", 1)  # a page at a time
    monkeypatch.setattr(host_tier.HostTier, "_pays", pays)


def pays(self: Any, found: Found, known: int) -> bool:
    """Whatever it takes: software is no measure."""
    return found.length - known >= 8


def restored(agents: Agents) -> int:
    assert agents.engine.tier is not None
    return agents.engine.tier.cache.restored


@pytest.mark.parametrize("kv_dtype", ["f16", "q8"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_evicted_comes_back(
    case: str, kv_dtype: str, device: Device, tmp_path: Path
) -> None:
    for agents in agents_of(case, device, tmp_path, 2, kv_dtype=kv_dtype, **ROOM):
        one, two = [agents.text(400)], [agents.text(380)]
        for _ in range(3):
            for messages in (one, two):
                messages += [agents.text(30)]
                messages += [agents.ask(*messages)]
        assert restored(agents) > 1000
        stats = agents.engine.stats().host_cache
        assert stats is not None
        assert 0 < stats.nbytes < stats.capacity


@pytest.mark.parametrize("case", CASES)
def test_what_is_cached_is_kept_for_another_engine(
    case: str, device: Device, tmp_path: Path
) -> None:
    """What was used last, and as much as there is time and room for."""
    own = {"context": 640, "cache_positions": 40 * PAGE}
    memory = HostMemory(64 << 20)
    messages: list[list[int]] = []
    for agents in agents_of(case, device, tmp_path, 2, **own, host_cache=1 << 20):
        agents.engine.share(memory)
        for _ in range(4):
            messages += [agents.text(100)]
            messages += [agents.ask(*messages)]
        agents.engine.keep(0.0)
        assert agents.engine.stats().host_cache == HostCacheStats(0, memory.room, 0, 0, 0)
        agents.engine.keep(60.0)
        kept = agents.engine.stats().host_cache
        assert kept is not None
        assert kept.pages >= 416 // PAGE
        assert (kept.states > 0) == (case != "llama")
        agents.engine.keep(60.0)
        assert agents.engine.stats().host_cache == kept
    for agents in agents_of(case, device, tmp_path / "again", 2, **own, host_cache=1 << 20):
        agents.engine.share(memory)
        agents.seen.append([token for message in messages for token in message[:-1]])
        agents.seen.append([token for message in messages[:-1] for token in message])
        agents.ask(*messages, agents.text(50))
        assert restored(agents) > 300
    memory.close()


def test_the_latest_conversation_is_kept_first(device: Device, tmp_path: Path) -> None:
    own = {"context": 640, "cache_positions": 40 * PAGE, "host_cache": 1 << 20}
    for agents in agents_of("llama", device, tmp_path, 1, **own):
        early, late = agents.text(300), agents.text(300)
        agents.ask(early)
        agents.ask(late)
        size = agents.engine.tier._size(Name(b"", ()))
        memory = HostMemory(4 * size, block=size)
        agents.engine.share(memory)
        agents.engine.keep(60.0)
        agents.engine.forget()
        for prompt, reused in ((early, 0), (late, 4 * PAGE)):
            answer = agents.engine.generate(prompt, SamplingParams(max_tokens=1).resolved({}))
            assert len(list(answer)) == 1
            assert answer.timings.reused_tokens == reused
        memory.close()
        agents.ask_at_once([[agents.text(20)]])


WINDOWED: dict[str, Any] = {"window": 100, "context": 1400, "cache_positions": 24 * PAGE}


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for hardly any windows but those in use."""
    monkeypatch.setattr(infer.engine.windows, "_LEAST_KEPT", 1)


@pytest.mark.usefixtures("few_windows")
@pytest.mark.parametrize("case", ["gemma3_text", "gpt_oss", "mistral_sliding", "gemma4"])
def test_windows_come_back(case: str, device: Device, tmp_path: Path) -> None:
    """With the last pages of a prompt, and to pages that stayed on the GPU."""
    for agents in agents_of(case, device, tmp_path, 2, **WINDOWED, host_cache=1 << 30):
        engine = agents.engine
        assert engine.runner.caches.windows is not None
        talks = [[agents.text(600)], [agents.text(570)], [agents.text(100)], [agents.text(90)]]
        for turn in range(4):
            for messages in talks:
                messages += [agents.text(30)]
                messages += [agents.ask(*messages)]
            if turn == 2:
                agents.ask_at_once([[agents.text(700)], [agents.text(500)]])
        assert restored(agents) > 1000
        engine.settle()
        assert engine.pool.windows is not None
        assert engine.pool.stats.in_use == len(engine.pool.windows._count) == 0


@pytest.mark.usefixtures("few_windows")
def test_windows_are_kept_for_another_engine(device: Device, tmp_path: Path) -> None:
    memory, talk = HostMemory(64 << 20), list[int]()
    for agents in agents_of("gemma3_text", device, tmp_path, 1, **WINDOWED, host_cache=1 << 20):
        agents.engine.share(memory)
        talk = agents.text(500)
        talk += agents.ask(talk)
        agents.engine.keep(60.0)
    for agents in agents_of(
        "gemma3_text", device, tmp_path / "again", 1, **WINDOWED, host_cache=1 << 20
    ):
        agents.engine.share(memory)
        agents.seen.append(talk[:-1])
        agents.ask(talk, agents.text(50))
        assert restored(agents) > 500
    memory.close()


@pytest.mark.usefixtures("few_windows")
def test_a_request_may_end_while_its_windows_come_back(device: Device, tmp_path: Path) -> None:
    for agents in agents_of("gemma3_text", device, tmp_path, 2, **WINDOWED, host_cache=1 << 30):
        engine = agents.engine
        prompt = agents.text(800)
        agents.ask(prompt)
        engine.keep(60.0)
        steps = 0
        while True:
            engine.forget()
            answer = engine.generate(prompt, SamplingParams(max_tokens=1).resolved({}))
            for _ in range(steps + 1):
                engine.wait(iter([False, True]).__next__)
            is_restoring = bool(engine.restoring.waiting)
            answer.close()
            engine.settle()
            assert not engine.restoring.waiting
            assert engine.pool.windows is not None
            assert engine.pool.stats.in_use == len(engine.pool.windows._count) == 0
            if not is_restoring:
                break
            steps += 1
        assert steps >= 800 // PAGE
        agents.ask(prompt)


def test_states_come_back_to_pages_that_stayed(device: Device, tmp_path: Path) -> None:
    """With few places for states, and pages for everything."""
    own = {"context": 1024, "cache_positions": 60 * PAGE, "host_cache": 1 << 30}
    for agents in agents_of("lfm2", device, tmp_path, 1, **own | {"state_places": 2}):
        messages = [agents.text(n) for n in (250, 30, 150, 40, 100)]
        agents.ask(*messages)
        for changed in (4, 2, 1):
            agents.ask_at_once([[agents.text(250)]])
            edited = [*messages]
            edited[changed] = agents.text(25)
            agents.ask(*edited)
        assert restored(agents) == 0
        assert agents.engine.pool.stats.states == 2


@pytest.mark.parametrize("case", CASES)
def test_a_salt_has_its_own(case: str, device: Device, tmp_path: Path) -> None:
    for agents in agents_of(case, device, tmp_path, 1, **ROOM):
        prompt = agents.text(400)
        params = SamplingParams(max_tokens=1).resolved({})
        for salt, cached in (("a", False), ("b", False), ("a", True), ("b", True), (None, False)):
            answer = agents.engine.generate(prompt, params, cache_salt=salt)
            assert len(list(answer)) == 1
            assert (answer.timings.reused_tokens > 300) == cached
        agents.ask(prompt)


def test_a_request_may_end_while_its_pages_come_back(device: Device, tmp_path: Path) -> None:
    for agents in agents_of("llama", device, tmp_path, 2, **ROOM):
        engine = agents.engine
        prompt, other = agents.text(400), agents.text(500)
        agents.ask(prompt)
        agents.ask(other)
        answer = engine.generate(prompt, SamplingParams(max_tokens=1).resolved({}))
        engine.wait(iter([False, True]).__next__)
        assert len(engine.restoring.waiting) == 1
        answer.close()
        engine.settle()
        assert not engine.restoring.waiting
        assert engine.pool.stats.in_use == 0
        assert not engine.jobs.of
        agents.ask(prompt)


def test_an_interrupt_loses_no_answer(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for agents in agents_of("lfm2", device, tmp_path, 2, **ROOM):
        engine = agents.engine
        assert engine.tier is not None
        prompt = agents.text(400)
        agents.ask(prompt)
        agents.ask(agents.text(500))
        answer = engine.generate(prompt, SamplingParams(max_tokens=4).resolved({}))
        for _ in range(2):
            engine.wait(iter([False, True]).__next__)
        assert len(engine.restoring.waiting) == 1

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.queue, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(answer)
        found = [step.token for step in answer]
        agents.other.forget()
        params = SamplingParams(max_tokens=4).resolved({})
        assert found == [step.token for step in agents.other.generate(prompt, params)]
        agents.ask(prompt)


def test_no_memory_for_pages_means_that_they_are_computed(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for agents in agents_of("llama", device, tmp_path, 1, first_positions=PAGE, **ROOM):
        engine = agents.engine
        prompt = agents.text(400)
        agents.ask(prompt)
        agents.ask(agents.text(500))
        assert engine.tier is not None
        monkeypatch.setattr(engine.tier, "_taken", lambda pages: False)
        agents.ask_at_once([[prompt]])
        assert agents.computed > 150
        assert restored(agents) == 0
        assert engine.pool.stats.in_use == 0


def ask_all(agents: Agents, *prompts: list[int]) -> None:
    """Their answers are those of an empty cache."""
    for prompt in prompts:
        agents.ask_at_once([[prompt]])
        agents.check()


def test_no_memory_for_copies_is_said_once(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more goes to the host then; what is there comes back as it did."""
    for agents in agents_of("lfm2", device, tmp_path, 1, **ROOM):
        prompts = [agents.text(400) for _ in range(3)]
        for prompt in prompts[:2]:
            agents.ask(prompt)

        def full(*_: Any) -> None:
            raise OutOfMemoryError("There is no memory.")

        monkeypatch.setattr(device, "acquire", full)
        with pytest.warns(InferWarning, match="nothing more of it goes to host memory") as told:
            ask_all(agents, *(prompts[i] for i in (0, 2, 1, 2)))
        assert len(told) == 1
        assert restored(agents) > 0
        assert agents.engine.pool.stats.in_use == 0


def test_host_memory_runs_out(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is all there is room for, and answers are the same."""
    for agents in agents_of("llama", device, tmp_path, 1, **ROOM):
        prompts = [agents.text(400) for _ in range(4)]
        for prompt in prompts[:2]:
            agents.ask(prompt)
        agents.ask(agents.text(20))
        stats = agents.engine.stats().host_cache
        assert stats is not None
        assert stats.pages > 0
        monkeypatch.setattr(host_memory, "free_memory", lambda: 0)
        agents.engine.tier.cache.memory._room = 0
        with pytest.warns(InferWarning, match="There is no more host memory") as told:
            ask_all(agents, *(prompts[i] for i in (2, 3, 0, 1)))
        assert len(told) == 1
        full = agents.engine.stats().host_cache
        assert full is not None
        assert stats.nbytes <= full.nbytes <= full.capacity < stats.capacity


def test_a_model_is_loaded_with_it() -> None:
    with infer.load("demo", context=64, max_batch=1, host_cache="16MiB") as llm:
        stats = llm.stats().host_cache
    assert stats is not None
    assert stats.capacity == 16 << 20


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="host_cache must be a number of bytes"):
        EngineOptions(64, host_cache=value)


def test_what_pays(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for agents in agents_of("llama", device, tmp_path, 1, **ROOM):
        tier = agents.engine.tier
        assert tier is not None
        names = (Name(b"", (1,)),) * 4
        assert not tier._pays(Found(63, names), 0)  # a few rows are computed
        assert tier._pays(Found(256, names), 0)  # nobody knows
        tier._bytes_in, tier._seconds_in = 4 * tier._size(names[0]), 1.0
        monkeypatch.setattr(tier, "_seconds_of", lambda rows, at: rows / 256)
        assert tier._pays(Found(257, names), 0)
        assert not tier._pays(Found(256, names), 1)
        agents.ask(agents.text(20))
