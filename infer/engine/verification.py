"""Steps with drafts: more rows of a sequence than one, which verify what was drafted for it.

The host writes their rows, when all tokens before them have been read. So that the GPU need not
wait for long, what such a step dispatches is recorded while the one before it runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.engine import scheduler
from infer.engine.answers import Answer
from infer.engine.decoding import Batch
from infer.engine.draft import Drafting, DraftModel
from infer.engine.masks import Masks
from infer.engine.options import DRAFT_ROWS
from infer.engine.recordings import Recordings
from infer.engine.scheduler import Scheduler
from infer.engine.speculation import MAX_DRAFT, Speculation
from infer.engine.steps import Steps
from infer.engine.submissions import InFlight, Submissions, Wanted
from infer.engine.texts import Text
from infer.kernels.gpu.record import Part, Recording
from infer.kernels.state.sampler import SamplerChain
from infer.kernels.state.step import NO_TOKEN, StepRow, pack_rows

_PAUSE = 0.005  # between two steps, from where on they do not follow each other


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step of so many rows of a batch that is recorded, to be the one of that number. drafting:
    with what a draft model does before, for so many sequences, so many tokens each. body: of the
    step, where there are masks; None: it is one with the rest. first: the draft model's first step,
    which comes before, by whether any sequence is behind; one is to be sent."""

    batch: Batch
    rows: int
    drafting: tuple[int, int]
    number: int
    body: Any
    commands: Any
    first: tuple[Any, ...] = ()


class Verification:
    """What of an engine is only there for drafts.

    speculation: says how many tokens are drafted; None: none are. draft: the model that drafts
    them; None: the speculation does. counts: how often something was drafted for an answer, how
    many tokens, and how many of these were right."""

    def __init__(
        self,
        speculation: Speculation | None,
        draft: DraftModel | None,
        steps: Steps,
        scheduler: Scheduler,
        recordings: Recordings,
        submissions: Submissions,
        masks: Masks,
        answers: Mapping[scheduler.Sequence, Answer | Text],
    ) -> None:
        """answers: that there are, by their sequences."""
        self.speculation, self.draft = speculation, draft
        self.counts = [0, 0, 0]
        self._steps, self._scheduler, self._recordings = steps, scheduler, recordings
        self._submissions, self._masks, self._answers = submissions, masks, answers
        self._rows = 0  # of the next step with drafts
        self._drafting = 0, 0  # sequences in it that have drafts, and how many these have at most
        self._prepared: Prepared | None = None

    def recordings(self, chain: SamplerChain) -> list[Recording]:
        """What a single answer needs."""
        rows = [n for n in self._steps.draft_kinds if n <= DRAFT_ROWS]
        unknown = self.draft is not None
        return [
            self._recordings.of(kind, True, chain, drafts=True, unknown=unknown)
            for kind in map(self._steps.drafts, rows)
        ]

    # Before the step

    def choose(self) -> None:
        """What the next step is to verify, once all that comes before it is known."""
        if self.speculation is None:
            return
        running = self._scheduler.running
        answers = [self._answers[sequence] for sequence in running]
        guesses = [answer.guess if isinstance(answer, Answer) else None for answer in answers]
        counts = self.speculation.counts(guesses)
        self._scheduler.in_step = any(counts)
        if self._scheduler.in_step:
            self._rows = len(running) + sum(counts)
            self._drafting = sum(map(bool, counts)), max(counts)
            if self.draft is not None and self._prepared is not None:  # then from the next step on
                depth = self._prepared.drafting[1]
                counts = [depth if count else 0 for count in counts]
        for sequence, guess, count in zip(running, guesses, counts, strict=True):
            known = guess is not None and count and not sequence.in_flight
            sequence.draft = guess.ids[:count] if known and guess is not None else ()

    def prepare(self, batch: Batch) -> None:
        """Record the next step of a batch, in which there are to be drafts, while one runs."""
        if self._prepared is not None or batch.logits_of:
            return
        steps, queue = self._steps, self._submissions.queue
        longest = max(s.computed + s.drafted for s in batch.sequences) + 1 + MAX_DRAFT
        longest = min(longest, steps.context)
        rows, number, drafting = self._rows, self._submissions.count, self._drafting
        copies = self._submissions.copies(rows, (), batch.logprobs)
        before: list[Part] = []
        first: tuple[Any, ...] = ()
        if self.draft is not None:
            before = self.draft.others(*drafting, batch.chain, longest)
            ways = (
                self.draft.first(drafting[0], batch.chain, longest, behind)
                for behind in (False, True)
            )
            first = tuple(queue.record(*sampling, (), [step]) for step, sampling in ways)
        recording, rest = self._parts(batch, rows)
        body = None
        if recording is not None:
            body = queue.record(recording, rows, longest, (), before)
            before = []
        commands = queue.record(rest, rows, longest, copies, before)
        self._prepared = Prepared(batch, rows, drafting, number, body, commands, first)

    def take(self, batch: Batch) -> Prepared | None:
        """What was recorded for the next step, if that is one of this batch, and all tokens before
        it have been read."""
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
        """What was recorded, if anything."""
        if self._prepared is not None:
            self._drop(self._prepared)
            self._prepared = None

    def _drop(self, prepared: Prepared) -> None:
        body = () if prepared.body is None else (prepared.body,)
        for commands in (prepared.commands, *body, *prepared.first):
            self._submissions.queue.drop(commands)

    def _parts(self, batch: Batch, rows: int) -> tuple[Recording | None, Recording]:
        """What a step with drafts dispatches, with masks in two parts: the body and the head."""
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
        """A step of rows that the host writes: all tokens of its sequences have been read.
        prepared: its `take`. Returns answers whose masks could not be made."""
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
            if draft and self.draft is not None:
                drafting.append(Drafting(sequence, slot, len(draft), first[-1] + 1))
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
        assert count <= steps.most_rows
        longest += max(map(len, drafts))
        steps.device.write(steps.step, pack_rows(rows, count))
        if self.draft is not None and drafting:
            is_behind = self.draft.begin_round(queue, drafting, shape[0])
            if prepared is not None:
                queue.send(prepared.first[is_behind])
                queue.drop(prepared.first[not is_behind])
            else:  # the GPU drafts while the host records what verifies it
                parts = self.draft.first(shape[0], batch.chain, longest, is_behind)
                for part in (*parts, *self.draft.others(*shape, batch.chain, longest)):
                    queue.submit(*part, ())
        since = time.perf_counter()
        body, recording = self._parts(batch, count)
        logits_of = tuple(first[i] for i in batch.logits_of)
        commands = None if prepared is None else prepared.commands
        failed: list[Answer] = []
        if body is not None:  # which runs while masks are made
            if prepared is None:
                queue.submit(body, count, longest, ())
            else:
                queue.send(prepared.body)
            # What a draft model drafts is not known here, nor is it held.
            own = drafts if self.draft is None else ((),) * len(drafts)
            places = dict(zip(batch.sequences, zip(first, own, strict=True), strict=True))
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
            since=since,
        )
        return failed

    # After the step

    def measured(self, step: InFlight, before: float, now: float) -> None:
        """A step was read. before: when the one before it was."""
        if self.speculation is not None and step.sequences:
            was_ahead = step.since <= before
            if step.kind or was_ahead or self._submissions.ahead == 1:
                begun = before if step.since - before < _PAUSE else step.since
                self.speculation.measured(step.sequences, step.kind, now - begun)

    def accepted(self, step: InFlight, ids: list[int]) -> tuple[list[int], list[int]]:
        """What a step with drafts is taken to have sampled, and its rows whose tokens count: a
        drafted one's does where the row before it has sampled what it was drafted with, and
        counts."""
        if self.speculation is not None:
            ids = self.speculation.ids(ids, step.drafts)
        rows: list[int] = []
        counts: dict[scheduler.Sequence, int] = {}
        for i, (sequence, drafted) in enumerate(zip(step.wanted.rows, step.drafts, strict=True)):
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
                self.counts[i] += new
            if self.draft is not None and sequence.drafted and sequence.state == "running":
                self.draft.accepted(sequence, sequence.drafted, count)
                if isinstance(answer, Answer) and answer.guess is not None:
                    answer.guess.verified(sequence.drafted, count)
            self._scheduler.accept(sequence, count)
        return ids, rows
