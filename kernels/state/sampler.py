"""Sampling on the GPU: from a step's logits to its tokens and the rows of the next step.

What a step dispatches depends on what its rows ask for (SamplerChain):

    unfiltered     sample_unfiltered, sample_commit
    min-p          sample_prepare, sample_draw, sample_commit
    top-k          sample_prepare, 3 x sample_histogram, sample_draw, sample_commit
    top-p          the same
    top-k + top-p  sample_prepare, 5 x sample_histogram, sample_draw, sample_commit

All but the last work on tiles of 1024 tokens, and on all rows, side by side. Filters are exact: a
radix selection over all 32 bits of the scores finds where top-k and then top-p cut, one digit per
dispatch; every workgroup reads the last dispatch's histogram, so that no dispatch does that alone.
Probability mass is summed in 32-bit fixed point, so results do not depend on the order of addition.
The draw is Gumbel-max with noise from (seed, position, token), so they do not depend on the batch.

The filters are those of transformers' logits processors, in their order: logit bias, no end before
the least number of tokens, repetition, presence and frequency penalty, temperature, a mask of the
tokens that are possible, top-k (what ties with the k-th survives), top-p (the fewest of the most
probable that reach it; of equal ones the lowest ids), min-p. Temperature 0 is greedy: the lowest id
of the largest score after bias, penalties and mask.

Where several rows are of one sequence, tokens were drafted for all but its first. Each row has a
mask of its own. Penalties count the drafted tokens before a row, and a last kernel, sample_count,
those that were right. Where a model on the GPU has drafted them, the host gets NO_TOKEN from there
on where one was wrong.

A draft model has a sampler of its own, that samples by the records of the other's sequences: its
last kernel, sample_drafts, puts the tokens into the rows that are to be verified. Penalties there
do not count what it has drafted before.

Log probabilities of the sampled token and of the most probable ones are two more kernels, where a
row asks for them: sample_tiles and sample_logprobs. They are those of the model itself: of its
logits before all of the above.

A row without a usable score (any NaN, nothing above -inf) gets INVALID_TOKEN, and stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, Grid, dispatch
from infer.kernels.gpu.shader import KernelSpec, Param
from infer.kernels.state.step import FORBIDDEN, MAX_LOGPROBS, ROW, SAMPLING

INVALID_TOKEN = 0xFFFFFFFE  # sampled from logits that hold NaN, or nothing above -inf
IN_PROMPT = 1 << 31  # in the counts; the bits below say how often a token is in the output

TILE = 1024  # tokens of a workgroup, as in sampling.wgsl
ROW_BINS = 20480  # of sample_histograms.wgsl
CUT = np.dtype(  # of sample_cut.wgsl
    [
        ("maximum", "<f4"),
        ("unit", "<f4"),
        ("k_key", "<u4"),
        ("k_rank", "<u4"),
        ("ties", "<u4"),
        ("k_mass", "<u4"),
        ("k_mass_1", "<u4"),
        ("p_key", "<u4"),
        ("p_rest", "<u4"),
        ("below", "<u4"),
        ("tie", "<u4"),
        ("keep", "<u4"),
    ]
)
LOGPROB = np.dtype([("token", "<u4"), ("logprob", "<f4")])  # of sample_logprobs.wgsl
ROW_LOGPROBS = 1 + MAX_LOGPROBS  # the sampled token's, and the best
LOGPROBS_BYTES = ROW_LOGPROBS * LOGPROB.itemsize  # of a row
SLOTS = 6  # cuts of a row, one for each dispatch that finds something

_Kernel = tuple[KernelSpec, tuple[str, ...]]  # and the buffers that it binds


@dataclass(frozen=True)
class SamplerChain:
    """The stages that the rows of a step need. Rows that do not need one pass it unchanged, so the
    union `a | b` serves the rows of both."""

    noise: bool = False
    penalties: bool = False
    bias: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    logprobs: bool = False
    mask: bool = False
    ends: bool = False

    def __or__(self, other: SamplerChain) -> SamplerChain:
        if self == other:
            return self
        return SamplerChain(*(a or b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def filtered(self) -> bool:
        return self.top_k or self.top_p or self.min_p


class Sampler:
    """Samples up to max_rows rows of up to `sequences` sequences of one model.

    logits is f32 [max_rows][stride] with the stride vocab_size rounded up to a multiple of 8; step
    is a step buffer. `sampled` is u32 [max_rows]: after a step each row's token, NO_TOKEN for a row
    that was not alive, or INVALID_TOKEN. `masks` is u32 [max_rows][vocab_size / 32], on the host:
    token t of a sequence, or of a row where there are drafts, is possible where bit t % 32 of word
    t / 32 is set; `write_masks` takes it to the GPU. `logprobs` is LOGPROB
    [max_rows][ROW_LOGPROBS]: with a chain that has them, each row's token and the most probable
    ones, the best first; NO_TOKEN where the vocabulary has no more. Buffers that only some chains
    use are allocated when the first such chain or sequence comes.
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        logits: Buffer,
        step: Buffer,
        *,
        max_rows: int = 1,
        sequences: int = 1,
        verified: tuple[Sampler, Buffer] | None = None,
    ) -> None:
        """verified: of a draft model the sampler and the step buffer of the model that verifies."""
        self.device, self.vocab_size = device, vocab_size
        self.max_rows, self.sequences = max_rows, sequences
        self._stride = -(-vocab_size // 8) * 8
        self._tiles = -(-vocab_size // TILE)
        self.masks = np.zeros((max(sequences, max_rows), -(-vocab_size // 32)), np.uint32)
        self._buffers = {"logits": logits, "step": step}
        self._owned: list[Buffer] = []
        self._biased: set[int] = set()
        self._dispatches: dict[tuple[SamplerChain, int, bool, bool], tuple[Dispatch, ...]] = {}
        self._drafts = verified is not None
        if verified is not None:
            self._records, self._buffers["verified"] = verified
        self.sampled = self._buffer("sampled")
        self._buffer("sampling")

    def begin(
        self,
        sequence: int,
        record: NDArray[Any],
        prompt_ids: Iterable[int] | NDArray[np.integer] = (),
        bias: Mapping[int, float] | None = None,
        generated: Sequence[int] = (),
        allowed: Sequence[int] | None = None,
    ) -> None:
        """Start a generation: how to sample `sequence` (one SAMPLING record), the tokens that the
        repetition penalty finds in its prompt, what to add to the logits of single tokens, which
        tokens it has generated already, and the only ones that may come; None: all may."""
        self.device.write(
            self._buffer("sampling"), np.atleast_1d(record), sequence * SAMPLING.itemsize
        )
        offset = sequence * self._stride * 4
        off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        if any(record[name].item() != value for name, value in off.items()):
            counts = np.zeros(self.vocab_size, np.uint32)
            ids = np.fromiter(prompt_ids, np.int64)
            counts[ids[ids < self.vocab_size]] = IN_PROMPT
            np.add.at(counts, np.asarray(generated, np.int64), np.uint32(1))
            self.device.write(self._buffer("counts"), counts, offset)
        if bias or allowed is not None or sequence in self._biased:
            dense = np.zeros(self.vocab_size, np.float32)
            if allowed is not None:
                dense[:] = FORBIDDEN
                dense[np.asarray(allowed)] = 0
            for token, value in (bias or {}).items():
                dense[token] = max(dense[token] + value, FORBIDDEN)
            self.device.write(self._buffer("biases"), dense, offset)
            self._biased.add(sequence)

    def write_masks(self, first: int, last: int) -> None:
        """Writes `masks` of the sequences, or rows, from the first to the last. From here on those
        of them that are `masked` sample only tokens that it allows."""
        offset = self.sequences * SAMPLING.itemsize + first * self.masks.strides[0]
        self.device.write(self._buffer("sampling"), self.masks[first : last + 1], offset)

    @property
    def logprobs(self) -> Buffer:
        return self._buffer("logprobs")

    def dispatches(
        self, chain: SamplerChain, gather: int, drafts: bool = False, unknown: bool = False
    ) -> tuple[Dispatch, ...]:
        """The kernels that sample one step, compiled on first use.

        gather: logits row i belongs to step row step.logits_rows[i], for step.n_logits of them, at
        most so many (prefill); 0: logits row i is step row i (decode). Either way the rows of the
        next step are 0, 1, 2…, one for each row of logits. `chain` covers what every row's record
        asks for.
        drafts: rows of one sequence follow each other, and all but its first have drafted tokens;
        the host writes the rows of the next step. unknown: the host does not know what was drafted.
        """
        gather = min(gather, self.max_rows)
        if self._drafts:
            chain = self._own(chain)
        # Else no row looks at others, or at what is kept by row.
        by_row = drafts and (chain.penalties or chain.mask or unknown)
        key = chain, gather, by_row, drafts and unknown
        if key not in self._dispatches:
            self._dispatches[key] = self._build(*key)
        return self._dispatches[key]

    def _own(self, chain: SamplerChain) -> SamplerChain:
        """Returns the stages of the other model's chain that a draft model runs: all that change
        what is sampled; penalties and biases only where both vocabularies have the same size."""
        same = self.vocab_size == self._records.vocab_size
        return replace(
            chain,
            penalties=chain.penalties and same,
            bias=chain.bias and same,
            mask=False,
            logprobs=False,
        )

    def take_rows_of(self, sequences: Sequence[int]) -> None:
        """Writes the sequences whose rows `step_rows` makes the rows of the next step, in this
        order, wherever they are."""
        members = np.array([len(sequences), *sequences], np.uint32)
        self.device.write(self._buffer("members"), members)

    @cached_property
    def step_rows(self) -> Dispatch:
        """The kernel that takes the rows of a step from the table of sequences."""
        buffers = [self._buffer(name) for name in ("members", "sequences", "step")]
        return dispatch(self.device, KernelSpec.of("step_rows"), buffers, (1, 1, 1))

    def set_next(self, sequence: int, token: int, position: int, adapter: int = 0) -> None:
        """The next row of a sequence, where the host has chosen its token."""
        row = np.zeros(1, ROW)
        row["token"], row["position"], row["sequence"], row["alive"] = token, position, sequence, 1
        row["adapter"] = adapter
        self.device.write(self._buffer("sequences"), row, sequence * ROW.itemsize)

    def destroy(self) -> None:
        """Free the sampler's own buffers."""
        self.device.destroy(self._owned)
        self._owned.clear()
        self._dispatches.clear()

    def _build(
        self, chain: SamplerChain, gather: int, drafts: bool, unknown: bool
    ) -> tuple[Dispatch, ...]:
        sizes: dict[str, Param] = {"TILES": self._tiles, "VOCAB": self.vocab_size}
        gathers = self._gathers(gather)
        tokens = sizes | gathers | {"STRIDE": self._stride}
        changes: dict[str, Param] = {
            "PENALTIES": chain.penalties,
            "BIAS": chain.bias,
            "ENDS": chain.ends,
            "MASK": chain.mask,
            "MASK_WORDS": self.masks.shape[1],
            "DRAFTS": drafts and (chain.penalties or chain.mask),
        }
        counts = "counts" if chain.penalties else "no_counts"
        biases = "biases" if chain.bias else "no_biases"
        levels = _levels(chain)
        histograms = "histograms" if levels else "no_histograms"
        inputs = ("step", "sampling", "logits", counts, biases)
        cutting = ("step", "sampling", "z", "stats", histograms, "cuts")

        kernels: list[_Kernel] = []
        if chain.filtered:
            spec = KernelSpec.of("sample_prepare", **tokens, **changes, CLEAR=bool(levels))
            kernels.append((spec, (*inputs, "z", "stats", histograms)))
            for slot, level in enumerate(levels):
                found = _found(chain, levels[:slot])
                spec = KernelSpec.of("sample_histogram", **tokens, **found, LEVEL=level)
                kernels.append((spec, cutting))
            spec = KernelSpec.of("sample_draw", **tokens, **_found(chain, levels))
            kernels.append((spec, (*cutting, "bests")))
        else:
            spec = KernelSpec.of("sample_unfiltered", **tokens, **changes, NOISE=chain.noise)
            kernels.append((spec, (*inputs, "bests")))
        spec = KernelSpec.of(
            "sample_commit",
            **gathers,
            TILES=self._tiles,
            STRIDE=self._stride,
            ROWS=gather or 1,
            PENALTIES=chain.penalties and not drafts and not self._drafts,
            DRAFTS=drafts and (chain.penalties or unknown),
        )
        kernels.append((spec, ("step", "sampling", "bests", counts, "sampled", "sequences")))
        if drafts and (chain.penalties or unknown):
            spec = KernelSpec.of(
                "sample_count",
                VOCAB=self.vocab_size,
                STRIDE=self._stride,
                COUNTS=chain.penalties,
                ACCEPTS=unknown,
            )
            kernels.append((spec, ("step", "sampled", counts)))
        if self._drafts:
            kernels.append((KernelSpec.of("sample_drafts"), ("step", "verified")))
        if chain.logprobs:
            kernels += self._ranking(tokens)
        return self._made(kernels, gather)

    @cached_property
    def ranking(self) -> tuple[Dispatch, ...]:
        """The kernels of log probabilities alone, of all rows of a step: of the tokens that are
        written into `sampled`."""
        sizes = {"TILES": self._tiles, "VOCAB": self.vocab_size, "STRIDE": self._stride}
        return self._made(self._ranking(sizes | self._gathers(0)), 0)

    def _ranking(self, tokens: Mapping[str, Param]) -> list[_Kernel]:
        tiles = KernelSpec.of("sample_tiles", **tokens)
        logprobs = KernelSpec.of("sample_logprobs", **tokens, BEST=MAX_LOGPROBS)
        return [
            (tiles, ("step", "logits", "tile_bests")),
            (logprobs, ("step", "logits", "tile_bests", "sampled", "logprobs")),
        ]

    def _gathers(self, gather: int) -> dict[str, Param]:
        params: dict[str, Param] = {"GATHER": gather > 0, "SEQUENCES": self.sequences}
        return params | {"SOFTWARE": self.device.software}

    def _made(self, kernels: Sequence[_Kernel], gather: int) -> tuple[Dispatch, ...]:
        self.device.pipelines(spec for spec, _ in kernels)
        # A prefill chunk has more rows than logits, nearly always those of one row.
        grid: Grid = (self._tiles, gather, 1) if gather else lambda rows, _: (self._tiles, rows, 1)
        others: dict[str, Grid] = {
            "sample_commit": (1, 1, 1) if gather else lambda rows, _: (rows, 1, 1),
            "sample_count": (1, 1, 1),
            "sample_drafts": (1, 1, 1),
            "sample_logprobs": (1, gather, 1) if gather else lambda rows, _: (1, rows, 1),
        }
        result = []
        for spec, names in kernels:
            vectors = sum(name in ("logits", "z", "counts", "biases") for name in names)
            nbytes = 0 if spec.name in others else vectors * self._stride * 4
            result.append(
                dispatch(
                    self.device,
                    spec,
                    [self._buffer(name) for name in names],
                    others.get(spec.name, grid),
                    moved=lambda rows, _, n=nbytes: n if gather else n * rows,
                )
            )
        return tuple(result)

    def _buffer(self, name: str) -> Buffer:
        """The buffer of that name, allocated when it is first asked for."""
        if self._drafts and name in ("sampling", "counts", "biases"):
            return self._records._buffer(name)
        if name not in self._buffers:
            per_row = {
                "sampled": 4,
                "tile_bests": self._tiles * 16,
                "logprobs": LOGPROBS_BYTES,
                "bests": self._tiles * 8,
                "z": self._stride * 4,
                "stats": self._tiles * 8,
                "histograms": ROW_BINS * 4,
                "cuts": SLOTS * CUT.itemsize,
            }
            per_sequence = {
                "sampling": SAMPLING.itemsize,
                "counts": self._stride * 4,
                "biases": self._stride * 4,
                "sequences": ROW.itemsize,
                "members": 4,
            }
            nbytes = self.max_rows * per_row.get(name, 0)
            nbytes += self.sequences * per_sequence.get(name, 0)  # both 0: a stand-in
            nbytes += 4 * (name == "members")  # how many
            nbytes += self.masks.nbytes * (name == "sampling")
            self._buffers[name] = self.device.buffer(nbytes, label=f"sampler {name}")
            self._owned.append(self._buffers[name])
        return self._buffers[name]


def _levels(chain: SamplerChain) -> list[int]:
    """The histograms to fill, in order; sample_histograms.wgsl numbers them."""
    if chain.top_k:
        return [0, 1, 2, 3, 4] if chain.top_p else [0, 1, 2]
    return [0, 3, 4] if chain.top_p else []


def _found(chain: SamplerChain, filled: list[int]) -> dict[str, Param]:
    """The digits that are found from the last of the `filled` histograms."""
    find_k = find_p = 0
    if filled:
        last = filled[-1]
        find_k = last + 1 if chain.top_k and last < 3 else 0
        if last >= 3:
            find_p = last - 1
        elif chain.top_p and last == (2 if chain.top_k else 0):
            find_p = 1  # needs what top-k leaves, and the histogram of the first digits
    return {"SLOT": len(filled), "FIND_K": find_k, "FIND_P": find_p}
