"""Chooses between several engines: which has most of a prompt in its cache, how busy each is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

EngineT = TypeVar("EngineT", bound=Hashable)

BLOCK = 64  # tokens: a page of the cache
MOST = 1 << 15  # blocks that are remembered of each engine
ANSWER = 256  # tokens of a prompt that take as long as another answer is to be waited for


class Prefixes:
    """The prompts that were sent to each engine lately. Only the engine knows what its cache has:
    this is a guess, and a wrong one costs time."""

    def __init__(self) -> None:
        self._sent = defaultdict[Hashable, OrderedDict[int, None]](OrderedDict)

    def best_first(
        self, ids: Sequence[int], key: Hashable, answers: Mapping[EngineT, int]
    ) -> list[EngineT]:
        """The engines, by what this prompt would wait for. key: what else keys and values depend
        on. answers: those that each engine has now."""
        blocks = _blocks(ids, key)

        def cost(engine: EngineT) -> int:
            sent = self._sent[engine]
            found = sum(1 for _ in takewhile(sent.__contains__, blocks))
            return len(ids) - BLOCK * found + ANSWER * answers[engine]

        return sorted(answers, key=cost)

    def sent(self, ids: Sequence[int], key: Hashable, engine: Hashable) -> None:
        sent = self._sent[engine]
        for block in reversed(_blocks(ids, key)):  # the first of them is forgotten last
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > MOST:
            sent.popitem(last=False)

    def keep(self, engines: Iterable[Hashable]) -> None:
        """Forget all others."""
        kept = set(engines)
        for engine in [each for each in self._sent if each not in kept]:
            del self._sent[engine]


def _blocks(ids: Sequence[int], key: Hashable) -> list[int]:
    """Returns, for each whole block, a hash of all tokens up to its end."""
    found, last = [], hash(key)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        last = hash((last, *ids[end - BLOCK : end]))
        found.append(last)
    return found
