"""Prompts that begin: those whose pages come back from host memory first wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from infer.engine.answers import Job
from infer.engine.host_cache import HostCache
from infer.engine.host_tier import HostTier, Restore
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler


class Restoring:
    """Adds jobs to the scheduler, once what is in host memory of their prompts is on the GPU.
    waiting: those for which something comes back."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, touched: Callable[[], tuple[int, int]]
    ) -> None:
        """touched: returns how many pages there has to be memory for, as of `Runner.room`."""
        self._scheduler, pace = scheduler, runner.pace
        self.tier = HostTier(
            runner.steps,
            scheduler.pool,
            runner.submissions,
            HostCache(runner.options.host_cache),
            lambda rows, at: pace.seconds(rows, at) if pace.known else 0.0,
            lambda pages: runner.takes(pages, touched()),
        )
        self.waiting: deque[tuple[Restore, Job]] = deque()

    def add(self, job: Job) -> None:
        sequence = job.sequence
        restore = None
        if sequence.shares:
            restore = self.tier.plan(sequence.tokens, sequence.key)
        if restore is None:
            self._scheduler.add(sequence)
        else:
            self.waiting.append((restore, job))

    def go_on(self) -> None:
        """Bring some of what the first prompt needs back."""
        restore, job = self.waiting[0]
        if job.ended:
            self.tier.drop(restore)
        elif not self.tier.bring(restore):
            return
        self.waiting.popleft()
        if not job.ended:
            self._scheduler.add(job.sequence)

    def reset(self) -> None:
        """Nothing comes back any more: all that wait are added as they are."""
        self.tier.forget()
        for _, job in self.waiting:
            self._scheduler.add(job.sequence)
        self.waiting.clear()
