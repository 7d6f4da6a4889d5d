"""The loop that owns the GPU: token ids in, token ids out. It knows nothing of text.

Any number of answers are generated at once (continuous batching, Yu et al. 2022, "Orca"). The
scheduler says what to submit next: a chunk of one answer's prompt, or one row of every answer that
has its prompt behind it. The GPU samples, and writes the next row of each sequence into a table, so
that step n + 1 is submitted before the ids of step n are read, whoever comes or goes.

Nothing runs but in the threads that wait for a token: one of them submits and reads for all, until
it has its own (`infer.engine.turns`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from infer.engine.answers import Answer, Job, Jobs
from infer.engine.decoding import Decoding
from infer.engine.host_memory import HostMemory
from infer.engine.options import EngineOptions
from infer.engine.prefill import Prefilling
from infer.engine.prompt_files import PromptFiles
from infer.engine.restoring import Restoring
from infer.engine.runner import Runner
from infer.engine.scheduler import Decode, Events, Prefill
from infer.engine.steps import Loaded
from infer.engine.token_engine import EngineStats, Request, Timings, TokenEngine
from infer.engine.turns import Turns
from infer.engine.verification import Verification
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import Device


class Engine(TokenEngine):
    """One model on a device of this process, with its cache.

    runner: all that is on the GPU. scheduler: says what comes next. pool: the pages of the cache.
    jobs: the answers and texts. prefilling, decoding, verification: the kinds of work. events: told
    of every step.
    """

    def __init__(
        self, device: Device, own: Loaded, options: EngineOptions, draft: Loaded | None = None
    ) -> None:
        """draft: a model that fits (`check_draft`), for ways to speculate that need one. Allocates
        everything but the weights. Raises OutOfMemoryError."""
        self.device, self.options = device, options
        self.model, self.weights, self.adapters = own.model, own.weights, own.adapters
        self.config, self.slots = own.model.config, options.max_batch
        self.context, self.vocab_size = options.context, self.config.vocab_size
        self.adapter_names = own.adapters.names
        self.runner = runner = Runner(device, own, options, draft)
        self.scheduler = runner.new_scheduler()
        self.pool = self.scheduler.pool
        self.jobs = Jobs(runner, self.scheduler)
        self.prefilling = Prefilling(runner, self.jobs)
        self.decoding = Decoding(runner, self.scheduler, self.jobs)
        self.verification = Verification(runner, self.scheduler, self.jobs)
        runner.holders += [self.verification, self.decoding, self.prefilling.texts]
        self.restoring = Restoring(runner, self.scheduler)
        self.tier = self.restoring.tier
        self.files = PromptFiles(runner, self.tier, self.jobs)
        self.turns, self.events = Turns(), Events()
        self._inbox: deque[Job] = deque()  # to begin, or to cancel
        self._is_whole = True  # False during a change that an interrupt would cut in half
        self._read_at = 0.0  # when the last step was read
        self.timings = Timings()  # of the latest answer

    @property
    def gpu(self) -> AdapterInfo:
        return self.device.adapter

    # Requests

    def answer(self, request: Request) -> Answer:
        self.check_prompt(request.prompt)
        self.check_adapter(request.adapter)
        answer = self.jobs.answer(self, request)
        if answer.is_over:
            answer.ended = True
        else:
            self._inbox.append(answer)
        self.timings = answer.timings
        return answer

    def begin(self, job: Job) -> None:
        """Queue a job. The threads that wait for tokens compute it."""
        self._inbox.append(job)

    def cancel(self, job: Job) -> None:
        """End a job early. It may be called at any time, in any thread, and twice."""
        if not (job.ended or job.cancelled):
            job.cancelled = True
            self._inbox.append(job)
            self.turns.wake()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is asked between steps. Makes the steps if no other thread
        does."""
        self.turns.wait(ready, self._step)

    def turn(self) -> AbstractContextManager[None]:
        """A block in which only this thread makes steps."""
        return self.turns.turn()

    def settle(self) -> None:
        """Take in what was cancelled while nothing else is generated, to free its pages."""
        with self.turn():
            for _ in range(self.options.ahead + 1):  # no more, as new answers may keep coming
                if not (self._inbox or self.runner.submissions.in_flight):
                    break
                self._step()

    def call(self, what: str, *arguments: Any) -> Generator[Any, None, None]:
        texts, files = self.prefilling.texts, self.files
        methods: dict[str, Callable[..., Iterator[Any]]] = {
            "embed": texts.embed,
            "score": texts.score,
            "logits": texts.logits,
            "save_cache": files.save,
            "load_cache": files.load,
        }
        yield from methods[what](self, *arguments)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        memory = self.device.memory_stats()
        running = self.jobs.wanted([*scheduler.running, *scheduler.prefilling])
        new = sum(not job.cancelled for job in list(self._inbox))
        waiting = self.jobs.wanted(list(scheduler.waiting)) + new
        drafts, drafted, accepted = self.verification.counts
        return EngineStats(
            memory,
            self.pool.stats,
            running,
            waiting,
            scheduler.preemptions,
            drafts,
            drafted,
            accepted,
            self.options.kv_dtype,
            self.tier.cache.stats,
        )

    def share(self, memory: HostMemory) -> None:
        """Keep what the GPU has no room for in this memory, with others, once weights are read."""
        with self.turn():
            self.tier.share(memory, self.files.about_all)

    def close(self) -> None:
        self.restoring.end(self.changing)
        with self.turn():
            self.verification.forget()
            self.decoding.forget()
            self.tier.cache.close()
            self.device.close()

    def _step(self) -> None:
        """Submit what can be submitted, then read the oldest step in flight."""
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        self._take_in()
        self._fill()
        self._is_whole = True
        self.events.filled()
        in_flight = self.runner.submissions.in_flight
        if in_flight:
            is_next = len(in_flight) == 1 and not self.scheduler.has_prompts
            if self.scheduler.in_step and is_next and self.decoding.batch is not None:
                self.verification.prepare(self.decoding.batch)
            self._read()
            if self.scheduler.in_step:  # the GPU is idle until the next step is submitted
                self._is_whole = False
                self._fill()
                self._is_whole = True

    def _take_in(self) -> None:
        """Begin what is new, and end what was cancelled."""
        while self._inbox:
            job = self._inbox[0]
            if job.cancelled:
                self.jobs.end(job)
            elif job.sequence not in self.jobs.of:
                self.jobs.of[job.sequence] = job
                self.restoring.add(job)
            self._inbox.popleft()

    def _fill(self) -> None:
        """Submit as many steps as may be in flight."""
        in_flight, pace = self.runner.submissions.in_flight, self.runner.pace
        if self.restoring.waiting:
            self.restoring.go_on()
        while len(in_flight) < self.options.ahead and not self.decoding.is_held:
            if in_flight and in_flight[-1].tells_pace and not pace.known:
                break  # its time is to be measured first
            if self.runner.speculation.is_on:
                self.verification.choose()
            scheduler = self.scheduler
            most: Callable[[int], int] = pace.rows  # asked where there are prompts alone
            if scheduler.has_prompts:
                most = pace.most_rows(bool(scheduler.running), scheduler.shared_rows)
            work = scheduler.next(most)
            if self.pool.evicted:
                self.tier.take_out()
            if self.scheduler.to_save:
                self.jobs.save_states()
            touched, room = self.scheduler.touched, self.runner.room
            lacks = touched[0] > room[0] or touched[1] > room[1]
            if lacks and not self.jobs.grow(touched):
                self._recover()  # an error ends those without memory; others begin anew
                break
            if work is None:
                break
            if failed := self._submit(work):
                self.jobs.end_failed(failed)
            self.pool.unsaved.clear()

    def _submit(self, work: Sequence[Prefill] | Decode) -> list[Answer]:
        """Returns the answers whose masks could not be made."""
        self.events.submits(work)
        if not isinstance(work, Decode):
            if any(part.first for part in work):
                self.decoding.batch = None  # a sequence may have had another slot
            return self.prefilling.submit(work)
        batch, longest = self.decoding.begin(work)
        may_verify = self.runner.speculation.is_on or work.drafts or work.behind
        if may_verify and self.verification.takes(work, batch):
            return self.verification.submit(work, batch, longest)
        return self.decoding.submit(batch, longest)

    def _read(self) -> None:
        """Wait for the oldest step in flight, and take in its results."""
        submissions = self.runner.submissions
        step, results = submissions.in_flight[0], submissions.read()
        self._is_whole = False
        submissions.in_flight.popleft()
        before, self._read_at = self._read_at, time.perf_counter()
        if self.tier.outgoing:
            self.tier.collect()
        step.take(step, results, before, self._read_at)
        if self.decoding.is_held:
            self.jobs.end_failed(self.decoding.go_on())
        self._is_whole = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block in which this thread has the turn and changes what is cached. An interrupt in it
        empties the cache."""
        with self.turn():
            if not self._is_whole:
                self._recover()
            self._is_whole = False
            self.tier.take_out()
            self.jobs.save_states()
            yield
            self._is_whole = True

    def forget(self) -> None:
        """Empty the cache, so that nothing is reused. Sequence 0 gets the first pages, for callers
        that submit steps by hand."""
        with self.alone():
            pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this thread has the engine to itself, with an empty cache. Answers go on
        from their tokens afterwards."""
        with self.turn():
            if not self._is_whole:
                self._recover()
            self._is_whole = False
            self._take_in()
            self._is_whole = True
            while self.runner.submissions.in_flight:
                self._read()
            self._is_whole = False
            self._reset()
            self.runner.place_first()
            try:
                yield
            finally:
                self.runner.forget()
            self._is_whole = True

    def _recover(self) -> None:
        """After an interrupt in the middle of a change, trust nothing here or on the GPU: all
        answers go on from their known tokens."""
        self.runner.submissions.forget()
        self._reset()

    def _reset(self) -> None:
        """Begin anew with an empty cache and nothing in flight."""
        self.restoring.reset()
        self.jobs.reset()
        self.runner.forget()
