"""The loop that owns the GPU: token ids in, token ids out. It knows nothing of text.

Any number of answers are generated at once (continuous batching, Yu et al. 2022, "Orca"). The
scheduler says what to submit next: a chunk of one answer's prompt, or one row of every answer that
has its prompt behind it. The GPU samples, and writes the next row of each sequence into a table, so
that step n + 1 is submitted before the ids of step n are read, whoever comes or goes.

Nothing runs but in the threads that wait for a token: one of them submits and reads for all, until
it has its own (`infer.engine.turns`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import Answer
from infer.engine.cache_file import CacheFiles
from infer.engine.constraint import Constraint
from infer.engine.decoding import Batch, Decoding, Parts
from infer.engine.draft import DraftModel, Known, Loaded
from infer.engine.host_cache import HostCache
from infer.engine.host_memory import HostMemory
from infer.engine.host_tier import HostTier, Restore
from infer.engine.masks import Masks
from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.pace import Pace
from infer.engine.pages import PagePool
from infer.engine.prediction import Prediction, with_shared
from infer.engine.recordings import Recordings
from infer.engine.resident import Resident
from infer.engine.scheduler import Decode, Prefill, Scheduler, slot_of
from infer.engine.speculation import Guess, Held, ModelSpeculation, Speculation
from infer.engine.steps import Steps
from infer.engine.submissions import Submissions, Wanted
from infer.engine.texts import Scored, Text, Texts
from infer.engine.token_engine import EngineStats, Step, Timings, TokenEngine
from infer.engine.turns import Turns
from infer.engine.verification import Verification
from infer.engine.windows import WindowPages, window_of
from infer.kernels.compiler.target import MAX_VEC_ROWS
from infer.kernels.errors import DeviceError, ModelError, OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import EMPTY, Copy, Recording, StepQueue
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import INVALID_TOKEN, Sampler, SamplerChain
from infer.kernels.state.step import NO_TOKEN, pack_prompts
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.mtp import Predictor
from infer.models.blocks.rope import same_until, table_length
from infer.models.loading.lora import NO_ADAPTERS, Adapters
from infer.sampling import LogitsProcessor, Logprobs, NumpySampler, SamplingParams
from infer.version import VERSION

_TAIL = MAX_VEC_ROWS  # a state is saved so many tokens before the end of a prompt
_DRAFTED = 4  # rows for each of many sequences, with a draft model
_KEEP_SECONDS = 2.0  # that what is cached has at the end to go to host memory


class Engine(TokenEngine):
    """One model on a device of this process, with its cache."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        weights: Mapping[str, GpuTensor],
        options: EngineOptions,
        adapters: Adapters = NO_ADAPTERS,
        draft: Loaded | None = None,
    ) -> None:
        """adapters: what lies beside the weights. draft: a model that fits (`check_draft`), for
        ways to speculate that need one. Allocates everything but the weights and these. Raises
        OutOfMemoryError."""
        self.device, self.model, self.weights, self.options = device, model, weights, options
        self.config, self.slots = model.config, options.max_batch
        self.context, self.vocab_size = options.context, model.config.vocab_size
        self.adapters, self.adapter_names = adapters, adapters.names
        draft_rows = options.draft_rows
        predictor: tuple[Predictor, Mapping[str, GpuTensor]] | None = None
        if draft is not None and isinstance(draft.model, Predictor):
            predictor = draft.model, with_shared(draft.weights, weights)
            draft = replace(draft, weights=predictor[1])
        if draft is not None:
            draft_rows = min(MAX_BATCH, max(draft_rows, _DRAFTED * options.max_batch))
        self.steps = Steps(
            device, model, weights, adapters, options, draft_rows=draft_rows, predictor=predictor
        )
        # Rows computed again before those of a partly cached prompt, for their hidden state.
        self._lead = int(predictor is not None and not any(self.config.states))
        self.sampler = Sampler(
            device,
            self.vocab_size,
            self.steps.logits,
            self.steps.step,
            max_rows=self.steps.most_rows,
            sequences=options.max_batch,
        )
        prefill = [rows for rows in self.steps.rows.values() if rows > MAX_VEC_ROWS]
        self.pace = Pace(model.config.num_hidden_layers, prefill)
        windows = None
        if self.steps.window_pages:
            windows = WindowPages(self.steps.window_pages, window_of(model.config))
        self.saved = self.steps.saved  # None where no layer has a state
        places = 0 if self.saved is None else options.most_state_places
        self.pool = PagePool(options.pages, PAGE, snapshots=places, windows=windows)
        self.scheduler = Scheduler(
            self.pool,
            slots=options.max_batch,
            context=options.context,
            chunk=self.steps.rows["prefill"] - self._lead * self.steps.prompts,
            ahead=options.ahead,
            snapshot_tail=0 if self.saved is None else _TAIL,
            prompts=self.steps.prompts,
        )
        speculation: Speculation | None = None
        kinds, measures = self.steps.draft_kinds, options.speculate == "auto"
        if options.speculate != "off" and draft is None:
            speculation = Speculation(kinds, measures=measures)
        elif options.speculate != "off":
            goes_on = predictor is None
            speculation = ModelSpeculation(kinds, measures=measures, goes_on=goes_on)
        drafts = None
        if draft is not None:
            by_whom = DraftModel if predictor is None else Prediction
            drafts = by_whom(device, draft, options, self.steps, self.sampler)
        self._answers: dict[scheduler.Sequence, Answer | Text] = {}
        self._inbox: deque[Answer | Text] = deque()  # to begin, or to cancel
        self.turns = Turns()
        rope = model.config.rope
        self.resident = Resident(self.steps, self.sampler, rope, options.max_batch)
        self.recordings = Recordings(self.steps, self.sampler)
        self.submissions = Submissions(self.steps, self.sampler, options)
        self.texts = Texts(self.steps, self.recordings, model.config)
        self.masks = Masks(self.sampler, self._answers)
        parts = Parts(
            self.steps,
            self.scheduler,
            self.recordings,
            self.submissions,
            self.masks,
            self.resident,
            self._answers,
        )
        self.decoding = Decoding(parts)
        self.verification = Verification(speculation, drafts, parts)
        self.tier = HostTier(
            self.steps,
            self.pool,
            self.submissions,
            HostCache(options.host_cache),
            lambda rows, at: self.pace.seconds(rows, at) if self.pace.known else 0.0,
            self._takes,
        )
        has_windows = self.pool.windows is not None
        of_weights = device, weights, adapters, options.kv_dtype, has_windows
        self.files = CacheFiles(*of_weights)
        # Answers whose pages come back from the host, before they are added to the scheduler.
        self._restoring: deque[tuple[Restore, Answer | Text]] = deque()
        self._is_whole = True  # False during a change that an interrupt would cut in half
        self._read_at = 0.0  # when the last step was read
        self._forget_rows()
        self.timings = Timings()  # of the latest answer
        self.is_outlived = False  # by its host memory, to which what is cached goes at the end

    def _forget_rows(self) -> None:
        """Assume nothing about what the GPU has of sequences."""
        self.resident.forget()
        self._batch: Batch | None = None
        if self.draft is not None:
            self.draft.forget()
        self.verification.forget()
        self.decoding.forget()

    def warm_up(
        self,
        prompt_tokens: int,
        params: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile beforehand what a generation from a prompt of that length would compile on its
        way: the sampler, and on a software adapter, whose driver puts a kernel off until it
        first runs, all the rest. params: `resolved`. progress: as for `Steps.compile`."""
        last = 0 if self.saved is None else min(prompt_tokens, _TAIL)  # a step of their own
        parts = (prompt_tokens - last, last, 0 if params.max_tokens == 1 else 1)
        kinds = dict.fromkeys(kind for part in parts for *_, kind in self.chunks(part))
        chain = self._chain(params)
        recordings = [self.recordings.of(kind, True, chain) for kind in kinds]
        if params.max_tokens != 1:
            recordings += self.verification.recordings(chain)
        if self.draft is not None:
            recordings += self.draft.recordings(prompt_tokens, chain)
        if not self.device.software:
            return
        first = {item.pipeline: item for r in recordings for item in r.dispatches}
        for done, item in enumerate(first.values(), 1):
            # No workgroup runs, but the driver has to compile the kernel.
            nothing = Recording([replace(item, grid=(0, 1, 1))])
            self.queue.wait(self.queue.submit(nothing, 0, 0, ()))
            if progress is not None:
                progress(done, len(first))

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the kernels of all steps, the draft model's included. progress: called with how
        many are done and how many there are."""
        self.steps.compile(progress, *([] if self.draft is None else [self.draft.steps]))

    def weights_are_read(self) -> None:
        """To be called when the weights are there, after `compile`. Only then it is known which of
        them have `row_scales`: where some do, steps are lowered and compiled once more."""
        if any(w.row_scales for w in (*self.weights.values(), *self.adapters.multiplied)):
            for steps in (self.steps, *([] if self.draft is None else [self.draft.steps])):
                steps.lower_again()
            self.compile()

    def compile_batches(self, params: SamplingParams) -> None:
        """Compile what an answer needs in company, besides what it needs alone."""
        self.steps.compile_batches()
        self.sampler.dispatches(self._chain(params), gather=self.steps.prompts)
        if self.draft is not None:
            self.draft.steps.compile_batches()

    @property
    def gpu(self) -> AdapterInfo:
        return self.device.adapter

    @property
    def products(self) -> str:
        """The dtype in which projections of many rows are multiplied: "f16", with sums in f32, or
        "f32"."""
        return "f32" if self.options.invariant else self.gpu.products

    @property
    def queue(self) -> StepQueue:
        """The queue that steps are submitted to."""
        return self.submissions.queue

    @property
    def speculation(self) -> Speculation | None:
        """The rule for how many tokens are drafted; None if none are."""
        return self.verification.speculation

    @property
    def draft(self) -> DraftModel | None:
        """The model that drafts tokens, if there is one."""
        return self.verification.draft

    # Answers

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        with_logits: bool = False,
        logits_processor: LogitsProcessor | None = None,
        constraint: Constraint | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        generated: Sequence[int] = (),
    ) -> Answer:
        """with_logits also reads back the logits of every step. With a logits_processor they come
        back too, and no step of this answer is ahead. constraint: the one that params ask for.
        generated: tokens after the prompt that are there already; what comes is what would have
        come after them."""
        self.check_prompt(prompt_ids)
        self.check_adapter(adapter)
        assert params.masked == (constraint is not None)
        # The last token needs no position, as nothing comes after it.
        limit = self.context - len(prompt_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        sampler = None
        if logits_processor is not None:
            sampler = NumpySampler(params, self.vocab_size, prompt_ids, logits_processor, stop_ids)
            sampler.ids = np.append(sampler.ids, np.array(generated, np.int64))
        # With a mask only the body of the second step is ahead.
        ahead = 1 if sampler is not None else 2 if constraint is not None else self.options.ahead
        ids = [*prompt_ids, *generated]
        chain = self._chain(params) if sampler is None else SamplerChain()
        answer = Answer(
            self,
            prompt_ids,
            params,
            stop_ids,
            with_logits,
            adapter,
            cache_salt,
            limit,
            sampler,
            constraint,
            chain,
            None,
            self._sequence(
                ids,
                limit - len(generated),
                (adapter, cache_salt),
                ahead,
                priority,
                () if self.saved is None else _message_ends(prompt_ids, stop_ids),
            ),
            count=len(generated),
            newest=ids[-1] if generated else -1,
        )
        answer.guess = self._guess(answer)
        if answer.is_over:
            answer.ended = True
        else:
            self._inbox.append(answer)
        self.timings = answer.timings
        return answer

    def _guess(self, answer: Answer) -> Guess | None:
        # Logits that are read back would have to be handled for every draft.
        if self.speculation is None or answer.reads_logits:
            return None
        of = answer.constraint
        return self.speculation.guess(None if of is None else Held(of, len(answer.prompt)))

    def _chain(self, params: SamplingParams) -> SamplerChain:
        """The sampling stages of an answer. Filters change the scores that noise is added to: an
        invariant engine therefore samples as if there always were filters."""
        chain = params.chain()
        return replace(chain, min_p=True) if self.options.invariant and chain.noise else chain

    def _sequence(
        self,
        ids: Sequence[int],
        limit: int,
        key: tuple[str | None, ...],
        ahead: int,
        priority: int = 0,
        marks: Sequence[int] = (),
    ) -> scheduler.Sequence:
        """A sequence of `limit` more tokens, or as many as keep the same rotary table. key: of the
        cache."""
        rope = self.model.config.rope
        part = int(min(limit, same_until(rope, len(ids)) + 1 - len(ids)))
        length = table_length(rope, len(ids))
        return scheduler.Sequence(
            ids,
            limit=part,
            key=(*key, length),
            priority=priority,
            group=length,
            ahead=ahead,
            marks=marks,
        )

    def begin(self, text: Text) -> None:
        """Queue it. Whoever waits computes it."""
        self._inbox.append(text)

    def cancel(self, answer: Answer | Text) -> None:
        """Safe at any time, in any thread, and twice."""
        if not (answer.ended or answer.cancelled):
            answer.cancelled = True
            self._inbox.append(answer)
            self.turns.wake()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is asked between steps. Makes the steps if no other thread
        does."""
        self.turns.wait(ready, self._step)

    def turn(self) -> AbstractContextManager[None]:
        """A block in which only this thread makes steps."""
        return self.turns.turn()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A block in which this thread has the turn and changes what is cached. An interrupt in it
        empties the cache."""
        with self.turn():
            if not self._is_whole:
                self._recover()
            self._is_whole = False
            self.tier.take_out()
            self._save()
            yield
            self._is_whole = True

    def _key(self, ids: Sequence[int], adapter: str | None, cache_salt: str | None) -> Hashable:
        """What keys and values of a prompt depend on besides its tokens."""
        return self._sequence(ids, 1, (adapter, cache_salt), 1).key

    def settle(self) -> None:
        """Take in what was cancelled while nothing else is generated, to free its pages."""
        with self.turn():
            for _ in range(self.options.ahead + 1):  # no more, as new answers may keep coming
                if not (self._inbox or self.submissions.in_flight):
                    break
                self._step()

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        memory = self.device.memory_stats()
        running = self._wanted([*scheduler.running, *scheduler.prefilling])
        new = sum(not answer.cancelled for answer in list(self._inbox))
        waiting = self._wanted(list(scheduler.waiting)) + new
        drafts, drafted, accepted = self.verification.counts
        return EngineStats(
            memory,
            self.pool.stats,
            running,
            waiting,
            scheduler.preemptions,
            drafts,
            drafted,
            accepted,
            self.options.kv_dtype,
            self.tier.cache.stats,
        )

    def _wanted(self, sequences: Sequence[scheduler.Sequence]) -> int:
        """How many of them somebody still waits for: what is cancelled ends at the next step."""
        answers = [self._answers.get(sequence) for sequence in sequences]
        return sum(not (a is None or a.cancelled or a.ended) for a in answers)

    def keep(self, seconds: float) -> None:
        """Copy what is cached to host memory, what was used last first, for so long at most."""
        with self._changing():
            self.pool.unsaved.clear()
            self.tier.keep(seconds)

    def close(self) -> None:
        if self.is_outlived:
            self.is_outlived = False
            with suppress(DeviceError):  # it is lost
                self.keep(_KEEP_SECONDS)
        with self.turn():
            self.verification.forget()
            self.decoding.forget()
            self.tier.cache.close()
            self.device.close()

    def forget(self) -> None:
        """Empty the cache, so that nothing is reused. Sequence 0 gets the first pages, for callers
        that submit steps by hand."""
        with self.alone():
            pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this thread has the engine to itself, with an empty cache. Answers go on
        from their tokens afterwards."""
        with self.turn():
            if not self._is_whole:
                self._recover()
            self._is_whole = False
            self._take_in()
            self._is_whole = True
            while self.submissions.in_flight:
                self._read()
            self._is_whole = False
            self._reset()
            pages, windows = -(-self.context // PAGE), self.steps.window_pages
            if self._lacks(pages, windows):
                self._grow(pages, windows)
            # Pages for a window take turns: there are enough for it and the rows of a step.
            self.resident.give_pages(
                0, range(pages), [i % windows for i in range(pages)] if windows else ()
            )
            try:
                yield
            finally:
                self._forget_rows()
            self._is_whole = True

    # Steps

    def _step(self) -> None:
        """Submit what can be submitted, then read the oldest step in flight."""
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        self._take_in()
        self._fill()
        self._is_whole = True
        in_flight = self.submissions.in_flight
        if in_flight:
            is_next = len(in_flight) == 1 and not self.scheduler.has_prompts
            if self.scheduler.in_step and is_next and self._batch is not None:
                self.verification.prepare(self._batch)
            self._read()
            if self.scheduler.in_step:  # the GPU is idle until the next step is submitted
                self._is_whole = False
                self._fill()
                self._is_whole = True

    def _fill(self) -> None:
        """Submit as many steps as may be in flight."""
        in_flight = self.submissions.in_flight
        self._bring_back()
        while len(in_flight) < self.options.ahead and not self.decoding.is_held:
            if in_flight and in_flight[-1].prefilled and not self.pace.known:
                break  # its time is to be measured first
            self.verification.choose()
            work = self.scheduler.next(self._most_rows())
            self.tier.take_out()
            self._save()
            if self._lacks(*self._touched) and not self._has_grown():
                break
            if work is None:
                break
            if isinstance(work, Decode):
                self._decode(work)
            else:
                self._prefill(work)
            self.pool.unsaved.clear()

    def _most_rows(self) -> Callable[[int], int]:
        """Returns what gives the most rows of a step whose rows start at a position."""
        pace = self.pace
        most = pace.rows_beside if self.scheduler.running else pace.rows
        shared = self.scheduler.shared_rows if self.scheduler.has_prompts else 0
        return lambda position: pace.filled(most(position), shared)

    def _has_grown(self) -> bool:
        """Have memory for all pages that are used. Returns False if there is none: then the answers
        that have pages without memory end with that error, and others go on with an empty cache."""
        n_pages, windows = self._pages
        try:
            self._grow(*self._touched)
        except OutOfMemoryError as error:
            for sequence, answer in self._answers.items():
                own = sequence.window_pages[sequence.first_window :]
                if max(sequence.pages, default=0) >= n_pages or max(own, default=-1) >= windows:
                    answer.error, answer.ended = error, True
            self._recover()
            return False
        return True

    @property
    def _pages(self) -> tuple[int, int]:
        """Pages that there is memory for: of the cache, and of layers with a window."""
        windows = self.steps.windows
        return self.steps.cache.n_pages, 0 if windows is None else windows.n_pages

    @property
    def _touched(self) -> tuple[int, int]:
        """As `_pages`: those that there has to be memory for."""
        windows = self.pool.windows
        return self.pool.touched, 0 if windows is None else windows.touched

    def _lacks(self, pages: int, windows: int) -> bool:
        """Whether there is not memory for so many pages, and so many of layers with a window."""
        now, windows_now = self._pages
        return pages > now or windows > windows_now

    def _grow(self, least: int, least_windows: int) -> None:
        """Have memory for so many pages, and so many of layers with a window; of each where that is
        more than now, for half as many more than now. The first use of each page comes after this.
        Raises OutOfMemoryError."""
        now, windows_now = self._pages
        n_pages = _grown(now, least, self.options.pages)
        windows = _grown(windows_now, least_windows, self.steps.window_pages)
        # What is recorded binds the smaller buffers.
        self.verification.drop()
        self.decoding.drop()
        self._batch = None
        self.recordings.clear()
        self.texts.forget_recordings()
        self.steps.grow(n_pages, self.resident.table_length, windows)
        if self.draft is not None:
            self.draft.grow(n_pages)

    def _take_in(self) -> None:
        while self._inbox:
            answer = self._inbox[0]
            if answer.cancelled:
                self._end(answer)
            elif answer.sequence not in self._answers:
                self._answers[answer.sequence] = answer
                sequence = answer.sequence
                restore = None
                if sequence.shares:
                    restore = self.tier.plan(sequence.tokens, sequence.key)
                if restore is None:
                    self.scheduler.add(sequence)
                else:
                    self._restoring.append((restore, answer))
            self._inbox.popleft()

    def _bring_back(self) -> None:
        """Bring some of what the first prompt needs back from host memory."""
        if not self._restoring:
            return
        restore, answer = self._restoring[0]
        if answer.ended:
            self.tier.drop(restore)
        elif not self.tier.bring(restore):
            return
        self._restoring.popleft()
        if not answer.ended:
            self.scheduler.add(answer.sequence)

    def _takes(self, pages: Sequence[int]) -> bool:
        """Whether there is memory for these pages, which hold something else from here on."""
        try:
            if self._lacks(*self._touched):
                self._grow(*self._touched)
        except OutOfMemoryError:
            return False
        if self.draft is not None:
            self.draft.forget_pages(pages)
        return True

    def _prefill(self, work: Sequence[Prefill]) -> None:
        """Chunks of several prompts, or of one."""
        answers = [self._answers[part.sequence] for part in work]
        slots = [slot_of(part.sequence) for part in work]
        draft, before = self.draft, list[Copy]()
        for part, answer, slot in zip(work, answers, slots, strict=True):
            if part.first:
                self._batch = None  # the sequence may have had another slot
                if isinstance(answer, Answer):
                    self.resident.begin(answer, slot)
            self.resident.give_pages(slot, part.sequence.pages, part.sequence.window_pages)
            if part.copy is not None:
                before += self.steps.cache.copies(*part.copy, part.start % PAGE)
                if self.steps.windows is not None and part.sequence.window_copy is not None:
                    of_window = part.sequence.window_copy
                    before += self.steps.windows.copies(*of_window, part.start % PAGE)
                if draft is not None:
                    before += draft.copies(*part.copy, part.start % PAGE)
            if part.first and draft is not None:
                draft.begin(part.sequence, part.start, part.copy)
            if part.restore is not None:
                assert self.saved is not None
                before += self.saved.copies(slot, part.restore, back=True)
        self.resident.rotate_for(answers[0].table_length)
        if before:
            self.queue.submit(EMPTY, 0, 0, before)
        numbers = [self.adapters.number(answer.adapter) for answer in answers]
        leads = [
            self._lead if part.first and part.start and part.sequence.shares else 0 for part in work
        ]
        each = zip(leads, work, strict=True)
        rows = list(accumulate(lead + part.count for lead, part in each))  # where each one's end
        count, longest = rows[-1], max(part.start + part.count for part in work)
        kind = self.steps.prefill(count, len(work))
        last = [i for i, part in enumerate(work) if part.last]
        text, chain = answers[0], None
        if isinstance(text, Text):
            chunk = self.texts.chunk(text, work[0])
            wanted = Wanted((), chunk=chunk)
            recording = self.texts.recording(text, kind, bool(chunk.rows), any(numbers))
        else:
            ending = [cast(Answer, answers[i]) for i in last]
            chain = reduce(or_, (answer.chain for answer in ending)) if ending else None
            recording = self.recordings.of(kind, bool(ending), chain, any(numbers))
            wanted = Wanted(
                tuple(answer.sequence for answer in ending),
                tuple(i for i, answer in enumerate(ending) if answer.reads_logits),
                chain is not None and chain.logprobs,
            )
        chunks = [
            (
                part.sequence.tokens[part.start - lead : part.start + part.count],
                part.start - lead,
                slot,
                number,
            )
            for part, lead, slot, number in zip(work, leads, slots, numbers, strict=True)
        ]
        chosen = [rows[i] - 1 for i in last] if wanted.rows else []
        self.device.write(self.steps.step, pack_prompts(chunks, chosen, leads))
        position = sum(part.count * part.start for part in work) // count
        pieces = 1 if count <= MAX_VEC_ROWS else self.pace.submissions(count, position)
        if pieces > 1 and chain is not None and chain.mask:  # sampling comes after the masks
            first = self.recordings.of(kind, False, None, any(numbers)).parts(pieces)
            rest = self.recordings.of(kind, True, chain, any(numbers), body=False)
        else:
            *first, rest = recording.parts(pieces)
        with self.masks.making(wanted.rows) as failed:
            for piece in first:
                self.queue.submit(piece, count, longest, ())
        self._end_failed(failed)
        self.resident.prefilled(slots, tuple(slots[i] for i in last) if wanted.rows else ())
        # Scoring takes longer, so it would distort the pace of prompts.
        is_prompt = count > MAX_VEC_ROWS and not isinstance(text, Scored)
        prefilled = (count, position) if is_prompt else None
        self.submissions.submit(rest, count, longest, wanted, prefilled=prefilled)
        if draft is not None:
            known = [
                Known(part.sequence, slot, part.sequence.tokens, part.start + part.count)
                for part, slot in zip(work, slots, strict=True)
                if part.sequence.shares
            ]
            draft.follow(self.queue, known)
        for part, slot in zip(work, slots, strict=True):
            if part.save is not None:
                self._save_state(slot, part.save)
        for part, answer in zip(work, answers, strict=True):  # while the GPU computes them
            if part.first and isinstance(answer, Answer) and answer.guess is not None:
                answer.guess.begin(part.sequence.tokens)

    def _decode(self, work: Decode) -> None:
        batch = self._batch
        if batch is None or batch.sequences != work.sequences:
            batch = self._batch = self.decoding.batch(work.sequences)
        resident, longest = self.resident, 0
        resident.rotate_for(batch.table_length)
        for sequence, slot in zip(batch.sequences, batch.slots, strict=True):
            longest = max(longest, sequence.computed)
            if len(sequence.pages) != len(resident.pages[slot]):
                if self.draft is not None:
                    self.draft.forget_pages(sequence.pages[len(resident.pages[slot]) :])
                resident.give_pages(slot, sequence.pages, sequence.window_pages)
        if self.draft is not None and not work.drafts:
            self.verification.drop()  # nothing is drafted in this step
        prepared = self.verification.take(batch)
        if work.drafts or work.behind or prepared is not None:
            drafts = work.drafts or ((),) * len(batch.slots)
            behind = work.behind or (0,) * len(batch.slots)
            resident.verified(batch.slots, drafts)
            of = batch, drafts, behind, longest, prepared
            self._end_failed(self.verification.submit(*of))
            return
        if resident.unknown:
            for sequence in batch.sequences:
                if sequence.slot in resident.unknown:
                    resident.set_next(cast(Answer, self._answers[sequence]))
        self.decoding.drop_body(batch, longest)
        self._end_failed(self.decoding.submit(batch, longest, resident.take(batch.slots)))

    def chunks(self, length: int) -> Iterator[tuple[int, int, str]]:
        """(start, rows, kind of step) of each step of a prompt of that length, if it is alone."""
        start = 0
        while start < length:
            rows = min(length - start, self.pace.rows(start), self.steps.rows["prefill"])
            yield start, rows, self.steps.prefill(rows)
            start += rows

    def _read(self) -> None:
        """Wait for the oldest step in flight, and take in its results."""
        step = self.submissions.in_flight[0]
        ids, logits, ranked, of_text = self.submissions.read()
        self._is_whole = False
        self.submissions.in_flight.popleft()
        now = time.perf_counter()
        self.tier.collect()
        if step.prefilled:
            count, position = step.prefilled
            self.pace.measured(count, now - max(step.since, self._read_at), position)
        self.verification.measured(step, self._read_at, now)
        self._read_at = now
        rows: Sequence[int] = range(len(ids))
        if step.drafts:
            ids, rows = self.verification.accepted(step, ids)
        for i in rows:
            answer = self._answers.get(step.wanted.rows[i])
            if isinstance(answer, Answer):
                if step.drafts and step.drafts[i] is not None:
                    answer.timings.accepted_tokens += 1
                self._take_token(answer, ids[i], logits.get(i), ranked.get(i), now)
        chunk = step.wanted.chunk
        if chunk is not None and not chunk.text.ended:
            if of_text is not None:
                chunk.text.take(chunk.start, of_text)
            if chunk.last:
                self._end(chunk.text)
        self._end_failed(self.decoding.go_on())
        self._is_whole = True

    def _take_token(
        self,
        answer: Answer,
        token: int,
        logits: NDArray[np.float32] | None,
        ranked: NDArray[Any] | None,
        now: float,
    ) -> None:
        """ranked: the LOGPROB records of its row, if any answer of the step asked for them."""
        sequence = answer.sequence
        if answer.ended:  # only its state is still to be saved
            stops = token in answer.stop_ids
            self.scheduler.read(sequence, token, ended=stops)
            self._end(answer)
            return
        try:
            if answer.sampler is not None:
                assert logits is not None  # asked for
                allowed = None
                if answer.constraint is not None:
                    so_far = sequence.tokens, len(answer.prompt)
                    allowed = answer.constraint.allowed_after(*so_far, self.vocab_size)
                token = answer.sampler(logits, allowed)
            elif token == INVALID_TOKEN:
                raise ModelError(
                    "The model's logits are not finite: its weights may be damaged, or its values "
                    'too large for the KV cache\'s f16 (load it with `kv_dtype="f32"`).'
                )
            assert token != NO_TOKEN
            own = answer.logprobs(token, logits, ranked)
        except Exception as error:
            answer.error = error  # type: ignore[assignment]
            self._end(answer, at_once=True)
            return
        timings = answer.timings
        if not answer.count:
            timings.prefill_seconds = now - answer.begun
            timings.queue_seconds = sequence.admitted - answer.begun
            timings.reused_tokens = sequence.reused
            timings.prefilled_tokens = len(answer.prompt) - sequence.reused
        else:
            timings.decode_seconds = now - answer.begun - timings.prefill_seconds
            timings.decoded_tokens += 1
        answer.give(Step(token, logits if answer.with_logits else None, own))
        last = answer.is_over
        of_part = len(sequence.tokens) + 1 >= sequence.end
        self.scheduler.read(sequence, token, last or of_part)
        if answer.guess is not None and not last:
            answer.guess.take(sequence.tokens)
        if last:
            self._end(answer)
        elif of_part:
            self._begin_part(answer)
        elif answer.sampler is not None and sequence.slot is not None:
            self.resident.set_next(answer)

    def _begin_part(self, answer: Answer) -> None:
        """Begin its next part: from here on all positions have another rotary table."""
        before = answer.sequence
        rest, key = answer.limit - answer.count, (answer.adapter, answer.cache_salt)
        sequence = self._sequence(before.tokens, rest, key, before.ahead, before.priority)
        self.scheduler.add(sequence)
        self._answers[sequence] = answer
        answer.sequence = sequence
        del self._answers[before]

    def _end(self, answer: Answer | Text, *, at_once: bool = False) -> None:
        answer.ended = True
        sequence = answer.sequence
        if sequence in self._answers:
            self.scheduler.cancel(sequence, at_once=at_once)
            if sequence.state == "ended":  # else it ends when what is in flight was read
                del self._answers[sequence]

    def _end_failed(self, answers: Sequence[Answer]) -> None:
        """End answers whose masks could not be made."""
        for answer in answers:
            self._end(answer, at_once=True)

    def _save(self) -> None:
        """Save the states that the scheduler wants to be saved before the next step."""
        for slot, place in self.scheduler.to_save:
            self._save_state(slot, place)
        self.scheduler.to_save.clear()

    def _save_state(self, slot: int, place: int) -> None:
        """Save a state in its place. Where there is no memory for more places, there are no more
        from now on, and what they hold is less."""
        assert self.saved is not None
        try:
            self.saved.reserve(place + 1)
        except OutOfMemoryError:
            self.pool.snapshots.shrink(self.saved.places)
            return
        self.queue.submit(EMPTY, 0, 0, self.saved.copies(slot, place, back=False))

    def _recover(self) -> None:
        """After an interrupt in the middle of a change, trust nothing here or on the GPU: all
        answers go on from their known tokens."""
        self.submissions.forget()
        self._reset()

    def _reset(self) -> None:
        """Begin anew with an empty cache and nothing in flight."""
        self.tier.forget()
        for _, answer in self._restoring:
            self.scheduler.add(answer.sequence)
        self._restoring.clear()
        for sequence, answer in list(self._answers.items()):
            if isinstance(answer, Answer) and answer.sequence is sequence:
                answer.mend()
                answer.guess = self._guess(answer)
                answer.ended |= answer.is_over or answer.error is not None
                if not answer.ended and len(sequence.tokens) >= sequence.end:
                    self._begin_part(answer)
            if answer.ended or answer.sequence is not sequence:  # only a state was to be saved
                self._answers.pop(sequence, None)
        self.scheduler.reset(self._answers)
        self._forget_rows()

    # Files of the cache

    def save_cache(
        self,
        path: str,
        ids: Sequence[int],
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Generator[int, None, None]:
        once = SamplingParams(max_tokens=1).resolved({})
        for _ in self.generate(ids, once, adapter=adapter, cache_salt=cache_salt):
            pass
        with self._changing():
            prompt = self.tier.copy_out(ids, self._key(ids, adapter, cache_salt))
        self.files.write(Path(path), prompt, adapter)
        yield len(prompt.tokens)

    def load_cache(
        self, path: str, adapter: str | None = None, cache_salt: str | None = None
    ) -> Generator[int, None, None]:
        self.check_adapter(adapter)
        prompt = self.files.read(Path(path), adapter)
        ids: list[int] = prompt.tokens.tolist()
        if not self.tier.takes(prompt):
            raise RequestError(f"{path} is damaged. Save the cache again.")
        self.check_prompt(ids, room=0)
        with self._changing():
            has_room = self.tier.copy_in(prompt, self._key(ids, adapter, cache_salt))
        if not has_room:
            raise RequestError(
                f"The cache has no room for the {len(ids):,} positions of {path} beside the "
                "answers that are generated. Ask again later, or give it more memory."
            )
        yield len(ids)

    def share(self, memory: HostMemory) -> None:
        """Keep what the GPU has no room for in this memory, with others, once weights are read."""
        gpu = self.gpu.name if self.options.invariant else ""
        has_windows = self.pool.windows is not None
        own = self.options.kv_dtype, has_windows, self.adapter_names, self.products, gpu
        with self.turn():
            self.tier.share(memory, (VERSION, self.files.fingerprint, *own))

    # Texts

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> Generator[NDArray[np.float64], None, None]:
        """Computed in steps beside those of answers."""
        for ids in texts:
            self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.texts.embed(texts, pooling, adapter, self, self.options.ahead)

    def score(
        self, ids: Sequence[int], n: int, adapter: str | None = None
    ) -> Generator[list[Logprobs], None, None]:
        """Computed in steps beside those of answers. n: at most MAX_LOGPROBS."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.texts.score(ids, n, adapter, self)

    def logits(
        self, ids: Sequence[int], adapter: str | None = None
    ) -> Generator[NDArray[np.float32], None, None]:
        """Yields the logits of all positions of a text, some rows at a time. Raises as `score`
        does."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self.texts.logits(ids, adapter, self)


def _grown(now: int, least: int, most: int) -> int:
    """Pages to have memory for, where there have to be at least so many."""
    return now if least <= now else min(most, max(least, now + now // 2))


def _message_ends(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Returns where the first message of a chat ends, which is mostly what others begin with, and
    where the last but one ends, behind which a user may edit: messages end as answers do."""
    ends = np.flatnonzero(np.isin(ids, stop_ids)) + 1
    return [int(end) for end in (*ends[:1], *ends[-2:-1])]
