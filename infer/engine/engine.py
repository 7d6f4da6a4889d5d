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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infer.engine.answers import Answer, Job, Jobs
from infer.engine.cache_file import CacheFiles
from infer.engine.decoding import Decoding
from infer.engine.drafter import Drafter
from infer.engine.host_cache import HostCache
from infer.engine.host_tier import HostTier, Restore
from infer.engine.masks import Masks
from infer.engine.options import EngineOptions
from infer.engine.pages import PagePool
from infer.engine.prefill import Prefilling
from infer.engine.runner import TAIL, Runner
from infer.engine.scheduler import Decode, Prefill, Scheduler
from infer.engine.speculation import Speculation
from infer.engine.steps import Loaded
from infer.engine.texts import Texts
from infer.engine.token_engine import EngineStats, Request, Timings, TokenEngine
from infer.engine.turns import Turns
from infer.engine.verification import Verification
from infer.engine.windows import WindowPages, window_of
from infer.kernels.errors import OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import Device
from infer.kernels.state.kv_cache import PAGE
from infer.sampling import Logprobs, SamplingParams


class Events:
    """What an engine tells of its steps, to whoever overrides these."""

    def submits(self, work: Sequence[Prefill] | Decode) -> None:
        """A step is submitted next."""

    def filled(self) -> None:
        """All that can be submitted is; the oldest step in flight is read next."""


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
        caches, kinds = runner.caches, runner.kinds
        self.pool = PagePool(
            options.pages,
            PAGE,
            snapshots=0 if caches.saved is None else options.most_state_places,
            windows=WindowPages(caches.window_pages, window_of(self.config))
            if caches.window_pages
            else None,
        )
        self.scheduler = Scheduler(
            self.pool,
            slots=options.max_batch,
            context=options.context,
            chunk=kinds.chunk - runner.lead * kinds.prompts,
            ahead=options.ahead,
            snapshot_tail=0 if caches.saved is None else TAIL,
            prompts=kinds.prompts,
        )
        self.jobs = Jobs(runner, self.scheduler)
        self.texts, masks = Texts(runner), Masks(runner.sampler, self.jobs)
        self.prefilling = Prefilling(runner, self.jobs, masks, self.texts)
        self.decoding = Decoding(runner, self.scheduler, self.jobs, masks)
        self.verification = Verification(runner, self.scheduler, self.jobs, masks)
        runner.holders += [self.verification, self.decoding, self.texts]
        self.tier = HostTier(
            runner.steps,
            self.pool,
            runner.submissions,
            HostCache(options.host_cache),
            lambda rows, at: runner.pace.seconds(rows, at) if runner.pace.known else 0.0,
            self._takes,
        )
        has_windows = self.pool.windows is not None
        of_weights = device, own.weights, own.adapters, options.kv_dtype, has_windows
        self.files = CacheFiles(*of_weights)
        self.turns, self.events = Turns(), Events()
        self._inbox: deque[Job] = deque()  # to begin, or to cancel
        # Answers whose pages come back from the host, before they are added to the scheduler.
        self._restoring: deque[tuple[Restore, Job]] = deque()
        self._is_whole = True  # False during a change that an interrupt would cut in half
        self._read_at = 0.0  # when the last step was read
        self.timings = Timings()  # of the latest answer

    @property
    def gpu(self) -> AdapterInfo:
        return self.device.adapter

    def speculate(self, speculation: Speculation, drafter: Drafter | None = None) -> None:
        """Draft by another rule from now on. drafter: None: no model drafts."""
        self.verification.drop()
        self.runner.speculation, self.runner.drafter = speculation, drafter or Drafter()
        self.scheduler.in_step = False

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
        """Queue it. Whoever waits computes it."""
        self._inbox.append(job)

    def cancel(self, job: Job) -> None:
        """Safe at any time, in any thread, and twice."""
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

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> Generator[NDArray[np.float64], None, None]:
        """Computed in steps beside those of answers."""
        self._check_texts(texts, adapter)
        yield from self.texts.embed(texts, pooling, adapter, self, self.options.ahead)

    def score(
        self, ids: Sequence[int], n: int, adapter: str | None = None
    ) -> Generator[list[Logprobs], None, None]:
        """Computed in steps beside those of answers. n: at most MAX_LOGPROBS."""
        self._check_texts([ids], adapter)
        yield from self.texts.score(ids, n, adapter, self)

    def logits(
        self, ids: Sequence[int], adapter: str | None = None
    ) -> Generator[NDArray[np.float32], None, None]:
        """Yields the logits of all positions of a text, some rows at a time. Raises as `score`
        does."""
        self._check_texts([ids], adapter)
        yield from self.texts.logits(ids, adapter, self)

    def _check_texts(self, texts: Sequence[Sequence[int]], adapter: str | None) -> None:
        for ids in texts:
            self.check_prompt(ids, room=0)
        self.check_adapter(adapter)

    def save_cache(
        self,
        path: str,
        ids: Sequence[int],
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Generator[int, None, None]:
        once = SamplingParams(max_tokens=1).resolved({})
        for _ in self.generate(ids, once, adapter=adapter, cache_salt=cache_salt):
            pass
        with self._changing():
            prompt = self.tier.copy_out(ids, self.jobs.key(ids, adapter, cache_salt))
        self.files.write(Path(path), prompt, adapter)
        yield len(prompt.tokens)

    def load_cache(
        self, path: str, adapter: str | None = None, cache_salt: str | None = None
    ) -> Generator[int, None, None]:
        self.check_adapter(adapter)
        prompt = self.files.read(Path(path), adapter)
        ids: list[int] = prompt.tokens.tolist()
        if not self.tier.takes(prompt):
            raise RequestError(f"{path} is damaged. Save the cache again.")
        self.check_prompt(ids, room=0)
        with self._changing():
            has_room = self.tier.copy_in(prompt, self.jobs.key(ids, adapter, cache_salt))
        if not has_room:
            raise RequestError(
                f"The cache has no room for the {len(ids):,} positions of {path} beside the "
                "answers that are generated. Ask again later, or give it more memory."
            )
        yield len(ids)

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

    def close(self) -> None:
        with self.turn():
            self.verification.forget()
            self.decoding.forget()
            self.device.close()

    # Steps

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
                sequence = job.sequence
                self.jobs.of[sequence] = job
                restore = None
                if sequence.shares:
                    restore = self.tier.plan(sequence.tokens, sequence.key)
                if restore is None:
                    self.scheduler.add(sequence)
                else:
                    self._restoring.append((restore, job))
            self._inbox.popleft()

    def _bring_back(self) -> None:
        """Bring some of what the first prompt needs back from host memory."""
        if not self._restoring:
            return
        restore, job = self._restoring[0]
        if job.ended:
            self.tier.drop(restore)
        elif not self.tier.bring(restore):
            return
        self._restoring.popleft()
        if not job.ended:
            self.scheduler.add(job.sequence)

    def _fill(self) -> None:
        """Submit as many steps as may be in flight."""
        in_flight, pace = self.runner.submissions.in_flight, self.runner.pace
        self._bring_back()
        while len(in_flight) < self.options.ahead and not self.decoding.is_held:
            if in_flight and in_flight[-1].tells_pace and not pace.known:
                break  # its time is to be measured first
            if self.runner.speculation.is_on:
                self.verification.choose()
            work = self.scheduler.next(self._most_rows())
            if self.pool.evicted:
                self.tier.take_out()
            if self.scheduler.to_save:
                self.jobs.save_states()
            touched, room = self._touched, self.runner.room
            if (touched[0] > room[0] or touched[1] > room[1]) and not self._has_grown():
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

    def _most_rows(self) -> Callable[[int], int]:
        """Returns what gives the most rows of a step whose rows start at a position."""
        pace = self.runner.pace
        most = pace.rows_beside if self.scheduler.running else pace.rows
        shared = self.scheduler.shared_rows if self.scheduler.has_prompts else 0
        return lambda position: pace.filled(most(position), shared)

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

    # Memory

    @property
    def _touched(self) -> tuple[int, int]:
        """Pages that there has to be memory for: of the cache, and of layers with a window."""
        windows = self.pool.windows
        return self.pool.touched, 0 if windows is None else windows.touched

    def _has_grown(self) -> bool:
        """Have memory for all pages that are used. Returns False if there is none: then the answers
        that have pages without memory end with that error, and others go on with an empty cache."""
        room = self.runner.room
        try:
            self.runner.grow(self._touched)
        except OutOfMemoryError as error:
            self.jobs.fail(error, *room)
            self._recover()
            return False
        return True

    def _takes(self, pages: Sequence[int]) -> bool:
        """Whether there is memory for these pages, which hold something else from here on."""
        return self.runner.takes(pages, self._touched)

    # Recovery

    @contextmanager
    def _changing(self) -> Iterator[None]:
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
        self.tier.forget()
        for _, job in self._restoring:
            self.scheduler.add(job.sequence)
        self._restoring.clear()
        self.jobs.reset()
        self.runner.forget()
