"""A model on the GPU: its steps, its sampler, what drafts for it, and what is in flight.

The objects here know nothing of answers, of whose turn it is and of what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from infer.engine.draft import DraftModel
from infer.engine.drafter import Drafter
from infer.engine.options import DRAFT_ROWS, MAX_BATCH, EngineOptions
from infer.engine.pace import Pace
from infer.engine.pages import PagePool
from infer.engine.prediction import Prediction, with_shared
from infer.engine.recordings import Recipe, Recordings
from infer.engine.resident import Resident
from infer.engine.scheduler import Scheduler
from infer.engine.speculation import ModelSpeculation, NoSpeculation, Speculation
from infer.engine.steps import Loaded, Steps
from infer.engine.submissions import Submissions
from infer.engine.windows import WindowPages, window_of
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import EMPTY, Recording, StepQueue
from infer.kernels.lowering.target import MAX_VEC_ROWS
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.models.blocks.mtp import Predictor
from infer.sampling import SamplingParams

_TAIL = MAX_VEC_ROWS  # a state is saved so many tokens before the end of a prompt
_DRAFTED = 4  # rows for each of many sequences, with a draft model


class Holder(Protocol):
    """An object that keeps an account of what the GPU has, or of what is recorded for it."""

    def forget(self) -> None:
        """Assume nothing about what the GPU has of sequences."""

    def drop(self) -> None:
        """Drop what is recorded, as the buffers that it uses are about to be replaced."""


class Runner:
    """Allocates all that one model needs on a device besides its weights, and submits its steps.

    speculation: decides how many tokens are drafted, and drafter drafts them where a model does.
    lead: rows computed again before those of a partly cached prompt, for their hidden state.
    holders: all that keep an account of the GPU. room: pages that there is memory for, of most
    layers and of those with a window.
    """

    def __init__(
        self, device: Device, own: Loaded, options: EngineOptions, draft: Loaded | None
    ) -> None:
        """draft: a model that fits (`check_draft`), for ways to speculate that need one. Raises
        OutOfMemoryError."""
        self.device, self.own, self.options, self.config = device, own, options, own.model.config
        draft_rows, predictor = options.draft_rows, None
        if draft is not None:
            draft_rows = min(MAX_BATCH, max(draft_rows, _DRAFTED * options.max_batch))
            if isinstance(draft.model, Predictor):
                draft = predictor = with_shared(draft, own)
        self.steps = Steps(device, own, options, draft_rows=draft_rows, predictor=predictor)
        self.caches, self.kinds = self.steps.caches, self.steps.kinds
        self.lead = int(predictor is not None and not any(self.config.states))
        self.sampler = Sampler(
            device,
            self.config.vocab_size,
            self.steps.logits,
            self.steps.step,
            max_rows=self.steps.most_rows,
            sequences=options.max_batch,
        )
        self.pace = Pace(
            self.config.num_hidden_layers,
            [kind.rows for kind in self.kinds.alone if kind.rows > MAX_VEC_ROWS],
        )
        self.drafter = Drafter()
        if draft is not None:
            by_whom = DraftModel if predictor is None else Prediction
            self.drafter = by_whom(draft, options, self.steps, self.sampler)
        self.speculation = self._speculation(draft is not None, goes_on=predictor is None)
        self.resident = Resident(self.steps, self.sampler, self.config.rope, options.max_batch)
        self.recordings = Recordings(self.steps, self.sampler)
        self.submissions = Submissions(self.steps, self.sampler, options)
        self.holders: list[Holder] = [self.resident]
        self.room = self.caches.n_pages

    def _speculation(self, by_model: bool, goes_on: bool) -> Speculation:
        kinds, measures = self.kinds.draft_rows, self.options.speculate == "auto"
        if self.options.speculate == "off":
            return NoSpeculation()
        if by_model:
            return ModelSpeculation(kinds, measures=measures, goes_on=goes_on)
        return Speculation(kinds, measures=measures)

    @property
    def products(self) -> str:
        """The dtype in which projections of many rows are multiplied: "f16", with sums in f32, or
        "f32"."""
        return "f32" if self.options.invariant else self.device.adapter.products

    @property
    def queue(self) -> StepQueue:
        """The queue that steps are submitted to."""
        return self.submissions.queue

    def chain(self, params: SamplingParams) -> SamplerChain:
        """The sampling stages of an answer. Filters change the scores that noise is added to: an
        invariant engine therefore samples as if there always were filters."""
        chain = params.chain()
        invariant = self.options.invariant and chain.noise
        return replace(chain, min_p=True) if invariant else chain

    def new_scheduler(self) -> Scheduler:
        """A scheduler of its steps, with an account of the pages of its cache."""
        options, kinds, windows = self.options, self.kinds, self.caches.window_pages
        has_states = self.caches.saved is not None
        pool = PagePool(
            options.pages,
            PAGE,
            snapshots=options.most_state_places if has_states else 0,
            windows=WindowPages(windows, window_of(self.config)) if windows else None,
        )
        return Scheduler(
            pool,
            slots=options.max_batch,
            context=options.context,
            chunk=kinds.chunk - self.lead * kinds.prompts,
            ahead=options.ahead,
            snapshot_tail=_TAIL if has_states else 0,
            prompts=kinds.prompts,
        )

    # Compiling

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the kernels of all steps, the draft model's included. progress: called with how
        many are done and how many there are."""
        self.steps.compile(progress, *self.drafter.steps)

    def weights_are_read(self) -> None:
        """Lower and compile all steps once more if some weights have `row_scales`, which is known
        only when all weights are read. Call it after `compile`."""
        multiplied = self.own.adapters.multiplied
        if any(weight.row_scales for weight in (*self.own.weights.values(), *multiplied)):
            for steps in (self.steps, *self.drafter.steps):
                steps.lower_again()
            self.compile()

    def compile_batches(self, params: SamplingParams) -> None:
        """Compile what an answer needs in company, besides what it needs alone."""
        self.steps.compile_batches()
        self.sampler.dispatches(self.chain(params), gather=self.kinds.prompts)
        for steps in self.drafter.steps:
            steps.compile_batches()

    def warm_up(
        self,
        prompt_tokens: int,
        params: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile beforehand what a generation from a prompt of that length would compile on its
        way: the sampler, and on a software adapter, whose driver puts a kernel off until it
        first runs, all the rest. params: `resolved`. progress: as for `Steps.compile`."""
        last = 0 if self.caches.saved is None else min(prompt_tokens, _TAIL)  # a step of their own
        parts = [prompt_tokens - last, last, *([] if params.max_tokens == 1 else [1])]
        rows = [rows for part in parts for _, rows in self.chunks(part)]
        kinds = dict.fromkeys(map(self.kinds.prefill, rows))
        chain = self.chain(params)
        recordings = [self.recordings.of(Recipe(kind, chain)) for kind in kinds]
        if params.max_tokens != 1:
            recordings += [self.recordings.of(recipe) for recipe in self._verifying(chain)]
        recordings += self.drafter.recordings(prompt_tokens, chain)
        if not self.device.software:
            return
        first = {item.pipeline: item for r in recordings for item in r.dispatches}
        for done, item in enumerate(first.values(), 1):
            # No workgroup runs, but the driver has to compile the kernel.
            nothing = Recording([replace(item, grid=(0, 1, 1))])
            self.queue.wait(self.queue.submit(nothing, 0, 0, ()))
            if progress is not None:
                progress(done, len(first))

    def _verifying(self, chain: SamplerChain) -> list[Recipe]:
        """The steps that verify the drafts of a single answer."""
        rows = [n for n in self.kinds.draft_rows if n <= DRAFT_ROWS]
        return [Recipe(self.kinds.drafts(n), chain, drafts=self.drafter.gives) for n in rows]

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """(start, rows) of each step of a prompt of that length, if it is alone."""
        found, start = list[tuple[int, int]](), 0
        while start < length:
            rows = min(length - start, self.pace.rows(start), self.kinds.chunk)
            found.append((start, rows))
            start += rows
        return found

    # What the GPU has

    def forget(self) -> None:
        """Assume nothing about what the GPU has of sequences."""
        self.drafter.forget()
        for holder in self.holders:
            holder.forget()

    def lacks(self, pages: tuple[int, int]) -> bool:
        """Whether there is too little memory for these numbers of pages: of most layers, and of
        layers with a window."""
        return pages[0] > self.room[0] or pages[1] > self.room[1]

    def grow(self, least: tuple[int, int]) -> None:
        """Have memory for so many pages, of most layers and of those with a window; of each where
        that is more than now, for half as many more than now. The first use of each page comes
        after this. Raises OutOfMemoryError."""
        most = self.options.pages, self.caches.window_pages
        n_pages, windows = map(_grown, self.room, least, most)
        for holder in self.holders:
            holder.drop()
        self.recordings.clear()
        try:
            self.steps.grow(n_pages, self.resident.table_length, windows)
            self.drafter.grow(n_pages)
        finally:
            self.room = self.caches.n_pages

    def place_first(self) -> None:
        """Give sequence 0 the first pages, as many as a context needs."""
        pages = -(-self.options.context // PAGE), self.caches.window_pages
        if self.lacks(pages):
            self.grow(pages)
        # Pages for a window take turns: there are enough for it and the rows of a step.
        count, windows = pages
        of_windows = [i % windows for i in range(count)] if windows else ()
        self.resident.give_pages(0, range(count), of_windows)

    def takes(self, pages: Sequence[int], touched: tuple[int, int]) -> bool:
        """Have memory for the pages that are touched, and forget what a draft model has in `pages`,
        which are about to hold something else. touched: numbers of pages, as of `room`. Returns
        False where there is no memory."""
        try:
            if self.lacks(touched):
                self.grow(touched)
        except OutOfMemoryError:
            return False
        self.drafter.forget_pages(pages)
        return True

    def save_state(self, slot: int, place: int) -> bool:
        """Save the state of a slot in its place. Returns False where there is no memory for more
        places."""
        saved = self.caches.saved
        assert saved is not None
        try:
            saved.reserve(place + 1)
        except OutOfMemoryError:
            return False
        self.queue.submit(EMPTY, 0, 0, saved.copies(slot, place, back=False))
        return True


def _grown(now: int, least: int, most: int) -> int:
    """Pages to have memory for, where there have to be at least so many."""
    return now if least <= now else min(most, max(least, now + now // 2))
