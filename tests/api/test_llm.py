"""The API, on the model that is included: results, ends, streams, threads, memory, errors."""

from __future__ import annotations

import _thread
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import places
import pytest
import tokenizers
import wgpu
from marks import others_full
from wgpu._async import GPUPromise

import infer
import infer.engine.caches
import infer.engine.steps
import infer.llm
import infer.loading
import infer.memory
import infer.shortcuts
from infer import LLM
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.token_engine import Timings
from infer.hub import DEMO, ResolvedModel, resolve
from infer.kernels.gpu.adapters import MemoryInfo
from infer.kernels.gpu.device import Buffer, Device, DryDevice, Limits
from infer.kernels.gpu.native import library
from infer.kernels.gpu.quantize import buffer_bytes
from infer.kernels.gpu.upload import _Staging
from infer.kernels.state.kv_cache import PAGE
from infer.models.blocks.decoder import Decoder
from infer.models.loading.plan import plan_random

pytestmark = pytest.mark.demo

ROOT = places.ROOT
DEMO_FOLDER = resolve(DEMO).path
STORY = "Once upon a time"
# Its greedy answer's best tokens lead by far: rounding does not change it.
COUNT = [{"role": "user", "content": "Count from 1 to 9."}]
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO) as llm:
        yield llm


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """The demo's tokenizer by its own library alone."""
    backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(
        str(DEMO_FOLDER / "tokenizer.json")
    )
    return backend


@pytest.fixture
def no_kept_model() -> Iterator[None]:
    """Module-level generate starts, and leaves, without a model."""

    def forget() -> None:
        if infer.shortcuts._last is not None:
            infer.shortcuts._last.llm.close()
            infer.shortcuts._last = None

    forget()
    yield
    forget()


def answers(llm: LLM) -> bool:
    """Whether the model is as good as new: its answer begins as it should."""
    return llm.generate(COUNT, max_tokens=5).text == COUNTED[:5]


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called")


# Texts that somebody else has computed


def card_samples() -> list[tuple[str, str]]:
    """(prompt, answer) of the table on the model's card, which its training script has made."""
    card = (DEMO_FOLDER / "README.md").read_text(encoding="utf-8")
    table = card.partition("| prompt | answer |\n| --- | --- |\n")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines()]
    assert len(rows) > 3
    return [(prompt, answer) for prompt, answer in rows]


@pytest.mark.parametrize(("prompt", "expected"), card_samples())
def test_demo_answers_as_its_card_says(llm: LLM, prompt: str, expected: str) -> None:
    result = llm.chat(prompt)
    assert result.text == expected
    assert result.finish_reason == "stop"


def test_demo_counts(llm: LLM) -> None:
    assert llm.generate(COUNT).text == COUNTED


@pytest.mark.live
def test_demo_agrees_with_transformers() -> None:
    """The stored answers, and that they are clear enough to be compared."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    for prompt, expected in [*card_samples(), (COUNT[0]["content"], COUNTED)]:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        output = model.generate(
            ids,
            do_sample=False,
            max_new_tokens=100,
            output_logits=True,
            return_dict_in_generate=True,
        )
        text = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == expected
        logits = torch.cat(output.logits)
        best = logits.topk(2).values
        margin = ((best[:, 0] - best[:, 1]) / logits.norm(dim=1)).min()
        assert margin > (1e-2 if messages == COUNT else 1e-4)


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
@pytest.mark.skipif("INFER_TEST_MODELS" not in os.environ, reason="INFER_TEST_MODELS is not set")
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"fuse": False, "raw": False, "ahead": 1}, marks=pytest.mark.full)],
)
def test_trained_model_continues_as_its_origin_says(options: dict[str, Any]) -> None:
    folder = Path(os.environ["INFER_TEST_MODELS"]) / "stories260k"
    quoted = re.findall(r"^> (.*)$", (folder / "ORIGIN.md").read_text(encoding="utf-8"), re.M)
    expected = " ".join(quoted).split()  # the file wraps lines, at the text's own line end too
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with infer.load(folder, kv_dtype="f32", engine=options) as llm:
        prompt_ids = llm.encode(STORY)
        result = llm.generate(STORY, max_tokens=130)
        text = STORY + result.text
        assert text.split()[: len(expected)] == expected
        # Token for token: the greedy text is what its tokenizer makes of it.
        assert backend.encode(text).ids == prompt_ids + result.token_ids


# Results


def test_result_is_complete(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    result = llm.generate(STORY, max_tokens=30)
    prompt_ids = backend.encode(STORY).ids
    assert result.prompt_tokens == len(prompt_ids)
    assert result.completion_tokens == len(result.token_ids) == 30
    assert backend.decode(prompt_ids + result.token_ids) == STORY + result.text
    assert result.finish_reason == "length"
    assert result.logprobs is None
    timings = result.timings
    assert timings.reused_tokens + timings.prefilled_tokens == result.prompt_tokens
    assert timings.decoded_tokens == 29
    assert timings.prefill_seconds > 0
    assert timings.decode_seconds > 0
    assert result.prompt_tps == timings.prefilled_tokens / timings.prefill_seconds
    assert result.generation_tps == 29 / timings.decode_seconds


def test_a_result_that_has_not_begun_has_no_rates() -> None:
    assert infer.Result().prompt_tps == infer.Result().generation_tps == 0.0


@pytest.mark.parametrize(
    "prompt",
    [STORY, COUNT, [1, 33, 44], np.array([1, 33, 44]), ({"role": "user", "content": "é"},)],
    ids=["text", "messages", "ids", "array of ids", "tuple of messages"],
)
def test_every_kind_of_prompt(llm: LLM, prompt: Any) -> None:
    with llm.stream(prompt, max_tokens=12) as stream:
        chunks = list(stream)
    result = llm.generate(prompt, max_tokens=12)
    assert stream.result.token_ids == result.token_ids != []
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == result.text
    tokens = [chunk.token_id for chunk in chunks if chunk.token_id is not None]
    assert tokens == result.token_ids


def test_a_result_is_its_text(llm: LLM) -> None:
    with llm.stream(COUNT) as stream:
        assert "".join(str(chunk) for chunk in stream) == COUNTED
    assert str(stream.result) == f"{stream.result}" == COUNTED


def test_ids_are_decoded(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    text = "Once upon a time, é 猫"
    assert llm.decode(llm.encode(text)) == text
    prompt = llm.encode(COUNT)
    assert llm.decode(np.array(prompt)) == backend.decode(prompt)
    assert llm.decode(prompt, skip_special_tokens=False) == llm.tokenizer.render_chat(COUNT)
    assert [llm.decode(i) for i in prompt] == [backend.decode([i]) for i in prompt]
    assert llm.decode(i for i in ()) == ""


def test_bos_before_chats(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bos, *text = llm.encode(COUNT[0]["content"])
    bare = {"template": "{{ messages[0].content }}"}
    assert llm.encode(COUNT, **bare) == text
    monkeypatch.setattr(llm.tokenizer, "bos_before_chats", True)
    assert llm.encode(COUNT, **bare) == [bos, *text]
    assert llm.encode(COUNT) == llm.tokenizer.encode(llm.tokenizer.render_chat(COUNT))


@pytest.mark.parametrize("ids", [2048, [-1], ["a"], "text", [2.0], None])
def test_ids_that_cannot_be_decoded(llm: LLM, ids: Any) -> None:
    with pytest.raises(infer.RequestError, match="Token ids are integers from 0 to 2047, not "):
        llm.decode(ids)


def test_chat_takes_text_for_a_message(llm: LLM) -> None:
    assert llm.chat(COUNT[0]["content"]).text == llm.chat(COUNT).text == COUNTED
    assert llm.generate(COUNT[0]["content"], max_tokens=20).text != COUNTED[:20]


def test_text_is_streamed_as_it_comes(llm: LLM) -> None:
    stream = llm.stream(STORY, max_tokens=30)
    seen = ""
    for chunk in stream:
        seen += chunk.text
        assert stream.so_far.text == seen
        assert stream.so_far.finish_reason == "cancelled" or chunk.token_id is None
    assert stream.result.finish_reason == "length"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """Whatever the filters: numpy's log-softmax of the logits of every position."""
    prompt_ids = llm.encode(STORY)
    result = llm.generate(
        prompt_ids, max_tokens=12, logprobs=3, temperature=1.5, top_k=40, min_p=0.01, seed=5
    )
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    logits = llm.logits(prompt_ids + result.token_ids).astype(np.float64)
    assert logits.shape == (len(prompt_ids) + 12, llm.config.vocab_size)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    for entry, row in zip(result.logprobs, expected[len(prompt_ids) - 1 :], strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-3)  # a cache in f16
        assert [top.token_id for top in entry.top] == np.argsort(-row)[:3].tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(np.sort(row)[:-4:-1], abs=2e-3)


@pytest.mark.full
def test_scores_are_those_of_the_logits(llm: LLM) -> None:
    """By numpy's log-softmax, whether text or ids, in one chunk of positions or more."""
    long = "Once upon a time, there was a clever witch. " * 15
    assert len(llm.encode(long)) > 128
    few = [" barrel banana", ", there", llm.encode(STORY)[:3]]
    for prompt, continuations in ((STORY, few), (long + STORY, few[:1])):
        begin = len(llm.encode(prompt))
        scores = llm.score(prompt, continuations)
        for score, continuation in zip(scores, continuations, strict=True):
            if isinstance(continuation, str):
                ids = llm.encode(prompt + continuation)
                if prompt is STORY:
                    assert llm.score(ids[:begin], [ids[begin:]]) == [score]
            else:
                ids = llm.encode(prompt) + continuation
            logits = llm.logits(ids)[begin - 1 : -1].astype(np.float64)
            logprob = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            expected = logprob[np.arange(len(logprob)), ids[begin:]]
            assert score.token_logprobs == pytest.approx(expected, rel=1e-6, abs=1e-5)
            assert score.logprob == pytest.approx(expected.sum(), rel=1e-6, abs=1e-5)
            assert score.tokens == len(ids) - begin
            assert score.is_greedy == (logits.argmax(axis=1).tolist() == ids[begin:])
        assert not scores[0].is_greedy


def test_scores_come_beside_answers(llm: LLM) -> None:
    """Whose tokens, and what the cache has of them, stay what they were."""
    prompt = STORY + ", there was a clever witch. Once upon a time"
    expected = llm.generate(prompt, max_tokens=12)
    ids = llm.encode(prompt) * 8
    assert len(ids) > 128  # in more than one step
    alone = llm.prompt_logprobs(ids, 2)
    with llm.stream(prompt, max_tokens=12) as stream:
        next(stream)
        assert llm.prompt_logprobs(ids, 2) == alone
    assert stream.result.token_ids == expected.token_ids[: stream.result.completion_tokens]
    again = llm.generate(prompt, max_tokens=1)
    assert again.timings.reused_tokens == len(llm.encode(prompt)) - 1
    logits = llm.logits(ids)
    for place, token in enumerate(alone):
        row = logits[place].astype(np.float64)
        row -= np.logaddexp.reduce(row)
        assert token.token_id == ids[place + 1]
        assert token.logprob == pytest.approx(row[token.token_id], abs=1e-4)
        assert [top.token_id for top in token.top] == np.argsort(-row, kind="stable")[:2].tolist()
    assert [len(token.top) for token in llm.prompt_logprobs(ids[:3], 25)] == [25, 25]
    assert llm.prompt_logprobs(ids[:1]) == []


def test_the_greedy_answer_scores_best(llm: LLM) -> None:
    result = llm.generate(COUNT, max_tokens=6, logprobs=0)
    assert result.logprobs is not None
    prompt = llm.encode(COUNT)
    greedy, other = llm.score(prompt, [result.token_ids, result.token_ids[::-1]])
    assert greedy.is_greedy
    assert not other.is_greedy
    assert other.logprob < greedy.logprob
    expected = [token.logprob for token in result.logprobs]
    assert greedy.token_logprobs == pytest.approx(expected, abs=2e-2)  # the cache's are f16
    assert llm.score(STORY + " ", ["witch"]) == llm.score(STORY, [" witch"])
    assert llm.score(STORY, []) == []


@pytest.mark.parametrize(
    ("prompt", "continuations", "message"),
    [
        (STORY, " witch", "continuations must be a list of texts or of token ids, not ' witch'"),
        (STORY, 3, "continuations must be a list"),
        (STORY, ["", "!"], "The continuation '' has no token"),
        (STORY, [[]], r"The continuation \[\] has no token"),
        (STORY, [[10**6]], "not in the model's vocabulary"),
        ([], ["!"], "The prompt is empty"),
    ],
)
def test_continuations_that_cannot_be_scored(
    llm: LLM, prompt: Any, continuations: Any, message: str
) -> None:
    with pytest.raises(infer.RequestError, match=message):
        llm.score(prompt, continuations)


def test_stats_tell_memory_and_pages(llm: LLM) -> None:
    stats = llm.stats().memory
    assert isinstance(stats, infer.MemoryStats)
    assert stats.allocated == llm.device.memory_stats().allocated
    pages = llm.engine.options.pages
    with llm.stream(COUNT) as stream:
        next(stream)
        cache = llm.stats().cache
        assert cache.in_use >= 1
        assert cache.in_use + cache.cached + cache.free == pages
    assert llm.stats().cache == llm.engine.pool.stats


def test_logprobs_come_with_the_chunks(llm: LLM) -> None:
    with llm.stream(COUNT, logprobs=0, max_tokens=5) as stream:
        own = [chunk.logprob for chunk in stream if chunk.token_id is not None]
    assert own == stream.result.logprobs
    assert all(entry is not None and entry.top == () for entry in own)


def test_logprobs_have_the_text_of_tokens(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    result = llm.generate(COUNT, logprobs=2, max_tokens=12)
    assert result.logprobs is not None
    assert "".join(entry.text for entry in result.logprobs) == result.text
    end = llm.generate(COUNT, logprobs=1, stop=[], logit_bias={}, max_tokens=200).logprobs
    assert end is not None
    for entry in (*result.logprobs, *end):
        for top in entry.top:
            vocabulary = backend.id_to_token(top.token_id).replace("Ġ", " ")
            assert top.text == vocabulary.replace("Ċ", "\n")


# Where it ends


def test_a_stop_string_spans_tokens(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    stop = "5, 6, 7"
    assert len(backend.encode(stop).ids) > 4
    with llm.stream(COUNT, stop=[stop, "nowhere"]) as stream:
        seen = "".join(chunk.text for chunk in stream)
    result = stream.result
    assert seen == result.text == "1, 2, 3, 4, "
    assert result.finish_reason == "stop"
    # The tokens that made the stop string are among those generated.
    prompt_ids = llm.encode(COUNT)
    assert backend.decode(prompt_ids + result.token_ids).endswith(result.text + stop)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("1", ""),
        (["8, 9", ", 8"], "1, 2, 3, 4, 5, 6, 7"),
        (["6, 7, 8, 10", "9."], COUNTED[:-2]),  # what only looked like a stop string comes out
        ("9.!", COUNTED),
    ],
)
def test_the_text_ends_before_a_stop_string(llm: LLM, stop: Any, expected: str) -> None:
    result = llm.generate(COUNT, stop=stop)
    assert result.text == expected
    assert result.finish_reason == "stop"


def test_every_end_of_turn_id_ends_it(llm: LLM) -> None:
    ids = json.loads((DEMO_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert len(ids) > 1
    for i in ids:
        result = llm.generate(STORY, logit_bias={i: 100}, max_tokens=5)
        assert (result.text, result.token_ids, result.finish_reason) == ("", [], "stop")


@pytest.mark.usefixtures("same_kernels")
def test_max_tokens_and_the_end_of_the_context(llm: LLM) -> None:
    assert llm.generate(STORY, max_tokens=1).completion_tokens == 1
    with infer.load(DEMO, context=20) as small:
        assert small.context == 20
        result = small.generate(STORY)
    assert result.finish_reason == "length"
    assert result.prompt_tokens + result.completion_tokens == 20
    assert result.text == llm.generate(STORY, max_tokens=result.completion_tokens).text


# Sampling


def test_same_seed_same_text(llm: LLM) -> None:
    sampling: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12}
    one, again, other = (llm.generate(STORY, seed=seed, **sampling) for seed in (1, 1, 2))
    assert one.token_ids == again.token_ids != other.token_ids
    unseeded = {tuple(llm.generate(STORY, **sampling).token_ids) for _ in range(3)}
    assert len(unseeded) > 1


def test_samples_are_those_of_seeds_side_by_side(llm: LLM) -> None:
    """Samples are those of seeds for a prompt, a list, messages, a seed in params, the last
    seed."""
    sampling: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12}

    def seeded(seed: int, prompt: Any = STORY) -> list[int]:
        return llm.generate(prompt, seed=seed, **sampling).token_ids

    expected = [seeded(seed) for seed in (7, 8, 9)]
    assert len(set(map(tuple, expected))) == 3
    found = llm.generate(STORY, n=3, seed=7, **sampling)
    assert [each.token_ids for each in found] == expected
    params = infer.SamplingParams(seed=7, **sampling)
    assert [each.token_ids for each in llm.generate(STORY, n=2, params=params)] == expected[:2]
    listed = llm.generate([STORY, COUNT], n=2, seed=7, **sampling)
    assert [each.token_ids for each in listed[0]] == expected[:2]
    assert [each.token_ids for each in listed[1]] == [seeded(7, COUNT), seeded(8, COUNT)]
    chats = llm.chat("Count from 1 to 9.", n=2, seed=7, **sampling)
    assert [each.token_ids for each in chats] == [each.token_ids for each in listed[1]]
    last = llm.generate(STORY, n=2, seed=2**64 - 1, **sampling)
    assert [each.token_ids for each in last] == [seeded(2**64 - 1), seeded(0)]
    assert llm.generate(STORY, n=1, seed=7, **sampling).token_ids == expected[0]
    unseeded = {tuple(each.token_ids) for each in llm.generate(STORY, n=3, **sampling)}
    assert len(unseeded) > 1
    of_module = infer.generate(llm, STORY, n=2, seed=7, **sampling)
    assert [each.token_ids for each in of_module] == expected[:2]


def test_samples_share_their_prompt(llm: LLM) -> None:
    """It is computed once, though all begin at once, and its whole pages are there once."""
    prompt = [5, 6, 7] * 50
    whole = len(prompt) // PAGE
    llm.engine.forget()
    used: list[int] = []
    before = llm.stats().cache

    def seen(ids: Any, logits: Any) -> Any:
        used.append(llm.stats().cache.in_use)
        return np.eye(1, len(logits), 65)[0]  # no end

    found = llm.generate(prompt, n=4, max_tokens=12, logits_processor=seen)
    computed = [result.timings.prefilled_tokens for result in found]
    assert computed == [len(prompt), 1, 1, 1]  # a token that is sampled from
    assert max(used) == whole + 4
    after = llm.stats().cache
    assert after.hits - before.hits == 3 * (len(prompt) - 1)
    assert after.in_use == 0


def test_what_is_cached_is_found_by_those_with_its_salt(llm: LLM) -> None:
    ids = [*llm.encode("Salt and pepper stood on the table.")]

    def reused(cache_salt: str | None) -> int:
        result = llm.generate(ids, max_tokens=2, cache_salt=cache_salt)
        return result.timings.reused_tokens

    whole = len(ids) - 1
    salts = [None, "a", "b", "a", None, "b", "c"]
    assert [reused(salt) for salt in salts] == [0, 0, 0, whole, whole, whole, 0]


def test_an_answer_that_is_begun_goes_on(llm: LLM) -> None:
    text = llm.chat(COUNT).text
    assert len(text) > 4
    chat = [*COUNT, {"role": "assistant", "content": text[:4]}]
    begun = [*llm.encode(COUNT), *llm.encode(text[:4])[1:]]  # without BOS
    assert llm.encode(chat, continue_final_message=True) == begun
    assert llm.chat(chat, continue_final_message=True).text == text[4:]
    assert llm.chat(chat, continue_final_message=False).prompt_tokens > len(begun)
    bare = llm.chat(COUNT, add_generation_prompt=False)
    assert bare.prompt_tokens == len(llm.encode(COUNT, add_generation_prompt=False))


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2", None])
def test_numbers_of_samples_that_cannot_be(llm: LLM, n: Any) -> None:
    for generate in (llm.generate, llm.chat):
        with pytest.raises(infer.RequestError, match="n must be a positive integer, not"):
            generate(STORY, n=n)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": {100: 2.0}},
    ],
)
def test_a_logits_processor_samples_as_the_gpu_does(llm: LLM, sampling: dict[str, Any]) -> None:
    on_gpu = llm.generate(STORY, seed=3, max_tokens=12, **sampling)
    on_host = llm.generate(
        STORY, seed=3, max_tokens=12, logits_processor=lambda ids, logits: logits, **sampling
    )
    assert on_host.token_ids == on_gpu.token_ids
    assert on_host.text == on_gpu.text


def test_a_logits_processor_decides(llm: LLM) -> None:
    seen: list[list[int]] = []

    def only_even(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(ids.tolist())
        logits[1::2] = -np.inf
        return logits

    prompt_ids = llm.encode(STORY)
    result = llm.generate(prompt_ids, max_tokens=8, logits_processor=only_even)
    assert all(i % 2 == 0 for i in result.token_ids)
    assert seen == [prompt_ids + result.token_ids[:n] for n in range(len(seen))]


def test_a_logits_processor_that_fails_leaves_the_model_usable(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        llm.generate(STORY, logits_processor=lambda ids, logits: 1 / 0)
    assert answers(llm)


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "top_k": 1}))
    with infer.load(folder) as llm:
        assert llm.generate(COUNT).text == COUNTED
        texts = {llm.generate(STORY, top_k=0, temperature=2, max_tokens=8).text for _ in range(3)}
        assert len(texts) > 1


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
def test_ends_and_suppressed_tokens_come_from_the_generation_config(
    llm: LLM, tmp_path: Path
) -> None:
    folder = copy_of_demo(tmp_path)
    path = folder / "generation_config.json"
    file = json.loads(path.read_text())
    first = {*llm.generate(STORY, max_tokens=12).token_ids, *file["eos_token_id"]}
    path.write_text(json.dumps(file | {"suppress_tokens": [*first, 5000], "max_length": 30}))
    with infer.load(folder) as other:
        result = other.generate(STORY)
        assert result.finish_reason == "length"
        assert result.prompt_tokens + result.completion_tokens == 30
        assert not first.intersection(result.token_ids)
        bias = dict.fromkeys(first, -np.inf)
        assert llm.generate(STORY, logit_bias=bias, max_tokens=8).token_ids == result.token_ids[:8]
        numpys = other.generate(STORY, logits_processor=lambda ids, logits: logits)
        assert numpys.token_ids == result.token_ids
        with pytest.raises(infer.RequestError, match="max_length"):
            other.generate([5] * 30)
    path.write_text(json.dumps(file | {"max_new_tokens": 20, "stop_strings": ["4, 5", "8, 9"]}))
    with infer.load(folder) as other:
        assert other.generate(COUNT).text == COUNTED[: COUNTED.index("4, 5")]
        assert other.generate(STORY).completion_tokens == 20
        assert other.generate(STORY, max_tokens=3).completion_tokens == 3


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_the_generation_config_asks_in_vain_is_warned_of(
    tmp_path: Path, isolate: bool
) -> None:
    folder = copy_of_demo(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"num_beams": 4, "typical_p": 0.9, "length_penalty": 2.0}))
    with pytest.warns(infer.InferWarning, match=r"num_beams 4, typical_p 0\.9\.") as caught:
        infer.load(folder, isolate=isolate).close()
    of_software = [w for w in caught if "is a software adapter" in str(w.message)]
    assert len(caught) == 1 + len(of_software)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_software_adapter_is_warned_of(llm: LLM, isolate: bool) -> None:
    if not llm.device.software:
        pytest.skip("this adapter is a GPU")
    with pytest.warns(infer.InferWarning, match="computes on the CPU, slowly") as caught:
        infer.load("demo", isolate=isolate).close()
    assert len(caught) == 1


def test_parts_are_their_text(llm: LLM) -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = [
        {"role": each["role"], "content": [{"type": "text", "text": each["content"]}]}
        for each in (system, *COUNT)
    ]
    assert llm.encode(parts) == llm.encode([system, *COUNT])
    assert llm.encode(parts[1:]) == llm.encode(COUNT)


def test_what_a_chat_template_leaves_out_is_warned_of(llm: LLM) -> None:
    source = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    messages = [{"role": "system", "content": "Be brief."}, *COUNT]
    with pytest.warns(infer.InferWarning, match="leaves messages of the role 'system' out") as all_:
        llm.stream(messages, template_args={"template": source}).close()
    assert len(all_) == 1
    llm.stream(COUNT, template_args={"template": source}).close()
    llm.stream(messages).close()
    for function in (llm.stream, llm.chat, llm.generate, partial(infer.generate, llm)):
        with pytest.warns(infer.InferWarning, match="does not read enable_thinking, w") as caught:
            function(messages, max_tokens=1, template_args={"enable_thinking": False})
        assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(infer.InferWarning, match="enable_thinking belong to chat messages"):
        llm.stream(STORY, template_args={"enable_thinking": False}).close()


# Streams


def test_streams_of_a_thread_are_open_side_by_side(llm: LLM) -> None:
    first, second = llm.stream(COUNT), llm.stream(COUNT)
    next(first)
    assert llm.generate(COUNT).text == COUNTED
    next(second)
    assert len(llm.logits(STORY)) == len(llm.encode(STORY))
    for stream in (second, first):
        assert COUNTED.endswith("".join(chunk.text for chunk in stream))
        assert stream.result.text == COUNTED


def test_a_logits_processor_cannot_ask_for_an_answer(llm: LLM) -> None:
    def asking(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        llm.generate(STORY)
        return logits

    with pytest.raises(infer.RequestError, match="in the middle of another call"):
        llm.generate(COUNT, logits_processor=asking)
    assert llm.generate(COUNT).text == COUNTED


def test_a_stream_that_has_not_begun_takes_nothing(llm: LLM) -> None:
    stream = llm.stream(COUNT)
    assert llm.generate(COUNT).text == COUNTED
    assert "".join(chunk.text for chunk in stream) == COUNTED


@pytest.mark.parametrize("end", ["close", "drop", "with"])
def test_an_abandoned_stream_frees_the_model(llm: LLM, end: str) -> None:
    stream = llm.stream(COUNT)
    result = stream.so_far
    first = next(stream)
    if end == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif end == "with":
        with stream:
            pass
    del stream
    gc.collect()
    assert result.finish_reason == "cancelled"
    assert result.text == first.text
    assert answers(llm)


def test_an_interrupt_frees_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(COUNT)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.queue, "read", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert answers(llm)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_close_in_mid_stream() -> None:
    llm = infer.load(DEMO)
    stream = llm.stream(COUNT)
    next(stream)
    llm.close()
    llm.close()
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert llm.stats().memory.allocated == 0
    for use in (llm.generate, llm.stream, llm.chat, llm.logits, llm.astream):
        with pytest.raises(infer.ClosedError, match="has been closed"):
            use(STORY)


@pytest.mark.usefixtures("same_kernels")
def test_close_from_another_thread() -> None:
    llm = infer.load(DEMO)
    stream = llm.stream(COUNT)
    next(stream)
    in_a_thread(llm.close)
    assert llm.stats().memory.allocated == 0
    with pytest.raises(infer.ClosedError, match="in the middle of this stream"):
        next(stream)
    assert list(stream) == []


def in_a_thread(call: Callable[[], object]) -> None:
    """To its end, without which the test would never have one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=600)
    assert not thread.is_alive()
    assert errors == []


def by_a_signal(call: Callable[[], object]) -> None:
    """Calls as a signal handler does, which Python runs in the main thread between instructions."""
    before = signal.signal(signal.SIGINT, lambda *_: call())
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def by_garbage_collection(call: Callable[[], object]) -> None:
    """Calls as the finalizer of an object does, which may run anywhere."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            call()

    Garbage()
    gc.collect()


@pytest.mark.parametrize("where", ["submit", "read"])
@pytest.mark.parametrize("how", [in_a_thread, by_a_signal, by_garbage_collection])
def test_a_stream_closed_while_it_makes_a_piece(
    llm: LLM, how: Callable[[Callable[[], object]], None], where: str
) -> None:
    """That piece is the last, nothing stays in flight, and the next answer is right."""
    stream, real = llm.stream(COUNT), getattr(llm.engine.runner.queue, where)
    seen = [next(stream).text for _ in range(3)]

    def closing(*args: Any) -> Any:
        patch.undo()
        how(stream.close)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.queue, where, closing)
        seen += [chunk.text for chunk in stream]
    assert len(seen) == 4
    assert stream.result.text == "".join(seen)
    assert stream.result.finish_reason == "cancelled"
    assert answers(llm)


def test_a_stream_closed_by_its_logits_processor(llm: LLM) -> None:
    def closing(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if len(ids) == len(llm.encode(COUNT)) + 3:
            stream.close()
        return logits

    stream = llm.stream(COUNT, logits_processor=closing)
    assert len(list(stream)) == 4
    assert stream.result.finish_reason == "cancelled"
    assert answers(llm)


def test_threads_share_a_stream(llm: LLM) -> None:
    """Each piece goes to one of them, though one asks while another is being made."""
    expected = sorted(chunk.text for chunk in llm.stream(COUNT))
    stream, real = llm.stream(COUNT), llm.engine.runner.queue.read
    pieces = [next(stream).text]

    def take() -> None:
        pieces.extend(chunk.text for chunk in stream)

    other = threading.Thread(target=take)

    def starting(*args: Any) -> Any:
        patch.undo()
        other.start()
        other.join(timeout=0.2)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.queue, "read", starting)
        take()
    other.join(timeout=600)
    assert sorted(pieces) == expected
    assert stream.result.text == COUNTED
    assert answers(llm)


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("used", ["generate", "logits"])
@pytest.mark.parametrize("how", [lambda call: call(), by_garbage_collection])
def test_close_in_the_middle_of_a_call(
    how: Callable[[Callable[[], object]], None], used: str
) -> None:
    """The call ends and then frees the memory: it can't be waited for inside of it."""
    llm, results = infer.load(DEMO), []
    name = "submit" if used == "generate" else "write"
    owner: Any = llm.engine.runner.queue if used == "generate" else llm.device
    real = getattr(owner, name)

    def closing(*args: Any) -> Any:
        patch.undo()
        how(llm.close)
        assert llm.stats().memory.allocated > 0
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, closing)
        in_a_thread(lambda: results.append(getattr(llm, used)(COUNT)))
    assert llm.stats().memory.allocated == 0
    if used == "generate":
        assert COUNTED.startswith(results[0].text)
        assert results[0].finish_reason == "cancelled"
    with pytest.raises(infer.ClosedError, match="has been closed"):
        llm.generate(STORY)


# Signals, lost devices and forked processes, in processes of their own: what is wrong there hangs
# them or aborts them.


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, stdin=subprocess.DEVNULL
    )


def test_close_in_a_signal_handler() -> None:
    script = """
import signal
import infer

llm = infer.load("demo")
signal.signal(signal.SIGTERM, lambda *_: llm.close())
read = llm.engine.runner.queue.read
stream = llm.stream("Once upon a time", max_tokens=20)
next(stream)

def interrupted(*args):
    llm.engine.runner.queue.read = read
    signal.raise_signal(signal.SIGTERM)
    return read(*args)

llm.engine.runner.queue.read = interrupted
print(len(list(stream)), stream.result.finish_reason, llm.stats().memory.allocated)
"""
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "1 cancelled 0\n"), done.stderr


def test_a_lost_device_is_an_error() -> None:
    """In the middle of an answer and for whatever comes after it; closing, and ending with a stream
    in the middle of its answer, do no harm."""
    script = """
import infer

def tried(call):
    try:
        call()
    except infer.InferError as error:
        print(type(error).__name__, "was lost" in str(error))

llm = infer.load("demo")
stream = llm.stream("Once upon a time", max_tokens=20)
next(stream)
llm.device.handle.destroy()
tried(lambda: list(stream))
tried(lambda: llm.generate("Once"))
tried(lambda: llm.logits("Once"))
llm.close()
llm = infer.load("demo")
stream = llm.stream("Once upon a time", max_tokens=20)
next(stream)
llm.device.handle.destroy()
"""
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "DeviceError True\n" * 3), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_process_is_told_to_be_spawned() -> None:
    """Whatever it uses; closing and collecting do no harm, neither there nor here."""
    script = """
import gc, os, signal, sys
import infer
from infer.kernels.gpu.adapters import list_adapters

llm = infer.load("demo")
stream = llm.stream("Once upon a time", max_tokens=6)
first = next(stream).text
pid = os.fork()
if pid == 0:
    signal.alarm(600)
    for call in (
        lambda: next(stream),
        lambda: llm.generate("Once"),
        lambda: llm.logits("Once"),
        lambda: infer.load("demo"),
        lambda: list_adapters(),
        lambda: llm.device.read(llm.engine.runner.steps.logits),
    ):
        try:
            call()
        except infer.DeviceError as error:
            print("spawn" in str(error))
    stream.close()
    llm.close()
    del stream, llm
    gc.collect()
    sys.stdout.flush()
    os._exit(7)  # as multiprocessing does; at another end Mesa waits for threads of its own
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
text = first + "".join(chunk.text for chunk in stream)
llm.engine.forget()
print(text == llm.generate("Once upon a time", max_tokens=6).text)
"""
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "True\n" * 6 + "7\nTrue\n"), done.stderr


def test_a_stream_that_fails_at_once_has_no_timings(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(STORY, max_tokens=3)
    stream = llm.stream(STORY, max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.queue, "submit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert stream.result.timings == Timings()


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
def test_two_models_at_once(llm: LLM) -> None:
    with infer.load(DEMO, context=200) as other:
        streams = [llm.stream(COUNT), other.stream(COUNT)]
        texts = ["", ""]
        while any(stream.so_far.finish_reason == "cancelled" for stream in streams):
            for i, stream in enumerate(streams):
                texts[i] += next(stream, infer.Chunk("", None)).text
    assert texts == [COUNTED, COUNTED]


def test_calls_from_several_threads(llm: LLM) -> None:
    prompts: list[infer.llm.Prompt] = [COUNT, "One day", STORY]
    expected = [llm.generate(prompt, max_tokens=6).token_ids for prompt in prompts]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(prompts[i % 3], max_tokens=6).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert found == {i: expected[i % 3] for i in range(6)}


def test_a_thread_need_not_wait_for_the_stream_of_another(llm: LLM) -> None:
    stream = llm.stream(STORY, max_tokens=12)
    next(stream)
    texts: list[str] = []
    in_a_thread(lambda: texts.append(llm.generate(COUNT).text))
    assert texts == [COUNTED]
    assert len(list(stream)) >= 11
    assert stream.result.text == llm.generate(STORY, max_tokens=12).text


# The module's own functions


@pytest.mark.usefixtures("no_kept_model", "same_kernels")
def test_generate_keeps_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[LLM] = []
    monkeypatch.setattr(infer.shortcuts, "load", _recording(infer.load, loaded))
    assert infer.generate(DEMO, COUNT).text == COUNTED
    assert infer.generate(DEMO, COUNT, max_tokens=5, progress=False).completion_tokens == 5
    chunks = infer.stream(DEMO, COUNT)
    assert "".join(chunk.text for chunk in chunks) == COUNTED
    assert len(loaded) == 1
    assert infer.generate(DEMO, COUNT, context=200, max_tokens=5).text == COUNTED[:5]
    assert [llm.context for llm in loaded] == [1024, 200]
    assert loaded[0].stats().memory.allocated == 0
    loaded[1].close()
    assert infer.generate(DEMO, COUNT, context=200, max_tokens=5).text == COUNTED[:5]
    assert len(loaded) == 3


def _recording(load: Callable[..., LLM], loaded: list[LLM]) -> Callable[..., LLM]:
    def recording(*args: Any, **options: Any) -> LLM:
        loaded.append(load(*args, **options))
        return loaded[-1]

    return recording


@pytest.mark.usefixtures("no_kept_model", "same_kernels")
@others_full("end", ["read", "close", "drop"], default=["close"])
def test_a_kept_model_that_is_in_use_stays(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """While a second one is loaded, in another thread: until its answer is done."""
    loaded: list[LLM] = []
    monkeypatch.setattr(infer.shortcuts, "load", _recording(infer.load, loaded))
    stream = infer.stream(DEMO, COUNT)
    first = next(stream).text
    in_a_thread(lambda: infer.generate(DEMO, COUNT, context=200, max_tokens=5))
    assert len(loaded) == 2
    assert loaded[0].stats().memory.allocated > 0
    if end == "read":
        assert first + "".join(chunk.text for chunk in stream) == COUNTED
    elif end == "close":
        stream.close()
    else:
        del stream
    gc.collect()
    assert loaded[0].stats().memory.allocated == 0
    assert infer.generate(DEMO, COUNT, context=200, max_tokens=5).text == COUNTED[:5]
    assert len(loaded) == 2


@pytest.mark.full
@pytest.mark.usefixtures("no_kept_model", "same_kernels")
def test_two_threads_generate_with_two_models() -> None:
    """A second model is loaded and answers in the middle of the answer of the first."""
    texts: list[str] = []

    def processor(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if not texts:
            in_a_thread(lambda: texts.append(infer.generate(DEMO, COUNT, context=200).text))
        return logits

    texts.append(infer.generate(DEMO, COUNT, logits_processor=processor).text)
    assert texts == [COUNTED, COUNTED]


@pytest.mark.usefixtures("no_kept_model")
def test_generate_takes_a_model_of_yours(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.shortcuts, "load", forbidden)
    assert infer.generate(llm, COUNT).text == COUNTED
    with pytest.raises(infer.RequestError, match="go to load"):
        infer.generate(llm, COUNT, context=100)


# Quantised weights


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
@pytest.mark.usefixtures("no_kept_model")
@pytest.mark.parametrize(("quantize", "divergence"), [("q8", 2e-4), ("q4", 1e-2)])
def test_a_quantised_model_answers_nearly_as_before(
    llm: LLM, quantize: str, divergence: float
) -> None:
    ids = llm.encode(llm.generate(STORY, max_tokens=50).text)
    assert infer.generate(DEMO, COUNT, quantize=quantize).text == COUNTED
    assert infer.shortcuts._last is not None
    quantized = infer.shortcuts._last.llm
    exact, got = (
        logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for logits in (model.logits(ids).astype(np.float64) for model in (llm, quantized))
    )
    kl = (np.exp(exact) * (exact - got)).sum(axis=1)
    assert 0 < kl.mean() < divergence
    assert quantized.stats().memory.allocated < llm.stats().memory.allocated


@pytest.mark.usefixtures("same_kernels")
def test_what_quantising_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_needed(monkeypatch, quantize="q4")
    report_free(monkeypatch, needed)
    with infer.load(DEMO, quantize="q4") as llm:
        shapes = [tensor.shape for tensor in llm.engine.weights.values() if len(tensor.shape) == 2]
        temporary = buffer_bytes(shapes, llm.device.limits)
        assert temporary > 0
        stats = llm.stats().memory
        assert stats.allocated - stats.pooled == needed - temporary


# Requests that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_kk": 3}, r"top_kk is not an option. Did you mean top_k\?"),
        ({"context": 64}, r"context is an option of load\(\)"),
        ({"top_p": 1.5}, r"top_p must be .*, not 1.5"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop": [""]}, "stop must be"),
        ({"logit_bias": {2048: 1.0}}, "from 0 to 2047, not 2048"),
        ({"params": infer.SamplingParams(), "seed": 1}, "not both"),
        ({"logits_processor": 3}, "logits_processor must be a function of .*, not 3"),
        ({"continue_final_message": True}, "belongs to chat messages"),
    ],
)
def test_options_that_cannot_be_served(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(infer.RequestError, match=message):
        llm.stream(STORY, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be"),
        ({"logits_processor": 3}, "logits_processor must be"),
        ({"adapters": {"a": "x"}}, r"adapters is an option of load\(\)"),
        ({"n_ctx": 5}, r"n_ctx is not an option. Did you mean context\?"),
        ({"params": {"top_k": 3}}, "params must be SamplingParams"),
        ({"template_args": [("a", 1)]}, "template_args must be a dictionary"),
        ({"cache_salt": 7}, "cache_salt must be a text"),
        ({"priority": 1.0}, "priority must be an integer of 32 bits"),
        ({"priority": True}, "priority must be an integer of 32 bits"),
        ({"priority": 2**31}, "priority must be an integer of 32 bits"),
        ({"template_args": {1: "a"}}, "template_args must be a dictionary"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false, not 1"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
    ],
)
def test_wrong_options_are_said_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    for function in (infer.generate, infer.stream):
        with pytest.raises(infer.RequestError, match=message):
            function("/no/such/model", STORY, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, "two"], "list of token ids"),
        ([COUNT[0], 1], "list of token ids"),
        (COUNT[0], "list of chat messages"),
        (b"text", "A prompt is text"),
        (bytearray(b"text"), "A prompt is text"),
        (None, "A prompt is text"),
        ([True, False], "A prompt is text"),
        ([[1, 2], [3]], "A prompt is text"),
        (np.array([[1, 2]]), "A prompt is text"),
        (np.array(1), "A prompt is text"),
        (np.float32(1), "A prompt is text"),
        ([10**5000], "is not in the model's vocabulary"),
        ("half a pair: \ud83d", "not valid Unicode"),
        ([{"role": "user", "content": "half a pair: \ud83d"}], "not valid Unicode"),
        ([{"role": "user", "content": np.float32(1)}], "Message 0 must be made of JSON types"),
        ([{("a", 1): "user", "content": "x"}], "Message 0 must be made of JSON types"),
        ([1, 2048], "Token 2048 is not in the model's vocabulary of 2048"),
        ([5] * 1024, "has 1024 tokens, and the context holds 1024"),
        ([{"role": "king", "content": "Hi"}], "king"),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(infer.InferError, match=message):
        llm.stream(prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": 1025}, infer.RequestError, "1025 .* positions up to 1024"),
        ({"context": 1}, infer.RequestError, "at least 2 positions, not 1"),
        ({"dtype": "f8"}, infer.UnsupportedError, "f32, f16, bf16, not 'f8'"),
        ({"quantize": "q5"}, infer.UnsupportedError, "quantize must be one of q8, q4, not 'q5'"),
        ({"quantize": "q8", "dtype": "f16"}, infer.RequestError, "Give one of the two"),
        ({"kv_dtype": "bf16"}, infer.UnsupportedError, "f16, f32, q8, not 'bf16'"),
        ({"device": "no such card"}, infer.DeviceError, "No adapter matches 'no such card'"),
        ({"n_ctx": 64}, infer.RequestError, r"n_ctx is not an option. Did you mean context\?"),
        ({"seed": 64}, infer.RequestError, r"seed is an option of generate\(\)"),
        ({"engine": {"fuze": 1}}, infer.RequestError, r"fuze is not .* Did you mean fuse\?"),
        ({"engine": {"context": 9}}, infer.RequestError, r"context is an option of load\(\)"),
        ({"engine": 3}, infer.RequestError, "engine must be a dictionary .*, not 3"),
        ({"engine": {1: 2}}, infer.RequestError, "engine must be a dictionary"),
        ({"engine": {"ahead": 0}}, infer.RequestError, "ahead must be a positive integer, not 0"),
        ({"engine": {"prefill_chunk": "x"}}, infer.RequestError, "prefill_chunk must be .* 'x'"),
        ({"engine": {"raw": 1}}, infer.RequestError, "raw must be true or false, not 1"),
        ({"settings": {"f16": False}}, infer.RequestError, "settings must be Settings, not dict"),
    ],
)
def test_loads_that_cannot_be_served(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        infer.load(DEMO, **options)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    """The standard output of ipykernel, which says that it is no terminal."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize(
    ("progress", "kind", "shown"),
    [
        (None, Terminal, True),
        (None, Notebook, True),
        (None, io.StringIO, False),
        (True, io.StringIO, True),
        (False, Terminal, False),
        (lambda *_: None, Terminal, False),
    ],
)
def test_loading_is_shown_to_who_sees_it(
    monkeypatch: pytest.MonkeyPatch, progress: Any, kind: type[io.StringIO], shown: bool
) -> None:

    def found(*_: object, progress: Callable[[int, int], None], **__: object) -> ResolvedModel:
        progress(0, 0)
        progress(3, 4)
        return ResolvedModel(DEMO_FOLDER, DEMO)

    def thread(*_: object) -> SimpleNamespace:
        return SimpleNamespace(result=lambda progress: progress("weights", 1, 2))

    for name, stand_in in (("resolve", found), ("_Thread", thread)):
        monkeypatch.setattr(infer.loading, name, stand_in)
    monkeypatch.setattr(sys, "stderr", stream := kind())
    now = iter(range(100))
    monkeypatch.setattr("infer.progress.time", SimpleNamespace(perf_counter=lambda: next(now)))
    infer.load(DEMO, progress=progress)
    for part in ("downloading: 75%", "reading weights: 50%", "\r"):
        assert (part in stream.getvalue()) == shown


@pytest.mark.usefixtures("same_kernels")
def test_loading_tells_how_far_it_is() -> None:
    seen: list[tuple[str, int, int]] = []
    with infer.load(DEMO, progress=lambda *progress: seen.append(progress)) as llm:
        kernels = [step for step in seen if step[0] == "kernels"]
        number = len(kernels)
        assert number <= llm.device.n_pipelines
    assert kernels == [("kernels", done, number) for done in range(1, number + 1)]
    weights = [step[1:] for step in seen if step[0] == "weights"]
    assert len(kernels) + len(weights) == len(seen)
    assert weights == sorted(weights)
    assert weights[-1][0] == weights[-1][1]


def copy_of_demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "demo"))


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("processed", [False, True])
def test_damaged_weights_are_found_out(tmp_path: Path, processed: bool) -> None:
    folder = copy_of_demo(tmp_path)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    content[8 + size + begin : 8 + size + end] = b"\xff\x7f" * ((end - begin) // 2)  # NaN in bf16
    path.write_bytes(content)
    options = {"logits_processor": lambda ids, logits: logits} if processed else {}
    with infer.load(folder) as llm:
        for _ in range(2):
            with pytest.raises(infer.InferError, match=r"not finite|NaN"):
                llm.generate(STORY, **options)


# Memory


def report_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Makes the adapter report so many free bytes."""
    monkeypatch.setattr(infer.memory, "memory_info", lambda adapter: MemoryInfo(1 << 40, free))


def bytes_needed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Returns the bytes that load says it needs, where no memory is free."""
    report_free(monkeypatch, 0)
    with pytest.raises(infer.OutOfMemoryError) as caught:
        infer.load(DEMO, **options)
    numbers = re.findall(r"[\d,]{3,}(?= bytes| of weights| of KV| for all else)", str(caught.value))
    total, *parts = (int(number.replace(",", "")) for number in numbers)
    assert total == sum(parts) > 0
    return total


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("context", [1024, 600])
def test_what_does_not_fit_is_said_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    allocated, buffer = [], Device.buffer

    def recording(self: Device, nbytes: int, *args: Any, **kwargs: Any) -> Buffer:
        allocated.append(nbytes)
        return buffer(self, nbytes, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(infer.loading, "load_weights", forbidden)
        patch.setattr(Device, "buffer", recording)
        needed = bytes_needed(patch, context=context)
        report_free(patch, needed - 1)
        with pytest.raises(
            infer.OutOfMemoryError, match=rf"{needed:,} bytes .* {needed - 1:,} free"
        ):
            infer.load(DEMO, context=context)
    assert sum(allocated) < 4096  # what opening a device takes
    # It was exact.
    report_free(monkeypatch, needed)
    with infer.load(DEMO, context=context) as llm:
        assert llm.stats().memory.allocated == needed


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
def test_a_default_context_shrinks_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_needed(monkeypatch, context=512)
    report_free(monkeypatch, needed)
    with infer.load(DEMO) as llm:
        assert llm.context == 512
        assert llm.generate(COUNT).text == COUNTED
    report_free(monkeypatch, needed - 1)
    with pytest.raises(infer.OutOfMemoryError, match="KV cache for 512 positions"):
        infer.load(DEMO)


def fitting(
    model: Decoder, limits: Limits, llm: LLM, context: int, may_shrink: Sequence[str] = ()
) -> EngineOptions:
    """With the other options, and on the adapter, of an LLM."""
    plan = plan_random(model.weights(), "f16")
    count = infer.memory.MemoryCount(model, plan, limits, llm.device.adapter)
    options = replace(llm.engine.options, context=context)
    return count.fitting(options, may_shrink=may_shrink)


def test_one_engine_is_built_to_find_a_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it finds the largest of those that are tried, by what each would take."""
    built, init = [], infer.memory.Engine.__init__

    def building(self: Engine, *arguments: Any) -> None:
        built.append(arguments[2].context)
        init(self, *arguments)

    model, limits = llm.engine.model, llm.device.limits
    plan, gpu = plan_random(model.weights(), "f16"), llm.device.adapter
    count = infer.memory.MemoryCount(model, plan, limits, gpu)
    contexts = (512, 1 << 14, 1 << 16)
    of = {c: count.needed(replace(llm.engine.options, context=c)).total for c in contexts}
    monkeypatch.setattr(infer.memory.Engine, "__init__", building)
    for context, needed in of.items():
        report_free(monkeypatch, needed)
        assert fitting(model, limits, llm, 1 << 18, may_shrink=["context"]).context == context
        assert built.pop() == context
        assert not built or context == 512  # which is less than what else is needed
        built.clear()


def test_keys_that_no_binding_holds(llm: LLM) -> None:
    per_position = 2 * llm.config.num_key_value_heads * llm.config.head_dim
    most = 4 * PAGE
    # half a page beyond: caches are of whole pages
    small = replace(llm.device.limits, max_binding=(most + PAGE // 2) * per_position)
    options = replace(llm.engine.options, max_batch=1, cache_positions=None, context=most)
    plan = plan_random(llm.engine.model.weights(), "f16")
    count = infer.memory.MemoryCount(llm.engine.model, plan, small, llm.device.adapter)
    with pytest.raises(infer.OutOfMemoryError) as raised:
        count.fitting(options)
    asked = re.search(r"A context of 256 .* Ask for a context of at most (\d+) ", str(raised.value))
    assert asked is not None, raised.value
    assert count.fitting(replace(options, context=int(asked[1]))).context == most - PAGE
    with pytest.raises(infer.OutOfMemoryError):
        count.fitting(replace(options, context=int(asked[1]) + 1))
    # For several answers the message says what they share and what each may have.
    said = r"cache of 384 positions in total, for 3 .* up to 128 positions, .* is 256 positions"
    with pytest.raises(infer.OutOfMemoryError, match=said):
        count.fitting(replace(options, max_batch=3, context=2 * PAGE, cache_positions=6 * PAGE))


def test_nothing_is_made_for_a_context_that_does_not_fit(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of positions are counted, and made once there is room for them."""
    c = llm.config
    rope = replace(c.rope, kind="dynamic", scaling={"factor": 2.0}, rotary_dim=c.head_dim)
    model = Decoder(replace(c, rope=rope, num_key_value_heads=1))
    monkeypatch.setattr(infer.engine.caches, "rope_table", forbidden)
    wide = Limits(max_binding=1 << 50, max_buffer=1 << 50)
    report_free(monkeypatch, 1 << 33)
    tracemalloc.start()
    try:
        for limits, message in ((wide, "free"), (Limits(), "bytes of rotary positions; one")):
            with pytest.raises(infer.OutOfMemoryError, match=message):
                fitting(model, limits, llm, context=2**31 - 1)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def generate_in_every_way(llm: LLM) -> None:
    llm.generate(STORY, max_tokens=4)
    llm.generate([5] * 150, max_tokens=4, logprobs=2, temperature=1, top_k=9, top_p=0.5, min_p=0.1)
    llm.generate(STORY, max_tokens=4, repetition_penalty=1.1, logit_bias={9: 1})
    llm.generate(STORY, max_tokens=4, logits_processor=lambda ids, logits: logits)
    next(llm.stream(STORY))
    llm.logits(STORY)


def native_objects() -> dict[str, int]:
    """The number of objects that WebGPU itself holds, by kind."""
    if library().name != "wgpu-native":
        pytest.skip("only wgpu-native counts its objects")
    gc.collect()
    counts = wgpu.diagnostics.wgpu_native_counts.get_dict()
    return {kind: count["count"] for kind, count in counts.items() if kind != "total"}


@pytest.mark.full
def test_generations_leave_nothing_behind() -> None:
    before = native_objects()
    llm = infer.load(DEMO)
    for _ in range(2):  # buffers for what is read grow once, those of either step in flight
        generate_in_every_way(llm)
    stats, objects = llm.stats().memory, native_objects()
    generate_in_every_way(llm)
    assert llm.stats().memory.allocated == stats.allocated
    assert llm.stats().memory.peak == stats.peak
    assert native_objects() == objects
    llm.close()
    assert llm.stats().memory.allocated == llm.stats().memory.pooled == 0
    del llm
    assert native_objects() == before


def test_a_load_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = native_objects()
    folder = copy_of_demo(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(infer.CheckpointError):
        infer.load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(infer.engine.steps.Steps, "compile", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            infer.load(DEMO)
    assert native_objects() == before


def interrupting(real: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function, in whose call of that number Ctrl-C comes."""
    calls = iter(range(count))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == count - 1:
            _thread.interrupt_main()
        return real(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        (GPUPromise, "_wgpu_set_input", 1),  # the library calls back: the device is there
        pytest.param(Device, "_probe_subgroups", 1, marks=pytest.mark.full),
        (Device, "buffer", 30),
        pytest.param(Device, "compile", 5, marks=pytest.mark.full),
        (Device, "destroy", 2),
        (_Staging, "submit", 1),
        pytest.param(infer.engine.steps.Steps, "compile", 1, marks=pytest.mark.full),
        pytest.param(LLM, "__init__", 1, marks=pytest.mark.full),
    ],
)
def test_an_interrupt_while_loading_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, count: int
) -> None:
    before, threads = native_objects(), threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupting(getattr(owner, name), count))
        with pytest.raises(KeyboardInterrupt):
            infer.load(DEMO)
    assert threading.enumerate() == threads
    assert native_objects() == before


def test_progress_that_fails_leaves_nothing_behind() -> None:
    before, threads = native_objects(), threading.enumerate()
    with pytest.raises(ZeroDivisionError):
        infer.load(DEMO, progress=lambda what, done, total: print(1 // 0))
    assert threading.enumerate() == threads
    assert native_objects() == before


def test_a_device_lost_while_loading_is_not_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, real = native_objects()["Device"], Engine.__init__

    def losing(self: Engine, device: Device, *args: Any) -> None:
        if not isinstance(device, DryDevice):
            device.handle.destroy()
        real(self, device, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__init__", losing)
        with pytest.raises(infer.DeviceError, match="was lost") as caught:
            infer.load(DEMO)
    assert not isinstance(caught.value, infer.OutOfMemoryError)
    del caught
    assert native_objects()["Device"] == devices


@pytest.mark.parametrize("allowed", [0, 1, 2, 3, 5])
def test_too_few_threads_are_said(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """One that loads, that of wgpu, one that compiles, its pool and that of the upload."""
    before, threads = native_objects(), threading.enumerate()
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if threading.active_count() - len(threads) == allowed:
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(infer.InferError, match=r"threads.*ulimit"):
            infer.load(DEMO)
    assert threading.enumerate() == threads
    assert native_objects() == before


def test_the_cache_of_a_prompt_goes_through_a_file(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "story.cache"
    story = "Once upon a time, a little fox found a red kite. " * 8
    length = llm.save_cache(path, story, cache_salt="mine")
    assert length == len(llm.encode(story))
    assert llm.load_cache(str(path), cache_salt="yours") == length
    result = llm.generate(story + "The", max_tokens=2, cache_salt="yours")
    assert result.timings.reused_tokens >= length - 2
    messages: Any = [{"role": "user", "content": story}]
    assert llm.save_cache(path, messages, cache_salt="mine") > 0
    for wrong in ({"cache_salt": 3}, {"adapter": "none"}):
        with pytest.raises(infer.RequestError):
            llm.load_cache(path, **wrong)  # type: ignore[arg-type]
