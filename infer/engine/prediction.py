"""Drafts by the model's own layer that predicts further tokens (`infer.models.blocks.mtp`).

All steps of the model compute the layer's keys and values beside their own. So they exist wherever
the model's do, and the layer is never behind. A round begins from the hidden state before the last
token, which the step that verified the previous round has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infer.engine.draft import ModelDrafter
from infer.engine.drafter import Drafting
from infer.engine.kinds import Kind
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded, Steps
from infer.kernels.gpu.record import StepQueue
from infer.kernels.state.sampler import Sampler
from infer.kernels.state.step import pack_drafting
from infer.models.blocks.mtp import Predictor
from infer.progress import size


def with_shared(own: Loaded, model: Loaded) -> Loaded:
    """The layer, with the weights that it shares with its model besides its own."""
    shared = {name: model.weights[name] for name in Predictor.shared if name in model.weights}
    return replace(own, weights={**own.weights, **shared})


class Prediction(ModelDrafter):
    """The steps of that layer. It needs no account of its own of what is computed: the model has
    one, and it is never `behind`."""

    ways = (False,)

    def __init__(
        self, own: Loaded, options: EngineOptions, target: Steps, sampler: Sampler
    ) -> None:
        """own: the layer, `with_shared`. target, sampler: of its model."""
        assert isinstance(own.model, Predictor)
        assert target.caches.last_hidden is not None
        bound = replace(own, model=own.model.of(target.caches.last_hidden))
        steps = Steps(target.device, bound, options, follows=target)
        super().__init__(bound, steps, target, sampler)

    def __str__(self) -> str:
        own = [w.nbytes for name, w in self.own.weights.items() if name not in Predictor.shared]
        return f"the model's own layer, {size(sum(own))}"

    def _kind(self, rows: int) -> Kind:
        return self._steps.kinds.batch(rows)

    def begin_round(self, queue: StepQueue, drafting: Sequence[Drafting], sequences: int) -> bool:
        rows = []
        for each in drafting:
            tokens = each.sequence.tokens
            assert not each.forced  # of what has to come it has no hidden state
            rows.append((0, tokens[-1], len(tokens) - 1, each.slot, 0, each.count, each.place))
        self.device.write(self._steps.step, pack_drafting(rows, sequences, behind=False))
        return False
