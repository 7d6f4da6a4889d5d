"""The recordings of each kind of step, with the kernels that sample its tokens."""

from __future__ import annotations

from typing import Any

from infer.engine.steps import Steps
from infer.kernels.gpu.record import Recording
from infer.kernels.state.sampler import Sampler, SamplerChain


class Recordings:
    """Each recording is made when it is first needed, and kept."""

    def __init__(self, steps: Steps, sampler: Sampler) -> None:
        self._steps, self._sampler = steps, sampler
        self._made: dict[tuple[Any, ...], Recording] = {}

    def clear(self) -> None:
        """Make all of them anew, when they are next needed."""
        self._made.clear()

    def __len__(self) -> int:
        return len(self._made)

    def of(
        self,
        kind: str,
        head: bool,
        chain: SamplerChain | None,
        by_row: bool = False,
        *,
        joins: bool = False,
        body: bool = True,
        drafts: bool = False,
        unknown: bool = False,
    ) -> Recording:
        """by_row: rows have adapters of their own. joins: the step first takes its rows from the
        table of sequences. drafts: rows may hold drafted tokens. unknown: the host does not know
        these tokens."""
        key = (kind, by_row, head, chain, joins, body, drafts, unknown)
        if key not in self._made:
            plan = self._steps.plan(kind, by_row)
            dispatches = [self._sampler.step_rows] if joins else []
            dispatches += [*(plan.body if body else ()), *(plan.head if head else ())]
            if chain is not None:
                gather = self._steps.gathers(kind)
                dispatches += self._sampler.dispatches(chain, gather, drafts, unknown)
            self._made[key] = Recording(dispatches)
        return self._made[key]
