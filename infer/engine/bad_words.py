"""Words that an answer must not have, of several tokens each: the last one may not come after the
others. Words of one token are biases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The words of one answer. longest: how many tokens before a new one matter."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: of at least two tokens each."""
        # By the token before the last, so that of many words few are compared.
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        self.longest = 0
        for *before, last in words:
            self._by_last.setdefault(before[-1], []).append((before, last))
            self.longest = max(self.longest, len(before))

    def after(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that would complete a word. tokens: the last ones of the answer."""
        found = self._by_last.get(tokens[-1], ()) if tokens else ()
        return [last for before, last in found if [*tokens[-len(before) :]] == before]

    def forbid(self, mask: NDArray[np.uint32], tokens: Sequence[int]) -> None:
        """Take what `after` finds out of a mask, unless nothing else is in it."""
        if found := self.after(tokens):
            left = mask.copy()
            for token in found:
                left[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
            if left.any():
                mask[:] = left
