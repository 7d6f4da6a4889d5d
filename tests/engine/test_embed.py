"""Embeddings: the hidden states that transformers has, pooled, whatever else is generated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import EngineOf, build_engine
from numpy.typing import NDArray
from reference_models import (
    DATA,
    cases,
    hidden_cases,
    load,
    load_hidden,
    relative_error,
)
from safetensors.numpy import load_file, save_file

import infer
from infer import LLM
from infer.embedding import EmbeddingConfig, read_embedding_config
from infer.engine.engine import Engine, Events
from infer.hub import DEMO, resolve
from infer.kernels.errors import CheckpointError, ModelError, RequestError
from infer.kernels.gpu.device import Device
from infer.sampling import SamplingParams

TOLERANCE = 1e-5
CHUNK = 16
# Lengths of the beginnings of a prompt: one token, around the ends of chunks, all.
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 45)
DEMO_FOLDER = resolve(DEMO).path


@pytest.fixture(scope="module")
def engine_of(engine_of: EngineOf) -> EngineOf:
    """One whose steps have CHUNK rows at most."""
    return partial(engine_of, prefill_chunk=CHUNK)


def pooled(hidden: NDArray[np.float32], pooling: str) -> NDArray[np.float64]:
    return hidden.astype(np.float64).mean(0) if pooling == "mean" else hidden[-1].astype(np.float64)


def prefixes(case: str) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Texts that begin alike, and their hidden states: no token sees what comes after it."""
    ids, hidden = load(case).prompt_ids.tolist(), load_hidden(case)
    return [ids[:n] for n in LENGTHS], [hidden[:n] for n in LENGTHS]


def is_idle(engine: Engine) -> bool:
    return engine.scheduler.idle and not engine.jobs.of and not engine.pool.stats.in_use


# Against transformers


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("case", hidden_cases())
def test_hidden_states_are_those_of_transformers(
    engine_of: EngineOf, case: str, pooling: str
) -> None:
    """Texts of all lengths are embedded, several at once. Nothing of one is reused for the next."""
    engine = engine_of(case, max_batch=4)
    texts, hidden = prefixes(case)
    found = list(engine.embed(texts, pooling))
    for actual, own in zip(found, hidden, strict=True):
        assert relative_error(actual, pooled(own, pooling)) < TOLERANCE
    assert is_idle(engine)
    stats = engine.pool.stats
    assert (stats.cached, stats.hits, stats.lookups) == (0, 0, 0)


@pytest.mark.live
@pytest.mark.parametrize("case", cases())
def test_every_architecture_agrees_with_transformers(
    own_device: Device, case: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / case, "transformers5")
    config = transformers.AutoConfig.from_pretrained(folder)
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    sees = config.model_type in kinds
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    # Within the positions for which rotations do not depend on how long a text is.
    ids = reference.prompt_ids[:24].tolist()
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    engine = build_engine(own_device, folder, prefill_chunk=CHUNK)
    for pooling in ("mean", "last"):
        (found,) = engine.embed([ids], pooling)
        assert relative_error(found, pooled(states, pooling)) < TOLERANCE


# Beside others


@pytest.mark.parametrize("case", hidden_cases())
def test_texts_beside_a_stream(engine_of: EngineOf, case: str) -> None:
    """Texts beside a stream, two of which begin as its prompt does, are what they are alone; so is
    the stream, and the cache keeps its prompt."""
    reference, engine = load(case), engine_of(case, max_batch=4)
    ids = reference.prompt_ids.tolist()
    texts, hidden = prefixes(case)
    answer = engine.generate(ids, SamplingParams(max_tokens=16).resolved({}))
    tokens = [next(answer).token]
    for i, vector in enumerate(engine.embed(texts, "mean")):
        assert relative_error(vector, pooled(hidden[i], "mean")) < TOLERANCE
        tokens.append(next(answer).token)
    tokens += [step.token for step in answer]
    assert tokens == reference.greedy_ids[:16].tolist()
    assert is_idle(engine)
    again = engine.generate(ids, SamplingParams(max_tokens=1).resolved({}))
    assert [step.token for step in again] == tokens[:1]
    assert again.timings.reused_tokens >= len(ids) - 8


@pytest.mark.parametrize("begun_again", ["prefill", "running", "reset"])
@pytest.mark.parametrize("case", hidden_cases())
def test_a_text_is_begun_again(engine_of: EngineOf, case: str, begun_again: str) -> None:
    """It gives its pages back while chunks of it are in flight, the last among them or not, or
    all that was on the GPU is forgotten."""
    engine, texts = engine_of(case, max_batch=4), [load(case).prompt_ids.tolist()]
    reads: list[str] = []

    class BeginsAgain(Events):
        def filled(self) -> None:
            (sequence,) = engine.jobs.of
            reads.append(sequence.state)
            if len(reads) == 2 and begun_again == "reset":
                engine.runner.submissions.in_flight.clear()
                engine.jobs.reset()
                engine.runner.forget()
            elif sequence.state == begun_again and "waiting" not in reads:
                engine.scheduler._preempt(sequence)
                reads.append(sequence.state)

    engine.events = BeginsAgain()
    (found,) = engine.embed(texts, "mean")
    assert len(reads) > 3
    assert relative_error(found, pooled(load_hidden(case), "mean")) < TOLERANCE
    assert is_idle(engine)


def test_an_adapter_counts(own_device: Device) -> None:
    """An adapter that is named counts as if it were merged into the weights; otherwise it does
    not."""
    folder, adapter = DATA / "llama", DATA.parent / "adapters" / "llama"
    ids = load("llama").prompt_ids.tolist()
    merged = build_engine(own_device, folder, dtype="f32", adapter=adapter)
    beside = build_engine(own_device, folder, adapters={"own": adapter})
    (expected,), (found,) = merged.embed([ids], "mean"), beside.embed([ids], "mean", "own")
    assert relative_error(found, expected) < TOLERANCE
    (plain,) = beside.embed([ids], "mean")
    assert relative_error(plain, pooled(load_hidden("llama"), "mean")) < TOLERANCE
    assert relative_error(plain, expected) > 1e-2


def test_texts_that_nobody_waits_for_any_more(engine_of: EngineOf) -> None:
    engine = engine_of("qwen3_5_text", max_batch=4)
    texts, hidden = prefixes("qwen3_5_text")
    vectors = engine.embed(texts[::-1], "last")
    next(vectors)
    vectors.close()
    (found,) = engine.embed(texts[:1], "last")
    assert relative_error(found, pooled(hidden[0], "last")) < TOLERANCE
    assert is_idle(engine)


def test_a_text_may_fill_the_context(engine_of: EngineOf) -> None:
    ids, hidden = load("llama").prompt_ids.tolist(), load_hidden("llama")
    engine = engine_of("llama", context=len(ids), cache_positions=len(ids))
    (found,) = engine.embed([ids], "last")
    assert relative_error(found, pooled(hidden, "last")) < TOLERANCE
    with pytest.raises(RequestError, match="has 46 tokens, and the context holds 45"):
        next(engine.embed([[*ids, 1]], "last"))


def test_hidden_states_that_are_not_finite(own_device: Device, tmp_path: Path) -> None:
    folder = load("llama_f32").write_checkpoint(tmp_path / "llama_f32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.inf
    save_file(tensors, folder / "model.safetensors")
    engine = build_engine(own_device, folder)
    with pytest.raises(ModelError, match="hidden states are not finite"):
        next(engine.embed([[5, 6, 7]], "mean"))
    assert is_idle(engine)


def remove_head(file: Path) -> None:
    """Names without model. in a safetensors file, and no lm_head, whatever the tensors' dtypes."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, kept = {}, b""
    for name, info in json.loads(data[8:begin]).items():
        if name.startswith("model."):
            start, end = info["data_offsets"]
            own = [len(kept), len(kept) + end - start]
            header[name.removeprefix("model.")] = info | {"data_offsets": own}
            kept += data[begin + start : begin + end]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + kept)


@pytest.mark.parametrize("case", ["llama", "llama_f32"])  # with a head of its own, and without
def test_a_model_without_a_head(own_device: Device, case: str, tmp_path: Path) -> None:
    """Embedding models are published without a head; their names do not begin with `model.`."""
    folder = load(case).write_checkpoint(tmp_path / case)
    ids = load(case).prompt_ids.tolist()
    whole = list(build_engine(own_device, folder).embed([ids], "last"))
    remove_head(folder / "model.safetensors")
    assert np.array_equal(list(build_engine(own_device, folder).embed([ids], "last")), whole)


# Embeddings by an LLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO) as llm:
        yield llm


TEXTS = ["Once upon a time", "The cat sat on the mat. " * 2, "2 + 2"]


@pytest.mark.demo
def test_a_text_and_a_list_of_texts(llm: LLM) -> None:
    """Each has length 1, unless that is not wanted."""
    found = llm.embed(TEXTS)
    assert found.shape == (3, llm.config.hidden_size)
    assert found.dtype == np.float32
    assert np.allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-6)
    assert np.allclose(llm.embed(TEXTS[1]), found[1], atol=1e-5)
    assert np.allclose(llm.embed(llm.encode(TEXTS[1])), found[1], atol=1e-5)
    whole = llm.embed(TEXTS, normalize=False)
    assert np.allclose(whole / np.linalg.norm(whole, axis=-1, keepdims=True), found, atol=1e-6)
    assert not np.allclose(llm.embed(TEXTS, pooling="last"), found, atol=1e-2)
    assert np.allclose(llm.embed(TEXTS, pooling="mean"), found, atol=1e-5)
    assert llm.embed([]).shape == (0, llm.config.hidden_size)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([[5], []], {}, "prompt is empty"),
        (["Once", 5], {}, "A prompt is text"),
        ("Once", {"pooling": "cls"}, "pooling must be mean or last, not 'cls'"),
        ("Once", {"normalize": 1}, "normalize must be true or false, not 1"),
        ("Once", {"adapter": "sql"}, "No adapter is called 'sql'"),
        (3, {}, "A prompt is text"),
        ([5] * 1025, {}, "has 1025 tokens, and the context holds 1024"),
    ],
)
def test_what_cannot_be_embedded(
    llm: LLM, texts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.embed(texts, **options)


# Poolings in files


def write_modules(folder: Path, kinds: list[str], pooling: dict[str, Any] | None) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def flags(**own: bool) -> dict[str, Any]:
    """Returns the config of a pooling as Qwen3-Embedding has it, with these flags set."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    chosen = dict.fromkeys(names, False) | own
    modes = {f"pooling_mode_{name}": value for name, value in chosen.items()}
    return {"word_embedding_dimension": 256, **modes, "include_prompt": True}


USUAL = ["models.Transformer", "models.Pooling", "models.Normalize"]


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (USUAL, flags(lasttoken=True), EmbeddingConfig("last", True)),
        (USUAL[:2], flags(lasttoken=True), EmbeddingConfig("last", False)),
        (USUAL, flags(mean_tokens=True), EmbeddingConfig("mean", True)),
        (USUAL[:2], {"pooling_mode": "mean"}, EmbeddingConfig("mean", False)),
        (USUAL, {"pooling_mode": ["lasttoken"]}, EmbeddingConfig("last", True)),
    ],
)
def test_files_say_how_to_pool(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], expected: EmbeddingConfig
) -> None:
    assert read_embedding_config(tmp_path) == EmbeddingConfig("mean", True, is_stated=False)
    write_modules(tmp_path, kinds, pooling)
    assert read_embedding_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (USUAL, flags(cls_token=True), r"the pooling \['cls_token'\], where mean_tokens and"),
        (USUAL, flags(cls_token=True, mean_tokens=True), r"\['cls_token', 'mean_tokens'\]"),
        (USUAL, flags(), r"the pooling \[\]"),
        (USUAL, {"pooling_mode": {"mean": 1}}, "the pooling {'mean': 1}"),
        (
            [*USUAL, "models.Dense"],
            flags(mean_tokens=True),
            "the modules Transformer, Pooling, Normalize, Dense, where",
        ),
        ([], None, "the modules none"),
    ],
)
def test_what_files_ask_for_in_vain(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any] | None, message: str
) -> None:
    write_modules(tmp_path, kinds, pooling)
    with pytest.raises(AssertionError, match=message):
        assert not read_embedding_config(tmp_path).refused, read_embedding_config(tmp_path).refused


@pytest.mark.parametrize("damage", ["[1", "{}", "null", "[" * 100_000])
def test_damaged_files_are_found_out(tmp_path: Path, damage: str) -> None:
    (tmp_path / "modules.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"modules\.json .* Fetch the model again"):
        read_embedding_config(tmp_path)
    write_modules(tmp_path, USUAL, None)
    with pytest.raises(CheckpointError, match=r"1_Pooling.*config\.json cannot be read"):
        read_embedding_config(tmp_path)


@pytest.mark.full
@pytest.mark.demo
def test_a_model_embeds_as_its_files_say(llm: LLM, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "demo")
    write_modules(folder, USUAL[:2], flags(lasttoken=True))
    with infer.load(folder) as last:
        expected = llm.embed(TEXTS, pooling="last", normalize=False)
        assert np.allclose(last.embed(TEXTS), expected, rtol=1e-4, atol=1e-4)
        found = last.embed(TEXTS, pooling="mean", normalize=True)
        assert np.allclose(found, llm.embed(TEXTS), atol=1e-5)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags(cls_token=True)))
    with infer.load(folder) as refusing:
        with pytest.raises(infer.UnsupportedError, match=r"cls_token.* Give embed\(\) a pooling"):
            refusing.embed("Once")
        assert refusing.embed("Once", pooling="last").shape == (llm.config.hidden_size,)
