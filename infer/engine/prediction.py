"""Drafts by the model's own layer that predicts further tokens (`infer.models.blocks.mtp`).

All steps of the model compute the layer's keys and values beside their own. So they exist wherever
the model's do, and the layer is never behind. A round begins from the hidden state before the last
token, which the step that verified the previous round has kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infer.engine import scheduler
from infer.engine.draft import Drafting, DraftModel, Known, Loaded
from infer.engine.options import EngineOptions
from infer.engine.steps import Steps
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import Copy, Part, Recording, StepQueue
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.kernels.state.step import pack_drafting
from infer.models.blocks.mtp import Predictor
from infer.progress import size


def with_shared(
    own: Mapping[str, GpuTensor], weights: Mapping[str, GpuTensor]
) -> dict[str, GpuTensor]:
    """The weights of the layer, and those that it shares with its model."""
    shared = {name: weights[name] for name in Predictor.shared if name in weights}
    return {**own, **shared}


class Prediction(DraftModel):
    """The steps of that layer. It needs no account of its own of what is computed: the model has
    one."""

    def __init__(
        self, device: Device, own: Loaded, options: EngineOptions, steps: Steps, sampler: Sampler
    ) -> None:
        assert isinstance(own.model, Predictor)
        assert steps.last_hidden is not None
        bound = replace(own, model=own.model.of(steps.last_hidden))
        super().__init__(device, bound, options, steps, sampler)

    def __str__(self) -> str:
        own = [w.nbytes for name, w in self._own.weights.items() if name not in Predictor.shared]
        return f"the model's own layer, {size(sum(own))}"

    def _of(self, steps: Steps, options: EngineOptions) -> dict[str, Any]:
        return {"follows": steps}

    def begin(
        self, sequence: scheduler.Sequence, computed: int, copy: tuple[int, int] | None
    ) -> None:
        pass

    def copies(self, page: int, to: int, positions: int) -> list[Copy]:
        return []

    def follow(self, queue: StepQueue, known: Sequence[Known]) -> None:
        pass

    def accepted(self, sequence: scheduler.Sequence, drafted: int, right: int) -> None:
        pass

    def recordings(self, prompt_tokens: int, chain: SamplerChain) -> list[Recording]:
        parts = [*self.first(1, chain, 1, behind=False), *self.others(1, 2, chain, 1)]
        return [part.recording for part in parts]

    def first(
        self, sequences: int, chain: SamplerChain, kv_len: int, behind: bool
    ) -> tuple[Part, Part]:
        """It is never `behind`."""
        return super().first(sequences, chain, kv_len, behind=False)

    @property
    def ways(self) -> tuple[bool, ...]:
        return (False,)

    def begin_round(self, queue: StepQueue, drafting: Sequence[Drafting], sequences: int) -> bool:
        rows = []
        for each in drafting:
            tokens = each.sequence.tokens
            assert not each.forced  # of what has to come it has no hidden state
            rows.append((0, tokens[-1], len(tokens) - 1, each.slot, 0, each.count, each.place))
        self.device.write(self.steps.step, pack_drafting(rows, sequences, behind=False))
        return False
