"""Cases of sampling of which the outcome is known whatever the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Array, to_rows
from infer.kernels.checks.bench import Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand, check_ids
from infer.kernels.checks.forward import Ids, Timings, submit
from infer.kernels.errors import ShaderError
from infer.kernels.state.sampler import (
    INVALID_TOKEN,
    LOGPROB,
    ROW_LOGPROBS,
    Sampler,
    SamplerChain,
)
from infer.kernels.state.step import MAX_STOP_IDS, SAMPLING, pack_step


@by_hand
def run_sample(
    bench: Bench,
    logits: Annotated[Array, "rows, vocab"],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] | Sequence[Sequence[int]] | None = None,
    prompt_ids: Annotated[Ids, "prompt_tokens", "vocab"] = (),
    drafts: Annotated[Ids, "n_drafts", "vocab"] = (),
    stop_ids: Annotated[Ids, "n_stop_ids", "vocab"] = (),
    min_position: int = 0,
    seed: int = 0,
    position: int = 0,
    **options: Unpack[Timings],
) -> Annotated[NDArray[np.uint32], "rows"]:
    """A token for each row of logits [rows, vocab], uint32 [rows], greedy at temperature 0;
    4294967295 for a row that has NaN or nothing above -inf. The noise depends on the seed and the
    row's position, from `position` on. allowed: the tokens that may be sampled, with drafts by each
    row; None: all. prompt_ids: tokens that a repetition penalty is for. drafts: the tokens of all
    rows but the first, where each row is to count those before it. stop_ids: up to 52 tokens that
    no row before min_position samples. What the filters mean is in
    kernels/state/sampler.py."""
    rows, vocab = logits.shape
    drafted = [int(token) for token in drafts]
    if len(drafted) not in (0, rows - 1):
        raise ShaderError(
            f"drafts must be of {rows - 1} rows, all but the first, not {len(drafts)}"
        )
    masks: Sequence[Any] = [] if allowed is None else allowed if drafted else [allowed]
    if allowed is not None and len(masks) != (rows if drafted else 1):
        raise ShaderError(f"allowed must be of each of the {rows} rows, not {len(masks)}")
    for own in masks:
        check_ids("allowed", own, vocab)
    if len(stop_ids) > MAX_STOP_IDS:
        raise ShaderError(f"stop_ids must be {MAX_STOP_IDS} at most, not {len(stop_ids)}")
    check_ids("tokens of logit_bias", list(logit_bias or ()), vocab)
    noise = temperature > 0
    chain = SamplerChain(
        noise=noise,
        penalties=repetition_penalty != 1.0,
        bias=bool(logit_bias),
        top_k=noise and top_k > 0,
        top_p=noise and top_p < 1.0,
        min_p=noise and min_p > 0.0,
        mask=allowed is not None,
        ends=min_position > 0,
    )
    record = np.zeros(1, SAMPLING)
    record["temperature"], record["top_k"], record["top_p"] = temperature, top_k, top_p
    record["min_p"], record["repetition_penalty"] = min_p, repetition_penalty
    record["seed_low"], record["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
    record["max_position"], record["masked"] = 0xFFFFFFFF, allowed is not None
    record["min_position"], record["n_stop_ids"] = min_position, len(stop_ids)
    record["stop_ids"][0, : len(stop_ids)] = stop_ids
    step = bench.device.upload(pack_step([0, *drafted] if drafted else [0] * rows, position))
    buffer = bench.device.upload(to_rows(logits, rows))
    sampler = Sampler(bench.device, vocab, buffer, step, max_rows=rows)
    sampler.begin(0, record[0], [int(token) for token in prompt_ids], logit_bias)
    if masks:
        for row, own in enumerate(masks):
            bits = np.isin(np.arange(-(-vocab // 32) * 32), own)
            sampler.masks[row] = np.packbits(bits, bitorder="little").view(np.uint32)
        sampler.write_masks(0, len(masks) - 1)
    dispatches = sampler.dispatches(chain, gather=0, drafts=bool(drafted))
    submit(bench.device, dispatches, rows, 0, bench.options.get("timings"))
    ids: NDArray[np.uint32] = bench.device.read(sampler.sampled, np.uint32, rows)
    return ids


def cases() -> Iterator[Case]:
    for name, run in _CASES.items():
        yield Case("sample", name, run, exact=True)
    yield Case("sample", "log probabilities", partial(_logprobs, field="logprob"))
    yield Case("sample", "the most probable", partial(_logprobs, field="token"), exact=True)


def _logits(bench: Bench) -> Array:
    return 3 * bench.random(4, 2500)


def _best(bench: Bench, **options: Any) -> Outcome:
    logits = _logits(bench)
    return run_sample(bench, logits, **options), logits.argmax(1)


def _invalid(bench: Bench) -> Outcome:
    logits = _logits(bench)
    logits[1, 2000], logits[2] = np.nan, -np.inf
    expected = logits.argmax(1).astype(np.uint32)
    expected[1:3] = INVALID_TOKEN
    return run_sample(bench, logits), expected


def _first_of_equals(bench: Bench) -> Outcome:
    logits = _logits(bench)
    logits[:, [2400, 1700]] = 50
    return run_sample(bench, logits), np.full(4, 1700)


def _changed(bench: Bench) -> Outcome:
    logits = _logits(bench)
    logits[:, 1100], logits[:, 1200] = 60, 50
    y = run_sample(
        bench, logits, prompt_ids=[1100], repetition_penalty=2.0, logit_bias={1200: -10, 7: 70}
    )
    return y, np.where(logits[:, 7] + 70 > 40, 7, 1200)


def _drafted(bench: Bench) -> Outcome:
    logits = _logits(bench)
    logits[:, [1100, 1200, 5]] = 60, 50, 40
    y = run_sample(bench, logits, drafts=[1100, 3, 1200], repetition_penalty=2.0)
    return y, np.array([1100, 1200, 1200, 5])


def _unended(bench: Bench) -> Outcome:
    logits = _logits(bench)
    logits[:, [7, 1100, 5]] = 60, 50, 40
    y = run_sample(bench, logits, stop_ids=[1100, 7], min_position=22, position=20)
    return y, np.array([5, 5, 7, 7])


def _masked(bench: Bench) -> Outcome:
    logits, allowed = _logits(bench), [3, 31, 32, 1500, 2499]
    y = run_sample(bench, logits, allowed=allowed)
    return y, np.array(allowed)[logits[:, allowed].argmax(1)]


def _masked_by_row(bench: Bench) -> Outcome:
    logits, allowed = _logits(bench), [[3, 31], [32, 1500, 2499], [7], [2498, 2499]]
    y = run_sample(bench, logits, allowed=allowed, drafts=[31, 32, 7])
    return y, np.array([max(own, key=lambda t: logits[i, t]) for i, own in enumerate(allowed)])


def _logprobs(bench: Bench, field: str) -> Outcome:
    """Greedily; of two tokens that tie for the second place the lower one comes first."""
    logits = _logits(bench)
    logits[:, [2400, 1700]], logits[:, 9] = 50, 51
    rows, vocab = logits.shape
    step = bench.device.upload(pack_step(np.zeros(rows, np.int64), 0))
    sampler = Sampler(
        bench.device, vocab, bench.device.upload(to_rows(logits, rows)), step, max_rows=rows
    )
    sampler.begin(0, np.zeros(1, SAMPLING)[0])
    dispatches = sampler.dispatches(SamplerChain(logprobs=True), gather=0)
    submit(bench.device, dispatches, rows, 0, None)
    y = bench.device.read(sampler.logprobs, LOGPROB, rows * ROW_LOGPROBS).reshape(rows, -1)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, : ROW_LOGPROBS - 1]
    order = np.concatenate([order[:, :1], order], axis=1)
    expected = order if field == "token" else np.take_along_axis(logprobs, order, 1)
    return y[field], expected


def _survivors(bench: Bench, n: int, **options: Any) -> Outcome:
    """Tokens 5, 1030, 2499, 1031 have 40, 30, 20 and 10 %. All of the first n appear, no other."""
    probabilities = {5: 0.4, 1030: 0.3, 2499: 0.2, 1031: 0.1}
    logits = np.full((64, 2500), -30.0)
    logits[:, [*probabilities]] = np.log([*probabilities.values()])
    ids = run_sample(bench, logits, temperature=1.0, seed=3, **options)
    survivors = [*probabilities][:n]
    found = [token in ids for token in survivors]
    y = np.array([*np.isin(ids, survivors), *found])
    return y, np.ones_like(y)


_CASES: dict[str, Callable[[Bench], Outcome]] = {
    "greedy": _best,
    "greedy, equal logits": _first_of_equals,
    "not a number": _invalid,
    "penalty and bias": _changed,
    "drafts": _drafted,
    "no end yet": _unended,
    "mask": _masked,
    "masks of drafts": _masked_by_row,
    "top-k 1": partial(_best, temperature=1.0, top_k=1),
    "top-p 0": partial(_best, temperature=1.0, top_p=1e-9),
    "min-p 1": partial(_best, temperature=1.0, min_p=1.0),
    "unfiltered": partial(_survivors, n=4),
    "top-k 3": partial(_survivors, n=3, top_k=3),
    "top-p 0.6": partial(_survivors, n=2, top_p=0.6),
    "min-p 0.4": partial(_survivors, n=3, min_p=0.4),
    "top-k 3, top-p 0.7": partial(_survivors, n=2, top_k=3, top_p=0.7),
    "mask, top-k 9, top-p 0.999": partial(
        _survivors, n=2, allowed=[5, 7, 1030], top_k=9, top_p=0.999
    ),
}
