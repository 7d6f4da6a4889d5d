"""Steps with drafts: several rows of a sequence, which verify the tokens drafted for it.

The host writes their rows once it has read all tokens before them. To keep the GPU's wait short,
such a step is recorded while the one before it runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import Answer
from infer.engine.decoding import Batch, Parts
from infer.engine.draft import Drafting, DraftModel
from infer.engine.masks import Place
from infer.engine.options import DRAFT_ROWS
from infer.engine.speculation import MAX_DRAFT, Speculation
from infer.engine.submissions import InFlight, Staging, Wanted
from infer.kernels.gpu.record import EMPTY, Part, Recorded, Recording
from infer.kernels.state.sampler import SamplerChain
from infer.kernels.state.step import HEADER, NO_TOKEN, StepRow, pack_rows

_PAUSE = 0.005  # between two steps, from where on they do not follow each other


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


class Verification:
    """The part of an engine that only drafts need.

    speculation: decides how many tokens are drafted; None: nothing is ever drafted. draft: the
    model that drafts them; None: the speculation does so itself. counts: how often something was
    drafted for an answer, how many tokens in all, and how many of them were right."""

    def __init__(
        self,
        speculation: Speculation | None,
        draft: DraftModel | None,
        parts: Parts,
    ) -> None:
        self.speculation, self.draft = speculation, draft
        self.counts = [0, 0, 0]
        self._steps = parts.steps
        self._scheduler = parts.scheduler
        self._recordings = parts.recordings
        self._submissions = parts.submissions
        self._masks = parts.masks
        self._resident = parts.resident
        self._answers = parts.answers
        self._rows = 0  # of the next step with drafts
        self._drafting = 0, 0  # sequences in it that have drafts, and how many these have at most
        self._prepared: Prepared | None = None

    def recordings(self, chain: SamplerChain) -> list[Recording]:
        """The recordings that a single answer needs."""
        rows = [n for n in self._steps.draft_kinds if n <= DRAFT_ROWS]
        unknown = self.draft is not None
        return [
            self._recordings.of(kind, True, chain, drafts=True, unknown=unknown)
            for kind in map(self._steps.drafts, rows)
        ]

    # Before the step

    def choose(self) -> None:
        """Decide what the next step verifies, once everything before it is known."""
        if self.speculation is None:
            return
        running = self._scheduler.running
        answers = [self._answers[sequence] for sequence in running]
        guesses = [answer.guess if isinstance(answer, Answer) else None for answer in answers]
        counts = self.speculation.counts(guesses)
        self._scheduler.in_step = any(counts)
        if self._scheduler.in_step:
            self._rows = len(running) + sum(counts)
            self._drafting = sum(map(bool, counts)), self.speculation.model_steps
            if self._prepared is not None and (depth := self._prepared.drafting[1]):
                counts = [depth if count else 0 for count in counts]  # others from the next step on
        for sequence, guess, count in zip(running, guesses, counts, strict=True):
            known = guess is not None and count and not sequence.in_flight
            sequence.draft = guess.ids[:count] if known and guess is not None else ()

    def prepare(self, batch: Batch) -> None:
        """Record the next step with drafts of a batch, while the step before it runs."""
        if self._prepared is not None or batch.logits_of:
            return
        steps, queue = self._steps, self._submissions.queue
        longest = max(s.computed + s.drafted for s in batch.sequences) + 1 + MAX_DRAFT
        longest = min(longest, steps.context)
        rows, number, drafting = self._rows, self._submissions.count, self._drafting
        staging = self._submissions.spare
        copies = self._submissions.copies(rows, (), batch.logprobs, staging)
        before: list[Part] = []
        first: tuple[Recorded, ...] = ()
        others = None
        if self.draft is not None and drafting[1]:
            before = self.draft.others(*drafting, batch.chain, longest)
            ways = [
                self.draft.first(drafting[0], batch.chain, longest, behind)
                for behind in self.draft.ways
            ]
            sent = len(ways) == 1  # whatever comes
            first = tuple(
                queue.record(*sampling, (), [step], finish=sent) for step, sampling in ways
            )
            if batch.masked:
                copy = self._submissions.copy_of_drafts(rows)
                others, before = queue.record(EMPTY, 0, 0, [copy], before), []
        recording, rest = self._parts(batch, rows)
        body = None
        if recording is not None:
            body = queue.record(recording, rows, longest, (), before, finish=True)
            before = []
        commands = queue.record(rest, rows, longest, copies, before, finish=True)
        of = batch, rows, drafting, number, staging, body, commands, first, others
        self._prepared = Prepared(*of)

    def take(self, batch: Batch) -> Prepared | None:
        """Returns the recorded next step, if it is one of this batch and all tokens before it have
        been read; otherwise None."""
        prepared = self._prepared
        if prepared is None:
            return None
        is_next = prepared.number == self._submissions.count and prepared.batch is batch
        if not is_next or any(sequence.in_flight > 1 for sequence in batch.sequences):
            self.drop()
            return None
        self._prepared = None
        return prepared

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
                self._submissions.queue.drop(recorded)

    def _drop(self, prepared: Prepared) -> None:
        if self.draft is not None:
            self.draft.stop()  # some of its steps are among what is discarded
        for recorded in prepared.recorded:
            self._resident.discard(self._submissions.queue, recorded, prepared.rows)

    def _parts(self, batch: Batch, rows: int) -> tuple[Recording | None, Recording]:
        """The body and the head of a step with drafts; without masks the body is None, and the
        head is the whole step."""
        kind, chain, by_row = self._steps.drafts(rows), batch.chain, batch.by_row
        of, unknown = self._recordings.of, self.draft is not None
        if not batch.masked:
            return None, of(kind, True, chain, by_row, drafts=True, unknown=unknown)
        head = of(kind, True, chain, by_row, body=False, drafts=True, unknown=unknown)
        return of(kind, False, None, by_row), head

    # The step

    def submit(
        self,
        batch: Batch,
        drafts: Sequence[Sequence[int]],
        behind: Sequence[int],
        longest: int,
        prepared: Prepared | None,
    ) -> list[Answer]:
        """Submit a step whose rows the host writes, as all tokens of its sequences have been read.
        prepared: what `take` gave. Returns the answers whose masks could not be made."""
        steps, queue = self._steps, self._submissions.queue
        rows: list[StepRow] = []
        sampled: list[scheduler.Sequence] = []
        drafted: list[int | None] = []
        first: list[int] = []  # row of each sequence
        drafting: list[Drafting] = []
        each = zip(batch.sequences, batch.slots, drafts, behind, strict=True)
        for sequence, slot, draft, own_behind in each:
            first.append(len(rows))
            answer = self._answers[sequence]
            assert isinstance(answer, Answer)
            number = steps.adapters.number(answer.adapter)
            position = len(sequence.tokens) - 1
            for i, token in enumerate((sequence.tokens[-1], *draft)):
                known = 0 if token == NO_TOKEN else token
                rows.append((known, position + i, slot, number, 0 if i else own_behind))
                drafted.append(token if i else None)
            sampled += [sequence] * (1 + len(draft))
            forced = [token for token in draft if token != NO_TOKEN]  # if a model drafts the rest
            if left := len(draft) - len(forced):
                place = first[-1] + 1 + len(forced)
                drafting.append(Drafting(sequence, slot, left, place, forced))
            answer.timings.drafted_tokens += len(draft)
        count = len(rows)
        shape = len(drafting), max((own.count for own in drafting), default=0)
        if prepared is not None and (
            prepared.rows < count
            or any(n < m for n, m in zip(prepared.drafting, shape, strict=True))
        ):
            self._drop(prepared)
            prepared = None
        if prepared is not None:
            count, shape = prepared.rows, prepared.drafting if drafting else shape
        assert count <= steps.most_rows
        longest += max(map(len, drafts))
        steps.device.write(steps.step, pack_rows(rows, count))
        told = None  # the GPU drafts while the host records what verifies it
        if self.draft is not None:
            told = self._run_draft(self.draft, batch, drafting, shape, longest, count, prepared)
        since = time.perf_counter()
        body, recording = self._parts(batch, count)
        logits_of = tuple(first[i] for i in batch.logits_of)
        commands = None if prepared is None else prepared.commands
        failed: list[Answer] = []
        if body is not None:  # which runs while masks are made
            if prepared is None:
                queue.submit(body, count, longest, ())
            elif prepared.body is not None:
                queue.send(prepared.body)
            places = dict(zip(batch.sequences, zip(first, drafts, strict=True), strict=True))
            held = {s: places[s] for s in batch.masked if NO_TOKEN in places[s][1]}
            if held:
                places |= self._known(held, self._submissions.read_drafts(told, count))
            with self._masks.making(batch.masked, places) as failed:
                if commands is None:
                    copies = self._submissions.copies(len(sampled), logits_of, batch.logprobs)
                    commands = queue.record(recording, count, longest, copies)
        kind: Hashable = 0
        if self.speculation is not None:
            kind = self.speculation.kind(len(batch.sequences), steps.rows_of(count), shape[1])
        self._submissions.submit(
            recording,
            count,
            longest,
            Wanted(tuple(sampled), logits_of, batch.logprobs),
            sequences=len(batch.sequences),
            drafts=tuple(drafted),
            kind=kind,
            commands=commands,
            staging=None if prepared is None else prepared.staging,
            since=since,
        )
        return failed

    def _run_draft(
        self,
        draft: DraftModel,
        batch: Batch,
        drafting: Sequence[Drafting],
        shape: tuple[int, int],
        longest: int,
        rows: int,
        prepared: Prepared | None,
    ) -> Any:
        """Submit the draft model's steps before a step. With masks it returns the submission that
        the host has to wait for before it can read the drafts."""
        queue = self._submissions.queue
        if not drafting:
            if prepared is not None:
                self._drop(replace(prepared, body=None, commands=None))
            return None
        is_behind = draft.begin_round(queue, drafting, shape[0])
        if prepared is not None:
            for i, commands in enumerate(prepared.first):
                (queue.send if i == is_behind else queue.drop)(commands)
            return None if prepared.others is None else queue.send(prepared.others)
        parts = draft.first(shape[0], batch.chain, longest, is_behind)
        for part in (*parts, *draft.others(*shape, batch.chain, longest)):
            queue.submit(*part, ())
        if not batch.masked:
            return None
        return queue.submit(EMPTY, 0, 0, [self._submissions.copy_of_drafts(rows)])

    def _known(
        self, places: Mapping[scheduler.Sequence, Place], rows: NDArray[Any]
    ) -> dict[scheduler.Sequence, Place]:
        """Returns the places of answers with a constraint, with the model's drafts up to the first
        token that is not allowed. The rows after it are made dead. rows: those of the step."""
        known = {}
        for sequence, (first, draft) in places.items():
            answer = self._answers.get(sequence)
            begin, end = first + 1, first + 1 + len(draft)
            ids = rows["token"][begin:end].tolist()
            count = list(draft).index(NO_TOKEN)  # what is forced is allowed
            if isinstance(answer, Answer) and answer.constraint is not None and not answer.ended:
                of = sequence.tokens, len(answer.prompt)
                count = max(count, answer.constraint.count_allowed(*of, ids))
            known[sequence] = first, ids[:count]
            rows["alive"][begin + count : end] = 0
        self._steps.device.write(self._steps.step, rows, HEADER.itemsize)
        return known

    # After the step

    def measured(self, step: InFlight, before: float, now: float) -> None:
        """A step was read. before: when the one before it was."""
        if self.speculation is not None and step.sequences:
            was_ahead = step.since <= before
            if step.kind or was_ahead or self._submissions.ahead == 1:
                begun = before if step.since - before < _PAUSE else step.since
                self.speculation.measured(step.sequences, step.kind, now - begun)

    def accepted(self, step: InFlight, ids: list[int]) -> tuple[list[int], list[int]]:
        """The ids that a step with drafts is taken to have sampled, and the rows whose tokens
        count. The row of a drafted token counts if the row before it counts and has sampled that
        very token."""
        if self.speculation is not None:
            ids = self.speculation.ids(ids, step.drafts)
        rows: list[int] = []
        counts: dict[scheduler.Sequence, int] = {}
        by_model = set[scheduler.Sequence]()
        for i, (sequence, drafted) in enumerate(zip(step.wanted.rows, step.drafts, strict=True)):
            if drafted == NO_TOKEN:  # the GPU has compared it
                right = ids[i] != NO_TOKEN
                by_model.add(sequence)
            else:
                right = drafted is None or (rows[-1] == i - 1 and ids[i - 1] == drafted)
            if right:
                rows.append(i)
                counts[sequence] = counts.get(sequence, -1) + 1
        for sequence, count in counts.items():
            answer = self._answers.get(sequence)
            for i, new in enumerate((sequence.drafted > 0, sequence.drafted, count)):
                self.counts[i] += new
            if self.draft is not None and sequence.drafted and sequence.state == "running":
                if sequence in by_model:
                    self.draft.accepted(sequence, sequence.drafted, count)
                if isinstance(answer, Answer) and answer.guess is not None:
                    answer.guess.verified(sequence.drafted, count)
            self._scheduler.accept(sequence, count)
        return ids, rows
