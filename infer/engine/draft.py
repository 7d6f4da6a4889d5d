"""A draft model: a smaller model that proposes how another goes on (Leviathan et al. 2023).

It runs beside the target model, on the same device. Its cache has the same page numbers, so that
whatever the target shares, copies, keeps or gives back holds for the draft, too. In each round it
makes some steps of one row of each sequence. The GPU passes what they sample on, into their next
rows and into the step that verifies them: the host reads nothing in between. It samples as the
target does, with the same noise, because a draft is right if it is the very token that the target
samples.

If nothing was drafted for a while, the target's cache holds positions that the draft's does not. It
computes them before it drafts again; a draft model whose layers have a state computes a sequence
from its start. Drafts enter a state only when they are known to be right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from infer.engine import scheduler
from infer.engine.drafter import Drafter, Drafting, Known
from infer.engine.kinds import Kind
from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.steps import Loaded, Steps
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.plan import DispatchPlan
from infer.kernels.gpu.record import Copy, Part, Recording, StepQueue
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.kernels.state.step import (
    StepRow,
    Tokens,
    pack_drafting,
    pack_prompts,
    pack_rows,
    pack_stopped,
)
from infer.models.blocks.decoder import Decoder
from infer.progress import size


def check_draft(draft: Decoder, draft_name: str, model: Decoder, name: str, context: int) -> None:
    """Raises UnsupportedError for a draft model that cannot follow the target, and RequestError for
    a context that is too large for it."""
    own, other = draft.config, model.config
    if own.vocab_size > other.vocab_size:
        raise UnsupportedError(
            f"{draft_name} has a vocabulary of {own.vocab_size} tokens, and {name}, for which it "
            f"is to draft, one of {other.vocab_size}. Give a smaller model of the same family."
        )
    if context > own.max_position_embeddings and own.rope.kind != "dynamic":
        raise RequestError(
            f"{draft_name} has positions up to {own.max_position_embeddings}, and a context of "
            f"{context} was asked for. Ask for a smaller `context`, or give another draft "
            "model."
        )


class ModelDrafter(Drafter):
    """A model that makes some steps of one row of each sequence in a round, and its sampler. The
    GPU passes each sampled token on into the next row, and into the step that verifies it."""

    gives = "unknown"

    def __init__(self, own: Loaded, steps: Steps, target: Steps, sampler: Sampler) -> None:
        """steps: of this model. target: of the model that verifies, and its sampler."""
        self.own, self.vocab_size = own, own.model.config.vocab_size
        self.device, self._steps, self.steps = steps.device, steps, (steps,)
        self.sampler = Sampler(
            steps.device,
            self.vocab_size,
            steps.logits,
            steps.step,
            max_rows=steps.most_rows,
            sequences=sampler.sequences,
            verified=(sampler, target.step),
        )
        self._recordings: dict[tuple[Kind | None, SamplerChain | None, bool], Recording] = {}

    def grow(self, n_pages: int) -> None:
        self._steps.grow(n_pages, 0)
        self._recordings.clear()

    def first(
        self, sequences: int, chain: SamplerChain, kv_len: int, behind: bool
    ) -> tuple[Part, Part]:
        rows = (1 + behind) * sequences
        step = Part(self._recording(self._kind(rows)), rows, kv_len)
        return step, Part(self._recording(None, chain), sequences, kv_len)

    def others(self, sequences: int, depth: int, chain: SamplerChain, kv_len: int) -> list[Part]:
        recording = self._recording(self._kind(sequences), chain)
        return [Part(recording, sequences, kv_len)] * (depth - 1)

    def recordings(self, prompt_tokens: int, chain: SamplerChain) -> list[Recording]:
        parts = [*self.first(1, chain, 1, behind=self.ways[-1]), *self.others(1, 2, chain, 1)]
        return [part.recording for part in parts]

    @abstractmethod
    def _kind(self, rows: int) -> Kind:
        """The kind of step of so many rows in a round."""

    def _recording(
        self, kind: Kind | None, chain: SamplerChain | None = None, *, head: bool = True
    ) -> Recording:
        """A step of that kind, if one is given, and its sampling, if there is a chain."""
        key = kind, chain, head
        if key not in self._recordings:
            plan = DispatchPlan(()) if kind is None else self._steps.plan(kind)
            dispatches = [*plan.body, *(plan.head if head else ())]
            if chain is not None:
                dispatches += self.sampler.dispatches(chain, gather=0)
            self._recordings[key] = Recording(dispatches)
        return self._recordings[key]

    def stop(self) -> None:
        self.device.write(self._steps.step, pack_stopped(self._steps.most_rows))


class DraftModel(ModelDrafter):
    """A smaller model, and what it has computed of which sequence."""

    def __init__(
        self, own: Loaded, options: EngineOptions, target: Steps, sampler: Sampler
    ) -> None:
        """target, sampler: of the model that verifies."""
        rows, pages = min(MAX_BATCH, 2 * options.max_batch), target.caches.kv.pages
        steps = Steps(target.device, own, options, draft_rows=rows, pages=pages)
        super().__init__(own, steps, target, sampler)
        self._has_states = any(own.model.config.states)
        self.ways = (False,) if self._has_states else (False, True)
        self._filled = [0] * options.pages  # of each page, how many first positions are cached
        self._settled = [0] * options.max_batch  # of each slot, positions that its states include

    def __str__(self) -> str:
        config, weights = self.own.model.config, self.own.weights.values()
        dtypes = sorted({tensor.dtype for tensor in weights if len(tensor.shape) > 1})
        nbytes = size(sum(tensor.nbytes for tensor in weights))
        layers = f"{config.num_hidden_layers} layers"
        return f"{config.model_type}, {layers}, {nbytes} in {', '.join(dtypes)}"

    # Its cache

    def forget(self) -> None:
        self._filled = [0] * len(self._filled)

    def forget_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._filled[page] = 0

    def begin(
        self, sequence: scheduler.Sequence, computed: int, copy: tuple[int, int] | None
    ) -> None:
        partial = 0 if copy is None else min(self._filled[copy[0]], computed % PAGE)
        self.forget_pages(sequence.pages[computed // PAGE :])
        if copy is not None:
            self._filled[copy[1]] = partial
        assert sequence.slot is not None
        sequence.followed = self._settled[sequence.slot] = 0
        self._skip(sequence, computed)

    def _skip(self, sequence: scheduler.Sequence, end: int) -> None:
        """Skip positions up to `end` that other sequences with the same pages have computed. States
        do not include them."""
        while not self._has_states and sequence.followed < end:
            page = sequence.followed // PAGE
            filled = page * PAGE + self._filled[sequence.pages[page]]
            if filled <= sequence.followed:
                break
            sequence.followed = min(filled, end)

    def copies(self, page: int, to: int, positions: int) -> list[Copy]:
        return self._steps.caches.kv.copies(page, to, positions)

    def follow(self, queue: StepQueue, known: Sequence[Known]) -> None:
        if self._has_states:
            self._settle(queue, known)
        chunks: list[tuple[Tokens, int, int, int]] = []
        room = self._steps.kinds.chunk
        for sequence, slot, tokens, end in known:
            self._skip(sequence, end)
            while (start := sequence.followed) < end:
                stop = min(start + room, end)
                ids = np.minimum(tokens[start:stop], self.vocab_size - 1)
                chunks.append((ids, start, slot, 0))
                self.has(sequence, stop)
                self._settled[slot] = stop
                room -= stop - start
                if not room or len(chunks) == self._steps.kinds.prompts:
                    self._compute(queue, chunks)
                    chunks, room = [], self._steps.kinds.chunk
        if chunks:
            self._compute(queue, chunks)

    def _compute(self, queue: StepQueue, chunks: Sequence[tuple[Tokens, int, int, int]]) -> None:
        rows = sum(len(ids) for ids, *_ in chunks)
        longest = max(start + len(ids) for ids, start, *_ in chunks)
        self.device.write(self._steps.step, pack_prompts(chunks))
        recording = self._recording(self._steps.kinds.prefill(rows, len(chunks)), head=False)
        queue.submit(recording, rows, longest, ())

    def _settle(self, queue: StepQueue, known: Sequence[Known]) -> None:
        """If positions are missing and states are behind, bring the states up to date with the
        drafts that were right and the next token."""
        rows: list[StepRow] = []
        for sequence, slot, tokens, end in known:
            at = sequence.followed
            if at < end and at > self._settled[slot]:
                token = min(tokens[at], self.vocab_size - 1)
                rows.append((token, at, slot, 0, at - self._settled[slot]))
                self.has(sequence, at + 1)
                self._settled[slot] = at + 1
        if rows:
            self.device.write(self._steps.step, pack_rows(rows, len(rows)))
            longest = max(position for _, position, *_ in rows) + 1
            recording = self._recording(self._steps.kinds.drafts(len(rows)), head=False)
            queue.submit(recording, len(rows), longest, ())

    def has(self, sequence: scheduler.Sequence, end: int) -> None:
        """Note that the positions of a sequence up to `end` are cached, or will be when the
        submitted steps have run."""
        for i in range(sequence.followed // PAGE, -(-end // PAGE)):
            page = sequence.pages[i]
            self._filled[page] = max(self._filled[page], min(PAGE, end - i * PAGE))
        sequence.followed = end

    # Rounds

    def _kind(self, rows: int) -> Kind:
        kinds = self._steps.kinds
        return kinds.drafts(rows) if self._has_states else kinds.batch(rows)

    def recordings(self, prompt_tokens: int, chain: SamplerChain) -> list[Recording]:
        rows = min(prompt_tokens, self._steps.kinds.chunk)
        own = [self._recording(self._steps.kinds.prefill(rows), head=False)]
        own += [self._recording(self._kind(1), head=False)] if self._has_states else []
        return own + super().recordings(prompt_tokens, chain)

    def begin_round(self, queue: StepQueue, drafting: Sequence[Drafting], sequences: int) -> bool:
        # Rows of a step go into states in their order, which the two of a sequence are not in.
        lacking = 1 if self._has_states else 2
        known = [
            Known(each.sequence, each.slot, tokens, len(tokens) - lacking)
            for each in drafting
            for tokens in [each.tokens]
        ]
        self.follow(queue, known)
        rows, behind = [], False
        for each, (sequence, slot, tokens, _) in zip(drafting, known, strict=True):
            position = len(tokens) - 1
            behind = behind or sequence.followed < position
            before, last = (min(token, self.vocab_size - 1) for token in tokens[-2:])
            of_states = sequence.followed - self._settled[slot] if self._has_states else 0
            rows.append((before, last, position, slot, of_states, each.count, each.place))
            self._settled[slot] = len(tokens)
        self.device.write(self._steps.step, pack_drafting(rows, sequences, behind))
        return behind

    def accepted(self, sequence: scheduler.Sequence, drafted: int, right: int) -> None:
        # The token that was drafted last is sampled but not computed.
        self.has(sequence, sequence.computed - 1 + min(1 + right, drafted))
