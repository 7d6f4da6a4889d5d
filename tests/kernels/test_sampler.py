"""The GPU sampler: survivors as transformers', draws as softmax, the next step's rows."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import places
import pytest
from numpy.typing import NDArray

from infer.generation_config import sampling_defaults
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.plan import Dispatch
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec, render_text
from infer.kernels.state.sampler import (
    CUT,
    INVALID_TOKEN,
    LOGPROB,
    ROW_LOGPROBS,
    SLOTS,
    Sampler,
    SamplerChain,
)
from infer.kernels.state.step import HEADER, MAX_LOGPROBS, MAX_STOP_IDS, NO_TOKEN, ROW, pack_step
from infer.sampling import NumpySampler, SamplingParams, gumbel

REFERENCES = places.DATA / "sampling" / "processors.npz"
CONTEXT = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """With the least that WebGPU guarantees: the sampler needs no more anywhere."""
    least = Settings(subgroups=False, f16=False, workgroup_storage=16384, max_invocations=256)
    with Device.open(settings=least) as device:
        yield device


class Bench:
    """A sampler with its logits and step buffers, for rows of one sequence or one of each."""

    def __init__(
        self,
        device: Device,
        logits: NDArray[np.floating],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_ids: Sequence[int] = (1,),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """logits: [rows, vocab]; params: one for all rows, which then are tokens of one sequence,
        or one for each, which then are sequences."""
        rows, self.vocab = logits.shape
        padded = np.full((rows, -(-self.vocab // 8) * 8), np.nan, np.float32)  # never to be seen
        padded[:, : self.vocab] = logits
        self.device, self.rows = device, rows
        self.several = [params] if isinstance(params, SamplingParams) else list(params)
        self.logits = device.upload(padded)
        self.step = device.buffer(HEADER.itemsize + max(rows, 8) * ROW.itemsize)
        self.sampler = Sampler(
            device,
            self.vocab,
            self.logits,
            self.step,
            max_rows=rows,
            sequences=len(self.several),
        )
        self.chain = SamplerChain()
        for sequence, own in enumerate(self.several):
            record = own.record(
                vocab_size=self.vocab,
                prompt_tokens=len(prompt_ids),
                context=CONTEXT,
                stop_ids=stop_ids,
            )
            self.sampler.begin(sequence, record, prompt_ids, own.logit_bias)
            self.chain |= own.chain()

    def start(self, position: int = 0) -> None:
        """Rows for a step: consecutive positions of one sequence, or one row of each."""
        packed = pack_step([1] * self.rows, position)
        if len(self.several) > 1:
            rows = packed[HEADER.itemsize :].view(ROW)
            rows["sequence"], rows["position"] = np.arange(self.rows), position
        self.device.write(self.step, packed)

    def sample(self, gather: int = 0) -> NDArray[np.uint32]:
        run(self.device, self.sampler.dispatches(self.chain, gather), self.rows)
        return self.device.read(self.sampler.sampled, np.uint32, self.rows)

    def step_rows(self) -> NDArray[Any]:
        return self.device.read(self.step, ROW, self.rows, HEADER.itemsize)

    def filtered(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns the scores of the last step [rows, vocab], and which of them survive the filters
        by the cuts that sample_draw has written down."""
        buffers = self.sampler._buffers
        z = self.device.read(buffers["z"]).reshape(self.rows, -1)[:, : self.vocab]
        n_found = len(self.sampler.dispatches(self.chain, 0)) - 2
        cuts = self.device.read(buffers["cuts"], CUT).reshape(self.rows, SLOTS)[:, n_found - 1]
        bits = (z + np.float32(0)).view(np.uint32)
        keys = np.where(bits >> 31 == 1, bits, ~(bits | np.uint32(1 << 31)))
        tied = keys == cuts["tie"][:, None]
        survives = keys < cuts["below"][:, None]
        survives |= tied & (np.cumsum(tied, 1) <= cuts["keep"][:, None])
        least = [params.min_p or 0.0 for params in self.several]
        survives &= np.exp(z - z.max(1, keepdims=True)) >= np.array(least)[:, None]
        return z, survives


def reference_cases() -> list[tuple[int, dict[str, Any]]]:
    return json.loads(str(np.load(REFERENCES)["cases"]))  # type: ignore[no-any-return]


def params_of(settings: dict[str, Any]) -> SamplingParams:
    """A GenerationConfig's settings as ours."""
    file = {"do_sample": True, "temperature": 1.0, "top_k": 0} | settings
    return SamplingParams(seed=1).resolved(sampling_defaults(file, 1 << 20))


def chi_square_limit(degrees: int, sigmas: float = 3.9) -> float:
    """Returns the value that chi-square exceeds once in 20,000 times (Wilson and Hilferty's
    approximation)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + sigmas * part**0.5) ** 3)


def assert_drawn_from(tokens: NDArray[np.integer], expected: NDArray[np.float64]) -> None:
    """Pearson's chi-square test of tokens against probabilities, rare tokens taken together."""
    observed = np.bincount(tokens, minlength=len(expected)).astype(float)
    wanted = expected * len(tokens)
    assert observed[wanted == 0].sum() == 0
    rare = wanted < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 10:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(len(wanted) - 1)


def softmax(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


# Survivors


@pytest.mark.parametrize(
    "n", [n if n == 6 else pytest.param(n, marks=pytest.mark.full) for n in range(10)]
)
def test_survivors_are_transformers(device: Device, n: int) -> None:
    """All settings for one vector of logits in one dispatch, a sequence each: a row must pass the
    stages that only others need unchanged."""
    stored = np.load(REFERENCES)
    cases = [(i, settings) for i, (m, settings) in enumerate(reference_cases()) if m == n]
    logits = stored[f"logits.{n}"]
    bench = Bench(
        device,
        np.tile(logits, (len(cases), 1)),
        [params_of(settings) for _, settings in cases],
        prompt_ids=stored[f"ids.{n}"],
    )
    bench.start()
    tokens = bench.sample()
    z, survives = bench.filtered()
    for row, (i, settings) in enumerate(cases):
        expected = stored[f"scores.{i}"]
        kept = expected > -np.inf
        assert survives[row].sum() == kept.sum(), settings
        # Equal scores survive. transformers' sort decides which of the tokens that tie do.
        np.testing.assert_allclose(
            np.sort(z[row][survives[row]]), np.sort(expected[kept]), rtol=2e-6, atol=1e-7
        )
        tied = expected == expected[kept].min()
        if "top_p" not in settings or tied.sum() == (z[row] == z[row][survives[row]].min()).sum():
            np.testing.assert_array_equal(survives[row], kept, str(settings))
        assert survives[row][tokens[row]], settings


SCALES = (0.0, 1e-3, 4.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("vocab", "scale"),
    [
        *product((5, 1025), SCALES),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product((1023, 32003, 151936), SCALES)
        ),
    ],
)
def test_survivors_of_any_vocabulary(device: Device, vocab: int, scale: float) -> None:
    """Against the numpy filters, which test_sampling.py holds to transformers."""
    rng = np.random.default_rng(vocab)
    several = [
        SamplingParams(temperature=0.8, top_k=max(vocab // 3, 2), seed=1),
        SamplingParams(temperature=1.3, top_p=0.617, seed=1),
        SamplingParams(temperature=1.0, top_k=max(vocab // 2, 2), top_p=0.9, min_p=0.01, seed=1),
        SamplingParams(temperature=1.0, top_k=1, top_p=0.0, seed=1),
    ]
    logits = rng.normal(0, 1, (4, vocab)).astype(np.float32) * np.float32(scale) - 7
    bench = Bench(device, logits, several)
    bench.start()
    tokens = bench.sample()
    z, survives = bench.filtered()
    for row, params in enumerate(several):
        # From the GPU's own quotients, whose last bit the division may round differently.
        same = SamplingParams(
            temperature=1.0, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        kept = NumpySampler(same, vocab, [1]).scores(z[row]) > -np.inf
        # Tens of thousands of nearly equal probabilities: one may lie within rounding of top_p.
        assert (survives[row] != kept).sum() <= (vocab > 10000 and params.top_p is not None)
        assert survives[row][tokens[row]]


def test_scores_below_float_resolution_of_the_maximum_stay_apart(device: Device) -> None:
    """0.1 and the next float differ, though their distances to a maximum of 1000 do not."""
    logits = np.zeros((1, 1300), np.float32)
    logits[0, 7], logits[0, 20] = 1000, 0.1
    logits[0, 30] = np.nextafter(np.float32(0.1), np.float32(1))
    bench = Bench(device, logits, SamplingParams(temperature=1.0, top_k=2, seed=0))
    bench.start()
    bench.sample()
    assert np.flatnonzero(bench.filtered()[1][0]).tolist() == [7, 30]


@pytest.mark.full
def test_what_top_k_removes_cannot_overflow_top_p(device: Device) -> None:
    """The removed tokens' mass is near a multiple of 2**32, in the very bins where top-p cuts: of
    the second digit (neighbouring floats), and of the third (equal floats)."""
    rng = np.random.default_rng(3)
    neighbours = np.float32(1) + rng.permutation(4004).astype(np.float32) * np.float32(2**-23)
    equal = np.full(4004, 1, np.float32)
    equal[rng.permutation(4004)[:20]] = np.nextafter(np.float32(1), np.float32(2))
    several = [
        SamplingParams(temperature=1.0, top_k=40, top_p=0.59, seed=1),  # 24 of 40
        SamplingParams(temperature=1.0, top_k=25, top_p=0.0029, seed=1),  # 12 of 4,004
    ]
    bench = Bench(device, np.stack([neighbours, equal]), several)
    bench.start()
    bench.sample()
    _, survives = bench.filtered()
    assert sorted(np.flatnonzero(survives[0])) == sorted(np.argsort(-neighbours)[:24])
    assert np.flatnonzero(survives[1]).tolist() == np.flatnonzero(equal > 1)[:12].tolist()


@pytest.mark.parametrize(
    "vocab", [45, 1025, *(pytest.param(n, marks=pytest.mark.full) for n in (32003, 151936))]
)
def test_survivors_of_masks(device: Device, vocab: int) -> None:
    """Against the numpy filters of what is allowed: fewer tokens than k among them, one, and none;
    beside a row without a mask."""
    rng = np.random.default_rng(vocab)
    filters: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.617},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.999999},
    ]
    shares = [0.0, 1 / vocab, 20 / vocab, 0.5]
    cases = [(own, share) for own in filters for share in shares]
    several = [SamplingParams(regex="x", seed=1, **own) for own, _ in cases]
    several.append(SamplingParams(temperature=1.0, top_k=40, seed=1))
    logits = rng.normal(0, 3, (len(several), vocab)).astype(np.float32)
    bench = Bench(device, logits, several)
    masks = np.zeros((len(several), -(-vocab // 32) * 32), np.bool_)
    for row, (_, share) in enumerate(cases):
        masks[row, rng.permutation(vocab)[: round(share * vocab)]] = True
    bench.sampler.masks[:] = np.packbits(masks, axis=1, bitorder="little").view(np.uint32)
    bench.sampler.write_masks(0, len(cases) - 1)
    masks[-1] = True
    bench.start()
    tokens = bench.sample()
    z, survives = bench.filtered()
    for row, params in enumerate(several):
        allowed = masks[row, :vocab]
        if not allowed.any():
            assert tokens[row] == INVALID_TOKEN
            continue
        assert allowed[tokens[row]]
        if params.greedy:
            assert tokens[row] == np.where(allowed, logits[row], -np.inf).argmax()
            continue
        same = SamplingParams(
            temperature=1.0, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        kept = NumpySampler(same, vocab, [1]).scores(z[row], allowed) > -np.inf
        # One of thousands of nearly equal probabilities, or of the last before 1, may lie within
        # rounding of top_p.
        within = vocab > 10000 or (params.top_p or 0.0) > 0.9999
        assert ((survives[row] & allowed) != kept).sum() <= within
        assert kept[tokens[row]]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.5, "repetition_penalty": 1.5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    ],
)
def test_stop_ids_are_forbidden_before_the_least_position(
    device: Device, settings: dict[str, Any]
) -> None:
    """Stop ids are forbidden in all rows of a sequence that come too early, and of two sequences in
    the one alone that asks for it."""
    stop_ids, vocab = [0, 7, 1030, 1501], 1502
    logits = np.random.default_rng(3).normal(0, 1, (6, vocab)).astype(np.float32)
    logits[:, stop_ids] = 30
    params = SamplingParams(**settings, min_tokens=3, seed=1)
    bench = Bench(device, logits, params, prompt_ids=[1, 7], stop_ids=stop_ids)
    bench.start(1)  # the last of the prompt
    tokens = bench.sample().tolist()
    sampler = NumpySampler(params, vocab, [1, 7], stop_ids=stop_ids)
    if params.greedy:
        assert tokens[:3] == [sampler.scores(row).argmax() for row in logits[:3]]
    assert not {*tokens[:3]} & {*stop_ids}
    assert {*tokens[3:]} <= {*stop_ids}

    free = SamplingParams(**settings, seed=1)
    two = Bench(device, logits[:2], [params, free], prompt_ids=[1, 7], stop_ids=stop_ids)
    two.start(1)
    first, second = two.sample().tolist()
    assert first not in stop_ids
    assert second in stop_ids


# Draws


def test_noise_is_exact_to_its_extremes(device: Device) -> None:
    """Noise of all 32 bits is compared with float64."""
    source = """
    #include "sample_noise.wgsl"
    @group(0) @binding(0) var<storage, read> bits: array<u32>;
    @group(0) @binding(1) var<storage, read_write> noise: array<f32>;
    @compute @workgroup_size(64)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
      noise[id.x] = gumbel_of(bits[id.x]);
      if (id.x >= 1024u) { noise[id.x] = gumbel(vec2<u32>(7u, 1u), 30u, bits[id.x]); }
    }
    """
    bits = np.random.default_rng(2).integers(0, 2**32, 1024).astype(np.uint32)
    bits[:32] = 2 ** np.arange(32)
    bits[32:64] = ~bits[:32]
    bits[64:68] = [0, 2**32 - 1, 0x03FFFFFF, 0x04000000]
    # The tokens with the largest noise of a million.
    tokens = np.argsort(-gumbel(7 + 2**32, 30, np.arange(2**20)))[:1024]
    shader = render_text(textwrap.dedent(source))
    pipeline = device.compile(KernelSpec.of("noise"), shader)
    noise = device.buffer(2048 * 4)
    inputs = device.upload(np.append(bits, tokens.astype(np.uint32)))
    group = device.bind(pipeline, [inputs, noise])
    run(device, [Dispatch(pipeline, group, (32, 1, 1))])
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    expected = np.append(-np.log(-np.log1p(-uniform)), gumbel(7 + 2**32, 30, tokens))
    np.testing.assert_allclose(device.read(noise), expected, rtol=1e-6, atol=5e-5)


def probabilities(logits: NDArray[np.floating], params: SamplingParams) -> NDArray[np.float64]:
    return softmax(NumpySampler(params, len(logits), [1]).scores(logits))


@pytest.mark.parametrize(
    ("vocab", "settings"),
    [
        (60, {"temperature": 1.0}),
        (60, {"temperature": 0.5}),
        (1303, {"temperature": 1.0}),
        (1303, {"temperature": 2.0, "min_p": 0.1}),
    ],
)
def test_draws_follow_softmax(device: Device, vocab: int, settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(5).normal(0, 2, vocab).astype(np.float32)
    params = SamplingParams(**settings, seed=11)
    bench = Bench(device, np.tile(logits, (1024, 1)), params)
    bench.start()
    assert_drawn_from(bench.sample(), probabilities(logits, params))
    bench.sampler.destroy()


@pytest.mark.full
@pytest.mark.parametrize(
    ("scale", "vocab", "settings"),
    [
        (2, 1303, {"top_k": 20}),
        (2, 1303, {"top_p": 0.8}),
        (2, 1303, {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}),
        # The cut goes through equal scores: the 27 lowest ids of 1,303, and three of five.
        (0, 1303, {"top_p": 0.02}),
        (0, 5, {"top_p": 0.5}),
    ],
)
def test_filtered_draws_follow_softmax(
    device: Device, scale: float, vocab: int, settings: dict[str, Any]
) -> None:
    logits = np.random.default_rng(6).normal(0, scale, vocab).astype(np.float32)
    params = SamplingParams(**({"temperature": 1.0} | settings), seed=12)
    bench = Bench(device, np.tile(logits, (256, 1)), params)
    tokens = []
    for position in range(0, 512, 256):
        bench.start(position)
        tokens.append(bench.sample())
    assert_drawn_from(np.concatenate(tokens), probabilities(logits, params))
    bench.sampler.destroy()


@pytest.mark.full
def test_ties_are_cut_across_tiles(device: Device) -> None:
    """The 1,501 lowest ids of 2,500 with equal scores survive, in tiles of 1,024."""
    params = SamplingParams(temperature=1.0, top_p=0.6004, seed=3)
    bench = Bench(device, np.zeros((256, 2500)), params)
    tokens = []
    for position in range(0, 512, 256):
        bench.start(position)
        tokens.append(bench.sample())
    drawn = np.concatenate(tokens)
    assert drawn.max() <= 1500
    assert_drawn_from(drawn // 79, np.full(19, 1 / 19))  # 1501 = 19 * 79
    bench.sampler.destroy()


@pytest.mark.full
def test_rare_tokens_of_a_large_vocabulary(device: Device) -> None:
    """One token has half of the probability, 151,935 share the rest: only the extremes of the
    noise matter."""
    logits = np.zeros((32, 151_936), np.float32)
    logits[:, 70_000] = np.log(151_935)
    bench = Bench(device, logits, SamplingParams(temperature=1.0, seed=4))
    drawn = []
    for position in range(0, 128, 32):
        bench.start(position)
        drawn.append(bench.sample())
    tokens = np.concatenate(drawn)
    assert_drawn_from((tokens != 70_000).astype(int), np.array([0.5, 0.5]))
    others = tokens[tokens != 70_000]
    assert_drawn_from(others * 4 // 151_936, np.full(4, 1 / 4))
    assert len(np.unique(others)) > 0.98 * len(others)
    # And each is the token that the same noise chooses in float64, unless two are nearly equal.
    for position, token in enumerate(tokens[:32]):
        score = logits[0] + gumbel(4, position, np.arange(151_936))
        assert score[token] > score.max() - 1e-4
    bench.sampler.destroy()


def test_a_seed_repeats_in_any_row_and_another_differs(device: Device) -> None:
    logits = np.tile(np.random.default_rng(8).normal(0, 1, 60), (6, 1))
    # The sixth seed differs from the others in its high half alone.
    several = [SamplingParams(temperature=1.0, seed=s) for s in (5, 6, 5, 5 + 2**32, 5, 5)]
    bench = Bench(device, logits, several)
    tokens = []
    for position in range(40):
        bench.start(position)
        tokens.append(bench.sample())
    text = np.array(tokens).T
    for other in (2, 4, 5):
        np.testing.assert_array_equal(text[0], text[other])
    assert (text[0] != text[1]).any()
    assert (text[0] != text[3]).any()


@pytest.mark.full
def test_the_plain_path_draws_the_same_text(device: Device) -> None:
    """Ten steps of the GPU, which feeds itself, and of NumpySampler, for unlike sequences at once:
    penalties, bias and noise of every step."""
    prompt_ids = [3, 7, 7, 40]
    several = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=-0.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.8, seed=1),
        SamplingParams(temperature=0.9, frequency_penalty=2.0, top_k=9, seed=2**63 + 5),
        SamplingParams(temperature=1.2, logit_bias={3: 8.0, 9: 9.0, 50: -100.0}, top_p=0.9, seed=3),
        SamplingParams(temperature=1.2, repetition_penalty=0.6, min_p=0.2, seed=4),
    ]
    logits = np.random.default_rng(9).normal(0, 2, (6, 60)).astype(np.float32)
    bench = Bench(device, logits, several, prompt_ids=prompt_ids)
    bench.start(len(prompt_ids) - 1)
    text = np.array([bench.sample() for _ in range(10)]).T
    for row, params in enumerate(several):
        plain = NumpySampler(params, 60, prompt_ids)
        assert text[row].tolist() == [plain(logits[row]) for _ in range(10)], params
    assert len(np.unique(text[1])) > 1  # the penalties moved it


def test_a_new_generation_forgets_the_last(device: Device) -> None:
    logits = np.zeros((1, 60), np.float32)
    first = SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={4: 5.0})
    bench = Bench(device, logits, first)
    bench.start()
    assert bench.sample().tolist() == [4]
    second = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    record = second.record(vocab_size=60, prompt_tokens=1, context=CONTEXT, stop_ids=())
    bench.sampler.begin(0, record, [0])
    bench.start()
    assert bench.sample().tolist() == [0]
    counts = bench.device.read(bench.sampler._buffers["counts"], np.uint32, 60)
    assert counts.tolist() == [2**31 + 1] + [0] * 59


# Greedy


@pytest.mark.parametrize("chain", [SamplerChain(), SamplerChain(noise=True, top_k=True)])
def test_greedy_takes_the_lowest_of_equal_ids(device: Device, chain: SamplerChain) -> None:
    """Also where other rows are sampled."""
    logits = np.random.default_rng(10).normal(0, 1, (4, 2000)).astype(np.float32)
    logits[0, [1900, 1700, 1500]] = 9
    logits[1] = -5
    logits[2] = 0
    logits[2, 0] = -0.0
    logits[3, 1999] = np.inf
    bench = Bench(device, logits, SamplingParams(temperature=0.0))
    bench.chain = chain
    bench.start()
    assert bench.sample().tolist() == [1500, 0, 0, 1999]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_unusable_logits_are_told(device: Device, settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(10).normal(0, 1, (5, 2000)).astype(np.float32)
    logits[0, 1700] = np.nan
    logits[1, 3] = np.array(0xFFC00000, np.uint32).view(np.float32)  # a NaN with a sign
    logits[2] = np.nan
    logits[3] = -np.inf
    logits[4, 1000:] = -np.inf  # usable
    bench = Bench(device, logits, SamplingParams(**settings, seed=2))
    bench.start()
    tokens = bench.sample()
    assert tokens[:4].tolist() == [INVALID_TOKEN] * 4
    assert tokens[4] < 1000
    assert bench.step_rows()["alive"].tolist() == [0, 0, 0, 0, 1]
    assert bench.sample()[:4].tolist() == [NO_TOKEN] * 4


# The next step's rows


def test_commit_writes_the_next_step(device: Device) -> None:
    logits = np.zeros((4, 60), np.float32)
    logits[np.arange(4), [3, 4, 5, 6]] = 1
    bench = Bench(device, logits, SamplingParams(temperature=0.0), stop_ids=[9, 4])
    bench.start(70)
    packed = bench.device.read(bench.step, np.uint8, HEADER.itemsize + 4 * ROW.itemsize)
    rows = packed[HEADER.itemsize :].view(ROW)
    rows["adapter"], rows["alive"][2] = 5, 0
    bench.device.write(bench.step, packed)
    before = rows.copy()

    assert bench.sample().tolist() == [3, 4, NO_TOKEN, 6]
    after = bench.step_rows()
    assert after["token"].tolist() == [3, 4, 1, 6]
    assert after["position"].tolist() == [71, 72, 72, 74]
    assert after["alive"].tolist() == [1, 0, 0, 1]  # 4 stops
    assert after["adapter"].tolist() == [5] * 4
    assert after[2] == before[2]
    assert bench.sample().tolist() == [3, NO_TOKEN, NO_TOKEN, 6]


def test_all_stop_ids_are_seen(device: Device) -> None:
    stop_ids = list(range(100, 100 + MAX_STOP_IDS))
    logits = np.zeros((3, 200), np.float32)
    logits[[0, 1, 2], [100, stop_ids[-1], stop_ids[-1] + 1]] = 1
    bench = Bench(device, logits, SamplingParams(temperature=0.0), stop_ids=stop_ids)
    bench.start()
    bench.sample()
    assert bench.step_rows()["alive"].tolist() == [0, 0, 1]


@pytest.mark.parametrize(("max_tokens", "context"), [(1, 99), (3, 99), (None, 12), (50, 12)])
def test_rows_end_at_max_position(device: Device, max_tokens: int | None, context: int) -> None:
    """A prompt of 10: tokens come until there are max_tokens, or the context has no place."""
    bench = Bench(device, np.zeros((1, 60)), SamplingParams(temperature=0.0))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    record = params.record(vocab_size=60, prompt_tokens=10, context=context, stop_ids=())
    bench.sampler.begin(0, record)
    bench.start(9)
    tokens = [int(bench.sample()[0]) for _ in range(6)]
    expected = min(max_tokens or 99, context - 10 + 1)
    assert tokens == [0] * expected + [NO_TOKEN] * (6 - expected)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 0.5}],
)
def test_gather_reads_all_rows_before_it_writes(device: Device, settings: dict[str, Any]) -> None:
    """Logits of some rows of a chunk become the first rows of the next step, in any order."""
    places = [2, 0, 3, 1]
    logits = np.zeros((6, 60), np.float32)
    logits[np.arange(4), [11, 12, 13, 14]] = 5
    params = SamplingParams(**settings, repetition_penalty=1.1, seed=1)
    bench = Bench(device, logits, [params] * 6)
    header = pack_step([1] * 6, 20, logits_rows=places)
    rows = header[HEADER.itemsize :].view(ROW)
    rows["sequence"] = [0, 1, 2, 3, 4, 5]
    rows["alive"][3] = 0
    bench.device.write(bench.step, header)
    stops_at_11 = params.record(vocab_size=60, prompt_tokens=1, context=CONTEXT, stop_ids=[11])
    bench.sampler.begin(2, stops_at_11, [1])

    assert bench.sample(gather=8)[:4].tolist() == [11, 12, NO_TOKEN, 14]
    after = bench.step_rows()[:4]
    assert after["token"].tolist() == [11, 12, 1, 14]
    assert after["sequence"].tolist() == places
    assert after["position"].tolist() == [23, 21, 23, 22]
    assert after["alive"].tolist() == [0, 1, 0, 1]
    assert bench.device.read(bench.step, np.uint32, 1).tolist() == [4]
    counts = bench.device.read(bench.sampler._buffers["counts"], np.uint32, 6 * 64)
    counts = counts.reshape(6, 64)[:, :60]
    in_output = counts & 0x7FFFFFFF
    expected = np.zeros((6, 60), int)
    expected[[2, 0, 1], [11, 12, 14]] = 1
    np.testing.assert_array_equal(in_output, expected)
    # The step's rows now are in the order of the logits.
    assert bench.sample().tolist()[:4] == [NO_TOKEN, 12, NO_TOKEN, 14]


# Log probabilities


def logprobs_of(bench: Bench) -> NDArray[Any]:
    """LOGPROB [rows, ROW_LOGPROBS], of the last step."""
    count = bench.rows * ROW_LOGPROBS
    return bench.device.read(bench.sampler.logprobs, LOGPROB, count).reshape(bench.rows, -1)


def assert_logprobs(found: NDArray[Any], logits: NDArray[np.floating], token: int) -> None:
    """Compares the log probabilities of one row with log-softmax in float64. The lowest of the ids
    with equal logits come first."""
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-expected, kind="stable")[:MAX_LOGPROBS]
    assert found["token"][0] == token
    assert found["token"][1 : 1 + len(best)].tolist() == best.tolist()
    assert (found["token"][1 + len(best) :] == NO_TOKEN).all()
    values = found["logprob"][: 1 + len(best)]
    np.testing.assert_allclose(values, expected[[token, *best]], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("vocab", "scale"),
    [
        (2111, 3.0),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product((5, 20, 1024, 1025, 32003, 300_001), (0.0, 1e-3, 8.0))
        ),
    ],
)
def test_log_probabilities_are_those_of_the_logits(
    device: Device, vocab: int, scale: float
) -> None:
    """Not of what penalties, a bias, temperature and filters make of them. Rounded, so that many
    are equal; some are -inf."""
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(0, scale, (6, vocab)) * 8).round().astype(np.float32) / 8 - 40
    logits[2, 1 : vocab // 2] = -np.inf
    params = [
        SamplingParams(logprobs=0),
        SamplingParams(temperature=1.5, top_k=2, logit_bias={3: 100.0}, logprobs=20, seed=1),
        SamplingParams(temperature=0.7, seed=2, repetition_penalty=1.5),
    ]
    bench = Bench(device, logits, 2 * params)
    bench.start()
    tokens = bench.sample()
    for row, found in enumerate(logprobs_of(bench)):
        assert_logprobs(found, logits[row], int(tokens[row]))
    assert tokens[1] == 3


def test_log_probabilities_of_rows_that_are_gathered(device: Device) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (8, 1100))
    bench = Bench(device, logits, SamplingParams(logprobs=2))
    device.write(bench.step, pack_step([1] * 8, 0, logits_rows=[2, 7]))
    tokens = bench.sample(gather=8)
    for row, found in enumerate(logprobs_of(bench)[:2]):
        assert_logprobs(found, logits[row].astype(np.float32), int(tokens[row]))


def test_chains_dispatch_what_they_need(device: Device) -> None:
    bench = Bench(device, np.zeros((1, 60)), SamplingParams())
    both = SamplerChain(noise=True, top_k=True) | SamplerChain(bias=True, top_p=True)
    counts = {
        SamplerChain(): 2,
        SamplerChain(noise=True, penalties=True, bias=True): 2,
        SamplerChain(noise=True, min_p=True): 3,
        SamplerChain(noise=True, top_k=True): 6,
        SamplerChain(noise=True, top_p=True, min_p=True): 6,
        both: 8,
        SamplerChain(True, True, True, True, True, True, mask=True): 8,
        SamplerChain(logprobs=True): 4,
    }
    assert both == SamplerChain(noise=True, bias=True, top_k=True, top_p=True)
    for chain, count in counts.items():
        assert len(bench.sampler.dispatches(chain, 0)) == count
        for dispatch in bench.sampler.dispatches(chain, 1):
            assert len(dispatch.pipeline.shader.bindings) <= 8  # what WebGPU guarantees a stage
