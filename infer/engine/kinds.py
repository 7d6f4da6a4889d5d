"""The kinds of step that a model has: rows of one prompt, of several, of a batch, with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.speculation import MAX_DRAFT
from infer.kernels.gpu.device import Device
from infer.kernels.lowering.target import MAX_VEC_ROWS, StepKind, padded_rows, stride
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.matmul_rows import few_rows
from infer.kernels.state.step import MAX_PROMPTS
from infer.models.blocks.layers import DecoderConfig

Output = Literal["logits", "hidden states", "all logits"]

_SHORT = 256, 128  # rows of prefill steps with their own tile sizes; a CPU has one size for all
_SHORTEST = 64, 32, 16  # rows of prefill steps without tiles, which read each weight once
# Rows that kernels of batches are made for.
_BATCHES = 2, 4, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, MAX_BATCH
_SOFTWARE_BATCHES = 4, 8  # besides the largest; software kernels take at most 16 rows


@dataclass(frozen=True)
class Kind:
    """A kind of step. shape: its rows. output: the logits of rows that are sampled, the hidden
    states of all rows after the last norm, or the logits of all rows. by_row: rows have LoRA
    adapters of their own. given: rows are given for some of its tokens (`prompts.Attachment`)."""

    shape: StepKind
    output: Output = "logits"
    by_row: bool = False
    given: bool = False

    @property
    def rows(self) -> int:
        """The most rows of the step."""
        return self.shape.rows

    @property
    def gathers(self) -> int:
        """The most rows that have logits, where the step names them; 0: all rows have some."""
        return 0 if self.rows == 1 else self.shape.logits or 0

    def with_adapters(self, by_row: bool) -> Kind:
        """Returns this kind of step, with rows that have LoRA adapters of their own or without."""
        return replace(self, by_row=by_row)

    def with_given(self, given: bool) -> Kind:
        """Returns this kind of step, with rows given for some of its tokens or without."""
        return replace(self, given=given)

    def giving(self, output: Output) -> Kind:
        """Returns a kind of step of as many rows of one sequence, with another output."""
        shape = StepKind(self.rows, invariant=self.shape.invariant)
        return Kind(shape, output, self.by_row, self.given)


class Kinds:
    """All kinds of step of one model.

    alone: steps of one prompt, those of most rows first; the last has one row, and is a decode
    step, too. packed: steps of up to `prompts` prompts, where there are any. batches: the row
    counts of steps whose rows each name their sequence, the smallest first. draft_rows: those of
    them in which several rows may belong to one sequence, at consecutive positions. scored: a step
    of one sequence that gives the logits of all rows.
    """

    def __init__(
        self,
        device: Device,
        config: DecoderConfig,
        options: EngineOptions,
        *,
        chunk: int,
        draft_rows: int = 0,
    ) -> None:
        """chunk: the most rows of a prompt in a step. draft_rows: the most rows of a step that
        verifies drafts; 0 if none does."""
        self._has_states = any(config.states)
        self._invariant = options.invariant
        draft_rows = next(rows for rows in (0, *_BATCHES) if rows >= draft_rows)
        self.most_rows = max(options.max_batch, draft_rows)  # that are sampled
        self.batches = _batches(self.most_rows, device)
        self.draft_rows = [rows for rows in self.batches if rows <= draft_rows]
        short: tuple[int, ...] = ()
        if not device.software:
            few = few_rows(Tuning(device), 16) and not options.invariant
            short = *_SHORT, *(_SHORTEST if few else ())
        prompts = [chunk, *(rows for rows in short if rows < chunk)]
        # A state is scanned along the rows of one sequence.
        single = options.max_batch == 1 or options.invariant or self._has_states
        self.prompts = 1 if single else min(MAX_PROMPTS, self.batches[-1])
        self.packed = [
            self._kind(rows, logits=self.prompts, prompts=self.prompts)
            for rows in (prompts if self.prompts > 1 else ())
        ]
        self.alone = [self._kind(rows, logits=1) for rows in (*prompts, MAX_VEC_ROWS, 1)]
        # For more than a few rows, matmul writes whole tiles.
        tile = padded_rows(MAX_VEC_ROWS + 1)
        has_room = device.limits.max_binding >= logits_bytes(config.vocab_size, tile)
        scored = min(chunk, tile if has_room else MAX_VEC_ROWS)
        self.scored = self._kind(scored).giving("all logits")

    def only_decode(self) -> None:
        """Keep no kinds but those with one row of each sequence."""
        self.alone, self.packed, self.prompts = self.alone[-1:], [], 1

    def _kind(
        self,
        rows: int,
        *,
        logits: int | None = None,
        batch: bool = False,
        prompts: int = 1,
        drafts: int = 0,
    ) -> Kind:
        return Kind(StepKind(rows, logits, batch, self._invariant, prompts, drafts))

    @property
    def chunk(self) -> int:
        """The most rows of a prompt in a step."""
        return self.alone[0].rows

    @property
    def decode(self) -> Kind:
        """The kind of step of one row."""
        return self.alone[-1]

    def prefill(self, rows: int, prompts: int = 1) -> Kind:
        """The kind of step of so many rows of a prompt, or of several."""
        kinds = self.alone if prompts == 1 else self.packed
        return next(kind for kind in reversed(kinds) if kind.rows >= rows)

    def batch(self, rows: int) -> Kind:
        """The kind of step of so many rows, each of a sequence of its own."""
        return self.decode if rows == 1 else self._kind(self.rows_of(rows), batch=True)

    def drafts(self, rows: int) -> Kind:
        """The kind of step of so many rows, several of which may be of one sequence."""
        drafts = MAX_DRAFT if self._has_states else 0
        return self._kind(self.rows_of(rows), batch=True, drafts=drafts)

    def rows_of(self, rows: int) -> int:
        """Returns the rows of the smallest kind of batch that has room for so many."""
        return next(n for n in self.batches if n >= rows)

    @property
    def first(self) -> list[Kind]:
        """The kinds of step that one answer needs, those with drafts included."""
        few = [self.drafts(rows) for rows in self.draft_rows if rows <= MAX_VEC_ROWS]
        return [*self.alone, *few]

    @property
    def largest(self) -> list[Kind]:
        """The kinds of batch that take most room."""
        return [
            *([self._kind(rows, batch=True) for rows in self.batches[-1:]]),
            *(self.drafts(rows) for rows in self.draft_rows[-1:]),
        ]

    @property
    def of_company(self) -> list[Kind]:
        """The kinds of step that answers need when several are computed together."""
        batches = [self._kind(rows, batch=True) for rows in self.batches]
        drafts = map(self.drafts, self.draft_rows)
        return list(dict.fromkeys([*batches, *self.packed, *drafts]))


def largest_chunk(bound: int, options: EngineOptions) -> int:
    """Returns the most rows of a prompt in a step. bound: for which buffers have room."""
    if options.invariant:  # kernels of a few rows have no more
        bound = min(bound, MAX_BATCH)
    return max(16, min(options.prefill_chunk, options.context, bound))


def logits_bytes(vocab_size: int, rows: int) -> int:
    """Returns the bytes of the logits of so many rows."""
    return 4 * stride(vocab_size) * rows


def _batches(most: int, device: Device) -> Sequence[int]:
    """Rows of the kinds of batches. A CPU has few: compiling takes it longer than idle rows."""
    if most == 1:
        return []
    enough = next(rows for rows in _BATCHES if rows >= most)
    kinds = _SOFTWARE_BATCHES if device.software else _BATCHES
    return [*(rows for rows in kinds if rows < enough), enough]
