"""Pages of the KV cache and states of layers in host memory: what the GPU had no room for.

Everything has a name that stands for all tokens before it, and for what keys and values depend on
besides these: a page is found below the name of the page before it, wherever that one is. The
memory may be that of other models, too: what else keys and values of this one depend on is in its
`owner`, so that another process with the same owner finds what this one has left.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from infer.engine.host_memory import Bytes, HostMemory, Kept
from infer.engine.prefixes import common_length, page_names

Kind = Literal["page", "state", "window"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_LABEL = struct.Struct("<16s16sBB")  # owner, before, kind and how many tokens, which come next


@dataclass(frozen=True)
class Name:
    """What is kept: keys and values of these tokens, the first of a page behind the page `before`,
    in all layers or those of one pool; or the state after them."""

    before: bytes
    tokens: tuple[int, ...]
    kind: Kind = "page"

    def label(self, owner: bytes) -> bytes:
        head = _LABEL.pack(owner, self.before, _KINDS.index(self.kind), len(self.tokens))
        return head + np.array(self.tokens, np.uint32).tobytes()

    @classmethod
    def of(cls, label: bytes) -> Name:
        """The name with this label."""
        _, before, kind, count = _LABEL.unpack_from(label)
        tokens = np.frombuffer(label, np.uint32, count, _LABEL.size)
        return cls(before, tuple(tokens.tolist()), _KINDS[kind])


@dataclass(frozen=True)
class Found:
    """The beginning of a prompt that can be had, of `length` positions. pages: in order, behind
    those that the GPU has. state: after `length` positions, where layers have states. windows:
    where layers with a window have pages of their own, those of the last pages, from number
    first_window on; None where the GPU has it."""

    length: int
    pages: tuple[Name, ...]
    state: Name | None = None
    windows: tuple[Name | None, ...] = ()
    first_window: int = 0


@dataclass(frozen=True)
class HostCacheStats:
    """Bytes that are held, and that there is room for, with those of other models that share the
    memory; pages and states; tokens that came back."""

    nbytes: int
    capacity: int
    pages: int
    states: int
    restored: int


@dataclass(eq=False)
class HostCache:
    """What one engine keeps in host memory of at most `capacity` bytes, of which what was used
    longest ago goes first. It is taken when it is first needed, unless it is given (`share`)."""

    capacity: int
    restored: int = 0
    _owner: bytes = bytes(16)
    _memory: HostMemory | None = None
    _held: dict[Name, Kept] = field(default_factory=dict)  # some of it may have gone
    # The tokens of what is held behind a page, by its name.
    _behind: dict[tuple[bytes, Kind], list[tuple[int, ...]]] = field(default_factory=dict)
    _most_held: int = 1024  # before what has gone is left out

    def share(self, memory: HostMemory, owner: bytes) -> None:
        """Keep everything in this memory from now on, under 16 bytes that stand for all that keys,
        values and states depend on. What others have left there under these is found."""
        self.capacity, self._memory, self._owner = memory.capacity, memory, owner
        self._held.clear()
        self._behind.clear()
        for label, kept in memory.entries(owner):
            self._hold(Name.of(label), kept)

    @property
    def memory(self) -> HostMemory:
        if self._memory is None:
            self._memory = HostMemory(self.capacity)
        return self._memory

    @property
    def is_empty(self) -> bool:
        return not self._held

    @property
    def stats(self) -> HostCacheStats:
        held = list(self._held.items())
        if self._memory is None or not held:
            return HostCacheStats(0, self.capacity, 0, 0, self.restored)
        there = self._memory.there([kept for _, kept in held])
        own = [each for each, is_there in zip(held, there, strict=True) if is_there]
        pages, states = (sum(n.kind == kind for n, _ in own) for kind in ("page", "state"))
        nbytes = sum(kept.nbytes for _, kept in own)
        return HostCacheStats(nbytes, self._memory.room, pages, states, self.restored)

    def put(self, name: Name, data: Bytes, used: int | None = None) -> bool:
        """Keep data for others. Returns whether it is kept. used: when it last was, of
        time.monotonic_ns(), where that is not now; what was used since then stays."""
        used = time.monotonic_ns() if used is None else used
        if name in self:
            self.use([name], used)
            return True
        kept = self.memory.put(name.label(self._owner), data, used)
        if kept is not None:
            self._hold(name, kept)
        return kept is not None

    def read(self, name: Name, to: Bytes) -> bool:
        """Copy what is kept under a name. Returns whether it is there."""
        return name in self and self.memory.read(self._held[name], to)

    def use(self, names: Iterable[Name], used: int | None = None) -> None:
        """They are used now, or were at a time as for `put`. The first of them stays longest."""
        used = time.monotonic_ns() if used is None else used
        held = [kept for name in names if (kept := self._held.get(name)) is not None]
        self.memory.use(held, used)

    def _used_path(self, tokens: Sequence[int], key: Hashable, page_size: int) -> list[bytes]:
        """Returns the `page_names` of a prompt, whose whole pages are used now."""
        names = page_names(tokens, key, page_size)
        starts = range(0, page_size * (len(names) - 1), page_size)
        whole = [tuple(tokens[start : start + page_size]) for start in starts]
        self.use(Name(name, own) for name, own in zip(names, whole, strict=False))
        return names

    def close(self) -> None:
        """Hold nothing any more. Memory that was given stays."""
        self._memory = None
        self._held.clear()
        self._behind.clear()

    def __contains__(self, name: Name) -> bool:
        kept = self._held.get(name)
        if kept is None or self.memory.has(kept):
            return kept is not None
        self._forget(name)
        return False

    def _hold(self, name: Name, kept: Kept) -> None:
        if name in self._held:  # two engines have kept it
            return
        if len(self._held) >= self._most_held:
            held = list(self._held.items())
            there = self.memory.there([own for _, own in held])
            for (own, _), is_there in zip(held, there, strict=True):
                if not is_there:
                    self._forget(own)
            self._most_held = max(self._most_held, 2 * len(self._held))
        self._held[name] = kept
        self._behind.setdefault((name.before, name.kind), []).append(name.tokens)

    def _forget(self, name: Name) -> None:
        """It has gone."""
        del self._held[name]
        key = name.before, name.kind
        self._behind[key].remove(name.tokens)
        if not self._behind[key]:
            del self._behind[key]

    def _all_behind(self, before: bytes, kind: Kind) -> list[tuple[int, ...]]:
        """Returns the tokens of all that is behind a page."""
        behind = list(self._behind.get((before, kind), ()))
        return [tokens for tokens in behind if Name(before, tokens, kind) in self]

    def _closest(self, before: bytes, kind: Kind, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what has most of the first of these tokens behind a page."""
        behind = self._all_behind(before, kind)
        return max(behind, key=lambda own: common_length(own, tokens), default=())

    def find(
        self, tokens: Sequence[int], key: Hashable, cached: int, page_size: int, has_states: bool
    ) -> Found:
        """Returns the longest beginning of a prompt that can be had, if the GPU has `cached`
        positions of it. has_states: it ends at a state that is here. Its pages count as used."""
        names = self._used_path(tokens, key, page_size)
        first = cached // page_size
        pages, reach = list[Name](), cached
        for at in range(first, len(names)):
            rest = tuple(tokens[at * page_size : (at + 1) * page_size])
            best = self._closest(names[at], "page", rest)
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
            behind = self._all_behind(names[at], "state")
            own = max((t for t in behind if t == rest[: len(t)]), key=len, default=())
            if own:
                length = at * page_size + len(own)
                needed = -(-length // page_size) - first if length > cached else 0
                return Found(length, tuple(pages[:needed]), Name(names[at], own, "state"))
        return Found(0, ())

    def find_with_windows(
        self,
        tokens: Sequence[int],
        key: Hashable,
        cached: Sequence[tuple[tuple[int, ...], bool]],
        page_size: int,
        window: int,
    ) -> Found:
        """Returns as `find` does, where layers with a window have pages of their own: before its
        end a window is here or on the GPU. cached: of each page that the GPU has of the prompt, its
        tokens, and whether such a page is beside it."""
        pages, windows = list[Name | None](), list[Name | None]()
        reach = list[int]()  # how many positions of a page there are in all layers
        for at, before in enumerate(self._used_path(tokens, key, page_size)):
            rest = tuple(tokens[at * page_size : (at + 1) * page_size])
            own, has_window = cached[at] if at < len(cached) else ((), False)
            common, page, beside = common_length(own, rest), None, None
            best = self._closest(before, "page", rest)
            if common_length(best, rest) > common:
                own, has_window, common = best, False, common_length(best, rest)
                page = Name(before, best)
            if not common:
                break
            covered = common
            if not has_window:  # one beside a page of the GPU has to have all of its tokens
                wanted = rest[:common] if page is not None else own
                found = self._closest(before, "window", wanted)
                covered = min(common, common_length(found, wanted))
                if page is None and found[: len(own)] != own:
                    covered = 0
                beside = Name(before, found, "window") if covered else None
            pages.append(page)
            windows.append(beside)
            reach.append(covered)
            if common < page_size:
                break
        end, first, length = len(pages), 0, 0
        while end:
            length = (end - 1) * page_size + reach[end - 1]
            first = max(0, length - window) // page_size
            own_windows = range(end - 2, first - 1, -1)
            lacking = next((i for i in own_windows if reach[i] < page_size), None)
            if reach[end - 1] and lacking is None:
                break
            end = end - 1 if lacking is None else lacking + 1
        kept = tuple(page for page in pages[:end] if page is not None)
        return Found(length if end else 0, kept, None, tuple(windows[first:end]), first)
