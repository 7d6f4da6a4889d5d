"""scripts/load.py and what it needs: what it counts is what a server was asked and answered."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from serving import FakeEngine, fake_service, serving

import infer
from infer.bench.measure import prompts
from infer.models.loading.shapes import SHAPES
from infer.versions import commit, versions

SCRIPTS = places.ROOT / "scripts"
LOAD = runpy.run_path(str(SCRIPTS / "load.py"))


def run(*given: str, **own: Any) -> Any:
    args = LOAD["arguments"](given)
    vars(args).update(own)
    return asyncio.run(LOAD["Load"](args).run())


def test_the_answers_are_counted() -> None:
    engine = FakeEngine()
    with serving(fake_service(engine, queue=10)) as address:
        report = run("--clients", "2", "--requests", "6", "--tokens", "3", url=f"{address}/v1")
    assert (report.whole, report.left, report.errors, report.short) == (report.requests, 0, {}, 0)
    assert report.requests in (6, 7)  # each client looks before it sends
    assert (report.tokens, report.prompt_tokens) == (3 * report.requests, 3 * report.requests)
    assert sum(tokens for *_, tokens in report.per_second) == 2 * report.requests  # with text
    sent = [asked for asked in engine.asked if len(asked) == 2]
    assert all(64 <= len(prompt) <= 512 for prompt, _ in sent)
    assert len({tuple(prompt) for prompt, _ in sent}) == report.requests
    assert {params.max_tokens for _, params, _ in (a for a in engine.asked if len(a) == 3)} == {3}
    assert (report.model, report.context, report.adapter) == ("fake", 100, "a GPU")
    assert (report.adapter_kind, report.backend, report.driver) == ("discrete", "Vulkan", "1.2")
    assert (report.versions, report.commit) == (versions(), commit())
    assert "fake, a GPU" in str(report)
    json.dumps(report.options)


def test_a_warm_up_leaves_the_prompts_of_the_benchmark() -> None:
    """Prompts are as long as those of `infer bench --clients`, so that both can be compared."""
    engine = FakeEngine()
    with serving(fake_service(engine)) as address:
        given = "--clients", "2", "--requests", "2", "--warm-up"
        report = run(*given, url=f"{address}/v1")
    lengths = [len(asked[0]) for asked in engine.asked if len(asked) == 2]
    assert len(lengths) == 2 + report.requests
    drawn = [len(ids) for ids in islice(prompts(range(100), 512), len(lengths))]
    assert lengths == drawn


def test_half_of_a_prompt_is_shared() -> None:
    engine = FakeEngine()
    with serving(fake_service(engine)) as address:
        run("--clients", "1", "--requests", "3", "--shared", "1", url=f"{address}/v1")
    first, second, third = (asked[0] for asked in engine.asked if len(asked) == 2)
    for one, two in ((first, second), (second, third)):
        half = min(len(one), len(two)) // 2
        assert one[:half] == two[:half]
        assert one[half:] != two[half:]


@pytest.mark.parametrize("way", [("--clients", "3"), ("--rate", "1000")])
def test_clients_that_leave(way: tuple[str, str]) -> None:
    with LOAD["stub"]() as url:
        report = run(*way, "--requests", "20", "--cancel", "1", url=url)
    assert report.left == report.requests >= 20
    assert (report.whole, report.errors) == (0, {})
    assert (report.model, report.versions, report.commit) == (None, {}, None)


def test_errors_are_counted_by_kind() -> None:
    with serving(fake_service(FakeEngine())) as address:
        url = f"{address}/v1"
        report = run("--rate", "100", "--requests", "4", "--model", "none", url=url)
        assert report.errors == {"404": 4}
    report = run("--rate", "100", "--requests", "2", url=url)
    assert list(report.errors.values()) == [2]
    assert "no connection" in next(iter(report.errors))
    assert (report.ttft_seconds, report.tps) == (None, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_watched() -> None:
    sample = LOAD["sample"](os.getpid(), 0.0)
    assert sample.memory > 10 << 20
    assert sample.threads >= 1
    assert sample.files >= sample.sockets


@pytest.mark.full
def test_a_folder_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES["llama-3.2-1b"] | {
        "vocab_size": 2100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    monkeypatch.setitem(SHAPES, "tiny", config)
    make = runpy.run_path(str(SCRIPTS / "make_shape.py"))
    make["write"]("tiny", tmp_path / "tiny")
    with infer.load(tmp_path / "tiny", max_batch=1) as llm:
        assert not llm.tokenizer.eos_token_ids
        assert llm.decode([2099]) == "<|2099|>"
        logits = llm.logits([1, 2, 3])
        assert logits.shape == (3, 2100)
        assert np.isfinite(logits).all()
        assert llm.generate([5, 6], max_tokens=30).finish_reason == "length"
    with pytest.raises(infer.RequestError, match="is there already"):
        make["write"]("tiny", tmp_path / "tiny")
    values = [(tmp_path / "tiny" / "model.safetensors").read_bytes()]
    for seed in (0, 1):
        make["write"]("tiny", tmp_path / f"{seed}", 1, seed)
        values.append((tmp_path / f"{seed}" / "model.safetensors").read_bytes())
    assert values[0] == values[1] != values[2]
    hybrid = make["first_layers"]("qwen3-next-80b-a3b", 3)
    assert len(hybrid.get("layer_types", "abc")) == hybrid["num_hidden_layers"] == 3
    with pytest.raises(infer.RequestError, match="tiny has 1 layers, of which 2 cannot"):
        make["write"]("tiny", tmp_path / "more", 2)
