"""Decode steps: one row of each sequence of a batch. The step before has left the rows on the GPU.

A step of answers with masks is submitted in two parts: the body before the tokens of the previous
step are read, and the head, which samples, once the masks that follow from them are written. Both
parts are recorded early: the head while the body runs, and the body of the next step at the same
time, by another thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

from infer.engine import scheduler
from infer.engine.answers import Answer
from infer.engine.masks import Masks
from infer.engine.recordings import Recordings
from infer.engine.resident import Resident
from infer.engine.scheduler import Scheduler, slot_of
from infer.engine.steps import Steps
from infer.engine.submissions import Submissions, Wanted
from infer.engine.texts import Text
from infer.kernels.gpu.record import EMPTY, Recorded, Recording
from infer.kernels.state.sampler import SamplerChain


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that share decode steps, and what these steps dispatch. It is made once, and kept
    while the sequences stay the same.

    recording: of a step whose rows the step before has left in place; joins: of one that takes them
    from the table of sequences. logits_of: the sequences whose logits are read back. logprobs:
    whether any of them wants log probabilities. masked: the sequences with a mask. If there are
    any, the step also exists in two parts: the body, with joins and without, and the head, which
    samples."""

    sequences: tuple[scheduler.Sequence, ...]
    slots: tuple[int, ...]
    table_length: int
    chain: SamplerChain
    by_row: bool
    recording: Recording
    joins: Recording
    logits_of: tuple[int, ...]
    logprobs: bool
    masked: tuple[scheduler.Sequence, ...] = ()
    body: Recording = EMPTY
    body_joins: Recording = EMPTY
    head: Recording = EMPTY


class Parts(NamedTuple):
    """The objects with which steps of answers are made. answers: all there are, by sequence."""

    steps: Steps
    scheduler: Scheduler
    recordings: Recordings
    submissions: Submissions
    masks: Masks
    resident: Resident
    answers: Mapping[scheduler.Sequence, Answer | Text]


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
    """Steps without drafts."""

    def __init__(self, parts: Parts) -> None:
        self._steps = parts.steps
        self._scheduler = parts.scheduler
        self._recordings = parts.recordings
        self._submissions = parts.submissions
        self._masks = parts.masks
        self._resident = parts.resident
        self._answers = parts.answers
        self._held: _Held | None = None
        self._body: _Body | None = None
        self._recorder = ThreadPoolExecutor(1, "recorder")

    def batch(self, sequences: tuple[scheduler.Sequence, ...]) -> Batch:
        answers = [self._answer(sequence) for sequence in sequences]
        chain = reduce(or_, (answer.chain for answer in answers))
        kind, of = self._steps.batch(len(sequences)), self._recordings.of
        by_row = any(answer.adapter is not None for answer in answers)
        batch = Batch(
            sequences,
            tuple(map(slot_of, sequences)),
            answers[0].table_length,
            chain,
            by_row,
            of(kind, True, chain, by_row),
            of(kind, True, chain, by_row, joins=True),
            tuple(i for i, answer in enumerate(answers) if answer.reads_logits),
            chain.logprobs,
        )
        if not chain.mask:
            return batch
        return replace(
            batch,
            masked=tuple(answer.sequence for answer in answers if answer.is_masked),
            body=of(kind, False, None, by_row),
            body_joins=of(kind, False, None, by_row, joins=True),
            head=of(kind, True, chain, by_row, body=False),
        )

    def _answer(self, sequence: scheduler.Sequence) -> Answer:
        answer = self._answers[sequence]
        assert isinstance(answer, Answer)
        return answer

    @property
    def is_held(self) -> bool:
        """Whether the head of the step submitted last is not."""
        return self._held is not None

    def submit(self, batch: Batch, longest: int, joins: bool) -> list[Answer]:
        """Submit the next step, or only its body, after `drop_body`. joins: its rows come from the
        table of sequences. Returns the answers whose masks could not be made."""
        if self._awaits_tokens(batch):
            self._submit_body(batch, longest, joins)
            submissions, count = self._submissions, len(batch.slots)
            since = time.perf_counter()
            copies = submissions.copies(count, batch.logits_of, batch.logprobs)
            head = submissions.queue.record(batch.head, count, longest, copies)
            self._held = _Held(batch, longest, since, head)
            if not self._scheduler.in_step:
                self._record_body(batch, longest + 1)
            return []
        return self._sample(batch, batch.joins if joins else batch.recording, longest)

    def go_on(self) -> list[Answer]:
        """Submit the head of the held step, if its masks can be made now. Returns as `submit`."""
        if self._held is None or self._awaits_tokens(self._held.batch):
            return []
        (batch, longest, since, head), self._held = self._held, None
        return self._sample(batch, batch.head, longest, since, head)

    def _awaits_tokens(self, batch: Batch) -> bool:
        """Whether the masks of this step depend on tokens that have not been read yet."""
        return any(s.in_flight > 1 and s in self._answers for s in batch.masked)

    def _sample(
        self,
        batch: Batch,
        recording: Recording,
        longest: int,
        since: float | None = None,
        commands: Recorded | None = None,
    ) -> list[Answer]:
        """Submit a step, or its head, if `since` says when its body was submitted."""
        failed = self._masks.make(batch.masked)
        wanted, count = Wanted(batch.sequences, batch.logits_of, batch.logprobs), len(batch.slots)
        self._submissions.submit(
            recording, count, longest, wanted, sequences=count, commands=commands, since=since
        )
        return failed

    def _record_body(self, batch: Batch, longest: int) -> None:
        record = partial(self._submissions.queue.record, finish=True)
        of = batch.body, len(batch.slots), longest, ()
        self._body = _Body(batch, longest, self._recorder.submit(record, *of))

    def _submit_body(self, batch: Batch, longest: int, joins: bool) -> None:
        queue, prepared, self._body = self._submissions.queue, self._body, None
        if prepared is not None:
            queue.send(prepared.recorded.result())
        else:
            body = batch.body_joins if joins else batch.body
            queue.submit(body, len(batch.slots), longest, ())

    def drop_body(self, batch: Batch, longest: int) -> None:
        """Drop the recorded body, unless it belongs to the next step of this batch. Comes before
        the rows of that step are decided."""
        body = self._body
        if body is None:
            return
        if body.batch is batch and body.longest == longest and self._resident.has(batch.slots):
            return
        self.drop()

    def drop(self) -> None:
        """Drop the recorded body, if there is one."""
        body, self._body = self._body, None
        if body is not None and (recorded := _result(body)) is not None:
            queue = self._submissions.queue
            self._resident.discard(queue, recorded, len(body.batch.slots))

    def forget(self) -> None:
        """Drop what is held and what was recorded, without sending it."""
        held, self._held = self._held, None
        if held is not None:
            self._submissions.queue.drop(held.head)
        body, self._body = self._body, None
        if body is not None and (recorded := _result(body)) is not None:
            # Not sent, as `drop_body` would: what it uses may be gone.
            self._submissions.queue.drop(recorded)


def _result(body: _Body) -> Recorded | None:
    """Returns the recorded step; None if recording had not begun, or failed."""
    future = body.recorded
    return None if future.cancel() or future.exception() is not None else future.result()
