"""What agents send: however a prompt begins like an earlier one, little of it is computed again,
and the answer is that of an empty cache.

Models whose layers have states go on only from where a state was saved. The distances between these
are a 32nd of what they are elsewhere, and the prompts are as much shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from engines import build_engine
from reference_models import load

from infer.engine import scheduler, snapshots
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.kernels.gpu.device import Device
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

CASES = ["lfm2", *(pytest.param(c, marks=pytest.mark.full) for c in ("qwen3_next", "llama"))]
BEARABLE = 64  # rows that may be computed again, or
PART = 20  # this part of what a prompt shares with an earlier one
STEPS = 4
STOP = 3  # the token that ends each message


@pytest.fixture(autouse=True)
def small_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (snapshots, "GAP", 32),
        (snapshots, "_BEARABLE_ROWS", BEARABLE),
        (scheduler, "LARGEST_GAP", BEARABLE),
        (scheduler, "LEAST_SAVED", 16),
    ):
        monkeypatch.setattr(module, name, value)


class Agents:
    """Requests to an engine.

    seen: all texts so far, with their answers. computed: rows of prompts of the last requests.
    other: an engine of the same model whose cache is empty.
    """

    def __init__(self, engine: Engine, other: Engine) -> None:
        self.engine, self.other = engine, other
        self.seen: list[list[int]] = []
        self.computed, self._answered = 0, list[list[int]]()
        self._rng = np.random.default_rng(5)

    def text(self, length: int) -> list[int]:
        """A message of so many tokens that no other has."""
        ids = self._rng.integers(4, self.engine.vocab_size, length - 1)
        return [*map(int, ids), STOP]

    def ask(self, *messages: Sequence[int]) -> list[int]:
        """Returns the answer as the next request has it. Little of what the request shares with an
        earlier one is computed again."""
        prompt = [*chain.from_iterable(messages)]
        common = max((scheduler.common_length(prompt, own) for own in self.seen), default=0)
        (answer,) = self.ask_at_once([messages])
        assert self.computed - (len(prompt) - common) <= max(BEARABLE, common // PART)
        return answer

    def ask_at_once(self, requests: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        prompts = [[*chain.from_iterable(messages)] for messages in requests]
        running = [self._begin(self.engine, prompt) for prompt in prompts]
        answers = [[step.token for step in answer] for answer in running]
        self._answered = [[*p, *answer] for p, answer in zip(prompts, answers, strict=True)]
        self.seen += self._answered
        self.computed = sum(answer.timings.prefilled_tokens for answer in running)
        return [[*answer, STOP] for answer in answers]

    def cancel(self, prompt: Sequence[int], computed: int) -> None:
        """Cancel a request once so much of its prompt is computed."""
        answer = self._begin(self.engine, prompt)
        while answer.sequence.computed < computed:
            self.engine.wait(iter([False, True]).__next__)
        assert answer.sequence.computed < len(prompt)
        answer.close()
        self.engine.settle()
        self.seen.append(list(prompt[:computed]))

    def check(self) -> None:
        """The last answers are those of an empty cache."""
        for text in self._answered[-2:]:
            self.other.forget()
            prompt = text[:-STEPS]
            assert text == [*prompt, *(step.token for step in self._begin(self.other, prompt))]

    def _begin(self, engine: Engine, prompt: Sequence[int]) -> Answer:
        return engine.generate(prompt, SamplingParams(max_tokens=STEPS).resolved({}))


def agents_of(
    case: str, device: Device, folder: Path, slots: int, **options: int
) -> Iterator[Agents]:
    """Yields agents whose last answers are checked in the end."""
    path = load(case).write_checkpoint(folder / case)
    with device.scope():
        own = {"context": 1024, "prefill_chunk": 32, "state_places": 40} | options
        agents = Agents(*(build_engine(device, path, max_batch=n, **own) for n in (slots, 1)))
        yield agents
        agents.check()


@pytest.fixture(params=CASES)
def agents(request: pytest.FixtureRequest, device: Device, tmp_path: Path) -> Iterator[Agents]:
    yield from agents_of(request.param, device, tmp_path, 4)


def test_it_grows_by_results_of_tools(agents: Agents) -> None:
    messages = [agents.text(350)]
    for length in (20, 100, 30, 200):
        messages += [agents.text(length)]
        messages += [agents.ask(*messages)]
    agents.ask(*messages[:-1])  # the same again


def test_messages_are_edited(agents: Agents) -> None:
    messages = [agents.text(n) for n in (250, 30, 150, 40, 100)]
    agents.ask(*messages)
    for changed in (4, 2, 1):
        for _ in range(2):
            edited = [*messages]
            edited[changed] = agents.text(25)
            agents.ask(*edited)


def test_a_new_message_drops_the_reasoning_before(agents: Agents) -> None:
    messages = [agents.text(250), agents.text(50)]
    whole = list(messages)
    for _ in range(8):
        agents.ask(*whole)
        call, result = agents.text(5), agents.text(30)
        whole += [agents.text(20), call, result]  # reasoning first
        messages += [call, result]
    agents.ask(*messages, agents.text(10))


def test_a_new_conversation_has_the_same_beginning(agents: Agents) -> None:
    begin = agents.text(400)
    for _ in range(3):
        agents.ask(begin, agents.text(50))
    for _ in range(5):
        agents.ask(agents.text(75), agents.text(15))
    agents.ask(begin, agents.text(50))


def test_a_request_that_was_cancelled_is_sent_again(agents: Agents) -> None:
    prompt = agents.text(450)
    agents.cancel(prompt, 320)
    agents.ask(prompt)


def test_eight_begin_alike_at_once(agents: Agents) -> None:
    begin = agents.text(250)
    agents.ask_at_once([(begin, agents.text(22)) for _ in range(8)])
    assert agents.computed <= 250 + 8 * (22 + 8)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_two_agents_by_turns(case: str, slots: int, device: Device, tmp_path: Path) -> None:
    for agents in agents_of(case, device, tmp_path, slots):
        one, two = [agents.text(300)], [agents.text(250)]
        for _ in range(3):
            for messages in (one, two):
                messages += [agents.text(30)]
                messages += [agents.ask(*messages)]
                for _ in range(2):
                    agents.ask_at_once([[agents.text(10)]])  # asks for a title


@pytest.mark.parametrize("case", CASES)
def test_part_of_the_pages_is_evicted(case: str, device: Device, tmp_path: Path) -> None:
    options = {"context": 640, "cache_positions": 11 * PAGE}
    for agents in agents_of(case, device, tmp_path, 1, **options):
        prompt = agents.text(450)
        agents.ask(prompt)
        agents.ask(agents.text(350))
        agents.ask_at_once([[prompt]])
        assert agents.computed < 300


@pytest.mark.parametrize("case", CASES)
def test_who_gave_its_pages_back_goes_on(case: str, device: Device, tmp_path: Path) -> None:
    options = {"context": 512, "cache_positions": 9 * PAGE}
    for agents in agents_of(case, device, tmp_path, 2, **options):
        engine, other = agents.engine, agents.other
        params = SamplingParams(max_tokens=220).resolved({})
        prompts = [agents.text(100), agents.text(90)]
        running = [engine.generate(prompt, params) for prompt in prompts]
        found = [[step.token for step in answer] for answer in running]
        assert engine.scheduler.preemptions
        for prompt, tokens in zip(prompts, found, strict=True):
            other.forget()
            assert tokens == [step.token for step in other.generate(prompt, params)]
