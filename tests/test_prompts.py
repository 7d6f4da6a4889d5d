"""Rows that are given by hand in place of tokens: here those of the embedding, so that answers and
caches are those of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import answer, build_engine
from reference_models import load
from safetensors.numpy import load_file

from infer.engine.engine import Engine
from infer.engine.prompts import FIRST_GIVEN, Attachment, Prompt
from infer.engine.scheduler import Decode, Events, Prefill
from infer.engine.token_engine import Request
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.sampling import SamplingParams

CASES = ["llama", *(pytest.param(c, marks=pytest.mark.full) for c in ("gemma2", "qwen3_next"))]
STEPS = 12
PARAMS = SamplingParams(max_tokens=STEPS, temperature=0.0).resolved({})

Make = Callable[..., Engine]


@pytest.fixture
def make(device: Device, tmp_path: Path) -> Iterator[Make]:
    folders = iter(range(9))

    def made(case: str, **options: Any) -> Engine:
        folder = load(case).write_checkpoint(tmp_path / f"{case}{next(folders)}")
        return build_engine(device, folder, **{"context": 256, "max_batch": 3} | options)

    with device.scope():
        yield made


def rows_of(case: str, ids: Sequence[int], engine: Engine) -> np.ndarray:
    """The embeddings of tokens."""
    (weights,) = (
        arrays[name]
        for file in sorted(load(case).prompt_folder.glob("*.safetensors"))
        for arrays in [load_file(file)]
        for name in arrays
        if name.endswith("embed_tokens.weight")
    )
    scale = np.float32(engine.config.embedding_multiplier)
    return weights[np.asarray(ids)].astype(np.float32) * scale


def with_rows(case: str, ids: Sequence[int], engine: Engine, *parts: range) -> Prompt:
    """The prompt, with the embeddings of some parts given in place of the tokens."""
    return Prompt(
        ids,
        [Attachment(p.start, rows_of(case, ids[p.start : p.stop], engine)) for p in parts],
    )


def tokens_of(engine: Engine, prompt: Sequence[int], **own: Any) -> tuple[list[int], int]:
    """The tokens of its answer, and how many of the prompt were cached."""
    found = engine.answer(Request(Prompt.of(prompt), PARAMS, **own))
    return [step.token for step in found], found.timings.reused_tokens
