"""What a benchmark measures: which model, and which tests of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infer.bench.measure import (
    BATCH_DEPTH,
    BATCH_TOKENS,
    Sizes,
    batch_positions,
    drafts_positions,
)
from infer.engine.options import MAX_BATCH
from infer.engine.speculation import MAX_DRAFT
from infer.kernels.errors import RequestError
from infer.kernels.state.kv_cache import KV_DTYPES
from infer.loading import DTYPES, weight_dtype

OWN_LAYER = "mtp"  # the value of draft that means the model's own predicting layer


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, or the shape of one (a key of SHAPES) on random weights.

    device, webgpu, precision, context, dtype, quantize, kv_dtype, adapter, revision, offline and
    invariant are as for `load`. A shape's weights are bf16 where dtype and quantize are None, or
    packed as in checkpoints of a `format` (a key of PUBLISHED); a shape has no adapter. draft: the
    model that drafts tokens, or for a shape another shape, quantised or not as draft_quantize says,
    or "mtp", the model's own layer.
    """

    model: str | None = None
    shape: str | None = None
    format: str | None = None
    device: str | int | None = None
    webgpu: str | None = None
    precision: str = "auto"
    context: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    kv_dtype: str = "f16"
    invariant: bool = False
    adapter: str | Path | None = None
    revision: str | None = None
    offline: bool = False
    draft: str | None = None
    draft_quantize: str | None = None

    def check(self) -> None:
        """Raises RequestError for dtypes that there are not."""
        if self.dtype not in (None, *DTYPES) or self.kv_dtype not in KV_DTYPES:
            raise RequestError("Weights are f32, f16 or bf16, and the KV cache f16, f32 or q8.")
        weight_dtype(self.dtype, self.quantize)


@dataclass(frozen=True, kw_only=True)
class BenchTests:
    """The tests of a benchmark.

    prompt_tokens: of the prefill test, of which there is one more with a prefix: the share of the
    prompt that is in the cache before. decode_tokens: of every decode test, of which there is one
    more for each of `depths`, the tokens that are in the cache before it. batches: decode of so
    many answers at once, after as many tokens each as the depths say, or 128. clients: so many at
    once, each of which sends `repeats` requests, one after the other: prompts of an eighth of
    prompt_tokens to all of them, answers of decode_tokens. accept: decode also with drafts, alone
    and in each of `batches`, of which each is right with this probability. draft_rows: how many are
    drafted for a step; None: as many as pay. Each test runs `repeats` times after a warm-up.
    prompt_tokens, decode_tokens and repeats are 512, 128 and 5 if they are None, or as much less as
    keeps a slow adapter to about a minute. profile: time every kernel.
    """

    prompt_tokens: int | None = None
    prefix: float | None = None
    decode_tokens: int | None = None
    depths: Sequence[int] = ()
    batches: Sequence[int] = ()
    clients: Sequence[int] = ()
    accept: float | None = None
    draft_rows: int | None = None
    repeats: int | None = None
    profile: bool = False

    def check(self, draft: str | None) -> None:
        """Raises RequestError for what cannot be measured. draft: the subject's."""
        given = (self.prompt_tokens, self.decode_tokens, self.repeats)
        counts = (*given, *self.depths, *self.batches, *self.clients)
        if min((n for n in counts if n is not None), default=1) < 1:
            raise RequestError(
                "Counts of tokens, depths, answers, clients and repeats must be at least 1."
            )
        if self.accept is not None and not 0 <= self.accept <= 1:
            raise RequestError(f"A probability is a number from 0 to 1, not {self.accept}.")
        if self.prefix is not None and not 0 < self.prefix < 1:
            raise RequestError(
                f"A prefix is a share of the prompt between 0 and 1, not {self.prefix}."
            )
        if self.prefix is not None and self.prompt_tokens == 1:
            raise RequestError("A prompt of one token has nothing to be cached before it.")
        if self.draft_rows is not None and (
            self.accept is None or not 1 <= self.draft_rows <= MAX_DRAFT
        ):
            raise RequestError(
                f"From 1 to {MAX_DRAFT} tokens can be drafted for a step, and it must be said how "
                "likely they are right (--accept)."
            )
        if draft is not None and self.accept is None:
            raise RequestError(
                "Prompts are random, so that no draft would be right: say how likely they are to "
                "be (--accept)."
            )
        if max(self.batches, default=1) > MAX_BATCH:
            raise RequestError(f"At most {MAX_BATCH} answers run at once, not {max(self.batches)}.")

    @property
    def batched(self) -> list[tuple[int, int]]:
        """The answers at once, and the tokens before them, of each test of a batch."""
        return [(rows, depth) for depth in self.depths or [BATCH_DEPTH] for rows in self.batches]

    @property
    def max_batch(self) -> int:
        """The most answers that run at once."""
        return min(max([1, *self.batches, *self.clients]), MAX_BATCH)

    @property
    def needed(self) -> int:
        """The positions that a context must hold."""
        deepest = max(self.depths, default=1) + (self.decode_tokens or 1)
        needed = [max(self.prompt_tokens or 1, deepest) + 1]
        needed += [batch_positions(*sizes, BATCH_TOKENS) for sizes in self.batched]
        if self.accept is not None:
            needed += [drafts_positions(*sizes, BATCH_TOKENS) for sizes in self.batched]
            needed.append(drafts_positions(1, 1, self.decode_tokens or Sizes().decode))
        if self.clients:
            most = Sizes()
            longest = self.prompt_tokens or most.prompt, self.decode_tokens or most.decode
            needed.append(longest[0] + max(2, longest[1]) + 1)
        return max(needed)
