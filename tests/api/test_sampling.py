"""Sampling parameters, and the numpy sampler against transformers."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import places
import pytest
from numpy.typing import NDArray

from infer.generation_config import IMPLEMENTED, IRRELEVANT, MISSING, notes, sampling_defaults
from infer.kernels.errors import CheckpointError, RequestError
from infer.kernels.state.step import MAX_STOP_IDS, SAMPLING
from infer.sampling import NumpySampler, SamplingParams, gumbel, logprobs, threefry

ROOT = places.ROOT
REFERENCES = ROOT / "tests" / "data" / "sampling" / "processors.npz"


def test_wgpu_is_not_imported() -> None:
    code = "import infer.sampling, sys; assert 'wgpu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Parameters


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0"),
        ("temperature", math.nan, "from 0"),
        ("temperature", math.inf, "to 100"),
        ("temperature", "1", "a number"),
        ("temperature", True, "a number"),
        ("top_k", 1.5, "an integer"),
        ("top_k", -1, "from 0"),
        ("top_k", True, "an integer"),
        ("top_p", 1.01, "to 1"),
        ("top_p", -0.5, "from 0"),
        ("top_p", math.nan, "from 0"),
        ("min_p", 2, "to 1"),
        ("repetition_penalty", 0, "from 0.001"),
        ("presence_penalty", 3, "to 2"),
        ("frequency_penalty", -2.5, "from -2"),
        ("frequency_penalty", None, "a number"),
        ("logit_bias", {1: 101}, "up to 100"),
        ("logit_bias", {1: math.inf}, "up to 100"),
        ("logit_bias", {1: math.nan}, "up to 100"),
        ("logit_bias", {"1": 1.0}, "token ids"),
        ("logit_bias", [1, 2], "token ids"),
        ("seed", -1, "from 0"),
        ("seed", 2**64, "2**64 - 1"),
        ("max_tokens", 0, "from 1"),
        ("max_tokens", 2.0, "an integer"),
        ("stop", "", "none empty"),
        ("stop", ["a", 3], "a string or a list"),
        ("stop", 5, "a string or a list"),
        ("logprobs", 21, "to 20"),
        ("logprobs", True, "an integer"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert message.startswith(name)
    assert repr(shown) in message
    assert allowed in message


class _Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("value", [10**5000, -(10**5000), _Unshowable(), "x" * 10**6], ids=range(4))
def test_values_that_cannot_be_shown(value: Any) -> None:
    for name in ("temperature", "top_k", "seed", "logprobs", "logit_bias"):
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 400
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias={0: value})
    with pytest.raises(RequestError, match="stop must be"):
        SamplingParams(stop=[value, 3])
    for stop in (["x"] * 65, "x" * 1025):
        with pytest.raises(RequestError, match="stop must be at most 64 strings of at most 1,024"):
            SamplingParams(stop=stop)


def test_values_at_the_ends_of_their_ranges() -> None:
    low = SamplingParams(temperature=0, top_k=0, top_p=0, min_p=0, seed=0, max_tokens=1, logprobs=0)
    assert low.greedy
    high = SamplingParams(
        top_p=1, min_p=1, seed=2**64 - 1, logprobs=20, logit_bias={0: -100, 5: 100}
    )
    assert high.logit_bias == {0: -100.0, 5: 100.0}
    from_numpy: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    params = SamplingParams(**from_numpy)
    assert (params.temperature, params.top_k) == (0.5, 3)
    assert type(params.temperature) is float


def test_a_new_seed_survives_json_whose_numbers_are_floats() -> None:
    seeds = [SamplingParams().resolved({}).seed for _ in range(20)]
    assert [int(json.loads(str(seed), parse_int=float)) for seed in seeds] == seeds


def test_every_token_cannot_be_forbidden() -> None:
    forbidden = dict.fromkeys(range(5), -math.inf)
    SamplingParams(logit_bias=forbidden).check_bias(6)
    SamplingParams(logit_bias={**forbidden, 3: -100.0}).check_bias(5)
    with pytest.raises(RequestError, match="forbids every token"):
        SamplingParams(logit_bias=forbidden).check_bias(5)


def test_stop_is_a_tuple_of_strings() -> None:
    assert SamplingParams().stop == ()
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_defaults_are_the_models() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 3}
    params = SamplingParams(top_p=0.5).resolved(file)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.resolved({}) == params  # nothing is left to resolve, the seed neither


def test_greedy_unless_asked() -> None:
    file = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "top_k": None}
    params = SamplingParams().resolved(file)
    assert params.greedy
    assert params.repetition_penalty == 1.1
    assert SamplingParams().resolved({**file, "do_sample": False}).greedy
    asked = SamplingParams(temperature=0.8).resolved(file)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.8, 0.9, 0)


def test_lengths_and_ends_are_the_models() -> None:
    file = {"max_new_tokens": 7, "max_length": 30, "stop_strings": ["END", "."]}
    defaults = sampling_defaults(file, 8)
    params = SamplingParams().resolved(defaults, 10)
    assert (params.max_tokens, params.stop) == (7, ("END", "."))
    assert params.resolved(defaults, 10) == params
    own = SamplingParams(max_tokens=9, stop="x").resolved(defaults, 10)
    assert (own.max_tokens, own.stop) == (9, ("x",))
    assert SamplingParams().resolved(sampling_defaults({"stop_strings": "a"}, 8)).stop == ("a",)


def test_the_models_max_length_counts_the_prompt() -> None:
    defaults = sampling_defaults({"max_length": 30}, 8)
    assert SamplingParams().resolved(defaults, 10).max_tokens == 20
    assert SamplingParams().resolved(defaults, 29).max_tokens == 1
    assert SamplingParams().resolved(defaults).max_tokens is None
    assert SamplingParams(max_tokens=3).resolved(defaults, 40).max_tokens == 3
    with pytest.raises(RequestError, match=r"30 tokens, .* after 30 \(max_length\)"):
        SamplingParams().resolved(defaults, 30)


def test_own_bias_stands_above_the_models() -> None:
    file = {"suppress_tokens": [1, 2], "sequence_bias": [[[3], 4], [[2], 1.0]]}
    defaults = sampling_defaults(file, 8)
    params = SamplingParams(logit_bias={1: 2.0, 5: -1.0}).resolved(defaults)
    assert params.logit_bias == {1: 2.0, 2: -math.inf, 3: 4.0, 5: -1.0}
    assert SamplingParams().resolved(sampling_defaults({}, 8)).logit_bias is None


def test_tokens_beyond_the_vocabulary_need_not_be_suppressed() -> None:
    file = {"suppress_tokens": [-1, 7, 8], "bad_words_ids": [[9], [2], [4]], "eos_token_id": [4]}
    assert sampling_defaults(file, 8)["logit_bias"] == {7: -math.inf, 2: -math.inf}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be an integer"),
        ({"stop_strings": [1]}, "stop_strings must be a string"),
        ({"max_length": 0}, "max_length must be an integer"),
        ({"max_length": [20]}, "max_length must be an integer"),
        ({"temperature": [1], "do_sample": True}, "temperature must be"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens must be a list of token ids"),
        ({"suppress_tokens": {"a": 1}}, "suppress_tokens must be a list of token ids"),
        ({"bad_words_ids": [1]}, "bad_words_ids must be a list of lists"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must be a list of lists"),
        ({"sequence_bias": [[[1], math.nan]]}, "sequence_bias must be a list of pairs"),
        ({"sequence_bias": [[[1], 101]]}, "sequence_bias must be a list of pairs"),
        ({"sequence_bias": [[[True], 1]]}, "sequence_bias must be a list of pairs"),
        ({"sequence_bias": {"1": 1}}, "sequence_bias must be a list of pairs"),
    ],
)
def test_wrong_values_of_the_file(file: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {message}"):
        SamplingParams().resolved(sampling_defaults(file, 8), 5)


# Fields of the file that count


FIELDS = json.loads((ROOT / "tests/data/sampling/generation_config.json").read_text())


def test_every_field_of_transformers_has_its_place() -> None:
    assert set(FIELDS) == IMPLEMENTED | IRRELEVANT | MISSING.keys()
    assert len(FIELDS) == len(IMPLEMENTED) + len(IRRELEVANT) + len(MISSING)


def test_the_values_of_transformers_need_no_note() -> None:
    assert notes({}) == []
    assert notes(FIELDS) == []
    assert notes(dict.fromkeys(FIELDS)) == []


@pytest.mark.parametrize("name", [*MISSING, "bad_words_ids", "sequence_bias"])
def test_what_is_not_implemented_is_noted(name: str) -> None:
    values: dict[str, Any] = {
        "bad_words_ids": [[1], [1, 2]],
        "sequence_bias": [[[1], 0.5], [[1, 2], 0.5]],
    }
    value = values.get(name, 0.5)
    (text,) = notes({name: value, "do_sample": True})
    assert f"not implemented: {name} " in text
    if name in values:
        assert notes({name: value[:1]}) == []


def test_a_temperature_without_sampling_is_noted() -> None:
    (text,) = notes({"temperature": 0.7, "top_p": 0.9})
    assert "temperature, top_p but no do_sample" in text
    assert notes({"temperature": 0.7, "top_p": 0.9, "do_sample": True}) == []
    assert notes({"temperature": 0.0, "top_k": 1}) == []


def test_a_new_seed_for_each_generation() -> None:
    params = SamplingParams(temperature=1.0)
    seeds = {params.resolved({}).seed for _ in range(4)}
    assert len(seeds) == 4
    assert SamplingParams(seed=7).resolved({}).seed == 7


def test_a_wrong_default_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p must be a number"):
        SamplingParams().resolved({"top_p": 3})
    assert SamplingParams(top_p=0.5).resolved({"top_p": 3}).top_p == 0.5


def test_record() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**40 + 5, max_tokens=10
    )
    record = params.record(vocab_size=50, prompt_tokens=30, context=64, stop_ids=[2, 9])
    assert record.dtype == SAMPLING
    assert record.shape == (1,)
    row = record[0]
    assert (row["temperature"], row["top_k"], row["top_p"], row["min_p"]) == (0.5, 7, 0.25, 0.125)
    assert (row["seed_low"], row["seed_high"]) == (5, 256)
    # The prompt's last row, at position 29, gives the first token; nine rows more give the others.
    assert row["max_position"] == 39
    assert row["min_position"] == 29
    assert (row["n_stop_ids"], row["stop_ids"][:3].tolist()) == (2, [2, 9, 0])
    least = SamplingParams(min_tokens=4)
    record = least.record(vocab_size=50, prompt_tokens=30, context=64, stop_ids=[2])
    assert record[0]["min_position"] == 33  # from there on it is the fifth that is sampled
    off = SamplingParams().record(vocab_size=50, prompt_tokens=30, context=64, stop_ids=[])[0]
    assert (off["temperature"], off["top_p"], off["repetition_penalty"]) == (0, 1, 1)
    assert off["max_position"] == 64


def test_record_refuses_what_does_not_fit() -> None:
    def record(params: SamplingParams, stop_ids: list[int]) -> None:
        params.record(vocab_size=50, prompt_tokens=1, context=64, stop_ids=stop_ids)

    record(SamplingParams(logit_bias={49: 1.0}), list(range(MAX_STOP_IDS)))
    with pytest.raises(RequestError, match="logit_bias must name token ids from 0 to 49, not 50"):
        record(SamplingParams(logit_bias={3: 1.0, 50: 1.0}), [])
    with pytest.raises(RequestError, match="logit_bias must name token ids from 0 to 49, not -1"):
        record(SamplingParams(logit_bias={-1: 1.0}), [])
    with pytest.raises(RequestError, match="52 stop ids were given; at most 51"):
        record(SamplingParams(), list(range(MAX_STOP_IDS + 1)))


def test_chain_has_what_is_on() -> None:
    def on(**settings: Any) -> set[str]:
        chain = SamplingParams(**settings).chain()
        return {name for name, value in vars(chain).items() if value}

    assert on() == set()
    # Filters do not change which score is the largest.
    assert on(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1) == set()
    assert on(temperature=1e-7) == set()
    assert on(repetition_penalty=1.1, logit_bias={1: 2.0}) == {"penalties", "bias"}
    assert on(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) == {"noise"}
    assert on(temperature=1.0, top_k=5, min_p=0.1) == {"noise", "top_k", "min_p"}
    assert on(min_tokens=1) == {"ends"}
    assert on(allowed_token_ids=[3]) == {"bias"}
    assert on(choices=["a"]) == on(bad_words=[[1, 2]]) == {"mask"}
    assert on(bad_words=[[1]], stop_token_ids=[3]) == set()
    assert on(temperature=1.0, top_p=0.9, frequency_penalty=1.0) == {"noise", "top_p", "penalties"}


# Filters


def params_of(settings: dict[str, Any]) -> SamplingParams:
    """A GenerationConfig's settings as ours."""
    file = {"do_sample": True, "temperature": 1.0, "top_k": 0} | settings
    return SamplingParams().resolved(sampling_defaults(file, 1 << 20))


def assert_same_scores(
    ours: NDArray[np.float64], theirs: NDArray[np.float32], settings: dict[str, Any]
) -> None:
    """Equal survivors and scores; which of the tokens that tie at the cut of top-p survive,
    transformers leaves to its sort, but not how many."""
    kept = theirs > -np.inf
    assert (ours > -np.inf).sum() == kept.sum(), settings
    np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=1e-6)
    differ = (ours > -np.inf) != kept
    np.testing.assert_allclose(np.maximum(ours, theirs)[differ], theirs[kept].min(), rtol=1e-6)


@pytest.mark.parametrize("n", range(10))
def test_filters_are_transformers(n: int) -> None:
    stored = np.load(REFERENCES)
    cases = [(i, s) for i, (m, s) in enumerate(json.loads(str(stored["cases"]))) if m == n]
    assert len(cases) >= 6
    for i, settings in cases:
        sampler = NumpySampler(params_of(settings), len(stored[f"logits.{n}"]), stored[f"ids.{n}"])
        scores = sampler.scores(stored[f"logits.{n}"])
        assert_same_scores(scores, stored[f"scores.{i}"], settings)


def test_of_equal_scores_the_lowest_ids_survive() -> None:
    """So that top_p = 0 is greedy."""
    sampler = NumpySampler(SamplingParams(temperature=1.0, top_p=0.5), 6, [0])
    scores = sampler.scores(np.array([1, 3, 3, 3, 3, 1], np.float32))
    assert np.flatnonzero(scores > -np.inf).tolist() == [1, 2, 3]
    none = NumpySampler(SamplingParams(temperature=1.0, top_p=0.0), 6, [0])
    assert np.flatnonzero(none.scores(np.zeros(6, np.float32)) > -np.inf).tolist() == [0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    """OpenAI's formula: logit - frequency_penalty * times - presence_penalty * (times > 0)."""
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = NumpySampler(params, 4, [2, 2, 1])
    logits = np.array([1.0, 0.9, 0.0, -9.0], np.float32)
    assert [sampler(logits) for _ in range(4)] == [0, 1, 0, 1]
    np.testing.assert_allclose(sampler.scores(logits), [0.0, -0.1, 0.0, -9.0], atol=1e-7)


def test_logits_processor_comes_after_penalties_and_before_temperature() -> None:
    seen: list[tuple[list[int], NDArray[np.float32]]] = []

    def processor(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.floating]:
        seen.append((ids.tolist(), logits.copy()))
        return np.where(np.arange(len(logits)) == 2, -np.inf, logits)

    params = SamplingParams(
        temperature=0.5, top_k=1, repetition_penalty=2.0, logit_bias={3: 1.5}, seed=0
    )
    sampler = NumpySampler(params, 4, [0, 1], processor)
    logits = np.array([4.0, -1.0, 9.0, 1.0], np.float32)
    np.testing.assert_allclose(sampler.scores(logits), [-np.inf, -np.inf, -np.inf, 5.0])
    assert seen[0][0] == [0, 1]
    assert seen[0][1].dtype == np.float32
    np.testing.assert_allclose(seen[0][1], [2.0, -2.0, 9.0, 2.5])
    assert sampler(logits) == 3
    sampler(logits)
    assert seen[-1][0] == [0, 1, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros(3), "shape"),
        (np.array([0.0, np.nan, 0, 0]), "NaN"),
        (np.full(4, -np.inf), "no token"),
        (None, "shape"),
        ([[1], [2, 3]], "shape"),
        (["a", "b", "c", "d"], "must return logits of shape"),
        (np.full(4, None), "of object"),
    ],
)
def test_wrong_logits_processors_are_told(returned: Any, message: str) -> None:
    sampler = NumpySampler(SamplingParams(), 4, [0], lambda ids, logits: returned)
    with pytest.raises(RequestError, match=message):
        sampler(np.zeros(4, np.float32))


# Draws


def test_threefry_gives_the_known_answers() -> None:
    """The vectors of Random123, the reference implementation (tests/kat_vectors)."""

    def answer(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
        first, second = (np.array([word], np.uint32) for word in counter)
        x, y = threefry(key[0] | key[1] << 32, first, second)
        return int(x[0]), int(y[0])

    ones = (0xFFFFFFFF, 0xFFFFFFFF)
    assert answer((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert answer(ones, ones) == (0x1CB996FC, 0xBB002BE7)
    pi = answer((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3))
    assert pi == (0xC4923A9C, 0x483DF7A0)


def test_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov distance to exp(-exp(-x)): beyond 2.2 / sqrt(n) once in 8,000 times."""
    n = 100_000
    noise = np.sort(gumbel(5, 17, np.arange(n)))
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(n) + 0.5) / n).max()
    assert distance < 2.2 / math.sqrt(n)


def test_numpy_draws_follow_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    sampler = NumpySampler(SamplingParams(temperature=0.8, top_k=4, seed=3), 5, [0])
    observed = np.bincount([sampler(logits) for _ in range(3000)], minlength=5)
    assert observed[3] == 0
    weights = np.exp(logits[[0, 1, 2, 4]].astype(float) / 0.8)
    wanted = 3000 * weights / weights.sum()
    statistic = ((observed[[0, 1, 2, 4]] - wanted) ** 2 / wanted).sum()
    assert statistic < 21.1  # chi-square of 3 degrees exceeds this once in 10,000 times


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    sampler = NumpySampler(SamplingParams(), 4, [0])
    assert sampler(np.array([1.0, 5.0, 5.0, 2.0], np.float32)) == 1


# Log probabilities


def test_logprobs_are_torchs() -> None:
    stored = np.load(REFERENCES)
    logits, expected = stored["logits.0"], stored["log_softmax.0"]
    own, best = logprobs(logits, 17, 20)
    assert own == pytest.approx(expected[17], abs=1e-5)
    ids = [token for token, _ in best]
    assert ids == np.argsort(-expected, kind="stable")[:20].tolist()
    np.testing.assert_allclose([value for _, value in best], expected[ids], atol=1e-5)
    assert logprobs(logits, 17, 0) == (own, [])


# Live


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/make_sampling_references.py as a module."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = ROOT / "scripts" / "make_sampling_references.py"
    spec = importlib.util.spec_from_file_location("make_sampling_references", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.live
def test_stored_references_are_todays(script: ModuleType) -> None:
    stored, again = np.load(REFERENCES), script.references()
    assert set(stored) == set(again)
    for name in again:
        if name == "cases":
            assert str(stored[name]) == str(again[name])
        else:
            np.testing.assert_allclose(np.sort(stored[name]), np.sort(again[name]), rtol=1e-6)


@pytest.mark.live
def test_stored_fields_are_todays(script: ModuleType) -> None:
    assert script.fields() == FIELDS


@pytest.mark.live
def test_filters_of_other_logits_are_transformers(script: ModuleType) -> None:
    rng = np.random.default_rng(77)
    for _ in range(60):
        vocab = int(rng.integers(20, 3000))
        logits = rng.normal(rng.normal(0, 5), rng.uniform(0.1, 6), vocab).astype(np.float32)
        ids = rng.integers(0, vocab, 30)
        settings = {
            "temperature": float(rng.uniform(0.2, 3)),
            "top_k": int(rng.integers(1, vocab)),
            "top_p": float(rng.uniform(0.05, 0.99)),
            "min_p": float(rng.uniform(0, 0.2)),
            "repetition_penalty": float(rng.uniform(0.5, 2)),
        }
        try:
            script.check_margin(logits, ids, settings)
        except SystemExit:
            continue
        scores = NumpySampler(params_of(settings), vocab, ids).scores(logits)
        assert_same_scores(scores, script.processed(logits, ids, settings), settings)


@pytest.mark.live
@pytest.mark.parametrize(
    "file",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
        {"do_sample": False, "repetition_penalty": 1.2},
        {},
    ],
)
def test_defaults_are_what_generate_takes(script: ModuleType, file: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    model = script.tiny_model()
    model.generation_config = GenerationConfig(**file)
    config, _ = model._prepare_generation_config(None)
    ours = SamplingParams().resolved(file)
    assert ours.greedy != bool(config.do_sample)
    assert ours.repetition_penalty == config.repetition_penalty
    if config.do_sample:
        assert ours.temperature == config.temperature
        assert ours.top_k == config.top_k
        assert ours.top_p == config.top_p
        assert ours.min_p == (config.min_p or 0.0)
