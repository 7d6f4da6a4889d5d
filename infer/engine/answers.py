"""Answers: how they begin, take in their tokens and end, beside texts that are only read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.prompts import Prompt
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler
from infer.engine.speculation import Guess, Held
from infer.engine.submissions import Read
from infer.engine.token_engine import Request, Step, Timings, TokenAnswer, TokenEngine
from infer.kernels.errors import InferError, ModelError, OutOfMemoryError
from infer.kernels.state.sampler import INVALID_TOKEN, SamplerChain
from infer.kernels.state.step import NO_TOKEN
from infer.models.blocks.rope import same_until, table_length
from infer.sampling import Logprobs, NumpySampler, logprobs


class Job:
    """A piece of work that a sequence is computed for: an answer, or a text that is only read.

    cancelled: it ends before the next step. error: the error that ended it. guess: the tokens that
    may come next, if tokens are drafted for it. is_masked: the GPU chooses its tokens among those
    that the host allows. reads_logits: the logits of its tokens are read back.
    """

    prompt: Prompt
    adapter: str | None
    sequence: scheduler.Sequence
    ended: bool
    cancelled: bool
    error: InferError | None
    guess: Guess | None = None
    is_masked: bool = False
    reads_logits: bool = False

    @property
    def table_length(self) -> int:
        """The length that selects its rotary table (`rope.table_length`)."""
        return int(self.sequence.group)

    def mend(self) -> None:
        """Complete a change of the job that an interrupt may have cut in half."""


class Answer(Job, TokenAnswer):
    """An answer that this process generates.

    steps: those that nobody has taken yet. count: all tokens after the prompt, and newest: the last
    of them. limit: the most there can be. sampler: given if the host chooses the tokens. chain: the
    stages of its sampling on the GPU. begun: when it was asked for, of time.perf_counter().
    """

    def __init__(
        self,
        engine: TokenEngine,
        request: Request,
        sequence: scheduler.Sequence,
        limit: int,
        chain: SamplerChain,
        sampler: NumpySampler | None,
    ) -> None:
        self.engine, self.sequence = engine, sequence
        self.prompt, self.params, self.stop_ids = request.prompt, request.params, request.stop_ids
        self.adapter, self.cache_salt = request.adapter, request.cache_salt
        self.constraint, self.with_logits = request.constraint, request.with_logits
        self.limit, self.chain, self.sampler = limit, chain, sampler
        self.is_masked = self.constraint is not None and sampler is None
        self.reads_logits = self.with_logits or sampler is not None
        self.timings = Timings()
        self.steps: deque[Step] = deque()
        generated = request.generated
        self.count, self.newest = len(generated), generated[-1] if generated else -1
        self.ended = self.cancelled = False
        self.error: InferError | None = None
        self.begun = time.perf_counter()

    def give(self, step: Step) -> None:
        """Take in its next token. Its sequence is told afterwards."""
        # No interrupt comes between these two: it would come at the end of a call.
        self.count, self.newest = self.count + 1, step.token
        self.steps.append(step)

    def mend(self) -> None:
        tokens = self.sequence.tokens
        if len(tokens) - len(self.prompt) < self.count:
            tokens.append(self.newest)
        if self.sampler is not None:
            self.sampler.ids = np.array(tokens, np.int64)

    @property
    def is_over(self) -> bool:
        """Whether the last token of the answer has come."""
        return self.count >= self.limit or self.newest in self.stop_ids

    def time(self, now: float) -> None:
        """Note the time of a token that has come but is not counted yet. now: of
        time.perf_counter()."""
        timings, sequence = self.timings, self.sequence
        if not self.count:
            timings.prefill_seconds = now - self.begun
            timings.queue_seconds = sequence.admitted - self.begun
            timings.reused_tokens = sequence.reused
            timings.prefilled_tokens = len(self.prompt) - sequence.reused
        else:
            timings.decode_seconds = now - self.begun - timings.prefill_seconds
            timings.decoded_tokens += 1

    def logprobs(
        self, token: int, logits: NDArray[np.float32] | None, records: NDArray[Any] | None
    ) -> Logprobs | None:
        """The log probabilities that it asks for: from the logits if the host chose the token, else
        from the LOGPROB records of its row."""
        n = self.params.logprobs
        if n is None:
            return None
        if self.sampler is not None:
            assert logits is not None  # asked for
            return logprobs(logits, token, n)
        assert records is not None  # a stage of its chain
        return ranked(records, n)


def ranked(records: NDArray[Any], n: int) -> Logprobs:
    """The log probabilities in the LOGPROB records of a row."""
    best = records[1 : 1 + n]
    return float(records["logprob"][0]), best[best["token"] != NO_TOKEN].tolist()


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
        """Returns the part of a prompt's cache key that is not its tokens: LoRA adapter, salt, and
        the length that selects the rotary table."""
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
            self._runner.resident.set_next(sequence, answer.adapter)

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

    def grow(self, pages: tuple[int, int]) -> bool:
        """Have memory for so many pages, as `Runner.grow`. Returns False if there is none: then
        those that have pages without memory end with that error."""
        had, had_windows = self._runner.room
        try:
            self._runner.grow(pages)
        except OutOfMemoryError as error:
            for sequence, job in self.of.items():
                own = sequence.window_pages[sequence.first_window :]
                if max(sequence.pages, default=0) >= had or max(own, default=-1) >= had_windows:
                    job.error, job.ended = error, True
            return False
        return True

    def reset(self) -> None:
        """Restart all jobs that have not ended from the tokens that are known, as the GPU holds
        nothing of them any more."""
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
        """Returns for how many of these sequences somebody still waits. Cancelled jobs do not
        count: they end at the next step."""
        jobs = [self.of.get(sequence) for sequence in sequences]
        return sum(not (job is None or job.cancelled or job.ended) for job in jobs)


def _message_ends(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Returns where the first message of a chat ends, which is mostly what others begin with, and
    where the last but one ends, behind which a user may edit: messages end as answers do."""
    ends = np.flatnonzero(np.isin(ids, stop_ids)) + 1
    return [int(end) for end in (*ends[:1], *ends[-2:-1])]
