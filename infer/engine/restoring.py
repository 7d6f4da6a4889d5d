"""Prompts that begin: those whose pages come back from host memory first wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from infer.engine.answers import Job
from infer.engine.host_cache import HostCache
from infer.engine.host_tier import HostTier, Restore
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler
from infer.kernels.errors import DeviceError

_KEEP_SECONDS = 2.0  # that what is cached has at the end to go to host memory

Changing = Callable[[], AbstractContextManager[None]]
"""`Engine.changing`."""


class Restoring:
    """Adds jobs to the scheduler, once what is in host memory of their prompts is on the GPU.

    waiting: the jobs for which something comes back. is_outlived: the host memory outlives this
    engine, so that what is cached goes there at the end.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.is_outlived = False
        self._scheduler, pace = scheduler, runner.pace
        self.tier = HostTier(
            runner.steps,
            scheduler.pool,
            runner.submissions,
            HostCache(runner.options.host_cache),
            lambda rows, at: pace.seconds(rows, at) if pace.known else 0.0,
            lambda pages: runner.takes(pages, scheduler.touched),
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

    def keep(self, changing: Changing, seconds: float) -> None:
        """Copy what is cached to host memory, what was used last first, for so many seconds at
        most. changing: of the engine."""
        with changing():
            self._scheduler.pool.unsaved.clear()
            self.tier.keep(seconds)

    def end(self, changing: Changing) -> None:
        """Copy to host memory what is cached, if the host memory outlives the engine."""
        if self.is_outlived:
            self.is_outlived = False
            with suppress(DeviceError):  # it is lost
                self.keep(changing, _KEEP_SECONDS)

    def reset(self) -> None:
        """Nothing comes back any more: all that wait are added as they are."""
        self.tier.forget()
        for _, job in self.waiting:
            self._scheduler.add(job.sequence)
        self.waiting.clear()
