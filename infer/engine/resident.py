"""The state of sequences that is already on the GPU, so that only changes are written."""

from __future__ import annotations

from collections.abc import Sequence

from infer.engine import scheduler
from infer.engine.scheduler import slot_of
from infer.engine.steps import Steps
from infer.kernels.gpu.record import Recorded, StepQueue
from infer.kernels.state.kv_cache import KVCache
from infer.kernels.state.sampler import Sampler
from infer.kernels.state.step import pack_stopped
from infer.models.blocks.rope import rope_table
from infer.models.loading.config import RopeConfig
from infer.sampling import SamplingParams


class Resident:
    """pages: those of each slot's sequence, and windows: those of layers with a window, where these
    have their own. table_length: of the rotary table that is there
    (`rope.table_length`). unknown: slots whose next row the GPU does not know, so
    that the host has to write it (`set_next`)."""

    def __init__(self, steps: Steps, sampler: Sampler, rope: RopeConfig, slots: int) -> None:
        self._steps, self._sampler, self._rope, self._slots = steps, sampler, rope, slots
        self.table_length = 0
        self.forget()

    def forget(self) -> None:
        """Assume nothing about what the GPU has."""
        self.pages: list[list[int]] = [[] for _ in range(self._slots)]
        self.windows: list[list[int]] = [[] for _ in range(self._slots)]
        self.unknown: set[int] = set()
        self._rows: tuple[int, ...] | None = None  # slots of the rows of the next step

    def drop(self) -> None:
        """Do nothing: this object records no steps."""

    def begin(
        self,
        slot: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int],
    ) -> None:
        """An answer's sequence was given this slot, perhaps once more. generated: its tokens after
        the prompt."""
        record = params.record(
            vocab_size=self._sampler.vocab_size,
            prompt_tokens=len(prompt),
            context=self._steps.context,
            stop_ids=stop_ids,
        )
        own = params.logit_bias, generated, params.allowed_token_ids
        self._sampler.begin(slot, record[0], prompt, *own)

    def rotate_for(self, length: int) -> None:
        """Have the rotary table of this length there (`table_length`)."""
        if length != self.table_length:
            table = rope_table(self._rope, self._steps.caches.positions, length)
            self._steps.device.write(self._steps.caches.rope.table, table)
            self.table_length = length

    def give_pages(self, slot: int, pages: Sequence[int], windows: Sequence[int] = ()) -> None:
        caches = self._steps.caches
        _assign(caches.kv, slot, self.pages, pages)
        if caches.windows is not None:
            _assign(caches.windows, slot, self.windows, windows)

    # Rows

    def prefilled(self, slots: Sequence[int], sampled: tuple[int, ...]) -> None:
        """A step has rows of these slots' prompts, and samples the next rows of some."""
        self._rows = sampled or None
        self.unknown.difference_update(slots)

    def verified(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """A step has these drafts. How many are right, and so the next row, the host finds out."""
        self._rows = None
        for slot, draft in zip(slots, drafts, strict=True):
            (self.unknown.add if draft else self.unknown.discard)(slot)

    def set_next(self, sequence: scheduler.Sequence, adapter: str | None) -> None:
        """Write the next row of a sequence whose tokens have all been read."""
        slot, number = slot_of(sequence), self._steps.adapters.number(adapter)
        self._sampler.set_next(slot, sequence.tokens[-1], len(sequence.tokens) - 1, number)
        self.unknown.discard(slot)
        self._rows = None

    def discard(self, queue: StepQueue, recorded: Recorded, rows: int) -> None:
        """Throw away a recorded step of so many rows. If it is finished it is sent nevertheless,
        as wgpu-native would never free it, with rows that have stopped, so that it leaves nothing.
        """
        if recorded.is_finished:
            self._steps.device.write(self._steps.step, pack_stopped(rows))
            self._rows = None
            queue.send(recorded)
        else:
            queue.drop(recorded)

    def has(self, slots: tuple[int, ...]) -> bool:
        """Whether the step before has left exactly the rows of these slots in the step buffer."""
        return slots == self._rows

    def take(self, slots: tuple[int, ...]) -> bool:
        """The next step has a row of each of these slots. Returns whether it has to take them from
        the table of sequences, because the step before has not left them in place."""
        joins = slots != self._rows
        if joins:
            self._sampler.take_rows_of(slots)
            self._rows = slots
        return joins


def _assign(cache: KVCache, slot: int, known: list[list[int]], pages: Sequence[int]) -> None:
    """Write what differs from the known pages of a slot into the page table."""
    before, same = known[slot], 0
    while same < min(len(before), len(pages)) and before[same] == pages[same]:
        same += 1
    if same < len(pages):
        cache.assign(slot, same, pages[same:])
    known[slot] = list(pages)
