"""Prefill steps: chunks of the prompts of some answers, or of one text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import or_

import numpy as np

from infer.engine.answers import Answer, Job, Jobs
from infer.engine.drafter import Known
from infer.engine.kinds import Kind
from infer.engine.masks import Masks
from infer.engine.recordings import Recipe
from infer.engine.runner import Runner
from infer.engine.scheduler import Prefill, slot_of
from infer.engine.submissions import InFlight, Read, Take, Wanted
from infer.engine.texts import Scored, Text, Texts
from infer.kernels.gpu.pack import write
from infer.kernels.gpu.record import EMPTY, Copy, Recording
from infer.kernels.lowering.target import MAX_VEC_ROWS
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.sampler import SamplerChain
from infer.kernels.state.step import Tokens, pack_prompts


class Prefilling:
    """Submits and reads steps that have rows of prompts. texts: those that are embedded or
    scored."""

    def __init__(self, runner: Runner, jobs: Jobs) -> None:
        self._runner, self._jobs = runner, jobs
        self._masks, self.texts = Masks(runner.sampler, jobs), Texts(runner)

    def submit(self, work: Sequence[Prefill]) -> list[Answer]:
        """Submit a step of these chunks. Returns the answers whose masks could not be made."""
        runner = self._runner
        jobs = [self._jobs.of[part.sequence] for part in work]
        slots = [slot_of(part.sequence) for part in work]
        self._prepare(work, jobs, slots)
        numbers = [runner.own.adapters.number(job.adapter) for job in jobs]
        leads = [
            runner.lead if part.first and part.start and part.sequence.shares else 0
            for part in work
        ]
        each = zip(leads, work, strict=True)
        ends = list(accumulate(lead + part.count for lead, part in each))
        count, longest = ends[-1], max(part.start + part.count for part in work)
        tokens, given = self._tokens(work, jobs, leads)
        kind = runner.kinds.prefill(count, len(work)).with_adapters(any(numbers)).with_given(given)
        ending = [i for i, part in enumerate(work) if part.last]
        text = jobs[0] if isinstance(jobs[0], Text) else None
        chain: SamplerChain | None = None
        if text is not None:
            wanted, recording = self.texts.step(text, work[0], kind)
        else:
            answers = [job for i in ending if isinstance(job := jobs[i], Answer)]
            chain = reduce(or_, (answer.chain for answer in answers)) if answers else None
            recording = runner.recordings.of(Recipe(kind, chain, head=bool(answers)))
            wanted = _wanted(answers, chain)
        chunks = [
            (ids, part.start - lead, slot, number)
            for ids, part, lead, slot, number in zip(
                tokens, work, leads, slots, numbers, strict=True
            )
        ]
        chosen = [ends[i] - 1 for i in ending] if wanted.rows else []
        runner.device.write(runner.steps.step, pack_prompts(chunks, chosen, leads))
        position = sum(part.count * part.start for part in work) // count
        pieces = 1 if count <= MAX_VEC_ROWS else runner.pace.submissions(count, position)
        *first, rest = self._pieces(recording, pieces, kind, chain)
        with self._masks.making(wanted.rows) as failed:
            for piece in first:
                runner.queue.submit(piece, count, longest, ())
        runner.resident.prefilled(slots, tuple(slots[i] for i in ending) if wanted.rows else ())
        # Scoring takes longer, so it would distort the pace of prompts.
        is_prompt = count > MAX_VEC_ROWS and not isinstance(text, Scored)
        take: Take = self._read
        if is_prompt:
            take = partial(self._read_prompts, count, position)
        if text is not None:
            take = partial(self._read_text, text, work[0], take)
        of = rest, count, longest, wanted, take
        runner.submissions.submit(*of, tells_pace=is_prompt)
        self._follow(work, jobs, slots)
        return failed

    def _tokens(
        self, work: Sequence[Prefill], jobs: Sequence[Job], leads: Sequence[int]
    ) -> tuple[list[Tokens], bool]:
        """The tokens of each chunk, and whether any of them stand for rows that are given. These
        are written behind each other; the token behind the vocabulary stands for the first."""
        runner, found, count = self._runner, list[Tokens](), 0
        for part, job, lead in zip(work, jobs, leads, strict=True):
            first, end = part.start - lead, part.start + part.count
            tokens: Tokens = part.sequence.tokens[first:end]
            for place, rows in job.prompt.given(first, end):
                tokens = np.array(tokens, np.int64)
                ids = np.arange(count, count + len(rows)) + runner.config.vocab_size
                tokens[place - first : place - first + len(rows)] = ids
                write(runner.device, runner.steps.given, rows, count)
                count += len(rows)
            found.append(tokens)
        return found, count > 0

    def _prepare(self, work: Sequence[Prefill], jobs: Sequence[Job], slots: Sequence[int]) -> None:
        """Tell the GPU what it has to know of these sequences, and copy what they go on from."""
        runner, before = self._runner, list[Copy]()
        caches, drafter = runner.caches, runner.drafter
        for part, job, slot in zip(work, jobs, slots, strict=True):
            sequence = part.sequence
            if part.first and isinstance(job, Answer):
                generated = sequence.tokens[len(job.prompt) :]
                of = job.prompt, generated, job.params, job.stop_ids
                runner.resident.begin(slot, *of)
            runner.resident.give_pages(slot, sequence.pages, sequence.window_pages)
            if part.copy is not None:
                positions = part.start % PAGE
                before += caches.kv.copies(*part.copy, positions)
                if caches.windows is not None and sequence.window_copy is not None:
                    before += caches.windows.copies(*sequence.window_copy, positions)
                before += drafter.copies(*part.copy, positions)
            if part.first:
                drafter.begin(sequence, part.start, part.copy)
            if part.restore is not None:
                assert caches.saved is not None
                before += caches.saved.copies(slot, part.restore, back=True)
        runner.resident.rotate_for(jobs[0].table_length)
        if before:
            runner.queue.submit(EMPTY, 0, 0, before)

    def _pieces(
        self, recording: Recording, count: int, kind: Kind, chain: SamplerChain | None
    ) -> Sequence[Recording]:
        """A step in so many parts, which let answers beside it go on."""
        if count == 1 or chain is None or not chain.mask:
            return recording.parts(count)
        recordings = self._runner.recordings  # sampling comes after the masks
        body = recordings.of(Recipe(kind, head=False)).parts(count)
        return [*body, recordings.of(Recipe(kind, chain, body=False))]

    def _follow(self, work: Sequence[Prefill], jobs: Sequence[Job], slots: Sequence[int]) -> None:
        """Submit what follows the step, and do what can be done while the GPU computes it."""
        runner = self._runner
        runner.drafter.follow(
            runner.queue,
            [
                Known(part.sequence, slot, part.sequence.tokens, part.start + part.count)
                for part, slot in zip(work, slots, strict=True)
                if part.sequence.shares
            ],
        )
        for part, slot in zip(work, slots, strict=True):
            if part.save is not None:
                self._jobs.save_state(slot, part.save)
        for part, job in zip(work, jobs, strict=True):
            if part.first and job.guess is not None:
                job.guess.begin(part.sequence.tokens)

    def _read_prompts(
        self, rows: int, position: int, step: InFlight, results: Read, before: float, now: float
    ) -> None:
        """Take in the results of a step whose time tells how fast prompts are computed. position:
        where its rows are, on the average. before: when the step before it was read."""
        self._runner.pace.measured(rows, now - max(step.since, before), position)
        self._read(step, results, before, now)

    def _read(self, step: InFlight, results: Read, before: float, now: float) -> None:
        self._jobs.take(step.wanted.rows, results, now)

    def _read_text(
        self,
        text: Text,
        part: Prefill,
        take: Take,
        step: InFlight,
        results: Read,
        before: float,
        now: float,
    ) -> None:
        """Take in what a text wanted of a step."""
        take(step, results, before, now)
        if text.ended:
            return
        if results.others is not None:
            text.take(part.start, results.others)
        if part.last:
            self._jobs.end(text)


def _wanted(answers: Sequence[Answer], chain: SamplerChain | None) -> Wanted:
    """The values to read back of a step in which the prompts of these answers end."""
    return Wanted(
        tuple(answer.sequence for answer in answers),
        tuple(i for i, answer in enumerate(answers) if answer.reads_logits),
        chain is not None and chain.logprobs,
    )
