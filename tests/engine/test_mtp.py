"""The layer of a checkpoint that predicts further tokens, as the draft: it says what torch says,
and answers are those without."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from engines import build_engine
from marks import others_full
from numpy.typing import NDArray
from reference_models import TOLERANCE, load, relative_error
from safetensors import safe_open
from safetensors.numpy import save_file
from test_draft import drafts_of, same
from test_speculation import WAYS, params_of, plainly, prompts_of, run
from test_structured import masked

import infer
from infer.engine.engine import Engine
from infer.hub import resolve
from infer.inspection import inspect_model
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import run as run_dispatches
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.step import pack_drafting, pack_step
from infer.models.loading.checkpoint import INDEX, SINGLE

DATA = places.DATA / "mtp"  # of scripts/make_mtp_references.py
CASES = sorted(folder.name for folder in DATA.iterdir())


def write_checkpoint(case: str, folder: Path) -> Path:
    """A model with such a layer in a file of its own."""
    load(case).write_checkpoint(folder, "transformers5")
    (folder / SINGLE).rename(folder / "rest.safetensors")
    shutil.copyfile(DATA / case / "mtp.safetensors", folder / "mtp.safetensors")
    files = {name: file.name for file in folder.glob("*.safetensors") for name in shapes_of(file)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, "np") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in [*opened.keys()]}


def random_tensors(case: str, vocab: int) -> dict[str, NDArray[np.float32]]:
    """Others of the same shapes, but for so many tokens."""
    rng, found = np.random.default_rng(0), dict[str, NDArray[np.float32]]()
    files = DATA / case / "mtp.safetensors", DATA.parent / "models" / case / SINGLE
    for name, shape in (item for file in files for item in shapes_of(file).items()):
        own = (
            (vocab, *shape[1:])
            if name.endswith(("embed_tokens.weight", "lm_head.weight"))
            else shape
        )
        found[name] = rng.normal(0, own[-1] ** -0.5, own).astype(np.float32)
    return found


def engine_with(device: Device, folder: Path, **options: Any) -> Engine:
    return build_engine(device, folder, predicts=True, **{"speculate": "draft"} | options)


def prefill(engine: Engine, ids: Sequence[int]) -> None:
    for start, rows in engine.runner.chunks(len(ids)):
        engine.device.write(engine.runner.steps.step, pack_step(ids[start : start + rows], start))
        plan = engine.runner.steps.plan(engine.runner.kinds.prefill(rows))
        run_dispatches(engine.device, plan.body, rows, start + rows)


def draft(engine: Engine, token: int, position: int) -> NDArray[np.float32]:
    (steps,) = engine.runner.drafter.steps
    engine.device.write(
        steps.step, pack_drafting([(0, token, position, 0, 0, 1, 0)], 1, behind=False)
    )
    plan = steps.plan(steps.kinds.decode)
    run_dispatches(engine.device, [*plan.body, *plan.head], 1, position + 1)
    return engine.device.read(steps.logits).view(np.float32)[: engine.vocab_size].copy()


@pytest.mark.parametrize("case", CASES)
def test_logits(device: Device, case: str, tmp_path: Path) -> None:
    folder, ids = write_checkpoint(case, tmp_path / case), load(case).prompt_ids.tolist()
    with np.load(DATA / case / "reference.npz") as arrays:
        reference = dict(arrays)
    with device.scope():
        engine = engine_with(device, folder, prefill_chunk=16)
        with engine.alone():
            prefill(engine, ids)
            for i in range(1, len(reference["logits"]) + 1):  # each takes a hidden state's place
                logits = draft(engine, ids[-i], len(ids) - i)
                assert relative_error(logits, reference["logits"][-i]) <= TOLERANCE
            prefill(engine, ids)
            tokens, next_logits = reference["ids"].tolist(), reference["next_logits"]
            for i, (token, expected) in enumerate(zip(tokens, next_logits, strict=True)):
                logits = draft(engine, token, len(ids) + i)  # from what it gave itself
                assert relative_error(logits, expected) <= TOLERANCE


@pytest.mark.live
@pytest.mark.parametrize("case", CASES)
def test_torch_still_says_so(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    scripts = places.ROOT / "scripts"
    monkeypatch.syspath_prepend(scripts)  # it imports another one
    _, found = runpy.run_path(str(scripts / "make_mtp_references.py"))["reference"](case)
    with np.load(DATA / case / "reference.npz") as arrays:
        for name, stored in arrays.items():
            assert relative_error(found[name], stored) <= TOLERANCE


# Answers


@pytest.fixture(scope="module")
def built(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """The engine of a checkpoint with such a layer."""
    made: dict[tuple[Any, ...], Engine] = {}

    def build(case: str, **options: Any) -> Engine:
        key = case, *sorted(options.items())
        if key not in made:
            folder = write_checkpoint(case, tmp_path_factory.mktemp("mtp") / case)
            made[key] = engine_with(own_device, folder, **{"max_batch": 4} | options)
        made[key].forget()
        return made[key]

    return build


@others_full("case", CASES, [])
def test_answers_are_those_without_drafts(built: Callable[..., Engine], case: str) -> None:
    engine, prompts = built(case), prompts_of(case)
    params = [params_of(way, logprobs=2) for way in [*WAYS, *WAYS]]
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    same(found, expected)
    assert drafts_of(found)[0] > 20
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


COUNT = 64  # tokens of a model that counts


@pytest.fixture(scope="module")
def counting(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """It says the number after the last token's; its layer that after the hidden state's, and one
    more: what of all its rows has the hidden state of another row drafts wrong tokens."""
    folder = tmp_path_factory.mktemp("mtp") / "counts"
    load("glm4_moe").write_checkpoint(folder, "transformers5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": COUNT}))
    tensors = random_tensors("glm4_moe", COUNT)
    one, after = np.eye(COUNT, dtype=np.float32), np.roll(np.eye(COUNT, dtype=np.float32), 1, 0)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] = np.zeros_like(value)
        elif "norm" in name:
            tensors[name] = np.ones_like(value)
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = one
        elif name.endswith("lm_head.weight"):
            tensors[name] = after
        elif name.endswith("eh_proj.weight"):
            tensors[name] = np.hstack([0 * one, after])
    save_file(tensors, folder / SINGLE)
    return engine_with(own_device, folder, max_batch=4, context=4 * PAGE, prefill_chunk=32)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_each_draft_is_from_the_hidden_state_before_it(counting: Engine, way: str) -> None:
    """Alone and in a batch, over chunks and pages, and from what is cached, whole pages and a part
    of one."""
    counting.forget()
    params = params_of(way, max_tokens=40)
    prompts = [[5, 6, 7], [(3 + i) % COUNT for i in range(PAGE + 9)], [9]]
    prompts += [[*prompts[1], *[(12 + i) % COUNT for i in range(PAGE)]], prompts[1][:20]]
    found = run(counting, prompts[:1], params)
    found += run(counting, prompts[1:3], params)
    found += run(counting, prompts[3:], params)
    for prompt, own in zip(prompts, found, strict=True):
        assert own.ids == [(prompt[-1] + 1 + i) % COUNT for i in range(40)]
    reused = [own.answer.timings.reused_tokens for own in found if own.answer is not None]
    assert reused[3] > PAGE
    assert 0 < reused[4] < PAGE
    drafted, right = drafts_of(found)
    assert right == drafted > 120


@others_full("case", CASES, ["glm4_moe", "qwen3_next"])
def test_keys_are_those_of_a_prompt_that_is_not_cached(
    built: Callable[..., Engine], case: str
) -> None:
    """Where some of it is, the hidden state before the rest is computed again, or was saved."""
    engine, ids = built(case), load(case).prompt_ids.tolist()

    def keys(prompt: Sequence[int]) -> tuple[NDArray[Any], int]:
        answer = engine.generate(prompt, params_of("greedy", max_tokens=4))
        next(answer)
        cache = engine.runner.caches.predicted
        assert cache is not None
        slots = np.array([p * PAGE + np.arange(PAGE) for p in answer.sequence.pages]).reshape(-1)
        found = engine.device.read(cache.keys).view(np.float32).reshape(cache.slots, -1)
        answer.close()
        engine.settle()
        return found[slots[: len(prompt)]].copy(), answer.timings.reused_tokens

    prompt = [*ids, *ids[5:], 9, 8, 7, *ids[:15]]
    expected, reused = keys(prompt)
    assert reused == 0
    engine.forget()
    keys(prompt[: len(prompt) - 9])
    found, reused = keys(prompt)
    assert reused > PAGE
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "q8"},
        {"ahead": 1},
        {"raw": False},
        {"fuse": False},
        {"ahead": 3},
        {"invariant": True},
        {"max_batch": 1},
    ],
    ids=str,
)
def test_other_engines(built: Callable[..., Engine], options: dict[str, Any]) -> None:
    engine, prompts = built("glm4_moe", **options), prompts_of("glm4_moe")[:3]
    params = params_of("sampled", logprobs=0)
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    same(found, expected)
    assert drafts_of(found)[0] > 20
    if "invariant" in options:
        assert [own.logprobs for own in found] == [own.logprobs for own in expected]


@pytest.mark.full
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_next"])
def test_few_pages(built: Callable[..., Engine], case: str) -> None:
    """Answers give their pages back, and begin again, in the middle of drafts."""
    own = {"max_batch": 3, "context": 3 * PAGE, "cache_positions": 5 * PAGE}
    engine, ids = built(case, **own), prompts_of(case)[0]
    prompts = [ids, ids[3:], ids[:20]]
    params = params_of("sampled", max_tokens=3 * PAGE - len(ids) - 1)
    expected = plainly(engine, prompts, params)
    before = engine.scheduler.preemptions
    found = run(engine, prompts, params)
    same(found, expected)
    assert engine.scheduler.preemptions > before


@pytest.mark.full
def test_neighbours_of_other_kinds(counting: Engine) -> None:
    """Answers with drafts go on from positions that an answer without drafts has computed."""
    counting.forget()
    params = params_of("greedy", max_tokens=12)
    held = masked(counting, [3, 4, 5], 12, **WAYS["greedy"])
    chosen = counting.generate([7, 8], params, logits_processor=lambda ids, scores: scores)
    (found,) = run(counting, [[20, 21]], params)
    assert [step.token for step in chosen] == [*range(9, 21)]
    ids = [step.token for step in held]
    drafted, right = drafts_of([found])
    assert right == drafted > 0
    (follow,) = run(counting, [[3, 4, 5, *ids]], params)
    assert follow.ids == [(ids[-1] + 1 + i) % COUNT for i in range(12)]
    drafted, right = drafts_of([follow])
    assert right == drafted > 0


# From a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with such a layer and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("mtp") / "predicts"
    shutil.copytree(resolve("demo").path, folder, ignore=shutil.ignore_patterns("draft"))
    config = json.loads((DATA.parent / "models" / "glm4_moe" / "config.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    save_file(random_tensors("glm4_moe", size), folder / SINGLE)
    return folder


@pytest.mark.usefixtures("same_kernels")
def test_it_is_read_where_it_drafts(folder: Path) -> None:
    def load_and_ask(**options: Any) -> tuple[str, int, int]:
        with infer.load(folder, context=64, max_batch=1, **options) as llm:
            result = llm.generate("Once upon", max_tokens=8, temperature=0.0)
            memory = llm.engine.stats().memory.allocated
            return result.text, result.timings.drafted_tokens, memory

    off, mtp = load_and_ask(), load_and_ask(speculate="mtp")
    assert off[0] == mtp[0]
    assert off[1] == 0 < mtp[1]
    without = load_and_ask(speculate="lookup")[2]
    assert without < mtp[2]
    counted = {
        way: inspect_model(str(folder), context=64, speculate=way) for way in ("lookup", "mtp")
    }
    assert counted["lookup"].draft is None
    assert counted["mtp"].draft == "its own layer"
    added = counted["mtp"].total_bytes - counted["lookup"].total_bytes
    assert added == pytest.approx(mtp[2] - without, rel=0.1)


def test_what_has_no_such_layer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="demo has no layer that predicts further tokens"):
        infer.load("demo", speculate="mtp")
    with pytest.raises(UnsupportedError, match="demo has no layer that predicts further tokens"):
        inspect_model("demo", speculate="mtp")
    with pytest.raises(RequestError, match='speculate="mtp" is given, and a draft model'):
        infer.load("demo", speculate="mtp", draft="demo-draft")
