"""The masks of a step: which tokens a schema, regular expression or grammar allows its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from infer.engine import scheduler
from infer.engine.answers import Answer, Jobs
from infer.engine.constraint import Asked
from infer.kernels.errors import RequestError
from infer.kernels.state.sampler import Sampler

Place = tuple[int, Sequence[int]]  # of a sequence in a step: its first row, and its draft


class Masks:
    """The masks of an engine's answers. They are made while the body of a step runs, as only its
    head needs them."""

    def __init__(self, sampler: Sampler, jobs: Jobs) -> None:
        self._sampler, self._jobs = sampler, jobs

    def make(self, sequences: Sequence[scheduler.Sequence]) -> list[Answer]:
        """Make and write the masks of those of the sequences that have one. All their tokens have
        been read. Returns the answers whose masks could not be made; their `error` says why."""
        answers, asked = self._asked(sequences, None)
        if not asked:
            return []
        errors = asked[0].constraint.threads.make(asked, self._sampler.masks)
        return self._write(answers, asked, errors)

    @contextmanager
    def making(
        self,
        sequences: Sequence[scheduler.Sequence],
        drafts: Mapping[scheduler.Sequence, Place] | None = None,
    ) -> Iterator[list[Answer]]:
        """Makes and writes masks as `make` does, by a thread, while the block runs. At its end the
        list holds what `make` would return. drafts: given in a step with drafts, where each row has
        a mask of its own."""
        failed: list[Answer] = []
        answers, asked = self._asked(sequences, drafts)
        if not asked:
            yield failed
            return
        with asked[0].constraint.threads.making(asked, self._sampler.masks) as made:
            yield failed
        failed += self._write(answers, asked, made.result())

    def _asked(
        self,
        sequences: Sequence[scheduler.Sequence],
        drafts: Mapping[scheduler.Sequence, Place] | None,
    ) -> tuple[list[Answer], list[Asked]]:
        answers: list[Answer] = []
        asked: list[Asked] = []
        for sequence in sequences:
            answer = self._jobs.of.get(sequence)
            if isinstance(answer, Answer) and answer.is_masked and not answer.ended:
                assert answer.constraint is not None
                of = sequence.tokens, len(answer.prompt)
                at = (scheduler.slot_of(sequence),) if drafts is None else drafts[sequence]
                answers.append(answer)
                asked.append(Asked(answer.constraint, *of, *at))
        return answers, asked

    def _write(
        self,
        answers: Sequence[Answer],
        asked: Sequence[Asked],
        errors: Sequence[RequestError | None],
    ) -> list[Answer]:
        failed: list[Answer] = []
        for answer, error in zip(answers, errors, strict=True):
            if error is not None:
                answer.error = error
                failed.append(answer)
        rows = [row for each in asked for row in each.rows]
        self._sampler.write_masks(min(rows), max(rows))
        return failed
