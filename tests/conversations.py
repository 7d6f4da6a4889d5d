"""Requests as agents send them, to engines on the stored reference models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from engines import build_engine
from reference_models import load, write_with_window

from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.engine.prefixes import common_length
from infer.kernels.gpu.device import Device
from infer.sampling import SamplingParams

BEARABLE = 64  # rows that may be computed again, or
PART = 20  # this part of what a prompt shares with an earlier one
STEPS = 4
STOP = 3  # the token that ends each message


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
        common = max((common_length(prompt, own) for own in self.seen), default=0)
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
    case: str, device: Device, folder: Path, slots: int, window: int = 0, **options: Any
) -> Iterator[Agents]:
    """Yields agents whose last answers are checked in the end. window: of layers that have one, in
    place of the case's own."""
    if window:
        path = write_with_window(case, folder / case, window)
    else:
        path = load(case).write_checkpoint(folder / case)
    with device.scope():
        own = {"context": 1024, "prefill_chunk": 32, "state_places": 40} | options
        agents = Agents(*(build_engine(device, path, max_batch=n, **own) for n in (slots, 1)))
        yield agents
        agents.check()
