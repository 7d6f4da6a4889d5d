"""Steps with drafts: several rows of a sequence, which verify the tokens drafted for it.

The host writes their rows once it has read all tokens before them. To keep the GPU's wait short,
such a step is recorded while the one before it runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import Answer, Jobs
from infer.engine.decoding import Batch, begun
from infer.engine.drafter import Drafter, Drafting
from infer.engine.masks import Masks, Place
from infer.engine.recordings import Recipe
from infer.engine.runner import Runner
from infer.engine.scheduler import Decode, Scheduler
from infer.engine.speculation import MAX_DRAFT, Speculation
from infer.engine.submissions import InFlight, Read, Staging, Wanted
from infer.kernels.gpu.record import EMPTY, Part, Recorded, Recording
from infer.kernels.state.step import HEADER, NO_TOKEN, StepRow, pack_rows


@dataclass(frozen=True, eq=False)
class Prepared:
    """A recorded step of so many rows of a batch, which is to be submitted as the step with that
    number.

    drafting: what a draft model does before it: for how many sequences, and how many tokens each.
    body: the part before the masks are needed; None if the step is in one piece. first: the draft
    model's first step, recorded for both cases, no sequence behind and some; only one is sent.
    others: the draft model's other steps, if they are apart because masks depend on what they
    draft; None if they are in one piece with the rest.
    """

    batch: Batch
    rows: int
    drafting: tuple[int, int]
    number: int
    staging: Staging
    body: Recorded | None
    commands: Recorded | None
    first: tuple[Recorded, ...] = ()
    others: Recorded | None = None

    @property
    def recorded(self) -> list[Recorded]:
        found = (self.body, self.commands, *self.first, self.others)
        return [recorded for recorded in found if recorded is not None]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a step. sampled: the sequence of each. drafted: its drafted token, None where its
    token was known, NO_TOKEN where only the GPU knows it. first: the first row of each sequence.
    drafting: the sequences for which a model drafts."""

    rows: list[StepRow]
    sampled: list[scheduler.Sequence]
    drafted: list[int | None]
    first: list[int]
    drafting: list[Drafting]

    @property
    def shape(self) -> tuple[int, int]:
        """For how many sequences a model drafts, and how many tokens each at most."""
        return len(self.drafting), max((own.count for own in self.drafting), default=0)


class Verification:
    """Submits and reads steps with drafts. counts: how often something was drafted for an answer,
    how many tokens in all, and how many of them were right."""

    def __init__(self, runner: Runner, scheduler: Scheduler, jobs: Jobs) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._jobs, self._masks = jobs, Masks(runner.sampler, jobs)
        self.counts = [0, 0, 0]
        self._rows = 0  # of the next step with drafts
        self._drafting = 0, 0  # sequences in it that have drafts, and how many these have at most
        self._prepared: Prepared | None = None

    def draft_by(self, speculation: Speculation, drafter: Drafter | None = None) -> None:
        """Draft by another rule from now on. drafter: None: no model drafts."""
        self.drop()
        self._runner.speculation, self._runner.drafter = speculation, drafter or Drafter()
        self._runner.drafter.forget()  # pages may hold something else by now
        self._scheduler.in_step = False

    # Before the step

    def choose(self) -> None:
        """Decide what the next step verifies, once everything before it is known."""
        speculation = self._runner.speculation
        if not speculation.is_on:
            return
        running = self._scheduler.running
        guesses = [self._jobs.of[sequence].guess for sequence in running]
        counts = speculation.counts(guesses)
        self._scheduler.in_step = any(counts)
        if self._scheduler.in_step:
            self._rows = len(running) + sum(counts)
            self._drafting = sum(map(bool, counts)), speculation.model_steps
            if self._prepared is not None and (depth := self._prepared.drafting[1]):
                counts = [depth if count else 0 for count in counts]  # others from the next step on
        for sequence, guess, count in zip(running, guesses, counts, strict=True):
            known = guess is not None and count and not sequence.in_flight
            sequence.draft = guess.ids[:count] if known and guess is not None else ()

    def prepare(self, batch: Batch) -> None:
        """Record the next step with drafts of a batch, while the step before it runs."""
        if self._prepared is not None or batch.logits_of:
            return
        drafter, queue = self._runner.drafter, self._runner.queue
        submissions = self._runner.submissions
        longest = max(s.computed + s.drafted for s in batch.sequences) + 1 + MAX_DRAFT
        longest = min(longest, self._runner.options.context)
        rows, drafting, staging = self._rows, self._drafting, submissions.spare
        copies = submissions.copies(rows, (), batch.chain.logprobs, staging)
        before: list[Part] = []
        first: tuple[Recorded, ...] = ()
        others = None
        if drafting[1]:
            before = drafter.others(*drafting, batch.chain, longest)
            ways = [
                drafter.first(drafting[0], batch.chain, longest, behind) for behind in drafter.ways
            ]
            sent = len(ways) == 1  # whatever comes
            first = tuple(
                queue.record(*sampling, (), [step], finish=sent) for step, sampling in ways
            )
            if batch.masked:
                copy = submissions.copy_of_drafts(rows)
                others, before = queue.record(EMPTY, 0, 0, [copy], before), []
        recording, rest = self._parts(batch, rows)
        body = None
        if recording is not None:
            body = queue.record(recording, rows, longest, (), before, finish=True)
            before = []
        self._prepared = Prepared(
            batch=batch,
            rows=rows,
            drafting=drafting,
            number=submissions.count,
            staging=staging,
            body=body,
            commands=queue.record(rest, rows, longest, copies, before, finish=True),
            first=first,
            others=others,
        )

    def takes(self, work: Decode, batch: Batch) -> bool:
        """Whether the next step is submitted here: because it has drafts, because states lack rows
        of the step before, or because it is recorded already."""
        if not work.drafts and self._runner.drafter.steps:
            self.drop()  # nothing is drafted in this step
        prepared = self._prepared
        if prepared is not None:
            is_next = prepared.number == self._runner.submissions.count and prepared.batch is batch
            if not is_next or any(sequence.in_flight > 1 for sequence in batch.sequences):
                self.drop()
        return bool(work.drafts or work.behind) or self._prepared is not None

    def drop(self) -> None:
        """Drop what was recorded, if anything."""
        prepared, self._prepared = self._prepared, None  # nothing twice, if an interrupt comes
        if prepared is not None:
            self._drop(prepared)

    def forget(self) -> None:
        """Drops what was recorded and never sends it: the buffers that it uses may be gone."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            for recorded in prepared.recorded:
                self._runner.queue.drop(recorded)

    def _drop(self, prepared: Prepared) -> None:
        self._runner.drafter.stop()  # some of its steps are among what is discarded
        for recorded in prepared.recorded:
            self._runner.resident.discard(self._runner.queue, recorded, prepared.rows)

    def _parts(self, batch: Batch, rows: int) -> tuple[Recording | None, Recording]:
        """The body and the head of a step with drafts; without masks the body is None, and the
        head is the whole step."""
        kind = self._runner.kinds.drafts(rows).with_adapters(batch.by_row)
        of, gives = self._runner.recordings.of, self._runner.drafter.gives
        head = Recipe(kind, batch.chain, body=not batch.masked, drafts=gives)
        return of(Recipe(kind, head=False)) if batch.masked else None, of(head)

    # The step

    def submit(self, work: Decode, batch: Batch, longest: int) -> list[Answer]:
        """Submit a step whose rows the host writes, as all tokens of its sequences have been read,
        after `takes`. Returns the answers whose masks could not be made."""
        runner, queue, submissions = self._runner, self._runner.queue, self._runner.submissions
        drafts = work.drafts or ((),) * len(batch.slots)
        behind = work.behind or (0,) * len(batch.slots)
        runner.resident.verified(batch.slots, drafts)
        own = self._rows_of(batch, drafts, behind)
        prepared, shape = self._fitting(own), own.shape
        count = len(own.rows)
        if prepared is not None:
            count, shape = prepared.rows, prepared.drafting if own.drafting else shape
        assert count <= runner.steps.most_rows
        longest += max(map(len, drafts))
        runner.device.write(runner.steps.step, pack_rows(own.rows, count))
        # The GPU drafts while the host records what verifies it.
        told = self._run_drafter(batch, own.drafting, shape, longest, count, prepared)
        since = time.perf_counter()
        body, recording = self._parts(batch, count)
        wanted = Wanted(
            tuple(own.sampled),
            tuple(own.first[i] for i in batch.logits_of),
            batch.chain.logprobs,
        )
        commands = None if prepared is None else prepared.commands
        failed: list[Answer] = []
        if body is not None:  # which runs while masks are made
            if prepared is None:
                queue.submit(body, count, longest, ())
            elif prepared.body is not None:
                queue.send(prepared.body)
            places = dict(zip(batch.sequences, zip(own.first, drafts, strict=True), strict=True))
            held = {s: places[s] for s in batch.masked if NO_TOKEN in places[s][1]}
            if held:
                places |= self._known(held, submissions.read_drafts(told, count))
            with self._masks.making(batch.masked, places) as failed:
                if commands is None:
                    copies = submissions.copies(len(own.sampled), wanted.logits_of, wanted.logprobs)
                    commands = queue.record(recording, count, longest, copies)
        kind = runner.speculation.kind(len(batch.slots), runner.kinds.rows_of(count), shape[1])
        take = partial(self.read, tuple(own.drafted), len(batch.slots), kind)
        if commands is None:
            submissions.submit(recording, count, longest, wanted, take, body_since=since)
        else:
            staging = None if prepared is None else prepared.staging
            submissions.send(commands, wanted, take, staging=staging, body_since=since)
        return failed

    def _rows_of(
        self, batch: Batch, drafts: Sequence[Sequence[int]], behind: Sequence[int]
    ) -> _Rows:
        """The rows of a step with these drafts for each sequence of a batch. behind: how many
        earlier positions the states of each do not include yet."""
        own = _Rows([], [], [], [], [])
        each = zip(batch.sequences, batch.slots, drafts, behind, strict=True)
        for sequence, slot, draft, own_behind in each:
            own.first.append(len(own.rows))
            answer = self._jobs.of[sequence]
            assert isinstance(answer, Answer)
            number = self._runner.own.adapters.number(answer.adapter)
            position = len(sequence.tokens) - 1
            for i, token in enumerate((sequence.tokens[-1], *draft)):
                known = 0 if token == NO_TOKEN else token
                own.rows.append((known, position + i, slot, number, 0 if i else own_behind))
                own.drafted.append(token if i else None)
            own.sampled.extend([sequence] * (1 + len(draft)))
            forced = [token for token in draft if token != NO_TOKEN]  # if a model drafts the rest
            if left := len(draft) - len(forced):
                place = own.first[-1] + 1 + len(forced)
                own.drafting.append(Drafting(sequence, slot, left, place, forced))
            answer.timings.drafted_tokens += len(draft)
        return own

    def _fitting(self, own: _Rows) -> Prepared | None:
        """The recorded step, if it has room for these rows; otherwise it is dropped."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and (
            prepared.rows < len(own.rows)
            or any(n < m for n, m in zip(prepared.drafting, own.shape, strict=True))
        ):
            self._drop(prepared)
            return None
        return prepared

    def _run_drafter(
        self,
        batch: Batch,
        drafting: Sequence[Drafting],
        shape: tuple[int, int],
        longest: int,
        rows: int,
        prepared: Prepared | None,
    ) -> Any:
        """Submit the draft model's steps before a step. With masks it returns the submission that
        the host has to wait for before it can read the drafts."""
        queue, drafter = self._runner.queue, self._runner.drafter
        if not drafting:
            if prepared is not None and drafter.steps:
                self._drop(replace(prepared, body=None, commands=None))
            return None
        is_behind = drafter.begin_round(queue, drafting, shape[0])
        if prepared is not None:
            for i, commands in enumerate(prepared.first):
                (queue.send if i == is_behind else queue.drop)(commands)
            return None if prepared.others is None else queue.send(prepared.others)
        parts = drafter.first(shape[0], batch.chain, longest, is_behind)
        for part in (*parts, *drafter.others(*shape, batch.chain, longest)):
            queue.submit(*part, ())
        if not batch.masked:
            return None
        return queue.submit(EMPTY, 0, 0, [self._runner.submissions.copy_of_drafts(rows)])

    def _known(
        self, places: Mapping[scheduler.Sequence, Place], rows: NDArray[Any]
    ) -> dict[scheduler.Sequence, Place]:
        """Returns the places of answers with a constraint, with the model's drafts up to the first
        token that is not allowed. The rows after it are made dead. rows: those of the step."""
        known = {}
        for sequence, (first, draft) in places.items():
            answer = self._jobs.of.get(sequence)
            begin, end = first + 1, first + 1 + len(draft)
            ids = rows["token"][begin:end].tolist()
            count = list(draft).index(NO_TOKEN)  # what is forced is allowed
            if isinstance(answer, Answer) and answer.constraint is not None and not answer.ended:
                of = sequence.tokens, len(answer.prompt)
                count = max(count, answer.constraint.count_allowed(*of, ids))
            known[sequence] = first, ids[:count]
            rows["alive"][begin + count : end] = 0
        self._runner.device.write(self._runner.steps.step, rows, HEADER.itemsize)
        return known

    # After the step

    def read(
        self,
        drafts: tuple[int | None, ...],
        sequences: int,
        kind: Hashable,
        step: InFlight,
        results: Read,
        before: float,
        now: float,
    ) -> None:
        """Take in the results of a step. drafts: the drafted token of each row, as of `_Rows`.
        sequences: how many it has. kind: under which its time is measured. before: when the step
        before it was read."""
        speculation = self._runner.speculation
        speculation.measured(sequences, kind, now - begun(step, before))
        ids = speculation.ids(results.ids, drafts)
        rows = self._accepted(step.wanted.rows, drafts, ids)
        for i in rows:
            job = self._jobs.of.get(step.wanted.rows[i])
            if drafts[i] is not None and isinstance(job, Answer):
                job.timings.accepted_tokens += 1
        self._jobs.take(step.wanted.rows, results._replace(ids=ids), now, rows)

    def _accepted(
        self,
        sequences: Sequence[scheduler.Sequence],
        drafts: Sequence[int | None],
        ids: Sequence[int],
    ) -> list[int]:
        """The rows of a step whose tokens count. The row of a drafted token counts if the row
        before it counts and has sampled that very token. sequences: of each row."""
        rows: list[int] = []
        counts: dict[scheduler.Sequence, int] = {}
        by_model = set[scheduler.Sequence]()
        for i, (sequence, drafted) in enumerate(zip(sequences, drafts, strict=True)):
            if drafted == NO_TOKEN:  # the GPU has compared it
                right = ids[i] != NO_TOKEN
                by_model.add(sequence)
            else:
                right = drafted is None or (rows[-1] == i - 1 and ids[i - 1] == drafted)
            if right:
                rows.append(i)
                counts[sequence] = counts.get(sequence, -1) + 1
        for sequence, count in counts.items():
            job = self._jobs.of.get(sequence)
            for i, new in enumerate((sequence.drafted > 0, sequence.drafted, count)):
                self.counts[i] += new
            if sequence.drafted and sequence.state == "running":
                if sequence in by_model:
                    self._runner.drafter.accepted(sequence, sequence.drafted, count)
                if job is not None and job.guess is not None:
                    job.guess.verified(sequence.drafted, count)
            self._scheduler.accept(sequence, count)
        return rows
