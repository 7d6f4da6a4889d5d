"""Engines on the stored reference models, which have no tokenizer, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.engine import Engine, EngineOptions
from infer.kernels.device import Device
from infer.models import open_model
from infer.models.weights import load_weights
from infer.sampling import SamplingParams


def build_engine(device: Device, folder: Path, **options: Any) -> Engine:
    """The model in a folder, with a cache in f32 unless the options (of EngineOptions) differ."""
    model, checkpoint = open_model(folder)
    weights = load_weights(device, list(model.weights()), checkpoint, ignorable=model.ignorable)
    own: dict[str, Any] = {"context": 128, "kv_dtype": "f32"} | options
    engine = Engine(device, model, weights, EngineOptions(**own))
    engine.compile()
    return engine


@dataclass(frozen=True)
class Answer:
    """token_ids: the tokens generated; logits: float32 [tokens, vocab], what each came from."""

    token_ids: list[int]
    logits: NDArray[np.float32]


def answer(engine: Engine, prompt_ids: Sequence[int], max_tokens: int, **sampling: Any) -> Answer:
    """What an engine generates, greedily unless `sampling` (of SamplingParams) differs."""
    params = SamplingParams(max_tokens=max_tokens, **sampling).resolved({})
    token_ids, rows = [], []
    for step in engine.generate(prompt_ids, params, with_logits=True):
        assert step.logits is not None
        token_ids.append(step.token)
        rows.append(step.logits)
    return Answer(token_ids, np.stack(rows))


def scores(engine: Engine, ids: Sequence[int]) -> NDArray[np.float32]:
    """The logits after every id, float32 [ids, vocab]."""
    return np.concatenate(list(engine.score(ids)))
