"""The loop that owns the GPU: token ids in, token ids out. It knows nothing of text.

Any number of answers are generated at once (continuous batching, Yu et al. 2022, "Orca"). The
scheduler says what to submit next: a chunk of one answer's prompt, or one row of every answer that
has its prompt behind it. The GPU samples, and writes the next row of each sequence into a table, so
that step n + 1 is submitted before the ids of step n are read, whoever comes or goes.

Nothing runs but in the threads that wait for a token: one of them submits and reads for all, until
it has its own.

Where tokens are drafted (`infer.engine.speculation`) a step has more rows of a sequence than one,
and the host writes them, when all before them have been read. What it dispatches is recorded while
the step before it runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from itertools import accumulate
from operator import or_
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import (
    LOGPROBS_BYTES,
    NOTHING,
    Answer,
    Batch,
    Chunk,
    Embedding,
    InFlight,
    Prepared,
    Scored,
    Staging,
    Text,
)
from infer.engine.constraint import Asked, Constraint
from infer.engine.draft import Drafting, DraftModel, Loaded
from infer.engine.options import DRAFT_ROWS, EngineOptions
from infer.engine.pace import Pace
from infer.engine.pages import PagePool
from infer.engine.prediction import Prediction, with_shared
from infer.engine.scheduler import Decode, Prefill, Scheduler
from infer.engine.speculation import MAX_DRAFT, Held, ModelSpeculation, Speculation
from infer.engine.steps import HIDDEN, MAX_BATCH, SCORED, Steps
from infer.engine.token_engine import EngineStats, Step, Timings, TokenEngine
from infer.kernels.compiler.graph import stride
from infer.kernels.compiler.target import MAX_VEC_ROWS
from infer.kernels.errors import ModelError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, check_process
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import Copy, Part, PublicQueue, RawQueue, Recording, StepQueue
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.layer_state import LayerState, copies
from infer.kernels.state.sampler import (
    INVALID_TOKEN,
    LOGPROB,
    ROW_LOGPROBS,
    Sampler,
    SamplerChain,
)
from infer.kernels.state.step import NO_TOKEN, StepRow, pack_prompts, pack_rows
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.mtp import Predictor
from infer.models.blocks.rope import rope_table, same_until, table_length
from infer.models.loading.lora import NO_ADAPTERS, Adapters
from infer.sampling import LogitsProcessor, Logprobs, NumpySampler, SamplingParams, logprobs

_TAIL = MAX_VEC_ROWS  # tokens of a prompt's end that a state is saved before
_DRAFTED = 4  # rows for each of many sequences that a draft model drafts for
_PAUSE = 0.005  # between two steps, from where on they do not follow each other


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
            device,
            model,
            weights,
            self.adapters,
            context=options.context,
            kv_dtype=options.kv_dtype,
            prefill_chunk=options.prefill_chunk,
            fuse=options.fuse,
            max_batch=options.max_batch,
            n_pages=options.pages,
            invariant=options.invariant,
            draft_rows=draft_rows,
            predictor=predictor,
        )
        # Rows before those of a prompt that is partly cached: its last hidden state was not kept.
        self._lead = int(predictor is not None and not any(self.config.states))
        self.states = [cache for cache in self.steps.caches if isinstance(cache, LayerState)]
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
        self.pool = PagePool(options.pages, PAGE, snapshots=self.steps.places if self.states else 0)
        self.scheduler = Scheduler(
            self.pool,
            slots=options.max_batch,
            context=options.context,
            chunk=self.steps.rows["prefill"] - self._lead * self.steps.prompts,
            ahead=options.ahead,
            snapshot_tail=_TAIL if self.states else 0,
            prompts=self.steps.prompts,
        )
        self.draft: DraftModel | None = None
        if draft is not None:
            kind = DraftModel if predictor is None else Prediction
            self.draft = kind(device, draft, options, self.steps, self.sampler)
        self.speculation: Speculation | None = None
        if options.speculate != "off":
            by = Speculation if draft is None else ModelSpeculation
            self.speculation = by(self.steps.draft_kinds, measures=options.speculate == "auto")
        self._draft_rows = 0  # of the next step with drafts
        self._verified = [0, 0, 0]  # drafts, their tokens, and those that were right
        self._drafting = 0, 0  # sequences in it that have drafts, and how many these have at most
        self._prepared: Prepared | None = None
        self._body: tuple[Batch, int, Any] | None = None  # recorded: that of the next such step
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        self._staging = self._new_staging()
        self._in_flight: deque[InFlight] = deque()
        # A step whose body alone is submitted: the longest of its sequences, and since when.
        self._held: tuple[Batch, int, float] | None = None
        self._submitted = 0
        self._answers: dict[scheduler.Sequence, Answer | Text] = {}
        self._made: set[tuple[str, bool]] = set()  # steps of texts that are there, some by row
        self._inbox: deque[Answer | Text] = deque()  # those to begin, and those to cancel
        self._turn = threading.Condition()
        self._leader: int | None = None  # the thread that submits and reads
        self._wanted = 0  # threads that wait for a turn, before the next step
        self._is_whole = True  # not in the middle of a change that an interrupt would cut in half
        self._table_length = 0
        self._read_at = 0.0  # when the last step was
        self._forget_rows()
        self.timings = Timings()  # of the answer that was begun last

    def _new_staging(self) -> list[Staging]:
        """For each step in flight."""
        row_bytes = 4 * stride(self.vocab_size)
        count, most = self.options.ahead, self.steps.most_rows
        return [Staging(self.device, most, row_bytes) for _ in range(count)]

    def _forget_rows(self) -> None:
        """Nothing is known of what the GPU has of sequences: their pages, the rows of a step."""
        self._pages: list[list[int]] = [[] for _ in range(self.options.max_batch)]
        self._rows: tuple[int, ...] | None = None
        self._host_rows: set[int] = set()  # slots of whose next rows the GPU does not know
        self._batch: Batch | None = None
        if self.draft is not None:
            self.draft.forget()
        self._drop_prepared()

    def warm_up(
        self,
        prompt_tokens: int,
        params: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Have compiled beforehand what a generation from a prompt of that length would compile
        on its way: the sampler, and where the CPU computes, whose driver puts a kernel off until it
        first runs, all the rest. params: `resolved`. progress: as for `Steps.compile`."""
        last = min(prompt_tokens, _TAIL) if self.states else 0  # a step of their own
        parts = (prompt_tokens - last, last, 0 if params.max_tokens == 1 else 1)
        kinds = dict.fromkeys(kind for part in parts for *_, kind in self.chunks(part))
        chain = self._chain(params)
        recordings = [self.recording(kind, True, chain) for kind in kinds]
        if params.max_tokens != 1:
            few = [self.steps.drafts(n) for n in self.steps.draft_kinds if n <= DRAFT_ROWS]
            unknown = self.draft is not None
            recordings += [
                self.recording(kind, True, chain, drafts=True, unknown=unknown) for kind in few
            ]
        if self.draft is not None:
            recordings += self.draft.recordings(prompt_tokens, chain)
        if not self.device.software:
            return
        first = {item.pipeline: item for r in recordings for item in r.dispatches}
        for done, item in enumerate(first.values(), 1):
            # No workgroup runs, but the driver has to have the kernel.
            nothing = Recording([replace(item, grid=(0, 1, 1))])
            self.queue.wait(self.queue.submit(nothing, 0, 0, ()))
            if progress is not None:
                progress(done, len(first))

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """As `Steps.compile`, of the draft model too."""
        self.steps.compile(progress, *([] if self.draft is None else [self.draft.steps]))

    def compile_batches(self, params: SamplingParams) -> None:
        """Have compiled what an answer that joins others takes beside what it would alone."""
        self.steps.compile_batches()
        self.sampler.dispatches(self._chain(params), gather=self.steps.prompts)
        if self.draft is not None:
            self.draft.steps.compile_batches(prompts=False)

    @property
    def gpu(self) -> AdapterInfo:
        return self.device.adapter

    @cached_property
    def queue(self) -> StepQueue:
        """What steps are submitted to."""
        return (RawQueue if self.options.raw else PublicQueue)(self.device)

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
        generated: Sequence[int] = (),
    ) -> Answer:
        """with_logits also reads back the logits of every step. With a logits_processor they come
        back too, and no step of this answer is ahead. constraint: the one that params ask for.
        generated: tokens after the prompt that are there already; what comes is what would have
        come after them."""
        self.check_prompt(prompt_ids)
        self.check_adapter(adapter)
        assert params.constrained == (constraint is not None)
        # The last token needs no position: nothing comes after it.
        limit = self.context - len(prompt_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        sampler = None
        if logits_processor is not None:
            sampler = NumpySampler(params, self.vocab_size, prompt_ids, logits_processor)
            sampler.ids = np.append(sampler.ids, np.array(generated, np.int64))
        # With a mask only the body of the second.
        ahead = 1 if sampler is not None else 2 if constraint is not None else self.options.ahead
        ids = [*prompt_ids, *generated]
        chain = self._chain(params) if sampler is None else SamplerChain()
        guess = None
        # Else the host would have to do for every draft what it does for a token.
        if self.speculation is not None and sampler is None and not with_logits:
            held = None if constraint is None else Held(constraint, len(prompt_ids))
            guess = self.speculation.guess(held)
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
            guess,
            self._sequence(ids, limit - len(generated), (adapter, cache_salt), ahead),
            count=len(generated),
        )
        if len(generated) < limit and not (generated and generated[-1] in stop_ids):
            self._inbox.append(answer)
        else:
            answer.ended = True
        self.timings = answer.timings
        return answer

    def _chain(self, params: SamplingParams) -> SamplerChain:
        """What sampling dispatches. Noise beside filters is added to other scores than alone: to be
        invariant it always goes the way of filters."""
        chain = params.chain()
        return replace(chain, min_p=True) if self.options.invariant and chain.noise else chain

    def _sequence(
        self, ids: Sequence[int], limit: int, key: tuple[str | None, ...], ahead: int
    ) -> scheduler.Sequence:
        """Of so many more tokens, or as many as keep their rotations. key: of the cache."""
        rope = self.model.config.rope
        part = int(min(limit, same_until(rope, len(ids)) + 1 - len(ids)))
        length = table_length(rope, len(ids))
        return scheduler.Sequence(ids, limit=part, key=(*key, length), group=length, ahead=ahead)

    def cancel(self, answer: Answer | Text) -> None:
        """Safe at any time, in any thread, and twice."""
        if not (answer.ended or answer.cancelled):
            answer.cancelled = True
            self._inbox.append(answer)
            if self._turn.acquire(blocking=False):  # it may be this thread that has it
                self._turn.notify_all()
                self._turn.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready`, which is asked between steps; makes them where no other thread does."""
        me = threading.get_ident()
        while not ready():
            self._check_turn()
            try:
                with self._turn:
                    if self._leader is not None or self._wanted:
                        self._turn.wait()
                        continue
                    self._leader = me
                self._step()
            finally:
                self._end_turn()

    def _check_turn(self) -> None:
        """Raises RequestError where this thread would wait for itself, and DeviceError in a process
        that was forked."""
        check_process()
        if self._leader == threading.get_ident():
            raise RequestError("A step of this model is being made by this very thread.")

    def _end_turn(self) -> None:
        if self._leader == threading.get_ident():
            with self._turn:
                self._leader = None
                self._turn.notify_all()

    def settle(self) -> None:
        """Take in what was cancelled, where nothing else is generated: its pages are free then."""
        with self.turn():
            for _ in range(self.options.ahead + 1):  # more may come all the time
                if not (self._inbox or self._in_flight):
                    break
                self._step()

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        new = sum(not answer.cancelled for answer in list(self._inbox))
        running = len(scheduler.running) + len(scheduler.prefilling)
        memory = self.device.memory_stats()
        waiting = len(scheduler.waiting) + new
        counts = scheduler.preemptions, *self._verified
        return EngineStats(memory, self.pool.stats, running, waiting, *counts)

    def close(self) -> None:
        with self.turn():
            self._drop_prepared()
            self.device.close()

    def forget(self) -> None:
        """Empty the cache: nothing is reused from here on. The first pages are sequence 0's, for
        who submits steps by hand."""
        with self.alone():
            pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In it, this thread has the engine to itself, with an empty cache. Answers go on from
        their tokens afterwards."""
        with self.turn():
            if not self._is_whole:
                self._recover()
            self._is_whole = False
            self._take_in()
            self._is_whole = True
            while self._in_flight:
                self._read()
            self._is_whole = False
            self._reset()
            self._give_pages(0, range(-(-self.context // PAGE)))
            try:
                yield
            finally:
                self._forget_rows()
            self._is_whole = True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """In it, this thread alone makes steps."""
        self._check_turn()
        me = threading.get_ident()
        try:
            with self._turn:
                self._wanted += 1
                try:
                    while self._leader is not None:
                        self._turn.wait()
                finally:
                    self._wanted -= 1
                    self._turn.notify_all()
                self._leader = me
            yield
        finally:
            self._end_turn()

    # Steps

    def _step(self) -> None:
        """Submit what can be, and read the oldest step in flight."""
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        self._take_in()
        self._fill()
        self._is_whole = True
        if self._in_flight:
            if self.scheduler.in_step:
                self._prepare()
            self._read()
            if self.scheduler.in_step:  # nothing runs while the next one is waited for
                self._is_whole = False
                self._fill()
                self._is_whole = True

    def _fill(self) -> None:
        """Submit as many steps as may be in flight."""
        while len(self._in_flight) < self.options.ahead and self._held is None:
            if self._in_flight and self._in_flight[-1].prefilled and not self.pace.known:
                break  # find out
            if self.speculation is not None:
                self._draft(self.speculation)
            rows = 0
            if self.scheduler.has_prompts:
                rows = self.pace.rows_beside if self.scheduler.running else self.pace.rows
                rows = self.pace.filled(rows, self.scheduler.shared_rows)
            work = self.scheduler.next(rows)
            if work is None:
                break
            if isinstance(work, Decode):
                self._decode(work)
            else:
                self._prefill(work)

    def _take_in(self) -> None:
        while self._inbox:
            answer = self._inbox[0]
            if answer.cancelled:
                self._end(answer)
            elif answer.sequence not in self._answers:
                self._answers[answer.sequence] = answer
                self.scheduler.add(answer.sequence)
            self._inbox.popleft()

    def _prefill(self, work: Sequence[Prefill]) -> None:
        """Chunks of several prompts, or of one."""
        answers = [self._answers[part.sequence] for part in work]
        slots = [_slot(part.sequence) for part in work]
        before: list[Copy] = []
        for part, answer, slot in zip(work, answers, slots, strict=True):
            if part.first:
                self._batch = None  # it may have had another slot
                if isinstance(answer, Answer):
                    self._begin(answer, slot)
            self._give_pages(slot, part.sequence.pages)
            if part.copy is not None:
                before += self.steps.cache.copies(*part.copy, part.start % PAGE)
                if self.draft is not None:
                    before += self.draft.copies(*part.copy, part.start % PAGE)
            if part.first and self.draft is not None:
                self.draft.begin(part.sequence, part.start, part.copy)
            if part.restore is not None:
                before += self._state_copies(slot, part.restore, back=True)
        self._rotate_for(answers[0].table_length)
        if before:
            self.queue.submit(NOTHING, 0, 0, before)
        numbers = [self.adapters.number(answer.adapter) for answer in answers]
        leads = [
            self._lead if part.first and part.start and part.sequence.shares else 0 for part in work
        ]
        each = zip(leads, work, strict=True)
        rows = list(accumulate(lead + part.count for lead, part in each))  # where those of each end
        count, longest = rows[-1], max(part.start + part.count for part in work)
        kind = self.steps.prefill(count, len(work))
        last = [i for i, part in enumerate(work) if part.last]
        sampled: tuple[scheduler.Sequence, ...] = ()
        logits_of: tuple[int, ...] = ()
        logprobs = False
        chunk = None
        text = answers[0]
        if isinstance(text, Text):
            chunk = self._chunk(text, work[0])
            recording = self._text_recording(text, kind, bool(chunk.rows), any(numbers))
        else:
            ending = [cast(Answer, answers[i]) for i in last]
            chain = reduce(or_, (answer.chain for answer in ending)) if ending else None
            recording = self.recording(kind, bool(ending), chain, any(numbers))
            sampled = tuple(answer.sequence for answer in ending)
            logits_of = tuple(i for i, answer in enumerate(ending) if answer.reads_logits)
            logprobs = chain is not None and chain.logprobs
        chunks = [
            (
                part.sequence.tokens[part.start - lead : part.start + part.count],
                part.start - lead,
                slot,
                number,
            )
            for part, lead, slot, number in zip(work, leads, slots, numbers, strict=True)
        ]
        chosen = [rows[i] - 1 for i in last] if sampled else []
        self.device.write(self.steps.step, pack_prompts(chunks, chosen, leads))
        pieces = 1 if count <= MAX_VEC_ROWS else self.pace.submissions(count)
        *first, rest = recording.parts(pieces)
        with self._masks(sampled):
            for piece in first:
                self.queue.submit(piece, count, longest, ())
        self._rows = tuple(slots[i] for i in last) if sampled else None
        self._host_rows.difference_update(slots)
        # One that is scored takes longer, and says nothing of prompts.
        is_prompt = count > MAX_VEC_ROWS and not isinstance(text, Scored)
        prefilled = count if is_prompt else 0
        self._submit(rest, count, longest, sampled, logits_of, logprobs, prefilled, chunk)
        for part, slot in zip(work, slots, strict=True):
            if self.draft is not None and part.sequence.shares:
                self.draft.follow(self.queue, part.sequence, slot, part.start + part.count)
            if part.save is not None:
                self.queue.submit(NOTHING, 0, 0, self._state_copies(slot, part.save, back=False))

    def _begin(self, answer: Answer, slot: int) -> None:
        """Of a sequence that has got a slot, perhaps not for the first time."""
        ids, prompt = answer.sequence.tokens, len(answer.prompt)
        record = answer.params.record(
            vocab_size=self.vocab_size,
            prompt_tokens=prompt,
            context=self.context,
            stop_ids=answer.stop_ids,
        )
        bias = answer.params.logit_bias
        self.sampler.begin(slot, record[0], answer.prompt, bias, ids[prompt:])

    def _rotate_for(self, length: int) -> None:
        """The table of positions of sequences that need that one (`table_length`)."""
        if length != self._table_length:
            rope = self.model.config.rope
            self.device.write(self.steps.rope.table, rope_table(rope, self.context, length))
            self._table_length = length

    def _give_pages(self, slot: int, pages: Sequence[int]) -> None:
        known = self._pages[slot]
        same = 0
        while same < min(len(known), len(pages)) and known[same] == pages[same]:
            same += 1
        if same < len(pages):
            self.steps.cache.assign(slot, same, pages[same:])
        self._pages[slot] = list(pages)

    def _decode(self, work: Decode) -> None:
        batch = self._batch
        if batch is None or batch.sequences != work.sequences:
            batch = self._batch = self._new_batch(work.sequences)
        if batch.table_length != self._table_length:
            self._rotate_for(batch.table_length)
        longest = 0
        for sequence, slot in zip(batch.sequences, batch.slots, strict=True):
            longest = max(longest, sequence.computed)
            if len(sequence.pages) != len(self._pages[slot]):
                if self.draft is not None:
                    self.draft.forget_pages(sequence.pages[len(self._pages[slot]) :])
                self._give_pages(slot, sequence.pages)
        if self.draft is not None and not work.drafts:
            self._drop_prepared()  # there is nothing to be drafted
        prepared = None if self._prepared is None else self._take_prepared(batch, self._prepared)
        if work.drafts or work.behind or prepared is not None:
            drafts = work.drafts or ((),) * len(batch.slots)
            behind = work.behind or (0,) * len(batch.slots)
            self._verify(batch, drafts, behind, longest, prepared)
            return
        if self._host_rows:
            for sequence in batch.sequences:
                if sequence.slot in self._host_rows:
                    self._set_next(cast(Answer, self._answers[sequence]))
        joins = batch.slots != self._rows
        if joins:
            self.sampler.take_rows_of(batch.slots)
            self._rows = batch.slots
        if self._awaits_tokens(batch):
            self._submit_body(batch, longest, joins)
            self._held = batch, longest, time.perf_counter()
        else:
            self._sample(batch, batch.joins if joins else batch.recording, longest)

    def _awaits_tokens(self, batch: Batch) -> bool:
        """Whether tokens before this step, on which its masks depend, have not been read."""
        return any(s.in_flight > 1 and s in self._answers for s in batch.masked)

    def _sample(
        self, batch: Batch, recording: Recording, longest: int, since: float | None = None
    ) -> None:
        """Submit a step, or the head of one whose body was submitted then."""
        of = batch.sequences, batch.logits_of, batch.logprobs
        count, commands = len(batch.slots), None
        if batch.masked:
            with self._masks(batch.masked) as are_made:
                copies = self._read_back(self._next_staging, count, *of[1:])
                commands = self.queue.record(recording, count, longest, copies)
                if self.options.ahead > 1 and not (self.scheduler.in_step or are_made()):
                    self._record_body(batch, longest + 1)
        self._submit(
            recording, count, longest, *of, sequences=count, commands=commands, since=since
        )

    def _record_body(self, batch: Batch, longest: int) -> None:
        """That of the next step of a batch with masks, if it stays as it is."""
        if self._body is not None:
            self.queue.drop(self._body[-1])
            self._body = None
        commands = self.queue.record(batch.body, len(batch.slots), longest, ())
        self._body = batch, longest, commands

    def _submit_body(self, batch: Batch, longest: int, joins: bool) -> None:
        own, self._body = self._body, None
        if own is not None:
            if own[0] is batch and own[1] == longest and not joins:
                self.queue.send(own[-1])
                return
            self.queue.drop(own[-1])
        body = batch.body_joins if joins else batch.body
        self.queue.submit(body, len(batch.slots), longest, ())

    @contextmanager
    def _masks(
        self,
        sequences: Sequence[scheduler.Sequence],
        drafts: Mapping[scheduler.Sequence, tuple[int, Sequence[int]]] | None = None,
    ) -> Iterator[Callable[[], bool]]:
        """What those that have a mask may sample next is found out while the body runs, which can
        ask whether that is done, and then written. All their tokens have been read. drafts: in a
        step with drafts, where each row has its mask, the first row of each and its draft."""
        answers: list[Answer] = []
        asked: list[Asked] = []
        for sequence in sequences:
            answer = self._answers.get(sequence)
            if isinstance(answer, Answer) and answer.is_masked and not answer.ended:
                assert answer.constraint is not None
                of = sequence.tokens, len(answer.prompt)
                at = (_slot(sequence),) if drafts is None else drafts[sequence]
                answers.append(answer)
                asked.append(Asked(answer.constraint, *of, *at))
        if not asked:
            yield lambda: True
            return
        with asked[0].constraint.threads.making(asked, self.sampler.masks) as made:
            yield made.done
        for answer, error in zip(answers, made.result(), strict=True):
            if error is not None:
                answer.error = error
                self._end(answer, at_once=True)
        rows = [row for each in asked for row in each.rows]
        self.sampler.write_masks(min(rows), max(rows))

    def _new_batch(self, sequences: tuple[scheduler.Sequence, ...]) -> Batch:
        answers = [cast(Answer, self._answers[sequence]) for sequence in sequences]
        chain = reduce(or_, (answer.chain for answer in answers))
        kind = self.steps.batch(len(sequences))
        by_row = any(answer.adapter is not None for answer in answers)
        batch = Batch(
            sequences,
            tuple(map(_slot, sequences)),
            answers[0].table_length,
            chain,
            by_row,
            self.recording(kind, True, chain, by_row),
            self.recording(kind, True, chain, by_row, joins=True),
            tuple(i for i, answer in enumerate(answers) if answer.reads_logits),
            chain.logprobs,
        )
        if not chain.mask:
            return batch
        return replace(
            batch,
            masked=tuple(answer.sequence for answer in answers if answer.is_masked),
            body=self.recording(kind, False, None, by_row),
            body_joins=self.recording(kind, False, None, by_row, joins=True),
            head=self.recording(kind, True, chain, by_row, body=False),
        )

    def _draft(self, speculation: Speculation) -> None:
        """Choose what the next step is to verify, once all that comes before it is known."""
        running = self.scheduler.running
        answers = [self._answers[sequence] for sequence in running]
        guesses = [answer.guess if isinstance(answer, Answer) else None for answer in answers]
        counts = speculation.counts(guesses)
        self.scheduler.in_step = any(counts)
        if self.scheduler.in_step:
            self._draft_rows = len(running) + sum(counts)
            self._drafting = sum(map(bool, counts)), max(counts)
            if self.draft is not None and self._prepared is not None:  # then from the next step on
                depth = self._prepared.drafting[1]
                counts = [depth if count else 0 for count in counts]
        for sequence, guess, count in zip(running, guesses, counts, strict=True):
            known = guess is not None and count and not sequence.in_flight
            sequence.draft = guess.ids[:count] if known and guess is not None else ()

    def _verify(
        self,
        batch: Batch,
        drafts: Sequence[Sequence[int]],
        behind: Sequence[int],
        longest: int,
        prepared: Prepared | None,
    ) -> None:
        """A step of rows that the host writes: all tokens of its sequences have been read."""
        rows: list[StepRow] = []
        sampled: list[scheduler.Sequence] = []
        drafted: list[int | None] = []
        first: list[int] = []  # row of each sequence
        drafting: list[Drafting] = []
        each = zip(batch.sequences, batch.slots, drafts, behind, strict=True)
        for sequence, slot, draft, own_behind in each:
            first.append(len(rows))
            answer = cast(Answer, self._answers[sequence])
            number = self.adapters.number(answer.adapter)
            position = len(sequence.tokens) - 1
            for i, token in enumerate((sequence.tokens[-1], *draft)):
                known = 0 if token == NO_TOKEN else token
                rows.append((known, position + i, slot, number, 0 if i else own_behind))
                drafted.append(token if i else None)
            sampled += [sequence] * (1 + len(draft))
            if draft and self.draft is not None:
                drafting.append(Drafting(sequence, slot, len(draft), first[-1] + 1))
            if draft:
                self._host_rows.add(slot)
            else:
                self._host_rows.discard(slot)
            answer.timings.drafted_tokens += len(draft)
        count = len(rows)
        shape = len(drafting), max(map(len, drafts))
        if prepared is not None and (
            prepared.rows < count
            or any(n < m for n, m in zip(prepared.drafting, shape, strict=True))
        ):
            self._drop(prepared)
            prepared = None
        if prepared is not None:
            count, shape = prepared.rows, prepared.drafting
        assert count <= self.steps.most_rows
        longest += max(map(len, drafts))
        self.device.write(self.steps.step, pack_rows(rows, count))
        self._rows = None
        if self.draft is not None and drafting:
            is_behind = self.draft.begin_round(self.queue, drafting, shape[0])
            if prepared is not None:
                self.queue.send(prepared.first[is_behind])
                self.queue.drop(prepared.first[not is_behind])
            else:  # the GPU drafts while the host records what verifies it
                parts = self.draft.first(shape[0], batch.chain, longest, is_behind)
                for part in (*parts, *self.draft.others(*shape, batch.chain, longest)):
                    self.queue.submit(*part, ())
        since = time.perf_counter()
        body, recording = self._verifying(batch, count)
        of = tuple(sampled), tuple(first[i] for i in batch.logits_of), batch.logprobs
        commands = None if prepared is None else prepared.commands
        if body is not None:  # which runs while masks are made
            if prepared is None:
                self.queue.submit(body, count, longest, ())
            else:
                self.queue.send(prepared.body)
            # What a draft model drafts is not known here, nor is it held.
            own = drafts if self.draft is None else ((),) * len(drafts)
            places = dict(zip(batch.sequences, zip(first, own, strict=True), strict=True))
            with self._masks(batch.masked, places):
                if commands is None:
                    copies = self._read_back(self._next_staging, len(sampled), *of[1:])
                    commands = self.queue.record(recording, count, longest, copies)
        self._submit(
            recording,
            count,
            longest,
            *of,
            sequences=len(batch.sequences),
            drafts=tuple(drafted),
            depth=shape[1],
            commands=commands,
            since=since,
        )

    def _verifying(self, batch: Batch, rows: int) -> tuple[Recording | None, Recording]:
        """What a step with drafts dispatches, with masks in two parts: the body and the head."""
        kind, chain, by_row = self.steps.drafts(rows), batch.chain, batch.by_row
        unknown = self.draft is not None
        if not batch.masked:
            return None, self.recording(kind, True, chain, by_row, drafts=True, unknown=unknown)
        head = self.recording(kind, True, chain, by_row, body=False, drafts=True, unknown=unknown)
        return self.recording(kind, False, None, by_row), head

    def _prepare(self) -> None:
        """Record the next step of a batch while one runs: there are to be drafts in it."""
        batch = self._batch
        if self._prepared is not None or batch is None or batch.logits_of:
            return
        if len(self._in_flight) > 1 or self.scheduler.has_prompts:
            return  # another comes first
        longest = max(s.computed + s.drafted for s in batch.sequences) + 1 + MAX_DRAFT
        longest = min(longest, self.context)
        rows, number, drafting = self._draft_rows, self._submitted, self._drafting
        copies = self._read_back(self._next_staging, rows, (), batch.logprobs)
        before: list[Part] = []
        first: tuple[Any, ...] = ()
        if self.draft is not None:
            before = self.draft.others(*drafting, batch.chain, longest)
            ways = (
                self.draft.first(drafting[0], batch.chain, longest, behind)
                for behind in (False, True)
            )
            first = tuple(self.queue.record(*sampling, (), [step]) for step, sampling in ways)
        recording, rest = self._verifying(batch, rows)
        body = None
        if recording is not None:
            body = self.queue.record(recording, rows, longest, (), before)
            before = []
        commands = self.queue.record(rest, rows, longest, copies, before)
        self._prepared = Prepared(batch, rows, drafting, number, body, commands, first)

    def _take_prepared(self, batch: Batch, prepared: Prepared) -> Prepared | None:
        """What was recorded for the next step, if that is one of this batch, and all tokens before
        it have been read."""
        is_next = prepared.number == self._submitted and prepared.batch is batch
        if not is_next or any(sequence.in_flight > 1 for sequence in batch.sequences):
            self._drop_prepared()
            return None
        self._prepared = None
        return prepared

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._drop(self._prepared)
            self._prepared = None
        if self._body is not None:
            self.queue.drop(self._body[-1])
            self._body = None

    def _drop(self, prepared: Prepared) -> None:
        body = () if prepared.body is None else (prepared.body,)
        for commands in (prepared.commands, *body, *prepared.first):
            self.queue.drop(commands)

    def chunks(self, length: int) -> Iterator[tuple[int, int, str]]:
        """(start, rows, kind of step) of the steps that take so many ids of a prompt, if it is
        alone."""
        start = 0
        while start < length:
            rows = min(length - start, self.pace.rows, self.steps.rows["prefill"])
            yield start, rows, self.steps.prefill(rows)
            start += rows

    def recording(
        self,
        kind: str,
        head: bool,
        chain: SamplerChain | None,
        by_row: bool = False,
        *,
        joins: bool = False,
        body: bool = True,
        drafts: bool = False,
        unknown: bool = False,
    ) -> Recording:
        """by_row: some of its rows have adapters. joins: its rows are taken from the table of
        sequences first. drafts: they may have drafted tokens. unknown: to the host."""
        key = (kind, by_row, head, chain, joins, body, drafts, unknown)
        if key not in self._recordings:
            plan = self.steps.plan(kind, by_row)
            dispatches = [self.sampler.step_rows] if joins else []
            dispatches += [*(plan.body if body else ()), *(plan.head if head else ())]
            if chain is not None:
                gather = self.steps.gathers(kind)
                dispatches += self.sampler.dispatches(chain, gather, drafts, unknown)
            self._recordings[key] = Recording(dispatches)
        return self._recordings[key]

    def _submit(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        sampled: tuple[scheduler.Sequence, ...],
        logits_of: tuple[int, ...],
        logprobs: bool,
        prefilled: int = 0,
        chunk: Chunk | None = None,
        sequences: int = 0,
        drafts: tuple[int | None, ...] = (),
        depth: int = 0,
        commands: Any = None,
        since: float | None = None,
    ) -> None:
        """depth: steps of a draft model before it. commands: it was recorded before. since: when
        its body was submitted."""
        staging = self._next_staging
        self._submitted += 1
        read_back = self._read_back(staging, len(sampled), logits_of, logprobs)
        if chunk is not None and chunk.rows:
            nbytes, begin = (4 * chunk.words * n for n in (len(chunk.rows), chunk.rows.start))
            read_back.append(Copy((chunk.buffer, begin), (staging.rows(nbytes), 0), nbytes))
        if commands is None:
            submission = self.queue.submit(recording, rows, kv_len, read_back)
        else:
            submission = self.queue.send(commands)
        since = time.perf_counter() if since is None else since
        kind: Hashable = 0
        if drafts and self.speculation is not None:
            kind = self.speculation.kind(sequences, self.steps.rows_of(rows), depth)
        of = sampled, logits_of, logprobs, prefilled, chunk, sequences, drafts, kind, since
        self._in_flight.append(InFlight(submission, staging, *of))

    @property
    def _next_staging(self) -> Staging:
        """Of the step that is submitted next."""
        return self._staging[self._submitted % len(self._staging)]

    def _read_back(
        self, staging: Staging, rows: int, logits_of: Sequence[int], logprobs: bool
    ) -> list[Copy]:
        """What the sampler leaves of so many rows, and the logits of some."""
        copies: list[Copy] = []
        if rows:
            copies.append(Copy((self.sampler.sampled, 0), (staging.ids, 0), 4 * rows))
        if logprobs:
            nbytes = LOGPROBS_BYTES * rows
            copies.append(Copy((self.sampler.logprobs, 0), (staging.logprobs, 0), nbytes))
        row, nbytes = 4 * stride(self.vocab_size), 4 * self.vocab_size
        for at, i in enumerate(logits_of):
            to = staging.rows(len(logits_of) * row), at * row
            copies.append(Copy((self.steps.logits, i * row), to, nbytes))
        return copies

    def _read(self) -> None:
        """Take in the oldest step in flight, once it is done."""
        step = self._in_flight[0]  # it stays there if an interrupt comes
        ids: list[int] = []
        logits: dict[int, NDArray[np.float32]] = {}
        if step.rows:
            nbytes = 4 * len(step.rows)
            ids = self.queue.read(step.staging.ids, nbytes, step.submission).tolist()
        else:
            self.queue.wait(step.submission)
        if step.logits_of:
            words = stride(self.vocab_size)
            values = self._read_rows(step, len(step.logits_of), words, self.vocab_size)
            logits = dict(zip(step.logits_of, values, strict=True))
        chunk, of_text = step.chunk, None
        if chunk is not None and chunk.rows:
            of_text = self._read_rows(step, len(chunk.rows), chunk.words, chunk.width)
        ranked: dict[int, NDArray[Any]] = {}
        if step.logprobs:
            nbytes = LOGPROBS_BYTES * len(step.rows)
            raw = self.queue.read(step.staging.logprobs, nbytes, step.submission)
            ranked = dict(enumerate(raw.view(LOGPROB).reshape(-1, ROW_LOGPROBS)))
        self._is_whole = False
        self._in_flight.popleft()
        now = time.perf_counter()
        if step.prefilled:
            self.pace.measured(step.prefilled, now - max(step.since, self._read_at))
        if self.speculation is not None and step.sequences:
            ids = self._account(step, ids, now, self.speculation)
        self._read_at = now
        for i in self._accepted(step, ids) if step.drafts else range(len(ids)):
            answer = self._answers.get(step.rows[i])
            if isinstance(answer, Answer):
                if step.drafts and step.drafts[i] is not None:
                    answer.timings.accepted_tokens += 1
                self._take_token(answer, ids[i], logits.get(i), ranked.get(i), now)
        if chunk is not None and not chunk.text.ended:
            if of_text is not None:
                chunk.text.take(chunk.start, of_text)
            if chunk.last:
                self._end(chunk.text)
        if self._held is not None and not self._awaits_tokens(self._held[0]):
            (batch, longest, since), self._held = self._held, None
            self._sample(batch, batch.head, longest, since)
        self._is_whole = True

    def _account(
        self, step: InFlight, ids: list[int], now: float, speculation: Speculation
    ) -> list[int]:
        """How long a decode step took, and what it is taken to have sampled."""
        was_ahead = step.since <= self._read_at
        if step.kind or was_ahead or self.options.ahead == 1:
            begun = self._read_at if step.since - self._read_at < _PAUSE else step.since
            speculation.measured(step.sequences, step.kind, now - begun)
        return speculation.ids(ids, step.drafts) if step.drafts else ids

    def _accepted(self, step: InFlight, ids: Sequence[int]) -> list[int]:
        """The rows of a step whose tokens count: a drafted one's does where the row before it has
        sampled what it was drafted with, and counts."""
        rows: list[int] = []
        counts: dict[scheduler.Sequence, int] = {}
        for i, (sequence, drafted) in enumerate(zip(step.rows, step.drafts, strict=True)):
            if drafted == NO_TOKEN:  # the GPU has compared it
                right = ids[i] != NO_TOKEN
            else:
                right = drafted is None or (rows[-1] == i - 1 and ids[i - 1] == drafted)
            if right:
                rows.append(i)
                counts[sequence] = counts.get(sequence, -1) + 1
        for sequence, count in counts.items():
            answer = self._answers.get(sequence)
            for i, new in enumerate((sequence.drafted > 0, sequence.drafted, count)):
                self._verified[i] += new
            if self.draft is not None and sequence.drafted and sequence.state == "running":
                self.draft.accepted(sequence, sequence.drafted, count)
                if isinstance(answer, Answer) and answer.guess is not None:
                    answer.guess.verified(sequence.drafted, count)
            self.scheduler.accept(sequence, count)
        return rows

    def _read_rows(self, step: InFlight, count: int, words: int, width: int) -> NDArray[np.float32]:
        """[count, width]: what was read back of a step."""
        nbytes = 4 * count * words
        raw = self.queue.read(step.staging.rows(nbytes), nbytes, step.submission)
        return raw.view(np.float32).reshape(count, -1)[:, :width]

    def _take_token(
        self,
        answer: Answer,
        token: int,
        logits: NDArray[np.float32] | None,
        ranked: NDArray[Any] | None,
        now: float,
    ) -> None:
        """ranked: the LOGPROB records of its row, if it or another asked for them."""
        sequence = answer.sequence
        if answer.ended:  # but its state is still to be saved
            stops = token in answer.stop_ids
            self._save(sequence.slot, self.scheduler.read(sequence, token, ended=stops))
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
                    "too large for the KV cache's f16 (load it with kv_dtype f32)."
                )
            assert token != NO_TOKEN
            own = _logprobs(answer, token, logits, ranked)
        except BaseException as error:
            if isinstance(error, Exception):
                answer.error = error  # type: ignore[assignment]
            self._end(answer, at_once=True)
            if not isinstance(error, Exception):
                raise
            return
        timings = answer.timings
        if not answer.count:
            timings.prefill_seconds = now - answer.begun
            timings.reused_tokens = sequence.reused
            timings.prefilled_tokens = len(answer.prompt) - sequence.reused
        else:
            timings.decode_seconds = now - answer.begun - timings.prefill_seconds
            timings.decoded_tokens += 1
        answer.count += 1
        last = token in answer.stop_ids or answer.count >= answer.limit
        of_part = len(sequence.tokens) + 1 - sequence.prompt_tokens >= sequence.limit
        slot = sequence.slot
        place = self.scheduler.read(sequence, token, last or of_part)
        if place is not None:
            self._save(slot, place)
        if answer.guess is not None and not last:
            answer.guess.take(sequence.tokens)
        answer.steps.append(Step(token, logits if answer.with_logits else None, own))
        if last:
            self._end(answer)
        elif of_part:  # from here on, all positions rotate otherwise
            del self._answers[sequence]
            rest = answer.limit - answer.count
            key = answer.adapter, answer.cache_salt
            answer.sequence = self._sequence(sequence.tokens, rest, key, sequence.ahead)
            self._answers[answer.sequence] = answer
            self.scheduler.add(answer.sequence)
        elif answer.sampler is not None and sequence.slot is not None:
            self._set_next(answer)

    def _set_next(self, answer: Answer) -> None:
        """Tell the GPU the next row of an answer of which all tokens have been read."""
        sequence, slot = answer.sequence, _slot(answer.sequence)
        number = self.adapters.number(answer.adapter)
        self.sampler.set_next(slot, sequence.tokens[-1], len(sequence.tokens) - 1, number)
        self._host_rows.discard(slot)
        self._rows = None

    def _end(self, answer: Answer | Text, *, at_once: bool = False) -> None:
        answer.ended = True
        sequence = answer.sequence
        if sequence in self._answers:
            slot = sequence.slot
            self._save(slot, self.scheduler.cancel(sequence, at_once=at_once))
            if sequence.state == "ended":  # else with what is in flight
                del self._answers[sequence]

    def _save(self, slot: int | None, place: int | None) -> None:
        """The states of a sequence that had that slot."""
        if place is not None:
            assert slot is not None
            self.queue.submit(NOTHING, 0, 0, self._state_copies(slot, place, back=False))

    def _state_copies(self, slot: int, place: int, *, back: bool) -> list[Copy]:
        """What to copy to save the states of a sequence in a place, or to go back to them."""
        found = copies(self.states, slot, place, back=back)
        if self.steps.last_hidden is not None:
            found += self.steps.last_hidden.copies(slot, place, back=back)
        return found

    def _recover(self) -> None:
        """After an interrupt in the middle of a change: nobody knows what it made, and staging
        buffers may be mapped. All answers go on from the tokens that are known."""
        self.device.wait()
        for staging in self._staging:
            staging.destroy()
        self._staging = self._new_staging()
        self._in_flight.clear()
        self._held = None
        self._reset()

    def _reset(self) -> None:
        """Nothing is in the cache, or in flight."""
        self.scheduler.reset()
        self._forget_rows()
        for answer in list(self._answers.values()):
            if answer.ended:  # it only had a state to be saved
                self._end(answer, at_once=True)

    # Texts

    def _chunk(self, text: Text, work: Prefill) -> Chunk:
        steps, rows = self.steps, text.rows(work)
        if isinstance(text, Embedding):
            width = self.model.config.hidden_size
            of = steps.hidden, stride(width), width
        elif isinstance(text, Scored) and text.given is not None:
            given = np.array(text.given[work.start : work.start + work.count], np.uint32)
            self.device.write(self._ranker.sampled, given)
            of = self._ranker.logprobs, LOGPROBS_BYTES // 4, LOGPROBS_BYTES // 4
        else:
            of = steps.scored, stride(self.vocab_size), self.vocab_size
        return Chunk(text, work.start, work.last, rows, *of)

    def _text_recording(self, text: Text, kind: str, head: bool, by_row: bool) -> Recording:
        if isinstance(text, Embedding):
            return self.recording(HIDDEN + kind, head, None, by_row)
        ranked = isinstance(text, Scored) and text.given is not None
        key = SCORED, by_row, ranked
        if key not in self._recordings:
            plan = self.steps.plan(SCORED, by_row)
            ranking = self._ranker.ranking if ranked else ()
            self._recordings[key] = Recording((*plan.body, *plan.head, *ranking))
        return self._recordings[key]

    @cached_property
    def _ranker(self) -> Sampler:
        """Of the logits of all rows, of which nothing is sampled."""
        steps, rows = self.steps, self.steps.scored_rows
        return Sampler(self.device, self.vocab_size, steps.scored, steps.step, max_rows=rows)

    def _make(self, kinds: Iterable[str], adapter: str | None) -> None:
        """Steps of texts, when the first comes: what fails here fails for nobody else."""
        missing = {(kind, adapter is not None) for kind in kinds} - self._made
        if missing:
            with self.turn():
                for kind, by_row in missing:
                    self.steps.plan(kind, by_row)
                if (SCORED, adapter is not None) in missing:
                    _ = self._ranker.ranking, self._ranker.logprobs
            self._made |= missing

    def _text_sequence(
        self, ids: Sequence[int], adapter: str | None, chunk: int = 1 << 30
    ) -> scheduler.Sequence:
        """Nothing in the cache is reused, because a position in it has no hidden state any more,
        and nothing is left there."""
        length = table_length(self.model.config.rope, len(ids))
        key = adapter, length
        return scheduler.Sequence(ids, limit=0, key=key, group=length, shares=False, chunk=chunk)

    # Embedding

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> Generator[NDArray[np.float64], None, None]:
        """Computed beside what else is generated."""
        for ids in texts:
            self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        self._make((HIDDEN + kind for kind in self.steps.rows), adapter)
        # A few at a time, so that an answer that comes meanwhile need not wait for all of them.
        running: deque[Embedding] = deque()
        try:
            for ids in texts:
                text = Embedding(ids, adapter, self._text_sequence(ids, adapter), pooling)
                self._inbox.append(text)
                running.append(text)
                if len(running) > self.options.ahead:
                    yield self._pooled(running[0])
                    running.popleft()
            while running:
                yield self._pooled(running[0])
                running.popleft()
        finally:
            for text in running:
                self.cancel(text)

    def _pooled(self, text: Embedding) -> NDArray[np.float64]:
        """Waited for. Raises ModelError for what is not finite."""
        self.wait(lambda: text.ended)
        assert text.pooled is not None
        if not np.isfinite(text.pooled).all():
            raise ModelError(
                "The model's hidden states are not finite: its weights may be damaged, or its "
                "values too large for the KV cache's f16 (load it with kv_dtype f32)."
            )
        return text.pooled

    # Scoring

    def score(
        self, ids: Sequence[int], n: int, adapter: str | None = None
    ) -> Generator[list[Logprobs], None, None]:
        """Computed beside what else is generated. n: MAX_LOGPROBS at most."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        for part in self._parts(ids[:-1], ids[1:], adapter) if len(ids) > 1 else ():
            yield [_ranked(row, n) for row in part.view(LOGPROB)]

    def logits(
        self, ids: Sequence[int], adapter: str | None = None
    ) -> Generator[NDArray[np.float32], None, None]:
        """As `score`."""
        self.check_prompt(ids, room=0)
        self.check_adapter(adapter)
        yield from self._parts(ids, None, adapter)

    def _parts(
        self, ids: Sequence[int], given: Sequence[int] | None, adapter: str | None
    ) -> Iterator[NDArray[np.float32]]:
        self._make((SCORED,), adapter)
        sequence = self._text_sequence(ids, adapter, self.steps.scored_rows)
        text = Scored(ids, adapter, sequence, given)
        self._inbox.append(text)
        try:
            while not (text.ended and not text.parts):
                self.wait(lambda: bool(text.parts) or text.ended)
                while text.parts:
                    yield text.parts.popleft()
        finally:
            self.cancel(text)


def _logprobs(
    answer: Answer,
    token: int,
    logits: NDArray[np.float32] | None,
    ranked: NDArray[Any] | None,
) -> Logprobs | None:
    """What it asks for, from the logits where the host has chosen the token."""
    n = answer.params.logprobs
    if n is None:
        return None
    if answer.sampler is not None:
        assert logits is not None  # asked for
        return logprobs(logits, token, n)
    assert ranked is not None  # a stage of its chain
    return _ranked(ranked, n)


def _ranked(row: NDArray[Any], n: int) -> Logprobs:
    """row: its LOGPROB records."""
    best = row[1 : 1 + n]
    return float(row["logprob"][0]), best[best["token"] != NO_TOKEN].tolist()


def _slot(sequence: scheduler.Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
