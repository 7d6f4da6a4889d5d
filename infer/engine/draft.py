"""A draft model: a smaller one that says what another may go on with (Leviathan et al. 2023).

It runs beside the other, on the same device, and has keys and values of its own in the same pages,
so that whatever is shared, copied, kept or given back there is so here. In each round it makes some
steps of one row of each sequence. What they sample goes on the GPU into their next rows and into
the step that verifies them: the host reads nothing in between. It samples as the other does, with
the same noise, as a draft is right where it is the very token that the other samples.

What is not in its cache though it is in the other's, as nothing was drafted for a while, it
computes before it drafts again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.engine import scheduler
from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.steps import Steps
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.plan import DispatchPlan
from infer.kernels.gpu.record import Copy, Part, Recording, StepQueue
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.kernels.state.step import pack_drafting, pack_step
from infer.models.blocks.decoder import Decoder
from infer.models.loading.lora import NO_ADAPTERS
from infer.progress import size


@dataclass(frozen=True)
class Loaded:
    """A model and its weights on a device."""

    model: Decoder
    weights: Mapping[str, GpuTensor]


@dataclass(frozen=True)
class Drafting:
    """A sequence that has drafts in a round: so many, the first of which goes to `place` of the
    rows that are verified."""

    sequence: scheduler.Sequence
    slot: int
    count: int
    place: int


def check_draft(draft: Decoder, draft_name: str, model: Decoder, name: str, context: int) -> None:
    """Raises UnsupportedError for a draft model that cannot follow the other, and RequestError for
    a context that is too large for it."""
    own, other = draft.config, model.config
    if any(own.states):
        raise UnsupportedError(
            f"{draft_name} ({own.model_type}) cannot draft: its layers have a state, which does "
            "not go back where a token was wrong. Give a model whose layers all have attention."
        )
    if own.vocab_size > other.vocab_size:
        raise UnsupportedError(
            f"{draft_name} has a vocabulary of {own.vocab_size} tokens, and {name}, for which it "
            f"is to draft, one of {other.vocab_size}. Give a smaller model of the same family."
        )
    if context > own.max_position_embeddings and own.rope.kind != "dynamic":
        raise RequestError(
            f"{draft_name} has positions up to {own.max_position_embeddings}, and a context of "
            f"{context} was asked for. Ask for a smaller one (--context), or give another draft "
            "model."
        )


class DraftModel:
    """The steps of a draft model, and what they have computed of which sequence."""

    def __init__(
        self, device: Device, own: Loaded, options: EngineOptions, steps: Steps, sampler: Sampler
    ) -> None:
        """steps, sampler: of the model that it drafts for."""
        self.device, self.vocab_size = device, own.model.config.vocab_size
        self._own = own
        self.steps = Steps(
            device,
            own.model,
            own.weights,
            NO_ADAPTERS,
            options,
            **self._of(steps, options),
        )
        self.sampler = Sampler(
            device,
            self.vocab_size,
            self.steps.logits,
            self.steps.step,
            max_rows=self.steps.most_rows,
            sequences=options.max_batch,
            verified=(sampler, steps.step),
        )
        self._filled = [0] * options.pages  # first positions of each page that are in its cache
        self._recordings: dict[tuple[str | None, SamplerChain | None, bool], Recording] = {}

    def _of(self, steps: Steps, options: EngineOptions) -> dict[str, Any]:
        """What its steps have of those of the model that it drafts for."""
        pages = steps.cache.pages
        return {"pages": pages, "draft_rows": min(MAX_BATCH, 2 * options.max_batch)}

    def __str__(self) -> str:
        config, weights = self._own.model.config, self._own.weights.values()
        dtypes = sorted({tensor.dtype for tensor in weights if len(tensor.shape) > 1})
        nbytes = size(sum(tensor.nbytes for tensor in weights))
        layers = f"{config.num_hidden_layers} layers"
        return f"{config.model_type}, {layers}, {nbytes} in {', '.join(dtypes)}"

    # Its cache

    def forget(self) -> None:
        """Nothing is in the cache."""
        self._filled = [0] * len(self._filled)

    def forget_pages(self, pages: Sequence[int]) -> None:
        """They hold something else from here on."""
        for page in pages:
            self._filled[page] = 0

    def begin(
        self, sequence: scheduler.Sequence, computed: int, copy: tuple[int, int] | None
    ) -> None:
        """Of a sequence that has got pages, whose first `computed` positions are in the other's
        cache; copy: of one page to another, which is one of them."""
        partial = 0 if copy is None else min(self._filled[copy[0]], computed % PAGE)
        self.forget_pages(sequence.pages[computed // PAGE :])
        if copy is not None:
            self._filled[copy[1]] = partial
        sequence.followed = 0
        for page in sequence.pages[: -(-computed // PAGE)]:
            sequence.followed = min(sequence.followed + self._filled[page], computed)
            if self._filled[page] < PAGE:
                break

    def copies(self, page: int, to: int, positions: int) -> list[Copy]:
        """As those of a KVCache."""
        return self.steps.cache.copies(page, to, positions)

    def follow(self, queue: StepQueue, sequence: scheduler.Sequence, slot: int, end: int) -> None:
        """Compute what is lacking of its positions up to `end`, whose tokens are known."""
        while (start := sequence.followed) < end:
            rows = min(end - start, self.steps.rows["prefill"])
            ids = np.minimum(sequence.tokens[start : start + rows], self.vocab_size - 1)
            self.device.write(self.steps.step, pack_step(ids, start, sequence=slot))
            recording = self._recording(self.steps.prefill(rows), head=False)
            queue.submit(recording, rows, start + rows, ())
            self.has(sequence, start + rows)

    def has(self, sequence: scheduler.Sequence, end: int) -> None:
        """Its positions up to `end` are in the cache, or will be when what is submitted has run."""
        for i in range(sequence.followed // PAGE, -(-end // PAGE)):
            page = sequence.pages[i]
            self._filled[page] = max(self._filled[page], min(PAGE, end - i * PAGE))
        sequence.followed = end

    # Rounds

    def first(
        self, sequences: int, chain: SamplerChain, kv_len: int, behind: bool
    ) -> tuple[Part, Part]:
        """What drafts the first token for so many sequences. behind: it also computes what is
        before their last ones: where all of the last round's drafts were right, the last of them is
        not in the cache yet."""
        rows = (1 + behind) * sequences
        step = Part(self._recording(self.steps.batch(rows)), rows, kv_len)
        return step, Part(self._recording(None, chain), sequences, kv_len)

    def others(self, sequences: int, depth: int, chain: SamplerChain, kv_len: int) -> list[Part]:
        """What drafts the others of so many tokens."""
        recording = self._recording(self.steps.batch(sequences), chain)
        return [Part(recording, sequences, kv_len)] * (depth - 1)

    def _recording(
        self, kind: str | None, chain: SamplerChain | None = None, *, head: bool = True
    ) -> Recording:
        """A step of that kind, or none; what samples it, where there is a chain."""
        key = kind, chain, head
        if key not in self._recordings:
            plan = DispatchPlan(()) if kind is None else self.steps.plan(kind, False)
            dispatches = [*plan.body, *(plan.head if head else ())]
            if chain is not None:
                dispatches += self.sampler.dispatches(chain, gather=0)
            self._recordings[key] = Recording(dispatches)
        return self._recordings[key]

    def recordings(self, prompt_tokens: int, chain: SamplerChain) -> list[Recording]:
        """What a single answer to so long a prompt needs."""
        rows = min(prompt_tokens, self.steps.rows["prefill"])
        own = [self._recording(self.steps.prefill(rows), head=False)]
        parts = [*self.first(1, chain, 1, behind=True), *self.others(1, 2, chain, 1)]
        return own + [part.recording for part in parts]

    def begin_round(self, queue: StepQueue, drafting: Sequence[Drafting], sequences: int) -> bool:
        """Write the rows of a round of so many sequences, which are these and others without
        drafts. All their tokens have been read. Returns whether any is `behind`."""
        rows, behind = [], False
        for each in drafting:
            tokens = each.sequence.tokens
            self.follow(queue, each.sequence, each.slot, len(tokens) - 2)
            behind = behind or each.sequence.followed < len(tokens) - 1
            before, last = (min(token, self.vocab_size - 1) for token in tokens[-2:])
            rows.append((before, last, len(tokens) - 1, each.slot, each.count, each.place))
        self.device.write(self.steps.step, pack_drafting(rows, sequences, behind))
        return behind

    def accepted(self, sequence: scheduler.Sequence, drafted: int, right: int) -> None:
        """So many of its drafts were right, in a round from the last of its `computed` positions
        on. What it has sampled last it has not computed."""
        self.has(sequence, sequence.computed - 1 + min(1 + right, drafted))
