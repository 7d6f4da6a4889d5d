"""Engines on the stored reference models, which have no tokenizer, and what they answer; devices
that share their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.native import NativeDevice
from infer.kernels.state.kv_cache import PAGE
from infer.models import open_model
from infer.models.loading.load import load_weights
from infer.models.loading.lora import Lora, Loras
from infer.models.loading.plan import plan_weights
from infer.sampling import SamplingParams

EngineOf = Callable[..., Engine]
"""The fixture `engine_of`."""

Compiled = dict[tuple[str, Settings], tuple[NativeDevice, Any, Any]]
"""The native device, the pipelines and the layouts of each adapter and setting: the fixture
`compiled`."""


@contextmanager
def sharing(compiled: Compiled) -> Iterator[None]:
    """Devices that are opened meanwhile are new but for their native device, and what is compiled
    on it."""
    start = Device.__init__

    def init(self: Device, adapter: AdapterInfo, settings: Settings | None = None) -> None:
        start(self, adapter, settings)
        own = self.native, self._pipelines, self._layouts
        key = f"{adapter.webgpu} {adapter}", self.settings
        self.native, self._pipelines, self._layouts = compiled.setdefault(key, own)
        if self.native is not own[0]:
            own[0].handle.destroy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "__init__", init)
        yield


def build_engine(
    device: Device,
    folder: Path,
    *,
    dtype: str | None = None,
    adapter: Path | None = None,
    adapters: Mapping[str, Path] | None = None,
    draft: Path | None = None,
    predicts: bool = False,
    **options: Any,
) -> Engine:
    """The model in a folder, with a cache in f32 unless the options (of EngineOptions) differ.
    dtype, adapter, adapters, draft: as for `load`. predicts: its own layer drafts that predicts
    further tokens."""
    model, checkpoint = open_model(folder)
    plan = plan_weights(model.weights(), checkpoint, dtype, model.ignorable)
    loras = Loras.fit(
        model,
        plan,
        always=None if adapter is None else Lora.open(adapter, adapter.name),
        named={name: Lora.open(path, path.name) for name, path in (adapters or {}).items()},
    )
    weights = load_weights(device, plan.joined(loras.names), changes=loras.merged)
    beside = loras.allocate(device, weights)
    loras.fill(device, weights, beside)
    own: dict[str, Any] = {"context": 128, "kv_dtype": "f32"} | options
    if own["context"] <= 128:  # kernels know the size: the same for any number of sequences
        own = {"cache_positions": 17 * PAGE} | own
    drafts = None
    if predicts:
        layer = model.predictor
        assert layer is not None
        plan = plan_weights(layer.weights(), checkpoint, dtype, lambda name: True)
        drafts = Loaded(layer, load_weights(device, plan.joined()))
    if draft is not None:
        smaller, checkpoint = open_model(draft)
        plan = plan_weights(smaller.weights(), checkpoint, None, smaller.ignorable)
        drafts = Loaded(smaller, load_weights(device, plan.joined()))
    return Engine(device, Loaded(model, weights, beside), EngineOptions(**own), drafts)


@dataclass(frozen=True)
class Answer:
    """token_ids: the tokens generated; logits: float32 [tokens, vocab], what each came from."""

    token_ids: list[int]
    logits: NDArray[np.float32]


def answer(
    engine: Engine,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    adapter: str | None = None,
    **sampling: Any,
) -> Answer:
    """Returns the answer of an engine, greedy unless `sampling` (of SamplingParams) differs."""
    params = SamplingParams(max_tokens=max_tokens, **sampling).resolved({})
    token_ids, rows = [], []
    for step in engine.generate(prompt_ids, params, with_logits=True, adapter=adapter):
        assert step.logits is not None
        token_ids.append(step.token)
        rows.append(step.logits)
    return Answer(token_ids, np.stack(rows))


def scores(engine: Engine, ids: Sequence[int], adapter: str | None = None) -> NDArray[np.float32]:
    """The logits after every id, float32 [ids, vocab]."""
    return np.concatenate(list(engine.logits(ids, adapter)))
