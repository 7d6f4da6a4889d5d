"""What agents send: however a prompt begins like an earlier one, little of it is computed again,
and the answer is that of an empty cache.

Models whose layers have states go on only from where a state was saved. The distances between these
are a 32nd of what they are elsewhere, and the prompts are as much shorter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conversations import BEARABLE, Agents, agents_of

from infer.engine import scheduler, snapshots
from infer.kernels.gpu.device import Device
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import SamplingParams

CASES = ["lfm2", *(pytest.param(c, marks=pytest.mark.full) for c in ("qwen3_next", "llama"))]


@pytest.fixture(autouse=True)
def small_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (snapshots, "GAP", 32),
        (snapshots, "_BEARABLE_ROWS", BEARABLE),
        (scheduler, "LARGEST_GAP", BEARABLE),
        (scheduler, "LEAST_SAVED", 16),
    ):
        monkeypatch.setattr(module, name, value)


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
