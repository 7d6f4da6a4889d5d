"""The interface of what drafts tokens on the GPU, for another model to verify them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infer.engine import scheduler
from infer.engine.steps import Steps
from infer.kernels.gpu.record import Copy, Part, Recording, StepQueue
from infer.kernels.state.sampler import SamplerChain


@dataclass(frozen=True)
class Drafting:
    """A sequence in a round. count: its drafts. place: the row of the verifying step that takes the
    first of them. forced: tokens that a constraint puts before them."""

    sequence: scheduler.Sequence
    slot: int
    count: int
    place: int
    forced: Sequence[int] = ()

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens that are known before the drafts."""
        return [*self.sequence.tokens, *self.forced] if self.forced else self.sequence.tokens


class Known(NamedTuple):
    """A sequence whose first `end` tokens are known."""

    sequence: scheduler.Sequence
    slot: int
    tokens: Sequence[int]
    end: int


class Drafter:
    """Drafts tokens on the GPU, in rounds. This one drafts none: drafts come from the text that is
    there (`speculation.PromptLookup`), or there are none.

    steps: of a model that drafts. gives: whether the host knows the tokens, or the GPU alone. ways:
    the values of `behind` with which a round may begin.
    """

    steps: tuple[Steps, ...] = ()
    ways: tuple[bool, ...] = ()

    gives: Literal["known", "unknown"] = "known"

    # The positions that it has computed

    def forget(self) -> None:
        """Assume an empty cache."""

    def grow(self, n_pages: int) -> None:
        """Have a cache of so many pages. Nothing recorded may be in use."""

    def forget_pages(self, pages: Sequence[int]) -> None:
        """These pages hold something else from here on."""

    def begin(
        self, sequence: scheduler.Sequence, computed: int, copy: tuple[int, int] | None
    ) -> None:
        """A sequence was given pages; its first `computed` positions are in the target's cache.
        copy: one page is copied to another, which is one of them."""

    def copies(self, page: int, to: int, positions: int) -> list[Copy]:
        """Returns the copies of so many positions from one page of its cache to another."""
        return []

    def follow(self, queue: StepQueue, known: Sequence[Known]) -> None:
        """Compute the positions that are missing, of several sequences in one step."""

    def accepted(self, sequence: scheduler.Sequence, drafted: int, right: int) -> None:
        """Note how many of a sequence's drafts in a round were right. The round began at the last
        of the sequence's `computed` positions."""

    # Rounds

    def recordings(self, prompt_tokens: int, chain: SamplerChain) -> list[Recording]:
        """Returns the recordings that a single answer to so long a prompt needs."""
        return []

    def first(
        self, sequences: int, chain: SamplerChain, kv_len: int, behind: bool
    ) -> tuple[Part, Part]:
        """Returns the parts that draft the first token for so many sequences: a step, and its
        sampling. behind: the step also computes the token before each last one, which is not cached
        yet if all drafts of the round before were right."""
        raise NotImplementedError

    def others(self, sequences: int, depth: int, chain: SamplerChain, kv_len: int) -> list[Part]:
        """Returns the parts that draft the other depth - 1 tokens, one for each."""
        return []

    def begin_round(self, queue: StepQueue, drafting: Sequence[Drafting], sequences: int) -> bool:
        """Write the rows of a round of so many sequences: these, and others without drafts. All
        their tokens have been read. Returns whether any sequence is `behind`."""
        return False

    def stop(self) -> None:
        """Make its steps leave nothing, until the next round."""
