"""Many answers at once: each is what it is alone, whoever comes and goes beside it."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Answer, answer, build_engine
from marks import others_full
from reference_models import batch_cases, load, load_batch, relative_error, tolerance_of

import infer.engine.kinds
import infer.engine.scheduler
import infer.engine.steps
from infer.engine.answers import Answer as Running
from infer.engine.engine import Engine, Events
from infer.engine.options import EngineOptions
from infer.engine.pace import Pace
from infer.engine.scheduler import Decode, Prefill
from infer.engine.token_engine import Step
from infer.kernels.errors import ModelError, OutOfMemoryError, RequestError
from infer.kernels.gpu.device import Device
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams, logprobs

TOLERANCE = 1e-5
STEPS = 12
# One architecture of each kind: what a row of a batch reads that is its sequence's own.
KINDS = {
    "llama": "keys and values",
    "gemma2": "windows, soft caps",
    "gpt_oss": "sinks, experts",
    "qwen3_moe": "experts",
    "deepseek_v2": "latents",
    "qwen3_next": "the delta rule",
    "granitemoehybrid_mamba": "Mamba 2",
    "lfm2": "short convolutions",
}
WITH_STATES = "qwen3_next", "granitemoehybrid_mamba", "lfm2"
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "logit_bias": {7: 1.0},
}


def prompts_of(case: str) -> list[list[int]]:
    """Prompts of unlike lengths, two of which begin alike, and two are the same."""
    ids: list[int] = load(case).prompt_ids.tolist()
    return [ids, ids[7:12], ids[:30] + ids[3:9], ids[9:10], ids, ids[20:]]


def begin(engine: Engine, ids: Sequence[int], steps: int = STEPS, **sampling: Any) -> Running:
    params = SamplingParams(max_tokens=steps, **sampling).resolved({})
    return engine.generate(ids, params, with_logits=True)


def of(steps: Sequence[Step]) -> Answer:
    rows = [step.logits for step in steps if step.logits is not None]
    return Answer([step.token for step in steps], np.stack(rows))


def together(engine: Engine, answers: Sequence[Callable[[], Running]]) -> list[Answer]:
    """Each begins when the one before it has had two tokens, and they take turns."""
    running: list[Running] = []
    taken: list[list[Step]] = []
    while len(running) < len(answers) or not all(item.ended for item in running):
        if len(running) < len(answers):
            running.append(answers[len(running)]())
            taken.append([])
        for item, steps in zip(running, taken, strict=True):
            for _ in range(2):
                step = next(item, None)
                if step is not None:
                    steps.append(step)
    for item, steps in zip(running, taken, strict=True):
        steps.extend(item)
    return [of(steps) for steps in taken]


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.token_ids == expected.token_ids
    assert relative_error(found.logits, expected.logits) <= TOLERANCE


@others_full("case", KINDS, ["llama", "gemma2", "deepseek_v2", "qwen3_next", "lfm2"])
def test_answers_of_a_batch_are_those_alone(engine_of: Callable[..., Engine], case: str) -> None:
    """Six answers on four slots, which come and go, share pages, and wait."""
    engine, prompts = engine_of(case, max_batch=4), prompts_of(case)
    lengths = [STEPS, 3, STEPS, 7, 9, STEPS]
    alone = [answer(engine, ids, n) for ids, n in zip(prompts, lengths, strict=True)]
    assert alone[0].token_ids == load(case).greedy_ids[:STEPS].tolist()  # of transformers
    engine.forget()
    begun = [
        lambda ids=ids, n=n: begin(engine, ids, n) for ids, n in zip(prompts, lengths, strict=True)
    ]
    for found, expected in zip(together(engine, begun), alone, strict=True):
        assert_same(found, expected)
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


def prompts_of_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts have rows in each step of prefill that will be."""
    counts: list[int] = []

    class Counted(Events):
        def submits(self, work: Sequence[Prefill] | Decode) -> None:
            if not isinstance(work, Decode):
                counts.append(len(work))

    engine.events = Counted()
    return counts


@others_full("case", [case for case in KINDS if case not in WITH_STATES], ["llama"])
def test_prompts_share_steps(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """All that begin at once, of many tokens and of one; and where the cache has their beginnings,
    up to the middle of a page."""
    engine, prompts = engine_of(case, max_batch=4), prompts_of(case)[:4]
    again = [[*ids[:-1], 9, 8] for ids in prompts]
    alone = [answer(engine, ids, STEPS) for ids in [*prompts, *again]]
    engine.forget()
    counts = prompts_of_steps(engine, monkeypatch)
    for these, expected in ((prompts, alone[:4]), (again, alone[4:])):
        running = [begin(engine, ids) for ids in these]
        for item, own in zip(running, expected, strict=True):
            assert_same(of(list(item)), own)
    assert [item.timings.reused_tokens for item in running] == [len(ids) - 2 for ids in again]
    assert sum(counts) > len(counts)
    assert counts[-1] == 4


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in KINDS if case not in WITH_STATES])
def test_prompts_share_steps_by_the_rules_for_a_gpu(
    own_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """GPUs have kernels for steps of every size, with tiles and without."""
    monkeypatch.setattr(own_device, "software", False)
    monkeypatch.setattr("infer.engine.pace.FIRST_ROWS", 512)
    ids: list[int] = 4 * load(case).prompt_ids.tolist()
    with own_device.scope():
        folder = load(case).write_checkpoint(tmp_path / case)
        engine = build_engine(own_device, folder, max_batch=3, context=256)
        for lengths in ((5, 6), (20, 9, 1), (33, 30), (60, 10, 40), (33, 130, 64)):
            prompts = [ids[i : i + length] for i, length in enumerate(lengths)]
            alone = [answer(engine, prompt, 2) for prompt in prompts]
            engine.forget()
            engine.runner.pace = Pace(1, engine.runner.pace.kinds)  # not known: nothing is cut
            running = [begin(engine, prompt, 2) for prompt in prompts]
            for item, own in zip(running, alone, strict=True):
                assert_same(of(list(item)), own)
        packed = engine.runner.kinds.packed
        seen = [kind for kind in packed if kind in engine.runner.steps.lowered]
    assert [kind.rows for kind in seen] == [256, 128, 64, 32, 16]


def test_one_prompt_alone_takes_nothing_of_several(engine_of: Callable[..., Engine]) -> None:
    """Prompts whose layers have a state, or whose bits are to depend on nobody, share no steps."""
    engine = engine_of("llama", max_batch=3)
    assert len(answer(engine, prompts_of("llama")[0], STEPS).token_ids) == STEPS
    assert not any(kind in engine.runner.steps.lowered for kind in engine.runner.kinds.packed)
    for case, options in (
        ("lfm2", {}),
        ("llama", {"invariant": True}),
        ("llama", {"max_batch": 1}),
    ):
        engine = engine_of(case, **{"max_batch": 3} | options)
        assert engine.runner.kinds.prompts == 1
        assert not engine.runner.kinds.packed


def test_every_kind_has_stored_answers() -> None:
    assert batch_cases() == sorted(KINDS)


@others_full("case", KINDS, ["llama", "lfm2"])
def test_a_batch_agrees_with_transformers(engine_of: Callable[..., Engine], case: str) -> None:
    """On prompts of 1 to 250 tokens, and again when their beginnings are in the cache. One answer
    comes to another page."""
    reference, tolerance = load_batch(case), tolerance_of(case)
    prompts, steps = reference.prompts, reference.greedy_ids.shape[1]
    engine = engine_of(case, max_batch=8, context=5 * PAGE)
    for again in (False, True):
        running = [begin(engine, ids, steps) for ids in prompts]
        for i, found in enumerate([of(list(item)) for item in running]):
            assert found.token_ids == reference.greedy_ids[i].tolist()
            assert relative_error(found.logits[reference.rows], reference.logits[i]) <= tolerance
        assert all((item.timings.reused_tokens > 0) == again for item in running[2:])


def check_batch(device: Device, folder: Path, case: str, rows: int, steps: int) -> None:
    """Checks that as many answers as there are rows are the same alone and all at once."""
    ids: list[int] = load(case).prompt_ids.tolist()
    prompts = [ids[i % 20 : 25 + i] for i in range(rows)]
    with device.scope():
        load(case).write_checkpoint(folder)
        engine = build_engine(device, folder, max_batch=rows)
        expected = [answer(engine, prompt, steps) for prompt in prompts]
        engine.forget()
        running = [begin(engine, prompt, steps) for prompt in prompts]
        for item, own in zip(running, expected, strict=True):
            assert_same(of(list(item)), own)


@others_full("rows", [2, 4, 8, 16], [2, 4])
@others_full("case", KINDS, ["llama"])
def test_every_size_of_a_batch(
    own_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, rows: int
) -> None:
    """A GPU has plans for batches of several sizes; a CPU has one."""
    monkeypatch.setattr(infer.engine.kinds, "_batches", lambda *_: [rows])
    check_batch(own_device, tmp_path / case, case, rows, steps=5)


@pytest.mark.full
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("case", KINDS)
def test_a_batch_by_the_rules_for_a_gpu(
    own_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, rows: int
) -> None:
    """GPUs have kernels for 2 to 64 rows, which leave norms to other kernels."""
    monkeypatch.setattr(own_device, "software", False)
    check_batch(own_device, tmp_path / case, case, rows, steps=4)


@others_full("case", KINDS, [])
def test_a_batch_on_the_weakest_device(least_device: Device, case: str, tmp_path: Path) -> None:
    """No subgroups, no shader-f16, the smallest limits."""
    check_batch(least_device, tmp_path / case, case, rows=4, steps=4)


@pytest.mark.parametrize(
    "options",
    [
        {"raw": False, "ahead": 1},
        pytest.param({"fuse": False}, marks=pytest.mark.full),
        pytest.param({"kv_dtype": "q8"}, marks=pytest.mark.full),
        pytest.param({"kv_dtype": "f16", "dtype": "q4"}, marks=pytest.mark.full),
        pytest.param({"dtype": "q8"}, marks=pytest.mark.full),
    ],
    ids=lambda options: " ".join(options),
)
def test_options_do_not_change_the_answers(
    engine_of: Callable[..., Engine], options: dict[str, Any]
) -> None:
    """Neither those that dispatch otherwise nor those that round."""
    engine, prompts = engine_of("llama", max_batch=4, **options), prompts_of("llama")[:4]
    alone = [answer(engine, ids, STEPS) for ids in prompts]
    engine.forget()
    begun = [lambda ids=ids: begin(engine, ids) for ids in prompts]
    for found, expected in zip(together(engine, begun), alone, strict=True):
        assert found.token_ids == expected.token_ids
        # In int8 a block of 32 activations has one scale, and alone two.
        assert relative_error(found.logits, expected.logits) <= 6e-2 * ("dtype" in options) + 1e-5


def test_rows_are_sampled_each_in_its_own_way(engine_of: Callable[..., Engine]) -> None:
    """Greedy, with all filters and penalties, and by a processor on the host, side by side."""
    engine, prompts = engine_of("llama", max_batch=4), prompts_of("llama")

    def processor(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        assert ids[: len(prompts[2])].tolist() == prompts[2]
        logits[5] += 3
        return logits

    def begun() -> list[Callable[[], Running]]:
        on_host = SamplingParams(max_tokens=STEPS, temperature=0.8, seed=3).resolved({})
        return [
            lambda: begin(engine, prompts[0]),
            lambda: begin(engine, prompts[0], seed=1, **SAMPLED),
            lambda: engine.generate(
                prompts[2], on_host, with_logits=True, logits_processor=processor
            ),
            lambda: begin(engine, prompts[5], seed=2, temperature=0.7),
        ]

    alone = [of(list(start())) for start in begun()]
    assert len({tuple(item.token_ids) for item in alone}) == 4
    engine.forget()
    for found, expected in zip(together(engine, begun()), alone, strict=True):
        assert_same(found, expected)
    engine.forget()
    at_once = [start() for start in begun()]
    for item, expected in zip(at_once, alone, strict=True):
        assert_same(of(list(item)), expected)


def test_log_probabilities_are_those_of_the_rows(engine_of: Callable[..., Engine]) -> None:
    """Log probabilities are numpy's, of the logits that come with them, whoever chooses the token.
    A row that asks for none gets none."""
    engine, prompts = engine_of("llama", max_batch=4), prompts_of("llama")
    params = SamplingParams(max_tokens=STEPS, logprobs=4, temperature=0.8, seed=3).resolved({})
    running = [
        begin(engine, prompts[0], logprobs=20),
        begin(engine, prompts[1]),
        begin(engine, prompts[2], seed=1, logprobs=0, **SAMPLED),
        engine.generate(prompts[5], params, with_logits=True, logits_processor=lambda _, x: -x),
    ]
    answers = [list(item) for item in running]
    assert {step.logprobs for step in answers[1]} == {None}
    for steps, n in zip((answers[0], *answers[2:]), (20, 0, 4), strict=True):
        assert len(steps) == STEPS
        for step in steps:
            assert step.logits is not None
            assert step.logprobs is not None
            own, best = logprobs(step.logits, step.token, n)
            assert step.logprobs[0] == pytest.approx(own, abs=1e-5)
            assert [token for token, _ in step.logprobs[1]] == [token for token, _ in best]
            values = [value for _, value in step.logprobs[1]]
            assert values == pytest.approx([value for _, value in best], abs=1e-5)


@pytest.mark.parametrize("case", ["llama", pytest.param("lfm2", marks=pytest.mark.full)])
def test_out_of_pages_an_answer_is_computed_anew(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Three answers grow to three pages each, of which there are seven."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)  # so that all of them begin
    engine = engine_of(case, max_batch=4, context=3 * PAGE, cache_positions=7 * PAGE)
    ids: list[int] = load(case).prompt_ids.tolist()
    prompts = [ids, ids[1:], ids[2:]]
    steps = 2 * PAGE - len(ids) + 8
    alone = [answer(engine, prompt, steps) for prompt in prompts]
    engine.forget()
    before = engine.scheduler.preemptions
    sampled = [begin(engine, prompt, steps) for prompt in prompts]
    for item, expected in zip(sampled, alone, strict=True):
        assert_same(of(list(item)), expected)
    assert engine.scheduler.preemptions > before
    assert engine.pool.stats.in_use == 0


def test_a_prompt_in_the_cache_of_another_is_not_computed(
    engine_of: Callable[..., Engine],
) -> None:
    """While that one is still running; to the token, though pages are larger."""
    engine = engine_of("llama", max_batch=4)
    ids: list[int] = load("llama").prompt_ids.tolist()
    expected = answer(engine, [*ids[:33], 9], STEPS)
    engine.forget()
    first = begin(engine, ids)
    next(first)
    second = begin(engine, [*ids[:33], 9])
    assert_same(of(list(second)), expected)
    assert second.timings.reused_tokens == 33
    assert len(list(first)) == STEPS - 1


@others_full("case", ["llama", "lfm2", "granitemoehybrid_mamba"], ["llama", "lfm2"])
def test_equal_prompts_are_computed_once(engine_of: Callable[..., Engine], case: str) -> None:
    """Though all begin at once, in chunks, and two wait for a slot; of a state but the last tokens,
    before which it is saved."""
    engine = engine_of(case, max_batch=4, prefill_chunk=16)
    ids: list[int] = load(case).prompt_ids.tolist()
    expected = answer(engine, ids, STEPS)
    engine.forget()
    running = [begin(engine, ids) for _ in range(6)]
    for item in running:
        assert_same(of(list(item)), expected)
    most = 1 if engine.runner.caches.saved is None else 8
    computed = [item.timings.prefilled_tokens for item in running]
    assert computed == [len(ids), *[most] * 5]


@others_full("case", ["llama", "lfm2", "qwen3_next"], ["llama", "lfm2"])
def test_a_short_prompt_is_answered_before_a_long_one_is_read(
    engine_of: Callable[..., Engine], case: str
) -> None:
    """Also one that begins as the long one does, of whose pages it copies a part."""
    engine = engine_of(case, max_batch=4, prefill_chunk=16, context=400)
    stem: list[int] = load(case).prompt_ids.tolist()
    long = 6 * stem
    shorts = [stem[2:7], [*stem[:11], 9], long[:16]]
    alone = [answer(engine, ids, STEPS) for ids in (long, *shorts)]
    engine.forget()
    running = [begin(engine, ids) for ids in (long, *shorts)]
    first = [next(item) for item in running[1:]]
    assert running[0].count == 0
    assert 0 < running[0].sequence.computed < len(long) - 64
    assert_same(of(list(running[0])), alone[0])
    for item, step, own in zip(running[1:], first, alone[1:], strict=True):
        assert_same(of([step, *item]), own)


def test_what_ends_one_answer_ends_no_other(engine_of: Callable[..., Engine]) -> None:
    engine, prompts = engine_of("llama", max_batch=4), prompts_of("llama")
    expected = answer(engine, prompts[0], STEPS)

    def failing(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if len(ids) > len(prompts[1]) + 1:
            raise ModelError("enough")
        return logits

    params = SamplingParams(max_tokens=STEPS).resolved({})
    good = begin(engine, prompts[0])
    bad = engine.generate(prompts[1], params, logits_processor=failing)
    closed = begin(engine, prompts[2])
    next(closed)
    closed.close()
    with pytest.raises(ModelError, match="enough"):
        list(bad)
    assert list(closed) == []
    assert_same(of(list(good)), expected)
    assert engine.pool.stats.in_use == 0
    assert engine.scheduler.idle


def test_threads_share_the_steps(engine_of: Callable[..., Engine]) -> None:
    engine, prompts = engine_of("llama", max_batch=4), prompts_of("llama")
    expected = [answer(engine, ids, STEPS) for ids in prompts]
    engine.forget()
    found: dict[int, Answer] = {}

    def work(i: int) -> None:
        found[i] = of(list(begin(engine, prompts[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    for i, own in enumerate(expected):
        assert_same(found[i], own)


class EnoughError(Exception):
    """The error that a logits processor raises."""


@dataclass
class Client:
    """Who reads an answer. expected: of which the answer has the first tokens, where that is known.
    closes_after: tokens. asleep: turns in which it reads nothing."""

    answer: Running
    expected: Sequence[int] | None
    closes_after: int
    asleep: int
    taken: list[int] = field(default_factory=list)
    over: bool = False

    def read(self, most: int) -> None:
        for _ in range(most):
            if len(self.taken) >= self.closes_after:
                self.answer.close()
            try:
                step = next(self.answer, None)
            except EnoughError:
                step = None
            if step is None:
                self.over = True
                break
            self.taken.append(step.token)


class Soak:
    """Clients of all kinds, which come and go until there were `count`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        rng = np.random.default_rng(0)
        self.stems: list[list[int]] = rng.integers(3, engine.vocab_size, (3, 40)).tolist()
        self.clear: dict[tuple[int, ...], list[int]] = {}
        for stem in self.stems:
            for length in range(1, 41, 6):
                alone = answer(engine, stem[:length], 8)
                best = np.sort(alone.logits, axis=1)[:, -2:]
                margins = (best[:, 1] - best[:, 0]) / np.linalg.norm(alone.logits, axis=1)
                if margins.min() > 3e-4:  # else the last bits may decide
                    self.clear[tuple(stem[:length])] = alone.token_ids

    def begin(self, draw: np.random.Generator, is_long: bool) -> Client:
        kind = draw.random()
        stem = self.stems[draw.integers(len(self.stems))]
        ids = stem[: 40 if is_long else draw.integers(1, 41)]
        if draw.random() < 0.2:
            ids = draw.integers(3, self.engine.vocab_size, len(ids)).tolist()
        steps = int(2 * PAGE - 32 if is_long else draw.integers(1, 9))
        seed = int(draw.integers(1 << 32))
        sampling = SAMPLED | {"seed": seed} if kind < 0.05 else {}
        sampling |= {"logprobs": 3} if kind % 0.1 > 0.09 else {}
        params = SamplingParams(max_tokens=steps, **sampling).resolved({})
        processor = None
        if kind > 0.92 and not is_long:
            fails_at = len(ids) + int(draw.integers(12))

            def processor(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
                if len(ids) == fails_at:
                    raise EnoughError
                return logits

        begun = self.engine.generate(
            ids, params, with_logits=0.85 < kind < 0.9, logits_processor=processor
        )
        begun.sequence.priority = int(draw.choice([0, 0, 0, -1, -2]))  # before it is looked at
        known = self.clear.get(tuple(ids)) if kind >= 0.05 and not is_long else None
        closes = draw.random() < 0.2 and not is_long
        closes_after = int(draw.integers(4)) if closes else 1 << 30
        return Client(begun, known, closes_after, 20 * int(draw.random() < 0.05))

    def run(self, count: int, seed: int) -> int:
        """Returns how many answers were compared with what they should be."""
        draw, begun, compared = np.random.default_rng(seed), 0, 0
        clients: list[Client] = []
        while begun < count or clients:
            while begun < count and len(clients) < 16:
                # Now and then some that grow together, to more than there are pages for.
                clients.append(self.begin(draw, begun % 1000 in range(20, 24)))
                begun += 1
            for client in clients:
                client.asleep -= 1
                if client.asleep < 0:
                    client.read(int(draw.integers(1, 4)))
                if client.over and client.expected is not None:
                    assert client.taken == client.expected[: len(client.taken)]
                    compared += 1
            clients = [client for client in clients if not client.over]
        return compared


def resident_bytes() -> int:
    """Returns the memory in bytes of this process, the driver's included, where Linux tells; else
    0."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0


@pytest.mark.parametrize(
    "count", [100, pytest.param(4_000, marks=pytest.mark.full)], ids="{} answers".format
)
def test_nothing_is_left_of_many_answers(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Closed at any time, failing, left unread, out of pages: neither pages and slots, nor memory
    on the GPU and here."""
    monkeypatch.setattr(infer.engine.scheduler, "HEADROOM", 8)  # so that they run out of pages
    engine = engine_of("llama", max_batch=4, context=3 * PAGE, cache_positions=7 * PAGE)
    soak = Soak(engine)
    for item in [begin(engine, ids, seed=1, logprobs=3, **SAMPLED) for ids in 4 * soak.stems[:1]]:
        list(item)  # buffers that grow have their full size
    known = -1
    while known < (known := engine.runner.recordings.count):  # a GPU has many kinds of step
        soak.run(20, seed=known)
    engine.settle()

    def left() -> tuple[Any, ...]:
        assert engine.scheduler.idle
        assert [*engine.jobs.of, *engine._inbox, *engine.runner.submissions.in_flight] == []
        stats = engine.pool.stats
        assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)
        assert sorted(engine.scheduler._slots) == list(range(engine.options.max_batch))
        engine.forget()
        gc.collect()
        memory = engine.device.memory_stats()
        return memory.allocated, memory.pooled, len(engine.device._buffers)

    before, resident, known = left(), resident_bytes(), engine.runner.recordings.count
    preemptions, hits = engine.scheduler.preemptions, engine.pool.stats.hits
    tracemalloc.start()
    try:
        assert soak.run(count, seed=1) > count / 20
        assert left() == before
        new = engine.runner.recordings.count - known  # kinds of step that had not come before
        assert tracemalloc.get_traced_memory()[0] < (1 << 17) + new * (1 << 14)
    finally:
        tracemalloc.stop()
    assert resident_bytes() - resident < 16 << 20
    assert engine.scheduler.preemptions > preemptions
    assert engine.pool.stats.hits > hits + count


def test_a_batch_that_no_binding_holds(own_device: Device, tmp_path: Path) -> None:
    limits = replace(own_device.limits, max_binding=1 << 16)
    with own_device.scope(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_device, "limits", limits)
        folder = load("llama").write_checkpoint(tmp_path / "llama")
        with pytest.raises(OutOfMemoryError, match=r"Steps of 64 rows .* \(max_batch\)"):
            build_engine(own_device, folder, max_batch=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be a positive integer"),
        ({"max_batch": 65}, "max_batch must be at most 64"),
        ({"cache_positions": 100}, "no room for one with a context of 128"),
        ({"invariant": 1}, "invariant must be true or false"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineOptions(context=128, **options)
