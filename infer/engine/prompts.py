"""Prompts: token ids, and rows of activations that stand for some of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import RequestError

FIRST_GIVEN = 1 << 30  # ids from here on, up to twice that, stand for rows that are given


@dataclass(frozen=True, eq=False)
class Attachment:
    """Rows of activations in a prompt, as an encoder makes them of an image. start: the place of
    the first among the prompt's ids. rows: float32 [count, hidden_size]."""

    start: int
    rows: NDArray[np.float32]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @cached_property
    def ids(self) -> list[int]:
        """The ids of the rows, which follow from their contents: equal rows are found in a cache as
        equal tokens are."""
        data = np.ascontiguousarray(self.rows, np.float32)
        digest = hashlib.shake_128(repr(data.shape).encode() + data.tobytes())
        ids = np.frombuffer(digest.digest(4 * len(data)), np.uint32)
        return [int(i) for i in ids % FIRST_GIVEN + FIRST_GIVEN]


class Prompt(Sequence[int]):
    """Token ids, some of which stand for rows of attachments."""

    def __init__(self, ids: Sequence[int], attachments: Sequence[Attachment] = ()) -> None:
        """ids: any at the places of attachments, which are replaced. Raises RequestError where
        these overlap or reach beyond the ids."""
        self.ids: Sequence[int] = list(ids) if attachments else ids
        self.attachments = tuple(sorted(attachments, key=lambda each: each.start))
        end = 0
        for each in self.attachments:
            if each.start < end or each.end > len(ids):
                raise RequestError(
                    f"The rows for tokens {each.start} to {each.end} do not fit into a prompt of "
                    f"{len(ids)} tokens, or overlap others. Give each attachment its own place."
                )
            end = each.end
            assert isinstance(self.ids, list)
            self.ids[each.start : end] = each.ids

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        return ids if isinstance(ids, Prompt) else cls(ids)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self.ids[at]

    @property
    def tokens(self) -> Sequence[int]:
        """The ids that do not stand for rows of attachments."""
        if not self.attachments:
            return self.ids
        return [i for i in self.ids if i < FIRST_GIVEN]

    def given(self, start: int, end: int) -> list[tuple[int, NDArray[np.float32]]]:
        """The rows that stand for ids between two places, each with the place of the first."""
        found = []
        for each in self.attachments:
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                found.append((first, each.rows[first - each.start : last - each.start]))
        return found
