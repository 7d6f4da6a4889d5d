"""What the cache has of a prompt is saved in a file, and prompts go on from it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import STEPS, Agents, agents_of
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from infer.engine.engine import Engine
from infer.kernels.errors import RequestError
from infer.kernels.gpu.device import Device
from infer.sampling import SamplingParams

CASES = [
    "lfm2",
    "gemma3_text",
    *(pytest.param(c, marks=pytest.mark.full) for c in ("llama", "qwen3_next")),
]


def saved(engine: Engine, path: Path, ids: list[int], **own: Any) -> int:
    (length,) = engine.save_cache(str(path), ids, **own)
    return length


def loaded(engine: Engine, path: Path, **own: Any) -> int:
    (length,) = engine.load_cache(str(path), **own)
    return length


@pytest.fixture(params=CASES)
def agents(request: pytest.FixtureRequest, device: Device, tmp_path: Path) -> Iterator[Agents]:
    yield from agents_of(request.param, device, tmp_path, 2)


def test_prompts_go_on_from_a_file(agents: Agents, tmp_path: Path) -> None:
    """In another engine of the same model, and in the same one once its cache is empty."""
    path, prompt = tmp_path / "prompt.cache", agents.text(300)
    length = saved(agents.engine, path, prompt)
    assert 300 - 8 <= length <= 300
    assert [file.name for file in tmp_path.glob("*.cache*")] == ["prompt.cache"]
    question = [*prompt, *agents.text(20)]
    (expected,) = agents.ask_at_once([[question]])
    for engine in (agents.other, agents.engine):
        engine.forget()
        assert loaded(engine, path) == length
        params = SamplingParams(max_tokens=STEPS).resolved({})
        answer = engine.generate(question, params)
        assert [step.token for step in answer] == expected[:-1]
        assert answer.timings.reused_tokens == length
        assert loaded(engine, path) == length  # what is there already
        assert engine.pool.stats.in_use == 0
    agents.other.forget()


def test_a_salt_hides_what_was_loaded(agents: Agents, tmp_path: Path) -> None:
    path, prompt = tmp_path / "prompt.cache", agents.text(200)
    saved(agents.engine, path, prompt, cache_salt="a")
    agents.engine.forget()
    loaded(agents.engine, path, cache_salt="b")
    params = SamplingParams(max_tokens=1).resolved({})
    for salt, found in ((None, False), ("a", False), ("b", True)):
        answer = agents.engine.generate(prompt, params, cache_salt=salt)
        assert len(list(answer)) == 1
        assert (answer.timings.reused_tokens > 100) == found
    agents.ask(agents.text(20))


def changed(path: Path, **arrays: Any) -> None:
    with safe_open(path, "numpy") as file:
        about = file.metadata()
    save_file(load_file(path) | arrays, path, about)


OTHERS: list[tuple[str, dict[str, Any], str | None]] = [
    ("lfm2", {"kv_dtype": "f16"}, r"another kv_dtype \(f32; here it is f16\)"),
    ("llama", {}, "saved with another model, or other dtypes of weights"),
    ("lfm2", {"context": 128}, "128"),
    ("lfm2", {"context": 256, "cache_positions": 256}, None),
]


def test_what_does_not_fit_is_refused(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "prompt.cache"
    for agents in agents_of("lfm2", device, tmp_path, 1):
        saved(agents.engine, path, agents.text(200))
        agents.ask(agents.text(20))
    for i, (case, own, message) in enumerate(OTHERS):
        for agents in agents_of(case, device, tmp_path / f"{i}", 1, **own):
            if message is None:
                assert loaded(agents.engine, path) > 100
            else:
                with pytest.raises(RequestError, match=message):
                    loaded(agents.engine, path)
            agents.ask(agents.text(20))


def test_bad_files_are_told(device: Device, tmp_path: Path) -> None:
    for agents in agents_of("lfm2", device, tmp_path, 1):
        engine, path = agents.engine, tmp_path / "prompt.cache"
        with pytest.raises(RequestError, match="cannot be read from"):
            loaded(engine, path)
        path.write_bytes(b"nothing of the kind")
        with pytest.raises(RequestError, match="cannot be read from"):
            loaded(engine, path)
        save_file({"tokens": np.zeros(3, np.uint32)}, path)
        with pytest.raises(RequestError, match="is no cache that this version of infer has saved"):
            loaded(engine, path)
        with pytest.raises(RequestError, match="cannot be saved in"):
            saved(engine, tmp_path / "nowhere" / "prompt.cache", agents.text(100))
        with pytest.raises(RequestError, match="Nothing can be saved of this prompt"):
            saved(engine, path, agents.text(2))
        prompt = agents.text(200)
        for arrays in (
            {"state": np.zeros(4, np.uint8)},
            {"pages": np.zeros((2, 16), np.uint8)},
            {"tokens": np.zeros(0, np.uint32)},
            {"windows": np.zeros((1, 16), np.uint8)},
        ):
            saved(engine, path, prompt)
            changed(path, **arrays)
            with pytest.raises(RequestError, match="damaged"):
                loaded(engine, path)
        agents.ask(agents.text(20))
