"""Chooses between several engines: which has most of a prompt in its cache, how busy each is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

EngineT = TypeVar("EngineT", bound=Hashable)

BLOCK = 64  # tokens in a block, as many as in a page of the cache
MOST = 1 << 15  # the most blocks that are remembered for each engine
ANSWER = 256  # another answer on an engine is counted as so many more prompt tokens to compute


class Prefixes:
    """The prompts that were sent to each engine lately. Only an engine itself knows what is in its
    cache, so this is a guess; a wrong guess costs time, and no answer changes."""

    def __init__(self) -> None:
        self._sent = defaultdict[Hashable, OrderedDict[int, None]](OrderedDict)

    def best_first(
        self, ids: Sequence[int], key: Hashable, answers: Mapping[EngineT, int]
    ) -> list[EngineT]:
        """Returns the engines in the order of how long this prompt would wait there, the shortest
        first. key: what else the cached keys and values depend on, such as the adapter. answers:
        how many answers each engine has now."""
        blocks = _blocks(ids, key)

        def cost(engine: EngineT) -> int:
            sent = self._sent[engine]
            found = sum(1 for _ in takewhile(sent.__contains__, blocks))
            return len(ids) - BLOCK * found + ANSWER * answers[engine]

        return sorted(answers, key=cost)

    def sent(self, ids: Sequence[int], key: Hashable, engine: Hashable) -> None:
        sent = self._sent[engine]
        # In this order, the first block of a prompt is forgotten last.
        for block in reversed(_blocks(ids, key)):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > MOST:
            sent.popitem(last=False)

    def keep(self, engines: Iterable[Hashable]) -> None:
        """Forgets all engines but these."""
        kept = set(engines)
        for engine in [each for each in self._sent if each not in kept]:
            del self._sent[engine]


def _blocks(ids: Sequence[int], key: Hashable) -> list[int]:
    """Returns a hash for each whole block of a prompt: the hash of all tokens up to the block's
    end."""
    found, last = [], hash(key)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        last = hash((last, *ids[end - BLOCK : end]))
        found.append(last)
    return found
