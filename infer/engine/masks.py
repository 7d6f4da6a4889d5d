"""The masks of a step: which tokens its answers may have, where a schema or the like says that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from infer.engine import scheduler
from infer.engine.answers import Answer
from infer.engine.constraint import Asked
from infer.engine.texts import Text
from infer.kernels.state.sampler import Sampler


@dataclass(frozen=True, eq=False)
class Making:
    """are_made: whether all are. failed: answers whose masks could not be, and whose `error` says
    why; known at the end."""

    are_made: Callable[[], bool] = lambda: True
    failed: list[Answer] = field(default_factory=list)


class Masks:
    """Those of an engine's answers. They are made while the body of a step runs: only what samples
    needs them."""

    def __init__(
        self, sampler: Sampler, answers: Mapping[scheduler.Sequence, Answer | Text]
    ) -> None:
        """answers: that there are, by their sequences."""
        self._sampler, self._answers = sampler, answers

    @contextmanager
    def making(
        self,
        sequences: Sequence[scheduler.Sequence],
        drafts: Mapping[scheduler.Sequence, tuple[int, Sequence[int]]] | None = None,
    ) -> Iterator[Making]:
        """In it, what those that have a mask may sample next is found out; at its end it is
        written. All their tokens have been read. drafts: in a step with drafts, where each row has
        its mask, the first row of each and its draft."""
        answers: list[Answer] = []
        asked: list[Asked] = []
        for sequence in sequences:
            answer = self._answers.get(sequence)
            if isinstance(answer, Answer) and answer.is_masked and not answer.ended:
                assert answer.constraint is not None
                of = sequence.tokens, len(answer.prompt)
                at = (scheduler.slot_of(sequence),) if drafts is None else drafts[sequence]
                answers.append(answer)
                asked.append(Asked(answer.constraint, *of, *at))
        if not asked:
            yield Making()
            return
        with asked[0].constraint.threads.making(asked, self._sampler.masks) as made:
            making = Making(made.done)
            yield making
        for answer, error in zip(answers, made.result(), strict=True):
            if error is not None:
                answer.error = error
                making.failed.append(answer)
        rows = [row for each in asked for row in each.rows]
        self._sampler.write_masks(min(rows), max(rows))
