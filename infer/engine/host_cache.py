"""Pages of the KV cache and states of layers in host memory: what the GPU had no room for.

Everything has a name that stands for all tokens before it, and for what keys and values depend on
besides these: a page is found below the name of the page before it, wherever that one is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from infer.engine.prefixes import common_length, page_names

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Name:
    """What is kept: keys and values of these tokens, the first of a page behind the page `before`,
    or the state after them."""

    before: bytes
    tokens: tuple[int, ...]
    is_state: bool = False


@dataclass(frozen=True)
class Found:
    """The beginning of a prompt that can be had, of `length` positions. pages: in order, behind
    those that the GPU has. state: after `length` positions, where layers have states."""

    length: int
    pages: tuple[Name, ...]
    state: Name | None = None


@dataclass(frozen=True)
class HostCacheStats:
    """Bytes that are held, and that there is room for; pages and states; tokens that came back."""

    nbytes: int
    capacity: int
    pages: int
    states: int
    restored: int


@dataclass(eq=False)
class HostCache:
    """At most `capacity` bytes, of which the least recently used go first."""

    capacity: int
    nbytes: int = 0
    restored: int = 0
    _held: OrderedDict[Name, Bytes] = field(default_factory=OrderedDict)
    # The tokens of pages and of states behind a page, by its name.
    _behind: dict[tuple[bytes, bool], list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def stats(self) -> HostCacheStats:
        states = sum(name.is_state for name in self._held)
        pages = len(self._held) - states
        return HostCacheStats(self.nbytes, self.capacity, pages, states, self.restored)

    def put(self, name: Name, data: Bytes) -> None:
        """Keep data for others. What is larger than all there is room for is not kept."""
        if name in self._held:
            self._held.move_to_end(name)
            return
        if data.nbytes > self.capacity:
            return
        while self.nbytes + data.nbytes > self.capacity:
            self._drop(next(iter(self._held)))
        self._held[name] = data
        self._behind.setdefault((name.before, name.is_state), []).append(name.tokens)
        self.nbytes += data.nbytes

    def get(self, name: Name) -> Bytes | None:
        """What is kept under a name, which now goes last; None if it is gone."""
        data = self._held.get(name)
        if data is not None:
            self._held.move_to_end(name)
        return data

    def clear(self) -> None:
        self._held.clear()
        self._behind.clear()
        self.nbytes = 0

    def _drop(self, name: Name) -> None:
        self.nbytes -= self._held.pop(name).nbytes
        key = name.before, name.is_state
        self._behind[key].remove(name.tokens)
        if not self._behind[key]:
            del self._behind[key]

    def find(
        self, tokens: Sequence[int], key: Hashable, cached: int, page_size: int, has_states: bool
    ) -> Found:
        """Returns the longest beginning of a prompt that can be had, if the GPU has `cached`
        positions of it. has_states: it ends at a state that is here."""
        names = page_names(tokens, key, page_size)
        first = cached // page_size
        pages, reach = list[Name](), cached
        for at in range(first, len(names)):
            rest = tuple(tokens[at * page_size : (at + 1) * page_size])
            behind = self._behind.get((names[at], False), ())
            best = max(behind, key=lambda own: common_length(own, rest), default=())
            common = common_length(best, rest)
            if at * page_size + common > reach:
                pages.append(Name(names[at], best))
                reach = at * page_size + common
            if common < page_size:
                break
        if not has_states:
            return Found(reach, tuple(pages))
        for at in range(reach // page_size, -1, -1):
            rest = tuple(tokens[at * page_size : min((at + 1) * page_size, reach)])
            behind = self._behind.get((names[at], True), ())
            own = max((t for t in behind if t == rest[: len(t)]), key=len, default=())
            if own:
                length = at * page_size + len(own)
                needed = -(-length // page_size) - first if length > cached else 0
                return Found(length, tuple(pages[:needed]), Name(names[at], own, is_state=True))
        return Found(0, ())
