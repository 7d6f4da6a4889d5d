"""All answers and texts of an engine: how they begin, take in their tokens, and end."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.answers import Answer, Job
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler
from infer.engine.speculation import Guess, Held
from infer.engine.submissions import Read
from infer.engine.token_engine import Request, Step, TokenEngine
from infer.kernels.errors import InferError, ModelError
from infer.kernels.state.sampler import INVALID_TOKEN, SamplerChain
from infer.kernels.state.step import NO_TOKEN
from infer.models.blocks.rope import same_until, table_length
from infer.sampling import NumpySampler


class Jobs:
    """of: all answers and texts that are computed, by their sequences. An answer that gets so long
    that its rotary table changes has several sequences, one after the other."""

    of: dict[scheduler.Sequence, Job]

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.of = {}
        self._runner, self._scheduler, self._options = runner, scheduler, runner.options
        self._rope, self._vocab_size = runner.config.rope, runner.config.vocab_size

    # Beginning

    def answer(self, engine: TokenEngine, request: Request) -> Answer:
        """An answer that is not begun yet."""
        params, prompt, generated = request.params, request.prompt, request.generated
        assert params.masked == (request.constraint is not None)
        # The last token needs no position, as nothing comes after it.
        limit = self._options.context - len(prompt)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        sampler = None
        if request.logits_processor is not None:
            of = params, self._vocab_size, prompt, request.logits_processor, request.stop_ids
            sampler = NumpySampler(*of)
            sampler.ids = np.append(sampler.ids, np.array(generated, np.int64))
        # With a mask only the body of the second step is ahead.
        ahead = 1 if sampler else 2 if request.constraint is not None else self._options.ahead
        sequence = self.sequence(
            [*prompt, *generated],
            limit - len(generated),
            (request.adapter, request.cache_salt),
            ahead,
            request.priority,
            _message_ends(prompt, request.stop_ids) if self._scheduler.snapshot_tail else (),
        )
        chain = self._runner.chain(params) if sampler is None else SamplerChain()
        answer = Answer(engine, request, sequence, limit, chain, sampler)
        answer.guess = self._guess(answer)
        return answer

    def _guess(self, answer: Answer) -> Guess | None:
        # Logits that are read back would have to be handled for every draft.
        if answer.reads_logits:
            return None
        of = answer.constraint
        held = None if of is None else Held(of, len(answer.prompt))
        return self._runner.speculation.guess(held)

    def sequence(
        self,
        ids: Sequence[int],
        limit: int,
        key: tuple[str | None, ...],
        ahead: int,
        priority: int = 0,
        marks: Sequence[int] = (),
    ) -> scheduler.Sequence:
        """A sequence of `limit` more tokens, or as many as keep its rotary table. key: of the
        cache. The rest as for `scheduler.Sequence`."""
        part = int(min(limit, same_until(self._rope, len(ids)) + 1 - len(ids)))
        length = table_length(self._rope, len(ids))
        return scheduler.Sequence(
            ids,
            limit=part,
            key=(*key, length),
            priority=priority,
            group=length,
            ahead=ahead,
            marks=marks,
        )

    def key(self, ids: Sequence[int], adapter: str | None, cache_salt: str | None) -> Hashable:
        """What keys and values of a prompt depend on besides its tokens."""
        return adapter, cache_salt, table_length(self._rope, len(ids))

    def _begin_part(self, answer: Answer) -> None:
        """Begin its next part: from here on all positions have another rotary table."""
        before = answer.sequence
        rest, key = answer.limit - answer.count, (answer.adapter, answer.cache_salt)
        sequence = self.sequence(before.tokens, rest, key, before.ahead, before.priority)
        self._scheduler.add(sequence)
        self.of[sequence] = answer
        answer.sequence = sequence
        del self.of[before]

    # Tokens

    def take(
        self,
        sequences: Sequence[scheduler.Sequence],
        results: Read,
        now: float,
        rows: Iterable[int] | None = None,
    ) -> None:
        """Take in the tokens of a step. sequences: of each of its rows. rows: those whose tokens
        count; None: all."""
        for i in range(len(sequences)) if rows is None else rows:
            job = self.of.get(sequences[i])
            if isinstance(job, Answer):
                of = results.ids[i], results.logits.get(i), results.ranked.get(i)
                self._take_token(job, *of, now)

    def _take_token(
        self,
        answer: Answer,
        token: int,
        logits: NDArray[np.float32] | None,
        ranked: NDArray[Any] | None,
        now: float,
    ) -> None:
        """A token was read. ranked: the LOGPROB records of its row, if any answer of the step asked
        for them. now: of time.perf_counter()."""
        sequence = answer.sequence
        if answer.ended:  # only its state is still to be saved
            stops = token in answer.stop_ids
            self._scheduler.read(sequence, token, ended=stops)
            self.end(answer)
            return
        try:
            token = self._chosen(answer, token, logits)
            own = answer.logprobs(token, logits, ranked)
        except Exception as error:
            answer.error = error  # type: ignore[assignment]
            self.end(answer, at_once=True)
            return
        answer.time(now)
        answer.give(Step(token, logits if answer.with_logits else None, own))
        last = answer.is_over
        of_part = len(sequence.tokens) + 1 >= sequence.end
        self._scheduler.read(sequence, token, last or of_part)
        if answer.guess is not None and not last:
            answer.guess.take(sequence.tokens)
        if last:
            self.end(answer)
        elif of_part:
            self._begin_part(answer)
        elif answer.sampler is not None and sequence.slot is not None:
            self._runner.resident.set_next(answer)

    def _chosen(self, answer: Answer, token: int, logits: NDArray[np.float32] | None) -> int:
        """The token that was sampled on the GPU, or the one that the host chooses. Raises
        ModelError, and what a logits processor raises."""
        if answer.sampler is not None:
            assert logits is not None  # asked for
            allowed = None
            if answer.constraint is not None:
                so_far = answer.sequence.tokens, len(answer.prompt)
                allowed = answer.constraint.allowed_after(*so_far, self._vocab_size)
            token = answer.sampler(logits, allowed)
        elif token == INVALID_TOKEN:
            raise ModelError(
                "The model's logits are not finite: its weights may be damaged, or its values "
                'too large for the KV cache\'s f16 (load it with `kv_dtype="f32"`).'
            )
        assert token != NO_TOKEN
        return token

    # States

    def save_states(self) -> None:
        """Save the states that the scheduler wants to be saved before the next step."""
        for slot, place in self._scheduler.to_save:
            self.save_state(slot, place)
        self._scheduler.to_save.clear()

    def save_state(self, slot: int, place: int) -> None:
        """Save the state of a slot in a place. Where there is no memory for more places, there are
        no more from now on, and what they hold is less."""
        if not self._runner.save_state(slot, place):
            saved = self._runner.caches.saved
            assert saved is not None
            self._scheduler.pool.snapshots.shrink(saved.places)

    # Ends

    def end(self, job: Job, *, at_once: bool = False) -> None:
        job.ended = True
        sequence = job.sequence
        if sequence in self.of:
            self._scheduler.cancel(sequence, at_once=at_once)
            if sequence.state == "ended":  # else it ends when what is in flight was read
                del self.of[sequence]

    def end_failed(self, answers: Sequence[Answer]) -> None:
        """End answers whose masks could not be made."""
        for answer in answers:
            self.end(answer, at_once=True)

    def fail(self, error: InferError, pages: int, window_pages: int) -> None:
        """End, with that error, those that have pages beyond so many, or pages of layers with a
        window beyond so many."""
        for sequence, job in self.of.items():
            own = sequence.window_pages[sequence.first_window :]
            if max(sequence.pages, default=0) >= pages or max(own, default=-1) >= window_pages:
                job.error, job.ended = error, True

    def reset(self) -> None:
        """Those that have not ended go on from their known tokens, with nothing on the GPU."""
        for sequence, job in list(self.of.items()):
            if isinstance(job, Answer) and job.sequence is sequence:
                job.mend()
                job.guess = self._guess(job)
                job.ended |= job.is_over or job.error is not None
                if not job.ended and len(sequence.tokens) >= sequence.end:
                    self._begin_part(job)
            if job.ended or job.sequence is not sequence:  # only a state was to be saved
                self.of.pop(sequence, None)
        self._scheduler.reset(self.of)

    def wanted(self, sequences: Sequence[scheduler.Sequence]) -> int:
        """How many of them somebody still waits for: what is cancelled ends at the next step."""
        jobs = [self.of.get(sequence) for sequence in sequences]
        return sum(not (job is None or job.cancelled or job.ended) for job in jobs)


def _message_ends(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Returns where the first message of a chat ends, which is mostly what others begin with, and
    where the last but one ends, behind which a user may edit: messages end as answers do."""
    ends = np.flatnonzero(np.isin(ids, stop_ids)) + 1
    return [int(end) for end in (*ends[:1], *ends[-2:-1])]
