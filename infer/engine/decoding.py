"""Decode steps: one row of each sequence of a batch. The step before has left the rows on the GPU.

A step of answers with masks is submitted in two parts: the body before the tokens of the previous
step are read, and the head, which samples, once the masks that follow from them are written. Both
parts are recorded early: the head while the body runs, and the body of the next step at the same
time, by another thread.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

from infer.engine import scheduler
from infer.engine.answers import Answer, Jobs
from infer.engine.masks import Masks
from infer.engine.recordings import Recipe
from infer.engine.runner import Runner
from infer.engine.scheduler import Decode, Scheduler, slot_of
from infer.engine.submissions import InFlight, Read, Wanted
from infer.kernels.gpu.record import EMPTY, Recorded, Recording
from infer.kernels.state.sampler import SamplerChain

_PAUSE = 0.005  # seconds between two steps, from where on they do not follow each other


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that share decode steps, and what these steps dispatch. It is made once, and kept
    while the sequences stay the same.

    recording: of a step whose rows the step before has left in place; joins: of one that takes them
    from the table of sequences. logits_of: the sequences whose logits are read back. masked: the
    sequences with a mask. If there are any, the step also exists in two parts: the body, with joins
    and without, and the head, which samples."""

    sequences: tuple[scheduler.Sequence, ...]
    slots: tuple[int, ...]
    table_length: int
    chain: SamplerChain
    by_row: bool
    recording: Recording
    joins: Recording
    logits_of: tuple[int, ...]
    masked: tuple[scheduler.Sequence, ...] = ()
    body: Recording = EMPTY
    body_joins: Recording = EMPTY
    head: Recording = EMPTY

    @property
    def wanted(self) -> Wanted:
        """The values to read back of a step of one row each."""
        return Wanted(self.sequences, self.logits_of, self.chain.logprobs)


class _Held(NamedTuple):
    """A step of which only the body is submitted. longest: positions of its longest sequence.
    since: when the body was submitted. head: the recorded rest."""

    batch: Batch
    longest: int
    since: float
    head: Recorded


class _Body(NamedTuple):
    """The body of the next step with masks, which a thread records. It is of use if the batch
    stays."""

    batch: Batch
    longest: int
    recorded: Future[Recorded]


class Decoding:
    """Submits and reads steps without drafts. batch: of the latest step of any kind that has one
    row of each sequence, or drafts behind it."""

    def __init__(self, runner: Runner, scheduler: Scheduler, jobs: Jobs) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._jobs, self._masks = jobs, Masks(runner.sampler, jobs)
        self.batch: Batch | None = None
        self._held: _Held | None = None
        self._body: _Body | None = None
        self._recorder = ThreadPoolExecutor(1, "recorder")

    def begin(self, work: Decode) -> tuple[Batch, int]:
        """The batch of a step, and the positions of its longest sequence. Tells the GPU what it has
        to know of the sequences."""
        batch = self.batch
        if batch is None or batch.sequences != work.sequences:
            batch = self.batch = self._new_batch(work.sequences)
        resident, longest = self._runner.resident, 0
        if resident.table_length != batch.table_length:
            resident.rotate_for(batch.table_length)
        for sequence, slot in zip(batch.sequences, batch.slots, strict=True):
            longest = max(longest, sequence.computed)
            known = len(resident.pages[slot])
            if len(sequence.pages) != known:
                self._runner.drafter.forget_pages(sequence.pages[known:])
                resident.give_pages(slot, sequence.pages, sequence.window_pages)
        return batch, longest

    def _new_batch(self, sequences: tuple[scheduler.Sequence, ...]) -> Batch:
        answers = [self._answer(sequence) for sequence in sequences]
        chain = reduce(or_, (answer.chain for answer in answers))
        by_row = any(answer.adapter is not None for answer in answers)
        kind = self._runner.kinds.batch(len(sequences)).with_adapters(by_row)
        of, step = self._runner.recordings.of, Recipe(kind, chain)
        batch = Batch(
            sequences,
            tuple(map(slot_of, sequences)),
            answers[0].table_length,
            chain,
            by_row,
            of(step),
            of(replace(step, joins=True)),
            tuple(i for i, answer in enumerate(answers) if answer.reads_logits),
        )
        if not chain.mask:
            return batch
        body = Recipe(kind, head=False)
        return replace(
            batch,
            masked=tuple(answer.sequence for answer in answers if answer.is_masked),
            body=of(body),
            body_joins=of(replace(body, joins=True)),
            head=of(replace(step, body=False)),
        )

    def _answer(self, sequence: scheduler.Sequence) -> Answer:
        answer = self._jobs.of[sequence]
        assert isinstance(answer, Answer)
        return answer

    @property
    def is_held(self) -> bool:
        """Whether the last step was submitted without its head."""
        return self._held is not None

    def submit(self, batch: Batch, longest: int) -> list[Answer]:
        """Submit the next step of a batch, or only its body. Returns the answers whose masks could
        not be made."""
        resident = self._runner.resident
        if resident.unknown:
            for sequence in batch.sequences:
                if sequence.slot in resident.unknown:
                    resident.set_next(sequence, self._answer(sequence).adapter)
        self._drop_other_body(batch, longest)
        joins = resident.take(batch.slots)
        if not self._awaits_tokens(batch):
            recording = batch.joins if joins else batch.recording
            failed = self._masks.make(batch.masked) if batch.masked else []
            of = recording, len(batch.slots), longest, batch.wanted, self.read
            self._runner.submissions.submit(*of)
            return failed
        self._submit_body(batch, longest, joins)
        submissions, count = self._runner.submissions, len(batch.slots)
        since = time.perf_counter()
        copies = submissions.copies(count, batch.logits_of, batch.chain.logprobs)
        head = submissions.queue.record(batch.head, count, longest, copies)
        self._held = _Held(batch, longest, since, head)
        if not self._scheduler.in_step:
            self._record_body(batch, longest + 1)
        return []

    def go_on(self) -> list[Answer]:
        """Submit the head of the held step, if its masks can be made now. Returns as `submit`."""
        if self._held is None or self._awaits_tokens(self._held.batch):
            return []
        held, self._held = self._held, None
        failed = self._masks.make(held.batch.masked)
        of = held.head, held.batch.wanted, self.read
        self._runner.submissions.send(*of, body_since=held.since)
        return failed

    def read(self, step: InFlight, results: Read, before: float, now: float) -> None:
        """Take in the results of a step. before: when the one before it was read."""
        speculation = self._runner.speculation
        if speculation.is_on and (step.since <= before or self._runner.submissions.ahead == 1):
            speculation.measured(len(step.wanted.rows), 0, now - begun(step, before))
        self._jobs.take(step.wanted.rows, results, now)

    def _awaits_tokens(self, batch: Batch) -> bool:
        """Whether the masks of this step depend on tokens that have not been read yet."""
        return any(s.in_flight > 1 and s in self._jobs.of for s in batch.masked)

    def _record_body(self, batch: Batch, longest: int) -> None:
        record = partial(self._runner.queue.record, finish=True)
        of = batch.body, len(batch.slots), longest, ()
        self._body = _Body(batch, longest, self._recorder.submit(record, *of))

    def _submit_body(self, batch: Batch, longest: int, joins: bool) -> None:
        queue, prepared, self._body = self._runner.queue, self._body, None
        if prepared is not None:
            queue.send(prepared.recorded.result())
        else:
            body = batch.body_joins if joins else batch.body
            queue.submit(body, len(batch.slots), longest, ())

    def _drop_other_body(self, batch: Batch, longest: int) -> None:
        """Drop the recorded body, unless it belongs to the next step of this batch. Comes before
        the rows of that step are decided."""
        body = self._body
        if body is None:
            return
        if (
            body.batch is batch
            and body.longest == longest
            and self._runner.resident.has(batch.slots)
        ):
            return
        self._drop_body()

    def drop(self) -> None:
        self._drop_body()
        self.batch = None

    def _drop_body(self) -> None:
        """Drop the recorded body, if there is one."""
        body, self._body = self._body, None
        if body is not None and (recorded := _result(body)) is not None:
            queue = self._runner.queue
            self._runner.resident.discard(queue, recorded, len(body.batch.slots))

    def forget(self) -> None:
        """Drop what is held and what was recorded, without sending it."""
        self.batch = None
        held, self._held = self._held, None
        if held is not None:
            self._runner.queue.drop(held.head)
        body, self._body = self._body, None
        if body is not None and (recorded := _result(body)) is not None:
            # Not sent, as `drop` would: what it uses may be gone.
            self._runner.queue.drop(recorded)


def _result(body: _Body) -> Recorded | None:
    """Returns the recorded step; None if recording had not begun, or failed."""
    future = body.recorded
    return None if future.cancel() or future.exception() is not None else future.result()


def begun(step: InFlight, before: float) -> float:
    """Returns when a step began: when the one before it was read, if it was there by then."""
    return before if step.since - before < _PAUSE else step.since
