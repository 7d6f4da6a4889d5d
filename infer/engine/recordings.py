"""The recordings of each kind of step, with the kernels that sample its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infer.engine.kinds import Kind
from infer.engine.steps import Steps
from infer.kernels.gpu.record import Recording
from infer.kernels.state.sampler import Sampler, SamplerChain


@dataclass(frozen=True)
class Recipe:
    """The parts that a recording has. kind: of the step. chain: the sampling at its end, if there
    is any. body, head: the parts of the step; the head computes the logits. joins: the step first
    takes its rows from the table of sequences. drafts: whether rows may hold drafted tokens, and
    whether the host knows them."""

    kind: Kind
    chain: SamplerChain | None = None
    body: bool = True
    head: bool = True
    joins: bool = False
    drafts: Literal["none", "known", "unknown"] = "none"


class Recordings:
    """Each recording is made when it is first needed, and kept."""

    def __init__(self, steps: Steps, sampler: Sampler) -> None:
        self._steps, self._sampler = steps, sampler
        self._made: dict[Recipe, Recording] = {}

    @property
    def count(self) -> int:
        """How many recordings there are."""
        return len(self._made)

    def clear(self) -> None:
        """Forget all recordings. Each is made anew when it is next needed."""
        self._made.clear()

    def of(self, recipe: Recipe) -> Recording:
        if recipe not in self._made:
            plan = self._steps.plan(recipe.kind)
            dispatches = [self._sampler.step_rows] if recipe.joins else []
            dispatches += [*(plan.body if recipe.body else ())]
            dispatches += [*(plan.head if recipe.head else ())]
            if recipe.chain is not None:
                drafts, unknown = recipe.drafts != "none", recipe.drafts == "unknown"
                gather = recipe.kind.gathers
                dispatches += self._sampler.dispatches(recipe.chain, gather, drafts, unknown)
            self._made[recipe] = Recording(dispatches)
        return self._made[recipe]
